"""Losses of routers: those of transformers, whatever packs, computes again or replays their tokens."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import tiny_types
import torch
from recipes import tiny_recipe, write_recipe
from torch import Tensor

from opd.config import PolicyLossConfig, Recipe
from opd.config.train import TrainConfig
from opd.errors import TrainingError
from opd.models.attention import ATTENTION_NAME
from opd.models.causal_lm import CausalLM
from opd.models.routing import RoutedTokens
from opd.pipelines.cli import main
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.train.routers import balancing_loss, z_loss
from opd.train.terms import PolicyTerm
from opd.train.torch_backend import MastersBackend, TorchBackend
from opd.types import RolloutBatch, Sample, TokenTerms

FAMILIES = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 6},
    "olmoe": {"num_experts": 6},
    "gpt_oss": {},
    "granitemoe": {},
}
LENGTHS = [(3, 4), (5, 2), (2, 7)]
BALANCE, Z = 0.3, 0.02
Gradients = dict[str, Tensor]


def made(family: str = "qwen3_moe") -> CausalLM:
    """A tiny model whose router decides."""
    torch.manual_seed(1)
    module = tiny_types.tiny_model(family, **FAMILIES[family])
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    module.set_attn_implementation(ATTENTION_NAME)
    return CausalLM(module)


def backend(model: CausalLM, balance: float = BALANCE, z: float = Z, replay=False, **batch) -> TorchBackend:
    settings = tiny.training([PolicyTerm(PolicyLossConfig())], 1.0, **batch)
    back = TorchBackend(model, replace(settings, balance_loss=balance, router_z_loss=z))
    back.replay_experts(replay)
    return back


def silent(samples: list[Sample]) -> RolloutBatch:
    """A batch whose other losses are 0, with gradients of 0."""
    return RolloutBatch(samples, [TokenTerms.zeros(len(sample.response_ids)) for sample in samples])


def learnt(back: TorchBackend, samples: list[Sample]) -> tuple[dict[str, float], Gradients]:
    metrics = back.forward_backward(silent(samples))
    named = back.model.module.named_parameters()
    return metrics, {name: one.grad.clone() for name, one in named if one.grad is not None}


def padded(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """[B, T] ids and mask, as transformers has a batch."""
    longest = max(len(sample.token_ids) for sample in samples)
    ids, mask = (torch.zeros(len(samples), longest, dtype=torch.int64) for _ in range(2))
    for row, sample in enumerate(samples):
        ids[row, : len(sample.token_ids)] = torch.from_numpy(sample.token_ids.astype(np.int64))
        mask[row, : len(sample.token_ids)] = 1
    return ids, mask


def of_transformers(model: CausalLM, batches: list[list[Sample]]) -> tuple[float, float, Gradients]:
    """The two losses over micro-batches, by transformers' own forward, loss and masks, and their gradient."""
    module = model.module
    module.zero_grad()
    module.set_attn_implementation("eager")
    everything = sum(len(sample.token_ids) for batch in batches for sample in batch)
    balances, squares = 0.0, 0.0
    for batch in batches:
        ids, mask = padded(batch)
        share = sum(len(sample.token_ids) for sample in batch) / everything
        output = module(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False)
        kept = torch.stack([one.reshape(*ids.shape, -1)[mask.bool()] for one in output.router_logits])
        square = kept.double().logsumexp(-1).square().mean()
        (share * (BALANCE * output.aux_loss + Z * square)).backward()
        balances += share * float(output.aux_loss.detach())
        squares += share * float(square.detach())
    found = {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}
    module.zero_grad()
    module.set_attn_implementation(ATTENTION_NAME)
    return balances, squares, found


def assert_alike(found: Gradients, due: Gradients, tolerance: float = 1e-5) -> None:
    scale = max(float(one.abs().max()) for one in due.values())
    for name, gradient in found.items():
        expected = due.get(name, torch.zeros_like(gradient))
        torch.testing.assert_close(gradient, expected, rtol=0, atol=tolerance * scale, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "computed again"])
