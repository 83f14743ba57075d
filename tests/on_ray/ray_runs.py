"""Small merges on Ray: their recipe, their processes, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml
from watched import is_alive

from opd.config import Recipe
from opd.config.load import load_recipe
from opd.models.causal_lm import CausalLM
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages.supervised import new_base

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
STEPS = 10


def settings(folder: Path) -> dict:
    """A merge of two random teachers into a random student, all written to `folder` once."""
    domains = {
        name: {"source": f"procedural:{name}", "params": {"digits": 3}, "prompts": 200}
        for name in ("sort", "add3")
    }
    recipe = Recipe.model_validate(
        {
            "name": "ray",
            "model": {"config": MODEL},
            "domains": domains,
            "evaluation": {"prompts_per_domain": 20},
        }
    )
    for seed, name in enumerate(("base", "sort", "add3")):
        if not (folder / name).exists():
            new_base(recipe.model_copy(update={"seed": seed}), folder / name)
    return {
        "name": "ray",
        "model": {"path": str(folder / "base")},
        "teachers": {name: {"path": str(folder / name)} for name in domains},
        "domains": domains,
        "rollout": {"max_new_tokens": 40, "max_sequence": 60},
        "distill": {
            "steps": STEPS,
            "prompts_per_domain": 8,
            "checkpoint_every": 3,
            "optim": {"lr": 0.01},
        },
        "runtime": {"threads": 1},  # where left out, it depends on the launch, and the bits on it
        "baselines": {"methods": []},
        "evaluation": {"prompts_per_domain": 20},
    }


def write_recipe(folder: Path, **changes: object) -> Path:
    """`settings` with `changes`, as a file."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings(folder) | changes, sort_keys=False))
    return path


def undisturbed(recipe: Path, stage: str = "merge") -> Path:
    """The run folder of the same stage in this process, without Ray."""
    loaded, out = load_recipe([recipe]), recipe.parent / "undisturbed"
    with RunFolder.create(out, loaded) as run:
        run_stage(loaded, run, stage)
    return out


class Run:
    """`opd distill`, or another `verb`, in a process of its own, whose working directory is above `out`."""

    def __init__(self, recipe: Path, out: Path, *options: str, verb: str = "distill") -> None:
        self.out = out
        self.said = out.parent / f"{out.name}-{time.monotonic_ns()}.txt"
        command = [
            sys.executable,
            "-m",
            "opd.pipelines.cli",
            verb,
            str(recipe),
            "--out",
            str(out),
            *options,
        ]
        quiet = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        with self.said.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, env=os.environ | quiet, cwd=out.parent
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def finish(self, seconds: float = 400) -> tuple[int, str]:
        """Exit status and what was printed."""
        status = self.process.wait(seconds)
        return status, self.said.read_text()

    def until(self, what: Callable[[], object], seconds: float = 240) -> None:
        """Wait for `what` while the run goes on."""
        deadline = time.monotonic() + seconds
        while not what():
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < deadline, self.said.read_text()
            time.sleep(0.005)

    def pids(self, actor: str) -> list[int]:
        """The processes an actor has had, the newest last."""
        log = self.out / "logs" / f"{actor}.log"
        text = log.read_text() if log.exists() else ""
        return [int(pid) for pid in re.findall(rf"{actor} is process (\d+)", text)]

    def all_pids(self) -> list[int]:
        """Every process of every actor."""
        return [pid for log in (self.out / "logs").glob("*.log") for pid in self.pids(log.stem)]

    def kill_in_step(self, actor: str, step: int, held: str | None = None, stage: str = "merge") -> None:
        """SIGKILL `actor` while a step after `step` is under way: an actor that is stopped first leaves it
        unfinished until it is killed. `held` is stopped until `actor` has a new process, where the run could
        end without that.
        """
        self.until(lambda: len(rows(self.out, stage)) >= step)
        written = wal_bytes(self.out, stage)
        self.until(lambda: wal_bytes(self.out, stage) > written)  # the student is writing
        had = self.pids(actor)
        os.kill(had[-1], signal.SIGSTOP)
        time.sleep(0.3)
        with self._stopped(held):
            os.kill(had[-1], signal.SIGKILL)
            if held is not None:
                self.until(lambda: len(self.pids(actor)) > len(had))

    @contextlib.contextmanager
    def _stopped(self, actor: str | None) -> Iterator[None]:
        pid = None if actor is None else self.pids(actor)[-1]
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            if pid is not None:
                os.kill(pid, signal.SIGCONT)


def rows(out: Path, stage: str = "merge") -> list[dict]:
    """The lines of a stage's metrics that are whole."""
    path = out / "stages" / stage / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wal_bytes(out: Path, stage: str = "merge") -> int:
    """Bytes in the log of a stage's rollouts that were written."""
    total = 0
    for path in (out / "stages" / stage / "wal").glob("*"):
        try:
            total += path.stat().st_blocks
        except FileNotFoundError:
            continue
    return total


def digest(out: Path) -> str:
    """Of the merged weights."""
    return CausalLM.from_pretrained(out / "merged").digest()


LEARNT = ("step", "tokens/student", "kl/mean", "reward/mean", "grad_norm", "lr")


def learnt(out: Path) -> list[dict]:
    """What each step was learnt from, and its gradient: equal for equal tokens."""
    return [{key: row[key] for key in LEARNT} for row in rows(out)]


def ended(pids: list[int], seconds: float = 120) -> bool:
    """Whether none of `pids` is a live process within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(is_alive(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False
