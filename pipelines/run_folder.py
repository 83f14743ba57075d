"""One run, one folder: its layout, its lock, its resolved recipe and which of its stages are done.

config.json                      the resolved recipe
stages/STAGE/                    metrics.jsonl  checkpoints/  done.json (written last), and log.txt of
                                 a stage that ran in a process of its own
                                 wal/ (the log of its rollouts) and cache/ (teachers' hidden states) are
                                 there while the stage runs
base/  specialists/DOMAIN/  merged/  baselines/NAME/      Hugging Face folders
published/TEACHER/               what the merge streams, unless storage.published says elsewhere
downloaded/TEACHER/              published teachers of the recipe as Hugging Face folders, where needed whole
logs/ACTOR.log                   what each actor of `launch: ray` said
results.json  report.html
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from opd.config import Recipe
from opd.errors import RunFolderError
from opd.storage.files import FileLock, write_atomic

_LOCK = ".lock"
_FREE = ("runtime", "run_dir", "launch", "train")
"""Top-level keys that may change between attempts: they say how and where, not what."""


def default_path(recipe: Recipe) -> Path:
    """`recipe.run_dir`, or `runs/NAME`."""
    return Path(recipe.run_dir) if recipe.run_dir is not None else Path("runs") / safe_name(recipe.name)


def safe_name(name: str) -> str:
    """`name` if it can name one folder. Raises `RunFolderError` if it could lead anywhere else."""
    if not name or name.startswith(".") or any(sign in name for sign in "/\\\0"):
        raise RunFolderError(
            f"{name!r} cannot name a folder; use a name without slashes that does not start with a dot"
        )
    return name


def refuse_existing(path: Path) -> None:
    """Raise `RunFolderError` if `path` is taken; an empty folder, or one nothing was written to, is free."""
    if path.exists() and (not path.is_dir() or any(not _is_trace(entry.name) for entry in path.iterdir())):
        raise RunFolderError(
            f"{path} exists already; add --resume to continue that run, or give another folder with --out"
        )


def _is_trace(name: str) -> bool:
    """What a process killed before its first complete file leaves behind: the lock, a temporary file."""
    return name == _LOCK or (name.startswith(".config.json.") and name.endswith(".tmp"))


class RunFolder:
    """An open run folder, held by this process and its workers alone until `close`."""

    def __init__(self, path: Path, lock: FileLock | None) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, path: str | Path, recipe: Recipe) -> RunFolder:
        """Start a run in a new folder. Raises `RunFolderError` if it exists or another process holds it."""
        path = Path(path)
        refuse_existing(path)
        folder = cls._open(path)
        try:
            refuse_existing(path)
            folder._write_config(recipe)
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def resume(cls, path: str | Path, recipe: Recipe) -> RunFolder:
        """Continue the run in `path`; only `runtime`, `launch`, `train` and `run_dir` may differ.

        Raises `RunFolderError` if there is no run, another process holds it, or a setting differs (named).
        """
        path = Path(path)
        if not path.is_dir():
            raise RunFolderError(f"there is no run in {path} to resume; start it without --resume")
        if not (path / "config.json").exists():
            return cls.create(path, recipe)  # killed before it wrote anything
        folder = cls._open(path)
        try:
            folder._require_same(recipe)
            folder._write_config(recipe)
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def attach(cls, path: str | Path) -> RunFolder:
        """The folder in a worker, without a lock of its own: the process that started the worker holds it."""
        return cls(Path(path), None)

    @classmethod
    def _open(cls, path: Path) -> RunFolder:
        lock = FileLock(path / _LOCK)
        try:
            lock.acquire()
        except RunFolderError:
            raise
        except OSError as error:
            raise RunFolderError(
                f"{path} cannot be written ({error.strerror}); choose another --out"
            ) from None
        return cls(path, lock)

    def close(self) -> None:
        """Let other processes use the folder."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def results(self) -> Path:
        return self.path / "results.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def base(self) -> Path:
        return self.path / "base"

    @property
    def merged(self) -> Path:
        return self.path / "merged"

    def specialist(self, domain: str) -> Path:
        return self.path / "specialists" / safe_name(domain)

    def baseline(self, name: str) -> Path:
        return self.path / "baselines" / safe_name(name)

    def stage(self, stage: str) -> Path:
        """The folder of a stage, made if it is not there."""
        folder = self.path / "stages" / safe_name(stage)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def published(self) -> Path:
        return self.path / "published"

    def downloaded(self, teacher: str) -> Path:
        """Where a published teacher of the recipe is kept as a Hugging Face folder."""
        return self.path / "downloaded" / safe_name(teacher)

    def cache(self, stage: str) -> Path:
        return self.stage(stage) / "cache"

    def wal(self, stage: str) -> Path:
        return self.stage(stage) / "wal"

    def trajectories(self, stage: str) -> Path:
        return self.stage(stage) / "trajectories"

    def metrics(self, stage: str) -> Path:
        return self.stage(stage) / "metrics.jsonl"

    def checkpoints(self, stage: str) -> Path:
        return self.stage(stage) / "checkpoints"

    def log(self, stage: str) -> Path:
        return self.stage(stage) / "log.txt"

    def actor_log(self, name: str) -> Path:
        """What an actor of `launch: ray` says; its folder is made if it is not there."""
        folder = self.path / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{safe_name(name)}.log"

    def stage_done(self, stage: str) -> dict[str, Any] | None:
        """What `mark_done` recorded, or `None` while the stage is not done."""
        path = self.path / "stages" / safe_name(stage) / "done.json"
        return _read_json(path, "delete it to run the stage again") if path.exists() else None

    def mark_done(self, stage: str, result: Mapping[str, Any]) -> None:
        """Record that everything the stage produces is on disk; the last thing a stage does."""
        write_atomic(self.stage(stage) / "done.json", _json_bytes(result))

    def _write_config(self, recipe: Recipe) -> None:
        write_atomic(self.config, _json_bytes(recipe.model_dump(mode="json")))

    def _require_same(self, recipe: Recipe) -> None:
        before = _read_json(self.config, "restore it, or start a new run with --out")
        # A recipe of another version may not validate: then the comparison below names the key.
        with contextlib.suppress(ValidationError):
            before = Recipe.model_validate(before).model_dump(mode="json")
        after = recipe.model_dump(mode="json")
        for key, was, now in _differences(before, after):
            if key.split(".")[0] not in _FREE:
                raise RunFolderError(
                    f"{self.path} was started with {key} = {was} and the recipe now says {now}; "
                    "resume with the same recipe, or start a new run with --out"
                )


def _differences(before: Any, after: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        if before != after:
            yield prefix, json.dumps(before), json.dumps(after)
        return
    for key in dict.fromkeys([*after, *before]):
        name = f"{prefix}.{key}" if prefix else str(key)
        if key in before and key in after:
            yield from _differences(before[key], after[key], name)
        else:
            was, now = (json.dumps(side[key]) if key in side else "nothing" for side in (before, after))
            yield name, was, now


def _json_bytes(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _read_json(path: Path, mend: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}); {mend}") from None
    if not isinstance(data, dict):
        raise RunFolderError(f"{path} holds no JSON object; {mend}")
    return data
