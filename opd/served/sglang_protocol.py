"""Build scoring requests to SGLang servers, and read and check their answers.

Token ids are sent and come back with the log-probabilities. So an answer of another length, in another order
or for other tokens is always rejected. Temperatures are not sent: a server scores given tokens at temperature
1 in any case.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from opd.served.http_client import UnavailableError
from opd.served.scoring import Question, unreadable_error
from opd.untrusted import bounded_integer, convert_decode_errors, safe_excerpt

_NUMBER_BYTES, _ENTRY_BYTES = 32, 256
"""Most bytes of JSON for one number, and for a token with its id, its log-probability and its text."""
_OTHER_BYTES = 2**20


def logprob_body(question: Question, top_k: int = 0) -> dict[str, Any]:
    """Request log-probabilities of the tokens and, with `top_k`, of the likeliest ones, at temperature 1."""
    body: dict[str, Any] = {
        "input_ids": question.tokens.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": question.start,
    }
    if top_k:
        flat = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
        body |= {"top_logprobs_num": top_k} | flat
    return body


def hidden_body(question: Question) -> dict[str, Any]:
    """Request last hidden states at the positions `start ... T - 2`.

    The last token predicts nothing that is wanted, so it is left out. One token is generated, because
    otherwise a server returns no hidden states. Requesting log-probabilities from `start` on makes it compute
    those positions even if a cached prefix covers them.
    """
    return {
        "input_ids": question.tokens[:-1].tolist(),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": question.start,
        "return_hidden_states": True,
    }


def most_tokens(settings: Mapping[str, Any]) -> int | None:
    """Return the most prompt plus response tokens of a request, by `/server_info`, or `None` if it gives no
    limit. The server's cache counts as a limit too. May raise any error that
    `convert_decode_errors` handles.
    """
    limits = [settings.get("context_length"), settings.get("max_total_num_tokens")]
    return min((int(limit) for limit in limits if limit), default=None)


def most_bytes(body: dict[str, Any], width: int = 0) -> int:
    """Return the most bytes of a good answer to `body` by a model whose hidden states are `width` wide."""
    tokens = len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"]
    each = _ENTRY_BYTES * (1 + body.get("top_logprobs_num", 0))
    if body.get("return_hidden_states"):
        each += _NUMBER_BYTES * width
    return _OTHER_BYTES + tokens * each


@convert_decode_errors(unreadable_error)
def logprobs_of(answer: dict[str, Any], tokens: np.ndarray, start: int, rows: int) -> np.ndarray:
    """Return [T - 1 - start] float32: log-probabilities of `tokens[start + 1:]`. Raises `UnavailableError`.

    `rows`: rows of the model's head. A server shows the last of its ids as 0, but scores the real one.
    """
    entries = _meta_info(answer).get("input_token_logprobs")
    count = len(tokens) - 1 - start
    if not isinstance(entries, list) or len(entries) != count + 1:
        number = len(entries) if isinstance(entries, list) else "no"
        raise UnavailableError(f"{number} log-probabilities came where {count + 1} were due", answered=True)
    ids, expected = np.array([entry[1] for entry in entries]), tokens[start:]
    if ((ids != expected) & ((ids != 0) | (expected < rows - 1))).any():
        raise UnavailableError("log-probabilities came for other tokens than were sent", answered=True)
    values = _float_array([entry[0] for entry in entries[1:]], (count,))
    if not np.isfinite(values).all() or (values > 1e-3).any():
        raise UnavailableError("a log-probability is not finite or above 0", answered=True)
    return values


@convert_decode_errors(unreadable_error)
def top_logprobs_of(
    answer: dict[str, Any], count: int, top_k: int, vocabulary: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids [count, K] int64 and log-probabilities [count, K] float32. Raises `UnavailableError`."""
    meta = _meta_info(answer)
    if "input_top_logprobs_val_flat_b64" in meta:
        values = _decode_array(meta["input_top_logprobs_val_flat_b64"], "<f4", (count, top_k))
        ids = _decode_array(meta["input_top_logprobs_idx_flat_b64"], "<i4", (count, top_k))
    else:
        rows = (meta.get("input_top_logprobs") or [])[1:]
        if len(rows) != count or any(len(row) != top_k for row in rows):
            raise UnavailableError(
                f"top-k log-probabilities of {len(rows)} positions, not {count}", answered=True
            )
        values = _float_array([[e[0] for e in row] for row in rows], (count, top_k))
        ids = np.array([[e[1] for e in row] for row in rows], dtype=np.int32).reshape(count, top_k)
    if not np.isfinite(values).all() or (values > 1e-3).any():
        raise UnavailableError("a top-k log-probability is not finite or above 0", answered=True)
    if count and (ids.min() < 0 or ids.max() >= vocabulary):
        raise UnavailableError(f"a top-k token lies outside the vocabulary of {vocabulary}", answered=True)
    return ids.astype(np.int64), values


