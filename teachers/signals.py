"""What can be read off scored samples without the student: the sampled tokens' log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from opd.kernels.ops import linear_logprobs
from opd.teachers.schedule import TeacherSchedule
from opd.train.distill_terms import ScoredView, View
from opd.types import Sample

CHUNK = 4096
"""Rows whose logits exist at the same time."""


@torch.no_grad()
def sampled_logprobs(
    schedule: TeacherSchedule, samples: Sequence[Sample], mixture: str, temperature: float
) -> list[np.ndarray]:
    """`[R]` float32 log-probability of each response under its teacher, in the order of `samples`.

    Several teachers are pooled: weighted mean of log-probabilities (`geometric`, up to its normaliser), or
    log of the weighted mean of probabilities (`arithmetic`).
    """
    found = {s.uid: np.zeros(0, dtype=np.float32) for s in samples}
    for group, views in _by_route(schedule, samples):
        ids = torch.from_numpy(np.concatenate([s.response_ids for s in group]).astype(np.int64))
        per_view = torch.stack([_logprobs(view, ids, temperature) for view in views])
        weights = per_view.new_tensor([v.weight for v in views])[:, None]
        if mixture == "arithmetic":
            pooled = torch.logsumexp(per_view + weights.log(), dim=0)
        else:
            pooled = (weights * per_view).sum(0)
        ends = np.cumsum([len(s.response_ids) for s in group])[:-1]
        parts = np.split(pooled.float().cpu().numpy(), ends)
        found.update({s.uid: part for s, part in zip(group, parts, strict=True)})
    return [found[s.uid] for s in samples]


def _logprobs(view: View, ids: Tensor, temperature: float) -> Tensor:
    """[N] of the response tokens `ids`."""
    if isinstance(view, ScoredView):
        return view.sampled
    ids = ids.to(view.hidden.device)
    return linear_logprobs(view.hidden, view.head, ids, temperature=temperature, chunk=CHUNK)


def _by_route(
    schedule: TeacherSchedule, samples: Sequence[Sample]
) -> Iterator[tuple[list[Sample], list[View]]]:
    for route in schedule.routes(samples):
        group = [s for s in samples if s.teacher == route and len(s.response_ids)]
        yield group, schedule.views(group)
