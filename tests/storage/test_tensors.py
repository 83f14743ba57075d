"""The tensor codec: exact round trips, and every kind of damage is named."""

import hashlib
from pathlib import Path

import pytest
import torch

from opd.errors import CheckpointError
from opd.storage.tensors import check_tensors, load_tensors, save_tensors


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 7, generator=generator)
    return {
        "weight": weight,
        "tied": weight,
        "transposed": weight.T,
        "half": weight.to(torch.bfloat16),
        "step": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "rng": torch.get_rng_state(),
        "parameter": torch.nn.Parameter(weight[1:3]),
    }


def test_round_trip_is_bit_equal_and_the_digest_is_the_files(tmp_path: Path) -> None:
    tensors = _tensors()
    digest = save_tensors(tmp_path / "a.safetensors", tensors)
    assert digest == hashlib.sha256((tmp_path / "a.safetensors").read_bytes()).hexdigest()
    loaded = load_tensors(tmp_path / "a.safetensors", digest)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor.detach()), name


def test_same_tensors_give_the_same_digest(tmp_path: Path) -> None:
    first = save_tensors(tmp_path / "a.safetensors", _tensors())
    assert first == save_tensors(tmp_path / "b.safetensors", _tensors())
    changed = _tensors() | {"step": torch.tensor(4)}
    assert first != save_tensors(tmp_path / "c.safetensors", changed)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.safetensors cannot be read"):
        load_tensors(tmp_path / "none.safetensors")


def test_a_flipped_byte_is_a_mismatch(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    digest = save_tensors(path, _tensors())
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"a\.safetensors is corrupt"):
        load_tensors(path, digest)


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
def test_truncation_is_an_error_even_without_a_digest(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "a.safetensors"
    save_tensors(path, _tensors())
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="truncated"):
        load_tensors(path)


@pytest.mark.parametrize("own", [{"a": (2, 3)}, {"a": (2, 3), "b": (4,), "c": ()}, {"a": (3, 2), "b": (4,)}])
def test_a_checkpoint_has_exactly_the_tensors_of_a_model(own: dict[str, tuple[int, ...]]) -> None:
    saved = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    check_tensors(saved, {"a": (2, 3), "b": (4,)}, "this model")
    with pytest.raises(CheckpointError, match="checkpoint and this model do not have the same tensors, "):
        check_tensors(saved, own, "this model")


def test_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        save_tensors(tmp_path / "file" / "a.safetensors", _tensors())
