"""What every causal language model type of transformers gives, use by use: right, or which sentence.

    .venv/bin/python tests/models/sweep.py              # all, into the table and its page; goes on if stopped
    .venv/bin/python tests/models/sweep.py llama opt    # some, printed

Each type is tried in a process of its own, which a time limit ends; two run at a time.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import families
import numpy as np
import tiny_types
import torch
import transformers
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from opd.config.train import LoRAConfig
from opd.errors import OpdError
from opd.megatron.form import MegatronForm
from opd.models.adapters import AdaptedLM
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.cli import main
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.rollout.torch_engine import TorchEngine
from opd.teachers.kinds import Placement
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.streamed_teacher import streamed_teachers
from opd.types import RolloutRequest, Sample, SamplingParams, Status

LENGTHS = (5, 23, 11)
"""Of sequences that are packed together; longer than a tiny model's window."""
WRITTEN = 12
EXACT = 3e-5
_TOLD = 300
SECONDS = 240
"""A type takes, at most, before it is said to hang."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One type's folder and what transformers alone says of it."""

    folder: Path
    room: Path
    """For what the checks write."""
    plain: Any
    """The model as transformers loads it, with its eager attention."""

    def logits(self, ids: torch.Tensor, module: Any = None) -> torch.Tensor:
        """[T, V] by transformers, of one sequence [T]."""
        return (module or self.plain)(input_ids=ids[None], use_cache=False).logits[0, :, :]


def plain_model(folder: Path) -> Any:
    """What transformers alone makes of a folder, with eager attention; `None` if it does not run on ids."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", trust_remote_code=False
        )
        with torch.no_grad():
            loaded.eval()(input_ids=sequences()[0][None], use_cache=False)
    except Exception:  # whatever a family's code meets; then everybody has to refuse it
        return None
    return loaded


def sequences() -> list[torch.Tensor]:
    """[T] each."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 14, (length,), generator=generator) for length in LENGTHS]


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of their log-probabilities; infinite where one is not finite."""
    both = [torch.log_softmax(x.detach().double(), -1) for x in (ours, theirs)]
    found = float((both[0] - both[1]).abs().max())
    return found if np.isfinite(found) else float("inf")


def packed_logits(model: CausalLM, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[T, V] of `parts` packed end to end."""
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    bounds = [0, *np.cumsum([len(part) for part in parts]).tolist()]
    return model.head().logits(model.hidden(torch.cat(list(parts)), positions, bounds))


class WrongError(Exception):
    """Numbers or tokens that are not those of transformers."""


def near(error: float, what: str) -> float:
    if not error <= EXACT:
        raise WrongError(f"{what}: {error:.2g}")
    return error


def as_student(bench: Bench) -> float:
    """Forward, a step of training, generation, and what is saved: the largest error of log-probabilities."""
    model, parts = CausalLM.from_pretrained(bench.folder), sequences()
    with torch.no_grad():
        alone = torch.cat([bench.logits(part) for part in parts])
        errors = [near(apart(packed_logits(model, parts), alone), "log-probabilities")]
    errors.append(_writes_alike(bench, model))
    ours = packed_logits(model, parts)
    theirs = torch.cat([bench.logits(part) for part in parts])
    targets = torch.cat(parts).roll(-1)
    for logits, module in ((ours, model.module), (theirs, bench.plain)):
        module.zero_grad()
        torch.nn.functional.cross_entropy(logits.float(), targets).backward()
        torch.optim.SGD(module.parameters(), lr=0.005).step()
        module.zero_grad()
    with torch.no_grad():
        alone = torch.cat([bench.logits(part) for part in parts])
        errors.append(near(apart(packed_logits(model, parts), alone), "log-probabilities after a step"))
    folder = save_checkpoint(model, tiny_types.tokenizer(), bench.room / "saved", {})
    again = plain_model(folder)
    with torch.no_grad():
        saved = torch.cat([bench.logits(part, again) for part in parts])
    errors.append(near(apart(saved, alone), "log-probabilities of what was saved"))
    return max(errors)


