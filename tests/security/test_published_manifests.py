"""Manifests written to lead elsewhere, to fill the memory or to hang: each is refused with one sentence."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile
import pytest
from full import cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opd.errors import StorageError
from opd.storage.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_TENSORS,
    block_size,
    manifest_digest,
    parse_manifest,
    seal_document,
    to_document,
)
from opd.storage.object_store import ObjectStore
from opd.storage.published import PublishedModel
from opd.teachers.skeleton import download_model, read_head, small_files
from opd.teachers.unit_gather import UnitGather

UNIT, TENSOR = "layer.0", "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("original")
    return folder / "store", hostile.made(folder)


def use(url: Path, target: Path) -> None:
    """Everything that is done with a published model: what the doctor reads, every unit, the whole folder."""
    with small_files(str(url)) as folder:
        assert folder != target
    with PublishedModel.open(url) as model:
        model.tokenizer_files()
        for name, unit in model.manifest.units.items():
            model.read_unit(name, memoryview(bytearray(unit.nbytes)))
    download_model(str(url), target)


def everything(folder: Path) -> dict[str, Any]:
    """Every name below `folder`, with the size and content of files."""
    return {
        str(path): path.read_bytes()
        if path.is_file() and path.stat().st_size < 2**20
        else path.lstat().st_size
        for path in folder.rglob("*")
    }


def refused(store: Path, tmp_path: Path) -> str:
    """The sentence with which the model in `store` is refused; nothing may have been written."""
    before = everything(tmp_path)
    with pytest.raises(StorageError) as caught:
        use(store, tmp_path / "target")
    assert everything(tmp_path) == before
    sentence = str(caught.value)
    assert len(sentence) < 600
    assert sentence.isprintable()
    return sentence


def test_the_model_that_is_changed_below_is_a_good_one(original, tmp_path):
    use(original[0], tmp_path / "target")
    assert (tmp_path / "target" / "tokenizer.json").is_file()


def test_a_model_published_anew_after_a_harmless_change_is_read(original, tmp_path):
    """What the table below shows is due to the change and not to the way it is planted."""
    document = hostile.changed(original[1], hostile.at("config", "note", to="another"))
    hostile.plant(document, hostile.resealed(document, digest=True), original[0], tmp_path / "store")
    use(tmp_path / "store", tmp_path / "target")


Change = Callable[[dict[str, Any]], None]
at, renamed = hostile.at, hostile.renamed


def named_cases() -> Iterator[tuple[str, Change]]:
    for name in hostile.NAMES:
        yield f"tokenizer {name!r}", renamed("tokenizer", "files", "tokenizer.json", to=name)
        yield f"tensor {name!r}", renamed("units", UNIT, "tensors", TENSOR, to=name)
        yield f"unit {name!r}", unit_named(name)
        yield f"shard file {name!r}", renamed("files", "shard-00000-of-00002.bin", to=name)


def sized_cases() -> Iterator[tuple[str, Change]]:
    places: list[tuple[str | int, ...]] = [
        ("shards",), ("order",), ("order", 1), ("files",), ("files", "shard-00000-of-00002.bin"),
        ("units",), ("units", UNIT), ("units", UNIT, "nbytes"), ("units", UNIT, "block_bytes"),
        ("units", UNIT, "blocks"), ("units", UNIT, "checksum"), ("units", UNIT, "tensors", TENSOR),
        *(("units", UNIT, "tensors", TENSOR, index) for index in range(4)),
        ("units", UNIT, "tensors", TENSOR, 1, 0), ("tokenizer",), ("tokenizer", "files", "tokenizer.json"),
        ("tokenizer", "files", "tokenizer.json", "sha256"), ("head",), ("head", "vocabulary"),
        ("head", "hidden"), ("head", "bias"),
    ]  # fmt: skip
    for place in places:
        for value in hostile.SIZES:
            yield f"{'.'.join(map(str, place))} {value!r}", at(*place, to=value)
    for value in hostile.SIZES:
        if type(value) is not int or not 0 <= value < 2**20:  # else it is for the store to say
            yield f"size {value!r}", at("tokenizer", "files", "tokenizer.json", "size", to=value)


def other_cases() -> Iterator[tuple[str, Change]]:
    shapes = [2**40] * 3, [2**62, 4], [-32, -32], [0] * 9, [[32], 32], [32.0, 32], ["32", 32], [1] * 10**5
    for shape in shapes:
        yield f"shape {shape!r}", at("units", UNIT, "tensors", TENSOR, 1, to=shape)
    for dtype in ("F4", "f16", "object", "../", "", "O" * 999):
        yield f"dtype {dtype!r}", at("units", UNIT, "tensors", TENSOR, 0, to=dtype)
    for key in ("scale", "softcap"):
        for value in ("1", True, [], {}, 10**400):
            yield f"head.{key} {value!r}", at("head", key, to=value)
    for key in ("config", "generation_config"):
        for value in ([], "x", 1, nested(20), {"a": nested(60)}):
            yield f"{key} {value!r}", at(key, to=value)
    yield "a tensor twice", at("units", UNIT, "tensors", TENSOR.upper(), to=["F32", [1], 0, 4])
    yield "overlapping", at("units", UNIT, "tensors", f"{TENSOR}2", to=["F32", [32, 32], 0, 4096])
    yield "a unit twice", lambda document: document["order"].insert(1, "layer.0")
    yield "no head unit", lambda document: document["units"].pop("head")
    yield "an unknown key", at("more", to=1)
    yield "an unknown key of a unit", at("units", UNIT, "path", to="/etc/passwd")
    yield "layers that are not in order", lambda document: document["order"].reverse()
    for key in ("shards", "units", "order", "head", "config", "generation_config", "tokenizer", "files"):
        yield f"no {key}", lambda document, key=key: document.pop(key)


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {"a": [value]}
    return value


def unit_named(name: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document["units"][name] = document["units"].pop(UNIT)
        document["order"][1] = name

    return change


CASES = {name[:60]: change for table in (named_cases, sized_cases, other_cases) for name, change in table()}


def test_there_are_enough_cases():
    assert len(CASES) >= 500


@pytest.mark.parametrize("start", range(10))
def test_a_changed_manifest_is_refused(original, start):
    for name in list(CASES)[start::10]:
        changed = hostile.changed(original[1], CASES[name])
        if json.dumps(changed) == json.dumps(original[1]):
            continue  # this case changes nothing here
        for digest in (False, True):
            try:
                manifest = hostile.resealed(changed, digest=digest)
            except ValueError:
                continue  # JSON cannot say it
            sentence = what_is_said_of(manifest)
            assert sentence is not None, f"{name} was not noticed"
            assert "here" in sentence
            assert len(sentence) < 400
            assert sentence.isprintable()


def what_is_said_of(manifest: bytes) -> str | None:
    """The sentence with which it is refused."""
    try:
        parse_manifest(manifest, "here")
    except StorageError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "name",
    ["tokenizer '../escaped'", "tokenizer '/tmp/escaped'", "tokenizer 'config.json'", "unit '../../escaped'",
     "shards 1000000000.0", "shards 1", "order []"],
)  # fmt: skip
@pytest.mark.parametrize("digest", [False, True])
def test_nothing_is_written_or_read_for_a_changed_manifest(original, tmp_path, name, digest):
    """The same from outside: the doctor's look, every unit, the whole folder."""
    store, document = original
    manifest = hostile.resealed(hostile.changed(document, CASES[name]), digest=digest)
    hostile.plant(document | {"digest": "0" * 64}, manifest, store, tmp_path / "store")
    assert "manifest.json" in refused(tmp_path / "store", tmp_path)


