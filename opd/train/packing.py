"""Whole samples of different lengths, packed end to end into `[T]` without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from opd.types import MicroBatch, Sample, TokenTerms


def pieces(
    samples: Sequence[Sample], places: Sequence[int], max_tokens: int, *, by_teacher: bool = True
) -> list[list[int]]:
    """`places` in `samples`, in their order; a piece ends at `max_tokens`, or where the teacher changes."""
    chosen = [samples[place] for place in places]
    lengths = [len(s.prompt_ids) + len(s.response_ids) for s in chosen]
    teachers = [s.teacher if by_teacher else None for s in chosen]
    return [list(places[start:stop]) for start, stop in split_by_tokens(lengths, teachers, max_tokens)]


def split_by_tokens(
    lengths: Sequence[int], keys: Sequence[str | None], max_tokens: int
) -> list[tuple[int, int]]:
    """Consecutive ranges `[start, stop)` of at most `max_tokens` and one key each.

    A single sequence longer than `max_tokens` gets a range of its own.
    """
    ranges: list[tuple[int, int]] = []
    start, total = 0, 0
    for i, (length, key) in enumerate(zip(lengths, keys, strict=True)):
        if i > start and (total + length > max_tokens or key != keys[start]):
            ranges.append((start, i))
            start, total = i, 0
        total += length
    if len(lengths) > start:
        ranges.append((start, len(lengths)))
    return ranges


def of_packed(
    samples: Sequence[Sample],
    max_tokens: int,
    device: torch.device,
    compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> list[np.ndarray]:
    """`[R]` float32 for each sample from `compute(input_ids, position_ids, cu_seqlens, rows) -> [N]`, which
    is given packs of at most `max_tokens` (see `split_by_tokens`).
    """
    lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
    results: list[np.ndarray] = []
    for start, stop in split_by_tokens(lengths, [None] * len(lengths), max_tokens):
        part = samples[start:stop]
        values = compute(*(t.to(device) for t in pack_tokens(part)))
        ends = np.cumsum([len(s.response_ids) for s in part])[:-1]
        results.extend(np.split(values.float().cpu().numpy(), ends))
    return results


def pack(pairs: Sequence[tuple[Sample, TokenTerms]], device: torch.device) -> MicroBatch:
    """One micro-batch of all `pairs`; see `MicroBatch` for the shapes and a worked example."""
    samples = [sample for sample, _ in pairs]
    terms = [term for _, term in pairs]
    input_ids, position_ids, cu_seqlens, rows = pack_tokens(samples)

    def stream(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(term, name) for term in terms])).to(device)

    def if_all(name: str) -> torch.Tensor | None:
        return None if any(getattr(term, name) is None for term in terms) else stream(name)

    return MicroBatch(
        input_ids=input_ids.to(device),
        position_ids=position_ids.to(device),
        cu_seqlens=cu_seqlens.to(device),
        rows=rows.to(device),
        targets=input_ids[rows + 1].to(device),
        advantages=stream("advantages"),
        old_logprobs=stream("old_logprobs"),
        policy_weight=stream("policy_weight"),
        kl_weight=stream("kl_weight"),
        ce_weight=stream("ce_weight"),
        ref_logprobs=if_all("ref_logprobs"),
        importance=if_all("importance"),
        samples=samples,
    )


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
    position_ids = _ranges(np.zeros_like(starts), prompts + responses)
    rows = _ranges(starts + prompts - 1, responses)
    cu_seqlens = np.concatenate([[0], ends]).astype(np.int32)
    return (
        torch.from_numpy(input_ids.astype(np.int64)),
        torch.from_numpy(position_ids),
        torch.from_numpy(cu_seqlens),
        torch.from_numpy(rows),
    )


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`starts[i] ... starts[i] + counts[i] - 1` for every `i`, end to end."""
    ends = np.cumsum(counts)
    offsets = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.repeat(starts, counts) + offsets
