"""Everything a recipe names by dotted path: called with what is promised, and refused with one sentence."""

import json

import my_code
import numpy as np
import pytest
import tiny
import torch
from recipes import tiny_recipe

from opd.config import DistillConfig, PolicyLossConfig
from opd.config.rl import CustomDivergence
from opd.errors import ConfigError, RolloutError, TrainingError
from opd.metrics import read_metrics
from opd.pipelines.check.examine import run_checks
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.rollout.collect import EncodedPrompt, load_generate
from opd.rollout.torch_engine import TorchEngine
from opd.train.advantages import keep_groups
from opd.train.distill_terms import build_distill_term
from opd.train.packing import convert_batch
from opd.train.terms import PolicyTerm
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, SampleGroup, SamplingParams, TokenTerms

SAMPLING = SamplingParams(max_new_tokens=6, stop_ids=(1,))


@pytest.fixture(autouse=True)
def forget():
    my_code.seen.clear()


def prompts(count: int = 3) -> list[EncodedPrompt]:
    return [EncodedPrompt(f"p/{i}", "a", np.array([2 + i, 5, 7], np.int32), None) for i in range(count)]


def engine() -> TorchEngine:
    return TorchEngine(tiny.model(), max_running=8, max_sequence=40)


def test_a_generate_of_several_turns_masks_what_the_environment_said():
    groups = load_generate("my_code:two_turns")(engine(), prompts(), 2, SAMPLING, 0)
    assert [len(group.samples) for group in groups] == [2, 2, 2]
    for sample in (sample for group in groups for sample in group.samples):
        mask = sample.loss_mask
        assert np.array_equal(sample.response_ids[~mask], my_code.OBSERVATION)
        assert not sample.rollout_logprobs[~mask].any()
        assert (sample.rollout_logprobs[mask] < 0).all()
        assert mask[0]
        assert mask[-1]


def test_what_the_environment_said_has_no_gradient():
    """The recomputed log-probabilities see it as context; the loss does not count it."""
    samples = [
        s for g in load_generate("my_code:two_turns")(engine(), prompts(), 2, SAMPLING, 0) for s in g.samples
    ]
    backend = TorchBackend(tiny.model(), tiny.training([PolicyTerm(PolicyLossConfig())]))
    logprobs = backend.recompute_logprobs(samples)
    for sample, recomputed in zip(samples, logprobs, strict=True):
        written = sample.loss_mask
        np.testing.assert_allclose(recomputed[written], sample.rollout_logprobs[written], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("drops_a_prompt", "one group for each prompt"),
        ("forgets_masks", "of loss_mask; give one each"),
        ("spoils_sampling_masks", "sampling_masks of sample .* do not fit its .* tokens; give those of"),
        ("never_ends", "a status completed or truncated"),
        ("turns_around", "in their order \\(in another order\\)"),
        ("gives_one_less", "returned 1 samples for prompt .*, but 2 were asked for"),
        ("is_sure_beyond_bounds", "rollout_logprobs of sample .* not all of it is finite"),
        ("branches_from_nowhere", "with uids of their own and branch_of one of the group's"),
        ("branches_twice", "with uids of their own and branch_of one of the group's"),
    ],
)
def test_a_generate_that_loses_something_is_refused(name, message):
    with pytest.raises(RolloutError, match=message):
        load_generate(f"my_code:{name}")(engine(), prompts(), 2, SAMPLING, 0)


def batch() -> RolloutBatch:
    samples = tiny.samples([(3, 4), (2, 5), (4, 1), (1, 6)], teachers=["t"] * 4)
    terms = [TokenTerms.zeros(len(s.response_ids)) for s in samples]
    rng = np.random.default_rng(0)
    for sample, term in zip(samples, terms, strict=True):
        sample.teacher = "t"
        term.policy_weight = term.kl_weight = np.full(len(term.kl_weight), 1 / 16, np.float32)
        term.advantages = rng.normal(size=len(term.advantages)).astype(np.float32)
        term.old_logprobs = rng.normal(-2, 0.1, size=len(term.advantages)).astype(np.float32)
    return RolloutBatch(samples, terms)


def gradient(terms) -> torch.Tensor:
    model = tiny.model(seed=5)
    TorchBackend(model, tiny.training(terms)).forward_backward(batch())
    grads = [p.grad for p in model.module.parameters() if p.grad is not None]
    return torch.cat([grad.flatten() for grad in grads])


