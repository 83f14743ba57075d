"""Clients that nobody here wrote: what the official one asks in pieces, and a framework's own loop."""

import agents
import chatting
import numpy as np
import pytest
from test_agents import agent, chat_prompt, chat_sampling, check_exact
from test_episodes import Recorded
from test_gateway import chatted, events, once

from opd.environments.protocol import EPISODE
from opd.types import Chunk, Status

CALL = 'I look. <tool_call>{"name": "weigh", "arguments": {"thing": "red key"}}</tool_call>'
ANSWER = "the red key weighs 12"


class Scripted:
    """An engine that writes these texts, the next one for each request behind more turns, a token a chunk.

    The first letter of each is a token of its own, which no encoder would write.
    """

    def __init__(self, tok, *texts: str) -> None:
        self._tok, self._texts = tok, texts

    def generate(self, requests, more=None):
        waiting, idle = list(requests), True
        while (asked := more(idle) if more else []) is not None:
            waiting += asked
            for request in waiting:
                yield from self._written(request)
            waiting, idle = [], True

    def _written(self, request):
        turn = int(request.uid.rpartition("/")[2])
        text = self._texts[turn]
        ids = [*self._encoded(text[:1]), *self._encoded(text[1:]), self._tok.eos_token_id]
        for place, token in enumerate(ids):
            one = np.array([token], np.int32)
            ended = {request.uid: Status.COMPLETED} if place == len(ids) - 1 else {}
            logprobs = np.array([-0.01 * (place + 1)], np.float32)
            yield Chunk([request.uid], np.array([place], np.int32), one, logprobs, 0, ended)

    def _encoded(self, text):
        return self._tok(text, add_special_tokens=False)["input_ids"]


def test_a_framework_calls_tools_by_its_own_loop_and_becomes_one_exact_sample():
    openai, pydantic_ai = pytest.importorskip("openai"), pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    weighed = []

    async def play(task, url, key):
        client = openai.AsyncOpenAI(base_url=url, api_key=key)
        model = OpenAIChatModel("student", provider=OpenAIProvider(openai_client=client))
        made = pydantic_ai.Agent(model, instructions="weigh things")

        @made.tool_plain
        def weigh(thing: str) -> str:
            """The weight of a thing."""
            weighed.append(thing)
            return "12"

        async with client:
            said = await made.run(task.messages[-1]["content"])
        return {"reward": float(said.output == ANSWER), "said": said.output}

    tok = chatting.tokenizer()
    engine = Recorded(Scripted(tok, CALL, ANSWER))
    agents.PLAY["it"] = play
    made = agent("play", tok=tok, params={"name": "it"}, tool_format="hermes")
    (group,) = made(engine, [chat_prompt(tok)], 2, chat_sampling(), 3)
    check_exact([group], engine)
    assert weighed == ["red key"] * 2
    for sample in group.samples:
        told = sample.metadata[EPISODE]
        assert (told["turns"], told["branches"], told["calls"]) == (2, 1, 1)
        assert (told["reward"], told["info"], sample.status) == (1.0, {"said": ANSWER}, Status.COMPLETED)
        written = tok.decode(sample.response_ids[sample.loss_mask])
        assert written == f"{CALL}<|im_end|>{ANSWER}<|im_end|>"
        encoded = tok(tok.decode(sample.response_ids), add_special_tokens=False)["input_ids"]
        assert encoded != sample.response_ids.tolist()
        assert "weigh" in tok.decode(sample.prompt_ids)


