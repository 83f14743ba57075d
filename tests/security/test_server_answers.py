"""Servers that answer too much, endlessly, too slowly or nonsense: one sentence each, and little memory."""

import asyncio
import base64
import gzip
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from opd.errors import TeacherError
from opd.retry import Retry
from opd.rollout.sglang_engine import SGLangMessageReader
from opd.served.http_client import (
    CONTROL_BYTES,
    HTTPClient,
    Patience,
    PoolOptions,
    RefusedError,
    Server,
    UnavailableError,
)
from opd.served.http_pool import HTTPPool
from opd.served.scoring import Question
from opd.served.sglang_protocol import (
    check_finished,
    hidden_body,
    hidden_of,
    logprob_body,
    logprobs_of,
    most_bytes,
    ranks_of,
    top_logprobs_of,
    versions_of,
)

web = pytest.importorskip("aiohttp.web")
pytest.importorskip("orjson")

QUESTION = Question("q", np.array([3, 1, 4, 1, 5], dtype=np.int32), 1)
WIDTH, ROWS, TOP_K = 4, 50, 2
HIDDEN = hidden_body(QUESTION)

Handler = Callable[[Any], Awaitable[Any]]


def endless(piece: bytes) -> Handler:
    async def handle(request: Any) -> Any:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(piece)

    return handle


def says(body: bytes, status: int = 200, **headers: str) -> Handler:
    async def handle(request: Any) -> Any:
        return web.Response(body=body, status=status, headers=headers)

    return handle


async def drips(request: Any) -> Any:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b" ")
        await asyncio.sleep(0.05)


def against(handler: Handler, use: Callable[[str], Awaitable[Any]]) -> Any:
    """`use(url)` of a server on this machine that answers everything by `handler`."""

    async def run() -> Any:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            return await use(f"http://{host}:{port}")
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def options(url: str, timeout: float = 60.0) -> PoolOptions:
    return PoolOptions([url], patience=Patience(timeout=timeout, retry=Retry(attempts=1)))


async def asked(url: str, method: str, path: str, body: Any = None, timeout: float = 60.0) -> Any:
    client = HTTPClient("a teacher", options(url, timeout))
    try:
        return await client.request_json(Server(url), method, path, body)
    finally:
        await client.close()


async def streamed(url: str) -> list[bytes]:
    client = HTTPClient("an engine", options(url))
    try:
        async with client.stream_lines(Server(url), "/generate", {}, most=2**16, lines=100) as lines:
            return [line async for line in lines]
    finally:
        await client.close()


BAD_BODIES: dict[str, Handler] = {
    "endless": endless(b"1" * 2**16),
    "endless spaces": endless(b" " * 2**16),
    "endless lines": endless(b"\n" * 2**10),
    "endless messages": endless(b"data: {}\n\n" * 100),
    "one byte now and then": drips,
    "a bomb": says(gzip.compress(b" " * 2**27), **{"Content-Encoding": "gzip"}),
    "more than it says": says(b"{" + b" " * (CONTROL_BYTES + 1)),
    "NaN": says(b'{"a": NaN}'),
    "infinity": says(b'{"a": 1e999}'),
    "deep": says(b"[" * 10**5),
    "deeper objects": says(b'{"a":' * 10**5),
    "too deep to walk through": says(b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}"),
    "a list": says(b"[1]"),
    "a number": says(b"1"),
    "a text": says(b'"text"'),
    "nothing": says(b""),
    "no text": says(b"\xff\xfe"),
    "elsewhere": says(b"", 302, Location="http://127.0.0.1:9/"),
    "elsewhere with the question": says(b"", 307, Location="file:///etc/passwd"),
    "a terminal's escapes": says(b"\x1b[2J\x1b]0;x\x07" + "\u202e".encode() + b"<script>" * 10**5, 418),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_what_is_no_answer_is_refused_with_one_sentence(name, memory_peak):
    ways = {"/model_info": ("GET", None), "/generate": ("POST", HIDDEN)}
    for path, (method, body) in ways.items():
        with pytest.raises((UnavailableError, RefusedError)) as caught:
            against(BAD_BODIES[name], lambda url, a=(method, path, body, 1.0): asked(url, *a))
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 600
    assert memory_peak() < 4 * CONTROL_BYTES


@pytest.mark.parametrize("name", ["endless", "endless lines", "endless messages", "a bomb", "elsewhere"])
def test_a_stream_that_goes_on_is_left(name, memory_peak):
    with pytest.raises((UnavailableError, RefusedError)):
        against(BAD_BODIES[name], streamed)
    assert memory_peak() < CONTROL_BYTES


def test_a_pool_ends_with_the_sentence_of_its_owner():
    async def use(url: str) -> Any:
        pool = HTTPPool("teacher math", options(url), TeacherError)
        try:
            await pool.post_json("/generate", HIDDEN, 5, lambda answer: answer, most_bytes(HIDDEN, WIDTH))
        finally:
            await pool.close()

    with pytest.raises(TeacherError, match=r"teacher math: no usable answer .* more than the .* bytes"):
        against(endless(b" " * 2**16), use)


@pytest.fixture
def memory_peak() -> Iterator[Callable[[], int]]:
    """Most bytes of Python's at once, so far in this test."""
    import tracemalloc

    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def good() -> dict[str, Any]:
    """What a server says to all questions above at once."""
    ids = QUESTION.tokens.tolist()
    flat = {"val": np.full((3, TOP_K), -0.5, "<f4"), "idx": np.ones((3, TOP_K), "<i4")}
    meta: dict[str, Any] = {
        "input_token_logprobs": [[None, ids[1], None], *([-0.5, token, None] for token in ids[2:])],
        "input_top_logprobs": [None, *([[-0.5, 1, None], [-1.5, 2, None]] for _ in ids[2:])],
        "hidden_states": [[[0.25] * WIDTH for _ in ids], [0.25] * WIDTH],
        "cached_tokens": 0,
        "weight_versions": [{"version": "7", "start": 0, "end": 1}],
        "weight_version": "7",
        "finish_reason": {"type": "length", "length": 1},
        "output_token_logprobs": [[-0.5, 9, None]],
        "completion_tokens": 1,
    }
    for name, numbers in flat.items():
        meta[f"input_top_logprobs_{name}_flat_b64"] = base64.b64encode(numbers.tobytes()).decode()
    return meta


LONGER = Question("q", np.append(QUESTION.tokens, 2).astype(np.int32), 1)
"""Its hidden states are asked for without its last token."""
READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "logprobs": lambda meta: logprobs_of({"meta_info": meta}, QUESTION.tokens, 1, ROWS),
    "top": lambda meta: top_logprobs_of({"meta_info": meta}, 3, TOP_K, ROWS),
    "top of lists": lambda meta: top_logprobs_of(
        {"meta_info": {key: value for key, value in meta.items() if "flat" not in key}}, 3, TOP_K, ROWS
    ),
    "hidden": lambda meta: hidden_of({"meta_info": meta}, LONGER, WIDTH, ROWS),
    "versions": lambda meta: versions_of({"meta_info": meta}),
    "finished": lambda meta: check_finished({"meta_info": meta}),
    "stream": lambda meta: SGLangMessageReader("q", 0, {"7": 7}, ROWS, ()).read(
        b"data: " + json.dumps({"meta_info": meta}).encode()
    ),
}
VALUES: list[Any] = [
    None, True, -1, 5, 2**40, 10**400, -0.5, 1e300, 1e-3, float("nan"), float("inf"), "", "7", "\x1b[2J",
    "A" * 5000, [], [[]], [[[]]], [None] * 4, [[1, 2]], [[-0.5, 1]], [[-0.5, [1]]] * 4, [["a", "b", "c"]] * 4,
    [[0.25] * 3] * 5, [[[0.25] * 3] * 5], [[[0.25] * WIDTH] * 5] * 3, [[["x"] * WIDTH] * 5],
    [[[None] * WIDTH] * 5], {}, {"type": "abort", "message": "\x1b[2J" * 9999}, {"type": []}, {"a": 1},
]  # fmt: skip


