"""Adapters of every kind that peft writes: used as peft merges them, or refused by what they are."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from opd.errors import CheckpointError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.hf_weights import check_weights
from opd.pipelines.stages.publishing import publish_checkpoint

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q = ["q_proj", "down_proj"]
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    made = tiny.model(tie_word_embeddings=False, num_hidden_layers=3)
    return save_checkpoint(made, tiny.tokenizer(), tmp_path_factory.mktemp("base") / "m", {})


def random_numbers(wrapped: Any) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "lora_magnitude" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def write(base: Path, folder: Path, config: Any, change: Callable[[Any], Any] | None = None) -> Any:
    """What peft's own merge makes of the adapter that it writes to `folder`."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False)
    if change is not None:
        change(model)
    wrapped = peft.get_peft_model(model, config)
    random_numbers(wrapped)
    wrapped.save_pretrained(str(folder))
    return wrapped


def lora(**options: Any) -> Any:
    given = {"r": 4, "lora_alpha": 6, "target_modules": Q, "task_type": "CAUSAL_LM"} | options
    return peft.LoraConfig(**given)


USED: dict[str, dict[str, Any]] = {
    "rank-stabilised": {"use_rslora": True},
    "one layer": {"layers_to_transform": 1},
    "layers by pattern": {"layers_to_transform": [0, 2], "layers_pattern": ["layers"]},
    "an expression": {"target_modules": r"model\.layers\.[01]\.(self_attn|mlp)\.(v|gate)_proj"},
    "all linear layers but some, by an expression": {
        "target_modules": "all-linear",
        "exclude_modules": r".*\.mlp\..*",
    },
    "full names": {"target_modules": ["model.layers.1.self_attn.o_proj", "layers.2.mlp.up_proj"]},
    "a head": {"target_modules": [*Q, "lm_head"]},
    "ranks and alphas by layer": {
        "rank_pattern": {r"layers\.[02]\..*": 2},
        "alpha_pattern": {"self_attn.q_proj": 1},
    },
    "transposed, as peft corrects it": {"fan_in_fan_out": True},
    "no start": {"init_lora_weights": False},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "a large rank": {"r": 64, "lora_alpha": 1},
    "a negative alpha": {"lora_alpha": -3},
    "an alpha that is no whole number": {"lora_alpha": 0.3},
    "weights tied if they should be": {"ensure_weight_tying": True},
    "no dropout at all": {"lora_dropout": 1.0},
}


def check_same(folder: Path, theirs: Any) -> None:
    """The model of `folder` has the weights, and the best tokens, of peft's merged module `theirs`."""
    check_weights(folder)
    model, due = CausalLM.from_pretrained(folder), dict(theirs.named_parameters())
    for name, tensor in model.weights():
        torch.testing.assert_close(tensor, due[name].data.to(tensor.dtype), rtol=1e-5, atol=2e-6)
    ids = torch.arange(12) % 10
    with torch.no_grad():
        ours = model.head().logits(model.hidden(ids, torch.arange(12), [0, 12]))
        assert ours.argmax(-1).tolist() == theirs(input_ids=ids[None]).logits[0].argmax(-1).tolist()


@pytest.mark.some(2)
@pytest.mark.parametrize("case", USED)
def test_plain_ones_are_merged_as_peft_merges_them(base, tmp_path, case):
    wrapped = write(base, tmp_path / "a", lora(**USED[case]))
    check_same(tmp_path / "a", wrapped.merge_and_unload().eval())


def retyped(**dtypes: torch.dtype) -> Callable[[Path], None]:
    """Halves of the adapter in another dtype."""

    def edit(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        changed = {
            name: tensor.to(next((d for part, d in dtypes.items() if part in name), tensor.dtype))
            for name, tensor in held.items()
        }
        save_file(changed, folder / WEIGHTS, metadata={"format": "pt"})

    return edit


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "edit",
    [
        retyped(lora_=torch.float16),
        retyped(lora_=torch.bfloat16),
        retyped(lora_A=torch.float16, lora_B=torch.float32),
        retyped(lora_=torch.float64),
    ],
)
def test_numbers_of_any_float_format_are_read(base, tmp_path, edit):
    write(base, tmp_path / "a", lora())
    edit(tmp_path / "a")
    plain = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False)
    theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path / "a"))
    check_same(tmp_path / "a", theirs.merge_and_unload().eval())


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "DoRA": (lambda: lora(use_dora=True), "describes use_dora"),
    "all biases": (lambda: lora(bias="all"), "LORA with bias all"),
    "biases of its layers": (lambda: lora(bias="lora_only"), "LORA with bias lora_only"),
    "a bias on B": (lambda: lora(lora_bias=True), "describes lora_bias"),
    "a whole head": (lambda: lora(modules_to_save=["lm_head"]), "describes modules_to_save"),
    "a whole embedding": (lambda: lora(modules_to_save=["embed_tokens"]), "describes modules_to_save"),
    "tokens": (lambda: lora(trainable_token_indices=[1, 2]), "describes trainable_token_indices"),
    "a parameter": (
        lambda: lora(target_modules=[], target_parameters=["q_proj.weight"]),
        "describes target_parameters",
    ),
    "layers twice": (lambda: lora(layer_replication=[[0, 2], [1, 3]]), "describes layer_replication"),
    "PiSSA": (lambda: lora(init_lora_weights="pissa"), "describes init_lora_weights pissa"),
    "OLoRA": (lambda: lora(init_lora_weights="olora"), "describes init_lora_weights olora"),
    "activated": (lambda: lora(alora_invocation_tokens=[3, 4]), "describes alora_invocation_tokens"),
    "an embedding": (lambda: lora(target_modules=["embed_tokens"]), "embed_tokens.lora_embedding_A"),
    "IA3": (
        lambda: peft.IA3Config(task_type="CAUSAL_LM", target_modules=Q, feedforward_modules=["down_proj"]),
        "describes IA3",
    ),
    "LoHa": (lambda: peft.LoHaConfig(task_type="CAUSAL_LM", r=2, target_modules=Q), "describes LOHA"),
    "LoKr": (lambda: peft.LoKrConfig(task_type="CAUSAL_LM", r=2, target_modules=Q), "describes LOKR"),
    "OFT": (
        lambda: peft.OFTConfig(task_type="CAUSAL_LM", oft_block_size=8, target_modules=Q),
        "describes OFT",
    ),
    "VeRA": (lambda: peft.VeraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]), "describes VER"),
    "AdaLoRA": (
        lambda: peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=Q, total_step=9, tinit=1, tfinal=1),
        "describes ADALORA",
    ),
    "norms": (lambda: peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["norm"]), "describes LN_T"),
    "a prompt": (
        lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "describes PROMPT_TUNING",
    ),
    "a prefix": (
        lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "describes PREFIX_TUNING",
    ),
}


