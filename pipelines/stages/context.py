"""What a running stage is given: its recipe, its place in the run folder, and where to report.

What a recipe's models compute in, learn in and are written in; and what is lost without master weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config import Recipe
from opd.metrics import MetricsWriter, NoMetrics
from opd.models.hf_folder import described_in
from opd.pipelines.records.cards import Cards
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.stages.helpers import Helpers
from opd.ranks import Ranks, path_of_rank
from opd.rollout.preemption import Preemption
from opd.storage.checkpoints import CheckpointStore
from opd.storage.publish import read_headers

if TYPE_CHECKING:
    from torch import Tensor

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a value, by name of the dtype."""
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""By safetensors' names."""
_LOOK = 1 << 16
"""Values of each tensor that are looked at to judge all of it."""


def model_dtype(recipe: Recipe) -> str:
    """Name of the dtype student and teachers compute in and models are written in: the recipe's, else that of
    the checkpoint it starts from, else float32.

    Raises `StorageError` if that checkpoint cannot be read.
    """
    if recipe.model.dtype is not None:
        return recipe.model.dtype
    return "float32" if recipe.model.path is None else checkpoint_dtype(described_in(Path(recipe.model.path)))


def checkpoint_dtype(folder: Path) -> str:
    """The dtype that most bytes of a Hugging Face folder's weights have, as its files say; float32 where that
    is none that models are computed in here. Raises `StorageError` if a file is missing or damaged.
    """
    sizes: dict[str, int] = {}
    for source in read_headers(folder).values():
        sizes[source.dtype] = sizes.get(source.dtype, 0) + source.nbytes
    return _STORED.get(max(sizes, key=lambda name: sizes[name], default=""), "float32")


def has_masters(recipe: Recipe) -> bool:
    """Whether what learns is kept in float32 while layers compute in another dtype."""
    return recipe.train.precision == "mixed" and model_dtype(recipe) != "float32"


def learning_width(recipe: Recipe) -> int:
    """Bytes of a weight as the optimiser keeps it, and of each of its two moments."""
    return 4 if has_masters(recipe) else WIDTH[model_dtype(recipe)]


def some_weights(folder: Path) -> Iterator[Tensor]:
    """The first values of every floating-point tensor of a Hugging Face folder, `[n]` each."""
    import torch

    for source in read_headers(described_in(folder)).values():
        if source.dtype in _STORED and source.nbytes:
            dtype = getattr(torch, _STORED[source.dtype])
            with source.path.open("rb") as file:
                file.seek(source.start)
                values = bytearray(file.read(min(source.nbytes, _LOOK * dtype.itemsize)))
            yield torch.frombuffer(values, dtype=dtype)


def lost_share(weights: Iterable[Tensor], dtype: str, lr: float) -> float:
    """Share of `weights`, kept in `dtype`, that an update of `lr`, about AdamW's own size, leaves as they
    were: those of which it is less than half the distance to the next number.
    """
    import torch

    lost, count, eps = 0, 0, torch.finfo(getattr(torch, dtype)).eps
    for tensor in weights:
        values = tensor.float()
        exponent = torch.frexp(values).exponent  # a value is in [0.5, 1) * 2 ** exponent
        half = torch.ldexp(torch.full_like(values, eps / 2), exponent - 1)
        lost += int(((half > lr) & (values != 0)).sum())
        count += tensor.numel()
    return lost / count if count else math.nan


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
    note: Callable[[str], None]
    """One line for the person who watches."""
    preemption: Preemption
    """What the run has been asked: to stop, to make room, or nothing."""
    helpers: Helpers | None = None
    """Engines and teachers in other processes, where the recipe's `launch` asks for them."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that run this stage together."""
    closing: ExitStack = field(default_factory=ExitStack)
    """What is given back when the stage ends."""

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        folder: RunFolder,
        stage: str,
        progress: Callable[[int, int, str], None],
        note: Callable[[str], None],
        preemption: Preemption | None = None,
        helpers: Helpers | None = None,
        ranks: Ranks | None = None,
    ) -> StageContext:
        """Open the stage's own folder under `stages/`; of several ranks the first writes metrics."""
        ranks = ranks or Ranks()
        place = folder.stage(stage)
        return cls(
            recipe,
            folder,
            stage,
            MetricsWriter(place, tensorboard=recipe.runtime.tensorboard) if ranks.main else NoMetrics(),
            CheckpointStore(
                folder.checkpoints(stage), recipe.runtime.keep_checkpoints, note, folder.owner(stage)
            ),
            progress,
            note,
            preemption or Preemption(recipe.runtime.grace_seconds),
            helpers,
            ranks,
        )

    def of_rank(self, path: Path) -> Path:
        """Where this rank keeps what is at `path` for the first."""
        return path_of_rank(path, self.ranks.rank)

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


def model_stage(name: str) -> str:
    """The stage that makes the model which `StageContext.model_path` knows as `name`."""
    kind, _, domain = name.partition(":")
    if kind == "specialist":
        return f"specialist-{domain}"
    return {"base": "base", "merged": "merge"}.get(name, f"baseline-{name}")


def baseline_methods(recipe: Recipe) -> list[str]:
    """The baselines of `recipe`, with the all-token mixed run where it is asked for."""
    methods: list[str] = list(recipe.baselines.methods)
    return [*methods, "mixed_grpo_all"] if recipe.baselines.mixed_grpo_all_tokens else methods
