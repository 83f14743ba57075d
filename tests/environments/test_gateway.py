"""The gateway itself: what it answers in pieces, with tools and choices, and what it refuses."""

import contextlib
import json
import logging
import socket
import threading
import urllib.error
from urllib.parse import urlsplit

import agents
import chatting
import pytest
import tiny
from test_agents import agent, chat_engine, chat_prompt, chat_sampling, check_exact, contents, playing
from test_episodes import Recorded, digits_engine, prompts, sampling

import opd.environments.gateway as gateway
from opd.environments.branches import longest_token
from opd.environments.gateway_requests import MOST_BODY, RefusedRequestError, read_request
from opd.environments.protocol import EPISODE
from opd.errors import RolloutError
from opd.types import SamplingParams, Status

pytest.importorskip("aiohttp")


def once(play, **settings):
    """The sample of one episode of digits, its engine, and what `play` returned."""
    told = []

    def played(*given):
        told.append(play(*given))
        return 1.0

    engine = Recorded(digits_engine())
    (group,) = playing(played, **settings)(engine, prompts(1), 1, sampling(), 0)
    check_exact([group], engine)
    return group.samples[0], engine, told[-1]


def chatted(play, count: int = 1, **settings):
    """The same with messages."""
    told, tok = [], chatting.tokenizer(settings.pop("template", "chatml"))
    reward = settings.pop("reward", lambda said: 1.0)

    def played(*given):
        told.append(play(*given))
        return reward(told[-1])

    engine = chat_engine()
    (group,) = playing(played, tok=tok, **settings)(engine, [chat_prompt(tok)], count, chat_sampling(), 3)
    check_exact([group], engine)
    return group.samples[0], engine, told[-1]


def refused(url, key, body, path="/chat/completions"):
    """Status and error object of a request that must not be answered."""
    with pytest.raises(agents.RefusedError) as caught:
        agents.post(url, key, path, body)
    return caught.value.args


def events(url, key, path, body):
    """The events of a stream, and the words that end it."""
    told = []
    where, data = urlsplit(url), json.dumps(body | {"stream": True}).encode()
    with socket.create_connection((where.hostname, where.port)) as line:
        head = (
            f"POST {where.path}{path} HTTP/1.0\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(data)}"
        )
        line.sendall(head.encode() + b"\r\n\r\n" + data)
        with line.makefile("rb") as answer:
            for row in answer:
                if row.startswith(b"data: "):
                    told.append(row[6:].decode().strip())
    return [json.loads(one) for one in told[:-1]], told[-1]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def test_a_stream_says_in_pieces_what_the_answer_is():
    def play(task, url, key):
        body = {"messages": [*task.messages], "max_tokens": 40, "logprobs": True, "return_token_ids": True}
        pieces, end = events(
            url, key, "/chat/completions", body | {"stream_options": {"include_usage": True}}
        )
        whole = agents.post(url, key, "/chat/completions", body)
        # The next request brings the stream's text back.
        text = "".join(one["choices"][0]["delta"].get("content", "") for one in pieces if one["choices"])
        assert whole["choices"][0]["message"]["content"] != text
        more = [*task.messages, {"role": "assistant", "content": text}, user("go on")]
        agents.post(url, key, "/chat/completions", {"messages": more, "max_tokens": 5})
        return pieces, end

    sample, _, (pieces, end) = chatted(play)
    assert end == "[DONE]"
    assert (sample.metadata[EPISODE]["turns"], sample.metadata[EPISODE]["branches"]) == (3, 2)
    choices = [one["choices"][0] for one in pieces if one["choices"]]
    first = pieces[-1]["usage"]["completion_tokens"]
    ids = [token for one in choices for token in one.get("token_ids", ())]
    assert ids == sample.response_ids[:first].tolist()
    logprobs = [one["logprob"] for c in choices if c.get("logprobs") for one in c["logprobs"]["content"]]
    assert logprobs == [float(value) for value in sample.rollout_logprobs[:first]]
    assert first < len(sample.response_ids) - 5
    assert [one["finish_reason"] for one in choices][-1] in ("stop", "length")


