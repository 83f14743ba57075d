"""Plug-in of an SGLang server that writes last hidden states as bytes, not as JSON numbers.

With the folder of this file on its PYTHONPATH, SGLang finds the entry point beside it and calls `register` in
each of its processes. If a request names a segment (`sampling_params.custom_params.opd_hidden`), it gets the
rows of its positions, in the model's dtype, for any chunking of its prompt and any content of the prefix
cache. The scheduler writes them to a file in shared memory, chunk by chunk, which gets a name only once it is
complete. A client on the same machine reads it there, others get the same bytes from `GET /opd/hidden/NAME`.
Either way it is gone then. All other requests are answered as ever.

Imports the standard library alone, and SGLang when SGLang calls it, because it is copied to the server.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import logging
import multiprocessing
import os
import pkgutil
import re
import secrets
import shutil
import stat
import struct
import threading
import time
from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)

KEY = "opd_hidden"
"""Key in a request's `custom_params`, and in an answer's `meta_info`."""
FORMAT = 1
VARIABLE = "OPD_HIDDEN_FOLDER"
"""Environment variable with the folder of one server. Default: a folder in shared memory."""
SHARED = "/dev/shm"
FOLDER_NAME = re.compile("opd-hidden-[0-9a-f]{32}")
SEGMENT_NAME = re.compile("[0-9a-f]{32}")
PROOF, LOCK = "proof", "lock"
KEPT_SECONDS = 120.0
"""Seconds for which a segment waits for its reader, which comes at once or has gone."""
_LOOK_SECONDS = 60.0
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""
_CODES = tuple(DTYPES)
_FIELDS = struct.Struct("<8sIIQQ16s32s32s")
_MAGIC = b"OPDHID01"
HEADER_BYTES = _FIELDS.size + 32


@dataclass(frozen=True)
class SegmentHeader:
    """The beginning of a segment. `rows` x `width` numbers follow, and nothing else."""

    name: str
    dtype: str
    rows: int
    width: int
    tokens: bytes
    """`tokens_digest` of the request."""
    digest: bytes
    """sha256 of the numbers."""

    def pack(self) -> bytes:
        """[HEADER_BYTES], the last 32 of them the sha256 of the others."""
        name, code = bytes.fromhex(self.name), _CODES.index(self.dtype)
        fields = (_MAGIC, FORMAT, code, self.rows, self.width, name, self.tokens, self.digest)
        content = _FIELDS.pack(*fields)
        return content + hashlib.sha256(content).digest()

    @classmethod
    def read(cls, content: bytes | bytearray) -> SegmentHeader:
        """Parse the first `HEADER_BYTES` of a segment. Raises `ValueError`."""
        fields, digest = bytes(content[: _FIELDS.size]), bytes(content[_FIELDS.size : HEADER_BYTES])
        if len(digest) != 32:
            raise ValueError(f"it has {len(content)} bytes, fewer than its header")
        if hashlib.sha256(fields).digest() != digest:
            raise ValueError("its header is damaged")
        magic, version, code, rows, width, name, tokens, numbers = _FIELDS.unpack(fields)
        if magic != _MAGIC or version != FORMAT or code >= len(_CODES):
            raise ValueError("it has another form than this version reads")
        return cls(name.hex(), _CODES[code], rows, width, tokens, numbers)

    @property
    def size(self) -> int:
        """Bytes of the full segment."""
        return HEADER_BYTES + self.rows * self.width * DTYPES[self.dtype]


def tokens_digest(ids, start: int) -> bytes:
    """Return sha256 of token ids, and of the position from which on their hidden states are wanted."""
    return hashlib.sha256(array("q", [start, *ids]).tobytes()).digest()


# Hooks in a scheduler.


class SegmentRecorder:
    """The rows of one request, until all are there: a file without a name, gone with its last user.

    Args:
        folder: Folder of the segment.
        asked: `{segment, start}` of the request.
        count: Tokens of its prompt.
    """

    def __init__(self, folder, request, count):
        self.spans = deque()
        """First positions of the chunks being computed, in order."""
        self.trouble = ""
        self._file: Any = None
        self._folder, self._count = folder, count
        name, start = request.get("segment"), request.get("start")
        if not (isinstance(name, str) and SEGMENT_NAME.fullmatch(name)):
            self.trouble = "the name of the segment is not 32 hexadecimal digits"
        elif not (type(start) is int and 0 <= start < count):
            self.trouble = f"the first position is not one of the {count} of the prompt"
        else:
            self.name, self.start = name, start
            self._restart()

    def add_rows(self, first, rows):
        """Write the wanted rows of `rows` [N, D], the hidden states of the positions from `first` on."""
        if self.trouble:
            return
        if first != self._reached:
            # The first chunk, or all of them again: earlier rows may be of other weights.
            self._restart()
            if not 0 <= first <= self.start:
                self.trouble = f"the hidden states before position {first} were not computed"
                return
        self._reached = first + rows.shape[0]
        self._write_rows(rows[max(0, self.start - first) :])

    def finish(self, tokens):
        """Name the segment and return the reference to it, or to the error."""
        due = self._count - self.start if not self.trouble else 0
        if not self.trouble and (self._file is None or self._rows != due):
            self.trouble = f"{self._rows} of {due} hidden states were computed"
        if not self.trouble:
            self._publish_segment(tokens)
        self._close()
        if self.trouble:
            return {"error": self.trouble}
        return {"segment": self.name, "rows": self._rows, "width": self._width, "dtype": self._dtype}

    def __del__(self):
        self._close()

    def _close(self):
        if self._file is not None:
            self._file.close()

    def _restart(self):
        self._close()
        self._file, self._digest, self._rows, self._reached = None, hashlib.sha256(), 0, None

    def _write_rows(self, rows):
        if not rows.shape[0]:
            return
        import torch

        numbers = rows.detach().contiguous().cpu()
        dtype, width = str(numbers.dtype).removeprefix("torch."), numbers.shape[-1]
        if dtype not in DTYPES:
            self.trouble = f"hidden states of {dtype} have no form"
            return
        content = memoryview(numbers.view(torch.uint8).numpy()).cast("B")
        try:
            if self._file is None:
                flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
                self._file = os.fdopen(os.open(self._folder, flags, 0o600), "r+b", buffering=0)
                self._file.seek(HEADER_BYTES)
                self._dtype, self._width = dtype, width
            remaining = content
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            self._note_failure(error)
            return
        self._digest.update(content)
        self._rows += rows.shape[0]

    def _publish_segment(self, tokens):
        header = SegmentHeader(
            self.name,
            self._dtype,
            self._rows,
            self._width,
            tokens_digest(tokens, self.start),
            self._digest.digest(),
        )
        try:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.pwrite(self._file.fileno(), header.pack(), 0)
                # With a descriptor of a folder the link is followed, to the file it stands for.
                source = f"/proc/self/fd/{self._file.fileno()}"
                os.link(source, self.name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                os.close(folder)
        except OSError as error:
            self._note_failure(error)

    def _note_failure(self, error):
        self.trouble = f"the hidden states cannot be written to {self._folder} ({error.strerror})"
        _log.warning("%s", self.trouble)


def _segment_recorder(req) -> SegmentRecorder | None:
    """Return the rows of a request, or `None` if it wants none."""
    if not hasattr(req, "opd_taking"):
        request = (getattr(req.sampling_params, "custom_params", None) or {}).get(KEY)
        wanted = isinstance(request, dict) and req.return_hidden_states is True
        folder = os.environ.get(VARIABLE, "")
        req.opd_taking = SegmentRecorder(folder, request, len(req.origin_input_ids)) if wanted else None
    return req.opd_taking


def _limit_prefix(original, req, *args, **options):
    """Compute positions whose hidden states are wanted, even if the prefix cache has them."""
    taking, length = _segment_recorder(req), original(req, *args, **options)
    return length if taking is None or taking.trouble else min(length, taking.start)


def _note_spans(original, batch, *args, **options):
    """Note each chunk's position: when its result is there, its request may already be at the next one."""
    result = original(batch, *args, **options)
    for req in batch.reqs:
        taking = _segment_recorder(req)
        if taking is not None:
            taking.spans.append(req.prefix_len)
    return result