def test_a_policy_loss_of_ones_own_replaces_the_clipped_one():
    found = gradient([PolicyTerm(PolicyLossConfig(path="my_code:plain_policy_gradient"))])

    class Reinforce:
        def __call__(self, micro, student, sums):
            return -(micro.policy_weight * micro.advantages * student.logprobs).sum()

    torch.testing.assert_close(found, gradient([Reinforce()]))
    assert not torch.allclose(found, gradient([PolicyTerm(PolicyLossConfig())]), rtol=1e-2)


def test_a_policy_loss_with_bounds_is_told_where_responses_begin():
    found = gradient([PolicyTerm(PolicyLossConfig(path="my_code:by_response"))])

    class ByResponse:
        def __call__(self, micro, student, sums):
            lengths = torch.tensor([len(sample.response_ids) for sample in micro.samples])
            scale = 1 / lengths.repeat_interleave(lengths)
            return -(micro.policy_weight * scale * micro.advantages * student.logprobs).sum()

    torch.testing.assert_close(found, gradient([ByResponse()]))
    assert my_code.seen["bounds"] == [[0, 4, 9, 10, 16]]


def test_bounds_are_refused_where_ranks_share_responses(tmp_path):
    own = {"specialist": {"policy_loss": {"path": "my_code:by_response"}}}
    shared = tiny_recipe(**own, train={"context_parallel": 2, "ranks": 2})
    for recipe, level in ((tiny_recipe(**own), "ok"), (shared, "error")):
        found = run_checks(recipe, run_dir=tmp_path / "run", thorough=False)
        (said,) = [finding for finding in found if finding.title == "specialist.policy_loss.path"]
        assert said.level == level
    assert "cuts over ranks; set train.context_parallel to 1" in said.detail


def test_a_divergence_of_ones_own_is_a_stream_of_the_merge():
    custom = build_distill_term(
        DistillConfig(loss=CustomDivergence(path="my_code:twice_the_kl")), tiny.teacher_views
    )
    exact = build_distill_term(DistillConfig(), tiny.teacher_views)
    torch.testing.assert_close(gradient([custom]), 2 * gradient([exact]), rtol=1e-3, atol=1e-7)
    assert set(my_code.seen["divergence"]) == {"t"}


@pytest.mark.parametrize("loss", ["policy", "distill"])
def test_a_loss_that_is_no_number_a_token_is_refused(loss):
    path = "my_code:a_number"
    if loss == "policy":
        term = PolicyTerm(PolicyLossConfig(path=path))
    else:
        term = build_distill_term(DistillConfig(loss=CustomDivergence(path=path)), tiny.teacher_views)
    with pytest.raises(TrainingError, match="one number a token"):
        gradient([term])


def test_a_group_filter_refuses_groups_that_have_signal():
    groups = [SampleGroup(f"p/{i}", "a", tiny.samples([(2, 2), (2, 2)], seed=i)) for i in range(4)]
    for group in groups:
        group.samples[0].reward, group.samples[1].reward = 0.0, 1.0
    groups[3].samples[1].reward = 0.0
    kept = keep_groups(groups, "my_code:not_the_first", zero_variance=False)
    assert [group.uid for group in kept] == ["p/1"]
    assert my_code.seen["filter"] == ["p/0", "p/1", "p/2"]  # what has no signal is not asked about
    kept = keep_groups(groups, "my_code:not_the_first", zero_variance=True)
    assert [group.uid for group in kept] == ["p/1", "p/3"]
    assert keep_groups(groups, None, zero_variance=True) == groups
    with pytest.raises(ConfigError, match="returned None; return True"):
        keep_groups(groups, "my_code:maybe", zero_variance=True)


def test_a_conversion_has_the_last_word_on_the_batch():
    whole = batch()
    assert convert_batch(whole, None, "distill.to_batch") is whole
    half = convert_batch(whole, "my_code:first_half", "distill.to_batch")
    assert half.samples == whole.samples[::2]
    with pytest.raises(TrainingError, match="my_code:nothing returned NoneType"):
        convert_batch(whole, "my_code:nothing", "distill.to_batch")
    whole.terms[0].old_logprobs = None  # they are the loss's own
    assert convert_batch(whole, "my_code:first_half", "distill.to_batch").terms[0] is whole.terms[0]
    whole.terms[0].kl_weight = None  # type: ignore[assignment]
    with pytest.raises(TrainingError, match="kl_weight of sample"):
        convert_batch(whole, "my_code:first_half", "distill.to_batch")


