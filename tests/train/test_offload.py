"""What the trainer puts away comes back as it was, or not at all."""

import errno
import os
from pathlib import Path

import pytest
import tiny
import torch

from opd.errors import CheckpointError
from opd.train import offload
from opd.train.offload import OffloadBuffer
from opd.train.terms import CrossEntropyTerm
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, TokenTerms

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def tensors() -> list[torch.Tensor]:
    """Of several forms, one of more than a piece."""
    drawn = torch.Generator().manual_seed(0)
    made = [torch.randint(-99, 99, shape, generator=drawn) for shape in ((3, 5), (), (1, 1), (700, 400))]
    return [one.to(dtype) for one in made for dtype in DTYPES]


def test_tensors_are_the_same_and_take_no_memory_meanwhile(tmp_path):
    given = tensors()
    expected = [one.clone() for one in given]
    identity = [id(one) for one in given]
    shelf = OffloadBuffer(tmp_path)
    for _ in range(2):
        shelf.put("a", [*given, given[0]])
        shelf.put("a", [])  # is away already
        assert sum(one.untyped_storage().nbytes() for one in given) == 0
        assert list(tmp_path.iterdir()) == []  # the file has no name
        shelf.take("b")
        shelf.take("a")
        shelf.take("a")
        assert [id(one) for one in given] == identity
        assert all(torch.equal(one, other) for one, other in zip(given, expected, strict=True))


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_what_is_damaged_is_not_taken_back(tmp_path, damage):
    shelf = OffloadBuffer(tmp_path)
    shelf.put("moments", tensors())
    file = shelf._away["moments"][2]._file  # type: ignore[attr-defined]
    said = {"changed": "is not what was written", "cut": "was cut short", "gone": "cannot be read"}[damage]
    if damage == "changed":
        os.pwrite(file.fileno(), b"x", 12_345)
    elif damage == "cut":
        file.truncate(12_345)
    else:
        folder = os.open(tmp_path, os.O_RDONLY)
        os.dup2(folder, file.fileno())  # which cannot be read
        os.close(folder)
    with pytest.raises(CheckpointError, match=rf"what the trainer had put away in .*{said}.*--resume"):
        shelf.take("moments")


def test_a_full_disk_leaves_everything_where_it_is(tmp_path, monkeypatch):
    given = tensors()
    expected = [one.clone() for one in given]

    def full(dir: Path, buffering: int):
        file = open(Path(dir) / "there", "wb", buffering=buffering)  # noqa: SIM115

        class Full:
            def __enter__(self):
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def write(self, part: memoryview) -> int:
                if file.tell() > 1000:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return file.write(part[:100])  # as a disk that is nearly full does

        return Full()

    monkeypatch.setattr(offload.tempfile, "TemporaryFile", full)
    shelf = OffloadBuffer(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        shelf.put("weights", given)
    shelf.take("weights")
    assert all(torch.equal(one, other) for one, other in zip(given, expected, strict=True))


def batch() -> RolloutBatch:
    samples = tiny.samples([(3, 4), (2, 6)])
    terms = [TokenTerms.zeros(len(sample.response_ids)) for sample in samples]
    for term in terms:
        term.ce_weight = torch.ones(len(term.ce_weight)).numpy()
    return RolloutBatch(samples, terms)


def learner(shelf: OffloadBuffer | None) -> TorchBackend:
    training = tiny.training([CrossEntropyTerm()])
    return TorchBackend(tiny.model(), training if shelf is None else offloaded(training, shelf))


def offloaded(training, shelf: OffloadBuffer):
    from dataclasses import replace

    return replace(training, shelf=shelf)


def test_a_back_end_wakes_for_whatever_is_asked_of_it(tmp_path):
    """Steps, log-probabilities, weights and checkpoints are those of one that never rests."""
    there, away = learner(None), learner(OffloadBuffer(tmp_path))
    for _ in range(3):
        for backend in (there, away):
            backend.offload_state()
            backend.forward_backward(batch())
            backend.step(1e-2)
            backend.offload_state(weights=False)
            assert backend.resident()["trainer_gradients"] == 0
    assert away.resident()["trainer_moments"] == 0 < away.resident()["trainer_weights"]
    away.offload_state()
    assert away.resident()["trainer_weights"] == sum(b.nbytes for b in away.model.module.buffers())
    for ask in ("own_logprobs", "digest", "state", "weights"):
        away.offload_state()
        expected, found = ((answers(one, ask)) for one in (there, away))
        assert torch.equal(found, expected), ask
    away.offload_state()
    fresh = learner(None)
    fresh.load_state(away.state())  # type: ignore[arg-type]
    away.offload_state()
    away.load_state(fresh.state())  # type: ignore[arg-type]
    for backend in (there, away):
        backend.forward_backward(batch())
        backend.step(1e-2)
    assert away.digest() == there.digest()
    away.offload_state()
    away.close()


def test_a_checkpoint_never_has_weights_and_moments_there_together(tmp_path, monkeypatch):
    backend = learner(OffloadBuffer(tmp_path))
    backend.forward_backward(batch())
    backend.step(1e-2)
    backend.offload_state()
    seen, take = [], OffloadBuffer.take

    def noted(self: OffloadBuffer, name: str) -> None:
        take(self, name)
        seen.append(backend.resident())

    monkeypatch.setattr(OffloadBuffer, "take", noted)
    expected = learner(None)
    expected.load_state(backend.state())  # type: ignore[arg-type]
    buffers = sum(buffer.nbytes for buffer in backend.model.module.buffers())
    assert max(one["trainer_weights"] for one in seen) > buffers
    assert max(one["trainer_moments"] for one in seen) > 0
    assert not [one for one in seen if one["trainer_weights"] > buffers and one["trainer_moments"]]
    assert answers(expected, "state").equal(answers(backend, "state"))
    backend.close()


def answers(backend: TorchBackend, ask: str) -> torch.Tensor:
    """What the back end says, as one tensor."""
    if ask == "own_logprobs":
        return torch.cat([torch.from_numpy(one) for one in backend.local_logprobs(batch().samples)])
    if ask == "digest":
        return torch.frombuffer(bytearray.fromhex(backend.digest()), dtype=torch.uint8)
    if ask == "weights":
        return torch.cat([tensor.flatten() for _, tensor in backend.weights()])
    state = backend.state()
    return torch.cat([tensor.double().flatten() for file in state.values() for tensor in file.values()])  # type: ignore[union-attr]
