"""Settings of a family are computed as transformers does, or refused: never another number in silence."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sweep
import tiny_types
import torch
from settings import ROPES, SETTINGS
from transformers import PreTrainedConfig

from opd.errors import ModelError
from opd.models.architecture import check_architecture, empty_model, head_form
from opd.models.causal_lm import CausalLM

PAIRS = [(model_type, what) for model_type, flips in SETTINGS.items() for what in flips]
SOME = (
    ("llama", "unread scale"), ("llama", "unread softcap"), ("llama", "wide heads"), ("llama", "mlp bias"),
    ("llama", "partial"), ("llama", "yarn, mscale"), ("qwen2", "kinds of layers"), ("gpt2", "upcast"),
    ("gemma2", "softcaps"), ("gpt2", "scaled by layer"), ("mistral", "narrow window"), ("cohere", "scale"),
    ("granite", "logits"), ("qwen3", "window of later layers"), ("gemma3_text", "sees what follows"),
    ("gemma4_text", "keys of earlier layers"), ("gemma4_text", "keys are values, experts"),
    ("llama4_text", "not normed, one expert"), ("glm_moe_dsa", "keys chosen by earlier layers"),
)  # fmt: skip
"""One of each way to be computed otherwise."""


def used(model_type: str, what: str, room: Path) -> dict[str, dict[str, Any]]:
    """What each use of the library gives, and where transformers runs it at all."""
    folder = tiny_types.write_folder(model_type, room / "model", **SETTINGS[model_type][what])
    bench = sweep.Bench(folder, room, sweep.plain_model(folder))
    uses = {"local": sweep.as_local, "streamed": sweep.as_streamed, "student": sweep.as_student}
    return {use: sweep.result_of(partial(check, bench)) for use, check in uses.items()}


def check_uses(model_type: str, what: str, room: Path) -> None:
    found = used(model_type, what, room)
    outcome = {use: next(iter(result)) for use, result in found.items()}
    assert set(outcome.values()) <= {"right", "refused"}, found
    assert outcome["local"] == outcome["student"], found
    assert (outcome["student"], outcome["streamed"]) != ("refused", "right"), found


@pytest.mark.some(2)
@pytest.mark.parametrize(("model_type", "what"), SOME)
@pytest.mark.filterwarnings("ignore")
def test_settings_give_what_transformers_gives_or_are_refused(model_type: str, what: str, tmp_path: Path):
    check_uses(model_type, what, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["deepseek_v32", "hy_v4"])
@pytest.mark.filterwarnings("ignore")
def test_of_equal_scores_the_earliest_keys_are_seen(model_type: str, tmp_path: Path):
    folder = tiny_types.write_folder(model_type, tmp_path / "model", index_topk=6, index_n_heads=8)
    model = CausalLM.from_pretrained(folder)
    for part in model.module.modules():
        if hasattr(part, "index_topk") and hasattr(part, "n_heads"):
            for weight in part.parameters():
                weight.zero_()
    texts = [torch.randint(2, 14, (length,), generator=torch.manual_seed(length)) for length in (9, 40, 23)]
    alone = torch.cat([sweep.packed_logits(model, [text]) for text in texts])
    assert float((sweep.packed_logits(model, texts) - alone).abs().max()) < sweep.EXACT


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model_type", "what"), [pair for pair in PAIRS if pair not in SOME])
@pytest.mark.filterwarnings("ignore")
def test_every_setting_gives_what_transformers_gives_or_is_refused(
    model_type: str, what: str, tmp_path: Path
):
    check_uses(model_type, what, tmp_path)


@pytest.mark.parametrize("kind", ROPES)
def test_kinds_of_positions_are_seen_without_weights(kind: str):
    config = tiny_types.tiny_config("llama", **ROPES[kind])
    check_architecture(config, "here")
    made = empty_model(config, "here").config
    assert made.rope_parameters["rope_type"] == ROPES[kind]["rope_parameters"]["rope_type"]


def test_a_setting_of_another_family_changes_no_head():
    config = tiny_types.tiny_config("llama")
    config.logit_scale, config.logits_soft_cap = 0.5, 2.0
    assert head_form(config) == (1.0, None)
    assert head_form(tiny_types.tiny_config("cohere", logit_scale=0.5)) == (0.5, None)
    assert head_form(tiny_types.tiny_config("granite", logits_scaling=4.0)) == (0.25, None)


def test_a_head_of_another_form_is_refused_without_weights(monkeypatch: pytest.MonkeyPatch):
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        output.logits = torch.tanh(output.logits)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    config: PreTrainedConfig = tiny_types.tiny_config("llama")
    with pytest.raises(ModelError, match=r"here is of class LlamaForCausalLM, .* its head is not of a known"):
        check_architecture(config, "here")


@pytest.mark.parametrize(
    ("model_type", "settings", "words"),
    [
        ("llama", {"is_causal": False}, "says is_causal false, so it sees tokens to come"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "logits are divided by a softcap of 0"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "caps scores at 0"),
        ("granite", {"attention_multiplier": 0.0}, "multiplies scores by 0"),
    ],
)
def test_settings_of_no_trained_decoder_are_refused_without_weights(model_type, settings, words):
    config = tiny_types.tiny_config(model_type)
    for name, value in settings.items():
        setattr(config, name, value)
    with pytest.raises(ModelError, match=words):
        check_architecture(config, "here")
