"""Samples ordered by teacher: each teacher runs once, each head is in memory once per mini-batch.

DeepSeek-V4 (report, section 5.2.2) orders the samples of a mini-batch by teacher index, keeps only last
hidden states between scoring and training, and rebuilds logits from them with one resident head at a time.
The order never changes the step: a gradient is a sum over samples.

`Router` maps a sample to its teacher. `ResidentHeads` keeps the heads of one route in memory and at most one
that is read ahead. `ScheduleMeter` counts. `sampled_logprobs` returns the teachers' log-probabilities of the
sampled tokens, which k1 puts into the advantages.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from opd.config import Recipe
from opd.config.rl import TeacherWeight, is_scheduled, route_names, shared_out
from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.kernels.ops import linear_logprobs
from opd.protocols import Teacher
from opd.teachers.score_cache import (
    ChunkedTeacher,
    ScoreCache,
    TeacherLogprobs,
    check_finite,
    reads_chunks,
    resident_parts,
)
from opd.teachers.unit_gather import Staging, naming_lost_ranks
from opd.train.backend import Backend
from opd.train.loss_weights import weight_at
from opd.train.teacher_views import ScoredView, TeacherView, View
from opd.types import HiddenStates, MicroBatch, RolloutBatch, Sample, TokenLogprobs, TopKLogprobs

if TYPE_CHECKING:
    from opd.models.token_alignment import TokenAlignment, TokenTranslator
    from opd.train.aligned_kl import AlignedRows


@dataclass(frozen=True, slots=True)
class Route:
    """One teacher with weight 1, several with weights that sum to 1, or none."""

    name: str
    """The value of `Sample.teacher`: the teacher's name, the `route_names` of several, or "" without any."""
    teachers: tuple[str, ...]
    weights: tuple[float, ...]


class Router:
    """Maps domains to routes.

    With the mixture `one_hot` a domain of several teachers sends each *group* to one of them, drawn with the
    teachers' weights by a hash of the group's uid: the draw is the same on every rank and after a resume.
    """

    def __init__(self, weights: Mapping[str, Mapping[str, TeacherWeight]], mixture: str) -> None:
        self._plans = {"": {}, **weights}  # `""` is for samples that nobody teaches
        self._names = route_names(self._plans)
        self._moving = [name for name, plan in self._plans.items() if is_scheduled(plan)]
        self._weights: dict[str, Mapping[str, Any]] = dict(self._plans)
        self._one_hot = mixture == "one_hot"
        self.set_step(0)

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Router:
        """Return the router of every domain of `recipe`."""
        return cls({d: recipe.teacher_plan(d) for d in recipe.domains}, recipe.distill.mixture)

    def set_step(self, step: int) -> None:
        """Take the weights of `step` of the merge, from 0 on, in domains whose weights go by steps."""
        for domain in self._moving:
            plan = self._plans[domain].items()
            self._weights[domain] = shared_out({name: weight_at(weight, step) for name, weight in plan})

    @property
    def moving_weights(self) -> dict[str, float]:
        """Return the step's weights of such domains, as metrics."""
        weights = {domain: self._weights[domain] for domain in self._moving}
        return {
            f"teacher_weight/{d}/{name}": value for d, own in weights.items() for name, value in own.items()
        }

    def route_group(self, domain: str, group_uid: str) -> Route:
        weights = self._weights[domain]
        if not weights:
            return Route("", (), ())
        if self._one_hot or len(weights) == 1:
            name = _draw_teacher(weights, group_uid)
            return Route(name, (name,), (1.0,))
        return Route(self._names[domain], tuple(weights), tuple(weights.values()))

    @property
    def teacher_names(self) -> list[str]:
        """Every teacher of some domain, in the recipe's order."""
        return list(dict.fromkeys(name for plan in self._plans.values() for name in plan))


def _draw_teacher(weights: Mapping[str, float], key: str) -> str:
    point = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
    total = 0.0
    for name, weight in weights.items():
        total += weight
        if point < total:
            return name
    return name


