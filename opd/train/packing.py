"""Assignment of samples to ranks and micro-batches, and packing of samples end to end into `[T]`.

Only lengths and teachers decide, so every rank computes the same answer without a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from opd.config.base import BATCH
from opd.errors import ConfigError, TrainingError
from opd.imports import import_function
from opd.models.routing import ExpertRouting
from opd.ranks import Ranks
from opd.train.masks import ForeignTokenError, pack_masks
from opd.train.plan import CostModel, deal_samples, split_by_tokens
from opd.train.routers import pack_choices
from opd.types import MicroBatch, RolloutBatch, Sample, TokenTerms
from opd.user_code import call_user_code


def split_samples(
    samples: Sequence[Sample], indices: Sequence[int], max_tokens: int, *, by_teacher: bool = False
) -> list[list[int]]:
    """Split `indices` into `samples`, in order, into chunks of at most `max_tokens`, and with `by_teacher` of
    one teacher each.
    """
    chosen = [samples[index] for index in indices]
    lengths = [len(s.prompt_ids) + len(s.response_ids) for s in chosen]
    teachers = [s.teacher if by_teacher else None for s in chosen]
    return [list(indices[start:stop]) for start, stop in split_by_tokens(lengths, teachers, max_tokens)]


def of_packed(
    samples: Sequence[Sample],
    max_tokens: int,
    device: torch.device,
    compute: Callable[..., torch.Tensor],
    routing: ExpertRouting | None = None,
    ranks: Ranks | None = None,
    idle: Callable[[], object] = lambda: None,
    masked: bool = False,
) -> list[np.ndarray]:
    """Return `[R]` float32 for each sample from `compute(input_ids, position_ids, cu_seqlens, rows) -> [N]`,
    called with packs of at most `max_tokens` (see `split_by_tokens`). With `routing` it is called with the
    choices of experts too, `routed`. With `masked` it is called with `masks` as of `MicroBatch`, if these
    samples have any. With `ranks`, which make every pass together, `idle` is called for each pass that
    another rank has and this one has not.
    """
    lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
    packs = split_by_tokens(lengths, [None] * len(lengths), max_tokens)
    missing = 0 if ranks is None else ranks.max_over_ranks(len(packs), "the number of passes") - len(packs)
    results: list[np.ndarray] = []
    for start, stop in packs:
        part = samples[start:stop]
        input_ids, position_ids, cu_seqlens, rows = pack_tokens(part)
        input_ids, position_ids, rows = copy_to_device([input_ids, position_ids, rows], device)
        routed: dict[str, Any] = {} if routing is None else {"routed": pack_choices(part, routing, device)}
        if masked and _has_masks(part) and (masks := pack_masks(part)) is not None:
            routed["masks"] = masks.to(device, non_blocking=True)
        try:
            values = compute(input_ids, position_ids, cu_seqlens, rows, **routed)
        except ForeignTokenError as error:
            raise error.naming(part) from None
        ends = np.cumsum([len(s.response_ids) for s in part])[:-1]
        results.extend(np.split(values.float().cpu().numpy(), ends))
    for _ in range(missing):
        idle()
    return results


def _has_masks(samples: Sequence[Sample]) -> bool:
    return any(sample.sampling_masks is not None for sample in samples)


def pack(
    pairs: Sequence[tuple[Sample, TokenTerms]], device: torch.device, routing: ExpertRouting | None = None
) -> MicroBatch:
    """Pack all `pairs` into one micro-batch; see `MicroBatch` for the shapes and a worked example. With
    `routing` it has the samples' choices of experts.
    """
    samples = [sample for sample, _ in pairs]
    terms = [term for _, term in pairs]
    input_ids, position_ids, cu_seqlens, rows = pack_tokens(samples)
    kl_weight = np.concatenate([term.kl_weight for term in terms])
    counted = torch.from_numpy(np.flatnonzero(kl_weight))
    masks = np.concatenate([sample.loss_mask for sample in samples])
    on_host = [input_ids, position_ids, rows, input_ids[rows + 1], counted]
    input_ids, position_ids, rows, targets, counted = copy_to_device(on_host, device)

    drawn_from = pack_masks(samples) if _has_masks(samples) else None
    streams: dict[str, Any] = {
        "masks": None if drawn_from is None else drawn_from.to(device, non_blocking=True)
    }
    for field in fields(TokenTerms):
        values = [getattr(term, field.name) for term in terms]
        if any(value is None for value in values):  # not all samples have this optional stream
            streams[field.name] = None
        else:
            streams[field.name] = torch.from_numpy(np.concatenate(values)).to(device, non_blocking=True)
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        rows=rows,
        targets=targets,
        **streams,
        routed=None if routing is None else pack_choices(samples, routing, device),
        counted=counted,
        counts=[int(np.count_nonzero(term.kl_weight)) for term in terms],
        kl_covers=bool(np.all(kl_weight[masks])),
        samples=samples,
        runs=teacher_runs(samples),
    )


def teacher_runs(samples: Sequence[Sample], kept: torch.Tensor | None = None) -> list[tuple[slice, slice]]:
    """Return the `MicroBatch.runs` of `samples`, with `kept` tokens as there."""
    teachers = [sample.teacher for sample in samples]
    runs = split_by_tokens([0] * len(teachers), teachers, 0)
    ends = _ends_of([len(sample.response_ids) for sample in samples])
    if kept is not None and len(runs) == 1:
        ends[-1] = len(kept)
    elif kept is not None:
        ends = torch.searchsorted(kept, torch.tensor(ends, device=kept.device)).tolist()
    return [(slice(start, stop), slice(ends[start], ends[stop])) for start, stop in runs]


def split_teachers(micro: MicroBatch) -> list[tuple[slice, MicroBatch]]:
    """Split `micro` where the teacher changes. Return each part's rows of `micro`, and the part as a
    micro-batch of its own, without the choices of experts.
    """
    if len(micro.runs) == 1:
        return [(micro.runs[0][1], micro)]
    tokens, counts = micro.cu_seqlens.tolist(), _ends_of(micro.counts)
    responses = _ends_of([len(sample.response_ids) for sample in micro.samples])
    parts = []
    for samples, rows in micro.runs:
        first, last = tokens[samples.start], tokens[samples.stop]
        part = replace(
            micro,
            input_ids=micro.input_ids[first:last],
            position_ids=micro.position_ids[first:last],
            cu_seqlens=micro.cu_seqlens[samples.start : samples.stop + 1] - first,
            rows=micro.rows[rows] if micro.kept is not None else micro.rows[rows] - first,
            samples=micro.samples[samples],
            runs=[(slice(0, samples.stop - samples.start), slice(0, rows.stop - rows.start))],
            routed=None,
            counts=micro.counts[samples],
            **micro.select_rows(rows),
        )
        if micro.counted is not None:
            part.counted = micro.counted[counts[samples.start] : counts[samples.stop]] - rows.start
        if micro.kept is not None:
            part.kept = micro.kept[rows] - responses[samples.start]
        parts.append((rows, part))
    return parts


def _ends_of(lengths: Sequence[int]) -> list[int]:
    """Return 0 and the end of each of `lengths`, end to end."""
    return [0, *accumulate(lengths)]


def pack_tokens(
    samples: Sequence[Sample],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(input_ids [T], position_ids [T], cu_seqlens [B + 1] int32, rows [N])` of `samples`, on the CPU.

    `rows` are the packed positions `C-1 ... C+R-2` of every sequence, in order.
    """
    prompts = np.array([len(s.prompt_ids) for s in samples], dtype=np.int64)
    responses = np.array([len(s.response_ids) for s in samples], dtype=np.int64)
    ends = np.cumsum(prompts + responses)
    starts = ends - prompts - responses
    input_ids = np.concatenate([part for s in samples for part in (s.prompt_ids, s.response_ids)])
    position_ids = _concat_ranges(np.zeros_like(starts), prompts + responses)
    rows = _concat_ranges(starts + prompts - 1, responses)
    cu_seqlens = np.concatenate([[0], ends]).astype(np.int32)
    return (
        torch.from_numpy(input_ids.astype(np.int64)),
        torch.from_numpy(position_ids),
        torch.from_numpy(cu_seqlens),
        torch.from_numpy(rows),
    )