@torch.no_grad()
def _writes_alike(bench: Bench, model: CausalLM) -> float:
    """Greedy tokens, but where the two best are equal, and their log-probabilities."""
    parts, worst = sequences(), 0.0
    settings = SamplingParams(max_new_tokens=WRITTEN, temperature=0.0)
    asked = [
        RolloutRequest(str(i), part.numpy().astype(np.int32), settings, seed=0)
        for i, part in enumerate(parts)
    ]
    tokens: dict[str, list[int]] = {}
    scores: dict[str, list[float]] = {}
    for chunk in TorchEngine(model).generate(asked):
        for uid, token, score in zip(chunk.uids, chunk.token_ids, chunk.logprobs, strict=True):
            tokens.setdefault(uid, []).append(int(token))
            scores.setdefault(uid, []).append(float(score))
    for uid, part in zip(tokens, parts, strict=True):
        own = bench.plain.generate(
            part[None], do_sample=False, max_new_tokens=WRITTEN, eos_token_id=None, pad_token_id=0
        )
        told, written = own[0, len(part) :].tolist(), tokens[uid]
        table = torch.log_softmax(
            bench.logits(torch.tensor([*part.tolist(), *written]))[len(part) - 1 : -1].double(), -1
        )
        best = table.topk(2, -1).values
        same = next((i for i, (a, b) in enumerate(zip(told, written, strict=True)) if a != b), WRITTEN)
        if same < WRITTEN and float(best[same, 0] - best[same, 1]) > EXACT:
            raise WrongError(f"greedy token {same} of {len(part)} is another than by generate")
        reached = slice(0, same + 1)
        chosen = table[torch.arange(WRITTEN), torch.tensor(written)][reached]
        worst = max(worst, float((chosen - torch.tensor(scores[uid])[reached].double()).abs().max()))
    return near(worst, "log-probabilities of the engine")


def as_lora(bench: Bench) -> float:
    """Adapters of the default targets: applied, merged, and merged weights in transformers."""
    model = AdaptedLM(CausalLM.from_pretrained(bench.folder), LoRAConfig(rank=4), bench.folder)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.1)
    parts = sequences()
    folder = save_checkpoint(model.merge_adapters(), tiny_types.tokenizer(), bench.room / "merged", {})
    again = plain_model(folder)
    ours = packed_logits(model, parts)
    torch.nn.functional.cross_entropy(ours.float(), torch.cat(parts).roll(-1)).backward()
    if not any(p.grad is not None and bool(p.grad.abs().max() > 0) for p in model.module.parameters()):
        raise WrongError("no adapter has a gradient")
    with torch.no_grad():
        theirs = torch.cat([bench.logits(part, again) for part in parts])
        before = torch.cat([bench.logits(part) for part in parts])
    if apart(theirs, before) < EXACT:
        raise WrongError("adapters change nothing")
    return near(apart(ours, theirs), "log-probabilities with adapters")


def samples() -> list[Sample]:
    """The sequences, all but their first two tokens written."""
    return [_sample(str(i), part) for i, part in enumerate(sequences())]


def _sample(uid: str, part: torch.Tensor) -> Sample:
    ids = part.numpy().astype(np.int32)
    size = len(ids) - 2
    return Sample(
        uid=uid, group_uid=uid, domain="a", prompt_ids=ids[:2], response_ids=ids[2:],
        rollout_logprobs=np.zeros(size, dtype=np.float32), policy_versions=np.zeros(size, dtype=np.int32),
        loss_mask=np.ones(size, dtype=bool), teacher="t", status=Status.COMPLETED,
    )  # fmt: skip


def as_local(bench: Bench) -> float:
    """A teacher in memory."""
    return _scores(bench, LocalTeacher("t", bench.folder))


def as_streamed(bench: Bench) -> float:
    """A teacher that was published, layer by layer."""
    url = bench.room / "published"
    publish_checkpoint(bench.folder, url, shards=2)
    teacher = streamed_teachers({"t": str(url)}, Placement(), prefetch_bytes=1 << 20)["t"]
    with contextlib.closing(teacher):
        return _scores(bench, teacher)


@torch.no_grad()
def _scores(bench: Bench, teacher: Any) -> float:
    ours = teacher.load_head().logits(teacher.score(samples()).rows)
    theirs = torch.cat([bench.logits(part)[1:-1] for part in sequences()])
    return near(apart(ours, theirs), "scores")


def as_megatron(bench: Bench) -> float:
    """Whether Megatron-Core's layers are said to be this; nothing is computed."""
    MegatronForm.from_config(AutoConfig.from_pretrained(bench.folder))
    return 0.0


LIBRARY: dict[str, Callable[[Bench], float]] = {
    "lora": as_lora,
    "local": as_local,
    "streamed": as_streamed,
    "megatron": as_megatron,
    "student": as_student,  # last: it trains
}


def result_of(check: Callable[[], Any]) -> dict[str, Any]:
    """`{"right": error}`, `{"refused": sentence}`, `{"wrong": what}` or `{"traceback": where}`."""
    try:
        return {"right": float(check())}
    except OpdError as error:
        return {"refused": str(error)}
    except WrongError as error:
        return {"wrong": str(error)}
    except Exception as error:
        return {"traceback": _where(error)}


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = next((f for f in reversed(frames) if "/opd/" in f.filename or "/sweep" in f.filename), frames[-1])
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text} ({Path(own.filename).name}:{own.lineno})"


