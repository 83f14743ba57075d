"""Prompts too long for their response: found whatever tokenizer and template write them, and dealt with."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.config import DomainConfig, Recipe
from opd.data.load import load_domain
from opd.errors import ConfigError, DataError
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.stages.domains import DomainSet, prompt_capacity
from opd.rollout.prompts import (
    Domain,
    Prompt,
    TokenBudget,
    encode_prompt,
    encode_prompts,
    fit_prompts,
    truncate_prompt,
)

TOKENIZER = character_tokenizer("0123456789=ü ", ["<sort>"])
TOKENIZER.chat_template = "{% for m in messages %}<sort>{{ m.content }}<eos>{% endfor %}="
ROOM = TokenBudget(12, "rollout.max_sequence 16 leaves beside rollout.max_new_tokens 4")


def encode(prompts: Sequence[Prompt]) -> list[np.ndarray]:
    return encode_prompts(prompts, TOKENIZER)


contents = st.text("0123456789=ü ", min_size=1, max_size=20)
messages = st.lists(contents.map(lambda text: {"role": "user", "content": text}), min_size=1, max_size=3)


@given(st.lists(contents | messages, min_size=1, max_size=12), st.integers(1, 40))
def test_exactly_those_that_are_longer_are_found(asked, room):
    prompts = [Prompt.from_content(content, None, "d", where=f"f:{i}") for i, content in enumerate(asked)]
    domain = Domain("d", prompts, [Prompt.from_content("1", None, "d")])
    long = [prompt for prompt in prompts if len(encode_prompt(prompt, TOKENIZER)) > room]
    for policy in ("drop", "truncate", "error"):
        if long and (policy == "error" or (policy == "drop" and len(long) == len(prompts))):
            with pytest.raises(DataError, match=f"{long[0].where}"):
                fit_prompts(domain, TokenBudget(room, "leaves"), policy, encode)
            continue
        fitted = fit_prompts(domain, TokenBudget(room, "leaves"), policy, encode)
        assert [p.where for p in fitted.long] == [p.where for p in long]
        kept = [p for p in prompts if p not in long] if policy == "drop" else prompts
        assert [p.where for p in fitted.domain.train] == [p.where for p in kept]


def test_a_character_may_be_several_tokens():
    def by_bytes(prompts: Sequence[Prompt]) -> list[np.ndarray]:
        return [np.frombuffer((prompt.text or "").encode(), np.uint8) for prompt in prompts]

    asked = Prompt.from_content("ü" * 10, None, "d")
    assert fit_prompts(Domain("d", [asked], []), TokenBudget(19, "leaves"), "truncate", by_bytes).long == [
        asked
    ]
    assert not fit_prompts(Domain("d", [asked], []), TokenBudget(20, "leaves"), "truncate", by_bytes).long


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 20), st.sampled_from([None, 0, 1])
)
def test_what_is_cut_off_is_the_beginning(ids, room, bos):
    cut = truncate_prompt(np.array(ids, np.int32), room, bos).tolist()
    assert len(cut) == min(len(ids), room)
    kept_bos = len(ids) > room > 1 and ids[0] == bos
    assert cut == ([bos, *ids[len(ids) - room + 1 :]] if kept_bos else ids[-room:])


def write(folder: Path, lengths: list[int]) -> Path:
    path = folder / "a.jsonl"
    lines = [{"prompt": "1" * length + f"={number}", "label": ""} for number, length in enumerate(lengths)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def recipe(path: Path, *, domain: dict | None = None, positions: int = 64, **rollout) -> Recipe:
    config = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"intermediate_size": 16, "max_position_embeddings": positions}
    source = {"source": str(path), "reward": "math:sqrt", "held_out": 0.3} | (domain or {})
    rollout = {"max_new_tokens": 4, "max_sequence": 16} | rollout
    given = {"name": "r", "model": {"config": config}, "domains": {"d": source}, "rollout": rollout}
    return Recipe.model_validate(given)


LENGTHS = [3, 4, 30, 5, 3, 2, 6, 4, 5, 3, 60, 2, 1, 4, 2]


def test_a_run_leaves_long_prompts_out_and_says_which(tmp_path, caplog):
    caplog.set_level("INFO", "opd")
    data = DomainSet.open(recipe(write(tmp_path, LENGTHS)), TOKENIZER)
    notes = caplog.messages
    left = [*data.domains["d"].train, *data.domains["d"].held_out]
    assert len(left) == 13
    assert all(len(p.token_ids) <= 12 for p in data.next_prompts("d", 0, 40, "s"))
    assert len(notes) == 1
    assert notes[0].startswith(f"domain d: 2 of 15 prompts are longer than the 12 tokens that {ROOM.why}")
    assert "a.jsonl:3" in notes[0]
    assert "a.jsonl:11" in notes[0]


def test_or_cuts_them(tmp_path, caplog):
    caplog.set_level("INFO", "opd")
    cut = recipe(write(tmp_path, LENGTHS), domain={"long_prompts": "truncate"})
    data = DomainSet.open(cut, TOKENIZER)
    taken = data.next_prompts("d", 0, len(data.domains["d"].train), "s")
    assert max(len(p.token_ids) for p in taken) == 12
    assert "their beginning is cut off" in caplog.messages[0]


def test_what_is_cut_begins_as_it_did(tmp_path):
    """With the token that begins every text of a model's, where it has one."""
    tokenizer = character_tokenizer("0123456789=ü ", ["<sort>"])
    tokenizer.chat_template, tokenizer.bos_token = TOKENIZER.chat_template, "<sort>"
    rows = [{"prompt": [{"role": "user", "content": f"{i}=" * 6}], "label": ""} for i in range(15)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DomainSet.open(recipe(path, domain={"long_prompts": "truncate"}), tokenizer)
    (asked,) = data.next_prompts("d", 0, 1, "s")
    begin, *rest = tokenizer.convert_ids_to_tokens(asked.token_ids.tolist())
    assert (begin, len(rest), rest[-3:]) == ("<sort>", 11, ["=", "<eos>", "="])


def test_or_stops(tmp_path):
    with pytest.raises(DataError, match=r"2 of 15 prompts are longer than the 12 tokens.*a\.jsonl:\d+"):
        DomainSet.open(recipe(write(tmp_path, LENGTHS), domain={"long_prompts": "error"}), TOKENIZER)


def test_a_domain_of_which_nothing_is_left_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"15 of 15 prompts are longer.*no training prompt is left"):
        DomainSet.open(recipe(write(tmp_path, [20] * 15)), TOKENIZER)


