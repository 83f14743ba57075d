"""Logs, trajectory stores and caches with right checksums and wrong content: one sentence each."""

import json
import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from cached_rows import file_of
from hostile import at

from opd.errors import OpdError
from opd.metrics import read_metrics
from opd.models import hf_folder
from opd.storage import sample_lot
from opd.storage.blobs import KEY_BYTES, encode_header
from opd.storage.files import read_object
from opd.storage.framed_log import END, FileHeader, file_name, frame_header, salt_of
from opd.storage.logged_choices import encode_choices
from opd.storage.node_cache import CacheRecord, NodeCache
from opd.storage.sample_lot import EVERY_FIELD, EXPERT_CHOICES, ReadCounters, SampleLot, SampleRecord
from opd.storage.sample_store import SampleStore, SampleWriter
from opd.storage.tensors import load_tensors
from opd.storage.transcript import Tokens, choices_of
from opd.storage.wal import TokenWAL, read_log
from opd.storage.wal_table import FrameKind, encode_close, encode_open
from opd.types import ExpertSpan, RolloutRequest, SamplingParams, Status

LOG = b"0123456789abcdef"
NUMBERS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1)
EXPERTS = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
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
        yield [first, (FrameKind.CHUNK, token_frame(0), number)]
        yield [first, (FrameKind.CHUNK, token_frame(number - 2**31), 1)]
        yield [first, (FrameKind.CHUNK, token_frame(0) + struct.pack("<II", 0, number), 1)]
        yield [first, (FrameKind.CLOSE, struct.pack("<IIII", 0, number, 0, 0), 0)]
        yield [first, (FrameKind.CLOSE, struct.pack("<IIII", number, 0, number, 0), 0)]
        yield [first, (FrameKind.RETIRE, struct.pack("<II", number, number), 0), first]
    yield [first, first]
    yield [first, (FrameKind.OPEN, opening(0, "b"), 0)]
    yield [first, (FrameKind.CHUNK, token_frame(0, 2), 2)]
    yield [first, (FrameKind.CLOSE, b"", 0)]
    yield [first, (FrameKind.CLOSE, encode_close(0, Status.FAILED, "x")[:-3], 0)]
    chunk = (FrameKind.CHUNK, token_frame(0), 1)
    (choices,) = encode_choices(chunk[1], EXPERTS[:1], [(0, ExpertSpan(0, EXPERTS))])
    yield [first, (FrameKind.CHOICES, choices, 0), chunk]
    (other,) = encode_choices(token_frame(1), None, [(0, ExpertSpan(0, EXPERTS[:1].repeat(2, 1)))])
    later = (FrameKind.CHUNK, token_frame(1), 1)
    yield [first, (FrameKind.CHOICES, choices, 0), chunk, (FrameKind.CHOICES, other, 0), later]
    for place in range(8, len(choices), 4):
        for number in (*NUMBERS, 3):
            payload = choices[:place] + struct.pack("<I", number) + choices[place + 4 :]
            yield [first, (FrameKind.CHOICES, payload, 0), chunk]
            yield [first, (FrameKind.CHOICES, payload[:place], 0), chunk]
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
    for logged in read_log(folder).requests().values():
        choices_of([(len(logged.request.prompt_ids), Tokens.from_logged(logged))])
    TokenWAL(folder).shutdown()


def test_frames_that_no_log_holds(tmp_path, little_memory):
    write_log(tmp_path / "good", [(FrameKind.OPEN, opening(), 0), (FrameKind.CHUNK, token_frame(0), 1)])
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
    items = []
    for number in range(2):
        record = SampleRecord(f"größe{number}", 2, 3, domain="math", extra={"a": number})
        tokens = np.arange(5, dtype=np.int32)
        logprobs, mask = np.zeros(3, np.float32), np.ones(3, bool)
        own = {"rollout_logprobs": logprobs, "policy_versions": tokens[:3], "loss_mask": mask}
        own |= {EXPERT_CHOICES: EXPERTS} if number else {}
        items.append((record, {"token_ids": tokens, **own}))
    with SampleWriter(folder, durable=False) as writer:
        writer.put(items, drops=["gone"])
    return folder


def use_store(folder: Path) -> None:
    store = SampleStore.open([folder])
    store.heavy_bytes()
    for row in range(len(store.records)):
        store.choices_placeholder(row)
        with store.lease([row]) as batch:
            batch.load(EVERY_FIELD)
            batch.get_sample(row)


Change = Callable[[dict[str, Any], bytearray], None]


def resealed(path: Path, change: Change) -> None:
    """Change a lot: `change(header, data)`, then give it the digest of what it is now."""
    whole = path.read_bytes()
    (length,) = struct.unpack_from("<Q", whole)
    header, data = json.loads(whole[8 : 8 + length]), bytearray(whole[8 + length :])
    change(header, data)
    said = header.get("__metadata__")
    with suppress(Exception):  # what has no digest is refused for less
        light = {}
        for name, entry in header.items():
            if name not in EVERY_FIELD and name != "__metadata__":
                begin, end = entry["data_offsets"]
                array = np.frombuffer(data[begin:end], sample_lot._DTYPES[entry["dtype"]])
                light[name] = array.reshape(entry["shape"])
        said["digest"] = sample_lot._table_digest(light, said)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


