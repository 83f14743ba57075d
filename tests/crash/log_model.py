"""A token log as a plain dictionary, and random work for it: what every crash test compares with."""

import json
import random
from dataclasses import dataclass, field

import numpy as np

from opd.types import Chunk, ExpertSpan, LoggedRequest, RolloutRequest, SamplingParams, Status

ENDS = (Status.COMPLETED, Status.TRUNCATED, Status.ABORTED, Status.FAILED)


@dataclass
class ModelRequest:
    request: RolloutRequest
    metadata: dict
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    status: Status = Status.PENDING
    failure: str | None = None
    choices: list[np.ndarray] | None = None
    """Expert choices of its tokens, `None` if one came without."""
    spans: list[ExpertSpan] = field(default_factory=list)

    def logged(self) -> LoggedRequest:
        return LoggedRequest(
            self.request,
            self.metadata,
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32),
            self.status,
            self.failure,
            None if self.choices is None else np.stack(self.choices),
            tuple(self.spans),
        )


def key(logged: LoggedRequest) -> tuple:
    """Everything a log must bring back of a request, comparable."""
    request = logged.request
    return (
        request.uid,
        request.prompt_ids.tobytes(),
        request.sampling,
        request.seed,
        json.dumps(logged.metadata, sort_keys=True),
        logged.token_ids.tobytes(),
        logged.logprobs.tobytes(),
        logged.policy_versions.tobytes(),
        logged.status,
        logged.failure,
        None if logged.expert_choices is None else (_FORM, logged.expert_choices.tobytes()),
        tuple((span.first, span.choices.shape, span.choices.tobytes()) for span in logged.expert_spans),
    )


def state_of(requests: dict[str, LoggedRequest]) -> tuple:
    """The whole log, comparable; in the order of opening."""
    assert all(uid == logged.request.uid for uid, logged in requests.items())
    return tuple(key(logged) for logged in requests.values())


class LogModel:
    """The contract of `TokenLog` in memory."""

    def __init__(self) -> None:
        self.requests: dict[str, ModelRequest] = {}
        self._keys: dict[str, tuple] = {}

    def open(self, request: RolloutRequest, metadata: dict) -> None:
        self.requests[request.uid] = ModelRequest(request, metadata)

    def append(self, chunk: Chunk) -> None:
        for row, (uid, token, logprob) in enumerate(
            zip(chunk.uids, chunk.token_ids, chunk.logprobs, strict=True)
        ):
            choices = None if chunk.expert_choices is None else chunk.expert_choices[row]
            self._add(uid, int(token), float(logprob), chunk.policy_version, choices)
        for uid, span in chunk.expert_spans:
            self.requests[uid].spans.append(span)
            self._keys.pop(uid, None)
        for uid, status in chunk.finished.items():
            self.requests[uid].status = status
            self._keys.pop(uid, None)

    def close(self, uid: str, status: Status, reason: str | None = None) -> None:
        self.requests[uid].status, self.requests[uid].failure = status, reason
        self._keys.pop(uid, None)

    def retire(self, uids: list[str]) -> None:
        for uid in uids:
            self.requests.pop(uid, None)
            self._keys.pop(uid, None)

    def running(self) -> list[str]:
        return [uid for uid, request in self.requests.items() if request.status is Status.PENDING]

    def state(self) -> tuple:
        for uid, request in self.requests.items():
            if uid not in self._keys:
                self._keys[uid] = key(request.logged())
        return tuple(self._keys[uid] for uid in self.requests)

    def _add(self, uid: str, token: int, logprob: float, version: int, choices: np.ndarray | None) -> None:
        request = self.requests[uid]
        if choices is None or (request.tokens and request.choices is None):
            request.choices = None
        else:
            request.choices = [*(request.choices or []), choices]
        request.tokens.append(token)
        request.logprobs.append(logprob)
        request.versions.append(version)
        self._keys.pop(uid, None)


def random_call(model: LogModel, rng: random.Random, serial: int) -> tuple[str, tuple]:
    """A method of `TokenLog` and arguments that are right for what `model` holds."""
    running, known = model.running(), list(model.requests)
    choice = rng.random()
    if not running or (choice < 0.15 and len(running) < 8):
        return "open", (random_request(rng, f"r{serial}"), {"group": serial, "label": "é" * rng.randrange(3)})
    if choice < 0.80:
        return "append", (random_chunk(model, rng),)
    if choice < 0.88:
        return "close", (rng.choice(running), rng.choice(ENDS), rng.choice([None, "", "a reason"]))
    return "retire", (rng.sample(known, rng.randrange(1, min(4, len(known)) + 1)),)


def random_request(rng: random.Random, uid: str) -> RolloutRequest:
    prompt = np.array([rng.randrange(50_000) for _ in range(rng.randrange(1, 9))], np.int32)
    sampling = SamplingParams(rng.random(), rng.random(), rng.randrange(5), rng.randrange(1, 99), (2, 3))
    return RolloutRequest(uid, prompt, sampling, rng.randrange(1 << 40))


def random_chunk(model: LogModel, rng: random.Random) -> Chunk:
    running = model.running()
    uids = running if rng.random() < 0.8 else rng.sample(running, rng.randrange(1, len(running) + 1))
    finished = {uid: rng.choice(ENDS[:2]) for uid in uids if rng.random() < 0.1}
    choices, spans = None, []
    if _is_routed(model, uids, rng):
        choices = _random_choices(rng, len(uids))
    if rng.random() < 0.2:
        shared = _random_choices(rng, rng.randrange(1, 4))
        spans = [(uid, ExpertSpan(rng.randrange(9), shared)) for uid in rng.sample(uids, min(2, len(uids)))]
    return Chunk(
        list(uids),
        np.array([len(model.requests[uid].tokens) for uid in uids], np.int32),
        np.array([rng.randrange(1 << 31) for _ in uids], np.int32),
        np.array([-rng.random() for _ in uids], np.float32),
        rng.randrange(100),
        finished,
        choices,
        spans,
    )


_FORM = (3, 2)


def _random_choices(rng: random.Random, count: int) -> np.ndarray:
    """[count, L, K] uint8."""
    return np.frombuffer(rng.randbytes(count * 6), np.uint8).reshape(count, *_FORM)


def _is_routed(model: LogModel, uids: list[str], rng: random.Random) -> bool:
    """Whether a chunk comes with expert choices: mostly if its requests have some, or none has a token."""
    if not any(model.requests[uid].tokens for uid in uids):
        return rng.random() < 0.5
    routed = any(model.requests[uid].choices is not None for uid in uids)
    return routed if rng.random() < 0.95 else not routed
