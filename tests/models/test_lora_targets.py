"""Which layers get an adapter where a recipe names none: what the model has, of every form of it."""

import json
from pathlib import Path

import pytest
import sweep
import tiny_types
from transformers import AutoModelForCausalLM

from opd.config import Recipe
from opd.config.train import USUAL_TARGETS, LoRAConfig
from opd.errors import ConfigError, ModelError
from opd.models.adapters import ADAPTER_CONFIG, FOLDER, AdaptedLM, MergingLM, save_adapted, target_layers
from opd.models.causal_lm import CausalLM
from opd.pipelines.stages.served_engine import merged_because

pytest.importorskip("peft")

USUAL = " ".join(USUAL_TARGETS)
TARGETS = {
    "llama": USUAL,
    "qwen2": USUAL,
    "gemma": USUAL,
    "qwen2_moe": USUAL,  # and no gate of the shared expert
    "qwen3_next": USUAL,
    "mixtral": "q_proj k_proj v_proj o_proj",
    "phimoe": "q_proj k_proj v_proj o_proj",  # and no router
    "phi": "q_proj k_proj v_proj dense fc1 fc2",
    "phi3": "qkv_proj o_proj gate_up_proj down_proj",
    "glm": "q_proj k_proj v_proj o_proj gate_up_proj down_proj",
    "gptj": "q_proj k_proj v_proj out_proj fc_in fc_out",
    "gpt_neox": "query_key_value dense dense_h_to_4h dense_4h_to_h",
    "opt": "q_proj k_proj v_proj out_proj fc1 fc2",
    "starcoder2": "q_proj k_proj v_proj o_proj c_fc c_proj",
    "deepseek_v3": "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj gate_proj up_proj down_proj",
}
"""Last names of the layers, by type."""


def last_names(layers: list[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in layers}


@pytest.mark.parametrize("model_type", TARGETS)
def test_every_form_of_model_has_layers_that_are_adapted(model_type: str) -> None:
    module = AutoModelForCausalLM.from_config(tiny_types.tiny_config(model_type), trust_remote_code=False)
    assert last_names(target_layers(module)) == set(TARGETS[model_type].split())


@pytest.mark.some(1)
@pytest.mark.parametrize("model_type", ["mixtral", "phi3", "gptj"])
def test_what_is_trained_sent_and_saved_is_of_those_layers(model_type: str, tmp_path: Path) -> None:
    folder = tiny_types.write_folder(model_type, tmp_path / "base")
    bench = sweep.Bench(folder, tmp_path, sweep.plain_model(folder))
    assert sweep.as_lora(bench) < sweep.EXACT
    config = LoRAConfig(rank=4)
    model = AdaptedLM(CausalLM.from_pretrained(bench.folder), config, bench.folder)
    merging = MergingLM(CausalLM.from_pretrained(bench.folder), config)
    merging.load_weights(model.weights())  # names and shapes agree
    save_adapted(model, tiny_types.tokenizer(), tmp_path / "out", {})
    described = json.loads((tmp_path / "out" / FOLDER / ADAPTER_CONFIG).read_text("utf-8"))
    assert last_names(described["target_modules"]) == set(TARGETS[model_type].split())
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert all(name in card for name in TARGETS[model_type].split())


@pytest.mark.parametrize("model_type", ["mixtral", "phi3"])
def test_a_name_that_a_recipe_says_and_no_layer_has_is_refused(model_type: str) -> None:
    module = AutoModelForCausalLM.from_config(tiny_types.tiny_config(model_type), trust_remote_code=False)
    with pytest.raises(ModelError, match=r"names '(down|gate)_proj', but .*; take some of .*o_proj"):
        target_layers(module, USUAL_TARGETS)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_servers_that_know_other_layers_are_sent_merged_weights(engine: str, tmp_path: Path) -> None:
    def recipe(model_type: str, **more: str) -> Recipe:
        folder = tmp_path / model_type
        if not folder.exists():
            tiny_types.write_folder(model_type, folder)
        return Recipe.model_validate(
            {
                "name": "n",
                "model": {"path": str(folder), "lora": {}},
                "teachers": {"t": {"path": "t"}},
                "domains": {"a": {"source": "procedural:sort", "params": {"digits": 3}, "teacher": "t"}},
                "rollout": {"engine": {"type": engine, "urls": ["http://localhost:1"]} | more},
            }
        )

    def why(asked: Recipe) -> str | None:
        config = tiny_types.tiny_config(Path(str(asked.model.path)).name)
        return merged_because(asked, lambda: AutoModelForCausalLM.from_config(config))

    assert why(recipe("llama")) is None
    assert "gate_up_proj, and servers apply adapters to q_proj" in str(why(recipe("phi3")))
    with pytest.raises(ConfigError, match=r"gate_up_proj.*; set it to merged"):
        why(recipe("phi3", lora="adapters"))
    assert why(recipe("phi3", lora="merged")) == "rollout.engine.lora is merged"


def test_layers_that_are_adapted_already_are_found_by_their_names(tmp_path: Path) -> None:
    folder = tiny_types.write_folder("phi3", tmp_path / "phi3")
    plain = CausalLM.from_pretrained(folder)
    before = target_layers(plain.module)
    assert target_layers(AdaptedLM(plain, LoRAConfig(rank=2), folder).module) == before


@pytest.mark.parametrize("targets", [None, ["c_attn"]], ids=["usual", "named"])
@pytest.mark.parametrize(
    ("model_type", "cause"),
    [
        ("gpt2", "layers of GPT2LMHeadModel are Conv1D of transformers, and adapters go on nn.Linear alone"),
        ("bert-generation", "BertGenerationDecoder has no list of layers, or several"),
        ("gemma3n_text", "Gemma3nForCausalLM has no list of layers, or several"),
    ],
)
def test_a_model_without_a_linear_layer_is_refused_with_its_cause(model_type, cause, targets, tmp_path):
    folder = tiny_types.write_folder(model_type, tmp_path / model_type)
    lora = LoRAConfig(targets=targets)
    with pytest.raises(
        ModelError, match=rf"^model\.lora has nothing to adapt: .*{cause}.*; leave model\.lora"
    ):
        AdaptedLM(CausalLM.from_pretrained(folder), lora, folder)