@runtime_checkable
class Prefetching(Protocol):
    """A teacher that can read ahead in the background."""

    bytes_read: int
    stall_seconds: float

    def prefetch(self) -> None:
        """Begin to read the weights of the next `score`. A second call changes nothing."""
        ...

    def prefetch_head(self) -> None:
        """Begin to read the head of the next `load_head`. A second call changes nothing."""
        ...

    def discard_head(self) -> None:
        """Drop the head that `prefetch_head` has read."""
        ...

    def take_weight_bytes_peak(self) -> int:
        """Return the most bytes of weights since the last call, of all teachers that share its memory."""
        ...


@runtime_checkable
class CollectiveTeacher(Protocol):
    """A teacher that several ranks may compute or read together."""

    collective: bool
    """Whether every rank of a group must call `score` equally often, and in one order of teachers."""


@runtime_checkable
class FollowingTeacher(Protocol):
    """A teacher whose weights are the student's."""

    def follow(self, backend: Backend, updates: int) -> None:
        """Score with what `backend` trains, whose weights change `updates` times a step."""
        ...


class ResidentHeads:
    """Loads each head when its route comes, and drops it when the route has passed."""

    def __init__(self, teachers: Mapping[str, Teacher]) -> None:
        self._teachers = teachers
        self.heads: dict[str, Head] = {}
        self._ahead: str | None = None
        self.loads = 0
        self.resident_peak = 0
        self.prefetched_peak = 0

    def load_heads(self, names: Sequence[str], following: Sequence[str]) -> dict[str, Head]:
        """Return the heads of `names`, and begin to read one of `following`, the next route's."""
        # Heads of other routes go first, so that the peak never counts two routes.
        self.heads = {name: head for name, head in self.heads.items() if name in names}
        if self._ahead is not None and self._ahead not in (*names, *following):
            self._discard_prefetched()
        for name in names:
            if name not in self.heads:
                self.heads[name] = self._teachers[name].load_head()
                self.loads += 1
                if name == self._ahead:
                    self._ahead = None
        self.resident_peak = max(self.resident_peak, len(self.heads))
        self.read_ahead(following)
        return {name: self.heads[name] for name in names}

    def read_ahead(self, names: Sequence[str]) -> None:
        """Begin to read the first head of `names` that is not in memory, if its teacher can."""
        missing = next((name for name in names if name not in self.heads), None)
        if missing is None or self._ahead is not None:
            return
        teacher = self._teachers[missing]
        if isinstance(teacher, Prefetching):
            teacher.prefetch_head()
            self._ahead = missing
            self.prefetched_peak = max(self.prefetched_peak, 1)

    def release(self) -> None:
        """Drop all of them."""
        self.heads.clear()
        self._discard_prefetched()

    def _discard_prefetched(self) -> None:
        if self._ahead is not None:
            teacher = self._teachers[self._ahead]
            assert isinstance(teacher, Prefetching)
            teacher.discard_head()
            self._ahead = None


@dataclass(slots=True)
class ScheduleCounters:
    """The schedule's work since the counters were last taken: one mini-batch in the merge."""

    head_loads: int = 0
    resident_heads_peak: int = 0
    prefetched_heads_peak: int = 0
    """Heads that were read ahead, in addition to the resident ones."""
    teacher_tokens: int = 0
    """Response tokens whose hidden states a teacher computed."""
    cached_tokens: int = 0
    """Response tokens whose hidden states came from the cache."""
    bytes_read: int = 0
    """Bytes this process read from the stores of its teachers."""
    cached_bytes: int = 0
    """Bytes of teachers' weights this process took from the node's cache, instead of their stores."""
    stall_seconds: float = 0.0
    """Seconds scoring and training waited for layers and heads."""
    weight_bytes_peak: int = 0
    """The most bytes of streamed teachers' weights that were in memory at once."""


