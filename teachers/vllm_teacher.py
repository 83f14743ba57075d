"""A teacher behind HTTP: vLLM servers give hidden states of the student's tokens or score them, the published
head stays here.

A server gives no reliable identity of its weights, so it proves them by its outputs (see `scorer.py`). Every
server is checked before it works, and again after it was away.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shlex
from typing import Any

import numpy as np

from opd.config.servers import ServerGroupConfig
from opd.config.teachers import VLLMTeacherConfig
from opd.errors import TeacherError
from opd.served.http_client import RefusedError, Server
from opd.served.http_pool import HTTPPool
from opd.served.plugin.opd_hidden_states import DTYPES
from opd.served.scoring import PROBE, Question, logprob_tolerance, says_nothing
from opd.served.vllm_protocol import (
    OF_NOTHING,
    POOL,
    SCORE,
    fetch_logprobs,
    hidden_body,
    hidden_bytes,
    hidden_of,
    model_of,
    model_settings,
    most_bytes,
    scores_of,
    scoring_body,
    server_checksums,
)
from opd.teachers.scorer import ExpectedModel, Read, Scorer, lost_weights
from opd.teachers.served_teacher import ServedTeacher, kind_served_by

_POOLING = shlex.join(ServerGroupConfig(type="vllm", arguments=VLLMTeacherConfig.POOLING).command_line)
_WIDER = 64
"""Limit of bytes read for the probe, as a multiple of the expected ones, to detect wider hidden states."""


class VLLMScorer(Scorer):
    """See `Scorer`. Answers are checked for length, order and finite numbers."""

    checksum_hint = (
        ", with VLLM_SERVER_DEV_MODE=1 for the servers, or take what `opd doctor` prints (a server that pools"
        " leaves out the head)"
    )

    def __init__(
        self, model: ExpectedModel, settings: VLLMTeacherConfig, read: Read | None, **options: Any
    ) -> None:
        super().__init__(model, settings, read, **options)
        self._sampled = settings.signal == "sampled"
        self._context: int | None = None
        """Most tokens of a request on any server, including the one it generates."""
        self._served = ""
        self._dtypes: dict[str, str] = {}
        """dtypes of the servers' computation, by URL. Default: float32, which holds all others."""

    @property
    def served_version(self) -> str:
        """See `Scorer`: servers give none, and outputs prove the published weights."""
        return "vllm"

    @property
    def model_title(self) -> str:
        """See `Scorer`: the first server's name of its model."""
        return self._served

    async def inspect_server(self, pool: HTTPPool, server: Server) -> float:
        model, limit = model_of(await pool.request_json(server, "GET", "/v1/models"))
        self._served = self._served or model
        self._context = min((one for one in (limit, self._context) if one), default=None)
        settings = await model_settings(pool, server)
        dtype = str((settings or {}).get("dtype")).removeprefix("torch.")
        self._dtypes[server.url] = dtype if dtype in DTYPES else "float32"
        return logprob_tolerance(settings)

    async def served_checksum(self, pool: HTTPPool, server: Server) -> str | None:
        """See `Scorer`: only the developers' mode gives one, and not for packed weights, as on a CPU."""
        checksums = await server_checksums(pool, server)
        if not checksums or OF_NOTHING in checksums.values():
            return None
        return hashlib.sha256(json.dumps(sorted(checksums.items())).encode()).hexdigest()

    async def served_logprobs(self, pool: HTTPPool, server: Server) -> np.ndarray | None:
        rebuild = self.model.rebuild
        try:
            if not self.hidden:
                return await fetch_logprobs(pool, server, self.top_k, self.vocabulary)
            states = await self._hidden_states(pool, server, Question("probe", PROBE, 0), _WIDER)
            return None if rebuild is None else await asyncio.to_thread(rebuild, states, PROBE[1:])
        except RefusedError as refusal:
            if self.hidden:
                raise TeacherError(
                    f"{pool.owner}: {server.url} gives no hidden states ({refusal}); start it with"
                    f" {_POOLING}, or set signal to topk, and check its URL and key."
                ) from None
            raise TeacherError(
                f"{pool.owner}: {server.url} does not score a prompt with its {self.top_k} most likely tokens"
                f" ({refusal}); start it with --max-logprobs {max(self.top_k, 1)} or more, and without"
                " --runner pooling, and check its URL and key."
            ) from None

    async def score_question(self, pool: HTTPPool, server: Server, question: Question) -> Any:
        if self.hidden:
            return await self._hidden_states(pool, server, question)
        body, most = scoring_body(question, self.top_k), most_bytes(question, self.top_k)
        answer = await pool.request_json(server, "POST", SCORE, body, most)
        # A long sample's answer has some hundred thousand entries: other answers go on meanwhile.
        scores = await asyncio.to_thread(scores_of, answer, question, self.top_k, self.vocabulary)
        return scores[2] if self._sampled else scores

    async def _hidden_states(
        self, pool: HTTPPool, server: Server, question: Question, wider: int = 1
    ) -> np.ndarray:
        """Return [count, D] float32: last hidden states at the positions of `question`, by one attempt. At
        most `wider` times the expected bytes are read.

        Raises `UnavailableError`, `RefusedError`, and `TeacherError` for another width or lost weights.
        """
        dtype, width = self._dtypes.get(server.url, "float32"), self.model.width
        body, due = hidden_body(question, dtype), hidden_bytes(question, width, dtype)
        _, content = await pool.request_bytes(server, "POST", POOL, body, wider * due)
        served_width, odd = divmod(len(content), due // width)
        if wider > 1 and 0 < served_width != width and not odd:
            raise TeacherError(
                f"{pool.owner}: {server.url} returns hidden states of width {served_width}, the published"
                f" head takes {width}; check which model is behind the URL."
            )

        def check_states() -> tuple[np.ndarray, bool]:
            states = hidden_of(content, question, width, dtype)
            return states, says_nothing(states, question.tokens[:-1])

        states, nothing = await asyncio.to_thread(check_states)  # megabytes: other answers go on
        if nothing:
            raise lost_weights(pool.owner, server.url, "all hidden states of an answer are the same")
        return states

    def longest_sample(self) -> tuple[int | None, str]:
        """See `Scorer`. Hidden states leave out the last token. With scores a server generates one more."""
        extra = 1 if self.hidden else -1
        return (
            None if self._context is None else self._context + extra,
            "start them with a larger --max-model-len",
        )


class VLLMTeacher(ServedTeacher):
    """See `ServedTeacher`."""

    scorer_class = VLLMScorer


KIND = kind_served_by(VLLMTeacher)
