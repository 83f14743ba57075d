"""torch and Megatron-Core, with one rank and two, say the same of the same samples; a liar is found."""

import functools
import io
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

pytest.importorskip("megatron.core", reason="needs the extra megatron", exc_type=ImportError)


import tiny

from opd.config import Recipe
from opd.errors import TeacherError
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.check.parity import (
    ITSELF,
    Difference,
    ParityScores,
    by_megatron,
    by_torch,
    check_parity,
    largest_differences,
    modes_of,
    problem_of,
)
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.types import Sample

TOKENS = len(tiny.tokenizer())


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Recipe:
    """A student with a head of 24 rows for 15 tokens, and two teachers of other families and paddings."""
    folder = tmp_path_factory.mktemp("parity")
    large = {"initializer_range": 0.3}
    made = {
        "student": tiny.model(seed=1, vocab_size=24, **large),
        "qwen": tiny.model(seed=2, model_type="qwen3", vocab_size=21, tie_word_embeddings=False, **large),
        "llama": tiny.model(seed=3, vocab_size=16, **large),
    }
    paths = {name: save_checkpoint(m, tiny.tokenizer(), folder / name, {}) for name, m in made.items()}
    publish_checkpoint(paths["llama"], folder / "published", shards=3)
    rows = folder / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}=", "label": str(i)}) + "\n" for i in range(40)))
    return Recipe.model_validate(
        {
            "name": "parity",
            "model": {"path": str(paths["student"]), "device": "cpu"},
            "domains": {
                "digits": {"source": str(rows), "held_out": 0.5, "teacher": {"qwen": 1.0, "llama": 1.0}}
            },
            "teachers": {"qwen": {"path": str(paths["qwen"])}, "llama": {"path": str(folder / "published")}},
            "rollout": {"max_sequence": 64},
            "distill": {"batch": {"max_tokens": 40}},
            "evaluation": {"prompts_per_domain": 20},
        }
    )


@pytest.fixture(scope="module")
def problem(recipe):
    """Samples with responses of 0 and 1 tokens and a prompt of one token."""
    from opd.pipelines.stages.student import load_model

    samples = tiny.samples([(3, 0), (4, 1), (5, 7), (1, 1), (2, 12), (1, 0)])
    assert recipe.model.path is not None
    return problem_of(recipe, load_model(recipe, Path(recipe.model.path)), samples, TOKENS)


@pytest.fixture(scope="module")
def scored(recipe, problem):
    """mode -> teacher -> scores."""
    sources = {name: teacher.path for name, teacher in recipe.teachers.items()}
    sources[ITSELF] = recipe.model.path
    modes = modes_of(recipe)
    assert list(modes) == ["torch", "megatron TP 1", "megatron TP 2"]
    return {name: mode(problem, sources) for name, mode in modes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["megatron TP 1", "megatron TP 2"])
def test_every_back_end_says_the_same(scored, mode):
    for teacher, theirs in scored["torch"].items():
        ours = scored[mode][teacher]
        assert set(ours.logprobs) == set(ours.kl) == {1.0, 0.7}
        for t in (1.0, 0.7):
            assert ours.logprobs[t].shape == ours.kl[t].shape == (21,)
        apart = largest_differences(ours, theirs)
        assert apart.logprobs <= 1e-4
        assert apart.kl <= 1e-4
        assert apart.is_within(1e-4)


