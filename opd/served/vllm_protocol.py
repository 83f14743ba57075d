"""Build requests to vLLM servers, and read and check their answers.

Token ids are sent, and come back as the keys of the log-probabilities at each position. So an answer of
another length or for other tokens is always rejected. A server scores prompts at temperature 1 in any case,
and returns the whole prompt. A pooling server returns each token's last hidden state, after the final norm:
as bytes, without the tokens. A server gives its settings, checksums and versions in the developers' mode
alone (VLLM_SERVER_DEV_MODE=1).
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import numpy as np

from opd.served.hidden_segments import floats_of
from opd.served.http_client import HTTPClient, RefusedError, Server, UnavailableError
from opd.served.plugin.opd_hidden_states import DTYPES
from opd.served.scoring import PROBE, Question, unreadable_error
from opd.untrusted import convert_decode_errors, safe_excerpt

SCORE, POOL = "/v1/completions", "/pooling"
TASK = "token_embed"
"""vLLM's name of the task that returns every token's hidden state."""
_ENTRY_BYTES = 256
"""Most bytes of JSON for a token with its id, log-probability, rank and text."""
_OTHER_BYTES = 2**20


def scoring_body(question: Question, top_k: int = 0) -> dict[str, Any]:
    """Request log-probabilities of the tokens and of the `top_k` most likely ones, at temperature 1. One
    token is generated, the least a server generates.
    """
    return {
        "prompt": question.tokens.tolist(),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": top_k,
        "add_special_tokens": False,
    }


def most_bytes(question: Question, top_k: int = 0) -> int:
    """Return the most bytes of a good answer to `scoring_body`."""
    return _OTHER_BYTES + len(question.tokens) * (1 + top_k) * _ENTRY_BYTES


def hidden_body(question: Question, dtype: str) -> dict[str, Any]:
    """Request last hidden states of all tokens but the last one, which predicts nothing that is wanted."""
    return {
        "input": question.tokens[:-1].tolist(),
        "task": TASK,
        "use_activation": False,
        "encoding_format": "bytes_only",
        "embed_dtype": dtype,
        "endianness": "little",
        "add_special_tokens": False,
    }


def hidden_bytes(question: Question, width: int, dtype: str) -> int:
    """Return the bytes of a good answer to `hidden_body`. They include the prompt's rows."""
    return (len(question.tokens) - 1) * width * DTYPES[dtype]


def hidden_of(content: bytes, question: Question, width: int, dtype: str) -> np.ndarray:
    """Return [count, D] float32: the wanted rows of an answer to `hidden_body`.

    Raises `UnavailableError`.
    """
    due = hidden_bytes(question, width, dtype)
    if len(content) != due:
        raise UnavailableError(f"hidden states of {len(content)} bytes came, due are {due}", answered=True)
    skipped = question.start * width * DTYPES[dtype]
    rows = floats_of(memoryview(content)[skipped:], dtype).reshape(question.token_count, width)
    if not np.isfinite(rows).all():
        raise UnavailableError("a hidden state is not finite", answered=True)
    return rows


