"""Mixtures on Megatron-Core, whose experts four ranks share or have whole: the steps of one process."""

import json
from dataclasses import replace
from pathlib import Path

import backend_ranks
import expert_ranks
import numpy as np
import pytest
import test_megatron_parallel as parallel
import torch
from backend_ranks import assert_same
from rank_processes import run_ranks
from safetensors.torch import load_file
from sharded_ranks import plain_training
from test_expert_parallel import assert_cut_alike, write_mixtures
from test_sharded import said
from test_sharded_checkpoints import assert_kill_leaves_one

from opd.config import TrainConfig
from opd.errors import TrainingError
from opd.models.causal_lm import CausalLM
from opd.ranks import Ranks
from opd.train.backends import open_backend
from opd.train.torch_backend import TorchBackend

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # one launch of all ranks

QWEN = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "num_hidden_layers": 3,
}
PLAIN = QWEN | {"norm_topk_prob": False, "mlp_only_layers": [], "num_hidden_layers": 2}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
OLMOE = {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}
SIGMOID = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
GLM = SIGMOID | {"model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True}
DEEPSEEK = SIGMOID | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
}
OSS = MIXTRAL | {
    "model_type": "gpt_oss",
    "head_dim": 8,
    "sliding_window": 5,
    "swiglu_limit": 0.1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
QWEN2 = QWEN | {"model_type": "qwen2_moe", "norm_topk_prob": False, "shared_expert_intermediate_size": 24}
V2 = DEEPSEEK | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}
LATENT_LAYERS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "up_proj", "down_proj"]
AGAIN = {"recompute_layers": True}
SHARED = {"tensor_parallel": 2, "expert_parallel": 2}
TASKS: dict[str, dict] = {
    "all share": {"train": {"expert_parallel": 4}, "model": QWEN},
    "two share": {"train": {"expert_parallel": 2, "overlap": True}, "model": MIXTRAL},
    "tensor": {"train": {"tensor_parallel": 2, "expert_parallel": 1}, "model": MIXTRAL},
    "tensor, shared": {"train": SHARED, "model": MIXTRAL},
    "tensor, shared, again": {"train": SHARED, "model": PLAIN, "batch": AGAIN},
    "tensor, shared, distributed": {
        "train": SHARED | {"distributed_optimizer": True, "overlap": True},
        "model": PLAIN,
        "gradients": False,  # each rank has the sum of its part alone
    },
    "two share, distributed": {
        "train": {"expert_parallel": 2, "distributed_optimizer": True},
        "model": QWEN,
        "gradients": False,
    },
    "stages": {"train": {"pipeline_parallel": 2, "overlap": True}, "model": QWEN},
    "sequences": {"train": {"context_parallel": 2}, "model": QWEN, "batch": AGAIN},
    "adapters": {"train": SHARED, "model": MIXTRAL | {"lora": ["q_proj", "v_proj", "o_proj"]}},
    "olmoe": {"train": SHARED, "model": OLMOE},
    "olmoe, stages": {
        "train": {"pipeline_parallel": 2, "tensor_parallel": 2},
        "model": OLMOE,
        "batch": AGAIN,
    },
    "olmoe, sequences": {"train": {"context_parallel": 2, "tensor_parallel": 2}, "model": OLMOE},
    "glm": {"train": SHARED, "model": GLM},
    "glm, stages": {"train": {"pipeline_parallel": 2, "tensor_parallel": 2}, "model": GLM, "batch": AGAIN},
    "glm, sequences": {"train": {"context_parallel": 2, "tensor_parallel": 2}, "model": GLM},
    "deepseek": {"train": SHARED, "model": DEEPSEEK},
    "deepseek, stages": {
        "train": {"pipeline_parallel": 2, "tensor_parallel": 2},
        "model": DEEPSEEK | {"q_lora_rank": None},
        "batch": AGAIN,
    },
    "deepseek, sequences": {"train": {"context_parallel": 2, "tensor_parallel": 2}, "model": DEEPSEEK},
    "deepseek, adapters": {"train": SHARED, "model": DEEPSEEK | {"lora": LATENT_LAYERS}},
    "qwen2": {"train": SHARED, "model": QWEN2},
    "qwen2, adapters": {
        "train": SHARED,
        "model": QWEN2 | {"lora": ["q_proj", "shared_expert_gate", "up_proj", "down_proj"]},
    },
    "deepseek 2": {"train": SHARED, "model": V2},
    "gpt_oss": {"train": SHARED, "model": OSS},
    "gpt_oss, stages": {
        "train": {"pipeline_parallel": 2, "expert_parallel": 2},
        "model": OSS,
        "batch": AGAIN,
    },
    "gpt_oss, sequences": {"train": {"context_parallel": 2, "tensor_parallel": 2}, "model": OSS},
    "gpt_oss, adapters": {"train": SHARED, "model": OSS | {"lora": ["q_proj", "v_proj", "o_proj"]}},
    "gpt_oss, distributed": {
        "train": SHARED | {"distributed_optimizer": True, "overlap": True},
        "model": OSS,
        "gradients": False,
    },
    "deepseek, distributed": {
        "train": SHARED | {"distributed_optimizer": True, "overlap": True},
        "model": DEEPSEEK,
        "gradients": False,
    },
}
REPLAYED: dict[str, dict] = {
    "replayed": {"train": SHARED, "model": QWEN},
    "replayed by stages": {"train": {"pipeline_parallel": 2}, "model": QWEN, "batch": AGAIN},
    "replayed with sequences": {"train": {"context_parallel": 2}, "model": QWEN, "batch": AGAIN},
    "olmoe replayed": {"train": SHARED, "model": OLMOE},
    "glm replayed": {"train": SHARED, "model": GLM},
    "deepseek 2 replayed": {"train": {"pipeline_parallel": 2}, "model": V2 | {"topk_method": "greedy"}},
    "gpt_oss replayed": {"train": SHARED, "model": OSS},
    "glm balanced": {"train": {"expert_parallel": 4}, "model": GLM, "balance_rate": 0.002},
    "deepseek replayed": {"train": {"pipeline_parallel": 2}, "model": DEEPSEEK, "batch": AGAIN},
    "deepseek balanced": {
        "train": {"pipeline_parallel": 2, "tensor_parallel": 2},
        "model": DEEPSEEK,
        "balance_rate": 0.002,
    },
}
LOSSES = {"balance_loss": 0.3, "router_z_loss": 0.02}
BALANCED: dict[str, dict] = {
    "balanced": {"train": SHARED, "model": QWEN},
    "balanced, again": {"train": {"expert_parallel": 4}, "model": MIXTRAL, "recompute": True},
    "balanced, replayed": {"train": {"tensor_parallel": 2}, "model": OSS, "batches": "routed"},
}
"""Tasks with losses of routers. Every sample is a micro-batch, on any number of ranks."""
CUT: dict[str, dict] = {
    model: {"name": model, "does": "cut", "model": model, "train": train | {"backend": "megatron"}}
    for models, train in {
        (
            "olmoe",
            "dots1",
            "glm4_moe",
            "glm4_moe_lite",
            "deepseek_v3",
            "gpt_oss",
            "deepseek_v2",
            "qwen2_moe",
        ): SHARED,
        ("seed_oss", "youtu"): {"tensor_parallel": 2},
    }.items()
    for model in models
}
"""Models that transformers has written, and how four ranks share them."""
NARROW = CUT["deepseek_v3"] | {"name": "narrow", "dtype": "bfloat16"}
AFTER = [
    {"name": "fsdp", "train": {"backend": "torch"}, "load": "tensor, shared", "first": 3, "last": 4},
    {"name": "back", "train": {"backend": "megatron"}, "load": "fsdp", "first": 4, "last": 5},
]
"""Tasks that go on from one another's checkpoints, on as many ranks."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Path:
    """The folder in which four ranks have left what every task gave."""
    folder = tmp_path_factory.mktemp("experts")
    replayed = [
        task
        | {"name": name, "first": 0, "last": 3, "batches": "routed"}
        | {"train": {"backend": "megatron", **task["train"]}}
        for name, task in REPLAYED.items()
    ]
    after = [one | {"model": MIXTRAL} for one in AFTER] + replayed + balanced_tasks()
    parallel.run_tasks(folder, 4, TASKS, after)
    return folder


def balanced_tasks() -> list[dict]:
    """`BALANCED` as ranks do them."""
    return [
        {"name": name, "first": 0, "last": 3, "gradients": True, "losses": LOSSES, **task}
        | {"train": {"backend": "megatron", **task["train"]}}
        | {"batch": {"max_tokens": 1, "recompute_layers": task.get("recompute", False)}}
        for name, task in BALANCED.items()
    ]


@pytest.mark.parametrize("name", BALANCED)
def test_losses_of_routers_are_those_of_one_process(ranks, name):
    task = BALANCED[name]
    settings = replace(backend_ranks.training(max_tokens=1), **LOSSES)
    alone = TorchBackend(backend_ranks.student(**task["model"]), settings)
    alone.replay_experts("batches" in task)
    gradients = backend_ranks.gradients_of(alone)
    metrics = backend_ranks.train(alone, 0, 3, backend_ranks.BATCHES[task.get("batches", "new")])
    assert {"routing/balance_loss", "routing/z_loss"} <= metrics[0].keys()
    assert_same(json.loads((ranks / name / "result.json").read_text())["metrics"], metrics)
    backend_ranks.assert_same_gradients(load_file(ranks / name / "gradients.safetensors"), gradients)


@pytest.mark.parametrize("name", TASKS)
def test_losses_gradients_and_weights_are_those_of_one_process(ranks, name):
    parallel.assert_trained_alike(ranks / name, TASKS[name])


@pytest.mark.parametrize("name", TASKS)
def test_one_long_sample_and_none_are_trained_as_by_one_process(ranks, name):
    parallel.assert_uneven_alike(ranks / f"{name}, uneven", TASKS[name])


@pytest.mark.parametrize("name", REPLAYED)
def test_choices_of_the_engine_are_replayed_as_by_one_process(ranks, name):
    rate = REPLAYED[name].get("balance_rate", 0.0)
    settings = replace(backend_ranks.training(), balance_rate=rate)
    alone = TorchBackend(backend_ranks.student(**REPLAYED[name]["model"]), settings)
    assert alone.replay_experts(True)
    metrics = backend_ranks.train(alone, 0, 3, backend_ranks.routed)
    assert metrics[0]["routing/apart"] > 0.5
    result = json.loads((ranks / name / "result.json").read_text())
    assert_same(result["metrics"], metrics)
    expected = alone.recompute_logprobs(backend_ranks.routed(0).samples)
    for mine, theirs in zip(result["logprobs"], expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    weights = load_file(ranks / name / "weights.safetensors")
    start = dict(backend_ranks.student(**REPLAYED[name]["model"]).weights())
    for key, tensor in alone.weights():
        if key.endswith("e_score_correction_bias"):
            assert torch.equal(weights[key], tensor)
            assert torch.equal(tensor, start[key]) == (rate == 0)


@pytest.mark.parametrize(
    ("model", "losses", "said"),
    [
        (V2, {}, "gives experts no weight where it would not choose them"),
        (DEEPSEEK, LOSSES, "is of a family without a balancing loss"),
        ({}, LOSSES, "has no experts"),
    ],
)
def test_what_routers_cannot_do_is_refused(model, losses, said):
    training = replace(backend_ranks.training(), **losses)
    student = backend_ranks.student(**model)
    with (
        open_backend(lambda *_, **__: student, TrainConfig(backend="megatron"), training, Ranks()) as backend,
        pytest.raises(TrainingError, match=said),
    ):
        backend.replay_experts(not losses)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Mixtures that transformers has written, and what four ranks have said of each."""
    root = write_mixtures(tmp_path_factory.mktemp("written"), CUT)
    (root / "tasks.json").write_text(json.dumps([*CUT.values(), NARROW]))
    run_ranks(expert_ranks.__file__, 4, root, seconds=600)
    return root


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "train"),
    [
        ("olmoe", {"expert_parallel": 2}),
        ("glm4_moe", {"expert_parallel": 2}),
        ("deepseek_v3", {"tensor_parallel": 2}),
    ],
)
def test_kill_9_while_a_checkpoint_is_written_leaves_the_newest_whole_one(
    written, tmp_path, model, train, caplog
):
    settings = {"model": str(written / model), "train": train | {"backend": "megatron"}}
    assert_kill_leaves_one(settings, tmp_path, 1, caplog)


