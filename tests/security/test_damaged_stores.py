"""Logs, trajectory stores and caches with right checksums and wrong content: one sentence each."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from cached_rows import file_of

from opd.errors import OpdError
from opd.metrics import read_metrics
from opd.models import hf_folder
from opd.storage.blobs import KEY_BYTES, encode_header
from opd.storage.files import read_object
from opd.storage.framed_log import (
    END,
    FRAME_BYTES,
    HEADER_BYTES,
    FileHeader,
    file_name,
    frame_header,
    salt_of,
    scan,
)
from opd.storage.node_cache import CacheRecord, NodeCache
from opd.storage.tensors import load_tensors
from opd.storage.trajectories import SAMPLE_FIELDS, TrajectoryRecord, TrajectoryStore, TrajectoryWriter
from opd.storage.trajectories.segments import _checksum, find_header
from opd.storage.wal import TokenWAL, read_log
from opd.storage.wal_table import FrameKind, encode_close, encode_open
from opd.types import RolloutRequest, SamplingParams, Status

LOG = b"0123456789abcdef"
NUMBERS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1)
JSON = [
    b"", b"null", b"[]", b"1", b'"a"', b"{", b"[" * 10**5, b'{"a":' * 10**5, b"\xff", b"NaN", b"{}",
    b'{"uid": 1, "seed": 0, "metadata": {}, "sampling": {}}', b"1" * 5000,
]  # fmt: skip
SMALL = 64 * 2**20
"""Bytes of memory that the smallest of files may take to be refused."""


@pytest.fixture
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < SMALL


def sentence(use: Callable[[], Any]) -> str | None:
    """With what `use` is refused; `None` if it is not. Nothing but an `OpdError` may be raised."""
    try:
        use()
    except OpdError as error:
        return str(error)
    return None


def opening(number: int = 0, uid: str = "a") -> bytes:
    return encode_open(number, RolloutRequest(uid, np.array([1, 2], np.int32), SamplingParams(), 7), {})


def described(text: bytes, number: int = 0, prompt: int = 0, length: int | None = None) -> bytes:
    head = struct.pack("<IIII", number, len(text) if length is None else length, prompt, 0)
    return head + text.ljust(-(-len(text) // 8) * 8, b"\0")


def changed_json(path: tuple[str, ...], value: Any) -> bytes:
    document: dict[str, Any] = {
        "uid": "a", "seed": 7, "metadata": {},
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 4, "stop_ids": []},
    }  # fmt: skip
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(document).encode()


def token_frame(position: int, count: int = 1) -> bytes:
    return struct.pack("<IiifiI", 0, position, 5, -0.5, 1, 0) * count


def log_frames() -> Iterator[list[tuple[int, bytes, int]]]:
    """(kind, payload, tokens) of the frames of a log."""
    first = (FrameKind.OPEN, opening(), 0)
    for text in JSON:
        yield [(FrameKind.OPEN, described(text), 0)]
    for value in (None, 1, "x", [], {}, 1e400, -1, [[1]], "\x1b[2J"):
        for path in (("uid",), ("seed",), ("metadata",), ("sampling",), ("sampling", "temperature"),
                     ("sampling", "stop_ids"), ("sampling", "top_k"), ("sampling", "more")):  # fmt: skip
            yield [(FrameKind.OPEN, described(changed_json(path, value)), 0)]
    for number in NUMBERS:
        good = changed_json(("uid",), "a")
        yield [(FrameKind.OPEN, described(good, number), 0)]
        yield [(FrameKind.OPEN, described(good, prompt=number), 0)]
        yield [(FrameKind.OPEN, described(good, length=number), 0)]
        yield [first, (FrameKind.STEP, token_frame(0), number)]
        yield [first, (FrameKind.STEP, token_frame(number - 2**31), 1)]
        yield [first, (FrameKind.STEP, token_frame(0) + struct.pack("<II", 0, number), 1)]
        yield [first, (FrameKind.CLOSE, struct.pack("<IIII", 0, number, 0, 0), 0)]
        yield [first, (FrameKind.CLOSE, struct.pack("<IIII", number, 0, number, 0), 0)]
        yield [first, (FrameKind.RETIRE, struct.pack("<II", number, number), 0), first]
    yield [first, first]
    yield [first, (FrameKind.OPEN, opening(0, "b"), 0)]
    yield [first, (FrameKind.STEP, token_frame(0, 2), 2)]
    yield [first, (FrameKind.CLOSE, b"", 0)]
    yield [first, (FrameKind.CLOSE, encode_close(0, Status.FAILED, "x")[:-3], 0)]
    for kind in (*FrameKind, END, 0, 99):
        yield [(kind, b"", 0)]
        yield [(kind, b"\0" * 3, 1)]
        yield [(kind, b"\xff" * 64, 2**32 - 1)]


def write_log(
    folder: Path, frames: list[tuple[int, bytes, int]], first_lsn: int = 1, durable: int = 0
) -> None:
    folder.mkdir()
    data = FileHeader(1, first_lsn, LOG).encode()
    for lsn, (kind, payload, tokens) in enumerate(frames, start=first_lsn):
        data += frame_header(kind, [payload], tokens, lsn, durable, salt_of(LOG)) + payload
    (folder / file_name(1)).write_bytes(data)


def use_log(folder: Path) -> None:
    found = read_log(folder)
    found.requests()
    TokenWAL(folder).shutdown()


def test_frames_that_no_log_holds(tmp_path, little_memory):
    write_log(tmp_path / "good", [(FrameKind.OPEN, opening(), 0), (FrameKind.STEP, token_frame(0), 1)])
    assert sentence(lambda: use_log(tmp_path / "good")) is None
    refused = 0
    for number, frames in enumerate(log_frames()):
        write_log(tmp_path / str(number), frames)
        told = sentence(lambda place=tmp_path / str(number): use_log(place))
        refused += told is not None
        assert told is None or len(told) < 600
    assert refused > 80


def test_headers_that_no_log_has(tmp_path, little_memory):
    good = [(FrameKind.OPEN, opening(), 0)]
    for number, first_lsn in enumerate((0, 2**62, 2**62 + 1, 2**63, 2**64 - 1)):
        for durable in (0, 2**62, 2**64 - 1):
            folder = tmp_path / f"{number}-{durable}"
            if first_lsn < 2**64 - 1:
                write_log(folder, good, first_lsn, durable)
                sentence(lambda place=folder: use_log(place))
    for number, head in enumerate((b"", b"\0" * 63, b"\xff" * 64, os.urandom(4096))):
        folder = tmp_path / f"head-{number}"
        folder.mkdir()
        (folder / file_name(1)).write_bytes(head)
        assert sentence(lambda place=folder: use_log(place)) is not None


def test_heads_that_all_name_one_long_payload_end_the_search(tmp_path):
    """Each would be compared with its checksum: more bytes than there are in years."""
    pieces, lsn = [], 10
    for left in range(20_000, 0, -1):
        head = struct.pack("<IHHIIQQI", 0xF57A0D1E, 1, 0, 40 * (left - 1), 0, lsn, 0, 1)
        pieces.append(head + struct.pack("<I", xxhash.xxh3_64_intdigest(head, salt_of(LOG)) & 0xFFFF_FFFF))
    write_log(tmp_path / "log", [(FrameKind.OPEN, opening(), 0)])
    with (tmp_path / "log" / file_name(1)).open("ab") as file:
        file.write(b"\1" * 8 + b"".join(pieces))
    assert "damaged" in (sentence(lambda: use_log(tmp_path / "log")) or "")


@pytest.mark.parametrize("make", ["symlink", "fifo", "folder"])
def test_what_is_no_file_is_neither_followed_nor_waited_for(tmp_path, make):
    """Logs, caches and stores are opened with each of their files in turn led elsewhere."""
    outside = tmp_path / "outside"

    def led_away(path: Path) -> None:
        outside.write_bytes(b"not to be touched" * 1000)
        path.unlink(missing_ok=True)
        if make == "symlink":
            path.symlink_to(outside)
        elif make == "fifo":
            os.mkfifo(path)
        else:
            path.mkdir()

    uses = {"log": (make_log, use_log), "cache": (make_cache, use_cache), "store": (make_store, use_store)}
    for kind, (build, use) in uses.items():
        whole = build(tmp_path / kind)
        names = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
        names += [Path(file_name(9) + ".tmp")] if kind == "log" else []
        for number, name in enumerate(names):
            folder = build(tmp_path / f"{kind}-{number}")
            led_away(folder / name)
            stamp = outside.stat().st_mtime_ns
            sentence(lambda place=folder, use=use: use(place))
            assert outside.read_bytes() == b"not to be touched" * 1000, name
            assert outside.stat().st_mtime_ns == stamp, name


def make_log(folder: Path) -> Path:
    log = TokenWAL(folder)
    log.open(RolloutRequest("a", np.array([1], np.int32), SamplingParams(), 7), {})
    log.shutdown()
    return folder


KEY = bytes(range(KEY_BYTES))
ROWS = np.ones((3, 4), np.float32)


def make_cache(folder: Path) -> Path:
    with NodeCache(folder, quota_bytes=2**20) as cache:
        assert cache.put(KEY, ROWS, CacheRecord("a", "t", 1))
    return folder


def use_cache(folder: Path) -> Any:
    with NodeCache(folder, quota_bytes=2**20) as cache:
        lease = cache.get(KEY)
        return None if lease is None else lease.rows.copy()


def make_store(folder: Path) -> Path:
    with TrajectoryWriter(folder, durable=False) as writer:
        for number in range(2):
            record = TrajectoryRecord(f"größe{number}", 2, 3, domain="math", extra={"a": number})
            numbers = np.arange(5, dtype=np.int32)
            writer.put(
                record, token_ids=numbers, rollout_logprobs=np.zeros(3, np.float32),
                policy_versions=numbers[:3], loss_mask=np.ones(3, bool),
            )  # fmt: skip
    return folder


def use_store(folder: Path) -> None:
    with TrajectoryStore.open(folder) as store:
        store.heavy_bytes()
        for row in range(len(store.table)):
            store.table.record(row)
            with store.lease([row]) as batch:
                batch.load([field.name for field in SAMPLE_FIELDS])


def resealed(folder: Path, change: Callable[[dict[str, Any], bytearray], None]) -> None:
    """Change what the snapshot of the store's table says: `change(document, arrays)`, then seal it again."""
    (path,) = (folder / "metadata").glob("*.snapshot")
    data = memoryview(path.read_bytes())
    header = FileHeader.decode(data)
    assert header is not None
    frame = next(scan(data, HEADER_BYTES, 0, header))
    old = bytes(data[frame.start + FRAME_BYTES : frame.end])
    (length,) = struct.unpack_from("<Q", old)
    document, arrays = json.loads(old[8 : 8 + length]), bytearray(old[8 + -(-length // 8) * 8 :])
    change(document, arrays)
    text = json.dumps(document).encode()
    payload = struct.pack("<Q", len(text)) + text.ljust(-(-len(text) // 8) * 8, b"\0") + arrays
    salt = salt_of(header.log_id)
    frames = (
        frame_header(frame.kind, [payload], 0, 0, 0, salt) + payload + frame_header(END, [], 0, 1, 0, salt)
    )
    path.write_bytes(bytes(data[:HEADER_BYTES]) + frames)


Change = Callable[[dict[str, Any], bytearray], None]
SHAPES = [
    [-1], [2**62], [2**62, 4], [0], [10**400], ["2"], [2.0], [2, 2], [], {}, None, "22", [True],
]  # fmt: skip
DTYPES = ["O", "<i4", "|V0", "S999999999", "", "<f8,<f8", None, [["a", "<i8"]], [[]], {}, 5]


def put(*path: Any, to: Any) -> Change:
    def change(document: dict[str, Any], arrays: bytearray) -> None:
        place = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return change


def overwritten(step: int, value: bytes) -> Change:
    def change(document: dict[str, Any], arrays: bytearray) -> None:
        if step + 8 <= len(arrays):
            arrays[step : step + 8] = value

    return change


def table_changes() -> Iterator[Change]:
    for name in ("uid.offsets", "uid.heap", "domain", "prompt_tokens", "status", "locations"):
        yield from (put("arrays", name, 1, to=shape) for shape in SHAPES)
        yield from (put("arrays", name, 0, to=dtype) for dtype in DTYPES)
        yield put("arrays", name, to=None)
        yield lambda document, arrays, name=name: document["arrays"].pop(name)
    yield from (put("names", "domain", to=names) for names in ([], [1, 2], None, {}, "math", [None]))
    yield put("names", to={"uid": ["a"]})
    yield put("arrays", to=[])
    yield put("arrays", "more", to=["<i8", [2]])
    for step in range(0, 600, 24):  # every number of the table in turn, as large and as small as it gets
        yield overwritten(step, b"\xff" * 8)
        yield overwritten(step, b"\0" * 7 + b"\x7f")


@pytest.mark.slow
def test_tables_that_no_store_holds(tmp_path, little_memory):
    whole = make_store(tmp_path / "store")
    (base,) = (whole / "metadata").glob("*.snapshot")
    original = base.read_bytes()
    assert sentence(lambda: use_store(whole)) is None
    refused = 0
    for change in table_changes():
        base.write_bytes(original)
        resealed(whole, change)
        told = sentence(lambda: use_store(whole))
        refused += told is not None
        assert told is None or len(told) < 600
    assert refused > 120


STORE_HEADERS: list[tuple[str, Any]] = [
    *(("block_bytes", size) for size in (0, -1, 2**63, 10**400, "1", 1.5, None, True, float("nan"))),
    *(("format", form) for form in (1, 3, -(10**400), "x", None, [], {})),
    *(("fields", fields) for fields in (None, {}, [1], [{}], "ab", [["a"]], [{"name": 1, "dtype": "bool"}])),
    *(("fields", [{"name": n, "dtype": "bool"}]) for n in ("../a", "a/b", "", "checks", "a" * 999, "a.b")),
    *(("fields", [{"name": "a", "dtype": dtype}]) for dtype in ("object", None, [], "")),
    *(("fields", [{"name": "a", "dtype": "bool", "width": w}]) for w in (-1, 2**62, 1.5, "1", True, None)),
    *(("fields", [{"name": "a", "dtype": "bool", "rows": rows}]) for rows in ("all", None, 1, [])),
]  # fmt: skip


def test_headers_that_no_store_has(tmp_path, little_memory):
    folder = make_store(tmp_path / "store")
    good = json.loads((folder / "store.json").read_bytes())
    for key, value in STORE_HEADERS:
        document = {name: one for name, one in good.items() if name != "checksum"} | {key: value}
        try:
            sealed = document | {"checksum": _checksum(document)}
        except ValueError:
            continue
        (folder / "store.json").write_text(json.dumps(sealed))
        assert sentence(lambda: use_store(folder)) is not None, (key, value)
        assert not (tmp_path / "escaped").exists()
    for data in JSON:
        (folder / "store.json").write_bytes(data)
        assert sentence(lambda: use_store(folder)) is not None


def blobs() -> Iterator[bytes]:
    payload = ROWS.tobytes()
    record = CacheRecord("a", "t", 1, 3, 4, "float32", xxhash.xxh3_128_hexdigest(payload))
    good = encode_header(KEY, record)
    _, _, length = struct.unpack_from("<8sII", good)
    fields = json.loads(good[72 : 72 + length])
    texts = [*JSON, b'{"uid": "a"}']
    for key, values in {
        "rows": (-3, 0, 2, 2**62, 10**400, "3", 3.0, None, [], True), "width": (-4, 0, 2**62, "4", None),
        "dtype": ("object", "", None, [], "float16"), "uid": (1, None, []), "teacher": (1, {}),
        "version": (None, [], 1.5), "more": (1,), "checksum": ("00",),
    }.items():  # fmt: skip
        texts += [json.dumps(fields | {key: value}).encode() for value in values]
    texts.append(json.dumps(fields | {"rows": -3, "width": -4}).encode())
    for text in texts:
        full = -(-(72 + len(text) + 16) // 64) * 64
        prefix = struct.pack("<8sIIQ", b"OPDROWS1", full, len(text), len(payload)) + good[24:72]
        body = (prefix + text).ljust(full - 16, b"\0")
        yield body + xxhash.xxh3_128_digest(body) + payload
    for number in (0, 15, 16, 2**31, 2**32 - 1):
        for place in (8, 12):
            yield good[:place] + struct.pack("<I", number) + good[place + 4 :] + payload
    yield from (good[:16] + struct.pack("<Q", n) + good[24:] + payload for n in (0, 2**40, 2**64 - 1))
    yield from (b"", b"\0", good, good[:-1], payload)


def test_blobs_that_no_cache_wrote(tmp_path, little_memory):
    folder = make_cache(tmp_path / "cache")
    assert np.array_equal(use_cache(folder), ROWS)
    for data in blobs():
        path = file_of(folder, KEY)
        path.write_bytes(data)
        assert use_cache(folder) is None
        assert not path.exists()  # it was given up


@pytest.mark.parametrize(
    "read",
    [
        lambda path: read_object(path, "mend it."),
        hf_folder.read_object,
        lambda path: read_metrics(path, chained=True),
        load_tensors,
        lambda path: find_header(path, ()),
    ],
    ids=["record", "description", "metrics", "tensors", "header"],
)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path, read):
    """Whoever opens one for reading waits until somebody writes."""
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    with pytest.raises((OpdError, OSError), match="plain file"):
        read(path)


@pytest.mark.parametrize(
    "read", [load_tensors, lambda path: find_header(path, ())], ids=["tensors", "header"]
)
def test_a_link_to_a_device_without_end_is_not_read(tmp_path, read):
    path = tmp_path / "file"
    path.symlink_to("/dev/zero")
    with pytest.raises((OpdError, OSError), match="plain file"):
        read(path)
