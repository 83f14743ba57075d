"""Manage a run's folder: its lock, its resolved recipe, its inputs and its finished stages.

The paths in it are in `layout.py`. A file that was written with a digest is read with it. `inputs.json`,
`done.json` and `results.json` carry their own. `done.json` has the digests of everything its stage left, and
of the models it was made from. For a model that is its `checksums.json`, which has those of its files. So a
reader that calls `stage_done` first reads the written files, or gets an error that names a changed one.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from opd.config import Recipe
from opd.config.load import absolute_paths, path_keys
from opd.errors import DataError, RunFolderError
from opd.metrics import FILE_NAME, FLAGS, read_metrics
from opd.models.hf_folder import CHECKSUMS, check_folder, check_small_files
from opd.pipelines.launch.machine import threads_here
from opd.pipelines.records.inputs import Given, changed_files, input_digests, user_code, with_changes
from opd.pipelines.records.layout import (
    CONFIG,
    DONE,
    WEIGHTS,
    RunLayout,
    drop_later_responses,
    drop_responses,
    safe_name,
)
from opd.pipelines.records.settings import (
    FREE,
    Progress,
    RecordedChange,
    SettingChange,
    compare_recipes,
    fixed_settings,
    recorded_recipe,
    require_allowed,
)
from opd.redact import redact_json
from opd.storage.checkpoints import CheckpointStore
from opd.storage.files import (
    SEAL,
    FileLock,
    check_files,
    check_seal,
    digest_of,
    digests_of,
    json_bytes,
    read_object,
    read_sealed,
    write_atomic,
    write_sealed,
)

_LOCK, _INPUTS = ".lock", "inputs.json"
_ANEW = "restore it, or start a new run with --out"
ACCEPT_CODE = "--resume --accept-changed-code"
"""The options that continue a run with changed user code."""
_RECORDED = ("stage", "run", "files", "from")
"""Keys that `mark_done` adds to a stage's result."""
_Changed = dict[str, dict[str, dict[str, str | None]]]
"""Key of the recipe -> file -> digests `was` and `is`, of the user's own code."""
HubRecord = dict[str, Mapping[str, str]]
"""Key of the recipe -> its name on the Hub (`asked`) and the `commit` of that."""


@dataclass(frozen=True, slots=True)
class AcceptedChanges:
    """The changes that a resumed run accepts."""

    code: bool = False
    """The user's own code."""
    settings: bool = False
    """Settings that can change in the middle of a run (`settings.py`)."""
    tell: Callable[[str, str], None] = lambda kind, changes: None
    """Called with the changes: `code` and the files, or `settings` and each of them."""


_NOTHING_ELSE = AcceptedChanges()


def default_path(recipe: Recipe) -> Path:
    """Return `recipe.run_dir`, or `runs/NAME`."""
    return Path(recipe.run_dir) if recipe.run_dir is not None else Path("runs") / safe_name(recipe.name)


def refuse_existing(path: Path) -> None:
    """Raise `RunFolderError` if `path` is taken. An empty folder, or one without a begun run, is free."""
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is no folder; give another one with --out")
    if path.exists() and any(not _is_trace(entry.name) for entry in path.iterdir()):
        _refuse_model(path)
        raise RunFolderError(
            f"{path} exists already; add --resume to continue that run, or give another folder with --out"
        )


def _refuse_model(path: Path) -> None:
    """Raise `RunFolderError` for a model's folder, which has its own `config.json`."""
    if not (path / _INPUTS).exists() and any(path.glob("*.safetensors")):
        raise RunFolderError(f"{path} is a model's folder and no run's; give another one with --out")


def _has_begun(path: Path) -> bool:
    """Return whether there is a run in `path` to resume. It is not if it was killed before it began.

    Raises `RunFolderError` if there is no folder, or one that no run has made.
    """
    if not path.is_dir():
        raise RunFolderError(f"there is no run in {path} to resume; start it without --resume")
    _refuse_model(path)
    if (path / CONFIG).exists():
        return True
    if any(not _is_trace(entry.name) for entry in path.iterdir()):
        raise RunFolderError(
            f"{path} exists already and holds no {CONFIG}: restore that file, or give another folder"
            " with --out"
        )
    return False


def _is_trace(name: str) -> bool:
    """Return whether a process killed before a run began left this: any file but `config.json`, the last."""
    unfinished = name.startswith((f".{CONFIG}.", f".{_INPUTS}.")) and name.endswith(".tmp")
    return name in (_LOCK, _INPUTS) or unfinished