def test_an_edited_history_and_a_second_conversation_are_branches():
    def play(task, url, key):
        def ask(*messages):
            body = {"messages": messages, "max_tokens": 6}
            return agents.post(url, key, "/chat/completions", body)["choices"][0]["message"]

        asked = user("the cat")
        first = ask(asked)
        ask(user("a sub-agent's"))
        ask(asked, {"role": "assistant", "content": first["content"] + " sat"}, user("edited"))
        ask(asked, {**first, "content": f" {first['content']}\n"}, user("open the door"))

    sample, engine, _ = chatted(play)
    told = sample.metadata[EPISODE]
    assert (told["turns"], told["branches"]) == (4, 3)
    text = chatting.tokenizer().decode(sample.token_ids)
    assert "open the door" in text
    assert "edited" not in text
    assert len({uid.split("/")[2] for uid in engine.asked}) == 3


@pytest.mark.parametrize("named", [{"choice": 1}, {"choice": 2}, {}], ids=str)
def test_the_agent_may_name_the_choice_that_becomes_the_sample(named):
    """The first one if it names an answer alone."""

    def play(task, url, key):
        body = {"messages": task.messages, "n": 3, "max_tokens": 6, "return_token_ids": True}
        return agents.post(url, key, "/chat/completions", body)

    def reward(answer):
        return {"reward": 0.5, "answer": answer["id"], "picked": True, **named}

    sample, _, answer = chatted(play, reward=reward)
    choices = [one["token_ids"] for one in answer["choices"]]
    assert len({tuple(one) for one in choices}) == 3
    assert sample.response_ids.tolist() == choices[named.get("choice", 0)]
    assert sample.metadata[EPISODE]["info"] == {"picked": True}
    assert answer["usage"]["completion_tokens"] == sum(map(len, choices))
    with pytest.raises(RolloutError, match="choice 7, which is none it had"):
        chatted(play, reward=lambda answer: {"answer": answer["id"], "choice": 7}, attempts=1)


def test_a_stop_string_ends_the_answer_and_the_tokens_that_are_learnt_from():
    def play(task, url, key):
        body = {"prompt": task.prompt, "max_tokens": 30, "stop": ["3", "77"], "return_token_ids": True}
        whole = agents.post(url, key, "/completions", body)
        pieces, _ = events(url, key, "/completions", body | {"prompt": "99"})
        text = "".join(one["choices"][0]["text"] for one in pieces)
        ids = [token for one in pieces for token in one["choices"][0]["token_ids"]]
        assert not any(stop in text for stop in ("3", "77"))
        said = tiny.tokenizer().decode(ids)
        assert said == text or said[len(text) :] in ("3", "77", "<eos>")
        return whole["choices"][0]

    stopped = 0
    for seed in range(4):
        engine, told = Recorded(digits_engine()), []

        def once(*given, told=told):
            told.append(play(*given))
            return {"reward": 0, "answer": None}

        (group,) = playing(once)(engine, prompts(1), 1, sampling(), seed)
        (sample,), (choice,) = group.samples, told
        uid = next(u for u, r in engine.asked.items() if r.prompt_ids.tolist() == sample.prompt_ids.tolist())
        assert sample.response_ids.tolist() == [t for t, _ in engine.written[uid]][: len(sample.response_ids)]
        assert not any(stop in choice["text"] for stop in ("3", "77"))
        stopped += choice["finish_reason"] == "stop"
    assert stopped


def test_tools_are_shown_and_calls_are_found(monkeypatch):
    """A random model writes no calls: the words are put into what it is read as having written."""
    call = '<tool_call>{"name": "look", "arguments": {"at": "door"}}</tool_call>'
    monkeypatch.setattr(
        "opd.environments.branches.Conversation.decode_text", lambda self, ids: f"I look. {call}"
    )
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

    def play(task, url, key):
        body = {"messages": [*task.messages], "tools": tools, "max_tokens": 4, "tool_choice": "required"}
        first = agents.post(url, key, "/chat/completions", body)["choices"][0]
        (called,) = first["message"]["tool_calls"]
        # Clients make ids and the JSON of arguments anew.
        again = {"role": "assistant", "content": "I look.", "tool_calls": [{**called, "id": "x"}]}
        again["tool_calls"][0]["function"]["arguments"] = '{"at":   "door"}'
        result = {"role": "tool", "tool_call_id": "x", "content": "it is <|im_end|> open"}
        streamed, _ = events(
            url, key, "/chat/completions", {**body, "messages": [*body["messages"], again, result]}
        )
        return first, streamed[-1]["choices"][0]

    sample, _, (first, last) = chatted(play, tool_format="hermes")
    assert first["finish_reason"] == last["finish_reason"] == "tool_calls"
    assert first["message"]["content"] == last["delta"]["content"] == "I look."
    assert last["delta"]["tool_calls"][0]["function"]["name"] == "look"
    assert sample.metadata[EPISODE]["turns"] == 2
    tok = chatting.tokenizer()
    assert "Tools: " in tok.decode(sample.prompt_ids)
    between = sample.response_ids[~sample.loss_mask].tolist()
    assert "it is <|im_end|> open" in tok.decode(between)
    assert between.count(tok.eos_token_id) <= 2  # those of the template