class ScheduleMeter:
    """Counters of one schedule, combined with those of its teachers, by name, and of the resident heads."""

    def __init__(self, teachers: Mapping[str, Teacher], heads: ResidentHeads) -> None:
        self._teachers, self._heads = teachers, heads
        self._waited: dict[str, float] = {}
        self._totals: dict[tuple[str, str], float] = {}
        self.counters = ScheduleCounters()

    def add_wait(self, teacher: str, seconds: float) -> None:
        """Add `seconds` that the schedule waited for a teacher's scores."""
        self._waited[teacher] = self._waited.get(teacher, 0.0) + seconds

    def drain_counters(self) -> dict[str, float]:
        """Return everything since the last call, as metrics."""
        counters, self.counters = self.counters, ScheduleCounters()
        heads = self._heads
        counters.head_loads, heads.loads = heads.loads, 0
        counters.resident_heads_peak, heads.resident_peak = heads.resident_peak, 0
        counters.prefetched_heads_peak, heads.prefetched_peak = heads.prefetched_peak, 0
        for name, teacher in self._teachers.items():
            for quantity in ("bytes_read", "cached_bytes", "stall_seconds"):
                now, previous = getattr(teacher, quantity, 0), self._totals.get((name, quantity), 0)
                setattr(counters, quantity, getattr(counters, quantity) + now - previous)
                self._totals[name, quantity] = now
            if isinstance(teacher, Prefetching):
                counters.weight_bytes_peak = max(counters.weight_bytes_peak, teacher.take_weight_bytes_peak())
        waited, self._waited = self._waited, {}
        seconds = {f"teacher/{name}/wait_seconds": value for name, value in waited.items()}
        return {name: float(value) for name, value in asdict(counters).items()} | seconds


@runtime_checkable
class BackgroundTeacher(Protocol):
    """A teacher that computes elsewhere while this process works."""

    def begin_scoring(self, samples: Sequence[Sample]) -> None:
        """Begin to score `samples`. `score` waits for them. A second call changes nothing."""
        ...


@runtime_checkable
class TimeSharedTeacher(Protocol):
    """A teacher whose device is needed by others while it does not score."""

    def device_slot(self) -> AbstractContextManager[None] | None:
        """Return the context in which it may score, or `None` if it can score at any time. All ranks enter
        and leave the context together.
        """
        ...


