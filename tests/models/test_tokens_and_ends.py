"""Where answers end and prompts go on: ids beyond the tokens' count, post-processors, generation settings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from attempts import run_only
from recipes import folder_recipe
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from opd.data.demonstrations import Demonstration, DemonstrationEncoder
from opd.errors import CheckpointError, DataError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.generation import _FOLLOWED, _FREE, _NEUTRAL, not_followed, sampling_of
from opd.models.hf_folder import scratch_config
from opd.models.token_ids import appended_ids, encode_text, id_count
from opd.models.tokenizers import stops_of
from opd.pipelines.check.examine import run_checks
from opd.pipelines.commands.sample import SampleOptions, Speaker
from opd.pipelines.stages.student import load_model, sampling_params, tell_remarks
from opd.rollout.prompts import Prompt, encode_prompt

GENERATION = "generation_config.json"
LATE = 40
"""The id of `<eos>`, beyond the tokenizer's 13 tokens."""


def with_gap(eos: int = LATE) -> PreTrainedTokenizerFast:
    """Digits, "=" and `<sort>`, whose end-of-sequence token lies far behind all others."""
    words = {"<pad>": 0, "<sort>": 1, "=": 2, **{str(digit): 3 + digit for digit in range(10)}, "<eos>": eos}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<sort>|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def framed(tokenizer: PreTrainedTokenizerFast, single: str) -> PreTrainedTokenizerFast:
    """`tokenizer` whose post-processor writes text as in `single`."""
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<pad>", "<eos>", "<sort>")]
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return tokenizer


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model with a gap in its ids."""
    tokenizer = with_gap()
    return save_checkpoint(
        CausalLM.from_config(tiny.LLAMA, tokenizer=tokenizer), tokenizer, tmp_path / "m", {}
    )


def changed(folder: Path, **settings) -> Path:
    (folder / "checksums.json").unlink(missing_ok=True)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def test_an_end_beyond_the_count_of_tokens_is_an_id_like_any_other(folder):
    tokenizer = with_gap()
    assert (len(tokenizer), id_count(tokenizer)) == (14, LATE + 1)
    assert scratch_config(tiny.LLAMA, tokenizer).vocab_size == LATE + 1
    assert [stop.token_id for stop in stops_of(tokenizer, folder)] == [LATE]
    assert str(stops_of(tokenizer, folder)[0]).startswith(f"{LATE} '<eos>'")
    given = folder_recipe(folder)
    assert sampling_params(given, tokenizer).stop_ids == (LATE,)
    assert load_model(given, folder).vocabulary == LATE + 1
    levels = {(one.level, one.title): one.detail for one in run_checks(given, run_dir=folder.parent / "run")}
    assert not [one for one in levels if one[0] == "error"], levels
    assert f"vocabulary {LATE + 1}" in levels["ok", "student"]


def test_an_answer_ends_there(folder):
    """Logits that only `<eos>` wins: every answer is that token."""
    tensors = load_file(folder / "model.safetensors")
    hidden = torch.ones(32)
    tensors["model.embed_tokens.weight"][:] = 0.01 * hidden
    tensors["model.embed_tokens.weight"][LATE] = 9 * hidden
    (folder / "checksums.json").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    speaker = Speaker.load(str(folder), SampleOptions(("12=",), max_tokens=8, temperature=0.01))
    answer = speaker.answer_all(0)[0]
    assert answer.response_ids.tolist() == [LATE]
    assert answer.status.name == "COMPLETED"


@pytest.mark.parametrize(
    "said",
    [{"temperature": 0.0, "top_p": 1.0, "top_k": 0}, {"temperature": 1e3, "top_p": 1e-6, "top_k": 2**31 - 1}],
)
def test_a_model_may_ask_for_either_end_of_how_it_is_sampled(tmp_path, said):
    (tmp_path / GENERATION).write_text(json.dumps(said))
    assert sampling_of(tmp_path) == said


@pytest.mark.parametrize("said", [{"top_k": 3.7}, {"top_k": True}, {"top_k": -1}, {"top_p": "x"}])
def test_a_number_that_nothing_can_be_sampled_by_is_said(tmp_path, said):
    (tmp_path / GENERATION).write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=r"; give a (whole )?number from"):
        sampling_of(tmp_path)


FRAMES = {
    "none": ("$A", [], []),
    "before": ("<pad> $A", [0], []),
    "behind": ("$A <eos>", [], [LATE]),
    "both": ("<pad> $A <eos>", [0], [LATE]),
    "two behind": ("$A <eos> <pad>", [], [LATE, 0]),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("case", FRAMES)
def test_a_prompt_has_what_its_tokenizer_puts_before_it_and_nothing_behind(case, folder, capsys):
    single, before, behind = FRAMES[case]
    tokenizer = framed(with_gap(), single)
    assert tokenizer("12")["input_ids"] == [*before, 4, 5, *behind]
    assert encode_text(tokenizer, "12") == [*before, 4, 5]
    assert appended_ids(tokenizer) == behind
    prompt = Prompt.from_content("12", None, "sort")
    assert encode_prompt(prompt, tokenizer).tolist() == [*before, 4, 5]
    row = Demonstration(prompt, completion="21")
    encoded = DemonstrationEncoder(tokenizer, {}, {LATE}).encode(row)
    assert encoded.prompt_ids.tolist() == [*before, 4, 5]
    assert encoded.response_ids.tolist() == [5, 4, LATE]
    tokenizer.save_pretrained(folder)
    (folder / "checksums.json").unlink()
    said = [one.detail for one in run_checks(folder_recipe(folder)) if "behind every text" in one.detail]
    assert len(said) == bool(behind)
    Speaker.load(str(folder), SampleOptions(("12=",), max_tokens=2))
    assert ("behind every text" in capsys.readouterr().err) == bool(behind)


@pytest.mark.parametrize("single", ["<pad> $A <eos> $A", "$A:0 <sort> $A:1"])
def test_a_post_processor_that_does_more_than_frame_is_refused(single):
    tokenizer = framed(with_gap(), single)
    with pytest.raises(DataError, match="post-processor does more than"):
        encode_prompt(Prompt.from_content("12", None, "sort"), tokenizer)


def test_an_end_that_the_tokenizer_does_not_have_is_told(folder):
    changed(folder, eos_token_id=[LATE, 1000])
    said = [one.detail for one in run_checks(folder_recipe(folder)) if "1000" in one.detail]
    assert said == [
        f"{GENERATION} ends responses at 1000, an id beyond the tokenizer's 41, which is never written"
    ]


NOT_FOLLOWED = {
    "repetition_penalty": (1.05, 1.0),
    "suppress_tokens": ([3], []),
    "begin_suppress_tokens": ([3], None),
    "no_repeat_ngram_size": (3, 0),
    "bad_words_ids": ([[3]], None),
    "forced_eos_token_id": (LATE, None),
    "forced_bos_token_id": (1, None),
    "min_new_tokens": (2, 0),
    "min_length": (2, 0),
    "num_beams": (4, 1),
    "min_p": (0.05, 0.0),
    "typical_p": (0.9, 1.0),
    "sequence_bias": ([[[3], 1.0]], None),
    "stop_strings": (["\n"], None),
    "exponential_decay_length_penalty": ([2, 1.1], None),
    "a_setting_of_tomorrow": (0.5, None),
}


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_a_setting_that_is_not_followed_is_told_in_one_line(name, folder, capsys):
    value, nothing = NOT_FOLLOWED[name]
    changed(folder, **{name: nothing})
    assert not_followed(folder) is None
    changed(folder, **{name: value})
    said = [one.detail for one in run_checks(folder_recipe(folder)) if "nothing here follows" in one.detail]
    assert len(said) == 1
    assert f"asks for {name} {value}" in said[0]
    Speaker.load(str(folder), SampleOptions(("12=",), max_tokens=2))
    assert capsys.readouterr().err.count(f"asks for {name}") == 1


def test_every_setting_that_transformers_has_is_known_or_told(folder):
    for name in GenerationConfig().to_dict():
        changed(folder, **{name: 0.123})
        told = not_followed(folder) is not None
        assert told == (name not in _FREE | _FOLLOWED), name
        changed(folder, **{name: None})
    assert not set(_NEUTRAL) & (_FREE | _FOLLOWED)


@pytest.mark.some(1)
@pytest.mark.parametrize("own", [True, False])
def test_what_a_run_was_told_is_in_what_it_makes(own, folder, tmp_path, caplog):
    changed(folder, repetition_penalty=1.3, temperature=0.6)
    told = {
        "stop_ids": [7],
        "model_stop_ids": own,
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 12,
        "stop": ["98"],
    }
    given = folder_recipe(folder, **told)
    run_only(given, tmp_path / "run", "merge")
    tell_remarks(given)
    assert caplog.text.count("asks for repetition_penalty 1.3") == 1
    merged = tmp_path / "run" / "merged"
    said = json.loads((merged / "generation_config.json").read_text())
    assert set(said["eos_token_id"]) == ({7, LATE} if own else {7})
    assert (said["temperature"], said["top_p"], said["top_k"], said["do_sample"]) == (0.9, 0.95, 12, True)
    assert "repetition_penalty" not in said or said["repetition_penalty"] in (None, 1.0)
    card = (merged / "README.md").read_text()
    assert "- of these by the recipe: 7" in card
    assert 'and behind: "98"' in card
    assert "stop_strings=['98'], tokenizer=tokenizer" in card
    model: Any = AutoModelForCausalLM.from_pretrained(merged, trust_remote_code=False)
    answered = model.generate(torch.tensor([[4, 5]]), max_new_tokens=200, stop_strings=None)
    assert int(answered[0, -1]) in said["eos_token_id"] or answered.shape[1] == 202
    assert np.isin(answered[0, 2:-1].numpy(), said["eos_token_id"]).sum() == 0