@pytest.mark.parametrize(
    ("positions", "rollout", "told"),
    [
        (
            64,
            {"max_new_tokens": 64, "max_sequence": 4096},
            "no room for a prompt in the model's .* 64; lower",
        ),
        (64, {"max_new_tokens": 200, "max_sequence": 4096}, "max_new_tokens 200 leaves no room"),
        (64, {"max_new_tokens": 16, "max_sequence": 16}, r"in rollout\.max_sequence 16; .* or raise"),
    ],
)
def test_responses_beyond_the_models_positions_are_refused(tmp_path, positions, rollout, told):
    given = recipe(write(tmp_path, LENGTHS), positions=positions, **rollout)
    with pytest.raises(ConfigError, match=told):
        prompt_capacity(given, TOKENIZER, "d")
    with pytest.raises(ConfigError, match=told):
        DomainSet.open(given, TOKENIZER)


def test_the_models_positions_bound_prompts_too(tmp_path):
    given = recipe(write(tmp_path, LENGTHS), positions=16, max_sequence=4096)
    assert prompt_capacity(given, TOKENIZER, "d") == TokenBudget(
        12, "the model's max_position_embeddings 16 leaves beside rollout.max_new_tokens 4"
    )


def test_servers_keep_some_of_the_models_positions(tmp_path):
    engine = {"type": "sglang", "urls": ["http://127.0.0.1:9"]}
    given = recipe(write(tmp_path, LENGTHS), positions=16, max_sequence=4096, engine=engine)
    assert prompt_capacity(given, TOKENIZER, "d") == TokenBudget(
        6,
        "the model's max_position_embeddings, less 6 that its servers keep: 10 leaves beside"
        " rollout.max_new_tokens 4",
    )
    given = recipe(write(tmp_path, LENGTHS), positions=16, max_sequence=10, engine=engine)
    assert prompt_capacity(given, TOKENIZER, "d").why.startswith("rollout.max_sequence 10")


def test_prompts_of_a_file_know_their_line(tmp_path):
    config = DomainConfig.model_validate({"source": str(write(tmp_path, LENGTHS))})
    domain = load_domain("d", config, seed=0, held_out_prompts=100)
    wheres = {p.where for p in (*domain.train, *domain.held_out)}
    assert wheres == {f"{tmp_path}/a.jsonl:{line}" for line in range(1, 16)}
