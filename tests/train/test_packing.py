from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from opd.train.distill_terms import add_by_position
from opd.train.packing import (
    Shares,
    pack,
    pack_tokens,
    split_by_tokens,
    split_samples,
    split_teachers,
    teacher_runs,
)
from opd.train.terms import MetricSums
from opd.types import RolloutBatch, TokenTerms

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12)


def batch_of(samples):
    terms = []
    for sample in samples:
        term = TokenTerms.zeros(len(sample.response_ids))
        term.advantages = np.arange(len(sample.response_ids), dtype=np.float32)
        terms.append(term)
    return RolloutBatch(samples, terms)


def micro_batches(samples, budget):
    batch, answered = batch_of(samples), [i for i, s in enumerate(samples) if len(s.response_ids)]
    return [
        pack(list(batch.select_samples(part)), torch.device("cpu"))
        for part in split_samples(samples, answered, budget)
    ]


def test_worked_example_of_the_docstring():
    input_ids, position_ids, cu_seqlens, rows = pack_tokens(tiny.samples([(2, 1), (1, 2)]))
    assert cu_seqlens.tolist() == [0, 3, 6]
    assert rows.tolist() == [1, 3, 4]
    assert position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert len(input_ids) == 6


def test_each_teachers_samples_are_dealt_before_all_of_them_are():
    samples = tiny.samples([(1, 9), (1, 5), (1, 4)])
    for sample, teacher in zip(samples, "abb", strict=True):
        sample.teacher = teacher
    shares = [Shares(SimpleNamespace(is_alone=False, size=2, rank=rank)) for rank in range(2)]  # type: ignore[arg-type]
    for share in shares:
        share.assign_ranks(samples)
    found = [[len(sample.response_ids) for sample in share.local_samples(samples)] for share in shares]
    assert found == [[9, 4], [5]]  # not 9 beside 5 and 4: a rank would wait while the other reads b
    for share in shares:
        share.assign_ranks(samples[:1])  # of the others nothing is kept
    assert [len(share.local_samples(samples[1:2])) for share in shares] == [1, 0]


@given(LENGTHS)
def test_rows_predict_exactly_the_response_tokens(lengths):
    samples = tiny.samples(lengths)
    input_ids, position_ids, cu_seqlens, rows = pack_tokens(samples)
    expected = np.concatenate([s.response_ids for s in samples])
    np.testing.assert_array_equal(input_ids[rows + 1].numpy(), expected)
    for sample, start in zip(samples, cu_seqlens.tolist(), strict=False):
        mine = rows[(rows >= start) & (rows < start + len(sample.token_ids))]
        first = start + len(sample.prompt_ids) - 1
        assert mine.tolist() == list(range(first, first + len(sample.response_ids)))
    assert int(position_ids[cu_seqlens[:-1].long()].sum()) == 0


@given(LENGTHS, st.integers(1, 40))
def test_every_token_is_packed_once_whatever_the_budget(lengths, budget):
    samples = tiny.samples(lengths)
    micros = micro_batches(samples, budget)
    packed = [s.uid for micro in micros for s in micro.samples]
    assert packed == [s.uid for s in samples if len(s.response_ids)]
    for micro in micros:
        assert len(micro.samples) == 1 or len(micro.input_ids) <= budget
        assert len(micro.advantages) == len(micro.targets) == len(micro.rows)
    targets = [t for micro in micros for t in micro.targets.tolist()]
    assert targets == np.concatenate([s.response_ids for s in samples]).tolist()


def test_a_micro_batch_ends_where_the_teacher_changes():
    assert split_by_tokens([3, 3, 3, 3], ["a", "a", "b", "b"], 100) == [(0, 2), (2, 4)]
    assert split_by_tokens([3, 3, 9, 3], [None] * 4, 6) == [(0, 2), (2, 3), (3, 4)]
    assert split_by_tokens([], [], 5) == []


@given(LENGTHS, st.data())
def test_parts_of_a_micro_batch_are_each_teachers_own(lengths, data):
    """Also on a rank that has some of the rows."""
    samples = [s for s in tiny.samples(lengths) if len(s.response_ids)]
    if not samples:
        return
    batch = batch_of(samples)
    for sample, term in zip(samples, batch.terms, strict=True):
        sample.teacher = data.draw(st.sampled_from(["a", "b", None]))
        drawn = data.draw(st.lists(st.booleans(), min_size=len(term.kl_weight), max_size=len(term.kl_weight)))
        term.kl_weight = np.array(drawn, np.float32)
    micro = pack(list(batch), torch.device("cpu"))
    kept = None
    if data.draw(st.booleans()):
        kept = torch.tensor(
            [row for row in range(len(micro.rows)) if data.draw(st.booleans())], dtype=torch.int64
        )
        runs = teacher_runs(samples, kept)
        micro = replace(micro, rows=kept, kept=kept, runs=runs, counted=None, **micro.select_rows(kept))
    parts = split_teachers(micro)
    assert [s for _, part in parts for s in part.samples] == samples
    assert [row for rows, _ in parts for row in range(len(micro.targets))[rows]] == [
        *range(len(micro.targets))
    ]
    start = 0
    for (rows, part), run in zip(parts, micro.runs, strict=True):
        assert rows == run[1]
        assert part.runs == teacher_runs(part.samples, part.kept)
        (teacher,) = {s.teacher for s in part.samples}
        alone = pack(list(batch.select_samples(range(start, start + len(part.samples)))), torch.device("cpu"))
        before = sum(len(s.response_ids) for s in samples[:start])
        start += len(part.samples)
        assert start == len(samples) or samples[start].teacher != teacher
        for name in ("input_ids", "position_ids", "cu_seqlens"):
            assert torch.equal(getattr(part, name), getattr(alone, name))
        if kept is None:
            assert torch.equal(part.rows, alone.rows)
            assert part.counted is not None
            assert alone.counted is not None
            assert torch.equal(part.counted, alone.counted)
            assert part.counts == alone.counts
            own = slice(None)
        else:
            own = kept[(kept >= before) & (kept < before + len(alone.rows))] - before
            assert part.kept is not None
            assert torch.equal(part.kept, own)
        for name, values in alone.select_rows(own).items():
            assert torch.equal(getattr(part, name), values), name


def test_terms_of_another_length_are_refused():
    with pytest.raises(ValueError, match="s0"):
        RolloutBatch(tiny.samples([(2, 3)]), [TokenTerms.zeros(2)])


@given(LENGTHS, st.randoms(use_true_random=False), st.booleans())
def test_the_kl_by_position_is_the_kl_cut_in_octaves(lengths, random, shared):
    samples = [s for s in tiny.samples(lengths) if len(s.response_ids)]
    if not samples:
        return
    micro = micro_batches(samples, 10**6)[0]
    places = [place for s in samples for place in range(1, len(s.response_ids) + 1)]
    kept = [n for n in range(len(places)) if not shared or random.random() < 0.6]
    micro.kept = torch.tensor(kept, dtype=torch.int64) if shared else None
    values = [random.random() for _ in kept]
    counted = [random.random() < 0.7 for _ in kept]
    sums = MetricSums()
    add_by_position(micro, torch.tensor(values), torch.tensor(counted, dtype=torch.bool), sums)
    expected = {}
    for n, value, seen in zip(kept, values, counted, strict=True):
        if seen:
            expected.setdefault(f"kl_at/{1 << (places[n].bit_length() - 1)}", []).append(value)
    assert sums.means() == pytest.approx({k: sum(v) / len(v) for k, v in expected.items()}, rel=1e-5)
