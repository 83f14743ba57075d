"""Rewards behind HTTP: what is asked, what is read, what misbehaving servers make of it, and what is kept."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reward_server import RewardServer, completion, reward_server

from opd.config.recipe import DomainConfig
from opd.errors import ConfigError, DataError, MissingExtraError, RewardError
from opd.redact import hide_secret
from opd.retry import Retry
from opd.rewards import endpoint
from opd.rewards.endpoint import Replies
from opd.rewards.registry import check_labels, own_reward, scored_by, verifier_of
from opd.rewards.served_rewards import read_number
from opd.rewards.verifier import Answered
from opd.rollout.prompts import Prompt
from opd.rollout.rewards import Job, RewardSample

pytest.importorskip("aiohttp")
pytest.importorskip("orjson")

KEY = "an-api-key-of-41"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(endpoint, "SERVERS", Retry(pause=0.001))


def settings(server: RewardServer, folder: Path, kind: str = "judge", **own: Any) -> Any:
    urls = [f"{server.url}/v1" if kind == "judge" else f"{server.url}/score"]
    reward = {"type": kind, "urls": urls, "cache": str(folder / "cache")} | own
    return DomainConfig.model_validate({"source": "x.jsonl", "reward": reward}).reward


def scores(config: Any, *texts: str, label: Any = None) -> list[Any]:
    answers = [Answered(text, label, "What is it?", "<user>What is it?<assistant>") for text in texts]
    return verifier_of(config).score(config, answers)


def length_of_answer(path: str, body: dict[str, Any]) -> Any:
    """A judge that likes long answers."""
    said = body["messages"][-1]["content"].partition("A: ")[2]
    return completion(f"It has words.\nScore: {len(said)}")


LENGTH = {"template": "Q: {prompt}\nA: {answer}"}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("I think so.\nScore: 7", 7),
        ("Score: 3\nno, rather\n**Score:** 8/10", 8),
        ('{"score": 6.5, "why": "2 faults"}', 6.5),
        ("Rating: [[4]]", 4),
        ("Score (0 to 10): 9.", 9),
        ("the score is 2", 2),
        ("I give it [[5]]", 5),
        (" 10 ", 10),
        ("**9/10**", 9),
        ("-1", -1),
        ("Score: -0.5", -0.5),
        ("it is good", None),
        ("", None),
        ("I count 3 faults", None),
        ("Score: NaN", None),
        ("Score: 12345678901234567890", None),
        ("score" + " " * 100_000 + "7", None),
        ("score(" * 20_000, None),
        ("[[" * 50_000, None),
    ],
)
def test_the_number_of_a_reply(text, number):
    assert read_number(text) == number


def test_a_judge_is_asked_by_the_template_and_the_same_never_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    with reward_server(length_of_answer) as server, reward_server(length_of_answer) as other:
        own = {"model": "m", "api_key_env": "MY_KEY", "system": "Be fair.", "request": {"max_tokens": None}}
        config = settings(server, tmp_path, **LENGTH, **own)
        assert scores(config, "abc", "abcde", "abc") == [0.3, 0.5, 0.3]
        assert scores(config, "abcde", "ab{label}") == [0.5, 0.9]
        path, body, headers = server.asked[0]
        assert path == "/v1/chat/completions"
        assert headers["Authorization"] == f"Bearer {KEY}"
        asked = {json.dumps(body["messages"]) for _, body, _ in server.asked}
        assert len(server.asked) == len(asked) == 3
        first = {"role": "system", "content": "Be fair."}
        texts = [f"Q: What is it?\nA: {text}" for text in ("abc", "abcde", "ab{label}")]
        assert asked == {json.dumps([first, {"role": "user", "content": text}]) for text in texts}
        assert (body["model"], body["temperature"]) == ("m", 0.0)
        assert "max_tokens" not in body
        scores(settings(server, tmp_path, **LENGTH, **own | {"model": "n"}), "abc")
        scores(settings(server, tmp_path, **LENGTH, **own | {"temperature": 0.5}), "abc")
        scores(settings(server, tmp_path, **LENGTH, **own | {"cache": None}), "abc")
        scores(settings(other, tmp_path, **LENGTH, **own), "abc")
        assert (len(server.asked), len(other.asked)) == (6, 1)
    assert KEY.encode() not in (tmp_path / "cache" / "replies.sqlite3").read_bytes()


def test_what_a_sample_tells_the_judge(tmp_path):
    with reward_server(lambda path, body: completion("Score: 5")) as server:
        template = "{prompt}|{context}|{answer}|{label}|{other}"
        reward = settings(server, tmp_path, template=template)
        config = DomainConfig.model_validate({"source": "x.jsonl", "reward": reward.model_dump()})
        assert scored_by(config) == "judge"
        function = own_reward(config)
        assert function is not None
        system = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
        samples = [
            RewardSample("1", "a", "<Q>", {"é": 1}, "d", {"messages": system[1:]}),
            RewardSample("2", "b", "<Q>", "L", "d", {"messages": system}),
            RewardSample("3", "c", "<Q>", "{answer}", "d", {"prompt": "Q"}),
        ]
        job = Job(function, samples, 1e-9)  # the user's time limit is not the server's
        job.start()
        assert job.result() == [(0.5, {}, "")] * 3
        said = sorted(body["messages"][0]["content"] for _, body, _ in server.asked)
    assert said == [
        'Q|<Q>|a|{"é": 1}|{other}',
        "Q|<Q>|c|{answer}|{other}",
        "system: S\n\nuser: Q|<Q>|b|L|{other}",
    ]
    with pytest.raises(DataError, match=r"the label, which domains\.d\.reward judge needs, is missing"):
        check_labels(config, "d", [Prompt("Q", None, None, "d", "k")])


FAULTS = [
    "status 500",
    "status 503",
    "status 429",
    "says [0.1",
    "says [NaN]",
    "says nothing",
    f"says {'[' * 70}{']' * 70}",
    "huge",
    "packed",
    "shorter",
    "longer",
    "closes",
    "boasts",
]
OF_JUDGES = ['says {"choices": []}', 'says {"choices": [{"message": {"content": 7}}]}', "says []"]
OF_SCORERS = [
    "says [1.0]",
    "says [1.0, 2.0, 3.0]",
    "says [1.0, null]",
    'says [1.0, "2"]',
    "says [1.0, true]",
    "says [1.0, 1e999]",
    "says [1.0, 1e10]",
    "says [1.0, [1.0, 2.0]]",
    'says {"numbers": [1.0, 2.0]}',
    "says 7",
    'says "ab"',
]


@pytest.mark.parametrize("fault", [*FAULTS, *OF_JUDGES])
def test_a_judge_that_misbehaves_once_is_asked_again(fault, tmp_path):
    with reward_server(length_of_answer) as server:
        server.faults = [fault]
        assert scores(settings(server, tmp_path, **LENGTH), "abc") == [0.3]
        assert len(server.asked) == 2


@pytest.mark.parametrize("fault", [*FAULTS, *OF_SCORERS])
def test_a_scorer_that_always_misbehaves_is_one_sentence_and_nothing_of_it_is_kept(fault, tmp_path):
    with reward_server(lambda path, body: [float(len(text)) for text in body["texts"]]) as server:
        config = settings(server, tmp_path, "scorer", template="{answer}", attempts=2, patience=0)
        server.faults = [fault] * 9
        with pytest.raises(RewardError, match=r"^reward scorer: no usable answer from http://127") as caught:
            scores(config, "abc", "ab")
        assert len(str(caught.value)) < 1000
        assert "\n" not in str(caught.value)
        assert not caught.value.of_own_code
        assert len(server.asked) <= 2
        server.faults = []
        assert scores(config, "abc", "ab") == [3.0, 2.0]


def test_a_slow_server_is_given_up_and_asked_again(tmp_path):
    with reward_server(length_of_answer) as server:
        server.faults = ["slow"]
        assert scores(settings(server, tmp_path, timeout=0.2, **LENGTH), "abc") == [0.3]
        server.faults = ["slow"] * 9
        config = settings(server, tmp_path, timeout=0.1, patience=0, **LENGTH)
        with pytest.raises(RewardError, match=r"timed out: `timeout` is [0-9.]+ s\)"):
            scores(config, "abcd")


def test_nobody_is_followed_elsewhere(tmp_path):
    with reward_server(length_of_answer) as other, reward_server(length_of_answer) as server:
        server.faults = [f"elsewhere {other.url}/v1/chat/completions"]
        with pytest.raises(RewardError, match=r"answered 307.*; check the request and the server"):
            scores(settings(server, tmp_path, **LENGTH), "abc")
        assert other.asked == []


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refused_request_is_unreadable_and_a_wrong_key_is_an_error(status, tmp_path):
    def answer(path: str, body: dict[str, Any]) -> Any:
        if "abcd" in body["messages"][-1]["content"]:
            return status, {"error": f"no, for the key {KEY} or the length"}
        return length_of_answer(path, body)

    hide_secret(KEY)
    with reward_server(answer) as server:
        config = settings(server, tmp_path, unreadable=-1, **LENGTH)
        if status == 400:
            expected = [{"reward": 0.3, "unreadable": 0.0}, {"reward": -1.0, "unreadable": 1.0}]
            assert scores(config, "abc", "abcd") == expected
            assert scores(config, "abc", "abcd") == expected
            assert len(server.asked) == 3  # a refusal is not kept: the server may be mended
            with pytest.raises(RewardError, match=r"1 of 2 replies hold no number .* a refused request"):
                scores(settings(server, tmp_path, **LENGTH), "abc", "abcd")
        else:
            with pytest.raises(RewardError, match=rf"answered {status} .*\*\*\*") as caught:
                scores(config, "abc", "abcd")
            assert KEY not in str(caught.value)


def test_a_reply_without_a_number_counts_as_told_or_stops(tmp_path):
    def answer(path: str, body: dict[str, Any]) -> Any:
        text = body["messages"][-1]["content"].partition("A: ")[2]
        return completion(
            {
                "none": None,
                "much": "Score: 11",
                "best": "Score: 10",
                "least": "Score: 0",
                "think": "<think>Score: 3",
            }.get(text, text)
        )

    with reward_server(answer) as server:
        config = settings(server, tmp_path, unreadable=0, **LENGTH)
        found = scores(config, "none", "much", "think", "fine [[4]]", "hm")
        assert [one["reward"] for one in found] == [0.0, 0.0, 0.0, 0.4, 0.0]
        assert [one["unreadable"] for one in found] == [1.0, 1.0, 1.0, 0.0, 1.0]
        bounds = [{"reward": own, "unreadable": 0.0} for own in (1.0, 0.0)]
        assert scores(config, "best", "least") == bounds
        asked = len(server.asked)
        with pytest.raises(RewardError, match=r"1 of 2 replies hold no number .*'hm\\n'.*`unreadable`"):
            scores(settings(server, tmp_path, **LENGTH), "fine [[4]]", "hm\n")
        # Another pattern or range reads what was said before.
        own = {"pattern": r"fine \[\[(?P<score>\d)", "range": None}
        assert scores(settings(server, tmp_path, **LENGTH, **own), "fine [[4]]") == [4.0]
        endless = {"pattern": r"^(a+)+$", "unreadable": 0.5}
        assert scores(settings(server, tmp_path, **LENGTH, **endless), "fine [[4]]") == [
            {"reward": 0.5, "unreadable": 1.0}
        ]
        assert len(server.asked) == asked + 1


def test_an_answer_that_shows_the_key_is_kept_without_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    with reward_server(lambda path, body: completion(f"Your key is {KEY}. Score: 4")) as server:
        assert scores(settings(server, tmp_path, api_key_env="MY_KEY"), "abc") == [0.4]
    rows = sqlite3.connect(tmp_path / "cache" / "replies.sqlite3").execute("SELECT value FROM replies")
    assert [json.loads(value) for (value,) in rows] == ["Your key is ***. Score: 4"]


def sglang(texts: list[str]) -> Any:
    return [{"embedding": [float(len(text))], "meta_info": {"id": "x"}} for text in texts]


def vllm(texts: list[str], name: str, wrap: Any) -> Any:
    rows = [{"index": i, "object": name, name: wrap(float(len(text)))} for i, text in enumerate(texts)]
    return {"object": "list", "data": rows[::-1]}


APIS = {
    "plain": lambda body: [float(len(text)) for text in body["texts"]],
    "sglang": lambda body: sglang(body["text"]),
    "vllm": lambda body: vllm(body["input"], "probs", lambda x: [x]),
    "score": lambda body: vllm(body["text_2"], "score", lambda x: x),
    "openrlhf": lambda body: {"rewards": [[float(len(text))] for text in body["query"]], "scores": []},
}
SENT = {
    "plain": {"texts": ["<user>What is it?<assistant>abc"]},
    "sglang": {"model": "m", "text": ["<user>What is it?<assistant>abc"]},
    "vllm": {"model": "m", "input": ["<user>What is it?<assistant>abc"]},
    "score": {"text_1": ["What is it?"], "text_2": ["abc"]},
    "openrlhf": {
        "query": ["<user>What is it?<assistant>abc"],
        "prompts": ["<user>What is it?<assistant>"],
        "labels": ["L"],
    },
}


@pytest.mark.parametrize("api", APIS)
def test_each_kind_of_scorer_in_its_own_form(api, tmp_path):
    with reward_server(lambda path, body: APIS[api](body)) as server:
        model = {"model": "m"} if "model" in SENT[api] else {}
        config = settings(server, tmp_path, "scorer", api=api, batch=2, **model)
        before = len("<user>What is it?<assistant>") if api != "score" else 0
        texts = ["abc", "a", "abcde", "a", "ab"]
        expected = [float(before + len(text)) for text in texts]
        assert scores(config, *texts, label="L") == expected
        assert sorted(len(next(iter(list(b.values())[-1:]))) for _, b, _ in server.asked) == [2, 2]
        assert scores(config, *texts, label="L") == expected
        assert len(server.asked) == 2
        assert scores(config, "abc", label="L") == [before + 3.0]
        alone = settings(server, tmp_path, "scorer", api=api, cache=None, sigmoid=True, **model)
        (value,) = scores(alone, "abc", label="L")
        assert 0.9 < value <= 1.0
        path, body, _ = server.asked[-1]
        assert (path, body) == ("/score", SENT[api])


def test_no_more_at_once_than_the_servers_are_given(tmp_path):
    with reward_server(length_of_answer) as server:
        config = settings(server, tmp_path, concurrency=3, range=[0, 100], **LENGTH)
        found = scores(config, *["a" * n for n in range(1, 25)])
        assert found == [n / 100 for n in range(1, 25)]
        assert server.most <= 3


def test_what_was_answered_before_the_end_is_kept(tmp_path):
    with reward_server(length_of_answer) as server:
        config = settings(server, tmp_path, concurrency=1, attempts=1, patience=0, **LENGTH)

        def later_none(path: str, body: dict[str, Any]) -> Any:
            return length_of_answer(path, body) if len(server.asked) < 4 else (500, "ended")

        server.answer = later_none
        with pytest.raises(RewardError, match="answered 500"):
            scores(config, "a", "ab", "abc", "abcd", "abcde")
        server.answer = length_of_answer
        server.asked.clear()
        assert scores(config, "a", "ab", "abc", "abcd", "abcde") == [0.1, 0.2, 0.3, 0.4, 0.5]
        assert len(server.asked) == 2


def test_whoever_keeps_an_answer_first_settles_it(tmp_path):
    """Ranks and runs side by side ask the same; all take what is kept."""
    first, second = Replies(str(tmp_path), float), Replies(str(tmp_path), float)
    assert second.find_replies(["a"]) == first.find_replies(["a"]) == {}
    assert first.store_replies({"a": 1.5, "b": 2.0}) == {"a": 1.5, "b": 2.0}
    assert second.store_replies({"a": 7.0, "c": 3.0}) == {"a": 1.5, "c": 3.0}
    assert first.find_replies(["a", "b", "c", "d"]) == {"a": 1.5, "b": 2.0, "c": 3.0}
    assert Replies(str(tmp_path), str).find_replies(["a"]) == {}
    many = {str(n): float(n) for n in range(1201)}
    assert first.store_replies(many) == second.find_replies(many) == many
    first.close()
    second.close()


def test_a_killed_process_loses_no_answer(tmp_path):
    code = (
        "import os, signal, sys\nfrom opd.rewards.endpoint import Replies\n"
        "kept = Replies(sys.argv[1], float)\nfor n in range(8): kept.store_replies({str(n): n / 2})\n"
        "kept._file.execute('BEGIN IMMEDIATE'); kept._file.execute(\"DELETE FROM replies\")\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    kept = Replies(str(tmp_path), float)
    assert kept.find_replies([str(n) for n in range(9)]) == {str(n): n / 2 for n in range(8)}
    kept.close()


@pytest.mark.parametrize("damage", ["garbage", "emptied", "truncated", "another", "row", "kind"])
def test_damage_costs_a_question_and_no_wrong_reward(damage, tmp_path, caplog):
    path = tmp_path / "cache" / "replies.sqlite3"
    with reward_server(length_of_answer) as server:
        config = settings(server, tmp_path, **LENGTH)
        assert scores(config, "abc") == [0.3]
        if damage == "garbage":
            path.write_bytes(os.urandom(64) * 200)
        elif damage in ("emptied", "truncated"):
            path.write_bytes(path.read_bytes()[: 0 if damage == "emptied" else 5000])
        else:
            opened = sqlite3.connect(path)
            with opened:
                if damage == "another":
                    opened.execute("DROP TABLE replies")
                    opened.execute("CREATE TABLE replies (a, b)")
                elif damage == "row":
                    opened.execute("UPDATE replies SET value = '\"Score: 9\"'")
                else:
                    opened.execute("UPDATE replies SET value = NULL")
            opened.close()
        assert scores(config, "abc") == [0.3]
        assert scores(config, "abc") == [0.3]
        assert len(server.asked) == 2
    if damage in ("garbage", "another"):
        assert path.with_name("replies.sqlite3.damaged").exists()
        assert "begun anew" in caplog.text


def test_a_place_where_nothing_can_be_kept_is_one_sentence(tmp_path):
    with reward_server(length_of_answer) as server:
        (tmp_path / "file").write_text("")
        for cache in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(RewardError, match=r"cannot be kept there .*another `cache`"):
                scores(settings(server, tmp_path, cache=str(cache)), "abc")
        (tmp_path / "folder" / "replies.sqlite3").mkdir(parents=True)
        with pytest.raises(RewardError, match="cannot be kept there"):
            scores(settings(server, tmp_path, cache=str(tmp_path / "folder")), "abc")
        assert server.asked == []


def test_what_is_missing_is_said_before_a_run(tmp_path, monkeypatch):
    reward = {"type": "judge", "urls": ["http://127.0.0.1:9/v1"], "api_key_env": "NO_SUCH_KEY"}
    with pytest.raises(ConfigError, match="NO_SUCH_KEY, which is not set"):
        own_reward(DomainConfig.model_validate({"source": "x.jsonl", "reward": reward}))
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(MissingExtraError, match=r"opd\[sglang\]"):
        own_reward(DomainConfig.model_validate({"source": "x.jsonl", "reward": reward}))
