"""Decode steps as CUDA graphs: replayed steps write what the same steps write without graphs, and what a CPU
writes, whatever changes between them.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pretend_cuda
import pytest
import torch
from torch import nn

from opd.config.train import DecodeConfig
from opd.errors import RolloutError
from opd.rollout import graphs
from opd.rollout.kv_cache import bucket_size
from opd.rollout.torch_engine import TorchEngine
from opd.types import Chunk, RolloutRequest, SamplingParams

Fixture = Callable[..., Any]
CASES: list[Any] = [("mistral", torch.float32), ("llama", torch.bfloat16)]
MORE = [
    (family, torch.float32) for family in ("llama-ropescaled", "qwen2", "qwen3", "granite", "olmo2", "gemma2")
]
MORE += [("gemma2", torch.bfloat16)]
CASES += [pytest.param(*case, marks=pytest.mark.long) for case in MORE]
PLAIN = DecodeConfig(cuda_graphs=False)


def requests(count: int, name: str = "", seed: int = 0, longest: int = 70) -> list[RolloutRequest]:
    """With settings of every kind, and lengths that end at different steps."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        settings = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.3])),
            top_p=float(rng.choice([1.0, 0.8])),
            top_k=int(rng.choice([0, 5])),
            max_new_tokens=int(rng.integers(1, longest)),
            stop_ids=tuple(rng.choice(24, rng.integers(0, 2), replace=False).tolist()),
        )
        prompt = rng.integers(0, 24, rng.integers(1, 15)).astype(np.int32)
        made.append(RolloutRequest(f"{name}{number}", prompt, settings, seed=seed))
    return made


def eventful(engine: TorchEngine, fresh: Callable[[int], Any]) -> list[Chunk]:
    """Requests end, others come, weights change in place, and what was kept is dropped, in the middle."""
    engine.submit(requests(10))
    chunks: list[Chunk] = []
    while (chunk := engine.next_chunk()) is not None:
        chunks.append(chunk)
        if len(chunks) == 9:
            engine.submit(requests(6, "later", seed=1, longest=20))
        if len(chunks) in (14, 40):
            engine.pause()
            engine.update_weights(fresh(len(chunks)).weights(), engine.policy_version + 1)
            engine.resume()
        if len(chunks) == 25:
            engine.abort([chunk.uids[0]])
        if len(chunks) == 30 and isinstance(engine._runner, graphs.StaticRunner):
            assert captured(engine) == ({"forward", "draw"} if engine._runner.captures else set())
        if len(chunks) == 35:
            engine.pause()
            engine.release()
            engine.resume()
    return chunks


def columns(chunks: list[Chunk]) -> tuple[list[list[str]], np.ndarray, np.ndarray]:
    return (
        [chunk.uids for chunk in chunks],
        np.concatenate([chunk.token_ids for chunk in chunks]),
        np.concatenate([chunk.logprobs for chunk in chunks]),
    )


def graphs_of(engine: TorchEngine) -> dict[Any, Any]:
    """By key."""
    assert isinstance(engine._runner, graphs.StaticRunner)
    return engine._runner.graphs._captured


def captured(engine: TorchEngine) -> set[str]:
    """The kinds of steps that are graphs now."""
    return {key[0] for key in graphs_of(engine)}


def request_of(uid: str, length: int = 12) -> RolloutRequest:
    """One of fixed length."""
    prompt = np.array([1, 2 + len(uid), 3], np.int32)
    return RolloutRequest(uid, prompt, SamplingParams(max_new_tokens=length))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_replays_write_what_steps_without_graphs_write(gpu, family, dtype, build: Fixture) -> None:
    def model(seed: int = 0) -> Any:
        made = build(family, seed=seed)[0]
        made.module.to(dtype)
        return made

    on_cpu = columns(eventful(TorchEngine(model(), max_running=7), model))
    plain = TorchEngine(gpu.model(model()), max_running=7, settings=PLAIN)
    engine = TorchEngine(gpu.model(model()), max_running=7)
    expected, found = (columns(eventful(one, model)) for one in (plain, engine))
    real = isinstance(gpu, pretend_cuda.RealGpu)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[2], expected[2], atol=1e-6 if real else 0)
    if not real or dtype == torch.float32:
        assert found[0] == on_cpu[0]
        np.testing.assert_array_equal(found[1], on_cpu[1])
        np.testing.assert_allclose(found[2], on_cpu[2], atol=1e-5)


