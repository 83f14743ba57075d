"""A real SGLang server joins the parity check: every signal it has, beside torch and Megatron-Core."""

from pathlib import Path

import pytest
import tiny
import torch
from recipes import tiny_recipe
from served_models import recipe_tokenizer

from opd.config import Recipe
from opd.models.causal_lm import CausalLM
from opd.pipelines.check.parity import check_parity, largest_differences, modes_of, problem_of

pytestmark = pytest.mark.slow

LENGTHS = [(3, 0), (4, 1), (5, 7), (1, 1), (2, 12), (1, 0)]


def recipe_with(models: dict[str, Path], url: str, signal: str) -> Recipe:
    settings = tiny_recipe().model_dump()
    settings["model"] = {"path": str(models["b"]), "device": "cpu"}
    settings["base"] = None
    for domain in settings["domains"].values():
        domain["teacher"] = "a"
    settings["teachers"] = {
        "a": {"type": "sglang", "path": str(models["a"]), "urls": [url], "signal": signal}
    }
    settings["baselines"]["methods"] = []
    return Recipe.model_validate(settings)


@pytest.mark.long
def test_a_server_says_what_the_others_say(sglang, served_models):
    recipe = recipe_with(served_models, sglang.url, "hidden")
    student = CausalLM.from_pretrained(served_models["b"])
    problem = problem_of(recipe, student, tiny.samples(LENGTHS), len(recipe_tokenizer()))
    sources = {"a": str(served_models["a"])}
    modes = modes_of(recipe)
    assert "sglang" in modes
    scored = {name: mode(problem, sources)["a"] for name, mode in modes.items()}
    for name, scores in scored.items():
        assert set(scores.logprobs) == set(scores.kl) == {1.0, 0.7}, name
        apart = largest_differences(scores, scored["torch"])
        assert apart.logprobs <= 1e-4, name
        assert apart.kl <= 1e-4, name
    assert min(float(kl.mean()) for kl in scored["torch"].kl.values()) > 0.01
    assert torch.isfinite(scored["sglang"].kl[0.7]).all()


@pytest.mark.long
def test_the_command_compares_a_server(sglang, served_models):
    assert check_parity(recipe_with(served_models, sglang.url, "hidden")) == 0


@pytest.mark.long
def test_a_wrong_model_behind_the_url_is_no_agreement(sglang, served_models, tmp_path):
    """The recipe says `b`, the server runs `a`: the check fails and says why."""
    recipe = recipe_with(served_models | {"a": served_models["b"]}, sglang.url, "hidden")
    assert check_parity(recipe) == 2


@pytest.mark.long
@pytest.mark.parametrize("signal", ["sampled", "topk"])
def test_log_probabilities_of_a_padded_head_are_refused(sglang, served_models, signal):
    """They would count the padding."""
    assert check_parity(recipe_with(served_models, sglang.url, signal)) == 2