@pytest.mark.parametrize("size", [0, 1, 63, 2**20])
def test_a_small_file_of_another_size_than_the_store_reports_is_not_read(original, tmp_path, size):
    store, document = original
    changed = hostile.changed(document, hostile.at("tokenizer", "files", "tokenizer.json", "size", to=size))
    hostile.plant(changed, hostile.resealed(changed, digest=True), store, tmp_path / "store")
    assert "bytes where its manifest says" in refused(tmp_path / "store", tmp_path)


@pytest.mark.slow
def test_a_manifest_of_a_third_of_a_million_entries_is_refused(original):
    _, document = original
    entries = {f"{TENSOR}.{i}": ["F32", [0], 0, 0] for i in range(MAX_TENSORS + 1)}
    unit = document["units"][UNIT] | {"tensors": entries}
    with pytest.raises(StorageError, match=r"it has more than \d+ tensors"):
        parse_manifest(seal_document(document | {"units": document["units"] | {UNIT: unit}}), "here")


@settings(max_examples=cases(150), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_changed_is_refused_or_is_what_was_published(original, data):
    """Any value of the manifest replaced by any other, with a seal and a digest that fit."""
    _, document = original
    places = list(paths(document))
    values = st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    )
    changed = document
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(places))
        try:
            changed = hostile.changed(changed, hostile.at(*place, to=data.draw(values)))
            changed = json.loads(json.dumps(changed))  # a list that became an object has no numbers as keys
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took the place away
    sealed = hostile.resealed(changed, digest=True)
    sentence = what_is_said_of(sealed)
    if sentence is not None:
        assert "here" in sentence
        return
    manifest = parse_manifest(sealed, "here")
    # What passes can differ only in what is not a name, a place or a size.
    again = to_document(manifest)
    free = ("config", "generation_config", "digest", "head")
    assert seal_document(again) == sealed
    for key in set(document) - set(free) - {"units", "tokenizer"}:
        assert again[key] == document[key]
    assert set(again["tokenizer"]["files"]) <= set(document["tokenizer"]["files"])