class TeacherSchedule:
    """Scores samples teacher by teacher and hands their targets to the loss.

    With one teacher per sample at most one head is resident. A sample with a mixture needs all heads of its
    mixture at once, and no more. Teachers that can read ahead do: the next teacher's layers while one
    computes, the next route's head while one trains.

    Args:
        teachers: By name, in the order in which they score.
        router: Maps a sample to its teachers.
        cache: Hidden states are read from it first, and stored there.
        device: Device of the returned hidden states. Default: that of the teacher or the cache.
        group: Ranks that share the reading of the teachers, needed if those are collective. It must not be
            the group the teachers gather with.
        translators: Writes responses for teachers with a tokenizer of their own, by name.
    """

    def __init__(
        self,
        teachers: Mapping[str, Teacher],
        router: Router,
        *,
        cache: ScoreCache | None = None,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        translators: Mapping[str, TokenTranslator] | None = None,
    ) -> None:
        self._teachers = dict(teachers)
        self._translators = translators or {}
        self._alignments: dict[tuple[str, str], TokenAlignment] = {}
        self.router = router
        self._cache = cache
        self._device = device
        self._group = group
        self._routes: dict[str, Route] = {}
        self._rows: dict[tuple[str, str], Tensor] = {}
        self._logprobs = TeacherLogprobs()
        self._staging = Staging()
        self._heads = ResidentHeads(self._teachers)
        self._plan: list[str] = []
        self._first: str | None = None
        self._meter = ScheduleMeter(self._teachers, self._heads)

    def follow(self, backend: Backend, updates: int = 1) -> None:
        """Let teachers that are the student score with `backend`, which updates `updates` times a step."""
        for teacher in self._teachers.values():
            if isinstance(teacher, FollowingTeacher):
                teacher.follow(backend, updates)

    @property
    def caches_all(self) -> bool:
        """Return whether the hidden states of all teachers outlive `drop_samples` and `release`."""
        return all(self._cache_of(name) is not None for name in self._teachers)

    def assign(self, samples: Sequence[Sample]) -> None:
        """Write each sample's route into `sample.teacher`."""
        for sample in samples:
            route = self.router.route_group(sample.domain if sample.is_taught else "", sample.group_uid)
            self._routes[route.name] = route
            sample.teacher = route.name or None

    def begin_scoring(self, samples: Sequence[Sample]) -> None:
        """Begin to score the samples whose teachers compute elsewhere. `score` waits for them."""
        items = self._teachers.items()
        elsewhere = {n: t for n, t in items if isinstance(t, BackgroundTeacher) and _slot_of(t) is None}
        if elsewhere:
            self.assign(samples)
        for name, teacher in elsewhere.items():
            teacher.begin_scoring(self._not_cached(name, samples))

    def score(self, samples: Sequence[Sample]) -> None:
        """Run each teacher once over its samples and keep the results until `release`.

        Raises `TeacherError` if a teacher returns the wrong number of rows or a number that is not finite.
        """
        self.begin_scoring(samples)
        waiting = {name: self._not_cached(name, samples) for name in self._teachers}
        order = self._running_teachers(waiting)
        self._first = order[0] if order else None
        self._prefetch_teacher(self._first)
        for index, name in enumerate(order, start=1):
            # The next teacher's layers queue up behind this one's.
            self._prefetch_teacher(order[index] if index < len(order) else None)
            start = time.perf_counter()
            with _slot_of(self._teachers[name]) or nullcontext():
                self._score_teacher(name, waiting[name], start)
        self._plan = self.route_names([*samples])
        if self._plan:
            self._heads.read_ahead(self._routes[self._plan[0]].teachers)

    def route_names(self, samples: Sequence[Sample]) -> list[str]:
        """Return the routes of the `samples` that have a response, in the order of processing."""
        return sorted({s.teacher or "" for s in samples if len(s.response_ids)}, key=self._route_rank)

    def sort(self, batch: RolloutBatch) -> RolloutBatch:
        """Return `batch` ordered by teacher, otherwise in its own order."""
        return batch.select_samples(self.teacher_order(batch.samples))

    def teacher_order(self, samples: Sequence[Sample]) -> list[int]:
        """Return the indices of `samples` ordered by teacher, otherwise in their own order."""
        return sorted(range(len(samples)), key=lambda i: self._route_rank(samples[i].teacher or ""))

    def __call__(self, micro: MicroBatch) -> list[View]:
        """Return the teachers of a micro-batch whose samples share one route."""
        return self.teacher_views(micro.samples)

    def teacher_views(self, samples: Sequence[Sample]) -> list[View]:
        """Return the teachers of `samples`, which share one route. Their heads become the resident ones. A
        teacher with log-probabilities needs no head.
        """
        route = self._routes[samples[0].teacher or ""]
        scored = {name for name in route.teachers if self._logprobs.has_sample(name, samples[0])}
        unscored = tuple(name for name in route.teachers if name not in scored)
        hidden = {name: self.hidden_rows(name, samples) for name in unscored}
        following: tuple[str, ...] = ()
        if route.name in self._plan[:-1]:
            following = self._routes[self._plan[self._plan.index(route.name) + 1]].teachers
        heads = self._heads.load_heads(unscored, following)
        aligned = {name: self._aligned_rows(name, samples) for name in unscored if name in self._translators}
        return [
            self._logprobs.scored_view(name, weight, samples, self._device)
            if name in scored
            else TeacherView(name, weight, hidden[name], heads[name], aligned.get(name))
            for name, weight in zip(route.teachers, route.weights, strict=True)
        ]

    def hidden_rows(self, teacher: str, samples: Sequence[Sample]) -> Tensor:
        """Return [N, Dt]: the hidden states of `samples` under `teacher`, end to end, at its own tokens."""
        scored = self._in_own_tokens(teacher, samples) if teacher in self._translators else samples
        try:
            rows = [self._rows[teacher, sample.uid] for sample in scored]
        except KeyError as missing:
            raise TeacherError(
                f"sample {missing.args[0][1]} was not scored by teacher {teacher}; call score() on it first."
            ) from None
        if not rows:  # of responses that the teacher's tokenizer cannot write
            return torch.zeros(0, 1, device=self._device)
        # One sample's rows stay mapped, so that only the rows in use are in memory.
        return self._staging.concatenate_rows(rows, self._device)

    def drop_samples(self, samples: Sequence[Sample]) -> None:
        """Drop the hidden states of `samples`. `score` reads them from the cache if it has them."""
        for sample in samples:
            for name in self._teachers:
                self._rows.pop((name, sample.uid), None)
                self._alignments.pop((name, sample.uid), None)
        if self._cache is not None:
            self._cache.drop_samples(samples)

    def release(self, *, learned: bool = True) -> None:
        """Drop the hidden states and the head of a finished mini-batch; `learned`: the student's weights
        learn from them.

        The next one very likely begins with the same teacher. Its first layers are read ahead, as far as the
        stream's budget goes, while the student generates. With a group, every rank calls this equally often.
        """
        self._rows.clear()
        self._alignments.clear()
        self._logprobs.clear()
        self._heads.release()
        self._plan.clear()
        if self._cache is not None:
            self._cache.release(learned=learned)
        self._prefetch_teacher(self._first)

    def resident(self) -> dict[str, int]:
        """Return bytes of teachers' weights, the resident heads included, and of hidden states in memory."""
        apart = [rows for (name, _), rows in self._rows.items() if self._cache_of(name) is None]
        return resident_parts(self._teachers, self._heads.heads, apart, self._cache)

    @property
    def counters(self) -> ScheduleCounters:
        """Counts since they were last taken."""
        return self._meter.counters

    def take_counters(self) -> dict[str, float]:
        """Return the counters since they were last taken, as metrics."""
        return self._meter.drain_counters()

    def _route_rank(self, route: str) -> tuple[tuple[int, ...], str]:
        # By the teachers' own order, not the order in which routes occurred: a resumed run must sort the same
        # way.
        rank = {name: i for i, name in enumerate(self._teachers)}
        return tuple(rank[teacher] for teacher in self._routes[route].teachers), route

    def _cache_of(self, name: str) -> ScoreCache | None:
        return self._cache if self._cache is not None and self._cache.caches_teacher(name) else None

    def _not_cached(self, name: str, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples teacher `name` has to run on, as it reads them. The cache has the others."""
        answered = [s for s in samples if len(s.response_ids)]
        mine = [s for s in answered if name in self._routes[s.teacher or ""].teachers]
        mine = self._in_own_tokens(name, mine) if name in self._translators else [s.as_taught() for s in mine]
        mine = [s for s in mine if (name, s.uid) not in self._rows and not self._logprobs.has_sample(name, s)]
        cache = self._cache_of(name)
        if cache is None:
            return mine
        waiting = []
        for sample in mine:
            rows = cache.find(self._teachers[name], sample)
            if rows is None:
                waiting.append(sample)
            else:
                self._rows[name, sample.uid] = rows
                self.counters.cached_tokens += len(rows)
        return waiting

    def _in_own_tokens(self, name: str, samples: Sequence[Sample]) -> list[Sample]:
        """Return `samples` as teacher `name` reads them, without those that its tokenizer cannot write."""
        alignments = [self._alignment(name, sample) for sample in samples]
        pairs = zip(samples, alignments, strict=True)
        return [replace(s.as_taught(), response_ids=a.teacher_ids) for s, a in pairs if len(a.teacher_ids)]

    def _alignment(self, name: str, sample: Sample) -> TokenAlignment:
        key = name, sample.uid
        if key not in self._alignments:
            self._alignments[key] = self._translators[name].translate(sample.response_ids)
        return self._alignments[key]

    def _aligned_rows(self, name: str, samples: Sequence[Sample]) -> AlignedRows:
        """Return how the tokens of `samples` and of their teacher stand to each other."""
        from opd.train.aligned_kl import AlignedRows

        alignments = [self._alignment(name, sample) for sample in samples]
        return AlignedRows.from_alignments(alignments, self._translators[name].classes, self._device)

    def _running_teachers(self, waiting: Mapping[str, list[Sample]]) -> list[str]:
        """Return the teachers that run: with samples here, or collective with samples on any rank."""
        used = {name: bool(mine) for name, mine in waiting.items()}
        read = [n for n, t in self._teachers.items() if isinstance(t, CollectiveTeacher) and t.collective]
        if read and self._group is None:
            raise TeacherError(
                f"teacher {read[0]} is read by several ranks together, so its schedule needs their group;"
                " pass TeacherSchedule(group=...)."
            )
        shared = read + [name for name, teacher in self._teachers.items() if _slot_of(teacher) is not None]
        if shared and self._group is not None:
            on_device = "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"
            flags = torch.tensor([used[name] for name in shared], dtype=torch.int32, device=on_device)
            with naming_lost_ranks("the ranks could not agree on their teachers"):
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
            used |= {name: bool(flag) for name, flag in zip(shared, flags.tolist(), strict=True)}
        return [name for name, needed in used.items() if needed]

    def _prefetch_teacher(self, name: str | None) -> None:
        teacher = self._teachers[name] if name is not None else None
        if isinstance(teacher, Prefetching):
            teacher.prefetch()

    def _score_teacher(self, name: str, mine: Sequence[Sample], start: float) -> None:
        teacher = self._teachers[name]
        cache = self._cache_of(name)
        if cache is not None and isinstance(teacher, ChunkedTeacher) and reads_chunks(teacher, mine):
            stored = cache.store_pieces(teacher, teacher.score_pieces(mine))
            self._rows |= {(name, uid): rows for uid, rows in stored.items()}
            targets = None
        else:
            targets = teacher.score(mine)
        self._meter.add_wait(name, time.perf_counter() - start)
        counts = [len(s.response_ids) for s in mine]
        self.counters.teacher_tokens += sum(counts)
        if targets is None:
            return
        if isinstance(targets, TokenLogprobs | TopKLogprobs):
            self._logprobs.add_scores(name, mine, targets)
            return
        if not isinstance(targets, HiddenStates) or len(targets.rows) != sum(counts):
            raise TeacherError(
                f"teacher {name} returned {type(targets).__name__} for {sum(counts)} response tokens,"
                " but one hidden state per token is needed; check its back end."
            )
        check_finite(targets.rows, f"teacher {name}")
        rows = list(targets.rows.split(counts))
        if cache is not None:
            rows = cache.store(teacher, mine, rows)
        self._rows |= {(name, sample.uid): part for sample, part in zip(mine, rows, strict=True)}


def _slot_of(teacher: Teacher) -> AbstractContextManager[None] | None:
    return teacher.device_slot() if isinstance(teacher, TimeSharedTeacher) else None


CHUNK = 4096
"""Rows whose logits exist at the same time."""


@torch.no_grad()
def sampled_logprobs(
    schedule: TeacherSchedule, samples: Sequence[Sample], mixture: str, temperature: float
) -> list[np.ndarray]:
    """Return the `[R]` float32 log-probability of each response under its teacher, in the order of `samples`.

    Several teachers are pooled: weighted mean of log-probabilities (`geometric`, up to its normaliser), or
    log of the weighted mean of probabilities (`arithmetic`).
    """
    logprobs = {s.uid: np.zeros(0, dtype=np.float32) for s in samples}
    for route in schedule.route_names(samples):
        group = [s for s in samples if s.teacher == route and len(s.response_ids)]
        views = schedule.teacher_views(group)
        ids = torch.from_numpy(np.concatenate([s.response_ids for s in group]).astype(np.int64))
        per_view = torch.stack([_response_logprobs(view, ids, temperature) for view in views])
        weights = per_view.new_tensor([v.weight for v in views])[:, None]
        if mixture == "arithmetic":
            pooled = torch.logsumexp(per_view + weights.log(), dim=0)
        else:
            pooled = (weights * per_view).sum(0)
        ends = np.cumsum([len(s.response_ids) for s in group])[:-1]
        parts = np.split(pooled.float().cpu().numpy(), ends)
        logprobs.update({s.uid: part for s, part in zip(group, parts, strict=True)})
    return [logprobs[s.uid] for s in samples]


def _response_logprobs(view: View, ids: Tensor, temperature: float) -> Tensor:
    """Return [N] log-probabilities of the response tokens `ids`."""
    if isinstance(view, ScoredView):
        return view.sampled
    ids = ids.to(view.hidden.device)
    return linear_logprobs(view.hidden, view.head, ids, temperature=temperature, chunk=CHUNK)
