"""Episodes against a real engine: the tokens trained on are those written, whatever is in between."""

import threading

import chatting
import numpy as np
import pytest
import tiny
import worlds
from exact import KilledError, Near, Recorded, check_exact
from faulty_engines import FaultyEngine, raises_at
from memory_log import MemoryLog

from opd.config.environments import EnvironmentConfig
from opd.environments.episodes import Episodes
from opd.environments.protocol import EPISODE
from opd.errors import ConfigError, RolloutError
from opd.retry import Retry
from opd.rollout.collect import EncodedPrompt
from opd.rollout.engine_pool import RetryPolicy
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.rewards import RewardRunner
from opd.rollout.torch_engine import TorchEngine
from opd.types import SamplingParams, Status

QUICK = RetryPolicy(Retry(attempts=20, pause=0.001, longest=0.01))
LONG = {"max_position_embeddings": 2048}


def digits_engine(**settings) -> TorchEngine:
    return TorchEngine(tiny.model(**LONG), max_running=8, max_sequence=1024, **settings)


def episodes(kind: str = "worlds:Sum", tok=None, template=None, **settings) -> Episodes:
    config = EnvironmentConfig.model_validate({"type": kind, **settings})
    return Episodes(config, "a", tok or tiny.tokenizer(), template or {})


def prompts(count: int = 3) -> list[EncodedPrompt]:
    rng = np.random.default_rng(0)
    return [
        EncodedPrompt(f"p{i}", "a", rng.integers(0, 10, 4).astype(np.int32), i, {"prompt": "1234"})
        for i in range(count)
    ]


def sampling(tokens: int = 60) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, stop_ids=(tiny.tokenizer().eos_token_id,))


def contents(groups):
    return [
        (
            s.uid,
            s.prompt_ids.tolist(),
            s.response_ids.tolist(),
            s.loss_mask.tolist(),
            Near(s.rollout_logprobs.tolist()),
            str(s.status),
            s.metadata[EPISODE],
        )
        for group in groups
        for s in group.samples
    ]


def test_episodes_of_digits_are_exact_and_rewarded():
    engine = Recorded(digits_engine())
    groups = episodes(turn_tokens=5)(engine, prompts(), 4, sampling(), 0)
    check_exact(groups, engine)
    samples = [sample for group in groups for sample in group.samples]
    assert {sample.status for sample in samples} == {Status.COMPLETED}
    for sample in samples:
        told = sample.metadata[EPISODE]
        assert (told["turns"], told["ended"]) == (3, "done")
        assert told["reward"] == pytest.approx(sum(told["rewards"]))
        assert (~sample.loss_mask).sum() == 6  # two observations of three signs
    assert len({tuple(sample.response_ids) for sample in samples}) > 6
    again = episodes(turn_tokens=5)(Recorded(digits_engine()), prompts(), 4, sampling(), 0)
    assert contents(again) == contents(groups)


@pytest.mark.parametrize("template", list(chatting.TEMPLATES))
def test_with_a_chat_template_nothing_that_was_written_is_tokenised_again(template):
    """A random model writes tokens that its text would not be encoded to."""
    tok = chatting.tokenizer(template)
    engine = Recorded(TorchEngine(chatting.model(), max_running=16, max_sequence=1000))
    asked = [{"role": "user", "content": "the cat"}]
    ids = np.array(
        tok(tok.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))["input_ids"]
    )
    prompt = EncodedPrompt("p", "a", ids.astype(np.int32), None, {"messages": asked})
    way = SamplingParams(max_new_tokens=400, stop_ids=(tok.eos_token_id,))
    made = episodes(tok=tok, turn_tokens=12, params={"turns": 4})
    groups = made(engine, [prompt], 6, way, 3)
    check_exact(groups, engine)
    odd = 0
    for sample in groups[0].samples:
        text = tok.decode(sample.response_ids)
        assert text.count("<|im_start|>user\n") == 3
        odd += tok(text, add_special_tokens=False)["input_ids"] != sample.response_ids.tolist()
    assert odd == 6
    rewards = RewardRunner({"a": lambda text, label: 0.0}, tok)
    turns = rewards._reward_sample(groups[0].samples[0], "").turns
    assert [turn.role for turn in turns] == ["assistant", "environment"] * 3 + ["assistant"]
    lines = rewards.readable_text(groups[0].samples[0])
    assert lines.count("\n> ") == 3
    assert "<|im_" not in lines


