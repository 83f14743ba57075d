"""Instruct models as others publish them go through a whole run, with 15 lines, at the first try."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from opd.config.load import load_recipe
from opd.pipelines.check.models import Models, check_models
from opd.pipelines.cli import main

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}\n{{ message.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
HEADERS = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}<|start_header_id|>"
    "{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "qwen2": (CHATML, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"tie_word_embeddings": False}),
    "gemma2": (
        TURNS,
        ["<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
    ),
    "llama": (
        HEADERS,
        ["<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        {"tie_word_embeddings": False, "rope_parameters": LLAMA3},
    ),
}
PHI = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
MORE = {
    "phi3": (
        PHI,
        ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"],
        {"sliding_window": 4096, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    ),
    "gemma3_text": (TURNS, FAMILIES["gemma2"][1], {"head_dim": 16, "sliding_window": 8}),
    "mistral": (CHATML, FAMILIES["qwen2"][1], {"sliding_window": 8}),
    "smollm3": (CHATML, FAMILIES["qwen2"][1], {"no_rope_layers": [1, 0]}),
    "granite": (CHATML, FAMILIES["qwen2"][1], {"logits_scaling": 8.0, "residual_multiplier": 0.2}),
    "qwen3_moe": (CHATML, FAMILIES["qwen2"][1], _EXPERTS),
}
UNSTREAMED = {"gpt_neox": (CHATML, FAMILIES["qwen2"][1], {})}
"""Which a merge can only keep whole."""
RECIPE = """\
name: merge
model: {{path: {folder}}}
domains:
  short:
    source: short.jsonl
    reward: test_outside_model:short
  loud:
    source: loud.jsonl
    reward: test_outside_model:loud
rollout: {{max_new_tokens: 12}}
specialist: {{steps: 2, prompts_per_step: 4, group_size: 4, optim: {{lr: 1.0e-3}}}}
distill: {{steps: 2, prompts_per_domain: 4, optim: {{lr: 1.0e-3}}}}
baselines: {{methods: [average]}}
evaluation: {{prompts_per_domain: 4}}
"""


def short(sample) -> float:
    return 1.0 / (1 + len(sample.text))


def loud(sample) -> float:
    return sum(letter.isupper() for letter in sample.text) / (1 + len(sample.text))


def publish(folder: Path, family: str) -> int:
    """Write a model of noise as its authors would, with their library alone; returns the size of its
    vocabulary, 64 more than the tokenizer has tokens.
    """
    template, special, own = (FAMILIES | MORE | UNSTREAMED)[family]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = ["user assistant model system", *(f"how much is {a} and {b}" for a in range(9) for b in range(9))]
    inner.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    begin = {"bos_token": special[1]} if len(special) > 3 else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=special[-1], pad_token=special[0], **begin
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    size = len(tokenizer) + 64
    ends = tokenizer.convert_tokens_to_ids([special[0], special[-1]])
    config = AutoConfig.for_model(family, vocab_size=size, eos_token_id=ends, pad_token_id=0, **SIZES, **own)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    model.generation_config = GenerationConfig(eos_token_id=ends, do_sample=True, top_p=0.9)
    model.save_pretrained(folder)
    return size


def write_job(folder: Path) -> None:
    """The recipe and its prompts."""
    for domain in ("short", "loud"):
        asked = [[{"role": "user", "content": f"how much is {n} and {domain}"}] for n in range(80)]
        lines = [json.dumps({"prompt": messages, "label": None}) for messages in asked]
        (folder / f"{domain}.jsonl").write_text("\n".join(lines))
    recipe = RECIPE.format(folder="model")
    assert recipe.count("\n") <= 15
    (folder / "recipe.yaml").write_text(recipe)


@pytest.mark.some(1)
@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(one, marks=pytest.mark.long) for one in MORE)])
def test_it_goes_through_at_the_first_try(family: str, tmp_path: Path, monkeypatch) -> None:
    size = publish(tmp_path / "model", family)
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "recipe.yaml", "--out", "run"]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    ends = AutoConfig.from_pretrained(tmp_path / "model").eos_token_id
    assert set(ends) <= set(results["stop_ids"])
    place = tmp_path / "run" / "merged"
    merged = AutoModelForCausalLM.from_pretrained(place, dtype="auto", trust_remote_code=False)
    assert merged.config.vocab_size == size
    assert merged.dtype == torch.bfloat16
    for name in ("generation_config.json", "config.json"):  # others' engines stop where it does
        said = json.loads((place / name).read_text())
        assert set(ends) <= set(said["eos_token_id"])


@pytest.mark.slow
@pytest.mark.parametrize("family", UNSTREAMED)
def test_what_cannot_be_streamed_is_told_before_specialists_are_trained(
    family: str, tmp_path: Path, monkeypatch, ends
) -> None:
    publish(tmp_path / "model", family)
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    told = " ".join(ends(2, ["run", "recipe.yaml", "--out", "run"]).err.split())
    assert "teacher short, loud" in told
    assert "cannot be streamed" in told
    assert "set distill.teachers to local" in told
    assert not (tmp_path / "run" / "stages").exists()
    recipe = load_recipe(["recipe.yaml"], ["--distill.teachers", "local"])
    found = check_models(recipe, {}, Models())
    assert all(one.level == "ok" or "says top_p 0.9" in one.detail for one in found), found
