"""Agents with tools in sandboxes, engines and teachers on servers of SGLang's and vLLM's dialect, Ray, and a
student that writes ahead, in one run, while every part of it is killed in turn. Every token that was learnt
from is then compared with the weights that its version names.
"""

import contextlib
import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import yaml
from ray_runs import Run, ended, rows
from safetensors.torch import load_file
from served_models import write_vllm_models
from served_writing import rescored
from watched import is_alive
from whole_picture import AHEAD, LEARNT, LOST, PROMPTS, STEPS, TURNS, whole_recipe

from opd.errors import StorageError
from opd.models.causal_lm import CausalLM
from opd.pipelines.launch.ray.cluster import descendant_processes
from opd.storage.wal import read_log

pytest.importorskip("ray")
pytest.importorskip("orjson", reason="needs the extra sglang")
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3000)]
SECONDS = 1500
Logged = dict[str, list[int]]


class Whole:
    """One run, and those who kill its parts."""

    def __init__(self, folder: Path, engine: str, seed: int, **changes: Any) -> None:
        self.folder, self.notes, self.rng = folder, folder / "notes", random.Random(seed)
        self.models = write_vllm_models(folder / "models")
        recipe = whole_recipe(self.models, self.notes, engine, **changes)
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump(recipe, sort_keys=False))
        self.seen: list[Logged] = []
        """What the log held at each kill."""

    def start(self, *options: str, verb: str = "distill") -> Run:
        self.run = Run(self.recipe, self.folder / "run", *options, verb=verb)
        return self.run

    def server(self, group: str) -> int:
        """One of a group's that is not dead already, or 0."""
        pids = [int(file.read_text() or 0) for file in sorted((self.notes / group).glob("*.pid"))]
        return self.rng.choice([pid for pid in pids if pid and is_alive(pid)] or [0])

    def kill(self, part: str, step: int) -> None:
        """SIGKILL `part` at a moment after `step` steps, while the student writes; a server's group by its
        name.
        """
        run = self.run
        run.until(lambda: len(rows(run.out)) >= step, SECONDS)
        time.sleep(self.rng.random() * 0.5)
        pid = 0

        def found() -> bool:
            nonlocal pid
            pid = self._find(part)
            return pid > 0

        before = self.run.pids(part)
        while True:
            run.until(found, SECONDS)
            self.seen.append(self.logged())
            with contextlib.suppress(ProcessLookupError):  # a command may have ended meanwhile
                os.kill(pid, signal.SIGKILL)
                break
        if part.startswith("trainer"):
            run.until(lambda: len(run.pids(part)) > len(before), SECONDS)

    def _find(self, part: str) -> int:
        if part == "sandbox":
            return next(iter(self.wardens()), 0)
        if part == "raylet":
            names = {pid: name_of(pid) for pid in descendant_processes(self.run.process.pid)}
            return next((pid for pid, name in names.items() if name.endswith("/raylet")), 0)
        if part.startswith(("trainer", "server")):
            return (self.run.pids(part) or [0])[-1]
        return self.server(part)

    def wardens(self) -> list[int]:
        """The processes that watch commands in sandboxes."""
        trainers = [pid for log in self.run.out.glob("logs/trainer*.log") for pid in self.run.pids(log.stem)]
        commands = [pid for trainer in trainers for pid in descendant_processes(trainer)]
        return [pid for pid in commands if "warden" in name_of(pid, whole=True)]

    def logged(self) -> Logged:
        """Tokens that the student has written, by request."""
        found: Logged = {}
        for folder in (self.run.out / "stages" / "merge").glob("wal*"):  # one of each rank
            try:
                contents = read_log(folder)
            except (StorageError, FileNotFoundError):
                continue
            assert contents.report.damage is None
            found |= {uid: one.token_ids.tolist() for uid, one in contents.requests().items()}
        return found

    def assert_right(self, evaluated: bool = False) -> None:
        """Every step was made, of tokens that were written once and as their weights write them. `evaluated`:
        the servers had weights for that last.
        """
        found = rows(self.run.out)
        assert [row["step"] for row in found] == list(range(1, STEPS + 1))
        assert max(row.get("staleness/max", 0.0) for row in found) <= AHEAD
        learnt: dict[str, dict[str, Any]] = {}
        for line in (self.folder / LEARNT).read_text().splitlines():
            one = json.loads(line)
            before = learnt.setdefault(one["uid"], one)
            assert one["response"] == before["response"]  # a step that was made again learns from the same
        assert len(learnt) == 2 * PROMPTS * STEPS
        self._assert_kept(learnt)
        self._assert_drawn(list(learnt.values()), evaluated)
        self._assert_observed(learnt)

    def _assert_kept(self, learnt: dict[str, dict[str, Any]]) -> None:
        """No token is lost that was in the log when something was killed."""
        looked = 0
        for logged in self.seen:
            for uid, tokens in logged.items():
                own = learnt.get(uid) or learnt.get(uid.rpartition("/")[0])
                if own is None or not tokens:  # for a step after the last
                    continue
                looked += 1
                written = [t for t, mine in zip(own["response"], own["mask"], strict=True) if mine]
                if own["uid"] == uid:
                    assert written[: len(tokens)] == tokens
                else:
                    turn = turns_of(own)[int(uid.rpartition("/")[2])]
                    assert turn[: len(tokens)] == tokens
        assert looked

    def _assert_drawn(self, learnt: list[dict[str, Any]], evaluated: bool) -> None:
        """The log-probability of each token is that of a student of its version."""
        samples = tiny.samples([(len(one["prompt"]), 1) for one in learnt])
        for sample, one in zip(samples, learnt, strict=True):
            sample.prompt_ids = np.array(one["prompt"], dtype=np.int32)
            sample.response_ids = np.array(one["response"], dtype=np.int32)
        told = np.concatenate([one["logprobs"] for one in learnt])
        versions = np.concatenate([one["versions"] for one in learnt])
        right = ~np.concatenate([one["mask"] for one in learnt])
        assert len(set(versions[~right].tolist())) > STEPS / 2
        model = CausalLM.from_pretrained(self.models["a"])
        files = sorted(
            (self.notes / "engines").glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns
        )
        versions_of = [
            (file, *file.name.split(".")[:2]) for file in files
        ]  # a label of each life of a trainer
        labels = list(dict.fromkeys(label for _, label, _ in versions_of))
        for file, label, number in versions_of:
            if evaluated and label == labels[-1]:
                continue
            version = int(number)
            model.load_weights(load_file(file).items())
            due = np.concatenate(rescored(model, samples, 1.0))
            right |= (versions == version) & (np.abs(due - told) < 1e-4)
        assert right.all(), [(versions[at], told[at]) for at in np.flatnonzero(~right)[:5]]

    def _assert_observed(self, learnt: dict[str, dict[str, Any]]) -> None:
        """A sandbox kept its files over whatever was killed; one whose command was killed says so."""
        said = [one["episode"]["info"] for one in learnt.values() if one["domain"] == "sort"]
        assert len(said) == PROMPTS * STEPS
        whole = {f"turn{turn}": str(turn + 1) for turn in range(TURNS - 1)}
        others = [info for info in said if info != whole]
        assert len(others) <= 1, others
        assert all(LOST in info.values() or "" in info.values() for info in others)


