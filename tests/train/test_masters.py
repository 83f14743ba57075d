"""Layers in 16 bits over float32 masters in one process: what FSDP2 does on a world of one, without it."""

from collections.abc import Iterator

import backend_ranks
import pytest
import torch
import torch.distributed as dist

from opd.config import TrainConfig
from opd.models.adapters import AdaptedLM
from opd.models.causal_lm import CausalLM, held_bytes
from opd.ranks import Ranks, process_group
from opd.train.backend import TrainingSettings
from opd.train.backends import open_backend
from opd.train.fsdp_backend import FSDPBackend
from opd.train.megatron_optimizer import SlicedAdamW, Slices
from opd.train.offload import OffloadBuffer
from opd.train.torch_backend import MastersBackend, TorchBackend

LR = 1e-3


def student(adapters: bool) -> CausalLM:
    model = backend_ranks.student()
    model.module.bfloat16()
    if not adapters:
        model.module.float()
        return model
    adapted = AdaptedLM(model, backend_ranks.LORA, "base")
    adapted.keep_adapters_in(torch.float32)
    return adapted


def training(shelf: OffloadBuffer | None = None) -> TrainingSettings:
    terms = backend_ranks.terms()
    return TrainingSettings(backend_ranks.OPTIM, backend_ranks.BATCH, backend_ranks.TEMPERATURE, terms, shelf)


def made(kind: str, adapters: bool, dtype: torch.dtype = torch.bfloat16) -> TorchBackend:
    if kind == "FSDP2":
        return FSDPBackend(student(adapters), training(), Ranks(), dtype)
    return MastersBackend(student(adapters), training(), dtype)


def five_steps(backend: TorchBackend, first: int = 0) -> list[dict[str, float]]:
    batches = [backend_ranks.batch(step) for step in range(first, first + 5)]
    return [backend.forward_backward(batch) | backend.step(LR) for batch in batches]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with process_group():
        yield


@pytest.mark.some(2)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_five_steps_are_those_of_fsdp2(adapters: bool, dtype: torch.dtype) -> None:
    ours, theirs = made("masters", adapters, dtype), made("FSDP2", adapters, dtype)
    before = {name: tensor.clone() for name, tensor in ours.state()["model"].items()}
    for mine, other in zip(five_steps(ours), five_steps(theirs), strict=True):
        assert mine == pytest.approx(other, rel=1e-6)
    kept, expected = ours.state(), theirs.state()
    for file in ("model", "optimizer"):
        assert kept[file].keys() == expected[file].keys()
        for name, tensor in kept[file].items():
            torch.testing.assert_close(tensor, expected[file][name], rtol=1e-6, atol=1e-9)
    learnt = [name for name, tensor in kept["model"].items() if not torch.equal(tensor, before[name])]
    assert len(learnt) >= len(before) - 1  # all but the digest of a base
    assert {kept["model"][name].dtype for name in learnt} == {torch.float32}
    sent = list(zip(ours.weights(), theirs.weights(), strict=True))
    assert all(mine[0] == other[0] and mine[1].dtype == other[1].dtype for mine, other in sent)


@pytest.mark.some(2)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("kinds", [("masters", "FSDP2"), ("FSDP2", "masters")])
def test_a_run_begun_with_one_goes_on_with_the_other(
    kinds: tuple[str, str], adapters: bool, tmp_path
) -> None:
    first = made(kinds[0], adapters)
    five_steps(first)
    backend_ranks.save_state(tmp_path, first.state())
    second = made(kinds[1], adapters)
    second.load_state(backend_ranks.read_state(tmp_path))
    for mine, other in zip(five_steps(second, 5), five_steps(first, 5), strict=True):
        assert mine == pytest.approx(other, rel=1e-6)


def test_one_process_in_mixed_precision_needs_no_fsdp2(tmp_path) -> None:
    for precision, kind in (("mixed", MastersBackend), ("pure", TorchBackend)):
        train = TrainConfig(precision=precision)
        opened = open_backend(
            lambda dtype, empty=False: student(False), train, training(), Ranks(), dtype="bfloat16"
        )
        with opened as backend:
            assert type(backend) is kind


def test_a_frozen_base_is_there_once() -> None:
    plain = student(True)
    frozen = held_bytes(p for p in plain.module.parameters() if not p.requires_grad)
    backend = MastersBackend(plain, training(), torch.bfloat16)
    learns = sum(master.nbytes for master in backend._masters)
    assert held_bytes(backend.local_tensors().weights) == frozen + learns + learns // 2


def test_what_is_put_away_comes_back_bit_for_bit(tmp_path) -> None:
    stays = made("masters", False)
    goes = MastersBackend(student(False), training(OffloadBuffer(tmp_path)), torch.bfloat16)
    for step in range(3):
        for backend in (stays, goes):
            backend.offload_state()
            backend.forward_backward(backend_ranks.batch(step))
            backend.step(LR)
    goes.offload_state()
    assert held_bytes(goes.local_tensors().weights) == 0
    for mine, other in zip(goes.state()["model"].values(), stays.state()["model"].values(), strict=True):
        assert torch.equal(mine, other)
    goes.close()


def test_a_gradient_that_is_not_finite_leaves_masters_and_shadows_as_they_were() -> None:
    backend = made("masters", False)
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    backend.forward_backward(backend_ranks.batch(0))
    gradient = backend._masters[0].grad
    assert gradient is not None
    gradient[0] = float("nan")
    with pytest.raises(Exception, match="the gradient norm is nan"):
        backend.step(LR)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.weights())
    assert all(p.grad is None for p in (*backend._masters, *backend._shadows))


def test_a_parameter_that_two_stages_have_counts_once_in_the_gradient_norm() -> None:
    weights = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("embedding", "head")}
    for weight in weights.values():
        weight.main_grad = torch.tensor([3.0, 4.0])  # type: ignore[attr-defined]
    assert dist.group.WORLD is not None
    slices = Slices(weights, dict.fromkeys(weights, False), dist.group.WORLD, again="head")
    assert SlicedAdamW(slices, backend_ranks.OPTIM, float32=False).gradient_norm() == 5.0
