"""What teachers gave in place of hidden states: log-probabilities, kept until they are used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opd.errors import TeacherError
from opd.train.distill_terms import ScoredView
from opd.types import Sample, TokenLogprobs, TopKLogprobs


class GivenLogprobs:
    """By teacher and sample; too few numbers to need the cache of hidden states."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], tuple[Tensor, ...]] = {}

    def keep(self, name: str, samples: Sequence[Sample], targets: TokenLogprobs | TopKLogprobs) -> None:
        """Keep what teacher `name` gave for `samples`. Raises `TeacherError` for a wrong number of values or
        one that is not finite.
        """
        counts = [len(s.response_ids) for s in samples]
        streams = _streams(name, targets)
        for stream in streams:
            if len(stream) != sum(counts) or not torch.isfinite(stream).all():
                raise TeacherError(
                    f"teacher {name} returned {len(stream)} log-probabilities for {sum(counts)} response"
                    " tokens, or some that are not finite; check its back end."
                )
        parts = zip(*(stream.split(counts) for stream in streams), strict=True)
        self._streams |= {(name, sample.uid): own for sample, own in zip(samples, parts, strict=True)}

    def has(self, name: str, sample: Sample) -> bool:
        """Whether teacher `name` gave log-probabilities of `sample`."""
        return (name, sample.uid) in self._streams

    def view(
        self, name: str, weight: float, samples: Sequence[Sample], device: torch.device | None
    ) -> ScoredView:
        """Those of `samples`, end to end. Raises `TeacherError` for a sample that was not scored."""
        missing = next((s.uid for s in samples if not self.has(name, s)), None)
        if missing is not None:
            raise TeacherError(
                f"sample {missing} was not scored by teacher {name}; call score() on it first."
            )
        streams = zip(*(self._streams[name, sample.uid] for sample in samples), strict=True)
        whole = [torch.cat(parts) for parts in streams]
        return ScoredView(name, weight, *(w if device is None else w.to(device) for w in whole))

    def clear(self) -> None:
        """Drop all."""
        self._streams.clear()


def _streams(name: str, targets: TokenLogprobs | TopKLogprobs) -> tuple[Tensor, ...]:
    """(sampled [N],) or (sampled [N], ids [N, K], log-probabilities [N, K])."""
    if isinstance(targets, TokenLogprobs):
        return (targets.logprobs,)
    if targets.sampled is None:
        raise TeacherError(
            f"teacher {name} gave no log-probabilities of the sampled tokens; check its back end."
        )
    return targets.sampled, targets.ids, targets.logprobs
