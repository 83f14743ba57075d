"""Where the things of a run lie in its folder, and what of them goes when a stage ends or begins otherwise.

inputs.json                      digests of what the run began with: recipe, models, data and code from
                                 elsewhere, and of code that changed since; settings that did; the commits of
                                 what is from the Hub; the CPU threads settled then
config.json                      the resolved recipe; a run that has it has begun
stages/STAGE/                    metrics.jsonl  checkpoints/  last_samples.json (of the last step, or one
                                 within a second of it, for whoever watches)  flags.jsonl (where a rule of
                                 `watch` fired)  done.json (written last), log.txt of a stage that ran in a
                                 process of its own, and difficulty.json of one that measured its prompts
                                 wal/ (the log of its rollouts), episodes/ (of what agents did with tools)
                                 and cache/ (teachers' hidden states) are there while the stage runs;
                                 episodes.kept/ (the newest of episodes/ that were learnt from) stays
base/  sft/DOMAIN/  specialists/DOMAIN/  merged/  baselines/NAME/      Hugging Face folders
published/TEACHER/               what the merge streams, unless storage.published says elsewhere
downloaded/TEACHER/              published teachers of the recipe as Hugging Face folders, where needed whole;
                                 written again unless they are what was published
weights_cache/NODE/              what a node has read of teachers in object stores, until the run has ended
logs/ACTOR.log                   what each actor of `launch: ray` said
logs/servers/GROUP-N.log         what each server said that the run has started
logs/servers/.key                what these servers ask for: for the user of the run alone
results.json  report.html

A run that goes on otherwise than it did forgets responses. A step is repeated with those that were written
for it, since the weights that wrote them come again. With another learning rate, or rewards that were mended,
those of the checkpoint do; those of later steps do not, and what they wrote would be learnt from as if the
weights of that step had written it.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

from opd.config import Recipe
from opd.errors import RunFolderError
from opd.metrics import FILE_NAME, FLAGS
from opd.models.hf_folder import adapter_base

EPISODES, KEPT = "episodes", "episodes.kept"
DONE, LAST_SAMPLES = "done.json", "last_samples.json"
CONFIG = "config.json"
WEIGHTS = "weights_cache"


def safe_name(name: str) -> str:
    """`name` if it can name one folder. Raises `RunFolderError` if it could lead anywhere else."""
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
    def config(self) -> Path:
        return self.path / CONFIG

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

    def model(self, recipe: Recipe, name: str) -> Path:
        """Where a model lies: `base`, `merged`, `specialist:DOMAIN`, `sft:DOMAIN` (what that specialist was
        before GRPO) or a baseline by name.

        A base that is given and not trained stays where it is; it is not copied, unless it is an adapter.
        """
        if name == "base" and recipe.model.path is not None and not recipe.trains_base:
            given = Path(recipe.model.path)
            return given if adapter_base(given) is None else self.base
        if name in ("base", "merged"):
            return self.base if name == "base" else self.merged
        if name.startswith("specialist:"):
            return self.specialist(name.removeprefix("specialist:"))
        if name.startswith("sft:"):
            return self.path / "sft" / safe_name(name.removeprefix("sft:"))
        return self.baseline(name)

    def stage(self, stage: str) -> Path:
        """The folder of a stage, made if it is not there."""
        folder = self.place(stage)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def place(self, stage: str) -> Path:
        """The folder of a stage, there or not."""
        return self.path / "stages" / safe_name(stage)

    @property
    def published(self) -> Path:
        return self.path / "published"

    def downloaded(self, teacher: str) -> Path:
        """Where a published teacher of the recipe is kept as a Hugging Face folder."""
        return self.path / "downloaded" / safe_name(teacher)

    def weights_cache(self, recipe: Recipe) -> Path:
        """Where this node keeps what it has read of teachers in object stores."""
        given = recipe.runtime.weights_cache
        root = self.path / WEIGHTS if given is None else Path(given).expanduser()
        return root / safe_name(platform.node() or "node")

    def cache(self, stage: str) -> Path:
        return self.stage(stage) / "cache"

    def wal(self, stage: str) -> Path:
        return self.stage(stage) / "wal"

    def episodes(self, stage: str) -> Path:
        """The log of what agents did with their tools."""
        return self.stage(stage) / EPISODES

    def kept_episodes(self, stage: str) -> Path:
        """What stays of that log: the newest episodes that were learnt from."""
        return self.stage(stage) / KEPT

    def trajectories(self, stage: str) -> Path:
        return self.stage(stage) / "trajectories"

    def metrics(self, stage: str) -> Path:
        return self.stage(stage) / FILE_NAME

    def flags(self, stage: str) -> Path:
        return self.stage(stage) / FLAGS

    def last_samples(self, stage: str) -> Path:
        return self.stage(stage) / LAST_SAMPLES

    def difficulty(self, stage: str) -> Path:
        """What a specialist has measured of its prompts before it learned."""
        return self.stage(stage) / "difficulty.json"

    def checkpoints(self, stage: str) -> Path:
        return self.stage(stage) / "checkpoints"

    def log(self, stage: str) -> Path:
        return self.stage(stage) / "log.txt"

    def actor_log(self, name: str) -> Path:
        """What an actor of `launch: ray` says; its folder is made if it is not there."""
        folder = self.path / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{safe_name(name)}.log"

    @property
    def server_logs(self) -> Path:
        """Folder for what servers say that the run has started."""
        return self.path / "logs" / "servers"

    def remove_working_files(self, stage: str) -> None:
        """A stage that is done needs neither its rollouts, their log, nor its teachers' hidden states."""
        signals = self.stage(stage) / "signals"
        logs = (self.wal(stage), self.episodes(stage))
        for folder in (*logs, self.cache(stage), self.trajectories(stage), signals):
            for own in (folder, *folder.parent.glob(f"{folder.name}-rank-*")):
                shutil.rmtree(own, ignore_errors=True)


