"""Running statistics of rows in TileLang: what a row kernel's first sweep collects, and how lanes merge.

With running maxima `m_p`, `m_q` a lane keeps `sum e^(p - m_p)`, `sum e^(q - m_q)` and
`a = sum e^(p - m_p) d`, `d = (p - m_p) - (q - m_q)`. Moving to larger maxima by `x = m_p - m_p'` and
`y = m_q - m_q'` is exact algebra: `a' = (a + sum_p (x - y)) e^x`, `sum_p' = sum_p e^x`, `sum_q' = sum_q e^y`.
Once lanes share their maxima their sums add up, and `KL(p || q) = a / sum_p - log(sum_p / sum_q)`.
"""

# No `from __future__ import annotations` where kernels are defined: TileLang evaluates their annotations.
# pyright: reportInvalidTypeForm=false
from typing import Any, NamedTuple

from opd.kernels.tilelang_math import functions
from opd.kernels.tilelang_target import Target, language

# A lane that has seen nothing holds LOWEST; a place beyond the vocabulary reads MASKED, so that its
# exponential is 0 even there. Both are finite: a difference of infinities would be NaN.
LOWEST = -1e30
MASKED = -2e30


class Lanes(NamedTuple):
    """Buffers `[1, lanes]` and, from `row_max_p` on, totals `[1]`; `p` weighs the mean."""

    max_p: Any
    max_q: Any
    sum_p: Any
    sum_q: Any
    mean: Any
    part_p: Any
    """One tile's share of a sum; added up apart because short sums round less."""
    part_q: Any
    part_mean: Any
    x: Any
    y: Any
    e: Any
    row_max_p: Any
    row_max_q: Any
    row_sum_p: Any
    row_sum_q: Any
    row_mean: Any
    """Not yet divided by `row_sum_p`."""

    @classmethod
    def allocate(cls, target: Target, dtype: str) -> "Lanes":
        """Called inside a kernel."""
        T = language()

        buffer = target.lane_buffer(T)
        lanes = [buffer((1, target.lanes), dtype) for _ in range(11)]
        return cls(*lanes, *(buffer((1,), dtype) for _ in range(5)))


class FirstSweep(NamedTuple):
    """Macros that fill `Lanes`."""

    start: Any
    """`(lanes)`: nothing seen yet. Once, before the loop over the vocabulary."""
    absorb: Any
    """`(lanes, p, q, row, begin, vocabulary, masked)`: take in the tile of both rows from `begin` on."""
    merge: Any
    """`(lanes)`: totals of the row."""


def reader(dtype: str) -> Any:
    """`at(logits, row, index, vocabulary, masked)`: a logit, or `MASKED` beyond the vocabulary."""
    T = language()

    def at(logits: Any, row: Any, index: Any, vocabulary: Any, masked: bool) -> Any:
        if not masked:
            return logits[row, index]
        return T.if_then_else(index < vocabulary, logits[row, index], T.cast(MASKED, dtype))

    return at


def first_sweep(target: Target, dtype: str) -> FirstSweep:
    """The macros for one target and dtype."""
    T = language()

    start, rescale, merge = _whole_lanes(target, dtype)
    raise_maxima, exp, at = _maxima(target, dtype, rescale), functions(dtype).exp, reader(dtype)
    each, steps, lanes, unroll = target.lane_loop(T), target.step_loop(T), target.lanes, target.unroll

    @T.macro
    def absorb(s, p, q, row, begin, vocabulary, masked):
        raise_maxima(s, p, q, row, begin, vocabulary, masked)
        for o, i in each(1, lanes):
            s.part_p[o, i] = 0.0
            s.part_q[o, i] = 0.0
            s.part_mean[o, i] = 0.0
        for u in steps(unroll):
            for o, i in each(1, lanes):
                s.x[o, i] = at(p, row, begin + u * lanes + i, vocabulary, masked) - s.max_p[o, i]
                s.y[o, i] = at(q, row, begin + u * lanes + i, vocabulary, masked) - s.max_q[o, i]
            for o, i in each(1, lanes):
                s.e[o, i] = exp(s.x[o, i])
            for o, i in each(1, lanes):
                s.part_p[o, i] = s.part_p[o, i] + s.e[o, i]
                s.part_mean[o, i] = s.part_mean[o, i] + s.e[o, i] * (s.x[o, i] - s.y[o, i])
                s.part_q[o, i] = s.part_q[o, i] + exp(s.y[o, i])
        for o, i in each(1, lanes):
            s.sum_p[o, i] = s.sum_p[o, i] + s.part_p[o, i]
            s.sum_q[o, i] = s.sum_q[o, i] + s.part_q[o, i]
            s.mean[o, i] = s.mean[o, i] + s.part_mean[o, i]

    return FirstSweep(start, absorb, merge)


