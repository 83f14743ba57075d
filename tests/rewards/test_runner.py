"""Reward functions of every accepted form, and every way one can go wrong."""

import asyncio
import contextlib
import io
import math
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opd.errors import RewardError
from opd.models.tokenizers import character_tokenizer
from opd.output import GuardedStream
from opd.rollout.rewards import RewardFunction, RewardRunner, RewardSample, Turn, load_reward, wrap_reward
from opd.types import Sample, Status

TOKENIZER = character_tokenizer("0123456789=", ["<sort>"])


def _sample(uid: str, text: str, *, domain: str = "sort", ended: bool = True, **fields: Any) -> Sample:
    ids = TOKENIZER(text)["input_ids"] + ([TOKENIZER.eos_token_id] if ended else [])
    return Sample(
        uid=uid,
        group_uid=uid,
        domain=domain,
        prompt_ids=np.array(TOKENIZER("<sort>31=")["input_ids"], dtype=np.int32),
        label="13",
        response_ids=np.array(ids, dtype=np.int32),
        loss_mask=np.ones(len(ids), dtype=bool),
        status=Status.COMPLETED if ended else Status.TRUNCATED,
        **fields,
    )


def _runner(function: Callable[..., Any], timeout: float = 30.0) -> RewardRunner:
    return RewardRunner({"sort": wrap_reward(function, "mine")}, TOKENIZER, timeout)


def _score(function: Callable[..., Any], *texts: str) -> list[float | None]:
    samples = [_sample(f"s{i}", text) for i, text in enumerate(texts)]
    _runner(function).score(samples)
    return [sample.reward for sample in samples]