def copy_to_device(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy `tensors` to `device` without waiting. CUDA reads unpinned memory before the call returns."""
    return [tensor.to(device, non_blocking=True) for tensor in tensors]


def _concat_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return `starts[i] ... starts[i] + counts[i] - 1` for every `i`, end to end."""
    ends = np.cumsum(counts)
    offsets = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.repeat(starts, counts) + offsets


PerSample = Callable[[Sequence[Sample]], list[np.ndarray]]
"""One `[R]` float32 array for each sample."""


class Shares:
    """Assignment of samples to the data-parallel ranks, balanced per teacher and over all.

    Ranks read a streamed teacher in lock step, so the slowest decides how long it takes. The order of samples
    does not matter: a sample keeps its rank, sorted or filtered.
    """

    def __init__(self, data: Ranks, cost: CostModel | None = None) -> None:
        """`cost` is the training cost of a sample; by default its tokens."""
        self._data, self._cost = data, cost or CostModel()
        self._owners: dict[str, int] = {}

    def assign_ranks(self, samples: Iterable[Sample]) -> None:
        """Forget the old assignment and assign `samples`. The most expensive go first, to the rank with the
        least cost of their teacher, then of all."""
        self._owners.clear()
        if not self._data.is_alone:
            self._assign_more(samples)

    def local_samples(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return this rank's samples of `samples`. Samples without a rank are assigned now."""
        if self._data.is_alone:
            return list(samples)
        return [
            s for s, owner in zip(samples, self._owners_of(samples), strict=True) if owner == self._data.rank
        ]

    def in_step(
        self, samples: Sequence[Sample], max_tokens: int, *, by_teacher: bool = False
    ) -> list[list[int]]:
        """Return this rank's indices into `samples` that have a response, in chunks; see `split_samples`.

        Every rank gets as many chunks, with `by_teacher` of each teacher, as the rank that has most; some may
        be empty. So ranks pass through a model, or read a teacher, together. All ranks pass the same samples,
        and only their lengths and teachers count, so no message is needed.
        """
        answered = [index for index, sample in enumerate(samples) if len(sample.response_ids)]
        if self._data.is_alone:
            return split_samples(samples, answered, max_tokens, by_teacher=by_teacher)
        owners = self._owners_of(samples)
        result: list[list[int]] = []
        for teacher in dict.fromkeys(samples[index].teacher if by_teacher else None for index in answered):
            of_teacher = [i for i in answered if not by_teacher or samples[i].teacher == teacher]
            each = [
                split_samples(
                    samples, [i for i in of_teacher if owners[i] == rank], max_tokens, by_teacher=by_teacher
                )
                for rank in range(self._data.size)
            ]
            local = each[self._data.rank]
            result += local + [[] for _ in range(max(map(len, each)) - len(local))]
        return result

    def compute_on_ranks(self, samples: Sequence[Sample], compute: PerSample, label: str) -> list[np.ndarray]:
        """Run `compute` for all `samples`, each on the rank that trains it, and gather the results. `label`
        names them.
        """
        if self._data.is_alone:
            return compute(samples)
        local = compute(self.local_samples(samples))
        flat = np.concatenate([np.zeros(0, np.float32), *local]).astype(np.float32)
        parts = [np.frombuffer(part, np.float32) for part in self._data.gather(flat.tobytes(), label)]
        starts = [0] * self._data.size
        results = []
        for sample in samples:
            owner, length = self._owners[sample.uid], len(sample.response_ids)
            results.append(parts[owner][starts[owner] : starts[owner] + length].copy())
            starts[owner] += length
        return results

    def _owners_of(self, samples: Sequence[Sample]) -> list[int]:
        self._assign_more(sample for sample in samples if sample.uid not in self._owners)
        return [self._owners[sample.uid] for sample in samples]

    def _assign_more(self, samples: Iterable[Sample]) -> None:
        waiting = sorted(samples, key=lambda sample: sample.uid)
        lengths = np.array([len(s.prompt_ids) + len(s.response_ids) for s in waiting], np.int64)
        costs, teachers = self._cost.total_operations(lengths).tolist(), [s.teacher for s in waiting]
        owners = deal_samples(costs, teachers, self._data.size)
        self._owners.update(zip((sample.uid for sample in waiting), owners, strict=True))


_REQUIRED = ("advantages", "policy_weight", "kl_weight", "ce_weight")
"""Fields of `TokenTerms` that every sample has."""


def convert_batch(batch: RolloutBatch, path: str | None, where: str) -> RolloutBatch:
    """Apply the function at `path` to `batch`. `None` returns `batch` itself.

    It may drop samples, add some, and change their `TokenTerms`. The weights are normalised over the whole
    optimiser step already, so a function that drops samples has to divide again to get a mean. `where` is the
    recipe's key. Raises `ConfigError` if the function cannot be loaded, and `TrainingError` if it raises or
    returns anything but a complete batch.
    """
    if path is None:
        return batch
    convert: Any = import_function(path, where, ConfigError, BATCH)
    with call_user_code(f"{where} {path}", TrainingError):
        converted = convert(batch)
    with call_user_code(f"{where} {path}: checking what it returned", TrainingError):
        if not isinstance(converted, RolloutBatch):
            raise TrainingError(
                f"{where} {path} returned {type(converted).__name__}; return a RolloutBatch of samples and"
                " terms."
            )
        for sample, terms in zip(converted.samples, converted.terms, strict=True):
            shape = np.shape(sample.response_ids)
            for field in fields(terms):
                values = getattr(terms, field.name)
                if values is None and field.name not in _REQUIRED:  # this stream is absent
                    continue
                if values is None or np.shape(values) != shape or not np.isfinite(values).all():
                    raise ValueError(
                        f"{field.name} of sample {sample.uid} is not one finite number for each of its"
                        f" {len(sample.response_ids)} response tokens"
                    )
    return converted
