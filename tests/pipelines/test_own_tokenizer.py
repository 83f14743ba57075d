"""Teachers with a tokenizer of their own: a whole merge, resumed; streamed and local ones alike; how they are
measured; what the doctor says; refusals.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from attempts import interrupted_merge, merged, run_only
from pydantic import ValidationError
from recipes import NO_CURVE, tiny_recipe
from safetensors.torch import load_file
from tokenizers import decoders, normalizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from opd.config import Recipe
from opd.errors import ModelError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import character_tokenizer, load_tokenizer
from opd.pipelines.check.examine import check_set_prompts
from opd.pipelines.check.measured import check_kl
from opd.pipelines.check.models import Models, check_models
from opd.pipelines.evaluation.evaluate import read_measurements
from opd.pipelines.evaluation.prompt_sets import load_sets
from opd.pipelines.records.inputs import input_digests
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages import student as student_stage
from opd.pipelines.stages.domains import DomainSet, load_domains

CHARACTERS = "0123456789="
TAGS = ["<sort>", "<add3>"]
PAIRS = [f"{first}{second}" for first in "0123456789" for second in "0123456789" if first <= second]


def own_teacher(tmp_path: Path, joined: tuple[str, ...] = tuple(PAIRS), **changes) -> Recipe:
    """A merge whose `other` teacher reads pairs of digits, and whose `plain` one is the student's start."""
    ours, theirs = character_tokenizer(CHARACTERS, TAGS), character_tokenizer("=9876543210", [*TAGS, *joined])
    config = (tiny_recipe().model.config or {}) | {"max_position_embeddings": 64}
    for name, tokenizer, extra in (("start", ours, {}), ("other", theirs, {"hidden_size": 48})):
        if not (tmp_path / name).exists():
            model = CausalLM.from_config(config | extra, tokenizer=tokenizer, seed=1)
            save_checkpoint(model, tokenizer, tmp_path / name, {})
    domains = {name: one.model_dump() for name, one in tiny_recipe().domains.items()}
    domains["sort"] |= {"teacher": "other"}
    domains["add3"] |= {"teacher": "plain"}
    other = str(tmp_path / "other")
    settings = {
        "model": {"path": str(tmp_path / "start")},
        "base": None,
        "domains": domains,
        "teachers": {
            "other": {"path": other, "type": "local", "tokenizer": other},
            "plain": {"path": str(tmp_path / "start"), "type": "local"},
        },
        "distill": {"steps": 4, "prompts_per_domain": 3, "checkpoint_every": 2},
        "baselines": {"methods": []},
        "evaluation": NO_CURVE,
    }
    return tiny_recipe(**settings | changes)


def test_a_merge_is_the_same_after_a_kill(tmp_path, monkeypatch):
    weights, rows = merged(own_teacher(tmp_path), tmp_path / "whole")
    assert rows[0]["kl/plain"] == pytest.approx(0.0, abs=1e-6)
    assert rows[0]["kl/other"] != 0
    assert rows[0]["align/exact"] > 0
    assert rows[0]["align/exact"] + rows[0]["align/chunk"] == pytest.approx(1.0)
    resumed = interrupted_merge(own_teacher(tmp_path), tmp_path / "stopped")
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)


@pytest.mark.parametrize("kind", ["streamed", "megatron"])
def test_another_kind_of_teacher_gives_the_same_student(tmp_path, kind):
    if kind == "megatron":
        pytest.importorskip("megatron.core")
    weights, _ = merged(own_teacher(tmp_path), tmp_path / "local")
    teachers = {name: one.model_dump() for name, one in own_teacher(tmp_path).teachers.items()}
    changed = {name: one | {"type": kind} for name, one in teachers.items()}
    recipe = own_teacher(tmp_path, teachers=changed, storage={"hidden_memory_mb": 0})
    others, _ = merged(recipe, tmp_path / kind)
    assert all(torch.equal(others[name], weights[name]) for name in weights)


def test_samples_on_disk_give_the_same_student(tmp_path):
    weights, _ = merged(own_teacher(tmp_path), tmp_path / "memory")
    others, _ = merged(own_teacher(tmp_path, storage={"trajectories": "disk"}), tmp_path / "disk")
    assert all(torch.equal(others[name], weights[name]) for name in weights)


def test_the_same_tokens_in_another_order_make_the_student_of_one_tokenizer(tmp_path):
    """Without joined tokens everything is exact: the loss is that over one vocabulary, in another order."""
    recipe = own_teacher(tmp_path, joined=())
    _, rows = merged(recipe, tmp_path / "own")
    assert rows[0]["align/exact"] == 1.0
    assert rows[0]["align/outside"] < 0.5  # padding alone is the student's own