def test_the_first_observation_belongs_to_the_prompt():
    engine = Recorded(digits_engine())
    groups = episodes(params={"first": "=99="}, turn_tokens=4)(engine, prompts(1), 2, sampling(30), 0)
    check_exact(groups, engine)
    for sample in groups[0].samples:
        assert tiny.tokenizer().decode(sample.prompt_ids).endswith("=99=")
        assert len(sample.response_ids) <= 26


def test_limits_end_an_episode_and_are_told():
    engine = Recorded(digits_engine())
    turns = episodes(turn_tokens=3, max_turns=2)(engine, prompts(1), 2, sampling(), 0)
    tokens = episodes(params={"turns": 50}, max_turns=50)(digits_engine(), prompts(1), 4, sampling(20), 0)
    small = episodes(params={"first": "9" * 30})(digits_engine(), prompts(1), 1, sampling(20), 0)
    assert [s.metadata[EPISODE]["ended"] for s in turns[0].samples] == ["turns"] * 2
    # An engine keeps what it has computed for a turn that will come, and for no other.
    assert {one.continues: uid[-2:] for uid, one in engine.asked.items()} == {True: "/0", False: "/1"}
    for sample in [*tokens[0].samples, *small[0].samples]:
        assert sample.metadata[EPISODE]["ended"] == "tokens"
        assert sample.status is Status.TRUNCATED
        assert len(sample.response_ids) <= 20
    assert len(small[0].samples[0].response_ids) == 0


def test_half_an_action_is_not_carried_out():
    worlds.MADE.clear()
    (group,) = episodes(params={"turns": 50}, max_turns=50)(digits_engine(), prompts(1), 1, sampling(7), 0)
    (sample,), (world,) = group.samples, worlds.MADE
    assert sample.metadata[EPISODE]["ended"] == "tokens"
    assert len(world.seen) == sample.metadata[EPISODE]["turns"]
    assert world.closed == 1


@pytest.mark.parametrize("kind", ["worlds:Sum", "worlds:Blocking"])
def test_slow_environments_wait_side_by_side(kind):
    """Whether their methods are plain or not; as many are open as may be, and all are closed."""
    worlds.MADE.clear()
    made = episodes(kind, turn_tokens=3, params={"turns": 2, "delay": 0.05}, concurrent=5)
    groups = made(Recorded(digits_engine()), prompts(6), 4, sampling(), 0)
    fast = episodes("worlds:Sum", turn_tokens=3, params={"turns": 2})(
        digits_engine(), prompts(6), 4, sampling(), 0
    )
    assert [row[2] for row in contents(groups)] == [row[2] for row in contents(fast)]
    assert sum(world.closed for world in worlds.MADE) == 48


def test_killed_at_any_chunk_and_resumed_the_episodes_are_the_same():
    wanted = contents(episodes(turn_tokens=5)(digits_engine(), prompts(), 2, sampling(), 0))
    log = MemoryLog()
    for cut in (0, 1, 3, 4, 2, 7):
        engine = Recorded(FaultTolerantRollout([digits_engine()], log), die_after=cut)
        try:
            episodes(turn_tokens=5)(engine, prompts(), 2, sampling(), 0)
        except KilledError:
            continue
    last = FaultTolerantRollout([digits_engine()], log)
    assert contents(episodes(turn_tokens=5)(last, prompts(), 2, sampling(), 0)) == wanted
    assert last.counters["replayed_tokens"] > 0


def test_engines_that_die_in_turns_change_nothing():
    wanted = contents(episodes(turn_tokens=5)(digits_engine(), prompts(), 2, sampling(), 0))
    rollout = FaultTolerantRollout(
        [FaultyEngine(digits_engine(), raises_at(*range(2, 40, 5)))], MemoryLog(), policy=QUICK
    )
    found = contents(episodes(turn_tokens=5)(rollout, prompts(), 2, sampling(), 0))
    assert [row[:4] for row in found] == [row[:4] for row in wanted]
    assert rollout.counters["engine_failures"] >= 4


