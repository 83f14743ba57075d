"""A teacher in this process: a Hugging Face model, one packed prefill, last hidden states as output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from opd.config.teachers import LocalTeacherConfig
from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.models.adapters import has_adapter
from opd.models.causal_lm import CausalLM
from opd.models.frozen_bases import FrozenBases
from opd.models.long_sequence import LayerMemory
from opd.teachers.kinds import TeacherKind, TeacherOpening
from opd.teachers.score_cache import RowPieces, row_pieces
from opd.train.packing import copy_to_device, pack_tokens, split_by_tokens
from opd.types import HiddenStates, Sample

_POSITION_TABLES = ("wpe", "embed_positions")
"""Names of embeddings of positions. Other models compute theirs."""


class LocalTeacher:
    """A frozen Hugging Face folder.

    Args:
        name: Its name in recipes and metrics.
        path: Its folder, read when the first samples arrive.
        dtype: Of its weights and hidden states.
        max_tokens: Packed tokens per forward pass.
        vocabulary: Size of the student's tokenizer; both heads are cut to it, however they are padded.
        sequence_chunk: More packed tokens go through the layers in pieces of so many.
        bases: Those that are here: of a model that is one of them and adapters these alone are read.
        joins: Whether other teachers have adapters on a base, too, so that one is read where none is here.
    """

    streams = False

    def __init__(
        self,
        name: str,
        path: str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_tokens: int = 4096,
        vocabulary: int | None = None,
        sequence_chunk: int | None = None,
        bases: FrozenBases | None = None,
        joins: bool = False,
    ) -> None:
        self.name = name
        self.path = Path(path)
        self._dtype = dtype
        self._device = device
        self._max_tokens = max_tokens
        self._vocabulary = vocabulary
        self.sequence_chunk = sequence_chunk
        self._bases, self._joins = bases, joins

    @cached_property
    def model(self) -> CausalLM:
        """The loaded model. Raises `CheckpointError` for a missing or damaged folder."""
        options, model = {"dtype": self._dtype, "device": self._device}, None
        if self._bases is not None:
            model = self._bases.adapted(self.path, **options, reads=self._joins)
        if model is None:
            model = CausalLM.from_pretrained(self.path, **options)
            model.module.requires_grad_(False)
        return model

    @property
    def borrows(self) -> bool:
        """Return whether its head belongs to a base that others compute with too."""
        return "model" in self.__dict__ and self.model.borrowed is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights, once they were read."""
        return self.model.nbytes if "model" in self.__dict__ else 0

    @property
    def digest(self) -> str:
        return self._digest

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> HiddenStates:
        """Return last hidden states `[N, D]` at the rows `C-1 ... C+R-2` of every sample, in order."""
        parts = [rows for _, rows in self.score_pieces(samples)]
        if not parts:
            return HiddenStates(torch.zeros(0, self.model.config.hidden_size, device=self.model.device))
        return HiddenStates(torch.cat(parts))

    def score_pieces(self, samples: Sequence[Sample]) -> RowPieces:
        """Yield the rows of `score`, those of a long sample in chunks. One micro-batch's are in memory."""
        lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
        memory = LayerMemory(chunk=self.sequence_chunk)
        self._check_positions(max(lengths, default=0))
        for start, stop in split_by_tokens(lengths, [None] * len(lengths), self._max_tokens):
            part = samples[start:stop]
            *tensors, cu_seqlens, _ = pack_tokens(part)
            input_ids, position_ids = copy_to_device(tensors, self.model.device)
            with torch.no_grad():
                hidden = self.model.hidden(input_ids, position_ids, cu_seqlens, memory)
            yield from row_pieces(part, hidden, self.sequence_chunk)
            del hidden  # before the next micro-batch's are computed

    def _check_positions(self, longest: int) -> None:
        """Raise `TeacherError` if a sequence of `longest` tokens has positions that were not learnt."""
        tables = [
            part.num_embeddings - getattr(part, "offset", 0)
            for name, part in self.model.decoder.named_modules()
            if isinstance(part, nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES
        ]
        if longest > min(tables, default=longest):
            raise TeacherError(
                f"teacher {self.name} has learnt {min(tables)} positions, but a prompt and its response take"
                f" {longest} of its tokens; lower rollout.max_sequence or rollout.max_new_tokens, or choose"
                " another teacher."
            )

    def load_head(self) -> Head:
        """Return the head. Its weights were frozen when the model was loaded."""
        return self.model.head(self._vocabulary)

    @cached_property
    def _digest(self) -> str:
        return self.model.digest()


@contextmanager
def _open_teachers(
    teachers: Mapping[str, LocalTeacherConfig], opening: TeacherOpening
) -> Iterator[dict[str, LocalTeacher]]:
    placement = opening.placement
    joins = sum(has_adapter(opening.sources[name]) for name in teachers) > 1
    yield {
        name: LocalTeacher(
            name,
            opening.sources[name],
            dtype=placement.dtype,
            device=placement.device,
            max_tokens=placement.max_tokens,
            vocabulary=placement.vocabulary,
            sequence_chunk=placement.sequence_chunk,
            bases=opening.bases,
            joins=joins,
        )
        for name in teachers
    }


KIND = TeacherKind(_open_teachers)
