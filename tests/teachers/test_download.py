"""A published model fetched whole: what lies in its folder is what was published, or it is fetched again."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
from tiny_published import publish

from opd.errors import CheckpointError
from opd.models.causal_lm import CausalLM
from opd.models.hf_folder import CHECKSUMS, ORIGIN
from opd.storage.files import file_digest
from opd.teachers.skeleton import download_model

LAYER = "layer.1.safetensors"


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> dict[str, str]:
    """The URLs of two models of the same form."""
    place = tmp_path_factory.mktemp("published")
    return {name: publish(tiny.model(seed=seed), place / name)[1] for seed, name in enumerate("ab")}


@pytest.fixture
def fetched(published, tmp_path) -> dict[str, Path]:
    return {name: download_model(url, tmp_path / "downloaded" / name) for name, url in published.items()}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(name: str):
    def damage(a: Path, b: Path) -> None:
        data = bytearray((a / name).read_bytes())
        data[-3] ^= 4
        (a / name).write_bytes(data)

    return damage


def cut(name: str):
    return lambda a, b: (a / name).write_bytes((a / name).read_bytes()[:-9])


def lose(name: str):
    return lambda a, b: (a / name).unlink()


def theirs(*names: str):
    return lambda a, b: [shutil.copy(b / name, a / name) for name in names]


def swap(a: Path, b: Path) -> None:
    a.rename(a.parent / "aside")
    b.rename(a)
    (a.parent / "aside").rename(b)


def change(a: Path, b: Path) -> None:
    config = json.loads((a / "config.json").read_text())
    (a / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))


def change_with_its_digest(a: Path, b: Path) -> None:
    change(a, b)
    listed = json.loads((a / CHECKSUMS).read_text())
    (a / CHECKSUMS).write_text(json.dumps(listed | {"config.json": file_digest(a / "config.json")}))


def a_file(a: Path, b: Path) -> None:
    shutil.rmtree(a)
    a.write_text("x")


DAMAGE = {
    "swapped": swap,
    "all but the origin swapped": lambda a, b: (swap(a, b), swap(a / ORIGIN, b / ORIGIN)),
    "flipped bit of weights": flip(LAYER),
    "flipped bit of the tokenizer": flip("tokenizer.json"),
    "flipped bit of the index": flip("model.safetensors.index.json"),
    "flipped bit of the digests": flip(CHECKSUMS),
    "flipped bit of the origin": flip(ORIGIN),
    "truncated": cut(LAYER),
    "truncated digests": cut(CHECKSUMS),
    "missing weights": lose(LAYER),
    "missing configuration": lose("config.json"),
    "missing digests": lose(CHECKSUMS),
    "missing origin": lose(ORIGIN),
    "config changed": change,
    "config changed, and its digest": change_with_its_digest,
    "another's weights": theirs(LAYER),
    "another's weights, and its digests": theirs(LAYER, CHECKSUMS),
    "a file more": lambda a, b: (a / "added_tokens.json").write_text("{}"),
    "empty": lambda a, b: [path.unlink() for path in a.iterdir()],
    "a file in its place": a_file,
    "not there": lambda a, b: shutil.rmtree(a),
}


@pytest.mark.some(8)
@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_not_what_was_published_is_fetched_again(published, fetched, what):
    whole = {name: content(folder) for name, folder in fetched.items()}
    assert CHECKSUMS in whole["a"]
    DAMAGE[what](fetched["a"], fetched["b"])
    for name, url in published.items():
        assert content(download_model(url, fetched[name])) == whole[name]
    assert sorted(path.name for path in fetched["a"].parent.iterdir() if path.is_dir()) == ["a", "b"]


def test_what_is_whole_is_not_fetched_again(published, fetched):
    before = {path: path.stat().st_ino for path in fetched["a"].iterdir()}
    assert download_model(published["a"], fetched["a"]) == fetched["a"]
    assert {path: path.stat().st_ino for path in fetched["a"].iterdir()} == before


@pytest.mark.parametrize("what", ["flipped bit of weights", "truncated", "missing weights", "config changed"])
def test_damage_after_that_is_seen_by_who_loads_it(fetched, what):
    DAMAGE[what](fetched["a"], fetched["b"])
    with pytest.raises(CheckpointError):
        CausalLM.from_pretrained(fetched["a"])


def test_a_newer_version_is_fetched(tmp_path):
    digests = []
    for seed in (0, 1):
        checkpoint, url = publish(tiny.model(seed=seed), tmp_path)
        found = CausalLM.from_pretrained(download_model(url, tmp_path / "downloaded"))
        assert found.digest() == CausalLM.from_pretrained(checkpoint).digest()
        digests.append(found.digest())
    assert digests[0] != digests[1]
