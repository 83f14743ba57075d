"""Strings that end a response, found in its text however it was cut into tokens, and across interruptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opd.errors import RolloutError


class StopStrings:
    """Looks for `strings` in the text of a turn. The tokens that hold the string are kept.

    Every token of every request costs one call of `decode`: give stop ids where they will do.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        """`decode`: token ids to text, special tokens included. Raises `RolloutError` for an empty string."""
        if not strings or not all(strings):
            raise RolloutError(f"stop strings {list(strings)} must be given, and none of them empty.")
        self.strings = tuple(strings)
        self._decode = decode
        # A token holds a byte of text or more, and one token before keeps a leading space from being eaten.
        self.window = max(len(string.encode()) for string in strings) + 1
        """How many of the newest tokens to look at."""

    def found(self, tail: Sequence[int]) -> bool:
        """Whether the newest `window` tokens of a turn, or all it has, hold one of the strings."""
        text = self._decode(list(tail))
        return any(string in text for string in self.strings)


class StopWatch:
    """The newest tokens of every request's turn. One call's."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._tails: dict[str, list[int]] = {}

    def begin(self, uid: str, turn: Sequence[int]) -> bool:
        """Take over what is known of the present turn; whether it holds a stop string already."""
        self._tails[uid] = tail = list(turn)[-self._stops.window :]
        return bool(tail) and self._stops.found(tail)

    def add(self, uid: str, token: int) -> bool:
        """Take one more token; whether it completes a stop string."""
        tail = self._tails.setdefault(uid, [])
        tail.append(token)
        del tail[: -self._stops.window]
        return self._stops.found(tail)