SHAPES = [
    [-1], [2**62], [2**62, 4], [0], [10**400], ["2"], [2.0], [2, 2], [], {}, None, "22", [True],
]  # fmt: skip
DTYPES = ["O", "I32", "F8_E4M3", "S999999999", "", "U8", None, [["a", "<i8"]], [[]], {}, 5]
OFFSETS = [[0, 0], [-1, 5], [0, 2**62], [8, 0], [0, 10**400], ["0", "8"], [0], None, {}, [1, 2, 3]]
TEXTS = [
    "",
    "null",
    "[]",
    "1",
    '"a"',
    "{",
    "[" * 10**5,
    '{"a":' * 10**5,
    "NaN",
    "[1]",
    "[null]",
    '{"domain": 1}',
]


def put(*path: Any, to: Any) -> Change:
    return lambda header, data: at(*path, to=to)(header)


def overwritten(place: int, value: bytes) -> Change:
    def change(header: dict[str, Any], data: bytearray) -> None:
        data[place : place + len(value)] = value

    return change


def replaced(header: dict[str, Any], data: bytearray, old: str, new: str) -> None:
    """Write `new` for the first `old` in the records, which keep their length."""
    begin, end = header["records"]["data_offsets"]
    text = bytes(data[begin:end]).replace(old.encode(), new.encode(), 1)
    data[begin:end] = text[: end - begin].ljust(end - begin)


def lot_changes(size: int) -> Iterator[Change]:
    for name in (
        "records",
        "token_ids",
        "token_ids.rows",
        "loss_mask.digests",
        *(EXPERT_CHOICES + part for part in ("", ".rows", ".digests")),
    ):
        yield from (put(name, "shape", to=shape) for shape in SHAPES)
        yield from (put(name, "dtype", to=dtype) for dtype in DTYPES)
        yield from (put(name, "data_offsets", to=offsets) for offsets in OFFSETS)
        yield put(name, to=None)
        yield lambda header, data, name=name: header.pop(name)
    yield from (put("__metadata__", "drops", to=text) for text in [*TEXTS, 5, None, {}])
    for said in (None, {}, [], "a", {"opd.samples": "x"}, {"opd.samples": 10**400}):
        yield put("__metadata__", to=said)
    yield from (put("__metadata__", "opd.samples", to=form) for form in ("1", "", None, [], "9" * 5000))
    yield from (put("__metadata__", "file", to=name) for name in ("../a", "", None, 5))
    yield put("more", to={"dtype": "I64", "shape": [2], "data_offsets": [0, 16]})
    for rows in ([2**63 - 1, 2**63 - 1], [-1, 9], [5, 2**40]):  # whose sums overflow, or not
        yield lambda header, data, rows=rows: overwritten(
            header["token_ids.rows"]["data_offsets"][0], np.array(rows, np.int64).tobytes()
        )(header, data)
    for old, new in (
        ("5", "-5"),
        ("2", "2.0"),
        ("3", "1e9"),
        ("completed", "odd"),
        ("{", "["),
        ("math", "m"),
    ):
        yield lambda header, data, old=old, new=new: replaced(header, data, old, new)
    yield put("token_ids.rows", "data_offsets", to=[0.0, 16.0])
    yield put("token_ids", "data_offsets", to=[0.0, 40.0])
    yield lambda header, data: header.update({f"a{i}": header["records"] for i in range(500)})
    for place in range(0, size, 8):  # every number in turn, as large and as small as it gets
        yield overwritten(place, b"\xff" * 8)
        yield overwritten(place, b"\0" * 7 + b"\x7f")


@pytest.mark.slow
def test_samples_that_no_run_wrote(tmp_path, little_memory):
    whole = make_store(tmp_path / "store")
    (path,) = whole.glob("*.safetensors")
    original = path.read_bytes()
    assert sentence(lambda: use_store(whole)) is None
    refused, tried = 0, 0
    for change in lot_changes(len(original) - 8 - struct.unpack_from("<Q", original)[0]):
        path.write_bytes(original)
        resealed(path, change)
        told = sentence(lambda: use_store(whole))
        refused, tried = refused + (told is not None), tried + 1
        assert told is None or len(told) < 600
    assert refused > 0.6 * tried
    for data in JSON:
        path.write_bytes(struct.pack("<Q", len(data)) + data)
        assert sentence(lambda: use_store(whole)) is not None
    assert not (tmp_path / "a").exists()


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
        lambda path: SampleLot(path, ReadCounters()),
    ],
    ids=["record", "description", "metrics", "tensors", "samples"],
)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path, read):
    """Whoever opens one for reading waits until somebody writes."""
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    with pytest.raises((OpdError, OSError), match="plain file"):
        read(path)


@pytest.mark.parametrize(
    "read", [load_tensors, lambda path: SampleLot(path, ReadCounters())], ids=["tensors", "samples"]
)
def test_a_link_to_a_device_without_end_is_not_read(tmp_path, read):
    path = tmp_path / "file"
    path.symlink_to("/dev/zero")
    with pytest.raises((OpdError, OSError), match="plain file"):
        read(path)
