"""Agents of one's own against a real engine, over real HTTP: what is trained on is what was written."""

from collections import Counter

import agents
import chatting
import numpy as np
import pytest
import tiny
from memory_log import MemoryLog
from test_episodes import KilledError, Recorded, digits_engine, prompts, sampling

from opd.config.environments import EnvironmentConfig
from opd.environments.agents import Agents
from opd.environments.protocol import EPISODE
from opd.errors import RolloutError
from opd.rollout.collect import EncodedPrompt
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.torch_engine import TorchEngine
from opd.types import SamplingParams, Status

pytest.importorskip("aiohttp")


def agent(run: str = "plain", tok=None, params=None, **settings) -> Agents:
    agents.SEEN.clear()
    given = {"type": "agent", "params": {"run": f"agents:{run}", **(params or {})}, **settings}
    return Agents(EnvironmentConfig.model_validate(given), "a", tok or tiny.tokenizer(), {})


def playing(play, **settings) -> Agents:
    """An agent that is a function of the test's own."""
    agents.PLAY["it"] = play
    return agent("play", params={"name": "it"}, **settings)


def chat_prompt(tok, text: str = "the cat") -> EncodedPrompt:
    asked = [{"role": "user", "content": text}]
    ids = tok(tok.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))["input_ids"]
    return EncodedPrompt("p", "a", np.array(ids, np.int32), None, {"messages": asked})


def chat_engine() -> Recorded:
    return Recorded(TorchEngine(chatting.model(), max_running=16, max_sequence=1000))


def chat_sampling(tokens: int = 400) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, stop_ids=(chatting.tokenizer().eos_token_id,))


def check_exact(groups, engine: Recorded) -> None:
    """Tokens are a chain of requests: each behind all that came before, and what was written. No turn
    counts in two of an episode's samples.
    """
    turns, counted = Counter(), Counter()
    for sample in (sample for group in groups for sample in group.samples_with_branches):
        whole, place = sample.token_ids.tolist(), len(sample.prompt_ids)
        mask = [False] * place + sample.loss_mask.tolist()
        logprobs = [0.0] * place + sample.rollout_logprobs.tolist()
        own = {uid: one for uid, one in engine.asked.items() if uid.startswith(f"{sample.episode}/")}
        while place < len(whole):
            if not mask[place]:
                assert logprobs[place] == 0.0
                place += 1
                continue
            behind = [uid for uid, one in own.items() if one.prompt_ids.tolist() == whole[:place]]
            tokens = {uid: [token for token, _ in engine.written[uid]] for uid in behind}
            turn = next(uid for uid, ids in tokens.items() if whole[place : place + len(ids)] == ids)
            for token, logprob in engine.written[turn]:
                assert (whole[place], logprobs[place], mask[place]) == (token, logprob, True)
                place += 1
            turns[sample.episode] += 1
            counted[turn] += 1
    assert set(counted.values()) == {1}
    for group in groups:
        for sample in group.samples:
            told = sample.metadata[EPISODE]
            assert turns[sample.uid] == told["turns"]
            assert 1 + sum(one.branch_of == sample.uid for one in group.branches) == told["branches"]


def contents(groups):
    return [
        (s.uid, s.token_ids.tolist(), s.loss_mask.tolist(), str(s.status), s.metadata.get(EPISODE))
        for group in groups
        for s in group.samples_with_branches
    ]


@pytest.mark.some(1)
@pytest.mark.parametrize("template", list(chatting.TEMPLATES))
def test_a_conversation_of_the_official_client_is_one_exact_sample(template):
    pytest.importorskip("openai")
    tok, engine = chatting.tokenizer(template), chat_engine()
    (group,) = agent("chat", tok=tok)(engine, [chat_prompt(tok)], 4, chat_sampling(), 3)
    check_exact([group], engine)
    odd = 0
    for sample in group.samples:
        told = sample.metadata[EPISODE]
        assert (told["turns"], told["branches"]) == (3, 1)
        assert (told["reward"], sample.status) == (0.3, Status.COMPLETED)
        text = tok.decode(sample.response_ids)
        assert (
            text.count("<|im_start|>user\ngo on" if template != "llama" else "<|im_start|>user\n\ngo on") == 2
        )
        odd += tok(text, add_special_tokens=False)["input_ids"] != sample.response_ids.tolist()
        answers = agents.SEEN[sample.uid]
        written = [ids for answer in answers for ids in answer.choices[0].token_ids]
        assert written == sample.response_ids[sample.loss_mask].tolist()
        told = [one.logprob for a in answers for one in a.choices[0].logprobs.content]
        assert np.allclose(told, sample.rollout_logprobs[sample.loss_mask], atol=0)
        for answer in answers:
            count = len(answer.prompt_token_ids)
            assert answer.usage.prompt_tokens == count
            assert answer.prompt_token_ids == sample.token_ids[:count].tolist()
    assert odd == 4  # a random model writes tokens that its text would not be encoded to


def test_text_over_plain_http_is_exact_and_the_same_again():
    engine = Recorded(digits_engine())
    groups = agent()(engine, prompts(), 4, sampling(), 0)
    check_exact(groups, engine)
    samples = [sample for group in groups for sample in group.samples]
    assert {sample.metadata[EPISODE]["turns"] for sample in samples} == {3}
    assert all(sample.metadata[EPISODE]["info"].keys() == {"total"} for sample in samples)
    assert contents(agent(concurrent=2)(digits_engine(), prompts(), 4, sampling(), 0)) == contents(groups)


def test_killed_at_any_chunk_and_resumed_the_samples_are_the_same():
    wanted = contents(agent()(digits_engine(), prompts(), 2, sampling(), 0))
    log = MemoryLog()
    for cut in (0, 1, 3, 4, 2, 7):
        engine = Recorded(FaultTolerantRollout([digits_engine()], log), die_after=cut)
        with pytest.raises(KilledError):
            agent()(engine, prompts(), 2, sampling(), 0)
    last = FaultTolerantRollout([digits_engine()], log)
    assert contents(agent()(last, prompts(), 2, sampling(), 0)) == wanted
    assert last.counters["replayed_tokens"] > 0


def test_an_agent_that_asks_otherwise_after_a_kill_is_one_sentence():
    def ask(task, url, key, more="1"):
        body = {"prompt": task.prompt, "max_tokens": 3}
        said = agents.post(url, key, "/completions", body)["choices"][0]["text"]
        agents.post(url, key, "/completions", body | {"prompt": task.prompt + said + more})
        return 1.0

    log = MemoryLog()
    engine = Recorded(FaultTolerantRollout([digits_engine()], log), die_after=4)
    with pytest.raises(KilledError):
        playing(ask)(engine, prompts(1), 1, sampling(), 0)
    assert len(log.entries) == 2
    last = FaultTolerantRollout([digits_engine()], log)
    with pytest.raises(RolloutError, match=r"asks behind an answer otherwise.*task.seed.*another prompt"):
        playing(lambda *given: ask(*given, more="2"))(last, prompts(1), 1, sampling(), 0)


def test_an_agent_that_fails_is_called_again_and_given_the_same_answers():
    wanted = contents(agent()(digits_engine(), prompts(2), 2, sampling(), 0))
    agents.FAILS |= {"p0/0": 1, "p1/1": 2}
    engine = Recorded(digits_engine())
    assert contents(agent()(engine, prompts(2), 2, sampling(), 0)) == wanted
    assert len(engine.asked) == 12