def test_a_step_has_the_losses_and_gradients_of_transformers(family, recompute):
    model, samples = made(family), tiny.samples(LENGTHS)
    balance, square, due = of_transformers(model, [samples])
    metrics, found = learnt(backend(model, recompute_layers=recompute), samples)
    assert metrics["routing/balance_loss"] == pytest.approx(balance, abs=1e-5)
    assert metrics["routing/z_loss"] == pytest.approx(square, rel=1e-5)
    assert_alike(found, due)
    routers = [name for name in due if name.endswith(("gate.weight", "router.weight", "layer.weight"))]
    assert routers
    assert all(float(due[name].norm()) > 1e-3 for name in routers)


@pytest.mark.parametrize("limit", [7, 14])
def test_micro_batches_weigh_as_many_as_their_tokens(limit):
    model, samples = made(), tiny.samples(LENGTHS)
    batches = {7: [samples[:1], samples[1:2], samples[2:]], 14: [samples[:2], samples[2:]]}[limit]
    balance, square, due = of_transformers(model, batches)
    metrics, found = learnt(backend(model, max_tokens=limit), samples)
    assert metrics["routing/balance_loss"] == pytest.approx(balance, abs=1e-5)
    assert metrics["routing/z_loss"] == pytest.approx(square, rel=1e-5)
    assert_alike(found, due)


def test_an_empty_response_has_no_share():
    model, samples = made(), tiny.samples([*LENGTHS, (4, 0)])
    _, found = learnt(backend(model), samples)
    _, due = learnt(backend(made()), samples[:3])
    assert_alike(found, due)


def test_one_of_the_two_is_learnt_alone():
    model, samples = made(), tiny.samples(LENGTHS)
    both, balance, z = (
        learnt(backend(made(), *pair), samples) for pair in ((BALANCE, Z), (BALANCE, 0), (0, Z))
    )
    assert "routing/z_loss" not in balance[0]
    assert "routing/balance_loss" not in z[0]
    assert_alike({name: balance[1][name] + z[1][name] for name in both[1]}, both[1])
    none, _ = learnt(backend(model, 0, 0), samples)
    assert not any(name.startswith("routing") for name in none)


def test_with_replay_loads_are_those_of_the_given_choices_and_scores_learn():
    """The gradient is that of the written-out formula over logits that transformers' routers give."""
    model, samples = made(), tiny.samples(LENGTHS)
    tiny.draw_choices(model.routing, samples[:-1])
    back = backend(model, z=0.0, replay=True)
    metrics, found = learnt(back, samples)
    own, _ = learnt(backend(made(), z=0.0), samples)
    assert abs(metrics["routing/balance_loss"] - own["routing/balance_loss"]) > 1e-3
    assert any(name.endswith("gate.weight") and float(one.norm()) > 1e-4 for name, one in found.items())

    model.module.zero_grad()
    routing, logits = model.routing, list[Tensor]()
    assert routing is not None
    for part in model.module.modules():
        if type(part).__name__ == "Qwen3MoeTopKRouter":
            part.register_forward_hook(lambda _part, _inputs, output: logits.append(output[0]))
    choices = routing.new_choices(23)
    rows = np.cumsum([0, *(len(sample.token_ids) for sample in samples)])
    for first, sample in zip(rows, samples[:-1], strict=False):
        assert sample.expert_choices is not None
        choices[first : first + len(sample.expert_choices)] = torch.from_numpy(sample.expert_choices)
    ids = torch.from_numpy(np.concatenate([sample.token_ids for sample in samples]).astype(np.int64))
    positions = torch.cat([torch.arange(len(sample.token_ids)) for sample in samples])
    model.hidden(ids, positions, rows, routed=RoutedTokens(choices))
    value = torch.zeros(())
    for expert in range(6):
        sent = [
            (torch.where(given[:, :1] < 0, one.topk(2).indices, given) == expert).sum()
            for one, given in zip(logits, choices.unbind(1), strict=True)
        ]
        load = sum(float(one) for one in sent) / (23 * 2)
        value = value + 6 * load * torch.stack(logits).softmax(-1)[..., expert].mean()
    (BALANCE * value).backward()
    assert metrics["routing/balance_loss"] == pytest.approx(float(value.detach()), abs=1e-5)
    named = model.module.named_parameters()
    assert_alike(found, {name: one.grad for name, one in named if one.grad is not None})