def _checked_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in which damage to `config.json` is found: those whose changes are recorded."""
    return fixed_settings(config) | {"watch": config.get("watch")}


class RunFolder(RunLayout):
    """An open run folder. Only this process and its workers may use it until `close`."""

    def __init__(self, path: Path, lock: FileLock | None) -> None:
        super().__init__(path)
        self._lock = lock

    @classmethod
    def create(cls, path: str | Path, recipe: Recipe, hub: HubRecord | None = None) -> RunFolder:
        """Start a run in a new folder. A run killed before it began is started over.

        `hub`: the names in `recipe` on the Hub, and their commits. Raises `RunFolderError` if the folder
        exists or another process holds it, and the errors of `input_digests`.
        """
        path = Path(path)
        refuse_existing(path)
        folder = cls._acquire_folder(path)
        try:
            refuse_existing(path)
            folder._write_inputs(recipe, hub or {})
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def resume(
        cls,
        path: str | Path,
        recipe: Recipe,
        accepted: AcceptedChanges = _NOTHING_ELSE,
        hub: HubRecord | None = None,
    ) -> RunFolder:
        """Continue the run in `path`.

        Only `runtime`, `launch`, `train`, `watch` and `run_dir` may differ, and `accepted` changes, which are
        recorded. Files of a stage that was killed as it ended are removed. Raises `RunFolderError` if there
        is no run, another process holds it, a setting differs (named), or another input of the run changed.
        """
        path = Path(path)
        if not _has_begun(path):
            return cls.create(path, recipe, hub)
        folder = cls._acquire_folder(path)
        try:
            started, settings, code = folder._require_same(recipe, accepted)
            folder._write_changes(recipe, started, settings, accepted)
            if code:
                folder._record_code(recipe, code)
                accepted.tell("code", changed_files(folder.code_changes[-1]))
            folder._remove_leftovers()
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def check(
        cls, path: str | Path, recipe: Recipe, *, resume: bool, accepted: AcceptedChanges = _NOTHING_ELSE
    ) -> None:
        """Raise the errors of `create`, or with `resume` of `resume`. Writes nothing."""
        path = Path(path)
        begun = resume and _has_begun(path)
        if not begun:
            refuse_existing(path)
        FileLock(path / _LOCK).refuse_locked()
        if begun:
            cls.attach(path)._require_same(recipe, accepted)

    @classmethod
    def attach(cls, path: str | Path) -> RunFolder:
        """Return the folder in a worker, without a lock. The process that started the worker holds it."""
        return cls(Path(path), None)

    @classmethod
    def _acquire_folder(cls, path: Path) -> RunFolder:
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
        """Release the folder for other processes."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:  # else --resume needs the files that were read
            shutil.rmtree(self.path / WEIGHTS, ignore_errors=True)
        self.close()

    @cached_property
    def _recorded_inputs(self) -> dict[str, Any] | None:
        """The record of `_write_inputs`. `None` in a folder without a run of this release."""
        path = self.path / _INPUTS
        return read_sealed(path, _ANEW) if path.exists() else None

    @property
    def run_id(self) -> str:
        """The id of this run, "" if none was started."""
        return "" if self._recorded_inputs is None else str(self._recorded_inputs["run"])

    @property
    def code_changes(self) -> list[dict[str, Any]]:
        """Changes of the user's own code while the run went on, oldest first. Each has `time` (UTC), the
        stages `done` and `under_way` by then, and the `files` for `inputs.with_changes`.
        """
        return [] if self._recorded_inputs is None else list(self._recorded_inputs.get("code_changes", []))

    @property
    def setting_changes(self) -> list[RecordedChange]:
        """Changes of the recipe since the run was started, oldest first."""
        changes = [] if self._recorded_inputs is None else self._recorded_inputs.get("setting_changes", [])
        try:
            return [RecordedChange(**change) for change in changes]
        except TypeError as error:
            raise RunFolderError(f"{self.path / _INPUTS} holds no changes of settings; {_ANEW}") from error

    @property
    def hub_record(self) -> HubRecord:
        """The names and commits of the run's inputs from the Hub."""
        return {} if self._recorded_inputs is None else dict(self._recorded_inputs.get("hub", {}))

    @property
    def input_files(self) -> dict[str, list[str]]:
        """Key of the recipe -> names of the run's input files under it."""
        digests = {} if self._recorded_inputs is None else self._recorded_inputs["given"]
        return {where: list(files) for where, files in digests.items()}

    def owner_id(self, stage: str) -> str:
        """Return the id of a stage's files, which differs from those of other stages and runs."""
        return f"{self.run_id}/{stage}"

    def thread_count(self, recipe: Recipe, *, alone: bool = False) -> int:
        """Return the CPU threads of a stage. `recipe` comes first, else the number from the creation of the
        run, for all stages or for `alone` ones.
        """
        inputs = self._recorded_inputs or {}
        settled = inputs.get("threads_alone" if alone and "threads_alone" in inputs else "threads")
        return recipe.runtime.threads or settled or threads_here(recipe, alone=alone)

    def stage_done(self, stage: str, *, weights: bool = False) -> dict[str, Any] | None:
        """Return the record of `mark_done`, or `None` while the stage is not done.

        Raises `RunFolderError` or `CheckpointError` if the record, a file in it, or one beside the weights of
        a model has changed. Weights are compared when they are loaded, or here with `weights`.
        """
        record = self._read_record(stage)
        if record is None:
            return None
        again = f"restore it, or delete {self.path / 'stages' / stage} to run the stage again"
        check_files(self.path, record["files"], again)
        check_files(self.path, record["from"], f"stage {stage} was made from another one; {again}")
        for name in record["files"]:
            if name.endswith(f"/{CHECKSUMS}"):
                (check_folder if weights else check_small_files)((self.path / name).parent)
        return {key: value for key, value in record.items() if key not in _RECORDED}

    def mark_done(
        self,
        stage: str,
        result: Mapping[str, object],
        files: Iterable[Path] = (),
        needs: Iterable[str] = (),
    ) -> None:
        """Record that all output of the stage is on disk, as the stage's last action.

        `files`: its files, for a model its `checksums.json`. Missing ones are left out. `needs`: the stages
        whose models it was made from.
        """
        models: dict[str, str] = {}
        for need in needs:
            digests = (self._read_record(need) or {"files": {}})["files"]
            models |= {name: digest for name, digest in digests.items() if name.endswith(f"/{CHECKSUMS}")}
        paths = (*files, self.difficulty_path(stage))
        digests = digests_of(self.path, [path for path in paths if path.is_file()])
        record = {**redact_json(result), "stage": stage, "run": self.run_id, "files": digests, "from": models}
        write_sealed(self.stage_folder(stage) / DONE, record)

    def read_metrics(self, stage: str) -> list[dict[str, Any]]:
        """Return a stage's metrics, done or not. Empty if it has written none. Raises `RunFolderError`."""
        return self._read_lines(stage, FILE_NAME)

    def read_flags(self, stage: str) -> list[dict[str, Any]]:
        """Return the rules that fired in a stage, done or not, in order. Raises `RunFolderError`."""
        return self._read_lines(stage, FLAGS)

    def _read_lines(self, stage: str, file: str) -> list[dict[str, Any]]:
        path = self.stage_path(stage) / file
        record = self._read_record(stage)
        digests = {} if record is None else record["files"]
        name = path.relative_to(self.path).as_posix()
        again = f"restore it, or delete {path.parent} to run the stage again"
        check_files(self.path, {name: digests[name]} if name in digests else {}, again)
        try:
            return read_metrics(path, chained=self._recorded_inputs is not None)
        except DataError as error:
            raise RunFolderError(str(error)) from error

    def write_results(self, results: Mapping[str, object], stages: Iterable[str]) -> None:
        """Write results.json, made from the records of `stages`."""
        made_from = digests_of(self.path, [self.stage_folder(stage) / DONE for stage in stages])
        write_sealed(self.results_path, {**redact_json(results), "run": self.run_id, "made_from": made_from})

    def read_results(self) -> dict[str, Any]:
        """Return the results of `write_results`, `{}` before. In a folder of an older release nothing is
        compared.

        Raises `RunFolderError` if the file has changed, or a stage has another record now.
        """
        if not self.results_path.exists():
            return {}
        mend = "write it again with `opd evaluate RECIPE --resume`, or remove it"
        results = read_object(self.results_path, mend)
        if self._recorded_inputs is None and SEAL not in results:
            return results
        results = check_seal(self.results_path, results, mend)
        if results.pop("run", None) != self.run_id:
            raise RunFolderError(f"{self.results_path} is of another run than {self.path / _INPUTS}; {mend}")
        check_files(
            self.path, results.pop("made_from"), f"{self.results_path} was made from another one; {mend}"
        )
        return results

    def read_config(self) -> dict[str, Any]:
        """Return the resolved recipe, `{}` if no run was started."""
        if self._recorded_inputs is None and not self.config_path.exists():
            return {}
        config = read_object(self.config_path, _ANEW)
        if self._recorded_inputs is None:
            return config
        digests = [self._recorded_inputs["recipe"], *self._recorded_inputs.get("recipes", [])]
        settings = self._recorded_inputs.get("settings")  # not of older releases
        if digest_of(fixed_settings(config)) not in digests or (
            settings is not None and digest_of(_checked_settings(config)) not in settings
        ):
            raise RunFolderError(f"{self.config_path} is not what the run was started with; {_ANEW}")
        # A run that was killed between a change's record and this file has changed.
        changed = self._recorded_inputs.get("config")
        return config if changed is None else config | fixed_settings(changed) | {"watch": changed["watch"]}

    def _read_record(self, stage: str) -> dict[str, Any] | None:
        path = self.stage_path(stage) / DONE
        if not path.exists():
            return None
        mend = "delete it to run the stage again"
        record = read_sealed(path, mend)
        if record.get("stage") != stage or record.get("run") != self.run_id:
            raise RunFolderError(f"{path} is the record of another stage or run; {mend}")
        return record

    def _write_inputs(self, recipe: Recipe, hub: HubRecord) -> None:
        """Write the inputs of the run. It has begun once `config.json` is there, which comes last."""
        config = recorded_recipe(recipe)
        config["runtime"]["threads"] = threads_here(recipe)
        inputs = {
            "run": secrets.token_hex(8),
            "recipe": digest_of(fixed_settings(config)),
            "settings": [digest_of(_checked_settings(config))],
            "given": input_digests(recipe),
            "hub": hub,
            "threads": config["runtime"]["threads"],
            "threads_alone": threads_here(recipe, alone=True),
        }
        write_sealed(self.path / _INPUTS, inputs)
        self._write_config(config)

    def _write_config(self, config: Mapping[str, object]) -> None:
        write_atomic(self.config_path, json_bytes(config))

    def _require_same(
        self, recipe: Recipe, accepted: AcceptedChanges
    ) -> tuple[dict[str, Any], list[SettingChange], _Changed]:
        """Compare `recipe` and its inputs with those of the run. Returns the run's recipe, and the changes of
        settings and of code.
        """
        if self._recorded_inputs is None:
            raise RunFolderError(
                f"{self.path / _INPUTS} is missing: it was lost, or the run was started by an older release;"
                f" {_ANEW}"
            )
        started = self.read_config()
        digests = cache(lambda: input_digests(recipe))
        settings = self._require_settings(started, recipe, accepted.settings, digests)
        return started, settings, self._require_inputs(recipe, accepted.code, digests())

    def _write_changes(
        self,
        recipe: Recipe,
        started: Mapping[str, Any],
        changes: Sequence[SettingChange],
        accepted: AcceptedChanges,
    ) -> None:
        """Write the settings of `recipe` that may change, and the changes that are recorded. Responses that
        would differ with them are dropped.
        """
        assert self._recorded_inputs is not None
        now = recorded_recipe(recipe)
        now["runtime"]["threads"] = self.thread_count(recipe)
        # The rest stays as written, so that its digest holds for other releases too.
        stays = fixed_settings(now if any(change.path[0] not in FREE for change in changes) else started)
        config = stays | {key: now[key] for key in FREE}
        if any(change.path[0] in ("rounds", "min_round_gain") for change in changes):
            # There is more to measure, and baselines are compared with the last round.
            (self.stage_path("evaluate") / DONE).unlink(missing_ok=True)
            for made in (*self.path.glob("stages/baseline-*"), self.path / "baselines"):
                shutil.rmtree(made, ignore_errors=True)
        records: list[RecordedChange] = []
        if changes:
            progress, time = self._stage_progress(recipe), datetime.now(UTC).isoformat(timespec="seconds")
            records = [RecordedChange.from_change(recipe, change, progress, time) for change in changes]
            steps: dict[str, int] = {}
            for change, record in zip(changes, records, strict=True):
                if change.changes_weights(recipe):
                    steps |= record.stages
            for stage, step in steps.items():
                drop_later_responses(self.stage_path(stage), step)
            for change, record in zip(changes, records, strict=True):
                for stage in record.stages if change.change_kind == "drawn" else ():
                    drop_responses(self.stage_path(stage))
            digests = [*self._recorded_inputs.get("recipes", []), digest_of(fixed_settings(config))]
            recorded = [*self._recorded_inputs.get("setting_changes", []), *map(asdict, records)]
            checked = [digest_of(_checked_settings(one)) for one in (started, config)]
            settings = list(dict.fromkeys([*self._recorded_inputs.get("settings", []), *checked]))
            inputs = {"setting_changes": recorded, "recipes": digests, "settings": settings, "config": config}
            write_sealed(self.path / _INPUTS, {**self._recorded_inputs, **inputs})
            del self._recorded_inputs  # read again on access
        self._write_config(config)
        if any(not change.is_free for change in changes):
            accepted.tell("settings", ", ".join(record.format_change() for record in records))

    def _stage_progress(self, recipe: Recipe) -> Progress:
        from opd.pipelines.stages.pipeline_plan import plan_stages

        progress: dict[str, Mapping[str, Any] | None] = {}
        for stage in plan_stages(recipe):
            path, newest = self.stage_path(stage), None
            if (path / DONE).exists():
                progress[stage] = None
                continue
            if (path / "checkpoints").is_dir():
                newest = CheckpointStore(path / "checkpoints", owner=self.owner_id(stage)).latest()
            progress[stage] = {} if newest is None else {**newest.state, "step": newest.step}
        return progress

    def _require_inputs(self, recipe: Recipe, accept_code: bool, now: Given) -> _Changed:
        """Return the changes of the user's own code, from the digests `now`. Other inputs may not change."""
        assert self._recorded_inputs is not None
        code = user_code(recipe)
        changed: _Changed = {}
        for where, files in with_changes(self._recorded_inputs["given"], self.code_changes).items():
            digests = now.get(where, {})
            for name in {**files, **digests}:
                was, now_is = files.get(name), digests.get(name)
                if was == now_is:
                    continue
                if where in code and accept_code:
                    changed.setdefault(where, {})[name] = {"was": was, "is": now_is}
                    continue
                accepted = f"or go on with what it is now by {ACCEPT_CODE}, " if where in code else ""
                since = "last went on" if self.code_changes and where in code else "was started"
                raise RunFolderError(
                    f"{where}: {name} is not what it was when the run in {self.path} {since};"
                    f" restore it, {accepted}or start a new run with --out"
                )
        return changed

    def _record_code(self, recipe: Recipe, changed: _Changed) -> None:
        assert self._recorded_inputs is not None
        stages = [path for path in sorted(self.path.glob("stages/*")) if any(path.iterdir())]
        change = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "done": [path.name for path in stages if (path / DONE).exists()],
            "under_way": [path.name for path in stages if not (path / DONE).exists()],
            "files": changed,
        }
        # Changed sources or generate functions make other requests under the same names.
        anew = any(where.endswith((".source", "rollout.generate")) for where in changed)
        for stage, state in self._stage_progress(recipe).items():
            if state is not None and anew:
                drop_responses(self.stage_path(stage))
            elif state is not None:
                drop_later_responses(self.stage_path(stage), int(state.get("step", 0)))
        write_sealed(
            self.path / _INPUTS, {**self._recorded_inputs, "code_changes": [*self.code_changes, change]}
        )
        del self._recorded_inputs  # read again on access

    def _remove_leftovers(self) -> None:
        """Remove working files of stages that were killed between their record and this removal."""
        for record in self.path.glob(f"stages/*/{DONE}"):
            with contextlib.suppress(RunFolderError):  # of a damaged record, which `stage_done` reports
                if self._read_record(record.parent.name) is not None:
                    self.remove_working_files(record.parent.name)

    def _require_settings(
        self, config: dict[str, Any], recipe: Recipe, accepted: bool, digests: Callable[[], Given]
    ) -> list[SettingChange]:
        """Return the changes of `recipe`, whose inputs have `digests`, against `config` to record. Raises
        `RunFolderError` for settings that may not differ.
        """
        assert self._recorded_inputs is not None
        # A recipe of another version may not validate. Then the comparison below names the key.
        with contextlib.suppress(ValidationError):
            config = recorded_recipe(absolute_paths(Recipe.model_validate(config)))
        paths = [".".join(path) for path in path_keys(recipe)]
        run = f"{self.path} {'last went on' if self.setting_changes else 'was started'}"
        progress = cache(lambda: self._stage_progress(recipe))
        changes = []
        for change in compare_recipes(config, recorded_recipe(absolute_paths(recipe))):
            # A path may change if the files there are those that the run was started with.
            files = self._recorded_inputs["given"].get(change.name) if change.name in paths else None
            moved = files is not None and digests().get(change.name) == files
            if change.is_free or moved:
                changes += [change] if change.is_recorded and not moved else []
                continue
            require_allowed(run, recipe, change, accepted, progress)
            changes.append(change)
        return changes
