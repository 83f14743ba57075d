"""Damage to one file of a run folder, what a command then does, and which of three good ends that is."""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from opd.pipelines.cli import main

FOUND, MENDED, HARMLESS = "found", "mended", "harmless"
GOOD = (FOUND, MENDED, HARMLESS)
SILENT, TRACEBACK, SENTENCES = "SILENT", "TRACEBACK", "NOT ONE SENTENCE"
TIMES = ("time", "seconds", "wait", "stall", "log_seconds", "peak", "rss", "chain")
"""In names of numbers that differ from attempt to attempt."""
UNREAD = ("README.md", "report.html")

REWARDS = """
def even(sample):
    return sum(sign in "02468" for sign in sample.text) / max(1, len(sample.text))
"""


@dataclass(frozen=True)
class Scene:
    """A run folder to be damaged, and what stands beside it."""

    name: str
    folder: Path
    other: Path
    """The same of another run, with another seed."""
    recipe: Path
    truth: dict[str, str]
    """`fingerprint` of the run when it ends undisturbed."""
    rows: str = ""
    """Pattern of the rows of the table that this scene is for."""
    command: str = "run"
    """What goes on with it."""


def changes(scene: Scene, path: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Every kind of damage that can be done to the file `path` of the scene: its name, and what does it."""
    name = path.relative_to(scene.folder)
    data = path.read_bytes()
    size = len(data)

    def writes(changed: bytes) -> Callable[[Path], None]:
        return lambda target: _rewrite(target, changed)

    for place, at in (("begin", 0), ("middle", size // 2), ("end", size - 1)) if size else ():
        yield f"bit flip, {place}", writes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    if size > 1:
        yield "truncated", writes(data[: size // 2])
        yield "emptied", writes(b"")
    yield "deleted", Path.unlink
    yield "a folder", _make_folder
    yield "garbage appended", writes(data + b"garbage")
    theirs = scene.other / name
    if theirs.is_file() and theirs.read_bytes() != data:
        yield "another run's", writes(theirs.read_bytes())
    twin = _twin(scene.folder, path)
    if twin is not None and twin.read_bytes() != data:
        twin_name, other = twin.relative_to(scene.folder), twin.read_bytes()
        yield "swapped", lambda target: _swap(target, name, twin_name, data, other)
    yield from _json_changes(path, data, writes)
    if os.geteuid() != 0:
        yield "unreadable", lambda target: target.chmod(0)


def _json_changes(path: Path, data: bytes, writes: Callable) -> Iterator[tuple[str, Callable[[Path], None]]]:
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in data.splitlines()]
        changed = [{**rows[0], "step": rows[0]["step"] + 1}, *rows[1:]]
        yield "a field changed", writes(_lines(changed))
        yield "white space", writes(_lines(rows, separators=(",", ":")))
    if path.suffix != ".json":
        return
    document = json.loads(data)
    if isinstance(document, dict) and document:
        for what, changed in (
            ("a field changed", _with_change(document)),
            ("a field lost", _without(document)),
        ):
            yield what, writes(json.dumps(changed, indent=2).encode())
        yield "white space", writes(json.dumps(document, indent=7).encode() + b"\n\n")


def _lines(rows: list[dict], **how) -> bytes:
    return b"".join(json.dumps(row, **how).encode() + b"\n" for row in rows)


def _with_change(value):
    """The document with its first number, word or truth value another one."""
    if isinstance(value, dict):
        for key in value:
            changed = _with_change(value[key])
            if changed != value[key]:
                return {**value, key: changed}
        return value
    if isinstance(value, list):
        for place, entry in enumerate(value):
            changed = _with_change(entry)
            if changed != entry:
                return [*value[:place], changed, *value[place + 1 :]]
        return value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return value[1:] + "x" if isinstance(value, str) and value else value


def _without(document: dict) -> dict:
    """The document without its last entry."""
    return dict(list(document.items())[:-1])


def _rewrite(target: Path, data: bytes) -> None:
    mode = target.stat().st_mode
    target.write_bytes(data)
    target.chmod(mode)


def _make_folder(target: Path) -> None:
    target.unlink()
    target.mkdir()
    (target / "inside").write_text("x")


def _swap(target: Path, name: Path, twin: Path, data: bytes, other: bytes) -> None:
    root = Path(str(target).removesuffix(str(name)))
    _rewrite(target, other)
    _rewrite(root / twin, data)


def _twin(root: Path, path: Path) -> Path | None:
    """Another file of the run with the same name, as near as there is one."""
    found = [other for other in sorted(root.rglob(path.name)) if other != path and other.is_file()]
    common = {other: len(os.path.commonpath([other, path])) for other in found}
    return max(found, key=lambda other: (common[other], str(other))) if found else None


def fingerprint(folder: Path) -> dict[str, str]:
    """What a run is for: every byte of its models that anything reads, and its numbers without times."""
    found = {}
    for listed in sorted(folder.rglob("config.json")):
        model = listed.parent
        if model == folder or {"stages", "published"} & set(model.relative_to(folder).parts):
            continue
        for path in sorted(model.rglob("*")):
            if path.is_file() and path.relative_to(model).parts[0] not in UNREAD:
                found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    results = folder / "results.json"
    if results.is_file():
        numbers = _timeless(json.loads(results.read_text()))
        for key in ("created", "machine", "git", "run", "made_from", "sha256", "counters"):
            numbers.pop(key, None)
        found["results.json"] = json.dumps(numbers, sort_keys=True).replace(str(folder), "RUN")
    return found


def _timeless(value):
    if isinstance(value, dict):
        kept = {key: entry for key, entry in value.items() if not any(word in key for word in TIMES)}
        return {key: _timeless(entry) for key, entry in kept.items() if key != "phases"}
    return [_timeless(entry) for entry in value] if isinstance(value, list) else value


def command(name: str, scene: Scene, folder: Path) -> list[str]:
    if name == "report":
        return ["report", str(folder)]
    return [name, str(scene.recipe), "--out", str(folder), "--resume"]


def outcome(
    scene: Scene, name: str, damage: Callable[[Path], None], words: str, copy: Path
) -> tuple[str, str]:
    """Damage the file `name` of a copy of the scene and run a command on it: the end, and what was said."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(scene.folder, copy)
    target = copy / name
    damage(target)
    before = _content(target)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            status = main(command(words, scene, copy))
    except SystemExit as error:
        return TRACEBACK, f"exit {error.code}"
    except BaseException:
        return TRACEBACK, traceback.format_exc()
    errors = [line for line in said.getvalue().splitlines() if line.startswith("opd: error:")]
    if status:
        return (FOUND if status == 2 and len(errors) == 1 else SENTENCES), said.getvalue()
    if words == "report":
        return (HARMLESS if _content(target) == before else MENDED), said.getvalue()
    apart = differences(scene.truth, fingerprint(copy))
    if apart:
        return SILENT, f"{apart[0]} differs\n{said.getvalue()}"
    return (HARMLESS if _content(target) == before else MENDED), said.getvalue()


def differences(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


ROWS = {
    "inputs.json": r"inputs\.json",
    "config.json": r"config\.json",
    "results.json": r"results\.json",
    "report.html, README.md": r"report\.html|.*README\.md",
    ".lock": r"\.lock",
    "model: checksums.json": r"(base|merged|(specialists|baselines)/.*)/checksums\.json",
    "model: weights": r"(base|merged|(specialists|baselines)/.*)/model\.safetensors",
    "model: configurations": r"(base|merged|(specialists|baselines)/.*)/(generation_)?config\.json",
    "model: tokenizer": r"(base|merged|(specialists|baselines)/.*)/tokenizer.*",
    "published: manifests": r"published/.*/(manifest\.json|latest)",
    "published: shards": r"published/.*\.bin",
    "published: tokenizer": r"published/.*/files/.*",
    "done stage: done.json": r"stages/.*/done\.json",
    "done stage: metrics.jsonl": r"stages/(?!merge).*/metrics\.jsonl|stages/merge/metrics\.jsonl done",
    "done stage: models.json": r"stages/evaluate/models\.json",
    "done stage: difficulty.json": r"stages/specialist-.*/difficulty\.json done",
    "done stage: the rest": r"stages/(base/initial|(?!merge)[^/]*/checkpoints)/.*"
    r"|.*/(checkpoints/.*|last_samples\.json) done",
    "stopped stage: metrics.jsonl": r"stages/merge/metrics\.jsonl",
    "stopped stage: last_samples.json": r"stages/.*/last_samples\.json",
    "stopped stage: difficulty.json": r"stages/.*/difficulty\.json",
    "stopped stage: manifest.json": r"stages/merge/checkpoints/.*/manifest\.json",
    "stopped stage: checkpoint": r"stages/merge/checkpoints/.*\.safetensors",
    "stopped stage: token log": r"stages/.*/wal/.*\.(wal|snapshot)",
    "stopped stage: trajectories": r"stages/.*/trajectories/.*\.safetensors",
    "stopped stage: in_flight": r"stages/.*/in_flight.*",
    "stopped stage: cache's index": r"stages/.*/cache/v\d+/index",
    "stopped stage: cache's rows": r"stages/.*/cache/.*/blobs/.*",
    "stopped stage: locks": r"stages/.*/(wal|trajectories|cache)/.*",
}
COLUMNS = [
    "bit flip", "truncated", "emptied", "deleted", "a folder", "garbage appended", "another run's", "swapped",
    "a field changed", "a field lost", "white space",
]  # fmt: skip


def row_of(scene: Scene, name: str) -> str:
    """The row of the table that the file `name` of a run folder belongs to."""
    done = name.startswith("stages/") and (scene.folder / Path(*Path(name).parts[:2]) / "done.json").exists()
    names = (f"{name} done", name) if done else (name,)
    return next(row for known in names for row, pattern in ROWS.items() if re.fullmatch(pattern, known))


def files_of(scene: Scene, of_a_row: int = 2) -> dict[str, list[str]]:
    """Of every row the first files of the scene and the last ones, `of_a_row` in all."""
    found: dict[str, list[str]] = {}
    for path in sorted(scene.folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(scene.folder).as_posix()
            found.setdefault(row_of(scene, name), []).append(name)
    few = {row: [names[0], *names[1:][1 - of_a_row :]] for row, names in found.items()}
    return {row: names for row, names in few.items() if re.search(scene.rows, row)}


def column_of(kind: str) -> str:
    return kind.partition(",")[0]