def test_layers_in_bfloat16_are_those_of_transformers_and_go_on_bit_for_bit(written):
    results = said(written, "narrow")
    assert {result.get("message") for result in results} == {None}
    assert all(result["metrics"][0] == result["metrics"][1] for result in results)
    assert len({digest for result in results for digest in result["digests"]}) == 1
    rows = [load_file(written / "narrow out" / f"rows-{rank}.safetensors")["rows"] for rank in range(2)]
    model = CausalLM.from_pretrained(written / NARROW["model"], dtype="bfloat16")
    expected = expert_ranks.logits_of(TorchBackend(model, plain_training())).float()
    assert (torch.cat(rows, -1).float() - expected).abs().max() <= 2**-5 * expected.abs().max()


@pytest.mark.parametrize("name", CUT)
def test_written_mixtures_are_read_in_parts_resumed_and_exported(written, name):
    assert_cut_alike(written, name, CUT[name], said(written, name))


def test_one_process_and_fsdp_go_on_with_shared_experts(ranks):
    student, training = backend_ranks.student(**MIXTRAL), backend_ranks.training()
    expected = backend_ranks.train(TorchBackend(student, training), 0, 5)
    alone = TorchBackend(backend_ranks.student(seed=3, **MIXTRAL), training)
    alone.load_state(backend_ranks.read_state(ranks / "tensor, shared"))
    assert_same(backend_ranks.train(alone, 3, 5), expected[3:])
    for task in AFTER:
        result = json.loads((ranks / task["name"] / "result.json").read_text())
        assert_same(result["metrics"], expected[task["first"] : task["last"]])