def test_sync_async_and_trl_forms_agree() -> None:
    def sync(sample: RewardSample) -> float:
        return float(sample.text == sample.label)

    async def awaited(sample: RewardSample) -> float:
        await asyncio.sleep(0)
        return float(sample.text == sample.label)

    def trl(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        assert columns["completion_ids"] == [[*TOKENIZER(c)["input_ids"], 1] for c in completions]
        assert columns["finish_reason"] == ["stop"] * len(completions)
        assert set(prompts) == {"<sort>31="}
        return [float(c == label) for c, label in zip(completions, columns["label"], strict=True)]

    async def trl_awaited(completions: list[str], label: list[str]) -> list[float]:
        return [float(c == t) for c, t in zip(completions, label, strict=True)]

    class Judge:
        async def __call__(self, sample: RewardSample) -> float:
            return float(sample.text == sample.label)

    for function in (sync, awaited, trl, trl_awaited, Judge()):
        assert _score(function, "13", "31", "") == [1.0, 0.0, 0.0], function


def test_a_sample_is_shown_as_text_with_its_label_and_metadata() -> None:
    seen: list[RewardSample] = []

    def reward(sample: RewardSample) -> float:
        seen.append(sample)
        return 0.0

    ended, cut = _sample("a", "13", metadata={"level": 3}), _sample("b", "13", ended=False)
    _runner(reward).score([ended, cut])
    turns, ids = [Turn("assistant", "13")], [*TOKENIZER("13")["input_ids"], 1]
    whole = RewardSample(
        "a", "13", "<sort>31=", "13", "sort", {"level": 3}, turns, "completed", ids, [True] * 3
    )
    assert seen[0] == whole
    assert [s.text for s in seen] == [s.completion for s in seen] == ["13", "13"]
    assert [s.finish_reason for s in seen] == ["stop", "length"]
    assert [s.length for s in seen] == [3, 2]
    assert seen[0].messages == [
        {"role": "user", "content": "<sort>31="},
        {"role": "assistant", "content": "13"},
    ]


def _agent(uid: str, *parts: tuple[str, bool], status: Status = Status.COMPLETED) -> Sample:
    """A response of parts, each the model's (True) or its environment's; the model's end with EOS."""
    ids = [TOKENIZER(text)["input_ids"] + [1] * own for text, own in parts]
    sample = _sample(uid, "", metadata={"messages": [{"role": "user", "content": "go"}]})
    sample.response_ids = np.concatenate([np.array(part, np.int32) for part in ids])
    sample.loss_mask = np.repeat([own for _, own in parts], [len(part) for part in ids]).astype(bool)
    sample.status = status
    return sample


@given(
    st.lists(st.text("0123", min_size=1, max_size=4), min_size=1, max_size=6), st.booleans(), st.booleans()
)
def test_what_an_environment_said_is_never_taken_for_the_models(texts, first, ended):
    parts = [(text, first == (place % 2 == 0)) for place, text in enumerate(texts)]
    status = Status.COMPLETED if ended else Status.TRUNCATED
    sample, seen = _agent("a", *parts, status=status), []
    _runner(lambda sample: seen.append(sample) or 0.0).score([sample])
    shown, last = seen[0], parts[-1][1] and not ended
    own = [text for text, own in parts if own]
    assert shown.text == "".join(own) + ("<eos>" if last else "")  # what was cut off was not ended
    assert [turn.role == "assistant" for turn in shown.turns] == [own for _, own in parts]
    assert [t.text for t in shown.turns if t.role == "environment"] == [t for t, own in parts if not own]
    assert shown.length == sum(len(text) + 1 for text, own in parts if own)
    assert len(shown.token_ids) == len(shown.loss_mask) == len(sample.response_ids)


def test_the_same_in_the_form_of_trl() -> None:
    seen: dict[str, list[Any]] = {}

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [0.0]

    sample = _agent("a", ("12", True), ("7", False), ("3", True))
    _runner(reward).score([sample])
    assert seen["completions"] == [
        [
            {"role": "assistant", "content": "12"},
            {"role": "environment", "content": "7"},
            {"role": "assistant", "content": "3"},
        ]
    ]
    assert seen["completion_ids"] == [sample.response_ids.tolist()]
    assert seen["loss_mask"] == [sample.loss_mask.tolist()]
    sample.metadata["status"] = "of the data"  # a column of the data comes before one of ours
    _runner(reward).score([sample])
    assert seen["status"] == ["of the data"]


def test_any_token_that_ends_responses_is_left_out() -> None:
    """A model may end its turns with a token that its tokenizer does not call special."""
    texts: list[str] = []
    sample = _sample("a", "13=", ended=False)
    sample.status = Status.COMPLETED
    for stops in ([], [int(sample.response_ids[-1])]):
        function = wrap_reward(lambda sample: texts.append(sample.text) or 0.0, "mine")
        RewardRunner({"sort": function}, TOKENIZER, stops=stops).score([sample])
    assert texts == ["13=", "13"]


def test_stray_special_tokens_stay_visible() -> None:
    texts: list[str] = []
    eos = TOKENIZER.eos_token_id
    stray = _sample("a", "13")
    stray.response_ids = np.array([eos, *stray.response_ids, eos], dtype=np.int32)
    stray.loss_mask = np.ones(len(stray.response_ids), dtype=bool)
    _runner(lambda sample: texts.append(sample.text) or 0.0).score([stray])
    assert texts == ["<eos>13<eos>"]


def test_a_dict_is_a_reward_in_parts() -> None:
    samples = [_sample("a", "13")]
    _runner(lambda sample: {"right": 1.0, "short": np.float32(0.5)}).score(samples)
    assert (samples[0].reward, samples[0].reward_parts) == (1.5, {"right": 1.0, "short": 0.5})
    _runner(lambda sample: {"reward": 0.25, "length": 2}).score(samples)
    assert (samples[0].reward, samples[0].reward_parts) == (0.25, {"reward": 0.25, "length": 2.0})


def test_numbers_of_every_kind_are_taken() -> None:
    for value in (1, True, 1.0, np.float32(1), np.array(1.0), torch.tensor(1.0)):
        rewards = _score(lambda sample, value=value: value, "13")
        assert rewards == [1.0]
        assert type(rewards[0]) is float
    assert _score(lambda completions: np.array([1.0, 0.5]), "13", "1") == [1.0, 0.5]


def test_checkers_and_several_domains() -> None:
    samples = [_sample("a", "13"), _sample("b", "13", domain="other"), _sample("c", "31")]
    functions = {
        "sort": lambda text, label: float(text == label),
        "other": wrap_reward(lambda sample: 7.0, "seven"),
    }
    RewardRunner(functions, TOKENIZER).score(samples)
    assert [sample.reward for sample in samples] == [1.0, 7.0, 0.0]
    with pytest.raises(RewardError, match=r"domain law has no reward function; set domains\.law\.reward"):
        RewardRunner(functions, TOKENIZER).score([_sample("d", "13", domain="law")])


def test_failed_and_aborted_samples_are_left_alone() -> None:
    samples = [_sample("a", "13"), _sample("b", "13"), _sample("c", "13")]
    samples[0].status, samples[1].status = Status.FAILED, Status.ABORTED
    _runner(lambda sample: 1.0).score(samples)
    assert [sample.reward for sample in samples] == [None, None, 1.0]
    _runner(lambda sample: 1.0).score([])


def test_async_functions_of_all_samples_and_domains_run_concurrently() -> None:
    everyone = threading.Barrier(2, timeout=120)
    waiting: dict[str, int] = {}

    async def reward(sample: RewardSample) -> float:
        waiting[sample.domain] = waiting.get(sample.domain, 0) + 1
        while waiting[sample.domain] < 5:  # every sample of the domain must be under way at once
            await asyncio.sleep(0.001)
        if sample.uid.endswith("0"):
            await asyncio.to_thread(everyone.wait)  # and both domains
        return 1.0

    samples = [_sample(f"{d}{i}", "13", domain=d) for d in ("sort", "other") for i in range(5)]
    function = wrap_reward(reward, "mine")
    RewardRunner({"sort": function, "other": function}, TOKENIZER, timeout=200).score(samples)
    assert [sample.reward for sample in samples] == [1.0] * 10


def _raises(sample: RewardSample) -> float:
    raise KeyError("no such thing")


async def _raises_awaited(sample: RewardSample) -> float:
    await asyncio.sleep(0 if sample.uid == "s1" else 5)
    raise TimeoutError("judge")


def _exits(sample: RewardSample) -> float:
    sys.exit(3)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (_raises, "sample s0.* raised KeyError: 'no such thing'"),
        (_raises_awaited, "sample s1.* raised TimeoutError: judge"),
        (_exits, "sample s0.* raised SystemExit: 3"),
        (lambda sample: float("nan"), "sample s0.* returned nan; return finite"),
        (lambda sample: {"right": 1.0, "style": math.inf}, "sample s0.* returned style = inf"),
        (lambda sample: {}, "sample s0.* returned a dict without a number"),
        (lambda sample: None, "sample s0.* returned None, a NoneType"),
        (lambda sample: "1.0", "sample s0.* returned '1.0', a str"),
        (lambda sample: [1.0], r"sample s0.* returned \[1.0\], a list"),
        (lambda completions: [1.0], "sample s0 and 1 more.* returned 1 rewards for 2 completions"),
        (lambda completions: 1.0, "sample s0 and 1 more.* returned a float"),
        (lambda completions: [1.0, None], "sample s1.* returned None"),
        (lambda completions: 1 / 0, "sample s0 and 1 more.* raised ZeroDivisionError"),
        (
            lambda completions, answer: [1.0, 1.0],
            r"needs the column 'answer'.*it has completion_ids, completions, domain",
        ),
    ],
)
def test_a_bad_reward_names_function_domain_and_sample(function: Callable[..., Any], told: str) -> None:
    samples = [_sample("s0", "13"), _sample("s1", "31")]
    with pytest.raises(RewardError, match=told) as caught:
        _runner(function).score(samples)
    assert "mine" in str(caught.value)
    assert "domain sort" in str(caught.value)
    assert [sample.reward for sample in samples] == [None, None]