@pytest.mark.slow
def test_the_reference_is_plain_softmax_over_the_tokenizers_tokens(recipe, problem, scored):
    """Against transformers' own logits: padding rows take no probability, the temperature divides logits."""
    from opd.models.causal_lm import CausalLM

    student = CausalLM.from_pretrained(recipe.model.path)
    teacher = CausalLM.from_pretrained(recipe.teachers["qwen"].path)
    for t in (1.0, 0.7):
        logprobs, kl = [], []
        for sample in problem.samples:
            ids = torch.from_numpy(sample.token_ids.astype(np.int64))
            first, count = len(sample.prompt_ids) - 1, len(sample.response_ids)
            each = []
            for model in (student, teacher):
                model.module.set_attn_implementation("eager")
                with torch.no_grad():
                    logits = model.module(input_ids=ids[None], use_cache=False).logits[0, :, :TOKENS].double()
                each.append(torch.log_softmax(logits[first : first + count] / t, -1))
            ours, theirs = each
            logprobs.append(theirs.gather(1, ids[first + 1 :][:count, None])[:, 0])
            kl.append((ours.exp() * (ours - theirs)).sum(-1))
        for mode in scored.values():
            torch.testing.assert_close(
                mode["qwen"].logprobs[t].double(), torch.cat(logprobs), atol=1e-4, rtol=0
            )
            torch.testing.assert_close(mode["qwen"].kl[t].double(), torch.cat(kl), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_the_noise_floor_is_rounding(scored):
    for scores in scored.values():
        assert max(float(values.abs().max()) for values in scores[ITSELF].kl.values()) <= 1e-5
    assert min(float(values.mean()) for values in scored["torch"]["qwen"].kl.values()) > 0.1


def test_the_command_prints_a_table_and_the_floor(recipe, tmp_path, ends, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    # Two ranks are in `scored`; here the command is what is tested.
    two = {"torch": by_torch, "megatron TP 1": by_megatron}
    monkeypatch.setattr("opd.pipelines.check.parity.modes_of", lambda recipe: two)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.model_dump_json(exclude_none=True))
    printed = ends(0, ["doctor", str(path), "--parity"]).out
    assert printed.count(" ok ") == 6
    for teacher, back_end in itertools.product(("qwen", "llama"), two):
        assert re.search(rf"^. {teacher} +. {back_end} ", printed, re.MULTILINE)
    assert printed.count("noise floor") == 2
    assert "1 responses of no token" in printed
    assert "1e-04 nats" in printed or "0.0001 nats" in printed


def check(recipe, modes) -> tuple[int, str]:
    out = io.StringIO()
    return check_parity(recipe, Console(file=out, width=200), modes), out.getvalue()


def test_a_mode_that_ignores_the_temperature_is_found(recipe):
    """Two engines that agree at temperature 1 need not agree at 0.7."""

    def at_one(problem, sources):
        scored = by_megatron(problem, sources)
        return {
            name: ParityScores(dict.fromkeys(s.logprobs, s.logprobs[1.0]), dict.fromkeys(s.kl, s.kl[1.0]))
            for name, s in scored.items()
        }

    code, printed = check(recipe, {"torch": by_torch, "cold": at_one})
    assert code == 2
    assert "differs" in printed


def test_a_mode_that_fails_is_reported_with_its_reason(recipe):
    def broken(problem, sources):
        raise TeacherError("no server answers")

    code, printed = check(recipe, {"torch": by_torch, "served": broken})
    assert code == 2
    assert "served was not compared: no server answers" in printed


def test_differences_never_hide_what_is_missing_or_not_finite():
    one = ParityScores({1.0: torch.zeros(3)}, {1.0: torch.zeros(3)})
    tokens_only = ParityScores({1.0: torch.full((3,), 0.25)}, {})
    apart = largest_differences(tokens_only, one)
    assert (apart.logprobs, apart.is_within(0.3), apart.is_within(0.2)) == (0.25, True, False)
    assert np.isnan(apart.kl)
    nan = ParityScores({1.0: torch.tensor([0.0, float("nan"), 0.0])}, {})
    assert largest_differences(nan, one).logprobs == float("inf")
    with pytest.raises(TeacherError, match="2 and 3 tokens"):
        largest_differences(ParityScores({1.0: torch.zeros(2)}, {}), one)
    with pytest.raises(TeacherError, match="no common temperature"):
        largest_differences(ParityScores({0.5: torch.zeros(3)}, {}), one)
    assert not Difference(0.0, float("inf")).is_within(1.0)


@pytest.mark.long
@pytest.mark.slow
def test_a_rank_that_fails_is_named(recipe, problem, tmp_path):
    from opd.pipelines.check.parity_ranks import by_two_ranks

    with pytest.raises(TeacherError, match=r"rank \d failed: .*is not a folder"):
        by_two_ranks(problem, {"gone": str(tmp_path / "gone")})


def test_a_rank_that_fails_is_not_hidden_by_one_that_waits(tmp_path, monkeypatch):
    """Rank 0 would wait for rank 1 until time is up; what rank 1 says is heard at once."""
    from opd.pipelines.check import parity_ranks

    script = tmp_path / "python"
    script.write_text('#!/bin/sh\n[ "$4" = 0 ] && exec sleep 600\necho its own words; exit 3\n')
    script.chmod(0o755)
    monkeypatch.setattr(parity_ranks.sys, "executable", str(script))
    monkeypatch.setattr(
        parity_ranks, "Supervisor", functools.partial(parity_ranks.Supervisor, last_words=0.5)
    )
    with pytest.raises(TeacherError, match="rank 1 failed: its own words"):
        parity_ranks._run_ranks(tmp_path)
    monkeypatch.setattr(parity_ranks, "TIMEOUT", 0.2)
    script.write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(TeacherError, match=r"have not answered within 0\.2 s"):
        parity_ranks._run_ranks(tmp_path)


def test_samples_without_any_response_have_no_difference(recipe, problem):
    from opd.pipelines.stages.student import load_model

    empty = [Sample("a", "a", "a", np.array([1, 2], np.int32))]
    nothing = problem_of(recipe, load_model(recipe, Path(recipe.model.path)), empty, TOKENS)
    source = {"llama": recipe.teachers["llama"].path}
    ours, theirs = by_megatron(nothing, source)["llama"], by_torch(nothing, source)["llama"]
    assert largest_differences(ours, theirs) == Difference(0.0, 0.0)
