"""Keys and values that stay between the turns of a conversation: no token changes, and only what was added is
computed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
from test_engine import FAMILIES

from opd.config.train import DecodeConfig
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.streams import More
from opd.rollout.torch_engine import TorchEngine
from opd.rollout.turns import FEW
from opd.types import Chunk, RolloutRequest, SamplingParams

Fixture = Callable[..., Any]
SAMPLING = SamplingParams(max_new_tokens=7, stop_ids=(3, 4, 5, 6))
TURNS = 4


def first_turns(number: int, seed: int = 0) -> list[RolloutRequest]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 11, rng.integers(1, 12)).astype(np.int32) for _ in range(number)]
    return [
        RolloutRequest(f"{i}/0", prompt, SAMPLING, seed, session=f"{i}", continues=True)
        for i, prompt in enumerate(prompts)
    ]


def next_turn(request: RolloutRequest, response: list[int]) -> RolloutRequest:
    """Behind an answer of 1 to 9 tokens."""
    turn = int(request.uid.split("/")[1]) + 1
    answer = np.arange(1 + (turn * 5 + len(response)) % 9)
    return replace(
        request,
        uid=f"{request.session}/{turn}",
        prompt_ids=np.concatenate([request.prompt_ids, response, answer]).astype(np.int32),
        continues=turn + 1 < TURNS,
    )


class Talk:
    """Conversations of an engine, whose turns follow when those before have ended, some steps later."""

    def __init__(self, engine: Any, begun: list[RolloutRequest], *, kept: bool = True) -> None:
        self.engine, self.kept = engine, kept
        self._due, self._told = list(begun), dict[str, list[int]]()
        self._open = {request.uid: request for request in begun}
        self.added = sum(len(request.prompt_ids) for request in begun)
        """Tokens of first prompts, and of what was added: the last token of a turn has not been read."""

    def more(self, idle: bool) -> list[RolloutRequest] | None:
        del idle
        asked, self._due = self._due[:3], self._due[3:]
        if not asked and not self._open:
            return None
        return asked if self.kept else [replace(request, session="") for request in asked]

    def chunks(self) -> Iterator[Chunk]:
        more: More = self.more
        for chunk in self.engine.generate((), more):
            for uid, token in zip(chunk.uids, chunk.token_ids.tolist(), strict=True):
                self._told.setdefault(uid, []).append(token)
            for uid in chunk.finished:
                request, response = self._open.pop(uid), self._told.pop(uid)
                if request.continues:
                    following = next_turn(request, response)
                    self.added += len(following.prompt_ids) - len(request.prompt_ids) - len(response) + 1
                    self._open[following.uid] = following
                    self._due.append(following)
            yield chunk


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for uid, response in found.items():
        assert response.token_ids == expected[uid].token_ids, uid
        assert response.status == expected[uid].status
        np.testing.assert_allclose(response.logprobs, expected[uid].logprobs, atol=1e-5)


@pytest.mark.some(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lean", [None, False])
def test_no_token_changes_and_only_what_was_added_is_computed(
    family: str, lean: bool | None, build: Fixture, collect: Fixture
) -> None:
    model, _ = build(family)
    begun = first_turns(9, seed=len(family))
    plain = Talk(TorchEngine(model, lean=lean), begun, kept=False)
    kept = Talk(TorchEngine(model, lean=lean), begun)
    found = collect(kept.chunks())
    same(found, collect(plain.chunks()))
    assert len(found) == TURNS * len(begun)
    assert kept.engine.prefilled_tokens == kept.added < plain.engine.prefilled_tokens
    assert kept.engine.kept_tokens > 0
    assert kept.engine.resident()["engine_kv"] == kept.engine._runner.cache.nbytes, "the last turns are gone"


@pytest.mark.some(1)
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_where_there_is_no_room_the_oldest_is_computed_again(
    slots: int, build: Fixture, collect: Fixture
) -> None:
    model, _ = build("qwen3")
    begun = first_turns(9)
    few = Talk(TorchEngine(model, max_running=slots), begun)
    same(collect(few.chunks()), collect(Talk(TorchEngine(model), begun, kept=False).chunks()))
    assert len(few.engine._turns) <= slots


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_long_additions_go_in_several_passes(
    family: str, build: Fixture, collect: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = build(family)
    begun = first_turns(9)
    expected = collect(Talk(TorchEngine(model), begun, kept=False).chunks())
    monkeypatch.setattr("opd.rollout.forward.PREFILL_TOKENS", 8)
    monkeypatch.setattr("opd.rollout.turns.SCORES", 256)
    same(collect(Talk(TorchEngine(model), begun).chunks()), expected)


def test_within_the_budget_of_bytes(collect: Fixture) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = tiny.model(max_position_embeddings=2048, **shape)  # 1024 tokens in a MiB
    sampling = SamplingParams(max_new_tokens=60)
    begun = [replace(request, sampling=sampling) for request in first_turns(12)]
    expected = collect(Talk(TorchEngine(model), begun, kept=False).chunks())
    talk = Talk(TorchEngine(model, settings=DecodeConfig(kv_cache_mb=1)), begun)
    chunks, most = [], 0
    for chunk in talk.chunks():
        chunks.append(chunk)
        most = max(most, talk.engine.resident()["engine_kv"])
    same(collect(chunks), expected)
    assert most <= 1 << 20


def test_new_weights_and_other_beginnings_take_nothing_over(build: Fixture, collect: Fixture) -> None:
    model, _ = build("llama")
    other, _ = build("llama", seed=1)
    engine, begun = TorchEngine(model), first_turns(2)
    found = collect(engine.generate(begun))
    following = [next_turn(request, found[request.uid].token_ids) for request in begun]
    changed = following[0].prompt_ids.copy()
    changed[0] = (changed[0] + 1) % 11
    branch = replace(following[0], prompt_ids=changed)
    same(collect(engine.generate([branch])), collect(TorchEngine(model).generate([branch])))
    assert engine.kept_tokens == 0
    assert len(engine._turns) == 2, "of the branch, and of the other"
    engine.pause()
    engine.update_weights(list(other.weights()), 1)
    engine.resume()
    assert not len(engine._turns)
    same(collect(engine.generate(following)), collect(TorchEngine(other).generate(following)))


def test_a_turn_that_is_cut_off_goes_on(build: Fixture, collect: Fixture) -> None:
    """A request with a prefix finds its session, and one that is aborted leaves nothing."""
    model, _ = build("llama")
    engine, begun = TorchEngine(model), first_turns(1)
    [following] = [next_turn(r, collect(engine.generate(begun))[r.uid].token_ids) for r in begun]
    whole = collect(TorchEngine(model).generate([following]))[following.uid]
    rest = replace(following, prefix_ids=np.array(whole.token_ids[:2], np.int32))
    found = collect(engine.generate([rest]))[following.uid]
    assert engine.kept_tokens > 0
    assert found.token_ids == whole.token_ids[2:]
    engine.submit([replace(following, uid="again")])
    engine.next_chunk()
    engine.abort(["again"])
    assert not engine.in_flight
    assert not engine._turns._requests


def test_of_several_engines_each_goes_on_with_its_own(build: Fixture, collect: Fixture) -> None:
    model, _ = build("llama")
    engines = [TorchEngine(build("llama")[0]) for _ in range(3)]
    rollout, plain = FaultTolerantRollout(engines), TorchEngine(model)
    asked, added = first_turns(12), 0
    new = sum(len(request.prompt_ids) for request in asked)
    for _ in range(TURNS):
        until = time.monotonic() + 300
        while len(rollout._pool.ready_engines()) < len(
            engines
        ):  # an engine's thread ends after its last chunk
            assert time.monotonic() < until
            time.sleep(0.001)
        found = collect(rollout.generate(asked))
        same(found, collect(plain.generate([replace(request, session="") for request in asked])))
        following = [next_turn(request, found[request.uid].token_ids) for request in asked]
        added += new
        new = sum(
            len(after.prompt_ids) - len(before.prompt_ids) - len(found[before.uid].token_ids) + 1
            for after, before in zip(following, asked, strict=True)
        )
        asked = following
    assert sum(engine.prefilled_tokens for engine in engines) == added < plain.prefilled_tokens
    rollout.pause()
    rollout.update_weights(list(model.weights()), 1)
    assert not rollout._dispatch.session_engines


def test_of_two_turns_of_one_conversation_at_once_one_stays(collect: Fixture) -> None:
    engine = TorchEngine(tiny.model())
    collect(engine.generate([replace(request, session="both") for request in first_turns(2)]))
    [turn] = engine._turns._turns.values()
    assert engine.resident()["engine_kv"] == engine._runner.cache.nbytes + turn.kv.nbytes


def test_what_is_mostly_new_is_computed_whole(collect: Fixture) -> None:
    engine = TorchEngine(tiny.model(max_position_embeddings=2048))
    [begun] = first_turns(1)
    [response] = collect(engine.generate([begun])).values()
    following = next_turn(begun, response.token_ids)
    added = np.tile(np.arange(10, dtype=np.int32), FEW // 10)
    many = replace(following, prompt_ids=np.concatenate([following.prompt_ids, added, added[:20]]))
    before = engine.prefilled_tokens
    collect(engine.generate([many]))
    assert engine.prefilled_tokens - before == len(many.prompt_ids)
    assert engine.kept_tokens == 0


def test_however_they_come_those_that_go_on_are_one_pass_and_those_that_begin_another(
    build: Fixture, collect: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = build("llama")
    engine = TorchEngine(model, lean=False)
    first, begin = first_turns(4), first_turns(8)[4:]
    told = collect(engine.generate(first))
    going_on = [next_turn(request, told[request.uid].token_ids) for request in first]
    mixed = [one for pair in zip(going_on, begin, strict=True) for one in pair]
    passes: list[int] = []
    run = type(model).run

    def counted(self: Any, ids: Any, *given: Any, **more: Any) -> Any:
        passes.append(len(ids))
        return run(self, ids, *given, **more)

    monkeypatch.setattr(type(model), "run", counted)
    found = collect(engine.generate(mixed))
    added = [
        len(new.prompt_ids) - len(old.prompt_ids) - len(told[old.uid].token_ids) + 1
        for old, new in zip(first, going_on, strict=True)
    ]
    assert passes[:2] == [sum(len(one.prompt_ids) for one in begin), sum(added)]
    assert max(passes[2:]) <= len(mixed), "the others are decode steps"
    same(found, collect(TorchEngine(model).generate([replace(one, session="") for one in mixed])))