def paths(value: Any, before: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*before, key)
        yield from paths(item, (*before, key))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[]", b"null", b"1", b'"x"', b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{" * 10**5,
        b"[" * 10**6, b'{"a":' * 10**5 + b"1" + b"}" * 10**5, b'{"format":NaN}', b'{"format":1e999}',
        b"9" * 10**5,
        b'{"format":"opd-published-model","format":"opd-published-model"}',
        b'{"format":"opd-published-model"}',
        b'{"format":"opd-published-model","format_version":1}', b"[" + b"[]," * 10**5 + b"[]]", b'"\\ud800"',
        b'{"format":"opd-published-model","format_version":1,"sha256":NaN}', b"\0" * 1000,
    ],
)  # fmt: skip
def test_bytes_that_are_no_manifest_are_refused(original, tmp_path, data):
    store, document = original
    hostile.plant(document, seal_document(document), store, tmp_path / "store")
    for name in ("manifest.json", "latest"):
        (path,) = [path for path in (tmp_path / "store").rglob(name)]
        kept = path.read_bytes()
        path.write_bytes(data)
        assert name in refused(tmp_path / "store", tmp_path)
        path.write_bytes(kept)


@pytest.mark.parametrize(
    "version", [*hostile.NAMES, "0" * 16, "0" * 16 + "-0", "0" * 16 + "-99999", None, 1, []]
)
def test_latest_points_to_versions_only(original, tmp_path, version):
    store, document = original
    hostile.plant(document, seal_document(document), store, tmp_path / "store")
    pointer = {
        "format": document["format"],
        "format_version": document["format_version"],
        "version": version,
        "digest": "",
    }
    (tmp_path / "store" / "latest").write_bytes(seal_document(pointer))
    sentence = refused(tmp_path / "store", tmp_path)
    assert "names no version" in sentence or "bytes where at most" in sentence


@pytest.mark.parametrize("name", ["latest", "manifest.json", "tokenizer.json", "shard-00001-of-00002.bin"])
@pytest.mark.parametrize("kind", ["huge", "fifo", "folder", "endless", "missing"])
def test_an_object_of_another_size_or_kind_is_refused_before_it_is_read(original, tmp_path, name, kind):
    store, document = original
    hostile.plant(document, seal_document(document), store, tmp_path / "store")
    (path,) = [path for path in (tmp_path / "store").rglob(name)]
    path.unlink()
    if kind == "huge":
        with path.open("wb") as file:
            file.truncate(2**40)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    refused(tmp_path / "store", tmp_path)


