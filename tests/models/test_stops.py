"""Every token id at which a model says that it stops ends its responses, wherever it is written."""

import json
from pathlib import Path

import pytest
import tiny

from opd.config import Recipe
from opd.errors import CheckpointError, ConfigError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import end_of_turn, stops_of
from opd.pipelines.stages.student import sampling_params
from opd.rollout.collect import EncodedPrompt, collect
from opd.types import Status

A, B = 2, 3
"""Ids of the tags of `tiny.tokenizer`; 1 is its EOS."""


@pytest.fixture
def folder(tmp_path) -> Path:
    made = save_checkpoint(tiny.model(), tiny.tokenizer(), tmp_path / "m", {})
    (made / "checksums.json").unlink(missing_ok=True)  # a model from elsewhere, which has none
    return made


def say(folder: Path, file: str, value) -> None:
    described = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps({**described, "eos_token_id": value}))
    (folder / "checksums.json").unlink(missing_ok=True)


def recipe(folder: Path, **rollout) -> Recipe:
    domains = {"sort": {"source": "procedural:sort", "prompts": 10}}
    return Recipe.model_validate(
        {"name": "s", "model": {"path": str(folder)}, "domains": domains, "rollout": rollout}
    )


@pytest.mark.parametrize(
    ("generation", "config", "rollout", "stops"),
    [
        (1, 1, {}, {1}),
        (A, 1, {}, {1, A}),
        ([1, A], 1, {}, {1, A}),
        (None, [A, B], {}, {1, A, B}),
        ([A], [B], {}, {1, A, B}),
        ([A], B, {"stop_ids": [7]}, {1, A, B, 7}),
        ([A], B, {"stop_ids": [7], "model_stop_ids": False}, {7}),
        ([A, 10_000], 1, {}, {1, A}),  # beyond the tokenizer: never sampled
    ],
)
def test_all_are_taken(folder, generation, config, rollout, stops):
    say(folder, "generation_config.json", generation)
    say(folder, "config.json", config)
    given = recipe(folder, **rollout)
    for greedy in (False, True):
        assert set(sampling_params(given, tiny.tokenizer(), greedy).stop_ids) == stops
    assert len(sampling_params(given, tiny.tokenizer()).stop_ids) == len(stops)


def test_a_folder_without_generation_config_and_one_of_a_composite_model(folder):
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [A]}}))
    assert {stop.token_id for stop in stops_of(tiny.tokenizer(), folder)} == {1, A}


@pytest.mark.parametrize("value", ["2", [1, "2"], 1.5, True, -1, {"id": 2}])
def test_what_is_no_id_is_refused(folder, value):
    say(folder, "generation_config.json", value)
    with pytest.raises(CheckpointError, match="eos_token_id"):
        stops_of(tiny.tokenizer(), folder)


def test_a_response_ends_at_any_of_them_as_completed(folder):
    every = [index for index in range(4, 14, 2)]
    say(folder, "generation_config.json", every)
    model = CausalLM.from_pretrained(folder)
    from opd.pipelines.stages.student import make_writer

    given = recipe(folder, max_new_tokens=30, max_sequence=40)
    prompts = [
        EncodedPrompt(f"p{i}", "sort", tiny.samples([(3, 1)], seed=i)[0].prompt_ids, None) for i in range(8)
    ]
    sampling = sampling_params(given, tiny.tokenizer())
    groups = collect(make_writer(given, model, tiny.tokenizer()), prompts, 4, sampling, 0)
    samples = [sample for group in groups for sample in group.samples]
    ended = [sample for sample in samples if sample.status is Status.COMPLETED]
    assert len(ended) > 20
    assert all(int(sample.response_ids[-1]) in {1, *every} for sample in ended)
    assert len({int(sample.response_ids[-1]) for sample in ended} & set(every)) > 2
    assert not any(set(sample.response_ids[:-1].tolist()) & {1, *every} for sample in samples)


@pytest.mark.parametrize("named", ["generation", "sampling of another time"])
def test_a_folder_that_is_written_again_keeps_them(folder, tmp_path, named):
    """Also where its sampling settings are such that transformers would refuse to write them."""
    own = {"eos_token_id": [1, A], "temperature": 0.6, "top_p": 0.9}
    if named != "generation":
        own |= {"do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(own))
    (folder / "checksums.json").unlink(missing_ok=True)
    again = save_checkpoint(CausalLM.from_pretrained(folder), tiny.tokenizer(), tmp_path / "again", {})
    assert json.loads((again / "generation_config.json").read_text())["eos_token_id"] == [1, A]
    assert {stop.token_id for stop in stops_of(tiny.tokenizer(), again)} == {1, A}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, None),
        ("{% for m in messages %}<a>{{ m.content }}<b>{% endfor %}", B),
        ("{% for m in messages %}{{ m.content }} <eos>{% endfor %}", 1),
        ("{% for m in messages %}{{ m.content }}={% endfor %}", None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{% if thinking %}{{ messages[1].content }}<b>{% else %}{{ messages[1].content }}<a>{% endif %}", B),
        ("{{ raise_exception('never') }}", None),
    ],
)
def test_the_token_that_ends_a_turn(template, expected):
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>"]})
    tokenizer.chat_template = template
    assert end_of_turn(tokenizer, {"thinking": True}) == expected


def test_settings_under_which_nothing_ends_are_refused(folder):
    with pytest.raises(ValueError, match="no response ends before"):
        recipe(folder, model_stop_ids=False)
    assert issubclass(ConfigError, ValueError)
