"""Name the paths of a run in its folder, and drop responses when a stage ends or its settings change.

inputs.json                      digests of the run's inputs (recipe, models, data and external code) and of
                                 changed code, changed settings, the commits from the Hub, the CPU threads
config.json                      the resolved recipe. A run with this file has begun
stages/STAGE/                    metrics.jsonl  checkpoints/  last_samples.json (of the last step, or one
                                 within a second of it, for viewers)  flags.jsonl (rules of `watch` that
                                 fired)  done.json (written last), log.txt of a stage in its own process,
                                 and difficulty.json of a stage that measured its prompts
                                 wal/ (the log of its rollouts), episodes/ (agents' commands)
                                 and cache/ (teachers' hidden states) exist while the stage runs.
                                 episodes.kept/ (the newest of episodes/ that were trained on) stays
base/  sft/DOMAIN/  specialists/DOMAIN/  merged/  baselines/NAME/      Hugging Face folders
rounds/N/specialists/DOMAIN/  rounds/N/merged/      those of round N, from the second on
published/TEACHER/               the merge's streamed teachers, unless storage.published is another place
downloaded/TEACHER/              published teachers of the recipe as Hugging Face folders, if needed complete.
                                 They are written again unless they equal the published files
weights_cache/NODE/              a node's cache of teachers from object stores, until the run has ended
logs/ACTOR.log                   output of each actor of `launch: ray`
logs/servers/GROUP-N.log         output of each server that the run has started
logs/servers/.key                the key of these servers, for the user of the run alone
results.json  report.html

A run that continues with changes drops responses. A step is repeated with its own responses, because the
weights that generated them come again. With another learning rate, or fixed rewards, that holds for the
checkpoint's weights, but not for those of later steps. Their responses would be trained on as if the
weights of that step had generated them.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

from opd.config import Recipe
from opd.errors import RunFolderError
from opd.metrics import FILE_NAME, FLAGS
from opd.models.hf_folder import is_whole
from opd.pipelines.records.stage_names import split_round

EPISODES, KEPT = "episodes", "episodes.kept"
DONE, LAST_SAMPLES = "done.json", "last_samples.json"
CONFIG = "config.json"
WEIGHTS = "weights_cache"


def safe_name(name: str) -> str:
    """Return `name` if it can name one folder. Raises `RunFolderError` if it could lead anywhere else."""
    if not name or name.startswith(".") or any(sign in name for sign in "/\\\0"):
        raise RunFolderError(
            f"{name!r} cannot name a folder; use a name without slashes that does not start with a dot"
        )
    return name


class RunLayout:
    """The paths of a run in the folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def config_path(self) -> Path:
        return self.path / CONFIG

    @property
    def results_path(self) -> Path:
        return self.path / "results.json"

    def specialist_folder(self, domain: str) -> Path:
        return self.path / "specialists" / safe_name(domain)

    def baseline_folder(self, name: str) -> Path:
        return self.path / "baselines" / safe_name(name)

    def model_folder(self, recipe: Recipe, name: str) -> Path:
        """Return the folder of a model: `base`, `merged`, `specialist:DOMAIN`, `sft:DOMAIN` or a baseline by
        name.

        `sft:DOMAIN` is that specialist before GRPO. A given base without training stays in its folder. It is
        not copied, unless it is an adapter or quantised.
        """
        name, number = split_round(name)
        if number > 1:
            return RunLayout(self.path / "rounds" / str(number)).model_folder(recipe, name)
        if name == "base" and recipe.model.path is not None and not recipe.trains_base:
            path = Path(recipe.model.path)
            return path if is_whole(path) else self.path / "base"
        if name in ("base", "merged"):
            return self.path / name
        if name.startswith("specialist:"):
            return self.specialist_folder(name.removeprefix("specialist:"))
        if name.startswith("sft:"):
            return self.path / "sft" / safe_name(name.removeprefix("sft:"))
        return self.baseline_folder(name)

    def stage_folder(self, stage: str) -> Path:
        """Return the folder of a stage, made if it is not there."""
        folder = self.stage_path(stage)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def stage_path(self, stage: str) -> Path:
        """Return the folder of a stage, there or not."""
        return self.path / "stages" / safe_name(stage)

    @property
    def published_folder(self) -> Path:
        return self.path / "published"

    def downloaded_folder(self, teacher: str) -> Path:
        """Return the Hugging Face folder of a published teacher of the recipe."""
        return self.path / "downloaded" / safe_name(teacher)

    def weights_cache(self, recipe: Recipe) -> Path:
        """Return this node's cache of teachers read from object stores."""
        folder = recipe.runtime.weights_cache
        root = self.path / WEIGHTS if folder is None else Path(folder).expanduser()
        return root / safe_name(platform.node() or "node")

    def wal_folder(self, stage: str) -> Path:
        return self.stage_folder(stage) / "wal"

    def trajectories_folder(self, stage: str) -> Path:
        return self.stage_folder(stage) / "trajectories"

    def metrics_path(self, stage: str) -> Path:
        return self.stage_folder(stage) / FILE_NAME

    def flags_path(self, stage: str) -> Path:
        return self.stage_folder(stage) / FLAGS

    def last_samples(self, stage: str) -> Path:
        return self.stage_folder(stage) / LAST_SAMPLES

    def difficulty_path(self, stage: str) -> Path:
        """Return the file of a specialist's measurements of its prompts before training."""
        return self.stage_folder(stage) / "difficulty.json"

    def checkpoints_folder(self, stage: str) -> Path:
        return self.stage_folder(stage) / "checkpoints"

    def log_path(self, stage: str) -> Path:
        return self.stage_folder(stage) / "log.txt"

    def actor_log(self, name: str) -> Path:
        """Return the log of an actor of `launch: ray`. Its folder is made if it is not there."""
        folder = self.path / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{safe_name(name)}.log"

    @property
    def server_logs(self) -> Path:
        """Folder for the logs of servers that the run has started."""
        return self.path / "logs" / "servers"

    def remove_working_files(self, stage: str) -> None:
        """Remove the rollouts of a finished stage, their log, and its teachers' hidden states."""
        folder = self.stage_folder(stage)
        for name in ("wal", EPISODES, "cache", "trajectories", "signals"):
            for path in (folder / name, *folder.glob(f"{name}-rank-*")):
                shutil.rmtree(path, ignore_errors=True)