@pytest.mark.parametrize("where", ["name", "arguments"])
def test_a_call_that_could_not_be_brought_back_is_not_handed_out(monkeypatch, where):
    odd = {"name": "look", "arguments": {}} | {
        where: "<|im_end|>" if where == "name" else {"a": "<|im_end|>"}
    }
    call = f"<tool_call>{json.dumps(odd)}</tool_call>"
    monkeypatch.setattr(
        "opd.environments.branches.Conversation.decode_text", lambda self, ids: f"I look. {call}"
    )
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

    def play(task, url, key):
        body = {"messages": [*task.messages], "tools": tools, "max_tokens": 4}
        first = agents.post(url, key, "/chat/completions", body)["choices"][0]["message"]
        more = [*body["messages"], first, {"role": "user", "content": "again"}]
        return first, agents.post(url, key, "/chat/completions", {**body, "messages": more})

    sample, _, (first, _) = chatted(play, tool_format="hermes")
    assert first["content"] == f"I look. {call}"
    assert not first.get("tool_calls")
    assert sample.metadata[EPISODE]["turns"] == 2


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (b"{", "invalid_json", "no JSON"),
        (b"[" * 100_000, "invalid_json", "nested deeper"),
        (b"[]", "invalid_json", "no object"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_json", "surrogates"),
        (b'{"messages": [{"role": "user", "content": NaN}]}', "invalid_json", "NaN"),
        ({}, "invalid_value", "messages"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "hello"}, "invalid_value", "messages"),
        ({"messages": [user("x")] * 10_001}, "invalid_value", "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "invalid_value", "role is one of"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "invalid_value", "role is one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "invalid_value", "parts of"),
        ({"messages": [{"role": "user", "content": 3}]}, "invalid_value", "content is text"),
        ({"messages": [user("x"), {"role": "assistant", "content": "y"}]}, "invalid_value", "goes on with"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "invalid_value", "messages.tool_calls"),
        ({"messages": [user("x")], "n": 10**9}, "invalid_value", "n: "),
        ({"messages": [user("x")], "n": 0}, "invalid_value", "n: "),
        ({"messages": [user("x")], "n": 16}, "max_turns", "8 turns"),
        ({"messages": [user("x")], "max_tokens": -1}, "invalid_value", "max_tokens"),
        ({"messages": [user("x")], "max_tokens": "9"}, "invalid_value", "max_tokens"),
        ({"messages": [user("x")], "temperature": 3}, "invalid_value", "temperature"),
        ({"messages": [user("x")], "presence_penalty": 1.0}, "invalid_value", "as the recipe says"),
        ({"messages": [user("x")], "logit_bias": {"5": 100}}, "invalid_value", "as the recipe says"),
        ({"messages": [user("x")], "response_format": {"type": "json"}}, "invalid_value", "not applied"),
        ({"messages": [user("x")], "top_logprobs": 5, "logprobs": True}, "invalid_value", "is 0"),
        ({"messages": [user("x")], "stop": [""]}, "invalid_value", "stop"),
        ({"messages": [user("x")], "stop": ["x"] * 17}, "invalid_value", "stop"),
        ({"messages": [user("x")], "functions": []}, "unsupported_parameter", "functions is not supported"),
        ({"messages": [user("x")], "tools": [{}]}, "invalid_value", "tools[0]"),
        ({"messages": [user("x")], "tool_choice": {"type": "function"}}, "invalid_value", "a certain tool"),
        (
            {"messages": [user("x")], "tools": [{"type": "function", "function": {"name": "f"}}]},
            "invalid_value",
            "environment.tool_format",
        ),
        ({"messages": [{**user("x"), "name": "<|im_start|>"}]}, "invalid_value", "hold <|im_start|>"),
        ({"messages": [user("x" * 5_000)]}, "context_length_exceeded", "leaves no room"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_request_is_an_error_object(body, code, said, refusals):
    status, error = refusals(body)
    assert (status, error["code"], error["type"]) == (400, code, "invalid_request_error")
    assert said in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("body", [{"prompt": "x" * 6_000}, {"messages": [user("x" * 3_000)] * 2}])
def test_text_that_fits_in_no_branch_is_refused_before_it_is_encoded(body, refusals, monkeypatch):
    """402 tokens of at most 12 characters are room for 4,824; what is shorter is counted in tokens."""
    tok, encoded = chatting.tokenizer(), []
    assert max(map(len, tok.get_vocab())) == longest_token(tok) == 12
    encode = type(tok).__call__

    def counted(self, text, **given):
        encoded.append(len(text))
        return encode(self, text, **given)

    monkeypatch.setattr(type(tok), "__call__", counted)
    path = "/completions" if "prompt" in body else "/chat/completions"
    status, error = refusals(body, path)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "6,000 characters" in error["message"]
    assert max(encoded, default=0) < 1_000
    status, error = refusals({"prompt": "x" * 4_800}, "/completions")
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "has 4,800 tokens" in error["message"]
    assert max(encoded) == 4_800


def called(arguments: object) -> dict:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


TOOL = {"type": "function", "function": {"name": "f", "description": ""}}


@pytest.mark.parametrize("size", [6_000, (1 << 20) + 1, 10 << 20])
@pytest.mark.parametrize("what", ["tools", "calls", "arguments as text"])
def test_tools_and_calls_of_any_size_are_refused_before_anything_is_rendered(
    what, size, refusals, monkeypatch
):
    """What fits in no branch is as text that does not; megabytes are refused whatever the branch has."""
    touched = []
    for name in ("encode_opening", "encode_answer", "special_in"):
        monkeypatch.setattr(
            f"opd.environments.branches.Conversation.{name}", lambda *given: touched.append(1)
        )
    large, messages, tools = {"x": "y" * size}, [user("x")], [TOOL]
    if what == "tools":
        tools = [{**TOOL, "function": {**TOOL["function"], "parameters": large}}]
    else:
        messages = [user("x"), called(large if what == "calls" else json.dumps(large)), user("y")]
    status, error = refusals({"messages": messages, "tools": tools})
    assert not touched
    if size > 1 << 20:
        assert (status, error["code"]) == (413, "too_large")
        assert "1,048,576 are the most" in error["message"]
    else:
        assert (status, error["code"]) == (400, "context_length_exceeded")


def test_a_tokenizer_that_makes_one_token_of_much_bounds_no_text():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"cat": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert longest_token(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")) is None


def opened_gateway():
    """A gateway of one session, before which no engine is, and the session's key."""
    import numpy as np

    from opd.config.environments import EnvironmentConfig
    from opd.environments.branches import Branches
    from opd.types import Sample

    def never(session, turn, told):
        raise AssertionError("this is to be refused")

    tok = chatting.tokenizer()
    config = EnvironmentConfig(type="agent", params={"run": "agents:plain"})
    sample = Sample("p/0", "p", "a", np.array([5, 6], np.int32))
    made = gateway.Gateway(tok, never)
    session = gateway.Session(Branches(sample, config, tok, {}, SamplingParams(max_new_tokens=400)))
    return made, made.admit_session(session)


@pytest.fixture(scope="module")
def refusals():
    """Asks a gateway; nothing that comes is to reach an engine."""
    made, key = opened_gateway()
    yield lambda body, path="/chat/completions": refused(made.url, key, body, path)
    made.close()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": ["a", "b"]}, "one text"),
        ({"prompt": [10**6]}, "ids outside of"),
        ({"prompt": [-1]}, "ids outside of"),
        ({"prompt": [2**70]}, "ids outside of"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "best_of": 4}, "best_of"),
        ({"prompt": "x", "logprobs": 5}, "logprobs"),
        ({"prompt": [1] * 500}, "leaves no room"),
    ],
)
def test_what_is_wrong_with_a_completion(body, said, refusals):
    status, error = refusals(body, "/completions")
    assert status == 400
    assert said in error["message"]


