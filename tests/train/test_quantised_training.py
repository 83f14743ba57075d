"""`model.quantize`: layers compute with the numbers of FP8, beside float32 masters that are trained."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import backend_ranks
import expert_ranks
import pytest
import tiny_types
import torch
from quantised import E4M3_CODES
from rank_processes import run_ranks
from safetensors.torch import load_file
from test_sharded import said
from torch import Tensor

from opd.config import TrainConfig
from opd.errors import TrainingError
from opd.models.causal_lm import CausalLM, held_bytes
from opd.models.converted_folder import FP8Weights
from opd.models.hf_folder import quantisation_in
from opd.ranks import Ranks, process_group
from opd.train.backend import TrainingSettings
from opd.train.backends import open_backend
from opd.train.fsdp_backend import FSDPBackend
from opd.train.optimizer import MovingAverage
from opd.train.torch_backend import MastersBackend, TorchBackend

LR = 3e-3
WIDE = {"hidden_size": 160, "intermediate_size": 300}
"""Sides that 128 does not divide, and of which two ranks cut blocks."""
FINITE = E4M3_CODES[~E4M3_CODES.isnan()].unique()


def nearest(matrix: Tensor) -> Tensor:
    """[R, C] float64: the numbers of FP8 in blocks, found by search among all codes."""
    found = matrix.double().clone()
    for row in range(0, matrix.shape[0], 128):
        for column in range(0, matrix.shape[1], 128):
            block = found[row : row + 128, column : column + 128]
            scale = torch.exp2(torch.ceil(torch.log2(block.abs().max() / 448)))
            above = torch.searchsorted(FINITE, block / scale).clamp(1, len(FINITE) - 1)
            low, high = FINITE[above - 1], FINITE[above]
            lower, upper = block / scale - low, high - block / scale
            tied = (lower == upper) & (above % 2 == 1)  # to the even code
            block.copy_(torch.where((lower < upper) | tied, low, high) * scale)
    return found


def is_rounded(name: str) -> bool:
    return name.endswith("_proj.weight")


def training(**changes) -> TrainingSettings:
    return replace(backend_ranks.training(), quantize="fp8", **changes)


def opened(kind: str, dtype: torch.dtype = torch.float32, **changes) -> TorchBackend:
    model = backend_ranks.student(**(WIDE | changes))
    if kind == "FSDP2":
        return FSDPBackend(model, training(), Ranks(), dtype)
    return MastersBackend(model, training(), dtype)


def assert_rounded(weights: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> None:
    """What layers hold is the nearest number of FP8 to each master, and the other weights are the masters."""
    assert weights.keys() == masters.keys()
    assert any(map(is_rounded, weights))
    for name, weight in weights.items():
        if is_rounded(name):
            assert torch.equal(weight.double(), nearest(masters[name])), name
        else:
            assert torch.equal(weight, masters[name].to(weight.dtype)), name


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with process_group():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["masters", "FSDP2"])
def test_layers_hold_the_numbers_of_fp8_after_every_step(kind: str, dtype: torch.dtype) -> None:
    backend = opened(kind, dtype)
    for step in range(3):
        assert_rounded(dict(backend.weights()), backend.state()["model"])
        backend.forward_backward(backend_ranks.batch(step))
        backend.step(LR)
    moved = [name for name, one in backend_ranks.student(**WIDE).weights() if is_rounded(name)]
    first = dict(backend_ranks.student(**WIDE).weights())
    assert all(not torch.equal(backend.state()["model"][name], first[name]) for name in moved)


@pytest.mark.parametrize("kind", ["masters", "FSDP2"])
def test_the_gradient_of_the_numbers_moves_the_masters(kind: str) -> None:
    """Straight through, bit for bit: that of a plain student with those numbers, and AdamW on the masters."""
    backend, plain = opened(kind), TorchBackend(backend_ranks.student(**WIDE), backend_ranks.training())
    plain.gradient_total = backend.gradient_total  # the head's, in one order
    before = {name: one.clone() for name, one in backend.state()["model"].items()}
    plain.model.load_weights((n, nearest(t).float() if is_rounded(n) else t) for n, t in before.items())
    for one in (backend, plain):
        one.forward_backward(backend_ranks.batch(0))
    wanted = {name: p.grad.clone() for name, p in plain.model.module.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in backend.model.module.named_parameters()}
    if kind == "masters":
        found = {name: p.grad for name, p in backend._parameters.items()}
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        ours = found[name]
        assert ours is not None
        assert torch.equal(getattr(ours, "_local_tensor", ours), gradient), name
    plain.model.load_weights(before.items())
    assert backend.step(LR)["grad_norm"] == pytest.approx(plain.step(LR)["grad_norm"], rel=1e-6)
    after = backend.state()["model"]
    for name, weight in plain.weights():
        torch.testing.assert_close(after[name], weight, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kinds", [("masters", "masters"), ("FSDP2", "FSDP2"), ("masters", "FSDP2")])
def test_a_stage_goes_on_from_its_masters(kinds: tuple[str, str], tmp_path: Path) -> None:
    first = opened(kinds[0])
    backend_ranks.train(first, 0, 2)
    backend_ranks.save_state(tmp_path, first.state())
    second = opened(kinds[1], seed=1)
    second.load_state(backend_ranks.read_state(tmp_path))
    assert second.digest() == first.digest()
    found, expected = backend_ranks.train(second, 2, 4), backend_ranks.train(first, 2, 4)
    if kinds[0] == kinds[1]:
        assert found == expected
        assert second.digest() == first.digest()
    else:
        backend_ranks.assert_same(found[:1], expected[:1])


@pytest.mark.parametrize("kind", ["masters", "FSDP2"])
def test_a_teacher_that_is_the_average_is_of_fp8_too(kind: str) -> None:
    backend = opened(kind)
    backend.keep_average(0.5)
    backend_ranks.train(backend, 0, 2)
    assert isinstance(backend.average, MovingAverage)
    before, state = backend.digest(), backend.state()
    with backend.averaged_weights():
        averages = {name: one for name, one in state["average"].items()}
        assert_rounded(dict(backend.weights()), state["model"] | averages)
    assert backend.digest() == before


def test_what_is_put_away_comes_back_bit_for_bit(tmp_path: Path) -> None:
    from opd.train.offload import OffloadBuffer

    model = backend_ranks.student(**WIDE)
    goes = FSDPBackend(model, training(shelf=OffloadBuffer(tmp_path)), Ranks(), torch.float32)
    stays = opened("FSDP2")
    assert backend_ranks.train(goes, 0, 2) == backend_ranks.train(stays, 0, 2)
    goes.offload_state()
    assert held_bytes(goes.local_tensors().weights) == 0
    assert goes.digest() == stays.digest()
    goes.close()


def test_weights_that_are_not_finite_end_the_stage() -> None:
    backend = opened("masters")
    backend._parameters["model.layers.0.mlp.up_proj.weight"].data[3, 5] = float("nan")
    with pytest.raises(TrainingError, match=r"up_proj.weight cannot become FP8: it holds NaN"):
        backend._follow_weights()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_process_keeps_masters_in_float32(dtype: str) -> None:
    with open_backend(
        lambda dtype, empty=False: backend_ranks.student(), TrainConfig(), training(), Ranks(), dtype=dtype
    ) as backend:
        assert type(backend) is MastersBackend
        assert {one.dtype for one in backend._parameters.values()} == {torch.float32}
        assert {str(one.dtype) for _, one in backend.weights()} == {f"torch.{dtype}"}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_routers_of_mixtures_are_not_rounded_and_experts_are(family: str, tmp_path: Path) -> None:
    folder = tiny_types.write_folder(family, tmp_path / "m")
    backend = MastersBackend(CausalLM.from_pretrained(folder), training(), torch.float32)
    masters = backend.state()["model"]
    same = {name for name, one in backend.weights() if torch.equal(one, masters[name])}
    rounded = masters.keys() - same
    assert {"self_attn.o_proj.weight", "mlp.experts.down_proj"} <= {n.split(".", 3)[3] for n in rounded}
    assert not any("gate.weight" in name or "router" in name or "norm" in name for name in rounded)
    assert "model.embed_tokens.weight" in same


def test_a_tied_head_is_not_rounded() -> None:
    backend = opened("masters", tie_word_embeddings=True)
    masters = backend.state()["model"]
    assert torch.equal(backend.head().weight, masters["model.embed_tokens.weight"])
    assert backend.head().weight.shape[1] == WIDE["hidden_size"]


@pytest.mark.slow
def test_ranks_that_share_experts_round_their_own(tmp_path: Path) -> None:
    """And a checkpoint and an export of theirs hold masters, and what those are rounded to."""
    folder = tiny_types.write_folder("qwen3_moe", tmp_path / "m", moe_intermediate_size=80)
    names = {"shared": {}, "gathered": {"train": {"expert_parallel": 1}}}
    tasks = [
        {"name": name, "does": "lives", "model": "m", "quantize": "fp8"} | own for name, own in names.items()
    ]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    run_ranks(expert_ranks.__file__, 2, tmp_path)
    weights = FP8Weights(CausalLM.from_pretrained(folder).module.config)
    for name in names:
        for result in said(tmp_path, name, 2):
            assert result.get("message") is None
            assert result["shared"] is (name == "shared")
            assert len({*result["digests"]}) == 1
        assert quantisation_in(tmp_path / f"{name} exported") is not None
        exported = CausalLM.from_pretrained(tmp_path / f"{name} exported")
        for key, tensor in weights.of_weights(exported.weights()):
            assert torch.equal(tensor, dict(exported.weights())[key]), key
        again = MastersBackend(CausalLM.from_pretrained(folder), training(), torch.float32)
        again.load_state(backend_ranks.read_state(tmp_path / f"{name} out"))
        assert again.digest() == result["digests"][0]


@pytest.mark.slow
def test_two_ranks_round_blocks_that_they_share(tmp_path: Path) -> None:
    tasks = [
        {"name": name, "train": train, "first": 0, "last": 2, "quantize": "fp8", "model": WIDE, **more}
        for name, train, more in (
            ("fsdp", {}, {}),
            ("shared sequences", {"context_parallel": 2}, {"dtype": "bfloat16"}),
        )
    ]
    alone = opened("masters")
    backend_ranks.train(alone, 0, 1)
    backend_ranks.on_two_ranks(tmp_path, alone.state(), tasks)
    expected = backend_ranks.train(opened("masters"), 0, 2)
    for task in tasks:
        out = tmp_path / task["name"]
        masters = backend_ranks.read_state(out)["model"]
        assert_rounded(load_file(out / "weights.safetensors"), {name: masters[name] for name in masters})
        found = json.loads((out / "result.json").read_text())["metrics"]
        if task["name"] != "shared sequences":
            backend_ranks.assert_same(found[:1], expected[:1])