def test_a_unit_larger_than_the_memory_is_refused_before_room_for_it_is_made(original, tmp_path):
    """2**40 bytes that the store does hold, in a file without blocks on the disk."""
    store, document = original
    shards, rows = document["shards"], 2**35
    head = document["units"]["head"]
    nbytes, block = 32 * rows, block_size(32 * rows, shards)
    entry = head | {"nbytes": nbytes, "block_bytes": block, "blocks": "00" * 16 * -(-nbytes // block)}
    entry["tensors"] = {"lm_head.weight": ["I8", [rows, 32], 0, nbytes]}
    changed = document | {
        "units": document["units"] | {"head": entry},
        "head": document["head"] | {"vocabulary": rows},
    }
    files = {name: size + (nbytes - head["nbytes"]) // shards for name, size in document["files"].items()}
    changed["files"] = files
    changed["digest"] = manifest_digest(changed)
    sealed = seal_document(changed)
    assert len(sealed) < MAX_MANIFEST_BYTES
    parse_manifest(sealed, "here")
    hostile.plant(changed, sealed, store, tmp_path / "store")
    for name, size in files.items():
        os.truncate(next((tmp_path / "store").rglob(name)), size)
    import torch

    with PublishedModel.open(tmp_path / "store") as model:
        for ask in (
            lambda: download_model(str(tmp_path / "store"), tmp_path / "target"),
            lambda: read_head(model, torch.float32, torch.device("cpu")),
            lambda: UnitGather(torch.device("cpu"), None).required_bytes(model, "head"),
        ):
            with pytest.raises(StorageError, match=r"bytes of memory; check that it is the model"):
                ask()
    assert not (tmp_path / "target").exists()


def test_other_weights_under_an_old_digest_are_refused(original, tmp_path):
    """Blocks are not part of the digest: what is read whole is compared with what is."""
    store, document = original
    import xxhash

    changed = hostile.changed(document, lambda _: None)
    entry = changed["units"]["norm"]
    data = bytes(entry["nbytes"])
    step = entry["block_bytes"]
    entry["blocks"] = "".join(
        xxhash.xxh3_128(data[low : low + step]).hexdigest() for low in range(0, len(data), step)
    )
    hostile.plant(changed, seal_document(changed), store, tmp_path / "store")
    with PublishedModel.open(tmp_path / "store") as model:
        for extent in model.manifest.rank_extents("norm", 0, 1):
            with (tmp_path / "store" / model.manifest.shard_path(extent.shard)).open("r+b") as file:
                file.seek(extent.offset)
                file.write(data[extent.start : extent.stop])
        with pytest.raises(StorageError, match=r"norm of .* is not what was published under its digest"):
            model.read_unit("norm", memoryview(bytearray(entry["nbytes"])))


def leads_out(path: str) -> bool:
    parts = path.split("/")
    odd = not path.isprintable() or "\\" in path or {"", ".", ".."} & set(parts)
    return bool(odd) or any(len(part.encode()) > 255 for part in parts)


@pytest.mark.parametrize(
    "path", list(filter(leads_out, [*hostile.NAMES, "a/../b", "a/./b", "a/" + "b" * 256]))
)
def test_a_store_has_no_path_that_leads_out_of_it(tmp_path, path):
    (tmp_path / "store").mkdir()
    for url in (tmp_path / "store", "memory://store"):
        with ObjectStore.open(url) as store:
            for act in (store.size, store.exists, store.delete, store.get, lambda p: store.put(p, b"x")):
                with pytest.raises(StorageError, match="names no object below a store"):
                    act(path)
    assert everything(tmp_path) == {str(tmp_path / "store"): (tmp_path / "store").lstat().st_size}


@pytest.mark.parametrize("link", ["files", ""])
def test_publishing_does_not_follow_a_link_out_of_the_store(original, tmp_path, link):
    document = original[1]
    (tmp_path / "elsewhere").mkdir()
    version = f"{document['digest'][:16]}-2"
    place = tmp_path / "store" / version / link
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path / "elsewhere")
    from opd.storage.publish import publish

    with (
        ObjectStore.open(tmp_path / "store") as store,
        pytest.raises(StorageError, match="where a link leads"),
    ):
        publish(original[0].parent / "checkpoint", store, shards=2, form=hostile.FORM)
    assert list((tmp_path / "elsewhere").iterdir()) == []
