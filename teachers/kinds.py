"""The kinds of teachers: `teachers.NAME: {type: ...}` of a recipe. One file each opens and checks a kind.

The settings of a kind are a class of `opd.config.teachers`. Its code is the `KIND` of
`teachers/TYPE_teacher.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from opd.config import Recipe
from opd.config.teachers import TeacherSettings
from opd.errors import OpdError
from opd.protocols import Teacher

if TYPE_CHECKING:
    import torch.distributed as dist

    from opd.models.frozen_bases import FrozenBases
    from opd.storage.shard_cache import ShardCache


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and precision of a teacher's computation."""

    dtype: str = "float32"
    """dtype of its weights, while they are in memory, and of its hidden states."""
    device: str = "cpu"
    max_tokens: int = 4096
    """Packed tokens per micro-batch."""
    vocabulary: int | None = None
    """Size of the student's tokenizer. Both heads are cut to it, regardless of padding."""
    sequence_chunk: int | None = None
    """Micro-batches of more packed tokens go through each layer in chunks of so many."""


@dataclass(frozen=True, slots=True)
class TeacherOpening:
    """Arguments with which teachers are opened."""

    recipe: Recipe
    placement: Placement
    sources: Mapping[str, str]
    """Name -> folder or URL, in the form that `TeacherSettings.weight_source` requires."""
    group: dist.ProcessGroup | None = None
    """Ranks that read teachers as one group, all of which open the same ones. `None`: this process alone."""
    cache: ShardCache | None = None
    """This node's cache of data from object stores."""
    given_up: Callable[[Sequence[str]], OpdError | None] = lambda urls: None
    """Returns the reason why the run does not restart servers with these URLs, if it had started them."""
    turns: Mapping[str, Callable[[], AbstractContextManager[None]]] = field(default_factory=dict)
    """Name of a group of servers -> the context around its computation. These groups were started by the run
    and sleep otherwise. All ranks enter and leave the context together."""
    bases: FrozenBases | None = None
    """Bases that are here, on which teachers may have been trained."""
    check: Callable[[], None] = lambda: None
    """Called now and then while waiting for another machine. Raises `PreemptedError` if the run is to stop
    and cannot wait longer.
    """


def nothing_to_check(name: str, settings: object, recipe: Recipe) -> Iterable[str | OpdError]:
    """`check` of a kind with no failures of its own."""
    return ()


@dataclass(frozen=True, slots=True)
class TeacherKind:
    """Interface of a kind's file."""

    open: Callable[[Mapping[str, Any], TeacherOpening], AbstractContextManager[Mapping[str, Teacher]]]
    """Opens all teachers of the kind, by name -> settings. They may share memory, streams and modules."""
    check: Callable[[str, Any, Recipe], Iterable[str | OpdError]] = nothing_to_check
    """Checks teacher `name` with these settings before any weights are read. `opd doctor` and every start of
    a run call it. It yields a sentence for each success and the error for each failure. It may also raise.
    """


def kind_of(settings: TeacherSettings) -> TeacherKind:
    return import_module(f"opd.teachers.{settings.type}_teacher").KIND


@contextmanager
def open_kinds(names: Iterable[str], opening: TeacherOpening) -> Iterator[dict[str, Teacher]]:
    """Open the teachers `names` while the block runs, each of its kind in the recipe.

    Raises as the kinds raise: `StorageError`, `CheckpointError`, `ConfigError`, `TeacherError`.
    """
    by_type: dict[str, dict[str, TeacherSettings]] = {}
    for name in names:
        settings = opening.recipe.teacher_settings(name)
        by_type.setdefault(settings.type, {})[name] = settings
    with ExitStack() as stack:
        teachers: dict[str, Teacher] = {}
        for members in by_type.values():
            kind = kind_of(next(iter(members.values())))
            teachers |= stack.enter_context(kind.open(members, opening))
        yield {name: teachers[name] for members in by_type.values() for name in members}
