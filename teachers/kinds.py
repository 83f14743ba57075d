"""The kinds of teachers: `teachers.NAME: {type: ...}` of a recipe, opened and looked at by one file each.

The settings of a kind are a class of `opd.config.teachers`; its code is the `KIND` of
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
    """Where and how a teacher computes."""

    dtype: str = "float32"
    """Of its weights, while they are in memory, and of its hidden states."""
    device: str = "cpu"
    max_tokens: int = 4096
    """Packed tokens per micro-batch."""
    vocabulary: int | None = None
    """Size of the student's tokenizer; both heads are cut to it, however they are padded."""
    sequence_chunk: int | None = None
    """Micro-batches of more packed tokens go through each layer in pieces of so many."""


@dataclass(frozen=True, slots=True)
class TeacherOpening:
    """What teachers are opened with."""

    recipe: Recipe
    placement: Placement
    sources: Mapping[str, str]
    """Name -> folder or URL, in the form that `TeacherSettings.reads` asks for."""
    group: dist.ProcessGroup | None = None
    """Ranks that read teachers together, all of which open the same ones; `None`: this process alone."""
    cache: ShardCache | None = None
    """This node's copies of what is read from object stores."""
    given_up: Callable[[Sequence[str]], OpdError | None] = lambda urls: None
    """Why servers with these URLs will not be started again, if it is this run that has started them."""
    turns: Mapping[str, Callable[[], AbstractContextManager[None]]] = field(default_factory=dict)
    """Of groups of servers that the run has started and that sleep otherwise, by name: around what they
    compute. All ranks enter and leave it together."""
    bases: FrozenBases | None = None
    """Bases that are here, on which teachers may have been trained."""
    check: Callable[[], None] = lambda: None
    """Asked now and then by who waits for another machine: raises `PreemptedError` if the run is to stop and
    cannot wait longer."""


def nothing_to_check(name: str, settings: Any, recipe: Recipe) -> Iterable[str | OpdError]:
    """The `check` of a kind that can only fail where every teacher can."""
    return ()


@dataclass(frozen=True, slots=True)
class TeacherKind:
    """What the file of a kind gives."""

    open: Callable[[Mapping[str, Any], TeacherOpening], AbstractContextManager[Mapping[str, Teacher]]]
    """All teachers of the kind at once, by name -> settings: they may share memory, streams and modules."""
    check: Callable[[str, Any, Recipe], Iterable[str | OpdError]] = nothing_to_check
    """What `opd doctor` and every start of a run ask, before any weights are read, of teacher `name` with
    these settings: what is right as a sentence, what is wrong as the error that it would raise. It may also
    raise."""


def kind_of(settings: TeacherSettings) -> TeacherKind:
    """The kind whose settings these are."""
    return import_module(f"opd.teachers.{settings.type}_teacher").KIND


@contextmanager
def open_kinds(names: Iterable[str], opening: TeacherOpening) -> Iterator[dict[str, Teacher]]:
    """The teachers of `names` while the block runs, each of the kind that the recipe says.

    Raises what the kinds raise: `StorageError`, `CheckpointError`, `ConfigError`, `TeacherError`.
    """
    by_type: dict[str, dict[str, TeacherSettings]] = {}
    for name in names:
        settings = opening.recipe.teacher(name)
        by_type.setdefault(settings.type, {})[name] = settings
    with ExitStack() as stack:
        found: dict[str, Teacher] = {}
        for members in by_type.values():
            kind = kind_of(next(iter(members.values())))
            found |= stack.enter_context(kind.open(members, opening))
        yield {name: found[name] for members in by_type.values() for name in members}