def test_the_official_client_streams_choices_tools_and_stops():
    openai = pytest.importorskip("openai")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

    def play(task, url, key):
        with openai.OpenAI(base_url=url, api_key=key) as client:
            asked = client.chat.completions.create(
                model="student",
                messages=list(task.messages),
                tools=tools,
                n=2,
                stop=["zz"],
                stream=True,
                stream_options={"include_usage": True},
                max_completion_tokens=6,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
            ids, count, usage, name = {0: [], 1: []}, {0: 0, 1: 0}, None, None
            for piece in asked:
                name, usage = piece.id, piece.usage or usage
                for choice in piece.choices:
                    ids[choice.index] += getattr(choice, "token_ids", None) or []
                    count[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
        assert usage.completion_tokens == sum(map(len, ids.values())) == sum(count.values())
        return {"ids": ids, "answer": name}

    sample, _, said = chatted(play, tool_format="hermes")
    assert sample.metadata[EPISODE]["branches"] == 2
    own = sample.response_ids[sample.loss_mask].tolist()
    assert own in said["ids"].values()


def test_the_official_client_asks_for_completions_in_pieces():
    openai = pytest.importorskip("openai")

    def play(task, url, key):
        with openai.OpenAI(base_url=url, api_key=key) as client:
            pieces = client.completions.create(
                model="student",
                prompt=task.prompt,
                max_tokens=5,
                stream=True,
                extra_body={"return_token_ids": True},
            )
            return [one for piece in pieces for choice in piece.choices for one in choice.token_ids]

    sample, _, ids = once(play)
    assert sample.response_ids[sample.loss_mask].tolist() == ids


def reacted(tok, texts, play, **settings):
    """The sample of an agent for whom these texts are written, each up to its stop string."""
    agents.PLAY["it"] = play
    engine = Recorded(Scripted(tok, *texts))
    made = agent("play", tok=tok, params={"name": "it"}, attempts=1, **settings)
    (group,) = made(engine, [chat_prompt(tok)], 1, chat_sampling(), 3)
    (sample,) = group.samples
    return sample, engine


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_on_with_the_stop_string_is_written_behind_what_it_sent(stream):
    def play(task, url, key):
        text, sent = "Weigh the key.\n", []
        for result in ("12", "13", ""):
            body = {"prompt": text, "stop": ["Observation:"], "return_token_ids": True}
            sent.append(text)
            if stream:
                choices = [one["choices"][0] for one in events(url, key, "/completions", body)[0]]
                said = "".join(one["text"] for one in choices)
            else:
                said = agents.post(url, key, "/completions", body)["choices"][0]["text"]
            assert "Obs" not in said
            text += f"{said}Observation: {result}\n"
        asked.extend(sent)
        return 1.0

    tok, asked = chatting.tokenizer(), []
    texts = ("Action: weigh\nObservation: 99", "Action: again\nObservation: 98", "It is the cat's.")
    sample, engine = reacted(tok, texts, play)
    prompts = [tok.decode(one.prompt_ids) for _, one in sorted(engine.asked.items(), key=_turn)]
    assert prompts == asked  # the engine wrote behind what the agent sent, in each turn
    assert prompts[-1].count("Observation:") == 2
    told = sample.metadata[EPISODE]
    assert (told["turns"], told["branches"]) == (3, 1)
    assert tok.decode(sample.token_ids) == f"{asked[-1]}{texts[-1]}<|im_end|>"
    learnt = tok.decode(sample.response_ids[sample.loss_mask])
    assert learnt == f"Action: weigh\nObservation:Action: again\nObservation:{texts[-1]}<|im_end|>"


def test_who_goes_on_otherwise_than_it_was_written_begins_a_branch_with_what_it_sent():
    def play(task, url, key):
        for rest in ("Result: 12", "Obs"):
            body = {"prompt": f"Go.{rest[:1]}\n", "stop": ["Observation:"]}
            said = agents.post(url, key, "/completions", body)["choices"][0]["text"]
            agents.post(url, key, "/completions", {"prompt": body["prompt"] + said + rest})
        return 1.0

    tok = chatting.tokenizer()
    sample, engine = reacted(tok, ("Action: weigh\nObservation: 99",), play)
    assert tok.decode(sample.prompt_ids) == "Go.O\nAction: weigh\nObs"
    assert "Go.R\nAction: weigh\nResult: 12" in [tok.decode(one.prompt_ids) for one in engine.asked.values()]
    told = sample.metadata[EPISODE]
    assert (told["turns"], told["branches"]) == (4, 4)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_ends_within_a_token_begins_no_branch(chat, stream):
    """The answer is cut at the string; what is gone on with are the tokens that were written."""
    tok = chatting.tokenizer()
    (first, *_), text = tok(" the cat", add_special_tokens=False)["input_ids"], "I see the cat"
    assert tok.decode([first]) == " the"
    path = "/chat/completions" if chat else "/completions"

    def ask(url, key, body):
        if not stream:
            choice = agents.post(url, key, path, body)["choices"][0]
            return choice["message"]["content"] if chat else choice["text"]
        pieces = [one["choices"][0] for one in events(url, key, path, body)[0]]
        return "".join(one["delta"].get("content", "") if chat else one["text"] for one in pieces)

    def play(task, url, key):
        begun = {"messages": [*task.messages]} if chat else {"prompt": "Go.\n"}
        said = ask(url, key, begun | {"stop": ["he", "th"]})
        assert said == "I see "
        if chat:
            more = [{"role": "assistant", "content": f"{said}th"}, {"role": "user", "content": "12"}]
            ask(url, key, {"messages": [*task.messages, *more]})
        else:
            ask(url, key, {"prompt": f"Go.\n{said}th: 12\n"})
        return 1.0

    sample, engine = reacted(tok, (text, "It is."), play)
    assert sample.metadata[EPISODE]["branches"] == 1
    check_written(sample, engine)
    learnt = tok.decode(sample.response_ids[sample.loss_mask])
    assert learnt == "I see theIt is.<|im_end|>"
    said = "<|im_end|>\n<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n" if chat else ": 12\n"
    assert tok.decode(sample.response_ids) == f"I see the{said}It is.<|im_end|>"


def check_written(sample, engine) -> None:
    """Each turn's tokens in the sample are the first that the engine wrote to that request."""
    for uid, request in engine.asked.items():
        start = len(request.prompt_ids) - len(sample.prompt_ids)
        own = [token for token, _ in engine.written[uid]]
        count = int(np.cumprod(sample.loss_mask[start:]).sum())
        assert 0 < count <= len(own)
        assert sample.response_ids[start : start + count].tolist() == own[:count]


@pytest.mark.parametrize("brings", ["", "Observation:"])
def test_a_stop_string_in_a_conversation_stays_before_what_the_template_puts_behind_it(brings):
    def play(task, url, key):
        body = {"messages": [*task.messages], "stop": ["Observation:"]}
        first = agents.post(url, key, "/chat/completions", body)["choices"][0]["message"]
        assert first["content"] == "Action: weigh\n"
        more = [{**first, "content": first["content"] + brings}, {"role": "user", "content": "12"}]
        agents.post(url, key, "/chat/completions", {"messages": [*task.messages, *more]})
        return 1.0

    tok = chatting.tokenizer()
    sample, _ = reacted(tok, ("Action: weigh\nObservation: 99", "It is the cat's."), play)
    text = tok.decode(sample.response_ids)
    assert text == (
        "Action: weigh\nObservation:<|im_end|>\n<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n"
        "It is the cat's.<|im_end|>"
    )
    assert sample.metadata[EPISODE]["branches"] == 1


def _turn(asked):
    return int(asked[0].rpartition("/")[2])