def test_what_is_no_http_leaves_no_traceback_in_the_log(caplog):
    def play(task, url, key):
        where = urlsplit(url)
        for head in (b"Content-Length: -5", b"Transfer-Encoding: chunked\r\n\r\nzz", b"A: 1\r\n" * 20_000):
            with socket.create_connection((where.hostname, where.port)) as line:
                line.settimeout(60)
                try:
                    line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
                    line.recv(100)
                except ConnectionError:  # it is not read to its end
                    pass
        agents.post(url, key, "/completions", {"prompt": task.prompt, "max_tokens": 3})
        return key

    sample, _, _ = once(play)
    assert len(sample.response_ids) == 3
    assert [
        one.name for one in caplog.records if one.exc_info and logging.getLogger(one.name).propagate
    ] == []


@pytest.mark.parametrize("prompt", [{"a": 1}, [1, "a"], 3, ["a", "b"], [[1]]])
def test_a_prompt_of_another_kind_is_told_which_there_are(prompt):
    with pytest.raises(RefusedRequestError, match="one text, or the token ids of one"):
        read_request(json.dumps({"prompt": prompt}).encode(), chat=False)


@pytest.mark.parametrize("limits", [(3, 5), (5, 3)])
def test_of_two_limits_the_smaller_counts(limits):
    told = dict(zip(("max_tokens", "max_completion_tokens"), limits, strict=True))
    assert read_request(json.dumps({"messages": [user("?")], **told}).encode(), chat=True).most == 3