def _maxima(target: Target, dtype: str, rescale: Any) -> Any:
    """The macro that moves each lane's statistics to the maxima that a tile brings."""
    T = language()

    at = reader(dtype)
    each, steps, lanes, unroll = target.lane_loop(T), target.step_loop(T), target.lanes, target.unroll

    @T.macro
    def raise_maxima(s, p, q, row, begin, vocabulary, masked):
        for o, i in each(1, lanes):
            s.part_p[o, i] = s.max_p[o, i]
            s.part_q[o, i] = s.max_q[o, i]
        for u in steps(unroll):
            for o, i in each(1, lanes):
                s.part_p[o, i] = T.max(s.part_p[o, i], at(p, row, begin + u * lanes + i, vocabulary, masked))
                s.part_q[o, i] = T.max(s.part_q[o, i], at(q, row, begin + u * lanes + i, vocabulary, masked))
        for o, i in each(1, lanes):
            s.x[o, i] = s.max_p[o, i] - s.part_p[o, i]
            s.y[o, i] = s.max_q[o, i] - s.part_q[o, i]
        rescale(s)
        for o, i in each(1, lanes):
            s.max_p[o, i] = s.part_p[o, i]
            s.max_q[o, i] = s.part_q[o, i]

    return raise_maxima


def _whole_lanes(target: Target, dtype: str) -> tuple[Any, Any, Any]:
    """The macros that read no logits: `start`, `rescale` and `merge`."""
    T = language()

    exp, each, lanes = functions(dtype).exp, target.lane_loop(T), target.lanes

    @T.macro
    def start(s):
        for o, i in each(1, lanes):
            s.max_p[o, i] = LOWEST
            s.max_q[o, i] = LOWEST
            s.sum_p[o, i] = 0.0
            s.sum_q[o, i] = 0.0
            s.mean[o, i] = 0.0

    @T.macro
    def rescale(s):
        """Move the sums by `x` and `y`, which are at most 0."""
        for o, i in each(1, lanes):
            s.e[o, i] = exp(s.x[o, i])
        for o, i in each(1, lanes):
            s.mean[o, i] = (s.mean[o, i] + s.sum_p[o, i] * (s.x[o, i] - s.y[o, i])) * s.e[o, i]
            s.sum_p[o, i] = s.sum_p[o, i] * s.e[o, i]
            s.sum_q[o, i] = s.sum_q[o, i] * exp(s.y[o, i])

    @T.macro
    def merge(s):
        T.reduce_max(s.max_p, s.row_max_p, dim=1)
        T.reduce_max(s.max_q, s.row_max_q, dim=1)
        for o, i in each(1, lanes):
            s.x[o, i] = s.max_p[o, i] - s.row_max_p[o]
            s.y[o, i] = s.max_q[o, i] - s.row_max_q[o]
        rescale(s)
        T.reduce_sum(s.sum_p, s.row_sum_p, dim=1)
        T.reduce_sum(s.sum_q, s.row_sum_q, dim=1)
        T.reduce_sum(s.mean, s.row_mean, dim=1)

    return start, rescale, merge
