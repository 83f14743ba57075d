"""A table of families: used rightly by the engine, or refused by all who read a folder with one sentence."""

import json
import re
from pathlib import Path

import pytest
import tiny
import tiny_types
import torch
from recipes import tiny_recipe
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from opd.config.train import LoRAConfig
from opd.errors import ModelError
from opd.models.adapters import AdaptedLM, MergingLM
from opd.models.architecture import check_architecture, empty_model
from opd.models.causal_lm import CausalLM
from opd.models.hf_folder import angles_change_at, positions_of, read_config
from opd.models.stored_form import StoredForm
from opd.pipelines.check import models as doctor
from opd.pipelines.check.checks import run_check
from opd.pipelines.commands.publish import run_publish
from opd.pipelines.commands.sample import SampleOptions, Speaker
from opd.rollout.torch_engine import TorchEngine
from opd.storage.publish import read_headers
from opd.teachers.skeleton import Skeleton, check_streams

_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48, "n_inner": 64}
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 48,
    "initializer_range": 0.2,
}
_EXPERTS = _SHAPE | {
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
}
_OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32}
_NEO = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}
_MAMBA = {"mamba_d_head": 8, "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_LIMIT = {"time_step_limit": (0.0, float("inf"))}
_DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}
_LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12, "rope_theta": 1e4}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 12, "rope_theta": 1e4,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip

USED: dict[str, dict] = {
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gptj": _GPT | {"rotary_dim": 4},
    "gpt_neox": _SHAPE | {"use_parallel_residual": True},
    "opt": _SHAPE | _OPT,
    "biogpt": _SHAPE,
    "starcoder2": _SHAPE | {"sliding_window": 6},
    "phi": _SHAPE,
    "qwen2_moe": _EXPERTS | {"mlp_only_layers": [0]},
    "glm4_moe": _EXPERTS | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    "ernie4_5_moe": _EXPERTS,
    "mixtral": _EXPERTS,
    "granitemoehybrid": _EXPERTS | _MAMBA | {"layer_types": ["attention"] * 2} | _LIMIT,
    "granitemoehybrid: recurrent": _EXPERTS | _MAMBA | {"layer_types": ["mamba", "attention"]} | _LIMIT,
    "gpt_oss": _EXPERTS | {"head_dim": 8, "sliding_window": 6},
    "nemotron": _SHAPE,
    "stablelm": _SHAPE,
    "llama: dynamic": _SHAPE | _DYNAMIC,
    "llama: linear": _SHAPE | _LINEAR,
    "llama: yarn": _SHAPE | {"rope_parameters": _YARN},
    "llama: llama3": _SHAPE | {"rope_parameters": _LLAMA3},
    "llama: flash": _SHAPE | {"attn_implementation": "flash_attention_2"},
}  # fmt: skip
"""`model_type`, with a word after a colon where there are several of one."""

REFUSED: dict[str, tuple[dict, str]] = {
    "falcon": (_SHAPE, "takes none from outside"),
    "gpt_neo": (_SHAPE | _NEO, "takes none from outside"),
    "bloom": (_GPT | {"hidden_size": 32}, "BloomAttention"),
    "mamba": (_SHAPE | {"state_size": 8}, "MambaMixer"),
    "recurrent_gemma": (_SHAPE | {"lru_width": 32, "attention_window_size": 8}, "RecurrentBlock"),
    "jamba": (_EXPERTS | {"mamba_dt_rank": 2, "mamba_d_state": 8}, "JambaMambaMixer"),
    "doge": (_SHAPE, "a mask of its own"),
    "diffllama": (_SHAPE, "attends more than once"),
    "bert": (_SHAPE, "sees tokens to come"),
    "electra": (_SHAPE | {"is_decoder": True, "embedding_size": 16}, "does not read the hidden states"),
    "bart": (_SHAPE | {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 64}, "takes no positions"),
}  # fmt: skip
OTHERS = {"qwen2_vl": "vision beside text", "t5": "an encoder and a decoder", "clap": "audio beside text"}
"""Without a causal language model in transformers."""


def configured(family: str, described: dict) -> PreTrainedConfig:
    tokenizer = tiny.tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    kind = CONFIG_MAPPING[family.partition(":")[0]]
    return kind(**described | ids | {"vocab_size": len(tokenizer)})