def test_an_environment_that_fails_is_brought_back_to_where_it_was():
    worlds.MADE.clear()
    wanted = contents(episodes(turn_tokens=4)(digits_engine(), prompts(2), 2, sampling(), 0))
    found = contents(
        episodes("worlds:Fails", turn_tokens=4, params={"at": 2, "times": 1})(
            digits_engine(), prompts(2), 2, sampling(), 0
        )
    )
    assert found == wanted


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("worlds:Fails", {"at": 2, "times": 99}, r"step 2.*RuntimeError: no luck.*3 times.*--resume"),
        ("worlds:Fails", {"at": 0, "times": 99}, r"reset.*RuntimeError: no luck"),
        ("worlds:Hangs", {}, r"step took longer than 0.05 s \(domains.a.environment.seconds\)"),
        ("worlds:Answers", {"what": "text"}, "returned a str; return opd.environments.protocol.Step"),
        ("worlds:Answers", {"what": "assistant"}, "none is the assistant's"),
        ("worlds:Answers", {"what": "role"}, "a message is a dict with role and content"),
        ("worlds:Answers", {"what": "nan"}, "reward nan is not a finite number"),
        ("worlds:Answers", {"what": "info"}, "info an object of JSON"),
        ("worlds:Answers", {"what": "deep"}, "nested"),
        ("worlds:Answers", {"what": "number"}, "observations are a text or messages"),
        ("worlds:Answers", {"what": "huge"}, "reward is a number"),
        ("worlds:Answers", {"what": "bytes"}, "reward is a number"),
        ("worlds:Answers", {"what": "many"}, "1,001 messages; 1,000 at most are one answer"),
        ("worlds:Answers", {"what": "nested"}, "messages are objects of JSON.*nested"),
        ("worlds:Answers", {"what": "object"}, "messages are objects of JSON"),
        ("worlds:Fickle", {}, r"answered otherwise.*task.seed"),
        ("worlds:Exits", {}, "SystemExit"),
        ("worlds:Exits", {"turn": 1}, "step 2.*SystemExit: 3"),
        ("worlds:Unusual", {"what": "base"}, "step 1.*OwnError: odd"),
        ("worlds:Unusual", {"what": "raised"}, "step 1.*cancelled itself"),
        ("worlds:Unusual", {"what": "own"}, "step 1.*cancelled itself"),
    ],
)
def test_what_is_wrong_with_an_environment_is_one_sentence(kind, params, said):
    quick = {"seconds": 0.05} if kind == "worlds:Hangs" else {}
    with pytest.raises(RolloutError, match=said) as caught:
        episodes(kind, params=params, turn_tokens=3, **quick)(digits_engine(), prompts(1), 1, sampling(), 0)
    assert "\n" not in str(caught.value)
    assert not [thread for thread in threading.enumerate() if thread.name == "environments"]


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("worlds:Missing", {}, "cannot be loaded"),
        ("worlds:time", {}, "no reset and no step"),
        ("worlds:Sum", {"turn": 3}, r"params do not fit.*turn"),
        ("worlds:BadTools", {}, "list of JSON schemas"),
    ],
)
def test_a_class_that_is_none_is_found_when_it_is_loaded(kind, params, said):
    with pytest.raises(ConfigError, match=said):
        episodes(kind, params=params)


def test_an_environment_meets_its_group_with_one_seed_and_everything_of_its_prompt():
    worlds.MADE.clear()
    episodes(turn_tokens=2, params={"turns": 1})(digits_engine(), prompts(2), 2, sampling(), 5)
    tasks = [world.task for world in worlds.MADE]
    seeds = {task.uid: task.seed for task in tasks}
    assert seeds["p0/0"] == seeds["p0/1"] != seeds["p1/0"]
    assert all(0 <= seed < 2**31 for seed in seeds.values())
    assert {task.label for task in tasks} == {0, 1}
    assert {task.prompt for task in tasks} == {"1234"}


def test_broken_calls_are_counted_and_shown_to_the_environment():
    tok = chatting.tokenizer()
    engine = TorchEngine(chatting.model(), max_running=4, max_sequence=500)
    prompt = EncodedPrompt(
        "p", "a", np.array([5, 6], np.int32), None, {"messages": [{"role": "user", "content": "x"}]}
    )
    way = SamplingParams(max_new_tokens=40, stop_ids=(tok.eos_token_id,))
    made = episodes("worlds:Calls", tok=tok, tool_format="hermes", turn_tokens=5)
    (group,) = made(engine, [prompt], 2, way, 0)
    assert all(sample.metadata[EPISODE]["broken_calls"] == 0 for sample in group.samples)