def name_of(pid: int, whole: bool = False) -> str:
    """The program of a process, or its whole command line; nothing of one that is gone."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        return words if whole else words.partition("\0")[0]
    return ""


def turns_of(own: dict[str, Any]) -> list[list[int]]:
    """What the student wrote in each turn of an episode."""
    turns: list[list[int]] = []
    before = False
    for token, mine in zip(own["response"], own["mask"], strict=True):
        if mine and not before:
            turns.append([])
        if mine:
            turns[-1].append(token)
        before = mine
    return turns


def test_every_part_is_killed_on_a_cluster_that_is_there(tmp_path, cluster):
    """By `opd run`, whose evaluation then uses the same servers."""
    whole = Whole(tmp_path, "sglang", seed=0)
    parts = ["engines", "sandbox", "server-1", "add3"]
    whole.rng.shuffle(parts)
    with whole.start("--launch.address", cluster.address, verb="run") as run:
        for number, part in enumerate([*parts, "trainer"]):
            whole.kill(part, 1 + 2 * number)
        status, said = run.finish(SECONDS)
        assert status == 0, said
    assert "server engines-1: its actor is gone" in said
    assert re.search(r"server engines-\d ended with exit status 137", said)
    assert "server add3-0 ended with exit status 137" in said
    assert "trainer died" in said
    whole.assert_right(evaluated=True)
    assert ended(run.all_pids())


def test_ranks_share_servers_and_the_node_is_killed(tmp_path):
    """On a cluster of the run's own, whose loss ends it with one sentence."""
    train = {"ranks": 2, "timeout_seconds": 60}
    whole = Whole(tmp_path, "vllm", seed=1, train=train)
    with whole.start() as run:
        for number, part in enumerate(["engines", "trainer-1", "sort"]):
            whole.kill(part, 1 + 2 * number)
        run.until(lambda: len(rows(run.out)) >= 6, SECONDS)
        everything = descendant_processes(run.process.pid)
        whole.kill("raylet", 7)
        status, said = run.finish(SECONDS)
        assert status == 2, said
        [sentence] = [line for line in said.splitlines() if line.startswith("opd: error:")]
        assert "--resume" in sentence
        assert ended(list(everything))
    assert len(rows(run.out)) < STEPS
    with whole.start("--resume") as run:
        status, said = run.finish(SECONDS)
        assert status == 0, said
    whole.assert_right()
    assert ended(run.all_pids())