def saved(family: str, described: dict, folder: Path) -> Path:
    """A model with random weights as transformers writes it, and a tokenizer."""
    options = {key: described[key] for key in described if key != "attn_implementation"}
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(configured(family, options), attn_implementation="eager")
    module.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    if options != described:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | described))
    return folder


def doctors_word(folder: Path, **changes) -> list:
    """What the doctor, and so the start of a run, finds of the student in `folder`."""
    recipe = tiny_recipe(model={"path": str(folder)}, base=None, **changes)
    return run_check("student", lambda: doctor._check_student(recipe, {}, doctor.Models()))


@pytest.mark.some(2)
@pytest.mark.parametrize("family", USED)
@pytest.mark.filterwarnings("ignore")
def test_what_the_plain_forward_computes_is_used(family: str, tmp_path: Path):
    folder = saved(family, USED[family], tmp_path / "m")
    assert [one.detail for one in doctors_word(folder) if one.level == "error"] == []
    speaker = Speaker.load(str(folder), SampleOptions(prompts=("12=",), max_tokens=12, temperature=1e-3))
    written = speaker.stream_answer(0, 0, lambda text: None).response_ids.tolist()
    model = speaker.engine.model
    prompt = torch.from_numpy(speaker.questions[0].token_ids).long()[None]
    model.module.set_attn_implementation("eager")
    own = model.module.generate(
        prompt, max_new_tokens=len(written), do_sample=False, attention_mask=torch.ones_like(prompt)
    )
    assert written
    assert written == own[0, prompt.shape[1] :].tolist()


@pytest.mark.some(1)
@pytest.mark.parametrize("family", [*REFUSED, *OTHERS])
@pytest.mark.filterwarnings("ignore")
def test_everybody_refuses_with_one_sentence(family: str, tmp_path: Path, capsys):
    folder = tmp_path / "m"
    if family in REFUSED:
        described, cause = REFUSED[family]
        saved(family, described, folder)
    else:
        saved("llama", _SHAPE, folder)
        kind, cause = CONFIG_MAPPING[family], OTHERS[family]
        (folder / "config.json").write_text(json.dumps(kind().to_dict()))
    with pytest.raises(ModelError, match=cause) as refused:
        check_architecture(read_config(folder), folder)
    sentence = str(refused.value)
    assert sentence.startswith(f"{folder} ")
    assert len(sentence) < 400
    assert [one.detail for one in doctors_word(folder)] == [sentence]
    for ask in (
        lambda: Speaker.load(str(folder), SampleOptions(prompts=("12=",))),
        lambda: CausalLM.from_pretrained(folder),  # as a run loads it, and a teacher
    ):
        with pytest.raises(ModelError) as other:
            ask()
        assert str(other.value) == sentence
    said = []
    try:
        run_publish(folder, str(tmp_path / "published"), 1)
    except ModelError as error:  # what has no place in a published model
        said = [str(error)]
    told = said or [capsys.readouterr().err]  # else servers can read it
    assert sentence.rstrip(".") in told[0]


@pytest.mark.parametrize("family", ["glm4_moe", "ernie4_5_moe", "qwen2_moe"])
def test_default_adapters_are_on_the_same_layers_of_trainer_and_engine(family: str, tmp_path: Path):
    folder, config = saved(family, USED[family], tmp_path / "m"), LoRAConfig(rank=2)
    trained = AdaptedLM(CausalLM.from_pretrained(folder), config, folder)
    merging = MergingLM(CausalLM.from_pretrained(folder), config)
    assert [name for name, _ in trained.weights()] == [name for name, _ in merging.weights()]
    merging.load_weights(trained.weights())
    assert any("layers.0.mlp.gate_proj" in name for name, _ in trained.weights())


def test_a_rounding_that_routes_a_token_elsewhere_is_no_other_architecture():
    described = _SHAPE | {"num_hidden_layers": 6, "hidden_size": 64, "num_local_experts": 8}
    for seed in range(3):
        CausalLM.from_config(
            described | {"model_type": "mixtral"}, tokenizer=tiny.tokenizer(), dtype="bfloat16", seed=seed
        )