def test_without_a_key_nothing_is_read_and_what_is_large_or_slow_is_let_go(monkeypatch):
    monkeypatch.setattr(gateway, "READING", 0.3)
    monkeypatch.setattr(gateway, "LINGERING", 0.1)
    lines = []

    def play(task, url, key):
        where, body = urlsplit(url), {"prompt": task.prompt, "max_tokens": 3}
        told = [refused(url, "opd-wrong", body, "/completions")[1]["code"]]
        for head, sent in (
            ("POST /v1/completions", b"Authorization: Bearer no\r\nContent-Length: 100000000\r\n\r\n"),
            ("POST /v1/completions", b"Content-Length: %d\r\n\r\n" % (MOST_BODY + 1)),
            ("POST /v1/completions", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"),
            ("POST /v1/completions", b"Content-Length: 10\r\n\r\nhalf"),
            ("POST /v1/", b"X: "),
        ):
            with socket.create_connection((where.hostname, where.port)) as line:
                known = b"" if b"Bearer" in sent else f"Authorization: Bearer {key}\r\n".encode()
                line.sendall(f"{head} HTTP/1.1\r\nHost: x\r\n".encode() + known + sent)
                line.settimeout(60)
                try:
                    lines.append(line.recv(100).partition(b"\r\n")[0].decode())
                    assert not line.recv(1 << 16) or not line.recv(1 << 16)  # it is closed
                except ConnectionError:
                    pass
        assert refused(url, key, body, "/nonsense")[0] == 404
        agents.post(url, key, "/completions", body)
        return told, key, url

    sample, _, (told, key, url) = once(play)
    assert told == ["invalid_api_key"]
    assert [line[9:12] for line in lines] == ["401", "413", "408", "408", ""]
    assert len(sample.response_ids) == 3
    with pytest.raises(urllib.error.URLError):  # it is gone with its batch
        agents.post(url, key, "/completions", {})


def test_an_agent_that_is_refused_room_or_turns_and_raises_is_truncated(caplog):
    caplog.set_level("INFO", "opd.environments.agents")

    def play(task, url, key):
        text = task.prompt
        for _ in range(100):
            text += agents.post(url, key, "/completions", {"prompt": text, "max_tokens": 5})["choices"][0][
                "text"
            ]
            text += "="

    for settings, why in (({"max_turns": 2}, "turns"), ({"max_turns": 50}, "tokens")):
        engine = Recorded(digits_engine())
        (group,) = playing(play, **settings)(engine, prompts(1), 3, sampling(20), 0)
        check_exact([group], engine)
        for sample in group.samples:
            assert sample.status is Status.TRUNCATED
            assert (sample.metadata[EPISODE]["ended"], sample.metadata[EPISODE]["reward"]) == (why, 0.0)
            assert len(sample.response_ids) <= 20
        (told,) = [record.getMessage() for record in caplog.records]  # one line a batch
        assert "3 of 3 episodes raised with no room left" in told
        assert len(told) < 350
        caplog.clear()


def test_an_agent_that_asks_nothing_has_an_empty_response():
    (group,) = agent("nothing")(digits_engine(), prompts(1), 1, sampling(), 0)
    (sample,) = group.samples
    assert (len(sample.response_ids), sample.status) == (0, Status.COMPLETED)
    assert sample.metadata[EPISODE]["reward"] is None


@pytest.mark.parametrize(
    ("play", "said"),
    [
        (lambda task, url, key: "good", "return a reward, or a dict of JSON"),
        (lambda task, url, key: float("nan"), "no finite number"),
        (lambda task, url, key: {"reward": 1, "x": object()}, "a dict of JSON"),
        (lambda task, url, key: 10**400, "return a reward, or a dict of JSON"),
        (lambda task, url, key: {"reward": 10**400}, "return a reward, or a dict of JSON"),
        (lambda task, url, key: b"1", "a reward is a number, not a bytes"),
        (lambda task, url, key: {"reward": "1"}, "a reward is a number, not a str"),
        (lambda task, url, key: {"reward": 1, "answer": ["x"]}, "answer .*x.*, which is none it had"),
        (lambda task, url, key: {"answer": "x", "choice": [1]}, "choice .*1.*, which is none it had"),
        (lambda task, url, key: {"answer": "x", "choice": 10**5000}, "which is none it had"),
        (lambda task, url, key: 1 / 0, "ZeroDivisionError"),
        (lambda task, url, key: exit(3), "SystemExit"),
    ],
)
def test_an_agent_that_fails_always_is_one_sentence(play, said):
    with pytest.raises(RolloutError, match=said) as caught:
        playing(play, attempts=2)(digits_engine(), prompts(1), 1, sampling(), 0)
    assert "2 times" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_agent_that_does_nothing_is_not_waited_for():
    released = threading.Event()
    try:
        with pytest.raises(RolloutError, match=r"neither asked nor returned for 0.05 s"):
            playing(lambda *given: released.wait(), attempts=1, seconds=0.05)(
                digits_engine(), prompts(1), 1, sampling(), 0
            )
    finally:
        released.set()


def test_an_answer_whose_client_has_gone_is_for_who_asks_again():
    def play(task, url, key):
        where, body = urlsplit(url), {"prompt": task.prompt, "max_tokens": 20}
        data = json.dumps(body).encode()
        with socket.create_connection((where.hostname, where.port)) as line:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            line.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        while True:  # until the server has seen that it is gone, the same request is another one
            answer = agents.post(url, key, "/completions", body)
            if answer["id"]:
                return answer

    engine = Recorded(digits_engine())
    (group,) = playing(lambda *given: bool(play(*given)))(engine, prompts(1), 1, sampling(), 0)
    check_exact([group], engine)
    assert len(engine.asked) <= 2


def test_clients_that_break_off_leave_no_trace_in_the_log(caplog):
    def play(task, url, key):
        where = urlsplit(url)
        head = f"Host: x\r\nAuthorization: Bearer {key}\r\n".encode()
        for sent in (b"Content-Length: 100\r\n\r\nhalf", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"):
            with socket.create_connection((where.hostname, where.port)) as line:
                line.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head + sent)
                assert in_body.wait(60)  # it has come so far that the body is read
                in_body.clear()
        data = json.dumps({"prompt": task.prompt, "max_tokens": 20, "stream": True}).encode()
        with socket.create_connection((where.hostname, where.port)) as line:
            head += f"Content-Length: {len(data)}\r\n\r\n".encode()
            line.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head + data)
            line.recv(10)
        agents.post(url, key, "/completions", {"prompt": task.prompt, "max_tokens": 3})

    in_body, read = threading.Event(), gateway._read_body

    async def reading(request):
        in_body.set()
        return await read(request)

    with pytest.MonkeyPatch.context() as patch, caplog.at_level("WARNING"):
        patch.setattr(gateway, "_read_body", reading)
        once(play)
    assert not caplog.records


