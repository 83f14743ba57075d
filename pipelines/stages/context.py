"""What a running stage is given: its recipe, its place in the run folder, where to report, and helpers.

Helpers compute for it beside its own process: rollout engines and teachers elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from opd.config import Recipe
from opd.metrics import MemoryMeter, MetricsWriter, NoMetrics
from opd.models.frozen_bases import FrozenBases
from opd.pipelines.records.cards import Cards
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.records.stage_names import model_stage
from opd.protocols import Teacher
from opd.ranks import Ranks, path_of_rank
from opd.rollout.engine_pool import EnginePool
from opd.rollout.preemption import Preemption
from opd.storage.checkpoints import CheckpointStore
from opd.train.offload import Shelf

if TYPE_CHECKING:
    from opd.pipelines.launch.servers import Servers


class Helpers(Protocol):
    """What `launch` has put at a stage's disposal."""

    def writers(self, model: Path, adapters: bool = False) -> EnginePool:
        """Engines that hold the Hugging Face folder `model` as version 0, or nothing yet as version -1.

        `adapters`: engines that merge adapters into it themselves are to be given the recipe's.
        """
        ...

    def teachers(self, names: Sequence[str], vocabulary: int) -> Mapping[str, Teacher] | None:
        """The recipe's teachers of these names, cut to `vocabulary` tokens; `None`: they run in this
        process.
        """
        ...


@dataclass(slots=True)
class StageContext:
    """One stage of one run."""

    recipe: Recipe
    folder: RunFolder
    stage: str
    """Name of the stage; prefixes the uid of every sample it generates."""
    metrics: MetricsWriter
    checkpoints: CheckpointStore
    progress: Callable[[int, int, str], None]
    """`progress(done, total, headline)`."""
    preemption: Preemption
    """What the run has been asked: to stop, to make room, or nothing."""
    helpers: Helpers | None = None
    """Engines and teachers in other processes, where the recipe's `launch` asks for them."""
    servers: Servers | None = None
    """The inference servers that the run starts itself."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that run this stage together."""
    closing: ExitStack = field(default_factory=ExitStack)
    """What is given back when the stage ends."""
    memory: MemoryMeter = field(default_factory=MemoryMeter)
    """Who holds how much in this process."""
    bases: FrozenBases = field(default_factory=FrozenBases)
    """What is frozen here and computed with by several."""

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        folder: RunFolder,
        stage: str,
        progress: Callable[[int, int, str], None],
        preemption: Preemption | None = None,
        helpers: Helpers | None = None,
        ranks: Ranks | None = None,
        servers: Servers | None = None,
    ) -> StageContext:
        """Open the stage's own folder under `stages/`; of several ranks the first writes metrics."""
        ranks = ranks or Ranks()
        place = folder.stage(stage)
        return cls(
            recipe,
            folder,
            stage,
            MetricsWriter(place, recipe.runtime.tensorboard, recipe.runtime.sinks, recipe.name)
            if ranks.main
            else NoMetrics(),
            CheckpointStore(folder.checkpoints(stage), recipe.runtime.keep_checkpoints, folder.owner(stage)),
            progress,
            preemption or Preemption(recipe.runtime.grace_seconds),
            helpers,
            servers,
            ranks,
        )

    def of_rank(self, path: Path) -> Path:
        """Where this rank keeps what is at `path` for the first."""
        return path_of_rank(path, self.ranks.rank)

    @property
    def shelf(self) -> Shelf | None:
        """A place for what learns while others use the device, where the recipe asks for one."""
        if not self.recipe.runtime.offload.trainer:
            return None
        return Shelf(self.folder.stage(self.stage))

    def model_path(self, name: str) -> Path:
        """Folder of a model of the run: see `RunFolder.model`."""
        return self.folder.model(self.recipe, name)

    def card(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """The card of the model that this stage has made."""
        return Cards.of(self.recipe, self.folder).of_stage(self.stage, result)

    def model(self, name: str) -> Path:
        """`model_path`, once all that its stage recorded was compared with what is there."""
        self.folder.stage_done(model_stage(name))
        return self.model_path(name)

    def teacher_source(self, name: str) -> str:
        """Folder or URL of a teacher: one of the recipe's own, or the specialist of that domain."""
        return self.recipe.given_teachers().get(name) or str(self.model(f"specialist:{name}"))


def baseline_methods(recipe: Recipe) -> list[str]:
    """The baselines of `recipe`, with the all-token mixed run where it is asked for."""
    methods: list[str] = list(recipe.baselines.methods)
    return [*methods, "mixed_grpo_all"] if recipe.baselines.mixed_grpo_all_tokens else methods
