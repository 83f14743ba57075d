"""Adapters on a frozen base: what is trained, what is sent, what the exported model is."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from opd.config.train import LoRAConfig
from opd.errors import CheckpointError, ModelError
from opd.models.adapters import (
    BASE,
    CONFIG,
    FOLDER,
    AdaptedLM,
    MergingLM,
    has_adapter,
    read_adapter,
    save_adapted,
)
from opd.models.causal_lm import CausalLM, weights_digest
from opd.models.checkpoint import save_checkpoint
from opd.rollout.torch_engine import TorchEngine
from opd.train.terms import CrossEntropyTerm
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, RolloutRequest, SamplingParams, TokenTerms

pytest.importorskip("peft")

LORA = LoRAConfig(rank=3, alpha=12.0, targets=["q_proj", "v_proj", "down_proj"])
FAMILIES = {
    "llama": {},
    "qwen2": {"model_type": "qwen2"},  # has biases
}


@pytest.fixture(params=FAMILIES)
def base_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = tiny.model(seed=3, **FAMILIES[request.param])
    return save_checkpoint(model, tiny.tokenizer(), tmp_path / "base", {})


def adapted(base_path: Path, dtype: str = "float32", seed: int = 0) -> AdaptedLM:
    base = CausalLM.from_pretrained(base_path, dtype=dtype)
    return AdaptedLM(base, LORA, base_path, seed)


def supervised(seed: int = 0) -> RolloutBatch:
    samples = tiny.samples([(3, 4), (5, 2), (2, 7)], seed=seed)
    total = sum(len(s.response_ids) for s in samples)
    weights = [np.full(len(s.response_ids), 1 / total, dtype=np.float32) for s in samples]
    terms = [TokenTerms.zeros(len(weight)) for weight in weights]
    for term, weight in zip(terms, weights, strict=True):
        term.ce_weight = weight
    return RolloutBatch(samples, terms)


def trained(model: AdaptedLM, steps: int = 3) -> TorchBackend:
    backend = TorchBackend(model, tiny.training([CrossEntropyTerm()]))
    for step in range(steps):
        backend.forward_backward(supervised(step))
        backend.step(3e-2)
    return backend


def logits(model: CausalLM) -> Tensor:
    ids = torch.arange(9) % 7
    with torch.no_grad():
        return model.head().logits(model.hidden(ids, torch.arange(9), [0, 9]))


def test_the_start_is_the_base(base_path: Path) -> None:
    torch.testing.assert_close(logits(adapted(base_path)), logits(CausalLM.from_pretrained(base_path)))


def test_only_adapters_get_gradients_and_change(base_path: Path) -> None:
    model = adapted(base_path)
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    backend = trained(model, steps=0)
    for step in range(2):
        backend.forward_backward(supervised(step))
        for name, parameter in model.module.named_parameters():
            # A gets a gradient once B is no longer zero.
            has = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
            assert has == ("lora_B" in name or ("lora_A" in name and step > 0)), name
        backend.step(1e-2)
    for name, parameter in model.module.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora_" not in name)
    layers = 2 * len(LORA.targets)
    assert len(list(model.adapters())) == 2 * layers
    assert len(backend.state()["model"]) == 2 * layers + 1
    assert len(backend.state()["optimizer"]) == 3 * 2 * layers


def test_a_checkpoint_continues_bit_for_bit(base_path: Path) -> None:
    straight = trained(adapted(base_path), steps=4)
    first = trained(adapted(base_path), steps=2)
    resumed = trained(adapted(base_path, seed=7), steps=0)
    resumed.load_state(first.state())
    for step in (2, 3):
        resumed.forward_backward(supervised(step))
        resumed.step(3e-2)
    assert resumed.digest() == straight.digest()


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_proves_that_it_holds_the_adapters(base_path: Path, dtype: str) -> None:
    backend = trained(adapted(base_path, dtype))
    engine = TorchEngine(MergingLM(CausalLM.from_pretrained(base_path, dtype=dtype), LORA))
    sent = list(backend.weights())
    whole = sum(tensor.nbytes for _, tensor in CausalLM.from_pretrained(base_path, dtype=dtype).weights())
    assert sum(tensor.nbytes for _, tensor in sent) < whole / 2
    for version in (1, 2):
        engine.pause()
        assert engine.update_weights(backend.weights(), version) == weights_digest(
            backend.weights(), quick=True
        )
        engine.resume()
        held = dict(engine.model.module.named_parameters())
        for name, tensor in backend.plain_weights():
            assert torch.equal(held[name], tensor)
        trained(backend.model, steps=1)


@pytest.mark.some(1)
def test_the_engine_writes_what_the_exported_model_would(base_path: Path, tmp_path: Path) -> None:
    backend = trained(adapted(base_path))
    save_adapted(backend.model, tiny.tokenizer(), tmp_path / "out", {})
    engine = TorchEngine(MergingLM(CausalLM.from_pretrained(base_path), LORA))
    engine.pause()
    engine.update_weights(backend.weights(), 1)
    engine.resume()
    plain = TorchEngine(CausalLM.from_pretrained(tmp_path / "out"))
    sampling = SamplingParams(temperature=0.0, max_new_tokens=8)
    written = []
    for one in (engine, plain):
        request = RolloutRequest("u", np.array([1, 2, 3], dtype=np.int32), sampling, seed=0)
        steps = list(one.generate([request]))
        written.append([(*step.token_ids.tolist(), *step.logprobs.tolist()) for step in steps])
    assert written[0] == written[1]
    assert len(written[0]) == 8


@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # by peft
def test_the_exported_model_is_the_trained_one(base_path: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = trained(adapted(base_path)).model
    digest = save_adapted(model, tiny.tokenizer(), tmp_path / "out", {"method": "test"})
    merged = CausalLM.from_pretrained(tmp_path / "out")
    assert merged.digest() == digest
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-5, atol=1e-5)
    assert float((logits(merged) - logits(CausalLM.from_pretrained(base_path))).abs().max()) > 1e-2
    ids = (torch.arange(9) % 7)[None]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(base_path)
        theirs = PeftModel.from_pretrained(base, tmp_path / "out" / FOLDER)(ids).logits[0]
    torch.testing.assert_close(theirs, logits(model), rtol=1e-4, atol=1e-5)


def test_the_adapter_folder_holds_what_was_trained(base_path: Path, tmp_path: Path) -> None:
    model = trained(adapted(base_path)).model
    save_adapted(model, tiny.tokenizer(), tmp_path / "out", {})
    assert has_adapter(tmp_path / "out")
    assert not has_adapter(base_path)
    found = read_adapter(tmp_path / "out")
    assert found.base == base_path
    assert found.scaling == 4.0
    tensors = dict(model.adapters())
    for name, (a, b) in found.pairs.items():
        assert torch.equal(a, tensors[name.removesuffix("weight") + "lora_A.weight"])
        assert torch.equal(b, tensors[name.removesuffix("weight") + "lora_B.weight"])
    assert len(found.pairs) == len(tensors) / 2


def test_damaged_adapters_are_refused(base_path: Path, tmp_path: Path) -> None:
    save_adapted(adapted(base_path), tiny.tokenizer(), tmp_path / "out", {})
    place = tmp_path / "out" / FOLDER
    (tmp_path / "out" / "checksums.json").unlink()  # else any change is refused by its digest
    config = json.loads((place / CONFIG).read_text())
    (place / CONFIG).write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(CheckpointError, match="use_dora, and only plain LoRA"):
        read_adapter(tmp_path / "out")
    (place / CONFIG).write_text(json.dumps(config))
    (place / BASE).write_text("{")
    with pytest.raises(CheckpointError, match=r"base.json cannot be read"):
        read_adapter(tmp_path / "out")


@pytest.mark.slow
def test_adapters_of_another_base_are_refused(base_path: Path, tmp_path: Path) -> None:
    other = save_checkpoint(tiny.model(seed=4), tiny.tokenizer(), tmp_path / "other", {})
    weights = list(adapted(base_path).weights())
    engine = TorchEngine(MergingLM(CausalLM.from_pretrained(other), LORA))
    engine.pause()
    with pytest.raises(ModelError, match="belong to a base of digest"):
        engine.update_weights(weights, 1)
    with pytest.raises(ModelError, match="belong to a base of digest"):
        adapted(other).load_weights(weights)


@pytest.mark.some(1)
def test_adapters_of_another_form_are_refused(base_path: Path) -> None:
    weights = list(adapted(base_path).weights())
    model = MergingLM(CausalLM.from_pretrained(base_path), LORA.model_copy(update={"rank": 2}))
    with pytest.raises(ModelError, match="has shape"):
        model.load_weights(weights)
    with pytest.raises(ModelError, match="tensors were not given"):
        MergingLM(CausalLM.from_pretrained(base_path), LORA).load_weights(weights[:-1])
    *more, (last, tensor) = [
        (name, tensor + (tensor.is_floating_point() and 0.1)) for name, tensor in weights
    ]
    model = MergingLM(CausalLM.from_pretrained(base_path), LORA)
    with pytest.raises(ModelError, match="has shape"):
        model.load_weights([*more, (last, tensor[:1])])
    again = MergingLM(CausalLM.from_pretrained(base_path), LORA)
    again.load_weights(model.weights())  # some are new, and those are merged too
    for name, merged in again.module.state_dict().items():
        assert torch.equal(merged, model.module.state_dict()[name]), name
    with pytest.raises(ModelError, match="names 'c_attn'"):
        AdaptedLM(CausalLM.from_pretrained(base_path), LoRAConfig(targets=["q_proj", "c_attn"]), base_path, 0)


@pytest.mark.some(1)
@pytest.mark.parametrize("memory", [{"recompute_layers": True}, {"sequence_chunk": 4}])
def test_saving_memory_leaves_the_gradient_of_adapters_as_it_is(base_path: Path, memory: dict) -> None:
    found = []
    for settings in ({}, memory):
        model = adapted(base_path)
        for name, tensor in model.adapters():
            tensor.copy_(torch.linspace(-0.2, 0.2, tensor.numel()).view_as(tensor) * (1 + len(name) % 3))
        backend = TorchBackend(model, tiny.training([CrossEntropyTerm()], **settings))
        backend.forward_backward(supervised())
        grads = {n: p.grad for n, p in model.module.named_parameters() if p.requires_grad}
        found.append({name: grad for name, grad in grads.items() if grad is not None})
    assert len(found[0]) == len(found[1]) == 2 * 2 * len(LORA.targets)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)
