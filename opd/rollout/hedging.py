"""Requests that two engines write at once: the first to give a token is heard, equal ones are dropped.

Two copies on the same weights draw the same noise for a position, so they write the same tokens and which of
them is faster says nothing about the text. Should they differ all the same (rounding at the edge of two
tokens), the copy whose token came later no longer continues what was heard, and is ignored from there on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from opd.rollout.engine_calls import Call, part_of
from opd.rollout.ledger import Ledger
from opd.types import DecodeStep


class Overlap:
    """Which tokens of hedged requests are due."""

    def __init__(self, ledger: Ledger, calls: dict[int, Call]) -> None:
        self._ledger, self._calls = ledger, calls
        self._heard: dict[str, list[int]] = {}
        """Tokens of each hedged request so far."""
        self._diverged: set[tuple[int, str]] = set()

    @property
    def active(self) -> bool:
        """Whether any request was hedged in this call."""
        return bool(self._heard)

    def silent(self, seconds: float) -> list[list[str]]:
        """Open requests of engines that have been busy with one step for `seconds` and have no copy yet."""
        now, found = time.monotonic(), []
        for call in self._calls.values():
            since = call.source.busy_since()
            if since is not None and now - since > seconds:
                uids = [uid for uid in call.requests if uid in call.open and uid not in self._heard]
                if uids:
                    found.append(uids)
        return found

    def begin(self, uids: Iterable[str]) -> None:
        """From now on `uids` are written by two engines."""
        for uid in uids:
            self._heard[uid] = self._ledger.transcript.tokens(uid).token_ids.tolist()

    def due(self, call: Call, step: DecodeStep) -> DecodeStep:
        """The part of `step` that is new."""
        keep = []
        columns = zip(step.uids, step.positions.tolist(), step.token_ids.tolist(), strict=True)
        for row, (uid, position, token) in enumerate(columns):
            heard = self._heard.get(uid)
            if heard is None:
                keep.append(row)
            elif uid in self._ledger.ended or (id(call), uid) in self._diverged:
                continue
            elif position == len(heard):
                heard.append(token)
                keep.append(row)
            elif heard[position] != token:
                self._diverge(call, uid)
        finished = {
            uid: status
            for uid, status in step.finished.items()
            if uid not in self._ledger.ended and (id(call), uid) not in self._diverged
        }
        return part_of(step, keep, finished)

    def only_here(self, uids: list[str]) -> list[str]:
        """Those of `uids` that no running call carries any more."""
        carried = set().union(*(call.open for call in self._calls.values())) if self.active else set()
        return [uid for uid in uids if uid not in carried and uid not in self._ledger.ended]

    def ended(self, uids: Iterable[str]) -> None:
        """These have ended, or their turn has: what their copies still say is not waited for, nor heard."""
        gone = list(uids)
        for call in self._calls.values():
            call.leave(gone)
        for uid in gone:
            self._heard.pop(uid, None)

    def _diverge(self, call: Call, uid: str) -> None:
        self._diverged.add((id(call), uid))
        call.open.discard(uid)