def test_a_bad_value_in_one_domain_changes_no_sample_of_another() -> None:
    samples = [_sample("a", "13"), _sample("b", "13", domain="other")]
    runner = RewardRunner({"sort": lambda text, label: 1.0, "other": lambda text, label: math.nan}, TOKENIZER)
    with pytest.raises(RewardError, match="checker of domain other"):
        runner.score(samples)
    assert samples[0].reward is None


def test_a_function_that_takes_too_long_is_an_error() -> None:
    stop = threading.Event()

    def slow(sample: RewardSample) -> float:
        if sample.uid == "s1":
            stop.wait(120)
        return 1.0

    async def slow_awaited(sample: RewardSample) -> float:
        await asyncio.sleep(120 if sample.uid == "s1" else 0)
        return 1.0

    def slow_batch(completions: list[str]) -> list[float]:
        stop.wait(120)
        return [1.0 for _ in completions]

    async def blocks(sample: RewardSample) -> float:
        stop.wait(120)
        return 1.0

    samples = [_sample("s0", "13"), _sample("s1", "31")]
    # Two seconds where the first sample has to be done in that time, on a busy machine too.
    for function, who, limit in (
        (slow, "s1", 2.0),
        (slow_awaited, "s1", 2.0),
        (slow_batch, "s0 and 1 more", 0.2),
        (blocks, "s0", 0.2),
    ):
        begin, told = time.monotonic(), rf"sample {who}.* took longer than {limit:g} s.*reward_timeout"
        with pytest.raises(RewardError, match=told):
            _runner(function, timeout=limit).score(samples)
        assert time.monotonic() - begin < 100  # gave up, instead of waiting for the function
    stop.set()


