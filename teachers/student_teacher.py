"""The student as its own teacher: the weights that a step begins with, or their moving average.

On-policy self-distillation (OPSD, SDFT, SDPO). The teacher reads what the student wrote after a prompt that
says more, and its scores are constants of the step. Its forward is that of the trained model, without a
gradient, so a second copy of the weights exists for a moving average alone.

Its hidden states belong to one version of the weights, and so does the head that they are used with. A step
with one update uses the live head, because micro-batches change no weight. With several updates, several
ranks or an average, the head is copied while its weights are there.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from opd.config import Recipe
from opd.config.teachers import StudentTeacherConfig
from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.models.causal_lm import held_bytes
from opd.teachers.kinds import TeacherKind, TeacherOpening
from opd.teachers.score_cache import row_pieces
from opd.train.backend import Backend
from opd.train.packing import copy_to_device, pack_tokens, split_by_tokens
from opd.train.torch_backend import TorchBackend
from opd.types import HiddenStates, Sample

_LABEL = "the scores of the student as its own teacher"


class StudentTeacher:
    """The student that `follow` names.

    Args:
        name: Its name in recipes and metrics.
        decay: Of the moving average of its weights. `None`: the weights themselves.
        every: Steps between two updates of the average.
        max_tokens: Packed tokens per forward pass.
        vocabulary: Size of the student's tokenizer, to which the head is cut.
    """

    streams = False

    def __init__(
        self,
        name: str,
        *,
        decay: float | None = None,
        every: int = 1,
        max_tokens: int = 4096,
        vocabulary: int | None = None,
    ) -> None:
        self.name, self.decay, self._every = name, decay, every
        self._max_tokens, self._vocabulary = max_tokens, vocabulary
        self._backend: TorchBackend | None = None
        self._copies_head = False
        self._head: Head | None = None
        self._scored = -1
        self._process = secrets.token_hex(8)  # another attempt's rounding may differ

    def follow(self, backend: Backend, updates: int) -> None:
        """Score with `backend`, which updates `updates` times a step. Call it before loading a checkpoint."""
        if not isinstance(backend, TorchBackend):
            raise TeacherError(
                f"teacher {self.name} is of type student, whose weights {type(backend).__name__} cannot lend;"
                " set train.backend to torch."
            )
        self._backend = backend
        if self.decay is not None:
            backend.keep_average(self.decay, self._every)
        self._copies_head = self.decay is not None or updates > 1 or backend.lockstep

    @property
    def student(self) -> TorchBackend:
        """What it follows."""
        if self._backend is None:
            raise TeacherError(f"teacher {self.name} is of type student, and follows none yet.")
        return self._backend

    @property
    def collective(self) -> bool:
        """Return whether ranks share the weights, so that all of them score equally often."""
        return self._backend is not None and self._backend.lockstep

    @property
    def digest(self) -> str:
        """The version of the weights, in this process: nothing that was scored by another one is equal."""
        return f"{self._process}/{self.student.updates}/{self.decay}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the moving average, and of a copied head."""
        follows = self._backend if self.decay is not None else None
        average = None if follows is None else follows.average
        copied = self._head if self._copies_head else None
        head = [] if copied is None else [part for part in (copied.weight, copied.bias) if part is not None]
        return (0 if average is None else average.nbytes) + held_bytes(head)

    @property
    def borrows(self) -> bool:
        """Return whether its head is the trained model's own."""
        return not self._copies_head

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> HiddenStates:
        """Return last hidden states `[N, D]` at the rows `C-1 ... C+R-2` of every sample, in order. All ranks
        call it together.
        """
        student = self.student
        student.reload_weights()
        averaged = nullcontext() if self.decay is None else student.averaged_weights()
        with student.together.collective(_LABEL), averaged:
            parts = list(self._score_packs(samples))
            if not self._copies_head or self._scored != student.updates:
                student.run(self._take_head)
            self._scored = student.updates
        if not parts:
            return HiddenStates(torch.zeros(0, student.hidden_size, device=student.device))
        return HiddenStates(torch.cat(parts))

    def load_head(self) -> Head:
        """Return the head of the weights that scored. Raises `TeacherError` if they are gone."""
        if self._head is None or (self._scored != self.student.updates and not self._copies_head):
            raise TeacherError(
                f"teacher {self.name} has scored nothing with the student's present weights; call score()"
                " before each update."
            )
        return self._head

    def _score_packs(self, samples: Sequence[Sample]) -> Iterator[Tensor]:
        """Yield the rows of each sample. A rank with fewer packs than others passes on with nothing."""
        student = self.student
        lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
        packs = split_by_tokens(lengths, [None] * len(lengths), self._max_tokens)
        missing = 0
        if student.lockstep:
            missing = student.together.max_over_ranks(len(packs), _LABEL) - len(packs)
        for start, stop in packs:
            part = samples[start:stop]
            *tensors, cu_seqlens, _ = pack_tokens(part)
            ids, positions = copy_to_device(tensors, student.device)
            hidden = student.run(lambda packed=(ids, positions, cu_seqlens): student.hidden(*packed))
            yield from (rows for _, rows in row_pieces(part, hidden, None))
        for _ in range(missing):
            ids = torch.zeros(1, dtype=torch.int64, device=student.device)
            ends = torch.tensor([0, 1], dtype=torch.int32)
            student.run(lambda ids=ids, ends=ends: student.hidden(ids, ids, ends))

    def _take_head(self) -> Tensor:
        """Keep the head of the present weights, as constants. Return a tensor, as passes do."""
        live = self.student.model.head(self._vocabulary)
        parts = {"weight": live.weight.detach(), "bias": None if live.bias is None else live.bias.detach()}
        if self._copies_head:
            parts = {name: None if part is None else part.clone() for name, part in parts.items()}
        self._head = replace(live, **parts)
        return self._head.weight


@contextmanager
def _open_teachers(
    teachers: Mapping[str, StudentTeacherConfig], opening: TeacherOpening
) -> Iterator[dict[str, StudentTeacher]]:
    placement = opening.placement
    yield {
        name: StudentTeacher(
            name,
            decay=settings.decay,
            every=settings.sync_every or 1,
            max_tokens=placement.max_tokens,
            vocabulary=placement.vocabulary,
        )
        for name, settings in teachers.items()
    }


def _check_student(name: str, settings: StudentTeacherConfig, recipe: Recipe) -> Iterable[str]:
    if settings.decay is None:
        return ["the student itself, by the weights that a step begins with; it takes no memory of its own"]
    often = "a step" if settings.sync_every is None else f"every {settings.sync_every} steps"
    if settings.moving_average is None:
        return [f"a copy of the student's weights, renewed {often}"]
    return [f"the moving average of the student's weights, decay {settings.moving_average:g} {often}"]


KIND = TeacherKind(_open_teachers, _check_student)
