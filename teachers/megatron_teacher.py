"""A teacher on Megatron-Core in this process: tensor parallel, packed, several of them on one module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

from opd.kernels.head import Head
from opd.kernels.vocab_shard import HeadShard
from opd.megatron.form import MegatronForm
from opd.megatron.head import head_shard
from opd.megatron.module import MegatronModule
from opd.megatron.runtime import model_parallel
from opd.models.causal_lm import torch_device, torch_dtype
from opd.teachers.megatron_head import whole_head
from opd.teachers.megatron_sources import WeightSource, open_source
from opd.teachers.megatron_tags import WeightTags
from opd.teachers.streamed_teacher import Placement
from opd.train.packing import pack_tokens, split_by_tokens
from opd.types import HiddenStates, Sample


class MegatronTeacher:
    """One tag of a module that other teachers may share; made by `megatron_teachers`.

    With tensor parallelism every rank of the group makes the same calls with the same samples, and gets the
    same results.
    """

    def __init__(
        self, name: str, source: WeightSource, tags: WeightTags, *, max_tokens: int, vocabulary: int | None
    ) -> None:
        self.name = name
        self.source = source
        self.tags = tags
        self._max_tokens = max_tokens
        self._vocabulary = vocabulary

    @property
    def digest(self) -> str:
        """Digest of the weights."""
        return self.source.digest

    @property
    def bytes_read(self) -> int:
        """Bytes of weights this rank has read for it."""
        return self.source.bytes_read

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> HiddenStates:
        """Last hidden states `[N, D]` at the rows `C-1 ... C+R-2` of every sample, in order.

        Swaps the teacher's weights in if another's are there. Raises `StorageError` or `CheckpointError` if
        they cannot be read.
        """
        module = self.tags.activate(self.name)
        lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
        parts = [torch.zeros(0, module.form.hidden_size, dtype=module.dtype, device=module.device)]
        for start, stop in split_by_tokens(lengths, [None] * len(lengths), self._max_tokens):
            packed = pack_tokens(samples[start:stop])
            input_ids, position_ids, cu_seqlens, rows = (t.to(module.device) for t in packed)
            parts.append(module.hidden(input_ids, position_ids, cu_seqlens)[rows])
        return HiddenStates(torch.cat(parts))

    def load_head(self) -> Head:
        """The whole head, on every rank: with tensor parallelism the ranks' rows are gathered."""
        return whole_head(self.tags.head(self.name), *self._cut())

    def load_head_shard(self) -> HeadShard:
        """This rank's rows of the head, for the operations of `opd.kernels.vocab_parallel`."""
        return head_shard(self.tags.head(self.name), *self._cut())

    def _cut(self) -> tuple[MegatronForm, int | None, dist.ProcessGroup]:
        module = self.tags.module
        return module.form, self._vocabulary, module.group


@contextmanager
def megatron_teachers(
    sources: Mapping[str, str], placement: Placement, *, tensor_parallel: int = 1, keep: bool = False
) -> Iterator[dict[str, MegatronTeacher]]:
    """Teachers by name, while the block runs; those of one form take turns on one module.

    Args:
        sources: Hugging Face folders, or URLs of published models.
        placement: Dtype, device, packing and vocabulary.
        tensor_parallel: Ranks that share each teacher; see `model_parallel`.
        keep: Keep every teacher's slices in host memory; see `WeightTags`.

    Raises `MissingExtraError` without Megatron-Core, `TeacherError` if the process group does not fit,
    `ModelError` if a teacher cannot run on it, and what opening the sources raises.
    """
    dtype, device = torch_dtype(placement.dtype), torch_device(placement.device)
    with ExitStack() as stack:
        group = stack.enter_context(model_parallel(tensor_parallel))
        modules: dict[MegatronForm, WeightTags] = {}
        teachers = {}
        for name, where in sources.items():
            source = open_source(where, group, device)
            stack.callback(source.close)
            if source.form not in modules:
                module = MegatronModule(source.form, group, dtype, device)
                modules[source.form] = WeightTags(module, keep=keep)
            tags = modules[source.form]
            tags.add(name, source)
            teachers[name] = MegatronTeacher(
                name, source, tags, max_tokens=placement.max_tokens, vocabulary=placement.vocabulary
            )
        yield teachers
