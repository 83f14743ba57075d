"""Segments of hidden states: written chunk by chunk, read once, and refused unless they are what is due."""

import asyncio
import hashlib
import os
import struct
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from opd.served import hidden_segments
from opd.served.hidden_segments import HiddenSegment, Plugin, check_reference, rows_of, width_of
from opd.served.http_client import UnavailableError
from opd.served.plugin import opd_hidden_states as plugin
from opd.served.plugin.opd_hidden_states import (
    HEADER_BYTES,
    KEY,
    SegmentHeader,
    SegmentRecorder,
    tokens_digest,
)
from opd.served.scoring import Question

NAME = "0123456789abcdef" * 2
QUESTION = Question("q", np.array([3, 1, 4, 1, 5, 9, 2, 6], dtype=np.int32), 2)
IDS = QUESTION.tokens[:-1].tolist()
WIDTH = 5
STATES = torch.linspace(-3, 3, len(IDS) * WIDTH).reshape(len(IDS), WIDTH)
DUE = STATES[2:]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / f"opd-hidden-{NAME}"
    plugin.make_folder(str(path))
    return path


def taken(folder, chunks, states=STATES, start=2, name=NAME):
    """The reference to a segment of `states` that came in `chunks` (first, end)."""
    taking = SegmentRecorder(str(folder), {"segment": name, "start": start}, len(IDS))
    for first, end in chunks:
        taking.add_rows(first, states[first:end])
    return taking.finish(IDS)


def segments(folder):
    return sorted(path.name for path in folder.iterdir() if plugin.SEGMENT_NAME.fullmatch(path.name))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 7)],
        [(2, 7)],
        [(0, 1), (1, 2), (2, 3), (3, 7)],
        [(1, 4), (4, 5), (5, 7)],
        [(0, 4), (0, 3), (3, 7)],  # given back in the middle, and begun anew
        [(0, 4), (2, 7)],  # the same, with a cached prefix then
    ],
)
def test_what_was_computed_in_chunks_is_read_as_one(folder, chunks, dtype):
    states = STATES.to(getattr(torch, dtype))
    said = taken(folder, chunks, states)
    assert said == {"segment": NAME, "rows": 5, "width": WIDTH, "dtype": dtype}
    content = (folder / NAME).read_bytes()
    assert len(content) == HEADER_BYTES + DUE.numel() * states.element_size()
    found = rows_of(content, NAME, QUESTION, WIDTH)
    assert found.dtype == np.float32
    assert np.array_equal(found, states[2:].float().numpy())


@pytest.mark.parametrize(
    ("chunks", "sentence"),
    [
        ([(3, 7)], "before position 3 were not computed"),
        ([(0, 3), (4, 7)], "before position 4 were not computed"),
        ([(-1, 3)], "before position -1 were not computed"),
        ([(0, 6)], "4 of 5 hidden states were computed"),
        ([(0, 2)], "0 of 5 hidden states were computed"),
        ([], "0 of 5 hidden states were computed"),
    ],
)
def test_rows_that_are_missing_are_said_and_leave_nothing(folder, chunks, sentence):
    assert sentence in taken(folder, chunks)["error"]
    assert segments(folder) == []


@pytest.mark.parametrize(
    "name", ["../" + NAME[3:], "/etc/passwd", "", NAME + "\n", NAME.upper(), NAME[1:] + "/", None, 7, "lock"]
)
def test_a_server_writes_under_no_other_name(folder, name):
    assert taken(folder, [(0, 7)], name=name) == {
        "error": "the name of the segment is not 32 hexadecimal digits"
    }


@pytest.mark.parametrize("start", [-1, 7, True, None, 1.0, "2"])
def test_a_server_takes_no_position_outside_of_the_prompt(folder, start):
    assert "not one of the 7" in taken(folder, [(0, 7)], start=start)["error"]


def test_a_name_that_is_taken_is_not_overwritten(folder):
    taken(folder, [(0, 7)])
    before = (folder / NAME).read_bytes()
    assert "File exists" in taken(folder, [(0, 7)], STATES * 2)["error"]
    assert (folder / NAME).read_bytes() == before


def test_a_request_that_is_given_up_leaves_nothing(folder):
    taking = SegmentRecorder(str(folder), {"segment": NAME, "start": 2}, len(IDS))
    taking.add_rows(0, STATES[:5])
    file = taking._file.fileno()
    del taking
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    assert segments(folder) == []


