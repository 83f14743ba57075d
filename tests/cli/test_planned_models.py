"""`opd plan` for models, GPUs and clusters that are not here."""

import re
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import yaml
from transformers import AutoConfig

from opd.config import Recipe
from opd.models.architecture import empty_model
from opd.models.causal_lm import CausalLM
from opd.pipelines.check.memory import sharing_ranks
from opd.pipelines.check.shapes import ModelShape, shape_of
from opd.pipelines.cli import main
from opd.rollout.collect import EncodedPrompt, collect
from opd.rollout.kv_cache import KVCache, LayerCache
from opd.rollout.torch_engine import TorchEngine
from opd.train.plan import LAYER_VALUES, layer_bytes, token_bytes
from opd.types import SamplingParams

MIXTURE = {key: value for key, value in tiny.LLAMA.items() if key != "max_position_embeddings"} | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}
CLUSTER = {
    "gpu": {"tflops": 990, "memory_gb": 141, "memory_gb_per_s": 4800, "link_gb_per_s": 50},
    "store": {"gb_per_s": 100, "gb_per_s_per_rank": 5},
}


def small_files(folder: Path, **changes) -> str:
    """A model's folder without its weights."""
    tiny.tokenizer().save_pretrained(folder)
    config = AutoConfig.for_model(
        **MIXTURE | changes, vocab_size=len(tiny.tokenizer()), max_position_embeddings=8192
    )
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def prompts_file(folder: Path) -> str:
    """A file of prompts that the tiny tokenizer reads."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}=", "label": "1"}}\n' for number in range(50)))
    return str(path)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A student and a larger teacher of which only the small files are here."""
    written = {
        "name": "planned",
        "model": {"path": small_files(tmp_path / "student"), "dtype": "bfloat16", "device": "cuda"},
        "teachers": {"big": {"path": small_files(tmp_path / "big", num_experts=16), "type": "streamed"}},
        "domains": {"sort": {"source": prompts_file(tmp_path), "teacher": "big", "reward": "exact"}},
        "rollout": {"max_new_tokens": 8, "max_sequence": 64},
        "distill": {"prompts_per_domain": 4},
        "baselines": {"methods": []},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(written))
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """The lines of a plan by their names."""
    assert main(["plan", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[0]: line for line in lines if line[:1].strip()}


def test_a_plan_needs_no_weights_and_no_gpu(recipe: str, tmp_path: Path, capsys, ends) -> None:
    lines = planned(capsys, recipe, "--train.ranks", "2")
    assert "cuda is not here; reckoned as one of 80.0 GiB" in lines["device"]
    assert "big: " in lines["weights"]
    assert "reckoned from its config.json" in lines["weights"]
    assert "fit" not in lines
    assert "holds neither model.safetensors" in ends(2, ["doctor", recipe, "--model.device", "cpu"]).out
    (tmp_path / "big" / "model.bin").write_bytes(b"")  # what is here is checked
    assert "is a pickle" in ends(2, ["plan", recipe]).err


def test_the_teachers_bytes_follow_its_format(recipe: str, tmp_path: Path, capsys) -> None:
    path, sizes = tmp_path / "big" / "config.json", []
    plain = AutoConfig.from_pretrained(path.parent)
    for form in (None, {"quant_method": "fp8", "weight_block_size": [128, 128]}):
        if form is not None:
            plain.quantization_config = form
            plain.save_pretrained(path.parent)
        text = planned(capsys, recipe)["weights"]
        sizes.append(float(re.search(r"([\d.]+) KiB", text)[1]))  # type: ignore[index]
    assert sizes[0] == pytest.approx(2 * sizes[1], rel=1e-2)


def test_what_would_make_it_fit_is_said(recipe: str, capsys) -> None:
    words = ["--gpu-gb", "1", "--distill.prompts_per_domain", "4", "--rollout.max_running", "4096"]
    words += ["--rollout.max_sequence", "4096", "--rollout.max_new_tokens", "2048"]
    words += ["--distill.batch.max_tokens", "524288", "--specialist.batch.max_tokens", "524288"]
    advice = planned(capsys, recipe, *words)["fit"]
    assert "this does not fit in 1.0 GiB; it would with " in advice
    changes = re.findall(r"([a-z_.]+) (\w+)", advice.partition("would with ")[2].partition(" (")[0])
    assert changes
    given = [word for key, value in changes for word in (f"--{key}", value)]
    assert "fit" not in planned(capsys, recipe, *words, *given)
    words[words.index("524288")] = "67108864"
    assert "nor with 4096 ranks" in planned(capsys, recipe, *words)["fit"]


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_layers_keep_their_inputs_alone(recompute: bool, recipe: str, capsys) -> None:
    layer = layer_bytes(1, 32, 2)
    expected = 10 * 32 * 2 + layer if recompute else 10 * layer
    assert token_bytes(10, 32, 2, recompute=recompute) == expected
    assert layer == LAYER_VALUES * 32 * 2


def test_latent_attention_is_counted_as_it_is_cached(monkeypatch) -> None:
    config = AutoConfig.for_model(
        "deepseek_v3",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=32,
        moe_intermediate_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        vocab_size=len(tiny.tokenizer()),
        max_position_embeddings=64,
    )
    shape = shape_of(config, empty_model(config, "here"))
    model, cached = CausalLM.from_config(config.to_dict(), tokenizer=tiny.tokenizer(), seed=0), []

    def get_layer(cache: KVCache, index: int, key: torch.Tensor, value: torch.Tensor) -> LayerCache:
        cached.append(key[0, :, 0].numel() + value[0, :, 0].numel())
        return original(cache, index, key, value)

    original = KVCache.get_layer
    monkeypatch.setattr(KVCache, "get_layer", get_layer)
    prompt = EncodedPrompt("p", "a", np.arange(4, dtype=np.int32), None)
    collect(
        TorchEngine(model, max_running=1, max_sequence=8), [prompt], 1, SamplingParams(max_new_tokens=2), 0
    )
    assert {*cached} == {2 * shape.kv_width}
    assert shape.experts_per_token == 2


def test_a_recipe_says_what_a_simulated_cluster_leaves_out(recipe: str, tmp_path: Path, ends) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(CLUSTER))
    words = ["plan", recipe, "--simulate", str(path), "--train.ranks", "2"]
    shared = ends(0, words).out
    assert "2 GPUs that take turns; 1 teachers of " in shared
    assert ": 4 responses" in shared
    path.write_text(yaml.safe_dump(CLUSTER | {"work": {"prompts": 12}, "teachers": 10}))
    assert re.search(r"10 teachers of .*\nstep .*: 12 responses", ends(0, words).out)
    assert "student" in ends(2, ["plan", "--simulate", str(path)]).err


@pytest.mark.parametrize(
    ("train", "sharing"),
    [
        ({"ranks": 4}, 4),
        ({"ranks": 3}, 1),
        ({"ranks": 4, "expert_parallel": 1}, 1),
        ({"ranks": 4, "backend": "deepspeed"}, 1),
        ({"ranks": 6, "backend": "megatron"}, 2),
        ({"ranks": 8, "backend": "megatron", "tensor_parallel": 2}, 4),
        ({"ranks": 8, "backend": "megatron", "expert_parallel": 2}, 2),
    ],
)
def test_ranks_that_share_experts_are_counted_as_they_do(train, sharing) -> None:
    domains = {"sort": {"source": "procedural:sort"}}
    recipe = Recipe.model_validate({"name": "x", "model": {"path": "/m"}, "domains": domains, "train": train})
    shape = ModelShape(1000, 4, (None, None), vocabulary=10, kv_width=4, experts=600, expert_count=4)
    assert sharing_ranks(recipe, shape) == sharing