def forget(stage: Path) -> None:
    """Drop all of it, in the folder of the stage, of every rank: it would be written otherwise now."""
    for own in (path for name in ("wal", EPISODES, KEPT, "trajectories") for path in _of_ranks(stage, name)):
        shutil.rmtree(own, ignore_errors=True)
    for file in stage.glob("in_flight*.safetensors*"):
        file.unlink(missing_ok=True)


def forget_later(stage: Path, step: int) -> None:
    """Drop each response of which weights of a later version than `step` have written a token. Raises
    `StorageError` where a log or a store cannot be read.
    """
    # Only here: a command that has no room for numpy opens run folders, too, and says so.
    from opd.storage.sample_store import SampleStore, SampleWriter
    from opd.storage.wal import TokenWAL

    for own in _of_ranks(stage, "wal"):
        with TokenWAL(own) as log:
            known = ((uid, log.find(uid)) for uid in log.uids())
            later = [u for u, logged in known if logged and logged.policy_versions.max(initial=0) > step]
            log.retire(later)
        episodes = own.with_name(own.name.replace("wal", EPISODES, 1))
        if episodes.is_dir():
            from opd.environments.trajectory import TrajectoryLog

            with TrajectoryLog(episodes) as commands:
                commands.retire_requests(later)
    for own in _of_ranks(stage, "trajectories"):
        with SampleWriter(own) as writer:
            store = SampleStore.open([own])
            late = store.table.last_version > step
            for batch in sorted(set(store.batch[late].tolist())):
                rows = (late & (store.batch == batch)).nonzero()[0]
                writer.put([], batch, [store.table.uid[row] for row in rows.tolist()])


def _of_ranks(stage: Path, name: str) -> list[Path]:
    return [own for own in (stage / name, *stage.glob(f"{name}-rank-*")) if own.is_dir()]