def hung_up(url, key, body, placed):
    """Ask, and be gone before the answer, once `placed` has returned."""
    where, data = urlsplit(url), json.dumps(body).encode()
    with socket.create_connection((where.hostname, where.port)) as line:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        line.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        placed()


class Sessions:
    """What a gateway knows of its episodes; the test looks at it, and waits on nothing else."""

    def __init__(self, patch):
        self.seen, admit = [], gateway.Gateway.admit_session

        def admitted(made, session):
            self.seen.append(session)
            return admit(made, session)

        patch.setattr(gateway.Gateway, "admit_session", admitted)

    def until(self, holds):
        deadline = threading.Event()
        for _ in range(6000):
            if holds(self.seen[-1]):
                return
            deadline.wait(0.01)
        raise AssertionError("it never came to it")


def test_turns_whose_clients_hang_up_count(monkeypatch):
    sessions, gone, generate = Sessions(monkeypatch), threading.Event(), Recorded.generate

    def slow(engine, requests, more=None):
        for chunk in generate(engine, requests, more):
            assert gone.wait(60)  # an answer that is whole before its client has left counts as given
            yield chunk

    monkeypatch.setattr(Recorded, "generate", slow)

    def play(task, url, key):
        for place in range(5):
            body = {"prompt": task.prompt + str(place), "max_tokens": 20}
            if place < 2:
                gone.clear()

                def placed(most=place):
                    sessions.until(lambda one: len(one.branches.turns) > most)

                hung_up(url, key, body, placed)
            else:
                assert refused(url, key, body, "/completions")[1]["code"] == "max_turns"
            sessions.until(lambda one: not one.in_flight)
            gone.set()
        for place in range(2):  # they were written, and are there for who asks again
            agents.post(url, key, "/completions", {"prompt": task.prompt + str(place), "max_tokens": 20})
        return refused(url, key, {"prompt": "7"}, "/completions")

    _, engine, (status, error) = once(play, max_turns=2)
    assert (status, error["code"]) == (400, "max_turns")
    assert len(engine.asked) == 2


