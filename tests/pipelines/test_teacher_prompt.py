"""Teachers that read another prompt than the student: templates, scores, a whole merge, refusals."""

from datetime import date
from decimal import Decimal

import numpy as np
import pytest
import tiny
import torch
from attempts import interrupted_merge, merged
from pydantic import ValidationError
from recipes import NO_CURVE, tiny_recipe

from opd.config import Recipe
from opd.config.teachers import TeacherPromptConfig
from opd.errors import DataError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.check.tokenizers import check_prompts
from opd.pipelines.evaluation.evaluate import evaluation_prompts
from opd.pipelines.evaluation.measure import measure_model
from opd.pipelines.stages.domains import DomainSet, load_domains
from opd.rollout.prompts import Domain, Prompt, TokenBudget, fit_teacher_prompts, teacher_prompt
from opd.rollout.shared_groups import decode_groups, encode_groups
from opd.storage.node_cache import NodeCache
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.schedule import Router, TeacherSchedule, sampled_logprobs
from opd.teachers.score_cache import CachedScores

HINT = TeacherPromptConfig(user="{prompt} #{label}", system="Trust {unit}.")
WRITES = {"generate": "math:sqrt", "max_new_tokens": 5, "max_sequence": 16}
QUESTION = {"role": "user", "content": "2 + 2?"}


def messages_of(*messages) -> list[dict]:
    prompt = Prompt.from_content(list(messages), 4, "a", {"unit": "metres"})
    read = teacher_prompt(prompt, HINT)
    assert prompt.messages == list(messages)  # the student's stay as they were
    assert read.messages is not None
    return read.messages


def test_a_template_fills_the_last_message_of_the_user():
    system, answer = {"role": "system", "content": "old"}, {"role": "assistant", "content": "5"}
    told = [{"role": "system", "content": "Trust metres."}]
    asked = {"role": "user", "content": "2 + 2? #4"}
    assert messages_of(QUESTION) == [*told, asked]
    assert messages_of(system, QUESTION) == [*told, asked]
    assert messages_of(QUESTION, answer, QUESTION) == [*told, QUESTION, answer, asked]


def test_a_template_fills_text_and_writes_labels_as_json():
    config = TeacherPromptConfig(user="{{{prompt}}} {label}{note}")
    prompt = Prompt.from_content("a {b} {label}", ["x", 1], "a", {"note": "{prompt}"})
    assert teacher_prompt(prompt, config).text == '{a {b} {label}} ["x", 1]{prompt}'


def test_a_template_writes_what_a_tables_column_means():
    columns = {"hint": 1.0, "price": Decimal("1.50"), "note": b"n", "told": [2.0]}
    config = TeacherPromptConfig(user="{prompt} {hint} {price} {note} {told}")
    assert teacher_prompt(Prompt.from_content("1=", 4, "a", columns), config).text == "1= 1 1.5 n [2]"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (float("nan"), "which this prompt lacks; it has label"),
        (date(2024, 1, 2), "make that column one of"),
        ("a \ud83d", "whose value no text stands for"),
        (["\ud83d"], "whose value no text stands for"),
    ],
)
def test_a_column_that_no_text_stands_for_is_named(value, sentence):
    prompt = Prompt.from_content("1=", 4, "a", {"hint": value}, where="rows.parquet:3")
    with pytest.raises(DataError, match=r"rows\.parquet:3: teacher_prompt names {hint}") as error:
        teacher_prompt(prompt, TeacherPromptConfig(user="{hint}"))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("content", "config", "sentence"),
    [
        ("1=", HINT, "teacher_prompt.system needs prompts of messages, not of text"),
        (
            "1=",
            TeacherPromptConfig(user="{hint}"),
            "names {hint}, which this prompt lacks; it has label, prompt",
        ),
        ([{"role": "system", "content": "x"}], HINT, "needs a message of the user whose content is text"),
        ([{"role": "user", "content": [{"type": "image"}]}], HINT, "needs a message of the user"),
    ],
)
def test_a_prompt_that_cannot_be_filled_is_named(content, config, sentence):
    prompt = Prompt.from_content(content, 4, "a", where="rows.jsonl:3")
    with pytest.raises(DataError, match=r"rows\.jsonl:3") as error:
        teacher_prompt(prompt, config)
    assert sentence in str(error.value)


@pytest.mark.parametrize("template", ["{prompt.label}", "{label!r}", "{label:>9}", "{}", "{0}", "{prompt"])
def test_a_template_holds_names_of_columns_alone(template):
    with pytest.raises(ValidationError):
        TeacherPromptConfig(user=template)


