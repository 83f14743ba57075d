"""Last hidden states of a server with our plug-in (`opd/served/plugin`): bytes that are read once and then
gone.

This side draws the name of a segment, so no answer of a server leads to a file. The server gives only the
name of its folder. The folder counts only in shared memory, if this user owns it and its proof is the
server's. Otherwise, as with a server on another machine, the same bytes come over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opd.served.http_client import HTTPClient, RefusedError, Server, UnavailableError
from opd.served.plugin.opd_hidden_states import (
    DTYPES,
    FOLDER_NAME,
    FORMAT,
    HEADER_BYTES,
    KEY,
    PROOF,
    SHARED,
    SegmentHeader,
    tokens_digest,
)
from opd.served.scoring import Question
from opd.served.sglang_protocol import hidden_body, most_bytes
from opd.untrusted import bounded_integer, convert_decode_errors, safe_excerpt

_PATH = "/opd/hidden"
_WIDEST = max(DTYPES.values())


@dataclass(frozen=True, slots=True)
class Plugin:
    """The plug-in of a server."""

    folder: Path | None
    """Folder in which this process finds its segments, or `None` if it has to request them."""


async def plugin_of(pool: HTTPClient, server: Server) -> Plugin | None:
    """Return the plug-in of `server`, or `None` if it has none in a known form. Raises `UnavailableError`."""
    try:
        answer = await pool.request_json(server, "GET", _PATH)
    except RefusedError:
        return None
    if answer.get("format") != FORMAT:
        return None
    return Plugin(await asyncio.to_thread(_shared_folder, answer.get("folder"), answer.get("proof")))


def _shared_folder(name: Any, proof: Any) -> Path | None:
    """Return the folder of that name in this machine's shared memory, if it is the server's."""
    if not (isinstance(name, str) and FOLDER_NAME.fullmatch(name) and isinstance(proof, str)):
        return None
    path = Path(SHARED, name)
    with contextlib.suppress(OSError):
        folder = path.lstat()
        if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.geteuid():
            return None
        content = _read_content(path, PROOF, 1024)
        return path if hmac.compare_digest(bytes(content), proof.encode(errors="replace")) else None
    return None


def segment_body(question: Question, name: str, logprobs: bool) -> dict[str, Any]:
    """Build `hidden_body` for a server with the plug-in, which leaves the rows in the segment `name`. It
    computes them even if a cached prefix covers them. So log-probabilities are requested only if they are
    wanted.
    """
    body = hidden_body(question)
    body["sampling_params"]["custom_params"] = {KEY: {"segment": name, "start": question.start}}
    if not logprobs:
        del body["return_logprob"], body["logprob_start_len"]
    return body


class HiddenSegment:
    """One segment, from its name to its last byte. Use it in a `with` block."""

    def __init__(self, plugin: Plugin, question: Question, width: int) -> None:
        self.name = secrets.token_hex(16)
        self._plugin, self._question, self._width = plugin, question, width

    def __enter__(self) -> HiddenSegment:
        return self

    def __exit__(self, *_: object) -> None:
        # Also after an abandoned request, whose answer may have been on its way.
        if self._plugin.folder is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._plugin.folder / self.name)

    def request_body(self, *, logprobs: bool = False) -> dict[str, Any]:
        return segment_body(self._question, self.name, logprobs)

    async def read_rows(self, pool: HTTPClient, server: Server, answer: dict[str, Any]) -> np.ndarray:
        """Return [count, D] float32: the rows behind the answer to `body`. Raises `UnavailableError`."""
        check_reference(answer)
        most = HEADER_BYTES + self._question.token_count * self._width * _WIDEST
        folder = self._plugin.folder
        if folder is None:
            try:
                _, content = await pool.request_bytes(server, "GET", f"{_PATH}/{self.name}", None, most)
            except RefusedError as refusal:
                raise UnavailableError(f"hidden states are gone: {refusal}", answered=True) from None
            return await asyncio.to_thread(self._verified_rows, content, server)
        return await asyncio.to_thread(
            lambda: self._verified_rows(self._read_file(folder, most, server), server)
        )

    def _read_file(self, folder: Path, most: int, server: Server) -> bytearray:
        try:
            return _read_content(folder, self.name, most)
        except OSError as error:
            raise UnavailableError(
                f"{server.url} left no hidden states in {folder} ({error.strerror})", answered=True
            ) from None

    def _verified_rows(self, content: bytes | bytearray, server: Server) -> np.ndarray:
        try:
            return rows_of(content, self.name, self._question, self._width)
        except ValueError as cause:
            raise UnavailableError(
                f"the hidden states that {server.url} left are not usable: {cause}", answered=True
            ) from None


def _bad_reference(cause: str) -> UnavailableError:
    return UnavailableError(f"the reference to hidden states has another form ({cause})", answered=True)


@convert_decode_errors(_bad_reference)
def check_reference(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer's reference to its segment. Raises `UnavailableError` if there is none."""
    parts = answer["meta_info"].get(KEY)
    if not isinstance(parts, list) or not parts:
        raise UnavailableError("the answer refers to no hidden states", answered=True)
    reference = parts[0]
    if "error" in reference:
        raise UnavailableError(f"the server says that {safe_excerpt(reference['error'], 300)}", answered=True)
    return reference


def rows_of(content: bytes | bytearray, name: str, question: Question, width: int) -> np.ndarray:
    """Return [count, D] float32: the numbers of a segment. `ValueError` unless complete and the right one."""
    header = SegmentHeader.read(content)
    due = (question.token_count, width)
    if header.name != name or header.tokens != tokens_digest(question.tokens[:-1].tolist(), question.start):
        raise ValueError("they are the answer to another request")
    if (header.rows, header.width) != due:
        raise ValueError(f"their shape is [{header.rows}, {header.width}], due are [{due[0]}, {due[1]}]")
    if len(content) != header.size:
        raise ValueError(f"there are {len(content)} bytes of {header.size}")
    numbers = memoryview(content)[HEADER_BYTES:]
    if hashlib.sha256(numbers).digest() != header.digest:
        raise ValueError("they are damaged")
    states = floats_of(numbers, header.dtype).reshape(due)
    if not np.isfinite(states).all():
        raise ValueError("one of them is not finite")
    return states


def floats_of(numbers: memoryview, dtype: str) -> np.ndarray:
    """Convert little-endian numbers of one of `DTYPES` to float32."""
    if dtype == "bfloat16":
        return (np.frombuffer(numbers, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(numbers, "<f4" if dtype == "float32" else "<f2").astype(np.float32)


def _read_content(folder: Path, name: str, most: int) -> bytearray:
    """Read a file of `folder`, by its name alone: at most `most` bytes. Raises `OSError`."""
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=inside)
    finally:
        os.close(inside)
    with os.fdopen(file, "rb", buffering=0) as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise OSError(0, f"it is no file of at most {most} bytes")
        content = bytearray(status.st_size)
        view = memoryview(content)
        while view and (count := opened.readinto(view)):
            view = view[count:]
        return content[: len(content) - len(view)] if view else content


def most_answered(body: dict[str, Any]) -> int:
    """Return the most bytes of a good answer to `body` whose hidden states lie elsewhere."""
    return most_bytes({**body, "return_hidden_states": False})


def width_of(answer: dict[str, Any]) -> int | None:
    """Return the width that an answer gives for its segment, or `None` if it refers to none."""
    if answer["meta_info"].get(KEY) is None:
        return None
    return bounded_integer(check_reference(answer)["width"], 0, 2**31, "the width of hidden states")