@pytest.mark.slow
def test_two_ranks_make_the_student_of_one(tmp_path):
    settings = own_teacher(tmp_path).model_dump_json(exclude_unset=True)
    (tmp_path / "recipe.yaml").write_text(settings)
    students = []
    for ranks in ("1", "2"):
        command = [sys.executable, "-m", "opd", "distill", tmp_path / "recipe.yaml", "--train.ranks", ranks]
        subprocess.run([*command, "--out", tmp_path / ranks], check=True, capture_output=True)
        students.append(load_file(tmp_path / ranks / "merged" / "model.safetensors"))
    for name, weight in students[0].items():
        torch.testing.assert_close(students[1][name], weight, atol=1e-6, rtol=1e-5)


def test_prompts_are_written_with_the_teachers_tokenizer(tmp_path):
    recipe = own_teacher(tmp_path)
    ours, theirs = (load_tokenizer(tmp_path / name) for name in ("start", "other"))
    data = DomainSet.open(recipe, ours)
    (prompt,) = data.next_prompts("sort", 0, 1, "merge")
    assert prompt.teacher_ids is not None
    assert theirs.decode(prompt.teacher_ids) == ours.decode(prompt.token_ids)
    assert not np.array_equal(prompt.teacher_ids, prompt.token_ids)
    assert data.next_prompts("add3", 0, 1, "merge")[0].teacher_ids is None


def test_a_teacher_is_measured_with_its_own_tokenizer(tmp_path):
    recipe = own_teacher(tmp_path)
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        run_stage(recipe, folder, "merge")
        run_stage(recipe, folder, "evaluate")
        measured = read_measurements(folder)["models"]
    answers = measured["teacher:other"]["answers"]["sort"]
    texts = [re.sub("<[^>]*>", "", answer["text"]) for answer in answers]
    assert max(map(len, texts)) > recipe.rollout.max_new_tokens  # in tokens of two digits
    assert measured["teacher:other"]["domains"]["sort"]["sampled"]["total"] == 20


def findings_of(recipe: Recipe) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for finding in check_models(recipe, load_domains(recipe), Models()):
        found.setdefault(finding.title, []).append(f"{finding.level}: {finding.detail}")
    return found


def test_the_doctor_says_how_tokens_stand_to_each_other(tmp_path):
    found = findings_of(own_teacher(tmp_path))
    assert any(
        "a tokenizer of its own: 15 of the student's 15 tokens" in one for one in found["teacher other"]
    )
    (aligned,) = found["tokens sort"]
    assert aligned.startswith("ok: of the student's ")
    assert "0.0% have no counterpart" in aligned
    assert "tokens add3" not in found


def test_the_doctor_says_that_an_equal_tokenizer_needs_no_alignment(tmp_path):
    recipe = own_teacher(tmp_path)
    start = {"path": str(tmp_path / "start"), "type": "local", "tokenizer": str(tmp_path / "start")}
    recipe = own_teacher(tmp_path, teachers=recipe.model_dump()["teachers"] | {"other": start})
    assert any("leave tokenizer out" in one for one in findings_of(recipe)["teacher other"])


def test_the_doctor_does_not_call_a_tokenizer_equal_that_joins_the_students_tokens(tmp_path):
    ours = character_tokenizer(CHARACTERS, TAGS)
    vocabulary = ours.get_vocab()
    words = [*sorted(vocabulary, key=lambda token: vocabulary[token]), *PAIRS]
    made = character_tokenizer(CHARACTERS, [*TAGS, *PAIRS])
    made.backend_tokenizer.model = WordLevel({word: index for index, word in enumerate(words)})
    config = (tiny_recipe().model.config or {}) | {"max_position_embeddings": 64}
    save_checkpoint(CausalLM.from_config(config, tokenizer=made), made, tmp_path / "other", {})
    found = findings_of(own_teacher(tmp_path))["teacher other"]
    assert any("15 of the student's 15 tokens" in one for one in found)
    assert not any("leave tokenizer out" in one for one in found)


PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"


LETTERS = "".join(map(chr, range(32, 127))) + "\n"


