"""Many strings in two arrays: cheap to load, to filter and to join, whatever their number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np


class Strings:
    """An immutable column of strings: `heap[offsets[i]:offsets[i + 1]]` is the UTF-8 of number `i`."""

    __slots__ = ("heap", "offsets")

    def __init__(self, offsets: np.ndarray, heap: np.ndarray) -> None:
        self.offsets = offsets
        """[n + 1] int64."""
        self.heap = heap
        """[B] uint8."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> Strings:
        parts = [text.encode() for text in texts]
        return cls(_ends([len(part) for part in parts]), np.frombuffer(b"".join(parts), np.uint8))

    @classmethod
    def join(cls, columns: Sequence[Strings]) -> Strings:
        """All of `columns`, one after another."""
        if not columns:
            return cls.of(())
        lengths = np.concatenate([np.diff(column.offsets) for column in columns])
        heaps = [column.heap[column.offsets[0] : column.offsets[-1]] for column in columns]
        return cls(_ends(lengths), np.concatenate(heaps))

    def take(self, rows: np.ndarray) -> Strings:
        """The strings number `rows` (`[k]` integers)."""
        starts, lengths = self.offsets[rows], np.diff(self.offsets)[rows]
        offsets = _ends(lengths)
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Strings(offsets, self.heap[places])

    def check(self) -> None:
        """Raise `ValueError` if these arrays hold no strings: they were read from a file."""
        offsets, heap = self.offsets, self.heap
        if not len(offsets) or offsets[0] < 0 or offsets[-1] > len(heap) or (np.diff(offsets) < 0).any():
            raise ValueError("strings that do not follow on one another")
        if len(heap) and heap.max() >= 0x80:
            used = heap[offsets[0] : offsets[-1]]
            used.tobytes().decode()
            begins = offsets[offsets < offsets[-1]] - offsets[0]
            if (used[begins] & 0xC0 == 0x80).any():
                raise ValueError("a string that begins within a letter")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> str:
        if row < 0:
            row += len(self)
        return bytes(self.heap[self.offsets[row] : self.offsets[row + 1]]).decode()

    def __iter__(self) -> Iterator[str]:
        heap = self.heap.tobytes()
        ends = self.offsets.tolist()
        for start, stop in pairwise(ends):
            yield heap[start:stop].decode()


class Category:
    """An immutable column of strings of which few differ: `names[codes[i]]` is number `i`."""

    __slots__ = ("codes", "names")

    def __init__(self, names: Sequence[str], codes: np.ndarray) -> None:
        self.names = tuple(names)
        self.codes = codes
        """[n] int32."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> Category:
        places: dict[str, int] = {}
        codes = [places.setdefault(text, len(places)) for text in texts]
        return cls(tuple(places), np.array(codes, np.int32))

    @classmethod
    def join(cls, columns: Sequence[Category]) -> Category:
        """All of `columns`, one after another, with one list of names."""
        places: dict[str, int] = {}
        parts = []
        for column in columns:
            new = [places.setdefault(name, len(places)) for name in column.names]
            parts.append(np.array(new, np.int32)[column.codes])
        return cls(tuple(places), np.concatenate(parts) if parts else np.zeros(0, np.int32))

    def check(self) -> None:
        """Raise `ValueError` if a code has no name: it was read from a file."""
        if not all(isinstance(name, str) for name in self.names):
            raise ValueError("names that are no strings")
        if ((self.codes < 0) | (self.codes >= len(self.names))).any():
            raise ValueError("a code without a name")

    def take(self, rows: np.ndarray) -> Category:
        return Category(self.names, self.codes[rows])

    def equals(self, name: str) -> np.ndarray:
        """[n] bool: which rows are `name`."""
        if name not in self.names:
            return np.zeros(len(self.codes), dtype=bool)
        return self.codes == self.names.index(name)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, row: int) -> str:
        return self.names[self.codes[row]]

    def __iter__(self) -> Iterator[str]:
        return (self.names[code] for code in self.codes.tolist())


def _ends(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