def test_standard_streams_outlive_a_reward_that_closes_them() -> None:
    async def closes_awaited(sample: RewardSample) -> float:
        os.close(1)
        return 1.0

    def closes(sample: RewardSample) -> float:
        os.close(2)
        return 1.0

    for function in (closes, closes_awaited):
        before = [os.fstat(number).st_ino for number in (1, 2)]
        assert _score(function, "13") == [1.0]
        assert [os.fstat(number).st_ino for number in (1, 2)] == before


def test_a_process_that_a_reward_forks_ends_where_the_reward_ends() -> None:
    def forked(end: Callable[[], float]) -> float:
        child = os.fork()
        return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) if child else end()

    def returns(sample: RewardSample) -> float:
        return forked(lambda: 7.0)

    def exits(sample: RewardSample) -> float:
        return forked(lambda: sys.exit(3))

    async def awaited(sample: RewardSample) -> float:
        return forked(lambda: 7.0)

    assert _score(returns, "13", "31") == [0.0, 0.0]
    assert _score(exits, "13") == [3.0]
    assert _score(awaited, "13", "31") == [0.0, 0.0]


def test_a_thread_of_a_reward_that_raises_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest has its own

    def starts(sample: RewardSample) -> float:
        thread = threading.Thread(target=lambda: {}["a key"], name="mine")
        thread.start()
        thread.join()
        return 1.0

    assert _score(starts, "13", "31") == [1.0, 1.0]
    (line,) = caplog.messages
    assert "thread mine of code of yours, while reward function mine (domain sort, sample s0" in line
    assert "raised KeyError: 'a key' (test_runner.py:" in line
    assert capsys.readouterr().err == ""


def test_a_reward_that_has_printed_all_the_time_is_told_to_print_less() -> None:
    stop = threading.Event()

    def chatty(sample: RewardSample) -> float:
        print("x" * 60_000)
        stop.wait(120)
        return 1.0

    with contextlib.redirect_stdout(GuardedStream(io.StringIO())):
        with pytest.raises(RewardError, match=r" 2 s.*it has printed 60,001 characters.*: print less"):
            _runner(chatty, timeout=2.0).score([_sample("s0", "13")])
        stop.set()


def test_load_reward_by_dotted_path(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("rewards_for_this_test")
    module.good = lambda sample: 1.0  # type: ignore[attr-defined]
    module.three = lambda a, b, c: 1.0  # type: ignore[attr-defined]
    module.nothing = lambda: 1.0  # type: ignore[attr-defined]
    module.value = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    loaded = load_reward("rewards_for_this_test:good")
    assert isinstance(loaded, RewardFunction)
    assert (loaded.name, loaded.style, loaded.is_async) == ("rewards_for_this_test:good", "sample", False)
    for path, told in [
        ("rewards_for_this_test.good", "not of the form `package.module:name`"),
        ("rewards_for_this_test:better", "cannot be loaded .AttributeError"),
        ("no_such_module_at_all:reward", "cannot be loaded .ModuleNotFoundError"),
        ("rewards_for_this_test:value", "is a int, not a function"),
        ("rewards_for_this_test:three", r"three\(a, b, c\) has none of the accepted forms"),
        ("rewards_for_this_test:nothing", "has none of the accepted forms"),
    ]:
        with pytest.raises(RewardError, match=told):
            load_reward(path)


def test_conversations_are_given_to_trl_functions_as_messages() -> None:
    messages = [{"role": "user", "content": "sort 31"}]

    def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        assert prompts == [messages]
        return [float(completion[0]["content"] == "13") for completion in completions]

    samples = [_sample("a", "13", metadata={"messages": messages})]
    _runner(reward).score(samples)
    assert samples[0].reward == 1.0