@convert_decode_errors(unreadable_error)
def scores_of(
    answer: object, question: Question, top_k: int, vocabulary: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids [count, K] int64 and log-probabilities [count, K] float32 of the `top_k` = K most likely
    tokens, the most likely first, and those of the tokens of `question` [count] float32. Raises
    `UnavailableError`.
    """
    if not isinstance(answer, dict):
        raise UnavailableError("the answer is no JSON object", answered=True)
    rows = _single_choice(answer).get("prompt_logprobs")
    if not isinstance(rows, list) or len(rows) != len(question.tokens):
        count = len(rows) if isinstance(rows, list) else "no"
        raise UnavailableError(
            f"log-probabilities of {count} positions came where {len(question.tokens)} were due",
            answered=True,
        )
    scored = zip(question.tokens[question.start + 1 :].tolist(), rows[question.start + 1 :], strict=True)
    scores = [_token_scores(row, token, top_k) for token, row in scored]
    ids = np.array([row[0] for row in scores], dtype=np.int64).reshape(question.token_count, top_k)
    with np.errstate(over="ignore"):
        values = np.array([row[1] for row in scores], dtype=np.float32).reshape(question.token_count, top_k)
        own_logprobs = np.array([row[2] for row in scores], dtype=np.float32)
    for numbers in (own_logprobs, values):
        if not np.isfinite(numbers).all() or (numbers > 1e-3).any():
            raise UnavailableError("a log-probability is not finite or above 0", answered=True)
    if ids.size and (ids.min() < 0 or ids.max() >= vocabulary):
        raise UnavailableError(f"a top-k token lies outside the vocabulary of {vocabulary}", answered=True)
    return ids, values, own_logprobs


@convert_decode_errors(unreadable_error)
def model_of(answer: Any) -> tuple[str, int | None]:
    """Return the base model in `/v1/models`, and the most tokens of a request."""
    entries = [entry for entry in answer["data"] if entry.get("parent") is None]
    limit = entries[0].get("max_model_len")
    return safe_excerpt(entries[0].get("root") or entries[0]["id"]), None if limit is None else int(limit)


@convert_decode_errors(unreadable_error)
def _single_choice(answer: dict[str, Any]) -> dict[str, Any]:
    (choice,) = answer["choices"]
    return choice


def _token_scores(row: Any, token: int, top_k: int) -> tuple[list[int], list[float], float]:
    """Return the `top_k` most likely tokens of one position, their log-probabilities, and that of `token`."""
    scores = {int(key): float(entry["logprob"]) for key, entry in row.items()}
    if token not in scores:
        raise UnavailableError("log-probabilities came for other tokens than were sent", answered=True)
    value = scores[token]
    if len(scores) > top_k:
        del scores[token]  # vLLM adds it to the most likely ones if it is none of them
    if len(scores) != top_k:
        raise UnavailableError(f"{len(scores)} top-k tokens came where {top_k} were due", answered=True)
    best = sorted(scores, key=lambda key: (-scores[key], key))
    return best, [scores[key] for key in best], value


OF_NOTHING = hashlib.sha256(b"").hexdigest()
"""The checksum that a server on a CPU gives for a tensor it has packed away."""


async def server_settings(pool: HTTPClient, server: Server) -> dict[str, Any] | None:
    """Return a server's settings, in its own words, with `model_config`, or `None` if it gives none. Raises
    `UnavailableError`, and `RefusedError` for a server of another kind.
    """
    try:
        answer = await pool.request_json(server, "GET", "/server_info?config_format=json")
    except RefusedError:
        return None
    if "vllm_config" not in answer:
        kind = "one of SGLang" if "launch_command" in answer or "startup_time" in answer else "something else"
        raise RefusedError(f"{server.url} is no vLLM server but {kind}, as its /server_info says", 200)
    with convert_decode_errors(
        lambda cause: UnavailableError(f"{server.url}/server_info: {cause}", answered=True)
    ):
        config = dict(answer["vllm_config"])
        return config | {"model_config": dict(config["model_config"])}


async def model_settings(pool: HTTPClient, server: Server) -> dict[str, Any] | None:
    """Return the server's `model_config`, or `None` if it gives none. Raises `UnavailableError`."""
    answer = await server_settings(pool, server)
    return None if answer is None else answer["model_config"]


async def server_checksums(pool: HTTPClient, server: Server) -> dict[str, str] | None:
    """Return sha256 of each tensor by the server's name for it, which begins with its rank, or `None` if it
    gives none. Raises `UnavailableError`.
    """
    try:
        answer = await pool.request_json(server, "POST", "/weight_checker", {"action": "checksum"})
    except RefusedError:
        return None
    with convert_decode_errors(
        lambda cause: UnavailableError(f"{server.url}/weight_checker: {cause}", answered=True)
    ):
        return {str(name): str(checksum) for name, checksum in answer["checksums"].items()}


async def fetch_logprobs(
    pool: HTTPClient, server: Server, top_k: int, vocabulary: int, model: str | None = None
) -> np.ndarray:
    """Return [len(PROBE) - 1] float32: log-probabilities of the probe's tokens, requested with the `top_k`
    most likely ones, by the adapter `model` or without one. Raises `UnavailableError` and `RefusedError`.
    """
    question = Question("probe", PROBE, 0)
    body, most = scoring_body(question, top_k), most_bytes(question, top_k)
    body |= {} if model is None else {"model": model}
    answer = await pool.request_json(server, "POST", SCORE, body, most)
    return await asyncio.to_thread(lambda: scores_of(answer, question, top_k, vocabulary)[2])