def chat_teacher(
    tmp_path: Path, template: str = PLAIN, positions: int = 512, letters: str = LETTERS, **settings
) -> Recipe:
    """A merge on 600 prompts of messages, of which one has a system message. Its teacher has a `template`,
    and knows `letters` alone.
    """
    ours, theirs = character_tokenizer(LETTERS), character_tokenizer(letters[::-1], ["the"])
    ours.chat_template, theirs.chat_template = PLAIN, template
    config = (tiny_recipe().model.config or {}) | {"max_position_embeddings": 512}
    for name, tokenizer, extra in (
        ("start", ours, {}),
        ("other", theirs, {"max_position_embeddings": positions}),
    ):
        model = CausalLM.from_config(config | extra, tokenizer=tokenizer, seed=1)
        save_checkpoint(model, tokenizer, tmp_path / name, {})
    rows = [[{"role": "user", "content": f"what is the sum of 1 and {i}?"}] for i in range(600)]
    rows[301].insert(0, {"role": "system", "content": "add"})
    lines = (json.dumps({"prompt": row, "label": str(i + 1)}) for i, row in enumerate(rows))
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    other = str(tmp_path / "other")
    return Recipe.model_validate(
        {
            "name": "chat",
            "model": {"path": str(tmp_path / "start")},
            "teachers": {"other": {"path": other, "type": "local", "tokenizer": other}},
            "domains": {
                "sums": {"source": str(tmp_path / "sums.jsonl"), "reward": "math", "teacher": "other"}
            },
            "rollout": {"max_new_tokens": 4, "max_sequence": 128},
            "distill": {"steps": 1, "prompts_per_domain": 2},
            "baselines": {"methods": []},
            "evaluation": {"prompts_per_domain": 3},
        }
        | settings
    )


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (NO_SYSTEM + PLAIN, "sums.jsonl:302: .*no system.*give the teacher another one"),
        (PLAIN.replace("m['role'] }}", "m['role'] if m['role'] != 'system' }}", 1) + "{% if %}", "mend the"),
        (
            "{% for m in messages if m['role'] != 'system' %}" + PLAIN.split("%}", 1)[1],
            "sums.jsonl:302: the chat template leaves out what `system` messages say.*give the tokenizer in",
        ),
    ],
)
def test_the_doctor_writes_prompts_by_the_teachers_template(tmp_path, template, sentence):
    found = findings_of(chat_teacher(tmp_path, template))["teacher other"]
    (error,) = [one for one in found if one.startswith("error")]
    assert re.search(sentence, error)
    assert "model.chat_template" not in error
    assert not any(one.startswith("error") for one in findings_of(chat_teacher(tmp_path))["teacher other"])


def test_the_doctor_writes_the_sets_prompts_by_the_teachers_template(tmp_path):
    row = {"prompt": [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}], "label": "2"}
    (tmp_path / "extra.jsonl").write_text(json.dumps(row))
    sets = {"extra": {"source": str(tmp_path / "extra.jsonl"), "reward": "math"}}
    recipe = chat_teacher(tmp_path, NO_SYSTEM + PLAIN, evaluation={"prompts_per_domain": 3, "sets": sets})
    models, domains = Models(), load_domains(recipe)
    check_models(recipe, domains, models)
    errors = [one for one in check_set_prompts(recipe, load_sets(recipe), models) if one.level == "error"]
    assert ["extra.jsonl:1: " in one.detail and "no system" in one.detail for one in errors] == [True]


def bad_tokenizer(tmp_path: Path, fault: str) -> str:
    """Make what `teachers.other.tokenizer` must not name. Return its path."""
    folder = tmp_path / fault
    made = load_tokenizer(tmp_path / "other")
    assert isinstance(made, PreTrainedTokenizerFast)
    if fault == "lower case":
        made.backend_tokenizer.normalizer = normalizers.Lowercase()
    elif fault == "word pieces":
        made.backend_tokenizer.decoder = decoders.WordPiece()
    made.save_pretrained(folder)
    if fault == "without offsets":
        (folder / "tokenizer.json").rename(folder / "vocab.txt")
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    return f"file://{folder}" if fault == "URL" else str(folder)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("URL", "is not a folder but a URL; give a folder of this machine"),
        ("without offsets", "its tokenizer is not of the tokenizers library; save it as tokenizer.json"),
        ("lower case", "its tokenizer does not spell texts byte by byte .*; give a teacher with"),
        ("word pieces", "its tokenizer decodes by WordPiece, .*; give a teacher with the student's"),
    ],
)
def test_a_bad_tokenizer_is_one_sentence_with_its_key(tmp_path, fault, sentence):
    recipe = chat_teacher(tmp_path)
    teachers = recipe.model_dump()["teachers"]
    teachers["other"]["tokenizer"] = bad_tokenizer(tmp_path, fault)
    recipe = chat_teacher(tmp_path, teachers=teachers)
    (error,) = [one for one in findings_of(recipe)["teacher other"] if one.startswith("error")]
    wanted = rf"teachers\.other\.tokenizer: .*{sentence}"
    assert re.search(wanted, error)
    with RunFolder.create(tmp_path / "run", recipe) as folder, pytest.raises(ModelError, match=wanted):
        run_stage(recipe, folder, "merge")