def _capture_rows(original, processor, **call):
    req, mode = call["req"], call["capture_hidden_mode"]
    taking = _segment_recorder(req)
    if taking is None or not mode.is_full():
        return original(processor, **call)
    first = taking.spans.popleft() if taking.spans else -1
    start = call["hidden_state_offset"]
    end = start + call["extend_input_len"]
    # Every rank of a server has the hidden states, and one of them answers.
    if processor.output_streamer.send_to_detokenizer.socket is not None and not req.finished():
        taking.add_rows(first, call["logits_output"].hidden_states[start:end])
        if call.get("store", True) and req.to_finish is None:
            req.customized_info = {**(req.customized_info or {}), KEY: [taking.finish(req.origin_input_ids)]}
    return end


# Hooks in the process with the HTTP server.


def make_folder(path):
    """Make this server's folder for this user alone, and remove folders that killed servers left beside it.

    Return its proof, by which a client knows that it sees the same folder. The folder is locked as long as
    this process lives. Raises `OSError`.
    """
    parent, base = os.path.split(path)
    for name in os.listdir(parent):
        if FOLDER_NAME.fullmatch(name) and name != base:
            remove_abandoned(os.path.join(parent, name), age=_LOOK_SECONDS)
    remove_abandoned(path, age=0.0)
    os.mkdir(path, 0o700)
    lock = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(os.open(path, os.O_TMPFILE | os.O_RDWR))  # fails if the file system has no files without a name
    proof = secrets.token_hex(32)
    with open(os.path.join(path, PROOF), "x") as file:
        file.write(proof)
    return proof