def test_values_are_those_of_the_formulas():
    logits = torch.tensor([[[2.0, 1.0, 0.0], [0.0, 3.0, 1.0]]], dtype=torch.float64, requires_grad=True)
    choices = torch.tensor([[[0, 1], [1, 2]]])
    p = logits.softmax(-1)[0]
    loads = [0.5, 1.0, 0.5]
    due = 3 * sum(load * (p[0, e] + p[1, e]) / 2 for e, load in enumerate(loads))
    torch.testing.assert_close(balancing_loss(logits, choices), due)
    z = sum(torch.logsumexp(logits[0, t], 0) ** 2 for t in range(2)) / 2
    torch.testing.assert_close(z_loss(logits), z)
    equal = torch.zeros(2, 3, 6)
    everywhere = torch.arange(12).reshape(2, 3, 2) % 6
    assert float(balancing_loss(equal, everywhere)) == pytest.approx(2.0)  # K


def test_weights_in_sixteen_bits_learn_in_masters():
    wide = made()
    _, due = learnt(backend(wide), tiny.samples(LENGTHS))
    settings = tiny.training([PolicyTerm(PolicyLossConfig())], 1.0)
    back = MastersBackend(made(), replace(settings, balance_loss=BALANCE, router_z_loss=Z), torch.bfloat16)
    back.replay_experts(False)
    metrics = back.forward_backward(silent(tiny.samples(LENGTHS)))
    assert metrics["routing/z_loss"] > 0
    name = "model.layers.0.mlp.gate.weight"
    found = back._parameters[name].grad
    assert found is not None
    assert float((found - due[name]).norm() / due[name].norm()) < 0.1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "the student has no experts; leave them out"),
        (
            {"model_type": "deepseek_v3"},
            "the student is of a family without a balancing loss in transformers",
        ),
    ],
)
def test_a_student_without_such_routers_is_refused(changes, said):
    model = tiny.model()
    if changes:
        module = tiny_types.tiny_model("deepseek_v3", first_k_dense_replace=1)
        module.set_attn_implementation(ATTENTION_NAME)
        model = CausalLM(module)
    with pytest.raises(TrainingError, match=said):
        backend(model, BALANCE, 0.0)


@pytest.mark.parametrize("name", ["balance_loss", "router_z_loss"])
@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"backend": "deepspeed"}, "has no effect with backend deepspeed"),
        ({"backend": "megatron", "pipeline_parallel": 2}, "which stages of pipeline_parallel do not share"),
        ({"context_parallel": 2}, "whose tokens ranks share with context_parallel"),
        ({"context_parallel": "auto"}, "whose tokens ranks share with context_parallel"),
        ({"compile": True}, "which compiled layers do not give"),
    ],
)
def test_what_cannot_be_together_is_said(name, others, said):
    with pytest.raises(ValueError, match=said):
        TrainConfig.model_validate({name: 0.01} | others)


@pytest.mark.parametrize("part", ["specialist", "distill", "base"])
def test_layers_in_pieces_are_refused_beside_them(part):
    recipe = tiny_recipe()
    changed = recipe.model_dump() | {"train": {"balance_loss": 0.01}}
    changed[part]["batch"]["sequence_chunk"] = 8
    with pytest.raises(ValueError, match=f"{part}.batch.sequence_chunk runs layers in pieces"):
        Recipe.model_validate(changed)


def test_a_stage_of_a_recipe_learns_them(tmp_path):
    """Through the settings of a run, from demonstrations, whose choices are left to the model."""
    mixture = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2}
    recipe = tiny_recipe(
        model={"config": tiny.LLAMA | mixture | {"moe_intermediate_size": 16, "head_dim": 8}},
        base={"steps": 2, "batch_size": 8},
        rollout={"max_new_tokens": 6, "max_sequence": 24},
        specialist={"steps": 1, "prompts_per_step": 4, "group_size": 4},
        train={"balance_loss": 0.01, "router_z_loss": 0.001},
    )
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        run_stage(recipe, folder, "base")
        row = folder.read_metrics("base")[-1]
    assert 1.5 < row["routing/balance_loss"] < 6
    assert row["routing/z_loss"] > 0


def test_the_doctor_says_so_before_the_run(tmp_path, capsys):
    path = write_recipe(tmp_path / "recipe.yaml", train={"router_z_loss": 0.001})
    assert main(["doctor", str(path)]) == 2
    assert (
        "train.router_z_loss is set, and the student has no experts; leave it out." in capsys.readouterr().out
    )
