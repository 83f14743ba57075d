"""What a vLLM server says of itself, and the probe by which its outputs prove its weights.

It tells its settings, checksums and versions in the developers' mode alone (VLLM_SERVER_DEV_MODE=1).
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import numpy as np

from opd.foreign import decoding
from opd.served.http_client import HTTPClient, RefusedError, Server, UnavailableError
from opd.served.sglang_answers import EXACT, HALF, PROBE, Question
from opd.served.vllm_answers import SCORE, most_bytes, scores_of, scoring_body

OF_NOTHING = hashlib.sha256(b"").hexdigest()
"""What a server on a CPU tells of a tensor that it has packed away."""


async def server_settings(pool: HTTPClient, server: Server) -> dict[str, Any] | None:
    """All that it tells of itself, in its own words, `model_config` in it; `None` if it does not tell. Raises
    `UnavailableError`, and `RefusedError` for a server of another kind.
    """
    try:
        told = await pool.ask(server, "GET", "/server_info?config_format=json")
    except RefusedError:
        return None
    if "vllm_config" not in told:
        kind = "one of SGLang" if "launch_command" in told or "startup_time" in told else "something else"
        raise RefusedError(f"{server.url} is no vLLM server but {kind}, as its /server_info says", 200)
    with decoding(lambda cause: UnavailableError(f"{server.url}/server_info: {cause}", answered=True)):
        config = dict(told["vllm_config"])
        return config | {"model_config": dict(config["model_config"])}


async def model_settings(pool: HTTPClient, server: Server) -> dict[str, Any] | None:
    """How it serves its model, as it calls that; `None` if it does not tell. Raises `UnavailableError`."""
    told = await server_settings(pool, server)
    return None if told is None else told["model_config"]


def tolerance(settings: dict[str, Any] | None) -> float:
    """Nats by which the probe's log-probabilities may differ from the weights' own."""
    return EXACT if "float32" in str((settings or {}).get("dtype")) else HALF


async def checksums(pool: HTTPClient, server: Server) -> dict[str, str] | None:
    """sha256 of each tensor by the server's name for it, which begins with its rank; `None` if it does not
    tell. Raises `UnavailableError`.
    """
    try:
        answer = await pool.ask(server, "POST", "/weight_checker", {"action": "checksum"})
    except RefusedError:
        return None
    with decoding(lambda cause: UnavailableError(f"{server.url}/weight_checker: {cause}", answered=True)):
        return {str(name): str(told) for name, told in answer["checksums"].items()}


async def probe(
    pool: HTTPClient, server: Server, top_k: int, vocabulary: int, model: str | None = None
) -> np.ndarray:
    """[len(PROBE) - 1] float32: log-probabilities of the probe's tokens, asked for with the `top_k` most
    likely ones, by the adapter `model` or without one. Raises `UnavailableError` and `RefusedError`.
    """
    question = Question("probe", PROBE, 0)
    body, most = scoring_body(question, top_k), most_bytes(question, top_k)
    body |= {} if model is None else {"model": model}
    answer = await pool.ask(server, "POST", SCORE, body, most)
    return await asyncio.to_thread(lambda: scores_of(answer, question, top_k, vocabulary)[2])