def drop_responses(stage: Path) -> None:
    """Drop all responses of the stage in this folder, of every rank, because they would differ now."""
    for name in ("wal", EPISODES, KEPT, "trajectories"):
        for path in _rank_folders(stage, name):
            shutil.rmtree(path, ignore_errors=True)
    for file in stage.glob("in_flight*.safetensors*"):
        file.unlink(missing_ok=True)


def drop_later_responses(stage: Path, step: int) -> None:
    """Drop each response with a token from weights of a later version than `step`. Raises `StorageError` if a
    log or a store cannot be read.
    """
    # Imported only here: a command without memory for numpy opens run folders, too, and reports that.
    from opd.storage.sample_store import SampleStore, SampleWriter
    from opd.storage.wal import TokenWAL

    for path in _rank_folders(stage, "wal"):
        with TokenWAL(path) as log:
            requests = ((uid, log.find(uid)) for uid in log.uids())
            later = [u for u, logged in requests if logged and logged.policy_versions.max(initial=0) > step]
            log.retire(later)
        episodes = path.with_name(path.name.replace("wal", EPISODES, 1))
        if episodes.is_dir():
            from opd.environments.trajectory import TrajectoryLog

            with TrajectoryLog(episodes) as commands:
                commands.retire_requests(later)
    for path in _rank_folders(stage, "trajectories"):
        with SampleWriter(path) as writer:
            store = SampleStore.open([path])
            late: dict[int, list[str]] = {}
            for batch, record in zip(store.batch.tolist(), store.records, strict=True):
                if record.last_version > step:
                    late.setdefault(batch, []).append(record.uid)
            for batch, uids in sorted(late.items()):
                writer.put([], batch, uids)


def _rank_folders(stage: Path, name: str) -> list[Path]:
    return [path for path in (stage / name, *stage.glob(f"{name}-rank-*")) if path.is_dir()]