@pytest.mark.slow
def test_a_window_of_positions_is_captured_and_left(gpu, build: Fixture) -> None:
    """Slots and positions beyond those in use change nothing: one request, from 1 token to 128."""
    prompt = np.array([3], np.int32)
    request = RolloutRequest("0", prompt, SamplingParams(max_new_tokens=127), seed=5)
    engine = TorchEngine(gpu.model(build("mistral")[0]))
    expected = columns(list(TorchEngine(build("mistral")[0]).generate(request)))
    for windows in ({128}, {64, 96, 128}):  # while the cache grows, every window is captured anew
        found = columns(list(engine.generate(request)))
        assert {key[2] for key in graphs_of(engine) if key[0] == "forward"} == windows
        np.testing.assert_array_equal(found[1], expected[1])
        np.testing.assert_allclose(found[2], expected[2], atol=1e-5)


@pytest.mark.slow
def test_graphs_outlive_a_call_and_new_weights(gpu, build: Fixture) -> None:
    engine = TorchEngine(gpu.model(build("qwen3")[0]))
    asked = [request_of(str(i)) for i in range(5)]
    first = columns(list(engine.generate(asked)))
    before = dict(graphs_of(engine))
    engine.pause()
    engine.update_weights(build("qwen3", seed=1)[0].weights(), 1)
    engine.resume()
    second = columns(list(engine.generate(asked)))
    expected = columns(list(TorchEngine(build("qwen3", seed=1)[0]).generate(asked)))
    np.testing.assert_array_equal(second[1], expected[1])
    assert second[1].tolist() != first[1].tolist()
    after = graphs_of(engine)
    assert before
    assert all(after[key] is graph for key, graph in before.items())


@pytest.mark.parametrize("family", ["llama", pytest.param("olmo2", marks=pytest.mark.long)])
def test_weights_that_have_moved_are_captured_anew(gpu, family, build: Fixture) -> None:
    model = gpu.model(build(family)[0])
    engine, asked = TorchEngine(model), [request_of(str(i)) for i in range(5)]
    list(engine.generate(asked))
    before = set(map(id, graphs_of(engine).values()))
    for part in model.module.modules():
        for name, old in part._parameters.items():
            if old is not None and name == "weight" and old.dim() == 2:
                part._parameters[name] = nn.Parameter(gpu.put(gpu.get(old)))
    engine.pause()
    engine.update_weights(build(family, seed=1)[0].weights(), 1)
    engine.resume()
    found = columns(list(engine.generate(asked)))
    expected = columns(list(TorchEngine(build(family, seed=1)[0]).generate(asked)))
    np.testing.assert_array_equal(found[1], expected[1])
    assert not before & set(map(id, graphs_of(engine).values()))


def test_a_step_that_cannot_be_captured_is_run_as_it_is(gpu, build: Fixture, caplog) -> None:
    """Rotary embeddings of this kind ask the device for the longest position."""
    plain, engine = TorchEngine(build("llama-dynamic")[0]), TorchEngine(gpu.model(build("llama-dynamic")[0]))
    asked = [request_of(str(i)) for i in range(5)]
    with caplog.at_level(logging.WARNING, logger="opd"):
        found = columns(list(engine.generate(asked)))
    np.testing.assert_array_equal(found[1], columns(list(plain.generate(asked)))[1])
    assert captured(engine) == {"draw"}
    (line,) = [record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage()]
    assert "not permitted when stream is capturing" in line


