"""What a token log already holds of the requests of a call, and how it is told again as decode steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from opd.errors import RolloutError
from opd.protocols import TokenLog
from opd.rollout.transcript import ObservationStep, Tokens
from opd.types import DecodeStep, LoggedRequest, RolloutRequest, no_ids

OWNER = "owner"
"""Metadata of a request that tells the logs of two runs apart."""


def look_up(
    log: TokenLog, requests: Sequence[RolloutRequest], version: int | None, owner: str | None = None
) -> tuple[dict[str, LoggedRequest], list[RolloutRequest]]:
    """What `log` knows of `requests`, and those it does not know.

    Raises `RolloutError` if the log holds one of them with another prompt, sampling or seed, or with tokens
    of a policy later than `version` (`None`: any), or of another `owner`, or if a request brings a prefix of
    its own that the log does not hold.
    """
    found: dict[str, LoggedRequest] = {}
    unknown = []
    for request in requests:
        logged = log.find(request.uid)
        if logged is not None:
            _check_same(request, logged, version)
            if logged.metadata.get(OWNER) != owner:
                raise _foreign(request.uid, "of another owner")
            found[request.uid] = logged
            continue
        if len(request.prefix_ids):
            raise RolloutError(
                f"request {request.uid!r} brings {len(request.prefix_ids)} tokens that the log does not hold;"
                " give it without prefix_ids: the log continues what it knows."
            )
        unknown.append(request)
    return found, unknown


def _check_same(request: RolloutRequest, logged: LoggedRequest, version: int | None) -> None:
    opened, length = logged.request, len(request.prefix_ids)
    wrong = None
    if not np.array_equal(opened.prompt_ids, request.prompt_ids):
        wrong = "another prompt"
    elif opened.sampling != request.sampling:
        wrong = "other sampling settings"
    elif opened.seed != request.seed:
        wrong = "another seed"
    elif not np.array_equal(logged.token_ids[:length], request.prefix_ids):
        wrong = "other response tokens"
    elif version is not None and logged.policy_versions.max(initial=version) > version:
        wrong = f"tokens of policy version {logged.policy_versions.max()}, later than {version},"
    if wrong:
        raise _foreign(request.uid, f"with {wrong}")


def _foreign(uid: str, what: str) -> RolloutError:
    return RolloutError(
        f"the log holds request {uid!r} {what}, which is not what is asked for now: model, tokenizer, data"
        " and settings must be those it was written with; restore them, or start a new run."
    )


def plain(request: RolloutRequest) -> RolloutRequest:
    """`request` as it was before any token."""
    return replace(request, prefix_ids=no_ids()) if len(request.prefix_ids) else request


def replay(tokens: dict[str, Tokens], skip: dict[str, int]) -> Iterator[DecodeStep]:
    """The tokens again, in steps of one position and one policy version, but for the first `skip` of each.

    Steps of environment tokens are `ObservationStep`s. Every request's tokens come in order.
    """
    written = {uid: t for uid, t in tokens.items() if len(t) > skip[uid] and t.loss_mask.all()}
    if written:
        yield from _replay_together(written, skip)
    for uid, known in tokens.items():
        if len(known) > skip[uid] and uid not in written:
            yield from _replay_turns(uid, known, skip[uid])


def _replay_together(tokens: dict[str, Tokens], skip: dict[str, int]) -> Iterator[DecodeStep]:
    uids = list(tokens)
    parts = [tokens[uid].cut(slice(skip[uid], None)) for uid in uids]
    owner = np.repeat(np.arange(len(uids)), [len(part) for part in parts])
    position = np.concatenate(
        [np.arange(skip[uid], skip[uid] + len(part)) for uid, part in zip(uids, parts, strict=True)]
    )
    joined = Tokens.join(parts)
    order = np.lexsort((joined.policy_versions, position))
    joined, owner, position = joined.cut(order), owner[order], position[order]
    changed = (np.diff(position) != 0) | (np.diff(joined.policy_versions) != 0)
    bounds = np.concatenate([[0], np.flatnonzero(changed) + 1, [len(owner)]])
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rows = slice(start, stop)
        yield _step([uids[i] for i in owner[rows]], position[rows], joined.cut(rows))


def _replay_turns(uid: str, known: Tokens, skip: int) -> Iterator[DecodeStep]:
    mask, versions = known.loss_mask, known.policy_versions
    starts = np.flatnonzero((np.diff(mask) != 0) | (np.diff(versions) != 0)) + 1
    bounds = [skip, *(b for b in starts.tolist() if b > skip), len(known)]
    for start, stop in pairwise(bounds):
        if not mask[start]:
            yield ObservationStep.of(uid, start, known.token_ids[start:stop], int(versions[start]))
            continue
        for position in range(start, stop):
            row = slice(position, position + 1)
            yield _step([uid], np.array([position]), known.cut(row))


def _step(uids: list[str], positions: np.ndarray, tokens: Tokens) -> DecodeStep:
    version = int(tokens.policy_versions[0])
    return DecodeStep(uids, positions.astype(np.int32), tokens.token_ids, tokens.logprobs, version, {})


def turn_of(request: RolloutRequest, known: Tokens) -> tuple[RolloutRequest, int]:
    """What an engine is asked for to continue `request` after `known`, and where the turn begins.

    Every turn after an observation is a request of its own: the observation belongs to its prompt (its last
    token may be a stop id and must not end the response), and its noise is drawn under a name of its own.
    The limit on new tokens counts the observations too.
    """
    if not len(known) and not len(request.prefix_ids):
        return request, 0
    seen = known.loss_mask
    if seen.all():
        return replace(request, prefix_ids=known.token_ids), 0
    start = len(seen) - int(np.argmin(seen[::-1]))
    number = int(not seen[0]) + int(np.count_nonzero(seen[:-1] > seen[1:]))
    turn = RolloutRequest(
        f"{request.uid}@turn{number}",
        np.concatenate([request.prompt_ids, known.token_ids[:start]]).astype(np.int32),
        replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - start),
        request.seed,
        known.token_ids[start:],
    )
    return turn, start