@pytest.mark.parametrize("family", ["phimoe", "moshi", "llama"])
def test_a_window_that_a_mask_or_a_cache_keeps_and_no_layer_says_is_refused(family: str, tmp_path: Path):
    described = _SHAPE | {"num_local_experts": 4, "ffn_dim": 64}
    whole = saved(family, described | {"sliding_window": 48}, tmp_path / "whole")  # as many as positions
    CausalLM.from_pretrained(whole)
    folder = saved(family, described | {"sliding_window": 20}, tmp_path / "m")
    with pytest.raises(ModelError, match=r"sliding_window 20 .* max_position_embeddings to 20") as refused:
        CausalLM.from_pretrained(folder)
    assert [one.detail for one in doctors_word(folder)] == [str(refused.value)]


def test_dynamic_angles_bound_a_sequence(tmp_path: Path):
    model = CausalLM.from_pretrained(saved("llama", USED["llama: dynamic"], tmp_path / "m"))
    limit = positions_of(model.config)
    assert limit is not None
    assert limit == angles_change_at(model.config) == 48
    tiny_types.assert_angles_change_behind(model, limit)
    engine = TorchEngine(model, max_running=2, max_sequence=1000)
    assert engine._limits.max_sequence == limit


@pytest.mark.parametrize("bare", [False, True])
def test_numbers_that_json_lacks_are_read_as_transformers_reads_them(bare: bool, tmp_path: Path, capsys):
    folder = saved("granitemoehybrid", USED["granitemoehybrid"] | {"num_local_experts": 0}, tmp_path / "m")
    described = json.loads((folder / "config.json").read_text())
    assert described["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    if bare:
        (folder / "config.json").write_text(json.dumps(described | {"time_step_limit": [0.0, float("inf")]}))
    skeleton = Skeleton(described, torch.float32, torch.device("cpu"))
    assert list(skeleton.config.time_step_limit) == list(read_config(folder).time_step_limit)
    assert [one.detail for one in doctors_word(folder) if one.level == "error"] == []
    assert run_publish(folder, str(tmp_path / "published"), 1) == 0


SERVED = {
    "engine": {"type": "sglang", "urls": ["http://localhost:1"]},
    "max_new_tokens": 5,
    "max_sequence": 16,
}


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("granitemoe", r"servers, as its files, have others \(\S+input_linear.weight\)"),
        ("gpt_neox", r"servers, as its files, have others \(embed_out.weight\)"),
        ("gpt_oss", r"its files stack experts \(\S+experts.down_proj\), whose form on servers is not known"),
    ],
)
def test_names_of_files_that_servers_are_not_given_are_refused(family: str, wrong: str, tmp_path: Path):
    folder = saved(family, USED.get(family, _EXPERTS), tmp_path / "m")
    [said] = [one.detail for one in doctors_word(folder, rollout=SERVED) if one.level == "error"]
    assert re.search(wrong, said)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "glm4_moe"])
def test_a_mixture_goes_to_servers_and_streams(family: str, tmp_path: Path):
    folder = saved(family, USED[family], tmp_path / "m")
    assert StoredForm(empty_model(read_config(folder), folder)).unserved() is None
    assert not [one.detail for one in doctors_word(folder, rollout=SERVED) if one.level == "error"]
    shapes = {key: tensor.shape for key, tensor in read_headers(folder).items()}
    for tensors in (None, shapes):
        check_streams(read_config(folder), folder, tensors)  # which puts them together


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_hidden_states_without_numbers_are_refused(tmp_path: Path):
    folder = saved("llama", _SHAPE, tmp_path / "m")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"hidden_size": 0}))
    with pytest.raises(ModelError, match=r"its hidden states have no numbers \(hidden_size 0\); give"):
        check_architecture(read_config(folder), folder)


@pytest.mark.parametrize("kind", ["dynamic", "linear", "yarn", "llama3"])
def test_every_kind_of_angles_streams(kind: str, tmp_path: Path):
    check_streams(read_config(saved("llama", USED[f"llama: {kind}"], tmp_path / "m")), tmp_path / "m")


def test_layers_of_any_name_are_computed_again_in_the_backward(tmp_path: Path):
    from opd.models.long_sequence import LayerMemory

    model = CausalLM.from_pretrained(saved("gpt2", _GPT, tmp_path / "m"))
    ids, positions, gradients = torch.arange(9) % 10, torch.arange(9), []
    for memory in (LayerMemory(), LayerMemory(recompute=True)):
        model.module.zero_grad()
        model.hidden(ids, positions, [0, 9], memory).square().sum().backward()
        gradients.append(model.module.transformer.wte.weight.grad.clone())
    assert torch.equal(*gradients)