@pytest.mark.parametrize("cached", [False, True])
def test_a_teacher_scores_the_response_after_its_own_prompt(tmp_path, cached):
    save_checkpoint(tiny.model(seed=10), tiny.tokenizer(), tmp_path / "a", {})
    teacher = LocalTeacher("a", tmp_path / "a", max_tokens=64)
    hinted, plain = tiny.samples([(3, 4), (5, 6)]), tiny.samples([(3, 4), (5, 6)])
    for sample, other in zip(hinted, plain, strict=True):
        other.prompt_ids = sample.teacher_prompt_ids = np.array([7, *sample.prompt_ids, 2, 9], np.int32)
    scores = []
    for samples in (hinted, plain, hinted):
        with NodeCache(tmp_path / f"cache{len(scores)}", quota_bytes=1 << 20) as files:
            cache = CachedScores(files) if cached else None
            schedule = TeacherSchedule({"a": teacher}, Router({"a": {"a": 1.0}}, "one_hot"), cache=cache)
            schedule.assign(samples)
            schedule.score(samples)
            rows = schedule.hidden_rows("a", samples).clone()
            scores.append((rows, *map(torch.from_numpy, sampled_logprobs(schedule, samples, "one_hot", 1.0))))
    assert [len(sample.prompt_ids) for sample in hinted] == [3, 5]
    for found, expected in zip(scores[0], scores[1], strict=True):
        assert torch.equal(found, expected)
    without = tiny.samples([(3, 4), (5, 6)])
    assert not torch.equal(torch.cat([teacher.score(without).rows]), scores[0][0])


def self_teacher(tmp_path, **changes) -> Recipe:
    """A merge whose teachers are the model it starts from, with the answer in their prompt."""
    alphabet = character_tokenizer("0123456789=", ["<sort>", "<add3>"])
    config = (tiny_recipe().model.config or {}) | {"max_position_embeddings": 64}
    model = CausalLM.from_config(config, tokenizer=alphabet, seed=1)
    save_checkpoint(model, alphabet, tmp_path / "start", {})
    domains = {name: one.model_dump() for name, one in tiny_recipe().domains.items()}
    domains["sort"] |= {"teacher": "self", "teacher_prompt": "{label}={prompt}"}
    domains["add3"] |= {"teacher": "plain"}
    settings = {
        "model": {"path": str(tmp_path / "start")},
        "base": None,
        "domains": domains,
        "teachers": {name: {"path": str(tmp_path / "start"), "type": "local"} for name in ("self", "plain")},
        "distill": {"steps": 4, "prompts_per_domain": 3, "checkpoint_every": 2},
        "baselines": {"methods": []},
        "evaluation": NO_CURVE,
    }
    return tiny_recipe(**settings | changes)


def test_domains_encode_the_prompts_that_teachers_read(tmp_path):
    recipe = self_teacher(tmp_path)
    tokenizer = character_tokenizer("0123456789=", ["<sort>", "<add3>"])
    data = DomainSet.open(recipe, tokenizer)
    (prompt,) = data.next_prompts("sort", 0, 1, "merge")
    assert prompt.teacher_ids is not None
    assert tokenizer.decode(prompt.teacher_ids) == f"{prompt.label}={tokenizer.decode(prompt.token_ids)}"
    assert data.next_prompts("add3", 0, 1, "merge")[0].teacher_ids is None
    (asked,) = data.held_out("sort", 1, "evaluate")
    assert tokenizer.decode(asked.for_teacher().token_ids).startswith(f"{asked.label}=")
    group = prompt.empty_group(2)
    (sent,), _ = decode_groups(encode_groups([group], {prompt.uid: prompt}), {prompt.uid: prompt})
    (alone,), _ = decode_groups(encode_groups([group], {}), {})  # of a step that takes others' prompts
    for sample in (*group.samples, *sent.samples, *alone.samples):
        assert np.array_equal(sample.as_taught().prompt_ids, prompt.teacher_ids)
        assert np.array_equal(sample.prompt_ids, prompt.token_ids)


@pytest.mark.parametrize("policy", ["drop", "error", "truncate"])
def test_a_teachers_prompt_that_is_too_long_is_treated_as_long_prompts_are(tmp_path, policy):
    recipe = self_teacher(tmp_path)
    domain = recipe.domains["sort"].model_copy(
        update={"teacher_prompt": TeacherPromptConfig(user="{prompt}" * 3), "long_prompts": policy}
    )
    recipe = recipe.model_copy(update={"domains": recipe.domains | {"sort": domain}})
    tokenizer = character_tokenizer("0123456789=", ["<sort>", "<add3>"])
    if policy != "truncate":
        with pytest.raises(DataError, match=r"^as teachers read them, .* longer than the 11 tokens"):
            DomainSet.open(recipe, tokenizer)
        return
    data = DomainSet.open(recipe, tokenizer)
    (prompt,) = data.next_prompts("sort", 0, 1, "merge")
    assert prompt.teacher_ids is not None
    assert len(prompt.teacher_ids) == 16 - 5
    assert "as teachers read them, 220 of 220 prompts are longer than the 11 tokens" in data.long["sort"]