@pytest.mark.slow
def test_few_graphs_are_kept(gpu, build: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 3)
    engine = TorchEngine(gpu.model(build("llama")[0]), max_running=12)
    asked = [request_of(str(i), 4 + 3 * i) for i in range(12)]
    found = columns(list(engine.generate(asked)))
    expected = columns(list(TorchEngine(build("llama")[0], max_running=12).generate(asked)))
    assert sorted(found[1]) == sorted(expected[1])
    assert len(graphs_of(engine)) == 3


def test_memory_goes_when_it_is_released(gpu, build: Fixture) -> None:
    engine = TorchEngine(gpu.model(build("llama")[0]))
    engine.submit([request_of("0")])
    for _ in range(4):
        engine.next_chunk()
    assert graphs_of(engine)
    engine.pause()
    engine.release()
    assert not graphs_of(engine)
    assert isinstance(engine._runner, graphs.StaticRunner)
    assert engine._runner.buffers is None


def test_a_failure_in_a_step_leaves_nothing_that_is_replayed(gpu, build: Fixture) -> None:
    model = gpu.model(build("llama")[0])
    engine = TorchEngine(model)
    engine.submit([request_of("0")])
    for _ in range(4):
        engine.next_chunk()
    weight = model.module.get_output_embeddings().weight
    kept = gpu.get(weight).clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(RolloutError, match="not finite for row 0"):
        engine.next_chunk()
    with torch.no_grad():
        weight.copy_(gpu.put(kept))
    found = columns(list(engine.generate(request_of("1"))))
    np.testing.assert_array_equal(
        found[1], columns(list(TorchEngine(build("llama")[0]).generate(request_of("1"))))[1]
    )


@pytest.mark.parametrize(("least", "parts"), [(4, 4), (64, 2), (1, 1)])
def test_buckets_are_few_and_waste_little(least: int, parts: int) -> None:
    sizes = [bucket_size(number, least, parts) for number in range(1, 5000)]
    assert sizes == sorted(sizes)
    assert all(number <= size for number, size in enumerate(sizes, start=1))
    assert all(size < number * (1 + 1 / parts) + 1 or size == least for number, size in enumerate(sizes, 1))
    assert len(set(sizes)) <= parts * 13 + least


def captured_graph(gpu: Any, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph, device = torch.cuda.CUDAGraph(), gpu.device
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
    return graph


def test_a_capture_leaves_no_trace_and_a_replay_knows_no_python(gpu) -> None:
    given, out, factor = gpu.put(torch.arange(4.0)), gpu.put(torch.zeros(4)), [2.0]

    def step() -> None:
        out.copy_(given * factor[0])
        given.add_(1)

    graph = captured_graph(gpu, step)
    assert gpu.get(out).tolist() == [0.0] * 4
    assert gpu.get(given).tolist() == [0.0, 1.0, 2.0, 3.0]
    factor[0] = 5.0
    graph.replay()
    assert gpu.get(out).tolist() == [0.0, 2.0, 4.0, 6.0]
    given.copy_(gpu.put(torch.full((4,), 7.0)))
    graph.replay()
    assert gpu.get(out).tolist() == [14.0] * 4


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x.add_(torch.ones(3).to(x.device)),
        lambda x: torch.cuda.synchronize(),
    ],
    ids=["number", "copy", "size", "upload", "wait"],
)
def test_a_capture_gives_the_host_nothing(pretended, asks: Callable[[torch.Tensor], object]) -> None:
    given = pretended.put(torch.ones(3))
    with pytest.raises(RuntimeError, match="previous error during capture"):
        captured_graph(pretended, lambda: asks(given))
    assert given.sum().item() == 3  # what comes after is no capture


def test_a_replay_finds_memory_that_was_given_back_and_leaves_none_of_its_own(pretended) -> None:
    inputs, held = [pretended.put(torch.ones(3))], []
    out = pretended.put(torch.zeros(3))
    graph = captured_graph(pretended, lambda: (held.append(inputs[0] * 2), out.copy_(held[0])))
    graph.replay()
    assert pretended.get(out).tolist() == [2.0] * 3
    assert torch.isnan(pretended.get(held[0])).all()
    inputs.clear()
    with pytest.raises(RuntimeError, match="given back since its capture"):
        graph.replay()