NULLS = {
    "dots1": ["n_group", "topk_group", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"],
    "deepseek_v2": ["topk_method"],
    "deepseek_v3": ["first_k_dense_replace"],
}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in NULLS for name in NULLS[family]])
def test_a_null_that_a_family_computes_with_is_named(family: str, name: str, tmp_path: Path):
    tiny_types.tiny_config(family).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    also = {"n_group": None} if name == "topk_group" else {}
    file.write_text(json.dumps(json.loads(file.read_text()) | also | {name: None}))
    for named in [*also, name]:  # one after the other
        with pytest.raises(
            ModelError, match=f"{file} has null or nothing as {named}, of which a model of type"
        ):
            check_architecture(read_config(tmp_path), tmp_path)
        file.write_text(json.dumps(json.loads(file.read_text()) | {named: 1}))


GROUPED = {"topk_method": "group_limited_greedy", "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
DEEP = {"n_routed_experts": 8, "num_experts_per_tok": 2}
ASKED = {"rollout": {"max_new_tokens": 5, "max_sequence": 16, "replay_experts": True}}
NEVER = {"rollout": {"max_new_tokens": 5, "max_sequence": 16, "replay_experts": False}}
MEGATRON = {"backend": "megatron"}
NO_WEIGHT, NO_EXPERTS = "gives experts .*no weight where it would not choose them", "has no experts"
REPLAY = "rollout.replay_experts is true, and the student "
RATE = "train.balance_rate is set, and the student "
LOSS = "train.balance_loss is set, and the student "
ROUTING: list[tuple[str, dict, dict, str | None]] = [
    ("deepseek_v2", GROUPED, ASKED, f"{REPLAY}{NO_WEIGHT}; set it to auto or false"),
    ("deepseek_v2", GROUPED, {}, None),
    ("deepseek_v2", {}, ASKED, None),
    ("deepseek_v2", GROUPED, ASKED | {"train": MEGATRON}, f"{REPLAY}{NO_WEIGHT}"),
    ("deepseek_v2", {}, ASKED | {"train": MEGATRON}, None),
    ("phimoe", {}, ASKED, f"{REPLAY}chooses the experts of layer 0 in another way than by one topk"),
    ("llama", {}, ASKED, f"{REPLAY}{NO_EXPERTS}"),
    ("deepseek_v3", DEEP, {"train": {"balance_rate": 0.001}}, None),
    ("deepseek_v3", DEEP, NEVER | {"train": {"balance_rate": 0.001}}, f"{RATE}learns without replayed"),
    ("qwen3_moe", {}, {"train": {"balance_rate": 0.001}}, f"{RATE}has no e_score_correction_bias"),
    (
        "qwen3_moe",
        {},
        {"train": {"compile": True}},
        "layers with replayed choices of experts are not compiled",
    ),
    ("qwen3_moe", {}, NEVER | {"train": {"compile": True}}, None),
    ("llama", {}, {"train": {"compile": True}}, None),
    ("qwen3_moe", {}, {"train": {"balance_loss": 0.01}}, None),
    ("deepseek_v2", GROUPED, {"train": {"balance_loss": 0.01}}, f"{LOSS}{NO_WEIGHT}"),
    (
        "deepseek_v3",
        DEEP,
        {"train": {"balance_loss": 0.01}},
        f"{LOSS}is of a family without a balancing loss",
    ),
    ("llama", {}, {"train": MEGATRON | {"distributed_optimizer": True}}, "needs a GPU; leave it out"),
]


@pytest.mark.parametrize(("family", "sizes", "changes", "words"), ROUTING)
def test_what_a_start_refuses_of_experts_the_doctor_refuses(
    family: str, sizes: dict, changes: dict, words: str | None, tmp_path: Path
):
    """Without weights: a trainer tries the same on all of them."""
    folder = tiny_types.write_folder(family, tmp_path, **sizes)
    found = [one.detail for one in doctors_word(folder, **changes) if one.level == "error"]
    assert len(found) == (words is not None)
    assert words is None or re.search(words, found[0])