@pytest.mark.parametrize("policy", ["drop", "error", "truncate"])
def test_a_held_out_prompt_that_is_too_long_for_teachers_is_treated_as_others_are(policy):
    train, short, long = (Prompt.from_content(text, 1, "a", {"hint": text}) for text in ("1", "2", "3333"))
    budget, config = TokenBudget(4, "rollout leaves"), TeacherPromptConfig(user="{prompt}{hint}")
    domain = Domain("a", [train], [short, long])

    def encode(prompts):
        return [np.zeros(len(prompt.text), np.int32) for prompt in prompts]

    if policy == "error":
        with pytest.raises(DataError, match="as teachers read them, domain a: 1 of 3 prompts is longer"):
            fit_teacher_prompts(domain, config, budget, policy, encode)
        return
    fitted = fit_teacher_prompts(domain, config, budget, policy, encode)
    assert fitted.long == [long]
    assert fitted.domain.held_out == ([short] if policy == "drop" else [short, long])
    assert fitted.domain.train == [train]
    assert fitted.count_phrase() == "1 of 3 prompts is"


def test_a_student_learns_from_itself_with_the_answer_in_its_prompt(tmp_path, monkeypatch):
    weights, rows = merged(self_teacher(tmp_path), tmp_path / "whole")
    assert rows[0]["kl/self"] > 1e-6  # it sees the answer
    assert rows[0]["kl/plain"] == pytest.approx(0.0, abs=1e-6)  # it is the student, who has not moved yet
    resumed = interrupted_merge(self_teacher(tmp_path), tmp_path / "stopped")
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)


@pytest.mark.parametrize("schedule", ["in_turn", pytest.param("ahead", marks=pytest.mark.slow)])
def test_teachers_read_their_prompt_beside_samples_on_disk(tmp_path, schedule):
    rollout = {"max_new_tokens": 5, "max_sequence": 16, "schedule": schedule}
    found = []
    for home in ("memory", "disk"):
        recipe = self_teacher(tmp_path, rollout=rollout, storage={"trajectories": home})
        found.append(merged(recipe, tmp_path / home))
    (weights, rows), (others, other_rows) = found
    assert all(torch.equal(others[name], weights[name]) for name in weights)
    assert [row["kl/self"] for row in other_rows] == [row["kl/self"] for row in rows]


def test_a_teacher_that_writes_answers_its_own_prompt(tmp_path):
    loss = {"type": "full"}
    settings = {"steps": 2, "prompts_per_domain": 3, "prefixes": "teacher", "loss": loss}
    _, rows = merged(self_teacher(tmp_path, distill=settings), tmp_path / "run")
    assert rows[0]["kl/self"] > 1e-6
    assert rows[0]["kl/plain"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"rollout": {"generate": "math:sqrt", "max_new_tokens": 5, "max_sequence": 16}}, "replaces the whole")],
)
def test_what_does_not_go_with_a_teachers_prompt_is_refused(tmp_path, changes, sentence):
    with pytest.raises(ValidationError, match=sentence):
        self_teacher(tmp_path, **changes)


def test_a_teachers_prompt_without_a_teacher_is_refused(tmp_path):
    recipe = self_teacher(tmp_path)
    domains = {name: one.model_dump() for name, one in recipe.domains.items()}
    domains["sort"] |= {"teacher": None, "distill": {"kl_coef": 0.0, "rl_coef": 1.0}}
    distill = {"steps": 4, "prompts_per_domain": 3, "samples_per_prompt": 2, "rl_coef": 0.5}
    with pytest.raises(ValidationError, match="teacher_prompt has no effect, since sort has no teacher"):
        self_teacher(tmp_path, domains=domains, distill=distill)


def test_the_doctor_shows_what_teachers_read(tmp_path):
    recipe = self_teacher(tmp_path)
    domain = load_domains(recipe)["sort"]
    tokenizer = character_tokenizer("0123456789=", ["<sort>", "<add3>"])
    shown = [finding.detail for finding in check_prompts(recipe, domain, tokenizer)]
    first = domain.train[0]
    assert f"for the first, teachers read 9 tokens: {first.label}={first.text}" in shown


class _Asked(Exception):  # noqa: N818
    """Prompts that an engine was asked, by domain."""


class _AskedEngine:
    """Raises what it is asked."""

    def generate(self, requests, more=None):
        raise _Asked([request.prompt_ids.tolist() for request in requests])


@pytest.mark.parametrize(("teacher", "taught"), [(False, []), (True, ["sort"]), (True, ["add3"])])
def test_a_measured_teacher_answers_its_own_prompt_in_its_domains(tmp_path, teacher, taught):
    recipe = self_teacher(tmp_path)
    tokenizer = character_tokenizer("0123456789=", ["<sort>", "<add3>"])
    prompts, _ = evaluation_prompts(recipe, tokenizer)
    (first, *_) = prompts.data.held_out("sort", 1, "evaluate")
    with pytest.raises(_Asked) as asked:
        measure_model(_AskedEngine(), prompts, tmp_path / "start" if teacher else None, taught)  # pyright: ignore
    due = first.teacher_ids if "sort" in taught else first.token_ids
    assert due is not None
    assert asked.value.args[0][0] == due.tolist()
