"""A mixture of experts through the stages: the trainer sends tokens where the embedded engine sent them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from recipes import tiny_recipe
from torch import Tensor

from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.routing import ExpertRouting
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.rollout.collect import EncodedPrompt, collect
from opd.rollout.torch_engine import TorchEngine
from opd.train.torch_backend import TorchBackend
from opd.types import SamplingParams

MIXTURE = tiny.LLAMA | {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 8,
    "initializer_range": 0.3,
}
TOKENIZER = character_tokenizer("0123456789=", ["<sort>", "<add3>"])


def mixture(seed: int = 0) -> CausalLM:
    """Its router is nearly undecided: experts' scores are apart by about a rounding. The experts differ."""
    model = CausalLM.from_config(MIXTURE, tokenizer=TOKENIZER, seed=seed, dtype="bfloat16")
    with torch.no_grad():
        for name, weight in model.module.named_parameters():
            if name.endswith("gate.weight"):
                weight.lerp_(weight.mean(0, keepdim=True), 0.97)
    return model


def routing_of(model: CausalLM) -> ExpertRouting:
    assert model.routing is not None
    return model.routing


def passed_choices(model: CausalLM) -> list[Tensor]:
    """Experts that each of the model's routed blocks is called with from now on, in the order of calls."""
    passed: list[Tensor] = []
    for part in model.module.modules():
        if type(part).__name__ == "Qwen3MoeExperts":
            part.register_forward_pre_hook(lambda _, inputs: passed.append(inputs[1].clone()))
    return passed


@pytest.mark.parametrize("replay", [True, False])
def test_the_trainer_sends_tokens_where_the_engine_sent_them(replay):
    """The engine computes in bfloat16, and the trainer with the same weights in float32."""
    written = mixture()
    engine = TorchEngine(written, vocab_size=len(TOKENIZER), max_sequence=40, record_experts=True)
    rng = np.random.default_rng(0)
    prompts = [EncodedPrompt(f"p{i}", "d", rng.integers(0, 12, 5).astype(np.int32), None) for i in range(4)]
    groups = collect(engine, prompts, 4, SamplingParams(max_new_tokens=12), seed=1)
    samples = [sample for group in groups for sample in group.samples]

    trained = mixture()
    trained.module.float()
    back = TorchBackend(trained, tiny.training([], 1.0, max_tokens=10_000))
    assert back.replay_experts(replay) is replay
    passed = passed_choices(trained)
    logprobs = back.recompute_logprobs(samples)
    first, second = passed  # a pass of two layers
    ours = torch.stack([first, second], 1).numpy()  # [T, L, K]
    ends = np.cumsum([len(sample.token_ids) for sample in samples])
    same = []
    for sample, rows in zip(samples, np.split(ours, ends[:-1]), strict=True):
        assert sample.expert_choices is not None
        assert len(sample.expert_choices) == len(rows) - 1
        same.append(np.sort(rows[:-1], -1) == np.sort(sample.expert_choices, -1))
    share = float(np.concatenate(same).all(-1).mean())
    apart = np.abs(np.concatenate(logprobs) - np.concatenate([one.rollout_logprobs for one in samples]))
    assert np.isfinite(apart).all()
    if replay:
        assert share == 1.0  # of positions and layers
        assert float(apart.max()) < 0.1
    else:
        assert share < 0.99
        assert float(apart.max()) > 0.2


def stage_rows(
    path: Path, models: Path, stage: str, distill: dict[str, Any] | None = None, **changes: Any
) -> list[dict[str, Any]]:
    """The metrics of a step of `stage`."""
    teachers = {name: {"path": str(models / name)} for name in ("sort", "add3")}
    own = {"params": {"digits": 3}, "prompts": 50, "reward": "recipes:varied"}
    recipe = tiny_recipe(
        model={"path": str(models / "base")},
        base=None,
        domains={name: own | {"source": f"procedural:{name}"} for name in teachers},
        teachers={} if stage.startswith("specialist") else teachers,
        rollout={"max_new_tokens": 8, "max_sequence": 24} | changes,
        specialist={"steps": 1, "prompts_per_step": 8, "group_size": 4},
        distill={"steps": 1, "prompts_per_domain": 8} | (distill or {}),
        baselines={"methods": ["off_policy"] if stage == "baseline-off_policy" else []},
        evaluation={"prompts_per_domain": 2, "every": 0},
    )
    with RunFolder.create(path, recipe) as folder:
        run_stage(recipe, folder, stage)
        return folder.read_metrics(stage)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("base", "sort", "add3")):
        save_checkpoint(mixture(seed), TOKENIZER, folder / name, {})
    return folder


@pytest.mark.parametrize("stage", ["specialist-sort", "merge"])
def test_a_stage_replays_what_its_engine_recorded(tmp_path, models, stage):
    [on] = stage_rows(tmp_path / "on", models, stage)
    [off] = stage_rows(tmp_path / "off", models, stage, replay_experts=False)
    assert {name for name in on if name not in off} == {
        *("routing/apart", "routing/load_max", "routing/load_entropy", "routing/dead")
    }
    assert on["tokens/student"] == off["tokens/student"] > 0  # the same samples
    assert 0 < on["routing/apart"] < 0.5
    assert on["mismatch/mean_abs"] < off["mismatch/mean_abs"]


def test_a_student_does_not_replay_the_routing_of_teachers(tmp_path, models):
    distill = {"prefixes": "teacher", "loss": {"type": "full"}}
    [on] = stage_rows(tmp_path / "on", models, "merge", distill)
    [off] = stage_rows(tmp_path / "off", models, "merge", distill, replay_experts=False)
    assert on["tokens/student"] == off["tokens/student"] > 0
    assert {name: on[name] for name in on if name.startswith(("kl", "routing", "grad"))} == {
        name: off[name] for name in off if name.startswith(("kl", "routing", "grad"))
    }


def test_the_student_chooses_its_own_experts_for_what_teachers_wrote(tmp_path, models):
    on, *_ = stage_rows(tmp_path / "on", models, "baseline-off_policy")
    off, *_ = stage_rows(tmp_path / "off", models, "baseline-off_policy", replay_experts=False)
    assert on["loss/ce"] == off["loss/ce"]
    assert not any(name.startswith("routing/") for name in on)