def test_who_asks_for_one_thing_several_times_is_told_the_same_several_answers_again():
    said = []

    def play(task, url, key):
        body = {"prompt": task.prompt, "max_tokens": 20}
        said.append([agents.post(url, key, "/completions", body)["choices"][0]["text"] for _ in range(4)])
        if len(said) == 1:
            raise RuntimeError("no luck")

    _, engine, _ = once(play)
    assert len(engine.asked) == 4
    assert len(set(said[0])) > 1
    assert said[1] == said[0]


def test_a_client_that_hangs_up_while_its_turn_is_made_keeps_nobody_waiting(monkeypatch):
    sessions, attempts, goes_on = Sessions(monkeypatch), [], threading.Event()
    place = gateway.Branches.assign_turns

    def held(self, asked):
        made = place(self, asked)
        assert goes_on.wait(60)
        return made

    monkeypatch.setattr(gateway.Branches, "assign_turns", held)

    def play(task, url, key):
        attempts.append(key)
        body = {"prompt": task.prompt, "max_tokens": 20}
        if len(attempts) == 1:
            hung_up(url, key, body, lambda: sessions.until(lambda one: one.branches.turns))
            sessions.until(lambda one: not one.in_flight)
            goes_on.set()
            raise RuntimeError("no luck")
        return agents.post(url, key, "/completions", body)

    _, engine, answer = once(play)
    assert len(attempts) == 2
    assert answer["choices"][0]["text"]
    assert len(engine.asked) == 1


def test_many_agents_at_once_are_written_together_and_each_is_its_own():
    wanted = contents(agent()(digits_engine(), prompts(6), 8, sampling(), 0))
    found = contents(agent(concurrent=7)(digits_engine(), prompts(6), 8, sampling(), 0))
    assert found == wanted


def test_a_connection_whose_answers_nobody_reads_is_closed_with_the_gateway():
    """What the loop could not write yet would keep it open."""
    opened, key = opened_gateway()
    where = urlsplit(opened.url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((where.hostname, where.port))
        client.settimeout(2)
        request = f"GET {where.path}/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n"
        request = request.encode() * 1000
        with contextlib.suppress(TimeoutError):  # until the server stops reading, because it cannot write
            for _ in range(100):
                client.sendall(request)
        opened.close()
        client.settimeout(120)
        with contextlib.suppress(ConnectionError):
            while client.recv(1 << 20):
                pass