def remove_expired(folder):
    """Remove the segments that nobody has fetched in time."""
    now = time.time()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                old = now - entry.stat(follow_symlinks=False).st_mtime > KEPT_SECONDS
                if old and SEGMENT_NAME.fullmatch(entry.name):
                    os.unlink(entry.path)


def remove_abandoned(path, age: float, lock: str | None = LOCK):
    """Remove a folder of this user that is `age` seconds old and whose owner was killed: nobody holds the
    file `lock`, or the folder itself if that is `None`.
    """
    with contextlib.suppress(OSError):
        entry = os.lstat(path)
        mine = stat.S_ISDIR(entry.st_mode) and entry.st_uid == os.geteuid()
        if not mine or time.time() - entry.st_mtime < age:
            return
        locked, how = (path, os.O_DIRECTORY) if lock is None else (os.path.join(path, lock), os.O_RDWR)
        lock_file = os.open(locked, how | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock_file)


def _add_routes(*_, **__):
    """Before the server is launched, make its folder and add routes to describe it and fetch segments."""
    import atexit

    from fastapi import HTTPException  # pyright: ignore[reportMissingImports]
    from fastapi.responses import StreamingResponse  # pyright: ignore[reportMissingImports]
    from sglang.srt.entrypoints.http_server import app  # pyright: ignore[reportMissingImports]

    folder = os.environ[VARIABLE]
    try:
        proof = make_folder(folder)
    except OSError as error:
        _log.warning("hidden states go as JSON: %s cannot be used (%s)", folder, error.strerror)
        return
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    threading.Thread(target=_remove_always, args=[folder], name="opd-hidden", daemon=True).start()
    message = {"format": FORMAT, "folder": os.path.basename(folder), "proof": proof}

    async def get_description():
        return message

    async def get_segment(name: str):
        if not SEGMENT_NAME.fullmatch(name):
            raise HTTPException(404)
        path = os.path.join(folder, name)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            os.unlink(path)
        except OSError:
            raise HTTPException(404) from None
        length = {"Content-Length": str(os.fstat(file).st_size)}
        return StreamingResponse(_file_chunks(file), 200, length, "application/octet-stream")

    app.add_api_route("/opd/hidden", get_description, methods=["GET"])
    app.add_api_route("/opd/hidden/{name}", get_segment, methods=["GET"], response_model=None)


def _remove_always(folder):
    while True:
        time.sleep(_LOOK_SECONDS)
        remove_expired(folder)


def _file_chunks(file):
    with os.fdopen(file, "rb", buffering=0) as opened:
        while part := opened.read(2**20):
            yield part


def fits_sglang() -> bool:
    """Return whether this SGLang has all hooked functions in the known form."""
    for target, _, parameters in _HOOKS:
        try:
            arguments = inspect.signature(pkgutil.resolve_name(target)).parameters
        except (ImportError, AttributeError):
            arguments = {}
        if not parameters <= set(arguments):
            _log.warning("hidden states go as JSON: this SGLang has another %s, or none", target)
            return False
    return True


def register() -> None:
    """Register the hooks. SGLang calls this in each of its processes, before anything else."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    if not fits_sglang():
        return
    if multiprocessing.parent_process() is None:
        os.environ.setdefault(VARIABLE, f"{SHARED}/opd-hidden-{secrets.token_hex(16)}")
        launch = "sglang.srt.entrypoints.http_server.launch_server"
        HookRegistry.register(launch, _add_routes, HookType.BEFORE)
        return
    for target, hook, _ in _HOOKS:
        HookRegistry.register(target, hook, HookType.AROUND)


_MANAGERS = "sglang.srt.managers"
_PROCESSOR = f"{_MANAGERS}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_HOOKS = (
    (f"{_MANAGERS}.schedule_batch.Req._compute_max_prefix_len", _limit_prefix, {"input_len"}),
    (f"{_MANAGERS}.schedule_batch.ScheduleBatch.prepare_for_extend", _note_spans, {"self"}),
    (
        f"{_PROCESSOR}._append_prefill_hidden_states",
        _capture_rows,
        {"req", "logits_output", "hidden_state_offset", "capture_hidden_mode", "extend_input_len"},
    ),
)
"""Functions of a scheduler to wrap, their wrappers, and the parameters these use."""
