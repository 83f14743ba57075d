"""A specialist that follows teachers beside its rewards: its gradient, what it shares with the merge."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attempts import run_only
from recipes import tiny_recipe
from transformers import AutoModelForCausalLM

from opd.config.specialist import SpecialistConfig
from opd.metrics import read_metrics
from opd.models.causal_lm import CausalLM
from opd.pipelines.records.results import write_results
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.report.load import load_run
from opd.pipelines.report.page import render_report
from opd.pipelines.run import run_stage
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.distill import Distill
from opd.pipelines.stages.grpo import GRPO
from opd.pipelines.stages.loop import PhaseTimer, Plan, StepContext
from opd.pipelines.stages.samples import StepSamples
from opd.pipelines.stages.supervised import new_base
from opd.teachers.schedule import TeacherSchedule
from opd.types import Sample, SampleGroup, Status

TEMPERATURE, COEF = 0.7, 0.5
LOSSES = {"k1": {"type": "k1"}, "full": {"type": "full"}}
ROLLOUT = {"max_new_tokens": 5, "max_sequence": 16, "temperature": TEMPERATURE}


def odd(sample: Any) -> float:
    """A reward that some groups of an untrained model's answers differ in."""
    return float(sum(map(ord, sample.text)) % 2)


def alike(sample: Any) -> float:
    """One that says nothing."""
    return 1.0


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Three models of noise: `base`, `t` and `u`."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("base", "t", "u")):
        new_base(tiny_recipe(base=None, seed=seed), folder / name)
        model = CausalLM.from_pretrained(folder / name)
        with torch.no_grad():  # far enough from uniform that it matters who teaches
            for parameter in model.module.parameters():
                parameter.mul_(3.0)
        model.module.save_pretrained(folder / name)
        (folder / name / "checksums.json").unlink(missing_ok=True)
    return folder


def recipe_of(models: Path, reward: str = "odd", *, teacher: Any = "t", **changes):
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    for domain in domains.values():
        domain |= {"reward": f"{__name__}:{reward}"} | ({"teacher": teacher} if teacher else {})
    settings: dict[str, Any] = {
        "base": None,
        "model": {"path": str(models / "base")},
        "teachers": {name: {"path": str(models / name)} for name in ("t", "u")},
        "domains": domains,
        "rollout": ROLLOUT,
        "baselines": {"methods": []},
    }
    return tiny_recipe(**settings | changes)


def taught(loss: dict, **more) -> dict:
    own = {"prompts_per_step": 12, "group_size": 3, "minibatches": 1, "steps": 2}
    return own | {"opd": {"teacher": "t", "coef": COEF, "loss": loss} | more}


def flat(module) -> torch.Tensor:
    return torch.cat([p.grad.double().reshape(-1) for p in module.parameters() if p.requires_grad])


def gradient(algorithm: GRPO | Distill, groups: Sequence[SampleGroup]) -> tuple[torch.Tensor, Plan]:
    """Of the first update on `groups`, whose samples are scored here."""
    backend, step = algorithm.student.backend, StepContext(0, 0.0, PhaseTimer(), {})
    samples = StepSamples(groups, backend)
    algorithm.score(samples, step)
    plan = algorithm.plan(samples, step)
    [update] = plan.updates
    backend.accumulate_gradient(update.samples, update.read)
    update.done()
    return flat(backend.model.module), plan  # type: ignore[attr-defined]


def opened(kind, recipe, start: Path, stage: str, folder: Path, stack: ExitStack):
    run = stack.enter_context(RunFolder.create(folder, recipe))
    own = recipe.for_domain("sort") if kind is GRPO else recipe
    context = StageContext.open(own, run, stage, lambda *_: None)
    stack.callback(context.metrics.close)
    return GRPO(context, start, ["sort"], stack) if kind is GRPO else Distill(context, start, stack)