def said(words: list[str], finding: str | None = None) -> dict[str, Any]:
    """What a command comes to: `{"right": 0}`, `{"refused": sentence}`, or `{"traceback": where}`.

    `finding`: of the doctor, whose check's errors count.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except BaseException as error:
            return {"traceback": _where(error)}
    if "Traceback (most recent call last)" in err.getvalue():
        return {"traceback": _traced(err.getvalue())}
    found = [json.loads(line) for line in out.getvalue().splitlines() if line.startswith("{")]
    errors = [one["finding"] for one in found if one["level"] == "error"]
    if errors:
        return {"refused": errors[0]}
    lines = err.getvalue().splitlines()
    if status:
        return {"refused": _sentence(lines, "error")}
    warned = _sentence(lines, "warning") if words[0] == "publish" else ""
    return {"refused": warned} if warned else {"right": 0.0}


def _traced(text: str) -> str:
    files = re.findall(r'File "[^"]*?/(opd/[^"]+|[^"/]+)", line (\d+)', text)
    own = [pair for pair in files if pair[0].startswith("opd/")] or files
    text = text[text.index("Traceback (most") :]
    last = next(
        (
            line
            for line in reversed(text.splitlines())
            if re.match(r"[\w.]+: ", line) and not line.startswith("opd: ")
        ),
        "",
    )
    return f"{last[:200]} ({own[-1][0]}:{own[-1][1]})"


def _sentence(lines: list[str], level: str) -> str:
    start = next((i for i, line in enumerate(lines) if line.startswith(f"opd: {level}: ")), None)
    if start is None:
        return "" if level == "warning" else " ".join(lines[-3:])
    rest = [lines[start].removeprefix(f"opd: {level}: ")]
    for line in lines[start + 1 :]:
        if line.startswith("opd: "):
            break
        rest.append(line.strip())
    return " ".join(" ".join(rest).split())


def recipe(room: Path, student: Path, teachers: dict[str, tuple[str, Path]], **changes: Any) -> str:
    """A merge of one step, with a domain for each of `teachers` by name: kind and folder."""
    for name in teachers:
        rows = [{"prompt": f"<sort>{i:03}=", "label": "1"} for i in range(40)]
        (room / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "name": "sweep",
        "model": {"path": str(student)} | changes.pop("model", {}),
        "teachers": {n: {"type": kind, "path": str(folder)} for n, (kind, folder) in teachers.items()},
        "domains": {n: {"source": str(room / f"{n}.jsonl"), "reward": {"type": "exact"}} for n in teachers},
        "rollout": {"max_new_tokens": 6, "max_sequence": 24},
        "distill": {"steps": 1, "prompts_per_domain": 2},
        "baselines": {"methods": []},
        "evaluation": {"prompts_per_domain": 2, "every": 0},
        "runtime": {"threads": 1},
    } | changes
    (room / "recipe.yaml").write_text(yaml.safe_dump(settings))
    return str(room / "recipe.yaml")


def commands(bench: Bench, library: dict[str, dict[str, Any]], other: Path) -> dict[str, dict[str, Any]]:
    """What doctor, sample, publish and run say of each use, as far as it does not follow from another."""
    folder, found = bench.folder, {}
    sound = {use for use, result in library.items() if "right" in result}
    found["sample"] = said(["sample", str(folder), "--prompt", "12=", "--max-tokens", "4"])
    found["publish"] = said(["publish", str(folder), str(bench.room / "store"), "--shards", "2"])
    teachers = {"kept": ("local", folder)} | (
        {"streamed": ("streamed", folder)} if "streamed" in sound else {}
    )
    if "student" in sound:
        _both(found, "student", bench, recipe(bench.room, folder, teachers))
        found["local: doctor"], found["local: run"] = found["student: doctor"], found["student: run"]
    else:
        _both(found, "student", bench, recipe(bench.room, folder, {"kept": ("local", other)}))
        _both(found, "local", bench, recipe(bench.room, other, teachers))
    if "streamed" not in sound:
        _both(found, "streamed", bench, recipe(bench.room, other, {"streamed": ("streamed", folder)}))
    else:
        found |= {f"streamed: {one}": found[f"local: {one}"] for one in ("doctor", "run")}
    if "student" in sound:
        adapted = recipe(bench.room, folder, {"kept": ("local", other)}, model={"lora": {"rank": 4}})
        if "lora" in sound:
            found["lora: doctor"] = said(["doctor", adapted, "--json"])
        else:
            _both(found, "lora", bench, adapted)
    served = {
        "servers": {"student": {"type": "sglang", "command": [sys.executable, "-m", "sglang.launch_server"]}},
        "rollout": {
            "max_new_tokens": 6,
            "max_sequence": 24,
            "engine": {"type": "sglang", "servers": "student"},
        },
    }
    found["served: doctor"] = said(
        ["doctor", recipe(bench.room, folder, {"kept": ("local", other)}, **served), "--json"]
    )
    return found


def _both(found: dict[str, dict[str, Any]], use: str, bench: Bench, path: str) -> None:
    found[f"{use}: doctor"] = said(["doctor", path, "--json"])
    found[f"{use}: run"] = said(["run", path, "--out", str(bench.room / f"run-{use}")])


def measure(model_type: str) -> dict[str, Any]:
    """Everything of one type."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    started, record = time.monotonic(), {"type": model_type, "class": tiny_types.causal_types()[model_type]}
    with TemporaryDirectory(prefix="sweep-") as place:
        room = Path(place)
        try:
            folder = tiny_types.write_folder(model_type, room / "model")
        except Exception as error:  # of a library's constructors
            reason = " ".join(str(error).split())[:_TOLD]
            return record | {"unbuilt": f"{type(error).__name__}: {reason}"}
        bench = Bench(folder, room, plain_model(folder))
        library = {use: result_of(partial(check, bench)) for use, check in LIBRARY.items()}
        others = commands(bench, library, tiny_types.write_folder("llama", room / "other"))
        record |= {"library": _shortened(library, room), "commands": _shortened(others, room)}
    return record | {"seconds": round(time.monotonic() - started, 1)}