def places() -> Iterator[tuple[str | int, ...]]:
    yield from ((key,) for key in good())
    for key in ("input_token_logprobs", "input_top_logprobs", "hidden_states", "output_token_logprobs"):
        inner = good()[key]
        yield from ((key, place) for place in range(min(2, len(inner))))
        for place, one in enumerate(inner[:2]):
            yield from ((key, place, part) for part in range(len(one or ())))
    yield ("hidden_states", 0, 1, 2)
    yield from (("weight_versions", 0), ("weight_versions", 0, "version"), ("weight_versions", 0, "start"))
    yield ("finish_reason", "type")


def test_answers_of_any_form_are_read_or_refused():
    """Whatever stands at a place: what is read has its shape and finite numbers, else one sentence."""
    for reader in READERS.values():
        reader(good())
    sentences: list[str] = []
    for path in places():
        for value in VALUES:
            meta = good()
            place: Any = meta
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            for name, reader in READERS.items():
                try:
                    found = reader(meta)
                except UnavailableError as error:
                    sentences.append(str(error))
                    continue
                shapes = {"logprobs": (3,), "hidden": (4, WIDTH)}
                if name in shapes:
                    assert found.shape == shapes[name], (path, value)
                    assert np.isfinite(found).all(), (path, value)
                if name.startswith("top"):
                    assert all(part.shape == (3, TOP_K) for part in found), (path, value)
    assert len(sentences) > 1000
    assert all(len(sentence) < 600 and sentence.isprintable() for sentence in sentences)


@pytest.mark.parametrize("answer", [{"ranks": 1}, {"ranks": [1]}, {"ranks": "ab"}, {"ranks": [[]]}])
def test_ranks_are_objects(answer):
    with pytest.raises(UnavailableError):
        ranks_of(answer)


def test_a_good_answer_of_long_numbers_is_not_more_than_is_due():
    number = "-1.2345678901234567e-100"
    tokens = np.arange(2000, dtype=np.int32)
    question = Question("q", tokens, 0)
    entries = [[float(number), 123456, "\\u1234" * 8]] * 2001
    states = [[float(number)] * 64] * 2000
    answer = {"meta_info": {"input_token_logprobs": entries, "hidden_states": [states, states[0]]}}
    assert len(json.dumps(answer)) < most_bytes(hidden_body(question), 64)
    answer = {"meta_info": {"input_token_logprobs": entries, "input_top_logprobs": [entries[:20]] * 2001}}
    assert len(json.dumps(answer)) < most_bytes(logprob_body(question, 20))


def test_good_answers_arrive():
    body = json.dumps({"meta_info": good()}).encode()
    assert against(says(body), lambda url: asked(url, "POST", "/generate", HIDDEN)) == json.loads(body)
    assert against(says(b"data: {}\n\ndata: [DONE]"), streamed) == [b"data: {}", b"", b"data: [DONE]"]
    assert against(says(b"done"), lambda url: asked(url, "POST", "/flush_cache")) is None


@pytest.mark.parametrize("token", [-1, 50])
def test_an_id_at_the_bound_of_the_vocabulary_is_outside(token):
    meta = {"input_top_logprobs": [None, [[-0.5, token, None], [-1.5, 2, None]]]}
    with pytest.raises(UnavailableError, match="outside"):
        top_logprobs_of({"meta_info": meta}, 1, 2, 50)