@convert_decode_errors(unreadable_error)
def hidden_of(answer: dict[str, Any], question: Question, width: int, rows: int) -> np.ndarray:
    """Return [count, D] float32: the answer to `hidden_body` of a model whose head is [rows, D]. Raises
    `UnavailableError`.
    """
    logprobs_of(answer, question.tokens[:-1], question.start, rows)
    meta = _meta_info(answer)
    states = meta.get("hidden_states")
    prefill = states[0] if isinstance(states, list) and states else []
    due = len(question.tokens) - 1
    cached = bounded_integer(meta.get("cached_tokens") or 0, 0, due, "the number of cached tokens")
    if len(prefill) != due - cached or cached > question.start:
        raise UnavailableError(
            f"{len(prefill)} hidden states came for {due} tokens ({cached} of them cached)", answered=True
        )
    with np.errstate(over="ignore"):
        blocks = np.asarray(prefill[question.start - cached :], dtype=np.float32)
    if blocks.shape != (question.token_count, width):
        raise UnavailableError(
            f"hidden states of shape {list(blocks.shape)} came where [{question.token_count}, {width}] were"
            " due",
            answered=True,
        )
    if not np.isfinite(blocks).all():
        raise UnavailableError("a hidden state is not finite", answered=True)
    return blocks


@convert_decode_errors(unreadable_error)
def versions_of(answer: dict[str, Any]) -> set[str]:
    """Return the weight versions an answer was computed with."""
    meta = _meta_info(answer)
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version")}]
    return {safe_excerpt(span.get("version")) for span in spans}


@convert_decode_errors(unreadable_error)
def ranks_of(answer: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the weight report of each rank of a server."""
    ranks = (answer or {}).get("ranks") or []
    if not all(isinstance(rank, dict) for rank in ranks):
        raise ValueError("ranks are no objects")
    return list(ranks)


@convert_decode_errors(unreadable_error)
def check_finished(answer: dict[str, Any]) -> None:
    """Raise `UnavailableError` if the server aborted the request."""
    reason = _meta_info(answer).get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise UnavailableError(
            f"the server aborted the request ({safe_excerpt(reason.get('message', 'no reason'), 300)})",
            answered=True,
        )


def _meta_info(answer: dict[str, Any]) -> dict[str, Any]:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise UnavailableError("the answer has no meta_info", answered=True)
    return meta


def _float_array(values: list, shape: tuple[int, ...]) -> np.ndarray:
    with np.errstate(over="ignore"):
        array = np.array(values, dtype=np.float32)
    if array.size == 0 and 0 in shape:
        return array.reshape(shape)
    if array.shape != shape:
        raise ValueError(f"numbers of shape {list(array.shape)} where {list(shape)} were due")
    return array


def _decode_array(text: str, dtype: str, shape: tuple[int, int]) -> np.ndarray:
    try:
        flat = np.frombuffer(base64.b64decode(text), dtype=dtype)
    except (ValueError, TypeError):
        raise UnavailableError("top-k log-probabilities are not readable", answered=True) from None
    if flat.size != shape[0] * shape[1]:
        raise UnavailableError(
            f"{flat.size} top-k log-probabilities, not {shape[0]} x {shape[1]}", answered=True
        )
    return flat.reshape(shape)