def _shortened(results: dict[str, dict[str, Any]], room: Path) -> dict[str, dict[str, Any]]:
    def short(value: Any) -> Any:
        return value.replace(str(room), "") if isinstance(value, str) else value

    return {name: {key: short(value) for key, value in one.items()} for name, one in results.items()}


def forked(model_type: str) -> tuple[int, int]:
    """Process id, and where its record can be read."""
    out, into = os.pipe()
    process = os.fork()
    if process:
        os.close(into)
        return process, out
    os.close(out)
    signal.alarm(SECONDS)
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    leave = os._exit
    try:
        record = measure(model_type)
    except BaseException as error:
        record = {"unbuilt": _where(error)}
    os.write(into, json.dumps(record).encode())
    leave(0)


def sweep(types: Sequence[str], processes: int = 2) -> Iterator[dict[str, Any]]:
    """The records of `types`, as they come."""
    waiting, running = list(types), {}
    while waiting or running:
        while waiting and len(running) < processes:
            name = waiting.pop(0)
            process, out = forked(name)
            running[process] = (name, out)
        process, status = os.wait()
        if process not in running:
            continue
        name, out = running.pop(process)
        with os.fdopen(out, "rb") as pipe:
            text = pipe.read()
        head = {"type": name, "class": tiny_types.causal_types()[name]}
        yield head | (json.loads(text) if text else {"hangs": f"its process was ended (status {status})"})


class Records:
    """What was measured so far by this very code, kept in a file, so that a sweep that is stopped goes on."""

    def __init__(self, path: Path) -> None:
        self.path, self.header = path, json.dumps({"code": _code_digest()})
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        self.found = [json.loads(line) for line in lines[1:]] if lines[:1] == [self.header] else []
        if not self.found:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.header + "\n", "utf-8")

    def add(self, record: dict[str, Any]) -> None:
        self.found.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _code_digest() -> str:
    """Of every file that decides a result, and of the library's version."""
    digest = hashlib.sha256(transformers.__version__.encode())
    folders = [families.ROOT / name for name in ("opd", "teachers", "storage", "kernels", "pipelines")]
    own = [Path(__file__), Path(str(tiny_types.__file__))]
    for path in [*own, *sorted(file for one in folders for file in one.rglob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def sweep_all(kept: Path, processes: int) -> None:
    """Try what was not tried yet, then write data and page anew."""
    records = Records(kept)
    done = {record["type"] for record in records.found}
    names, begun = [name for name in tiny_types.causal_types() if name not in done], time.monotonic()
    for number, record in enumerate(sweep(names, processes), 1):
        records.add(record)
        told = json.dumps(
            {use: next(iter(one)) for use, one in families.row(record).items() if isinstance(one, dict)}
        )
        print(f"{number}/{len(names)} {record['type']} {told} {time.monotonic() - begun:.0f} s", flush=True)
    families.write(records.found, transformers.__version__)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", help="print what these give; nothing is written")
    parser.add_argument("--rows", action="store_true", help="print their lines of the data instead")
    parser.add_argument("--records", type=Path, default=families.ROOT / "build" / "sweep.jsonl")
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    measure("llama")  # loads what every type needs, once
    if not options.types:
        sweep_all(options.records, options.processes)
    for record in sweep(options.types, options.processes):
        print(
            json.dumps(families.row(record) if options.rows else record, indent=None if options.rows else 1),
            flush=True,
        )