def refused_by_all(folder: Path, told: str) -> None:
    """Each door says the same of `folder`."""
    sentences = set()
    for door in (check_weights, CausalLM.from_pretrained, lambda f: publish_checkpoint(f, f.parent / "out")):
        with pytest.raises(CheckpointError, match=told) as caught:
            door(folder)
        sentences.add(str(caught.value))
    [sentence] = sentences
    assert "\n" not in sentence
    assert len(sentence) < 500


@pytest.mark.parametrize("case", OTHERS)
def test_other_kinds_are_refused_by_name(base, tmp_path, case):
    config, told = OTHERS[case]
    write(base, tmp_path / "a", config())
    refused_by_all(tmp_path / "a", told)


def edited(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        change(held)
        save_file({k: v.contiguous() for k, v in held.items()}, folder / WEIGHTS, metadata={"format": "pt"})

    return edit


def swapped(held: dict[str, torch.Tensor]) -> None:
    a, b = held[f"{Q0}.lora_A.weight"], held[f"{Q0}.lora_B.weight"]
    held |= {f"{Q0}.lora_A.weight": b, f"{Q0}.lora_B.weight": a}


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def above(folder: Path) -> None:
    """Two adapters by their names, as peft writes those that are not called `default`."""
    for name in ("math", "code"):
        shutil.copytree(folder, folder.parent / "both" / name)
    shutil.rmtree(folder)
    (folder.parent / "both").rename(folder)


def as_pointer(name: str) -> Callable[[Path], object]:
    text = b"version https://git-lfs/spec/v1\noid sha256:0\nsize 9\n"
    return lambda folder: (folder / name).write_bytes(text)


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "without a B": (edited(lambda held: held.pop(f"{Q0}.lora_B.weight")), r"q_proj has only one of lora_A"),
    "A and B swapped": (edited(swapped), r"rank 32 .*q_proj and says r 4"),
    "NaN in A": (edited(lambda held: held[f"{Q0}.lora_A.weight"].fill_(float("nan"))), "holds NaN or inf"),
    "a tensor more": (edited(lambda held: held.update(step=torch.ones(1))), "holds step, which is no lora_A"),
    "whole numbers": (retyped(lora_A=torch.int32), r"lora_A\.weight as torch\.int32, which is no floating"),
    "a pickle": (as_pickle, r"adapter_model\.bin is a pickle, which is never read"),
    "several in one folder": (above, r"is the folder above models.*; give one of them, such as .*math"),
    "a pointer for its weights": (as_pointer(WEIGHTS), r"a pointer of Git LFS"),
    "a pointer for its settings": (as_pointer(CONFIG), r"a pointer of Git LFS"),
    "without settings": (lambda folder: (folder / CONFIG).unlink(), r"without the adapter_config\.json"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_ones_are_refused_by_what_is_wrong(base, tmp_path, case):
    change, told = DAMAGED[case]
    write(base, tmp_path / "a", lora())
    change(tmp_path / "a")
    refused_by_all(tmp_path / "a", told)


def test_one_with_a_grown_vocabulary_is_refused(base, tmp_path):
    write(base, tmp_path / "a", lora(), lambda model: model.resize_token_embeddings(23))
    refused_by_all(tmp_path / "a", r"brings .*, which is not that of its base \(a vocabulary that has grown")


def test_one_of_another_base_is_refused_where_it_does_not_fit(base, tmp_path):
    other = tiny.model(hidden_size=48, tie_word_embeddings=False, num_hidden_layers=3)
    folder = save_checkpoint(other, tiny.tokenizer(), tmp_path / "other", {})
    write(base, tmp_path / "a", lora())
    said = json.loads((tmp_path / "a" / CONFIG).read_text())
    (tmp_path / "a" / CONFIG).write_text(json.dumps(said | {"base_model_name_or_path": str(folder)}))
    refused_by_all(tmp_path / "a", r"adapts .* which its base does not have in that shape")