def test_hints_longer_than_the_teachers_context_are_refused(tmp_path):
    domain = chat_teacher(tmp_path).model_dump(exclude_unset=True)["domains"]["sums"]
    hints = {"sums": domain | {"teacher_prompt": "{prompt} " + "It is {label}. " * 9}}
    rollout = {"max_new_tokens": 4, "max_sequence": 512}
    found = findings_of(chat_teacher(tmp_path, positions=128, domains=hints, rollout=rollout))[
        "teacher other"
    ]
    (error,) = [one for one in found if one.startswith("error")]
    assert re.search("its model has 128 positions; shorten domains.sums.teacher_prompt, or choose", error)


def test_a_merge_loads_a_teachers_tokenizer_for_prompts_and_for_answers(tmp_path, monkeypatch):
    """Twice, because prompts may be written in another thread."""
    loaded = []
    load = student_stage.load_tokenizer
    monkeypatch.setattr(student_stage, "load_tokenizer", lambda path: loaded.append(str(path)) or load(path))
    recipe = own_teacher(tmp_path, distill={"steps": 1, "prompts_per_domain": 1})
    run_only(recipe, tmp_path / "run", "merge")
    assert loaded.count(str(tmp_path / "other")) == 2


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    recipe = chat_teacher(tmp_path)
    teachers = recipe.model_dump()["teachers"]
    teachers["other"]["tokenizer"] = str(tmp_path / "start")
    found = findings_of(chat_teacher(tmp_path, teachers=teachers))["teacher other"]
    assert any(
        one.startswith("error") and "other tokens than the tokenizer in its model" in one for one in found
    )


def test_a_teacher_with_few_positions_is_measured_on_the_same_prompts(tmp_path):
    recipe = chat_teacher(tmp_path, positions=24)
    found = findings_of(recipe)["teacher other"]
    assert any("prompts of sums have up to" in one and "of which 20 leave room" in one for one in found)
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        run_stage(recipe, folder, "merge")
        run_stage(recipe, folder, "evaluate")
        measured = read_measurements(folder)["models"]
    prompts = {name: [one["prompt"] for one in each["answers"]["sums"]] for name, each in measured.items()}
    totals = {each["domains"]["sums"]["sampled"]["total"] for each in measured.values()}
    assert len(totals) == 1
    assert len(prompts) > 1


MERGE = {"steps": 4, "prompts_per_domain": 3}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"distill": MERGE | {"loss": {"type": "k1"}}}, "loss.type k1 compares tokens one by one"),
        ({"distill": MERGE | {"loss": {"type": "topk", "k": 4}}}, "loss.type topk compares"),
        ({"distill": MERGE | {"prefixes": "teacher"}}, "learn from the teacher's own tokens"),
        ({"baselines": {"methods": ["off_policy"]}}, "learn from the teacher's own tokens"),
        ({"train": {"context_parallel": 2}}, "cut the head or responses over ranks"),
        (
            {"rollout": {"generate": "math:sqrt", "max_new_tokens": 5, "max_sequence": 16}},
            "whose responses are not aligned",
        ),
    ],
)
def test_what_does_not_go_with_another_tokenizer_is_refused(tmp_path, changes, sentence):
    with pytest.raises(ValidationError, match=sentence):
        own_teacher(tmp_path, **changes)


def test_teachers_of_one_domain_share_a_tokenizer(tmp_path):
    domains = own_teacher(tmp_path).model_dump()["domains"]
    domains["sort"] |= {"teacher": {"other": 0.5, "plain": 0.5}}
    with pytest.raises(ValidationError, match="other, plain of domain sort have different tokenizers"):
        own_teacher(tmp_path, domains=domains)
    teachers = own_teacher(tmp_path).model_dump()["teachers"]
    teachers["plain"] = teachers["other"]
    with pytest.raises(ValidationError, match="mixture geometric mixes teachers token by token"):
        own_teacher(tmp_path, domains=domains, teachers=teachers, distill=MERGE | {"mixture": "geometric"})


def test_the_doctor_measures_the_students_own_answers(tmp_path):
    recipe = own_teacher(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "start")
    found = {finding.title: finding for finding in check_kl(recipe, load_domains(recipe), tokenizer)}
    assert "of its own answers" in found["tokens sort"].detail
    assert sum(found["tokens sort"].numbers.values()) == pytest.approx(1.0)
    assert "nats per token" in found["KL to plain on add3"].detail


def test_another_tokenizer_is_another_input_of_the_run(tmp_path):
    assert input_digests(own_teacher(tmp_path))["teachers.other.tokenizer"]