@pytest.mark.parametrize(
    "load",
    [
        lambda path: load_generate(path),
        lambda path: convert_batch(batch(), path, "distill.to_batch"),
        lambda path: PolicyTerm(PolicyLossConfig(path=path)),
        lambda path: keep_groups([], path, zero_variance=True),
        lambda path: build_distill_term(DistillConfig(loss=CustomDivergence(path=path)), tiny.teacher_views),
    ],
)
def test_what_cannot_be_loaded_is_named_before_anything_runs(load):
    with pytest.raises(ConfigError, match="my_code:missing"):
        load("my_code:missing")
    with pytest.raises(ConfigError, match="not callable"):
        load("my_code:not_callable")


def test_the_doctor_finds_a_path_that_leads_nowhere(tmp_path):
    recipe = tiny_recipe(specialist={"group_filter": "my_code:gone", "to_batch": "my_code:first_half"})
    levels = {f.title: f.level for f in run_checks(recipe, run_dir=tmp_path / "run", thorough=False)}
    assert levels["specialist.group_filter"] == "error"
    assert levels["specialist.to_batch"] == "ok"


def test_a_whole_run_uses_all_of_them(tmp_path):
    """Base, two specialists and the merge, with every extension point of the recipe in use."""
    recipe = tiny_recipe()
    domains = {
        name: domain.model_dump() | {"reward": "my_code:reward"} for name, domain in recipe.domains.items()
    }
    settings = recipe.model_dump()
    settings["domains"] = domains
    settings["rollout"] |= {"generate": "my_code:two_turns", "max_new_tokens": 3, "max_sequence": 24}
    settings["base"] |= {"steps": 20}
    settings["evaluation"] |= {"every": 1, "prompts_per_domain": 4, "curve_prompts": 2}
    settings["specialist"] |= {
        "steps": 2,
        "advantage": {"type": "custom", "path": "my_code:best_of_group"},
        "policy_loss": {"path": "my_code:plain_policy_gradient"},
        "group_filter": "my_code:not_the_first",
        "to_batch": "my_code:first_half",
    }
    settings["distill"] |= {
        "steps": 2,
        "loss": {"type": "custom", "path": "my_code:twice_the_kl"},
        "to_batch": "my_code:first_half",
    }
    with RunFolder.create(tmp_path / "run", type(recipe).model_validate(settings)) as folder:
        run_stage(type(recipe).model_validate(settings), folder, "merge")
        assert folder.stage_done("merge")["steps"] == 2
        learnt, learnt_from = (
            my_code.seen.pop("two_turns"),
            {"base", "specialist-sort", "specialist-add3", "merge"},
        )
        run_stage(type(recipe).model_validate(settings), folder, "evaluate")
        measured = my_code.seen["two_turns"]
        rows = json.loads((folder.path / "results.json").read_text())["models"]
    called = {"two_turns", "reward", "advantage", "filter", "policy", "divergence", "to_batch"}
    assert set(my_code.seen) == called
    everything = [group for groups in (*learnt, *measured) for group in groups]
    assert all((~sample.loss_mask).sum() == 3 for group in everything for sample in group.samples)
    # The agent writes whatever is learnt from or measured: the warm-up's check, the curve, the evaluation.
    written = {group.uid.split("/")[0] for groups in learnt for group in groups}
    assert written == (learnt_from - {"base"}) | {"evaluate"}
    models, domains, modes, prompts = 4, 2, 2, 4
    assert sum(len(groups) for groups in measured) == models * domains * modes * prompts
    lengths = [domain["mean_length"] for row in rows for domain in row["domains"].values()]
    assert all(2 <= length <= 2 * 3 for length in lengths)  # of two turns, without the environment's tokens


def test_an_estimator_of_ones_own_needs_no_group(tmp_path):
    """It may compare one answer with what it knows; the filter of groups without signal is then off."""
    own = {"advantage": {"type": "custom", "path": "my_code:over_a_half"}, "group_size": 1, "steps": 2}
    with pytest.raises(ValueError, match="filter_zero_variance would drop every group, all of whose rewards"):
        tiny_recipe(specialist=own)
    own |= {"filter_zero_variance": False, "prompts_per_step": 6, "minibatches": 1}
    recipe = tiny_recipe(specialist=own, base={"steps": 2, "batch_size": 8})
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        run_stage(recipe, folder, "specialist-sort")
        rows = read_metrics(folder.metrics_path("specialist-sort"))
    assert [row["grad_norm"] > 0 for row in rows] == [True, True]
    assert all("frac_reward_zero_std" not in row for row in rows)
    rewarded = {"rl_coef": 1.0, "samples_per_prompt": 1, "advantage": own["advantage"]}
    assert tiny_recipe(distill=rewarded).distill.samples_per_prompt == 1
