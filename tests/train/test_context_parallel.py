"""Sequences shared by ranks, and long ones with FSDP: the step of one rank, with real processes."""

import functools
import json
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import context_step
import numpy as np
import pytest
import tiny
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_processes import FREED_AT_ONCE, run_ranks
from safetensors.torch import load_file

from opd.models.context_parallel import ContextParallel
from opd.train.packing import pack
from opd.train.plan import context_size, divisors
from opd.train.shared_sequences import local_indices, local_rows
from opd.train.torch_backend import TorchBackend
from opd.types import TokenTerms

RANKS = {
    2: [*context_step.CASES, *context_step.SHARDED, *context_step.CHOSEN],
    4: [
        *("llama", "gemma2", "short", "llama in pieces", "gemma2 in pieces", "short in pieces"),
        *context_step.MESH,
        *context_step.CHOSEN,
    ],
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Folder of what each of so many ranks found, case by case; run when first asked for."""

    @functools.cache
    def folder_of(world: int) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks-{world}")
        (folder / "cases.json").write_text(json.dumps(RANKS[world]))
        run_ranks(str(Path(__file__).with_name("context_ranks.py")), world, folder, seconds=400)
        return folder

    return folder_of


@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(world, case, marks=[pytest.mark.long] if world > 2 else [pytest.mark.slow])
        for world, cases in RANKS.items()
        for case in cases
    ],
)
def test_ranks_that_share_sequences_or_weights_make_the_step_of_one(ranks, world, case):
    assert_step_of_one(ranks(world), world, case)


def assert_step_of_one(folder: Path, world: int, case: str) -> None:
    """What `world` ranks have left in `folder` is the step of one process."""
    expected, metrics = context_step.step(case, TorchBackend, whole=True)
    first = load_file(folder / f"{case}-0.safetensors")
    assert first.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=2e-5 * max(scale, 0.1), msg=name)
    assert sum(float(t.norm()) for n, t in expected.items() if n.startswith("grad/")) > 0
    found = json.loads((folder / f"{case}-0.json").read_text())
    assert found.pop("context_parallel", None) == context_step.CHOSEN.get(case, (None, None))[1]
    assert found == pytest.approx(metrics, rel=1e-3, abs=1e-6)
    for rank in range(1, world):
        other = load_file(folder / f"{case}-{rank}.safetensors")
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())


def test_as_few_ranks_share_a_sequence_as_its_length_allows():
    chosen = [context_size(longest, 12, 100) for longest in (0, 1, 100, 101, 300, 301, 401, 601, 1201, 10**6)]
    assert chosen == [1, 1, 1, 2, 3, 4, 6, 12, 12, 12]
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def shares(tokens: int, bounds: list[int], world: int):
    """Every rank's share; the collectives are not needed for it."""
    ids = torch.arange(tokens)
    for rank in range(world):
        ranks = object.__new__(ContextParallel)
        ranks.rank, ranks.size = rank, world
        yield ranks.local_share(ids, ids, bounds)


@settings(max_examples=cases(60))
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 9))
def test_shares_are_equal_hold_every_token_once_and_see_what_precedes_it(lengths, world, window):
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    tokens = bounds[-1]
    found = list(shares(tokens, bounds, world))
    assert len({len(share.places) for share in found}) == 1
    places = sorted(place for share in found for place in share.places.tolist() if place < tokens)
    assert places == list(range(tokens))
    starts = {place: begin for begin, end in pairwise(bounds) for place in range(begin, end)}
    for share in found:
        queries = [i for s in share.segments for i in range(s.queries.start, s.queries.stop)]
        assert queries == list(range(len(share.places)))
        for segment in share.segments:
            own = share.places[segment.queries].tolist()
            if own[0] < tokens:
                assert (segment.keys.start, segment.keys.stop) == (starts[own[0]], own[-1] + 1)
                first = max(starts[own[0]], own[0] - window + 1)
                assert segment.visible_keys(window) == range(first, own[-1] + 1)


@settings(max_examples=cases(30))
@given(st.integers(1, 50), st.integers(1, 4), st.data())
def test_rows_are_found_on_exactly_one_rank(tokens, world, data):
    rows = torch.tensor(sorted(data.draw(st.sets(st.integers(0, tokens - 1)))), dtype=torch.int64)
    kept = []
    for share in shares(tokens, [0, tokens], world):
        local, which = local_indices(rows, share)
        assert torch.equal(share.places[local], rows[which])
        kept += which.tolist()
    assert sorted(kept) == list(range(len(rows)))


def test_each_number_of_a_token_goes_to_the_rank_that_has_it():
    samples = tiny.samples([(2, 3), (4, 5)])
    pairs = []
    for sample in samples:
        term = TokenTerms.zeros(len(sample.response_ids))
        for place, name in enumerate(("ref_logprobs", "importance", "values", "returns")):
            setattr(term, name, 100.0 * place + np.arange(len(sample.response_ids), dtype=np.float32))
        pairs.append((sample, term))
    micro = pack(pairs, torch.device("cpu"))
    streams = [field.name for field in fields(micro) if field.name not in ("rows", "kept", "counted")]
    for share in shares(len(micro.input_ids), micro.cu_seqlens.tolist(), 2):
        own = local_rows(micro, share)
        assert own.kept is not None
        assert 0 < len(own.kept) < len(micro.rows)
        for name in streams:
            whole = getattr(micro, name)
            if isinstance(whole, torch.Tensor) and len(whole) == len(micro.rows):
                assert torch.equal(getattr(own, name), whole[own.kept]), name


@pytest.mark.long
def test_a_rank_with_its_share_in_pieces_keeps_a_few_hidden_states_per_token_of_it(tmp_path, monkeypatch):
    for name, value in FREED_AT_ONCE.items():
        monkeypatch.setenv(name, value)
    peaks = {}
    for world in (2, 4):
        folder = tmp_path / str(world)
        folder.mkdir()
        run_ranks(str(Path(__file__).with_name("context_memory.py")), world, folder)
        peaks[world] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    hidden_state = 64 * 4
    for found in peaks[2]:
        # Of its half of the tokens: each layer's input, one layer's queries, keys, values and gradients.
        assert 0 < found["pieces"] < 8 * hidden_state
        assert found["whole"] > 3 * found["pieces"]
    # Nothing has all tokens.
    assert max(found["pieces"] for found in peaks[4]) < 0.6 * min(found["pieces"] for found in peaks[2])


@pytest.mark.long
def test_a_rank_on_megatron_core_needs_half_of_what_it_needs_among_half_as_many(tmp_path, monkeypatch):
    for name, value in FREED_AT_ONCE.items():
        monkeypatch.setenv(name, value)
    peaks = {}
    for world in (2, 4):
        folder = tmp_path / str(world)
        folder.mkdir()
        (folder / "megatron").touch()
        run_ranks(str(Path(__file__).with_name("context_memory.py")), world, folder)
        peaks[world] = [json.loads((folder / f"{rank}.json").read_text())["whole"] for rank in range(world)]
    assert 0 < max(peaks[4]) < 0.6 * min(peaks[2])