def logprobs(model: Any, sample: Sample) -> torch.Tensor:
    """[R, V] float64 of a response, at the sampling temperature, by transformers alone."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


def in_float64(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")


def expected(models: Path, groups: Sequence[SampleGroup], loss: str, critic: bool) -> torch.Tensor:
    """`COEF KL(student || teacher)` a token of all samples, beside the mean of `-A log p` over the tokens of
    the answers that the rewards teach on: of k1 there is one mean, over the tokens of all. A critic that
    knows nothing leaves rewards as they are, which are whitened over these tokens.
    """
    student, teacher = in_float64(models / "base"), in_float64(models / "t")
    policy, gains, divergence, ratios = [], [], [], []
    for group in groups:
        rewards = np.array([s.reward for s in group.samples])
        for sample, reward in zip(group.samples, rewards, strict=True):
            if not len(sample.response_ids):
                continue
            own = logprobs(student, sample)
            with torch.no_grad():
                other = logprobs(teacher, sample)
            ids = torch.from_numpy(sample.response_ids.astype(np.int64))[:, None]
            drawn = own.gather(1, ids)[:, 0]
            ratios.append((drawn, (own - other).gather(1, ids)[:, 0].detach()))
            divergence.append((own.exp() * (own - other)).sum(-1))
            if (critic or rewards.std() > 0) and sample.status is not Status.TRUNCATED:
                gain = reward if critic else (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
                gains.append(torch.full_like(drawn, float(gain)).detach())
                policy.append(drawn)
    gain, every = torch.cat(gains), torch.cat(divergence)
    if critic:
        gain = (gain - gain.mean()) / gain.std(correction=0)
    learnt = -gain * torch.cat(policy)
    assert 0 < len(learnt) < len(every)
    if loss == "full":
        total = learnt.mean() + COEF * every.mean()
    else:
        mean = torch.cat([ratio for _, ratio in ratios]).mean()
        follow = sum((COEF * (ratio - mean) * drawn).sum() for drawn, ratio in ratios)
        total = (learnt.sum() + follow) / len(every)
    total.backward()
    return flat(student)


@pytest.mark.some(1)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("critic", [False, True], ids=["groups", "critic"])
def test_the_gradient_is_the_rewards_and_the_teachers(models, tmp_path, loss, critic):
    """Against float64 and transformers. What the filter drops and the mask hides teachers teach on."""
    own = taught(LOSSES[loss]) | {"shaping": {"mask_truncated": True}}
    own |= {"advantage": {"type": "gae"}, "filter_zero_variance": False} if critic else {}
    recipe = recipe_of(models, specialist=own, teacher=None)
    with ExitStack() as stack:
        grpo = opened(GRPO, recipe, models / "base", "specialist-sort", tmp_path / "run", stack)
        groups = grpo.student.sample_groups(grpo.batch_prompts(0), 3, grpo.student.rollout_engine)
        found, plan = gradient(grpo, groups)
    truth = expected(models, groups, loss, critic)
    assert float((found - truth).abs().max()) < 1e-4 * float(truth.abs().max())
    if loss == "k1":
        assert plan.metrics["kl/t"] == pytest.approx(plan.metrics["kl/mean"], rel=1e-5)
    assert any(len({s.reward for s in g.samples}) == 1 for g in groups), "groups that the filter drops"
    assert ("critic/loss" in plan.metrics) == critic
    assert any(s.status is Status.TRUNCATED for g in groups for s in g.samples)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("mixture", ["one_hot", "geometric", "adapters"])
def test_without_a_reward_it_is_the_merge(models, tmp_path, loss, mixture):
    """Bit for bit, on the same answers: one code makes both. `adapters`: where these alone are trained."""
    model = {"path": str(models / "base")}
    if mixture == "adapters":
        pytest.importorskip("peft")
        model, mixture = model | {"lora": {"rank": 4}}, "one_hot"
    teacher = {"t": 0.5, "u": 0.5}
    distill = {"loss": LOSSES[loss] | ({"coef": COEF} if loss == "k1" else {}), "mixture": mixture}
    distill |= {"normalise": "token", "prompts_per_domain": 12}
    specialist = taught(LOSSES[loss], teacher=teacher, mixture=mixture)
    own = recipe_of(models, "alike", specialist=specialist, teacher=None, model=model)
    merge = recipe_of(models, "alike", distill=distill, teacher=teacher, model=model)
    with ExitStack() as stack:
        grpo = opened(GRPO, own, models / "base", "specialist-sort", tmp_path / "grpo", stack)
        merging = opened(Distill, merge, models / "base", "merge", tmp_path / "merge", stack)
        groups = grpo.student.sample_groups(grpo.batch_prompts(0), 3, grpo.student.rollout_engine)
        found, _ = gradient(grpo, copy.deepcopy(groups))
        truth, _ = gradient(merging, groups)
    assert torch.equal(found, truth if loss == "k1" else COEF * truth)
    assert float(truth.abs().max()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_merge_of_a_taught_domain_and_a_rewarded_one(models, tmp_path, loss):
    """`sort` follows its teacher alone, `add3` its reward alone; each has its share of the loss."""
    reward = {"rl_coef": 2.0, "samples_per_prompt": 3, "advantage": {"type": "dr_grpo"}}
    distill = reward | {"loss": LOSSES[loss], "prompts_per_domain": 8}
    domains = recipe_of(models, teacher=None).model_dump(mode="json", exclude_none=True)["domains"]
    domains["sort"] |= {"teacher": "t", "weight": 3.0, "distill": {"rl_coef": 0.0, "kl_coef": COEF}}
    domains["add3"] |= {"distill": {"kl_coef": 0.0}}
    recipe = recipe_of(models, distill=distill, domains=domains)
    assert recipe.specialist_domains() == []
    with ExitStack() as stack:
        merge = opened(Distill, recipe, models / "base", "merge", tmp_path / "run", stack)
        groups = merge.student.sample_groups(merge.batch_prompts(0), 3, merge.student.rollout_engine)
        found, _ = gradient(merge, groups)
    student, teacher = in_float64(models / "base"), in_float64(models / "t")
    taught, rewarded = [], []
    for group in groups:
        centred = group.rewards - group.rewards.mean()
        for sample, gain in zip(group.samples, centred, strict=True):
            if not len(sample.response_ids):
                continue
            own = logprobs(student, sample)
            with torch.no_grad():
                other = logprobs(teacher, sample)
            drawn = torch.from_numpy(sample.response_ids.astype(np.int64))[:, None]
            if sample.domain == "add3":
                rewarded.append(-2.0 * float(gain) * own.gather(1, drawn)[:, 0])
            elif loss == "full":
                taught.append((own.exp() * (own - other)).sum(-1))
            else:
                taught.append(
                    torch.stack([(own - other).detach().gather(1, drawn)[:, 0], own.gather(1, drawn)[:, 0]])
                )
    if loss == "k1":
        ratio, own = torch.cat(taught, 1)
        taught = [(ratio - ratio.mean()).detach() * own]
    (0.75 * COEF * torch.cat(taught).mean() + 0.25 * torch.cat(rewarded).mean()).backward()
    truth = flat(student)
    assert float((found - truth).abs().max()) < 1e-4 * float(truth.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["memory", "disk"])
def test_a_run_of_both_kinds_of_domains(models, tmp_path, kept):
    domains = recipe_of(models, teacher=None).model_dump(mode="json", exclude_none=True)["domains"]
    domains["add3"] |= {"teacher": "t"}
    domains["sort"] |= {"distill": {"kl_coef": 0}}
    own = {
        "steps": 2,
        "prompts_per_domain": 4,
        "samples_per_prompt": 2,
        "rl_coef": 1.0,
        "loss": {"type": "k1"},
    }
    recipe = recipe_of(models, domains=domains, distill=own, storage={"trajectories": kept})
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        run_stage(recipe, folder, "merge")
        run_stage(recipe, folder, "evaluate")
        write_results(recipe, folder)
    rows = read_metrics(tmp_path / "run/stages/merge/metrics.jsonl")
    assert [row["token_share/t"] for row in rows] == [1.0, 1.0]
    assert all("reward/sort" in row and row["head_loads"] == 1 for row in rows)
    found = load_run(tmp_path / "run")
    assert found.best_teacher("sort") is None
    assert found.best_teacher("add3") is not None
    assert "sort" in render_report(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "critic"), [pytest.param("k1", False, marks=pytest.mark.long), ("full", False), ("k1", True)]
)
def test_a_run_in_memory_and_on_disk(models, tmp_path, loss, critic):
    """The same weights; a reward that says nothing ends no run that has a teacher, and metrics name it."""
    ends = []
    held: dict[str, Any] = {"epochs": 2, "minibatches": 2, "max_steps_without_signal": 1}
    held["reference_kl"] = {"coef": 0.1, "target": 0.02, "estimator": "k1", "placement": "advantage"}
    held |= {"advantage": {"type": "gae"}, "filter_zero_variance": False} if critic else {}
    for kept in ("memory", "disk"):
        own = taught(LOSSES[loss]) | held
        recipe = recipe_of(models, "alike", teacher=None, specialist=own, storage={"trajectories": kept})
        with RunFolder.create(tmp_path / kept, recipe) as folder:
            run_stage(recipe, folder, "specialist-sort")
            done = folder.stage_done("specialist-sort") or {}
        ends.append(done["digest"])
        rows = read_metrics(tmp_path / kept / "stages/specialist-sort/metrics.jsonl")
        assert done["counters"]["head_loads"] > 0
    assert ends[0] == ends[1]
    assert "Specialists: KL to their teachers" in render_report(load_run(tmp_path / "disk"))
    keys = {"kl/mean", "kl/t", "token_share/t", "grad_share/t", "teacher_tokens", "head_loads", "entropy"}
    for row in rows:
        assert keys <= set(row)
        assert row["token_share/t"] == pytest.approx(1)
        assert row["resident_heads_peak"] == 1
        assert row["reference_kl/measured"] == pytest.approx(0.0, abs=1e-5) or row["step"] > 1


def test_what_refills_a_step_is_told_to_teachers_at_once(models, tmp_path, monkeypatch):
    """As the step's first answers are: those that compute elsewhere begin while others are written. And a
    critic that learns alone keeps nothing of theirs for the next step.
    """
    told: list[str] = []
    begin, score = TeacherSchedule.begin_scoring, TeacherSchedule.score
    asked: list[list[str]] = []

    def beginning(schedule: TeacherSchedule, samples: Sequence[Sample]) -> None:
        told.extend(sample.uid for sample in samples)
        begin(schedule, samples)

    def scoring(schedule: TeacherSchedule, samples: Sequence[Sample]) -> None:
        uids = [sample.uid for sample in samples]
        assert sorted(told) == sorted(uids), "each as it ended"
        assert not schedule._rows
        asked.append(uids)
        score(schedule, samples)
        told.clear()

    monkeypatch.setattr(TeacherSchedule, "begin_scoring", beginning)
    monkeypatch.setattr(TeacherSchedule, "score", scoring)
    critic = {"advantage": {"type": "gae"}, "filter_zero_variance": False, "critic": {"warmup_steps": 1}}
    chosen = {"refill": {"limit": 3}, "group_filter": "opd.train.advantages:has_signal"}
    own = taught(LOSSES["full"]) | chosen | critic
    teachers: dict[str, Any] = {name: {"path": str(models / name)} for name in ("t", "u")}
    teachers["u"] |= {"type": "sglang", "urls": ["http://127.0.0.1:1"]}  # which nobody asks here
    recipe = recipe_of(models, teacher=None, specialist=own, teachers=teachers)
    run_only(recipe, tmp_path / "run", "specialist-sort")
    rows = read_metrics(tmp_path / "run/stages/specialist-sort/metrics.jsonl")
    assert [len(uids) for uids in asked] == [3 * row["refill/taken"] for row in rows]
    assert all(row["refill/taken"] > 12 for row in rows)
    assert ["kl/mean" in row for row in rows] == [False, True]


@pytest.mark.long
@pytest.mark.slow
def test_a_specialist_with_a_teacher_learns_faster(tmp_path):
    """At equal steps, prompts and answers, of a rate at which rewards alone teach it nothing."""
    plain = tiny_recipe().base
    assert plain is not None
    expert = plain.model_dump() | {"steps": 160, "right": 1.0, "wrong_rule": 0.0}
    for name, base in {"base": plain.model_dump(), "expert": expert}.items():
        with RunFolder.create(tmp_path / name, recipe := tiny_recipe(base=base)) as folder:
            run_stage(recipe, folder, "base")
    rewards, own = {}, {"steps": 20, "prompts_per_step": 12, "group_size": 4, "optim": {"lr": 5e-3}}
    for name, opd in {
        "alone": None,
        "taught": {"teacher": "t", "coef": 4.0, "loss": {"type": "full"}},
    }.items():
        recipe = tiny_recipe(
            base=None,
            model={"path": str(tmp_path / "base/base")},
            teachers={"t": {"path": str(tmp_path / "expert/base")}},
            specialist=own | {"minibatches": 2, "opd": opd},
        )
        run_only(recipe, tmp_path / name, "specialist-sort")
        rows = read_metrics(tmp_path / name / "stages/specialist-sort/metrics.jsonl")
        rewards[name] = float(np.mean([row["reward/mean"] for row in rows[-5:]]))
        assert any(key.startswith(("kl/", "head_", "teacher")) for row in rows for key in row) == bool(opd)
    assert rewards["taught"] > rewards["alone"] + 0.2, rewards


@pytest.mark.parametrize(
    ("opd", "sentence"),
    [
        ({"teacher": "x"}, "specialist.opd.teacher names 'x', but a specialist follows teachers that exist"),
        ({"teacher": "sort"}, "add teachers.sort.path"),
        ({"teacher": {}}, "give the name of a teacher, or several with positive weights"),
        ({"teacher": {"t": -1.0}}, "several with positive weights"),
        ({"teacher": "t", "coef": 0}, "coef 0 would read teachers for nothing"),
        ({"teacher": "t", "loss": {"type": "k1", "coef": 2}}, "set opd.coef"),
        ({"teacher": "t", "loss": {"type": "k1", "loss": {"clip_high": 0.5}}}, "set policy_loss"),
        ({"teacher": "t", "loss": {"type": "k2"}, "mixture": "arithmetic"}, "mixture arithmetic"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused(opd, sentence):
    teachers = {"t": {"path": "/some/folder"}}
    own = {"opd": opd}
    with pytest.raises(ValueError, match=sentence):
        tiny_recipe(teachers=teachers, specialist=own)
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    domains["sort"]["specialist"] = own
    with pytest.raises(ValueError, match=sentence):
        tiny_recipe(teachers=teachers, domains=domains)


ALONE: dict[str, Any] = {"distill": {"kl_coef": 0.0}}


@pytest.mark.parametrize(
    ("distill", "sort", "sentence"),
    [
        ({"kl_coef": 0.0}, {}, "distill.kl_coef is 0, so no domain has a teacher"),
        ({"rl_coef": 1.0, "samples_per_prompt": 2}, ALONE | {"also": "add3"}, "kl_coef is 0 in every domain"),
        ({}, ALONE, "leaves sort its reward alone, which has no weight"),
        (
            {"rl_coef": 1.0, "samples_per_prompt": 2},
            {"distill": {"kl_coef": 0.0, "rl_coef": 0.0}},
            "leaves sort its reward alone, which has no weight",
        ),
        (
            {"rl_coef": 1.0, "samples_per_prompt": 2},
            ALONE | {"teacher": "add3"},
            "domains.sort.teacher has no effect",
        ),
        (
            {"rl_coef": 1.0, "samples_per_prompt": 2},
            ALONE,
            "domain sort has none; leave it out of baselines.methods",
        ),
    ],
    ids=str,
)
def test_domains_that_would_learn_nothing_are_refused(distill, sort, sentence):
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    domains["sort"] |= {key: value for key, value in sort.items() if key != "also"}
    if "also" in sort:
        domains[sort["also"]] |= ALONE
    with pytest.raises(ValueError, match=sentence):
        tiny_recipe(domains=domains, distill=distill)


NEEDED = {
    "two updates": {"minibatches": 2},
    "two epochs": {"epochs": 2},
    "corrected": {"policy_loss": {"correction": {"type": "tis"}}},
    "told to k1": {"opd": {"teacher": "t", "loss": {"type": "k1"}}},
    "held to the reference": {"reference_kl": {"coef": 0.1, "target": 0.01}},
    "charged for the reference": {"reference_kl": {"coef": 0.1, "estimator": "k1", "placement": "advantage"}},
    "a critic's": {"advantage": {"type": "gae"}, "filter_zero_variance": False},
    "shown to others": {"to_batch": "somewhere:batch"},
}
SPARED = {
    "clip": {},
    "gspo": {"policy_loss": {"type": "gspo"}, "entropy_coef": 0.01},
    "reference": {"reference_kl": {"coef": 0.1, "estimator": "k3"}},
    "taught": {"opd": {"teacher": "t", "coef": COEF, "loss": {"type": "full"}}},
}


@pytest.mark.parametrize("case", [*NEEDED, *SPARED])
def test_what_looks_at_log_probabilities_before_the_update_has_them(models, case):
    own = {"minibatches": 1, "epochs": 1} | (NEEDED | SPARED)[case]
    recipe = recipe_of(models, teacher=None, specialist=own)
    assert recipe.specialist.needs_old_logprobs == (case in NEEDED)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "home"), [*((case, "memory") for case in SPARED), ("clip", "disk")])
def test_a_step_of_one_update_is_the_same_without_a_pass_before_it(models, tmp_path, monkeypatch, case, home):
    found = []
    for needed in (True, False):
        monkeypatch.setattr(SpecialistConfig, "needs_old_logprobs", needed)
        more = {"prompts_per_step": 12, "group_size": 3, "minibatches": 1, "steps": 2} | SPARED[case]
        recipe = recipe_of(models, teacher=None, specialist=more, storage={"trajectories": home})
        out = tmp_path / str(needed)
        run_only(recipe, out, "specialist-sort")
        weights = dict(CausalLM.from_pretrained(out / "specialists" / "sort").weights())
        found.append((weights, read_metrics(out / "stages" / "specialist-sort" / "metrics.jsonl")))
    for name, tensor in found[0][0].items():
        torch.testing.assert_close(found[1][0][name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    passing = ("time", "memory", "seconds", "wait", "rollout/", "chain", "stall", "bytes")
    for before, after in zip(found[0][1], found[1][1], strict=True):
        assert before.keys() == after.keys()
        assert after["policy/ratio_max"] == 1.0
        for name, value in before.items():
            if not any(part in name for part in passing):
                assert after[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_what_few_updates_have_is_not_watered_down(models, tmp_path):
    """Ratios are of what rewards teach, which not every mini-batch has; each teacher has some."""
    found = []
    for parts in (1, 12):
        own = taught(LOSSES["full"], teacher={"t": 0.5, "u": 0.5}) | {"steps": 1, "minibatches": parts}
        own |= {"optim": {"lr": 1e-9}, "group_size": 2}
        recipe = recipe_of(models, teacher=None, specialist=own)
        run_only(recipe, tmp_path / str(parts), "specialist-sort")
        (row,) = read_metrics(tmp_path / str(parts) / "stages/specialist-sort/metrics.jsonl")
        found.append(row)
    assert 0.2 < found[0]["frac_reward_zero_std"] < 0.8  # mini-batches without signal
    assert found[1]["policy/ratio_mean"] == pytest.approx(1.0, rel=1e-3)
    for name in ("entropy", "kl/t", "kl/u"):  # the same tokens, weighed by update
        assert found[1][name] == pytest.approx(found[0][name], rel=0.25), name
    for name in ("token_share", "grad_share"):
        assert found[1][f"{name}/t"] + found[1][f"{name}/u"] == pytest.approx(1.0)
