"""The same requests written undisturbed, restarted, and resumed from a token log with old or new noise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from opd.models.causal_lm import CausalLM
from opd.models.tokenizers import character_tokenizer
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.streams import Streaming
from opd.rollout.torch_engine import TorchEngine
from opd.storage.transcript import Tokens, Transcript
from opd.storage.wal import TokenWAL
from opd.types import Chunk, RolloutRequest, SamplingParams, Status

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
STOP = 3
"""The token that ends a response: one of many, so that lengths are spread widely."""
LIMIT = 128
EVIDENCE, REQUIRED = (5, 6, 7, 8), 6
"""The reward is 1 if at least `REQUIRED` tokens are among `EVIDENCE`: who writes more, finds more."""
PROMPTS = 64
SEED_STEP = 1_000_003
"""Between the seeds of two attempts at one request, where each attempt draws noise of its own."""


def build_model() -> CausalLM:
    """A small random Llama with decided opinions."""
    return CausalLM.from_config(CONFIG, tokenizer=character_tokenizer("0123456789abcdefghij", []), seed=1)


def build_requests(model: CausalLM, count: int, seed: int) -> list[RolloutRequest]:
    """`count` requests over the same `PROMPTS` prompts; `seed` is that of the noise."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.vocab_size, 6).astype(np.int32) for _ in range(PROMPTS)]
    sampling = SamplingParams(max_new_tokens=LIMIT, stop_ids=(STOP,))
    return [RolloutRequest(f"{i}", prompts[i % PROMPTS], sampling, seed) for i in range(count)]


def prompt_of(uid: str) -> int:
    """Which of the prompts a request has."""
    return int(uid) % PROMPTS


@dataclass(slots=True)
class Outcome:
    """What one way of writing gave."""

    responses: dict[str, np.ndarray]
    """Token ids by uid."""
    sampled: int
    """Tokens the engine sampled, kept or not."""
    interruptions: int
    resumes: list[tuple[str, int]] = field(default_factory=list)
    """(uid, response position of the first token after it)."""

    @property
    def lengths(self) -> np.ndarray:
        """[n] int64."""
        return np.array([len(ids) for ids in self.responses.values()])

    @property
    def rewards(self) -> np.ndarray:
        """[n] float64."""
        return np.array([np.isin(ids, EVIDENCE).sum() >= REQUIRED for ids in self.responses.values()], float)


class PreemptibleEngine(Streaming):
    """An engine that loses each running request with probability `hazard` after every token."""

    def __init__(self, inner: TorchEngine, hazard: float, seed: int, fresh_noise: bool) -> None:
        """`fresh_noise`: every attempt at a request draws from a seed of its own, as in an engine whose noise
        is not a function of (seed, uid, position).
        """
        self.inner, self.hazard, self.fresh_noise = inner, hazard, fresh_noise
        self.sampled = self.interruptions = 0
        self.resumes: list[tuple[str, int]] = []
        self._rng = np.random.default_rng(seed)
        self._attempts: dict[str, int] = {}

    @property
    def policy_version(self) -> int:
        """Of the inner engine."""
        return self.inner.policy_version

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """As the inner engine."""
        asked = []
        for request in requests:
            attempt = self._attempts.get(request.uid, 0)
            self._attempts[request.uid] = attempt + 1
            if len(request.prefix_ids):
                self.resumes.append((request.uid, len(request.prefix_ids)))
            seed = request.seed + SEED_STEP * attempt if self.fresh_noise else request.seed
            asked.append(replace(request, seed=seed))
        self.inner.submit(asked)

    def next_chunk(self) -> Chunk | None:
        """As the inner engine, with interruptions: `finished` says `ABORTED` for them."""
        chunk = self.inner.next_chunk()
        if chunk is None:
            return None
        self.sampled += len(chunk.uids)
        struck = self._rng.random(len(chunk.uids)) < self.hazard
        lost = [chunk.uids[i] for i in np.flatnonzero(struck) if chunk.uids[i] not in chunk.finished]
        self.interruptions += len(lost)
        self.inner.abort(lost)
        return replace(chunk, finished=chunk.finished | dict.fromkeys(lost, Status.ABORTED))

    def abort(self, uids: Collection[str]) -> None:
        """Of the inner engine."""
        self.inner.abort(uids)

    def pause(self) -> None:
        """Of the inner engine."""
        self.inner.pause()

    def flush(self) -> None:
        """Of the inner engine."""
        self.inner.flush()

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> str:
        """Of the inner engine."""
        return self.inner.update_weights(weights, version)

    def resume(self) -> None:
        """Of the inner engine."""
        self.inner.resume()


def undisturbed(model: CausalLM, requests: list[RolloutRequest]) -> Outcome:
    """(a) Nothing happens."""
    transcript = Transcript({request.uid: Tokens.empty() for request in requests})
    for step in TorchEngine(model).generate(requests):
        transcript.add_chunk(step)
    responses = {request.uid: transcript.request_tokens(request.uid).token_ids for request in requests}
    return Outcome(responses, sum(map(len, responses.values())), 0)


def restarted(model: CausalLM, requests: list[RolloutRequest], hazard: float, seed: int) -> Outcome:
    """(b) Whoever is interrupted loses what was written and starts again."""
    engine = PreemptibleEngine(TorchEngine(model), hazard, seed, fresh_noise=True)
    responses: dict[str, np.ndarray] = {}
    pending = {request.uid: request for request in requests}
    while pending:
        transcript = Transcript({uid: Tokens.empty() for uid in pending})
        ended = []
        for step in engine.generate(list(pending.values())):
            transcript.add_chunk(step)
            ended += [uid for uid, status in step.finished.items() if status is not Status.ABORTED]
        for uid in ended:
            responses[uid] = transcript.request_tokens(uid).token_ids
            del pending[uid]
    return Outcome(responses, engine.sampled, engine.interruptions)


def resumed(
    model: CausalLM, requests: list[RolloutRequest], hazard: float, seed: int, *, folder: Path, fresh: bool
) -> Outcome:
    """(c) Whoever is interrupted goes on after the tokens in the log; `fresh`: with new noise each time."""
    engine = PreemptibleEngine(TorchEngine(model), hazard, seed, fresh_noise=fresh)
    with TokenWAL(folder) as log:
        for _ in FaultTolerantRollout([engine], log).generate(requests):
            pass
        logged = {request.uid: log.find(request.uid) for request in requests}
    responses = {uid: entry.token_ids for uid, entry in logged.items() if entry is not None}
    return Outcome(responses, engine.sampled, engine.interruptions, engine.resumes)