def test_a_full_disk_is_a_sentence(folder):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES + 40, before[1]))
    try:
        said = taken(folder, [(0, 3), (3, 7)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said == {"error": f"the hidden states cannot be written to {folder} (File too large)"}
    assert segments(folder) == []
    assert "cannot be written" in taken(folder / "gone", [(0, 7)])["error"]
    assert "hidden states of int8 have no form" in taken(folder, [(0, 7)], STATES.to(torch.int8))["error"]


def test_what_nobody_fetches_is_removed_after_a_while(folder):
    taken(folder, [(0, 7)])
    taken(folder, [(0, 7)], name=NAME[::-1])
    for old in (folder / NAME, folder / plugin.PROOF):
        os.utime(old, (1, 1))
    plugin.remove_expired(str(folder))
    assert segments(folder) == [NAME[::-1]]
    assert (folder / plugin.PROOF).exists()


def test_folders_of_servers_that_were_killed_go_and_others_stay(tmp_path):
    own, alive, ended, foreign = (tmp_path / f"opd-hidden-{digit * 32}" for digit in "abcd")
    plugin.make_folder(str(alive))
    code = "import opd_hidden_states, sys; opd_hidden_states.make_folder(sys.argv[1])"
    path = {"PYTHONPATH": os.path.dirname(plugin.__file__)}
    subprocess.run([sys.executable, "-c", code, str(ended)], check=True, env=path)
    assert ended.exists()
    foreign.mkdir()
    for path in (alive, ended, foreign):
        os.utime(path, (1, 1))
    plugin.make_folder(str(own))
    # `alive` is locked by this process, and nobody knows whose `foreign` is.
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["a", "b", "d"]
    with pytest.raises(OSError, match="File exists"):
        plugin.make_folder(str(alive))


def header(**changes):
    numbers = DUE.numpy().tobytes()
    fields = {
        "name": NAME,
        "dtype": "float32",
        "rows": 5,
        "width": WIDTH,
        "tokens": tokens_digest(IDS, 2),
        "digest": hashlib.sha256(numbers).digest(),
    }
    return SegmentHeader(**{**fields, **changes}).pack() + numbers


def signed(content):
    """A header whose own digest is right, whatever it says."""
    fields = content[: HEADER_BYTES - 32]
    return fields + hashlib.sha256(fields).digest() + content[HEADER_BYTES:]


def patched(at, form, value):
    content = bytearray(header())
    struct.pack_into(form, content, at, value)
    return signed(bytes(content))


NAN = DUE.clone()
NAN[3, 1] = float("nan")
HOSTILE = {
    "nothing": (b"", "fewer than its header"),
    "half a header": (header()[:100], "fewer than its header"),
    "a header alone": (header()[:HEADER_BYTES], "there are 144 bytes of 244"),
    "cut": (header()[:-1], "there are 243 bytes of 244"),
    "longer": (header() + b"\0", "it is no file of at most 244 bytes"),
    "a bit of the header": (header()[:20] + b"\x07" + header()[21:], "its header is damaged"),
    "a bit of the numbers": (header()[:-1] + b"\x01", "they are damaged"),
    "another kind of file": (signed(b"PK\x03\x04" + header()[4:]), "another form"),
    "a later version": (patched(8, "<I", 2), "another form"),
    "an unknown dtype": (patched(12, "<I", 3), "another form"),
    "a dtype far off": (patched(12, "<I", 2**32 - 1), "another form"),
    "no rows": (patched(16, "<Q", 0), r"shape is \[0, 5\]"),
    "rows without end": (patched(16, "<Q", 2**64 - 1), r"shape is \[18446744073709551615, 5\]"),
    "a width without end": (patched(24, "<Q", 2**63), r"shape is \[5, 9223372036854775808\]"),
    "another dtype": (header(dtype="bfloat16"), "there are 244 bytes of 194"),
    "another name": (header(name=NAME[::-1]), "another request"),
    "other tokens": (header(tokens=tokens_digest([1, *IDS[1:]], 2)), "another request"),
    "another position": (header(tokens=tokens_digest(IDS, 1)), "another request"),
    "not finite": (
        header(digest=hashlib.sha256(NAN.numpy().tobytes()).digest())[:HEADER_BYTES] + NAN.numpy().tobytes(),
        "not finite",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_segment_that_is_not_the_one_that_is_due_is_refused(folder, kind):
    content, sentence = HOSTILE[kind]
    (folder / NAME).write_bytes(content)
    with pytest.raises(UnavailableError, match=sentence) as caught:
        read(folder)
    assert caught.value.answered
    assert str(caught.value).startswith(("the hidden states that http://a:1 left", "http://a:1 left no"))
    assert segments(folder) == []  # also what is of no use is removed


def read(folder, name=NAME, answer=None):
    """What a client reads that has drawn `name`."""
    answer = {"meta_info": {KEY: [{"segment": NAME}]}} if answer is None else answer
    with HiddenSegment(Plugin(folder), QUESTION, WIDTH) as segment:
        segment.name = name
        return asyncio.run(segment.read_rows(SimpleNamespace(), SimpleNamespace(url="http://a:1"), answer))


def test_a_right_segment_is_read_and_gone(folder):
    taken(folder, [(0, 7)])
    assert np.array_equal(read(folder), DUE.numpy())
    assert segments(folder) == []
    with pytest.raises(UnavailableError, match=r"left no hidden states .*No such file"):
        read(folder)


def test_what_lies_in_place_of_a_segment_is_not_followed_or_waited_for(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(header())
    (folder / NAME).symlink_to(outside)
    with pytest.raises(UnavailableError, match="Too many levels of symbolic links"):
        read(folder)
    assert outside.exists()
    os.mkfifo(folder / NAME)
    with pytest.raises(UnavailableError, match="it is no file of at most 244 bytes"):
        read(folder)
    with open(folder / NAME, "wb") as file:
        file.truncate(2**40)  # takes no room, and no memory where it is refused
    with pytest.raises(UnavailableError, match="it is no file of at most 244 bytes"):
        read(folder)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (None, "refers to no hidden states"),
        ([], "refers to no hidden states"),
        ({"segment": NAME}, "refers to no hidden states"),
        ([7], "another form"),
        ([None], "another form"),
        ([{"error": "the disk\x1b[2J is full"}], r"the server says that the disk\\x1b\[2J is full"),
    ],
)
def test_a_reference_that_is_none_is_refused(said, sentence):
    with pytest.raises(UnavailableError, match=sentence):
        check_reference({"meta_info": {KEY: said}})


def test_the_width_is_known_before_the_rows():
    assert width_of({"meta_info": {}}) is None
    assert width_of({"meta_info": {KEY: [{"width": 5}]}}) == 5


def test_a_folder_counts_only_if_it_is_the_servers(tmp_path, monkeypatch):
    monkeypatch.setattr(hidden_segments, "SHARED", str(tmp_path))
    name = f"opd-hidden-{NAME}"
    proof = plugin.make_folder(str(tmp_path / name))
    assert hidden_segments._shared_folder(name, proof) == tmp_path / name
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / plugin.PROOF).write_text(proof)
    (tmp_path / f"opd-hidden-{NAME[::-1]}").symlink_to(tmp_path / "other")
    for wrong in (
        "other",
        "../" + name,
        f"opd-hidden-{NAME[::-1]}",
        f"opd-hidden-{'0' * 32}",
        name + "\n",
        None,
        1,
    ):
        assert hidden_segments._shared_folder(wrong, proof) is None
    for wrong in ("", proof[:-1], proof + "0", "\ud800", None, 7):
        assert hidden_segments._shared_folder(name, wrong) is None


def test_a_cached_prefix_ends_where_hidden_states_are_due():
    def request(asked, hidden=True):
        params = SimpleNamespace(custom_params={KEY: asked} if asked else None)
        return SimpleNamespace(sampling_params=params, return_hidden_states=hidden, origin_input_ids=IDS)

    asked = {"segment": NAME, "start": 2}

    def limit(of_cache, *told, **options):
        return plugin._limit_prefix(lambda _: of_cache, request(*told, **options))

    assert limit(6, asked) == 2
    assert limit(1, asked) == 1
    assert limit(6, asked, hidden=False) == 6
    assert limit(6, None) == 6
    assert limit(6, {"segment": NAME, "start": 9}) == 6


def test_the_plugin_leaves_alone_what_it_does_not_know(caplog):
    """Here is no SGLang at all, which has none of what it hooks."""
    assert not plugin.fits_sglang()
    assert "hidden states go as JSON: this SGLang has another sglang.srt.managers." in caplog.text
