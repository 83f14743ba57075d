"""Keys and values in pages: who owns which, what the kernel is given, and that no token changes."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pretend_cuda
import pretend_kernels
import pytest
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cached_attention import attend_slot
from test_graphs import columns, eventful, graphs_of, request_of, requests
from test_kept_turns import Talk, first_turns, same

from opd.config.train import DecodeConfig
from opd.models.attention import ScoreForm
from opd.rollout import graphs, paged_attention, pages
from opd.rollout.kv_cache import KVCache
from opd.rollout.paged_attention import PagedAttention
from opd.rollout.pages import PagedCache
from opd.rollout.torch_engine import TorchEngine
from opd.types import RolloutRequest, SamplingParams

Fixture = Callable[..., Any]
PAGE = 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of which a short request needs several."""
    for module in (pages, paged_attention, graphs):
        monkeypatch.setattr(module, "PAGE", PAGE)
    monkeypatch.setattr(pretend_kernels, "FLASH_PAGE", PAGE)


@pytest.fixture
def kernels(pretended: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A device whose kernel takes float32, too, so that no token differs because numbers are rounded."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for module, name in ((pretend_kernels, "FLASH_DTYPES"), (paged_attention, "DTYPES")):
        monkeypatch.setattr(module, name, dtypes)
    paged_attention.is_trusted.cache_clear()
    with pretend_kernels.attention_kernels(monkeypatch):
        yield pretended
    paged_attention.is_trusted.cache_clear()


def paged(gpu: Any, model: Any, **options: Any) -> TorchEngine:
    engine = TorchEngine(gpu.model(model), **options)
    assert isinstance(engine._runner, graphs.StaticRunner)
    assert engine._runner.paged
    return engine


def owned(cache: PagedCache) -> list[list[int]]:
    """Pages of every slot."""
    return [row[:count].tolist() for row, count in zip(cache._table, cache._owned, strict=True)]


@settings(max_examples=cases(50), deadline=None)
@given(st.data())
def test_pages_follow_the_slots_and_are_never_shared(data: st.DataObject) -> None:
    """Against one list of token numbers for each slot: growth, moves, orders, ends."""
    pages.PAGE, before = PAGE, pages.PAGE
    cache, form = PagedCache(60 * PAGE, torch.device("cpu")), torch.zeros(1, 2, 1, 3)
    held, written = [], 0
    for _ in range(data.draw(st.integers(1, 12))):
        held = held[: data.draw(st.integers(0, len(held)))]
        cache.free_slots(len(held))
        if len(held) > 1:
            source = np.array(data.draw(st.permutations(range(len(held)))))
            target, length = np.arange(len(held)), np.array([len(x) for x in held])
            cache.move_slots(source, target, length[source])
            held = [held[old] for old in source]
        grown = [data.draw(st.integers(0, 6)) for _ in held]
        grown += data.draw(st.lists(st.integers(1, 9), max_size=8 - len(held), min_size=not held))
        total = np.array([len(x) for x in held] + [0] * (len(grown) - len(held))) + grown
        cache.reserve_tokens(total, 30, 0)
        layer = cache.get_layer(0, form, form)
        for slot, new in enumerate(grown):
            numbers = torch.arange(written, written + new)
            written += new
            old = held[slot] if slot < len(held) else []
            places = cache.cache_index(np.full(new, slot), np.arange(len(old), len(old) + new))
            value = numbers.float()[:, None, None].expand(-1, 2, 3)
            layer.put(torch.from_numpy(places), value, -value)
            held[slot : slot + 1] = [[*old, *numbers.tolist()]]
        everything = [page for slot in owned(cache) for page in slot]
        assert sorted(everything + cache._free) == list(range(1, cache._pages + 1))
        assert cache.free_pages == 60 - len(everything)
        assert torch.equal(cache.table, torch.from_numpy(cache._table))
        for slot, expected in enumerate(held):
            assert len(owned(cache)[slot]) == -(-len(expected) // PAGE)
            kept = cache.read_slot(slot, len(expected)).layers[0]
            for x, sign in zip(kept, (1, -1), strict=True):
                assert x.shape == (2, len(expected), 3)
                assert (sign * x[0, :, 0]).tolist() == expected
    pages.PAGE = before


def test_what_a_step_took_is_given_back_outside_of_it() -> None:
    cache = PagedCache(60 * PAGE, torch.device("cpu"))
    with torch.inference_mode():
        cache.reserve_tokens(np.array([5, 9]), 20, 0)
        assert cache.table[:, :3].tolist() == [[1, 2, 0], [3, 4, 5]]
    cache.clear()
    assert not cache.table.any()
    assert cache.free_pages == 60


@settings(max_examples=cases(30), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    groups=st.integers(1, 3),
    window=st.sampled_from([None, 1, 4, 30]),
    seed=st.integers(0, 1000),
)
def test_equals_a_loop_over_slots_and_heads(
    lengths: list[int], groups: int, window: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, 8, generator=generator)

    with pytest.MonkeyPatch.context() as patch, pretend_kernels.flash_on_cpu():
        patch.setattr(pretend_kernels, "FLASH_DTYPES", (torch.float32,))
        for module in (pages, paged_attention):
            patch.setattr(module, "PAGE", PAGE)
        patch.setattr(pretend_kernels, "FLASH_PAGE", PAGE)
        cache, held = PagedCache(100 * PAGE, torch.device("cpu")), np.array(lengths)
        cache.reserve_slots(len(held) + 2)
        cache.reserve_tokens(held, 40, 0)
        layer = cache.get_layer(0, drawn(2, 1), drawn(2, 1))
        before = [(drawn(n, 2), drawn(n, 2)) for n in lengths]
        for slot, (keys, values) in enumerate(before):
            places = torch.from_numpy(cache.cache_index(np.full(len(keys), slot), np.arange(len(keys))))
            layer.put(places, keys, values)
        query, key, value = drawn(len(held), 2 * groups), drawn(len(held), 2), drawn(len(held), 2)
        form = ScoreForm(0.4, window=window)
        ours = PagedAttention(cache, torch.from_numpy(held - 1)).attend(layer, query, key, value, form)
    for slot, (keys, values) in enumerate(before):
        keys[-1], values[-1] = key[slot], value[slot]
        k, v = (x.double().transpose(0, 1).numpy() for x in (keys, values))
        expected = attend_slot(query[slot].double().numpy(), k, v, form)
        np.testing.assert_allclose(ours[slot].numpy(), expected, atol=1e-5)


@pytest.mark.some(2)
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("captured", [True, False])
def test_it_writes_what_a_cpu_writes(family: str, captured: bool, kernels: Any, build: Fixture) -> None:
    def model(seed: int = 0) -> Any:
        return build(family, seed=seed)[0]

    expected = columns(eventful(TorchEngine(model(), max_running=7), model))
    engine = paged(kernels, model(), max_running=7, settings=DecodeConfig(cuda_graphs=captured))
    found = columns(eventful(engine, model))
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[2], expected[2], atol=1e-5)
    cache = engine._runner.cache
    assert isinstance(cache, PagedCache)
    assert not any(owned(cache)), "all is given back"
    read, held = engine.position_counts
    assert held <= read <= 1.1 * held


def test_a_step_is_one_graph_however_long_requests_are(kernels: Any, build: Fixture) -> None:
    engine = paged(kernels, build("mistral")[0])
    for _ in range(2):
        found = columns(list(engine.generate(request_of("0", 100))))
    assert sum(key[0] == "forward" for key in graphs_of(engine)) == 1
    expected = columns(list(TorchEngine(build("mistral")[0]).generate(request_of("0", 100))))
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("captured", [True, False])
def test_a_step_waits_for_its_tokens_alone(captured: bool, kernels: Any, build: Fixture) -> None:
    engine = paged(kernels, build("llama")[0], settings=DecodeConfig(cuda_graphs=captured))
    asked = [request_of(str(i), 40) for i in range(6)]
    list(engine.generate(asked))  # the pool has grown
    engine.submit(asked)
    for _ in range(3):
        engine.next_chunk()
    for _ in range(8):
        with kernels.counted() as seen:
            engine.next_chunk()
        assert len(seen.waits) <= 1, seen
        if captured:
            assert seen.launches.total() == 2, seen
        else:
            assert seen.launches["torch_attn::_varlen_attn"] == 2, seen


def test_more_run_than_slots_of_one_length_had_room_for(
    kernels: Any, build: Fixture, collect: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pages run out, the last requests wait and are computed again."""
    asked = requests(24, longest=60)
    expected = collect(TorchEngine(build("llama")[0]).generate(asked))
    monkeypatch.setattr("opd.rollout.torch_engine.kv_budget", lambda _, device: 45 * PAGE * 256)
    model = build("llama")[0]
    assert model.kv_numbers * model.dtype.itemsize == 256
    engine = paged(kernels, model)
    cache, most = engine._runner.cache, []
    engine.submit(asked)
    chunks, running, began = [], set(), False
    while (chunk := engine.next_chunk()) is not None:
        chunks.append(chunk)
        now = set(chunk.uids)
        assert not (began and running - now), "who begins leaves a page to everybody"
        running, began = now - chunk.finished.keys(), bool(now - running)
        most.append(len(now))
        assert isinstance(cache, PagedCache)
        assert cache._pages <= cache.most_pages == 44
        assert len(engine._batch.uids) == len(set(engine.in_flight)) - len(engine._queue)
    found = collect(chunks)
    assert engine.prefilled_tokens > sum(len(request.prompt_ids) for request in asked)
    longest = max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in asked)
    assert max(most) > 2 * (44 * PAGE // longest)
    for uid, response in found.items():
        assert response.token_ids == expected[uid].token_ids
        assert response.positions == list(range(len(response.token_ids)))
        np.testing.assert_allclose(response.logprobs, expected[uid].logprobs, atol=1e-5)


def test_turns_snapshots_and_new_weights(kernels: Any, build: Fixture, collect: Fixture) -> None:
    begun = first_turns(12)
    expected = collect(Talk(TorchEngine(build("qwen2")[0]), begun, kept=False).chunks())
    engine = paged(kernels, build("qwen2")[0], max_running=5)
    same(collect(Talk(engine, begun).chunks()), expected)
    assert engine.kept_tokens > 0
    asked = [request_of(str(i), 30) for i in range(7)]
    undisturbed = collect(TorchEngine(build("qwen2")[0]).generate(asked))
    engine.submit(asked)
    steps = [engine.next_chunk() for _ in range(4)]
    engine.pause()
    saved = engine.snapshot()
    engine.release()
    engine.restore(saved)
    engine.resume()
    while (step := engine.next_chunk()) is not None:
        steps.append(step)
    assert engine.restored_tokens > 0
    assert {u: r.token_ids for u, r in collect(steps).items()} == {
        u: r.token_ids for u, r in undisturbed.items()
    }


@pytest.mark.parametrize("wrong", ["lost", "other", "company"])
def test_a_kernel_that_is_wrong_is_left_aside(
    wrong: str, kernels: Any, build: Fixture, collect: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, said = paged_attention.attend_pages, {"lost": "launched", "other": "float64", "company": "company"}

    def broken(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        if wrong == "lost":
            raise RuntimeError("no kernel image is available")
        return right(query, *rest) * (1.5 if wrong == "other" else 1 + 0.001 * len(query))

    monkeypatch.setattr(paged_attention, "attend_pages", broken)
    model = build("llama")[0]
    with pytest.warns(RuntimeWarning, match=said[wrong]):
        engine = TorchEngine(kernels.model(model))
    assert type(engine._runner.cache) is KVCache
    again = TorchEngine(model)  # nothing more is said
    asked = [request_of(str(i)) for i in range(3)]
    expected = collect(TorchEngine(build("llama")[0]).generate(asked))
    same(collect(again.generate(asked)), expected)


@pytest.mark.parametrize("family", ["gemma2", "cohere"])
def test_what_the_kernel_does_not_know_has_slots_of_one_length(
    family: str, kernels: Any, build: Fixture
) -> None:
    engine = TorchEngine(kernels.model(build(family)[0]))
    assert type(engine._runner.cache) is KVCache


def test_on_a_device_its_own_kernel_is_trusted(gpu: Any, build: Fixture, collect: Fixture) -> None:
    """In bfloat16, with pages as they are: a device that is not there has no kernel."""
    if isinstance(gpu, pretend_cuda.Gpu):
        assert paged_attention.PagesForm.from_model(gpu.model(build("llama")[0])) is None
        return
    model = build("llama")[0]
    model.module.to(torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        for module in (pages, paged_attention, graphs):
            patch.setattr(module, "PAGE", 256)
        engine = paged(gpu, model)
        prompts = [np.arange(1 + 17 * i, dtype=np.int32) % 24 for i in range(5)]
        sampling = SamplingParams(max_new_tokens=30)
        asked = [RolloutRequest(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
        together = collect(engine.generate(asked))
    assert all(len(response.token_ids) == 30 for response in together.values())
