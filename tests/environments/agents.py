"""Agents of the tests: with the official client, and with nothing but HTTP."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from opd.environments.protocol import Task

SEEN: dict[str, list[Any]] = {}
"""What each episode was answered, by uid, since a test emptied it."""
FAILS: dict[str, int] = {}
"""How often episodes are to raise yet, by uid."""
PLAY: dict[str, Callable[..., Any]] = {}
"""A function that a test puts in, by name."""


async def chat(task: Task, base_url: str, api_key: str, turns: int = 3, tokens: int = 10) -> float:
    """A conversation with the official client, which brings all of it back in each request."""
    import openai

    answers = SEEN.setdefault(task.uid, [])
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [dict(one) for one in task.messages]
        for turn in range(turns):
            answer = await client.chat.completions.create(
                model="student",
                messages=messages,
                max_completion_tokens=tokens,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
            answers.append(answer)
            said = answer.choices[0].message
            messages += [said.model_dump(exclude_none=True), {"role": "user", "content": f"go on {turn}"}]
    return len(answers) / 10


def plain(task: Task, base_url: str, api_key: str, turns: int = 3) -> dict[str, Any]:
    """The same text again and again, grown by what was answered, over plain HTTP, in a plain function."""
    text, total = task.prompt, 0
    answers = SEEN.setdefault(task.uid, [])
    for _ in range(turns):
        if FAILS.get(task.uid) and answers:
            FAILS[task.uid] -= 1
            raise RuntimeError("no luck")
        body = {"prompt": text, "max_tokens": 5, "logprobs": 0, "return_token_ids": True}
        answer = post(base_url, api_key, "/completions", body)
        answers.append(answer)
        said = answer["choices"][0]["text"]
        total += sum(int(sign) for sign in said if sign.isdigit())
        text += said + f"={total % 10}="
    return {"reward": total % 10 / 10, "total": total}


def branching(task: Task, base_url: str, api_key: str) -> dict[str, Any]:
    """A word aside, two drafts, and two ways to go on with the second one: four branches of five turns."""

    def ask(text: str, **more: Any) -> list[str]:
        answer = post(base_url, api_key, "/completions", {"prompt": text, "max_tokens": 3, **more})
        return [choice["text"] for choice in answer["choices"]]

    said = ask(f"{task.prompt[:-1]}1{task.prompt[-1:]}")
    drafts = ask(task.prompt, n=2)
    said += [*drafts, *(ask(f"{task.prompt}{drafts[1]}={sign}=")[0] for sign in "12")]
    total = sum(int(sign) for text in said for sign in text if sign.isdigit())
    return {"reward": total % 10 / 10, "total": total}


def play(task: Task, base_url: str, api_key: str, name: str) -> Any:
    """What a test has put in."""
    return PLAY[name](task, base_url, api_key)


def nothing(task: Task, base_url: str, api_key: str) -> None:
    """Asks nothing, and says nothing."""


class RefusedError(Exception):
    """Status and error object of a request that was not answered."""


def post(base_url: str, key: str, path: str, body: Any) -> Any:
    """An answer's JSON. Raises `RefusedError`."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(base_url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            raise RefusedError(error.code, json.loads(error.read())["error"]) from None
