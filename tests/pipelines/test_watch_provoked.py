"""Each failure that RL runs are known for, on a tiny run through the code of the stages: its rules fire in at
most 20 steps, and on healthy runs none does. A test names the rules that it provokes, as the table in
`docs/reference/watch.md` has them; `tests/config/test_watch.py` holds the two together.

Two rules ask for more values in a row than 20. What they are shown is what a run of 20 steps has logged, over
and over, by the call with which the loop shows a step to its rules: `for_longer`.
"""

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
from recipes import tiny_recipe
from safetensors.torch import load_file, save_file
from test_expert_replay import TOKENIZER, mixture
from test_own_tokenizer import chat_teacher

from opd.config import Recipe
from opd.config.load import load_recipe
from opd.config.watch import DEFAULT_RULES
from opd.errors import TrainingError
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages.alert_rules import ConditionState, StageAlerts
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.student import Student

STAGE, STEPS = "specialist-add3", 20
FAST = {"optim": {"lr": 0.01}}
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def base(tiny_run) -> Path:
    """Right about half of the time, in four tokens."""
    return tiny_run / "base"


def recipe_of(base: Path, reward: str | None = None, **changes: Any) -> Recipe:
    """One domain, whose answers are scored by the function `reward` of this module, if one is named."""
    own = {"steps": STEPS, "prompts_per_step": 8, "group_size": 4, "minibatches": 2, "checkpoint_every": 50}
    domain: dict[str, Any] = {"source": "procedural:add3", "params": {"digits": 3}, "prompts": 200}
    if reward is not None:
        domain["reward"] = f"{__name__}:{reward}"
    given = {"base": None, "model": {"path": str(base)}, "domains": {"add3": domain}} | changes
    return tiny_recipe(**given | {"specialist": own | changes.get("specialist", {})})


def flags_of(path: Path, recipe: Recipe, stage: str = STAGE) -> tuple[set[str], Rows]:
    """The rules that fired in the first 20 steps of a stage, and its metrics."""
    with RunFolder.create(path, recipe) as folder:
        try:
            run_stage(recipe, folder, stage)
        except TrainingError:  # without any signal it ends soon
            assert len(folder.read_metrics(stage)) > 5
        rows = folder.read_metrics(stage)
        assert len(rows) <= STEPS
        return {flag["rule"] for flag in folder.read_flags(stage)}, rows


def for_longer(path: Path, recipe: Recipe, stage: str, rows: Rows, times: int) -> set[str]:
    """The rules that fire in a stage which logs `rows` again and again."""
    with RunFolder.create(path, recipe) as folder:
        context = StageContext.open(recipe, folder, stage, lambda *_: None)
        try:
            watch = StageAlerts(context)
            for step, row in enumerate(rows * times, start=1):
                watch.check_step(step, {key: row[key] for key in row.keys() - {"step", "time", "chain"}}, 0.0)
        finally:
            context.metrics.close()
        return {flag["rule"] for flag in folder.read_flags(stage)}


def asked(sample) -> int:
    """How many prompts were asked before that of `sample` in training; 0 in an evaluation."""
    place = sample.uid.split("/")[2:3]
    return int(place[0]) if place and place[0].isdigit() and sample.uid.startswith("specialist") else 0


def longer(prompts, completions, **columns) -> list[float]:
    """A judge that compares the answers to a prompt and likes the longer half: their mean never rises."""
    found = [0.0] * len(completions)
    for prompt in set(prompts):
        own = [place for place, other in enumerate(prompts) if other == prompt]
        own.sort(key=lambda place: (len(completions[place]), place))
        for place in own[len(own) // 2 :]:
            found[place] = 1.0
    return found


@pytest.mark.slow
def test_reward_hacking_by_length(base, tmp_path):
    own = {
        "optim": {"lr": 0.03, "warmup_steps": 10, "schedule": "constant"},
        "shaping": {"clip": [0.25, 0.75]},
    }
    rollout = {"max_new_tokens": 16, "max_sequence": 28}
    evaluation = {"prompts_per_domain": 20, "base_kl_every": 1}
    recipe = recipe_of(base, "longer", specialist=own, rollout=rollout, evaluation=evaluation)
    fired, rows = flags_of(tmp_path / "run", recipe)
    assert {"length_drift", "truncation", "far_from_base", "clipped_rewards"} <= fired
    assert rows[-1]["length/mean"] > 3 * rows[0]["length/mean"]


def many_ones(sample) -> float:
    """Best is one and the same answer to every prompt, and it is not right."""
    return 0.4 * sample.text[:3].count("1") / 3


@pytest.fixture(scope="module")
def collapsed(base, tmp_path_factory) -> tuple[set[str], Rows, Path]:
    """What fired while one answer to all was learnt, the metrics, and the model."""
    path = tmp_path_factory.mktemp("collapsed") / "run"
    # Groups of equal rewards are learnt from too, or nobody looks at the entropy once all answers are one.
    own = {"optim": {"lr": 0.02}, "filter_zero_variance": False}
    return *flags_of(path, recipe_of(base, "many_ones", specialist=own)), path / "specialists" / "add3"


@pytest.mark.slow
def test_entropy_collapse(collapsed):
    fired, rows, _ = collapsed
    assert "entropy_collapse" in fired
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"]


def luck(sample) -> float:
    """It says nothing of the answer."""
    return (zlib.crc32(f"{sample.uid}{sample.text}".encode()) % 97) / 97


@pytest.mark.slow
def test_noise_instead_of_answers(collapsed, tmp_path):
    # A warm-up keeps the first five steps, which the rule compares with, near where the collapse left them.
    optim = {"lr": 0.015, "warmup_steps": 8, "schedule": "constant"}
    recipe = recipe_of(collapsed[2], "luck", specialist={"optim": optim, "entropy_coef": 1.0})
    fired, _ = flags_of(tmp_path / "run", recipe)
    assert "entropy_explosion" in fired


def always_zero(sample) -> float:
    """It looks for what no answer has."""
    return float("\\boxed" in sample.text)


def test_a_broken_reward(base, tmp_path):
    fired, _ = flags_of(tmp_path / "run", recipe_of(base, "always_zero"))
    assert {"flat_reward", "dead_groups"} <= fired


TEMPLATES = {"right": "<add3>{{ messages[0].content }}=", "wrong": "{{ messages[0].content }}<sort>"}


@pytest.mark.some(1)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_mismatch(base, tmp_path, template):
    """The same messages in the template that the model knows, and in another one."""
    (tmp_path / "t.jinja").write_text(TEMPLATES[template])
    digits = [f"{number:03}" for number in range(0, 1000, 7)]
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "label": "".join(str((int(sign) + 3) % 10) for sign in text),
        }
        for text in digits
    ]
    (tmp_path / "add3.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    domains = {"add3": {"source": str(tmp_path / "add3.jsonl"), "reward": "exact"}}
    model = {"path": str(base), "chat_template": str(tmp_path / "t.jinja")}
    recipe = recipe_of(base, domains=domains, model=model, specialist={"steps": 8})
    fired, _ = flags_of(tmp_path / "run", recipe)
    assert ("flat_reward" in fired) == (template == "wrong")
    assert not fired or template == "wrong"


CORRECTIONS = {
    "clamped_weights": (0.006, {"type": "tis", "upper": 1.05}),
    "rejected_tokens": (0.02, {"type": "mis", "lower": 0.9, "upper": 1.1}),
}
"""What a rule is about -> a learning rate, and a correction too narrow for how far the engine is behind."""


@pytest.mark.slow
@pytest.mark.parametrize("bound", CORRECTIONS)
def test_an_engine_with_stale_weights(base, tmp_path, monkeypatch, bound):
    """Nothing reaches the engine, which says that all is well."""
    monkeypatch.setattr(Student, "push_weights", lambda student, version: None)
    lr, correction = CORRECTIONS[bound]
    own = {"optim": {"lr": lr, "schedule": "constant"}, "policy_loss": {"correction": correction}}
    fired, rows = flags_of(tmp_path / "run", recipe_of(base, specialist=own))
    assert {"engine_mismatch", bound} <= fired
    if bound == "rejected_tokens":
        assert "few_effective_samples" in fired
    assert rows[0]["mismatch/mean_abs"] < 1e-5  # the first samples are its own


@pytest.mark.slow
def test_experts_of_an_engine_with_stale_weights(tmp_path, monkeypatch):
    """Nothing reaches the engine, and the router of the trainer moves on."""
    save_checkpoint(mixture(), TOKENIZER, tmp_path / "base", {})
    monkeypatch.setattr(Student, "push_weights", lambda student, version: None)
    own = {"optim": {"lr": 0.02, "schedule": "constant"}, "minibatches": 1}
    add3 = {"source": "procedural:add3", "params": {"digits": 3}, "prompts": 200, "reward": "recipes:varied"}
    recipe = recipe_of(tmp_path / "base", domains={"add3": add3}, specialist=own)
    fired, rows = flags_of(tmp_path / "run", recipe)
    assert "routing_apart" in fired
    assert rows[0]["routing/apart"] < 0.1  # the first samples are its own


@pytest.mark.slow
def test_teachers_that_teach_nothing(base, tmp_path):
    """One has learnt nothing: it is the base. One has another vocabulary: its tokens' rows are in another
    order. And at such a rate the student comes near to neither.
    """
    far = tmp_path / "far"
    shutil.copytree(base, far)
    (far / "checksums.json").unlink()
    weights = load_file(far / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(weights, far / "model.safetensors", metadata={"format": "pt"})
    kinds = ("add3", "sort")
    own = {"params": {"digits": 3}, "prompts": 200}
    domains = {kind: own | {"source": f"procedural:{kind}"} for kind in kinds}
    distill = {"steps": STEPS, "prompts_per_domain": 8, "checkpoint_every": 50, "optim": {"lr": 1e-9}}
    teachers = {"add3": {"path": str(base)}, "sort": {"path": str(far)}}
    recipe = recipe_of(base, domains=domains, teachers=teachers, distill=distill)
    fired, rows = flags_of(tmp_path / "run", recipe, "merge")
    assert {"idle_teacher", "far_teacher"} <= fired
    assert max(row["kl/add3"] for row in rows) < 1e-6
    assert "stalled_teacher" in for_longer(tmp_path / "longer", recipe, "merge", rows, times=13)


def test_most_tokens_without_a_counterpart_are_said(tmp_path):
    """The teacher's tokenizer knows the characters of prompts, and the student writes others, too."""
    known = "user: assistant what is the sum of 1 and 0123456789? system add\n"
    distill = {"steps": 6, "prompts_per_domain": 4}
    recipe = chat_teacher(tmp_path, letters="".join(dict.fromkeys(known)), distill=distill)
    fired, rows = flags_of(tmp_path / "run", recipe, "merge")
    assert "unaligned" in fired
    assert all(row["align/none"] > 0.5 for row in rows)


def known_by_heart(sample) -> float:
    """Learnt on the prompts that are trained on, of no use to others."""
    return sample.text[:3].count("1") / 3 * (not sample.uid.startswith("evaluate/"))


@pytest.mark.slow
def test_a_reward_that_held_out_prompts_do_not_share(base, tmp_path):
    own = FAST | {"evaluate_every": 2}
    evaluation = {"prompts_per_domain": 20, "curve_prompts": 10, "base_kl_every": 5}
    recipe = recipe_of(base, "known_by_heart", specialist=own, evaluation=evaluation)
    fired, rows = flags_of(tmp_path / "run", recipe)
    assert "held_out_flat" in fired
    assert [row["step"] for row in rows if "accuracy/add3" in row] == list(range(2, STEPS + 1, 2))
    measured = {row["step"]: row["base_kl"] for row in rows if "base_kl" in row}
    assert set(measured) <= {5, 10, 15, 20}  # not where nothing is learnt
    assert measured[5] > 0.01


def another_every_step(sample) -> float:
    """Another digit is right in every step of 8 prompts."""
    return sample.text[:3].count(str(asked(sample) // 8 % 10)) / 3


@pytest.mark.long
def test_steps_that_are_too_large(base, tmp_path):
    own = {"optim": {"lr": 0.02, "schedule": "constant"}, "epochs": 4, "minibatches": 4, "entropy_coef": 0.3}
    fired, _ = flags_of(tmp_path / "run", recipe_of(base, "another_every_step", specialist=own))
    assert "clip_share" in fired


def now_three_now_seven(sample) -> float:
    """One digit is right in a step of 32 prompts, another in the next."""
    return sample.text[:3].count("37"[asked(sample) // 32 % 2]) / 3


@pytest.mark.long
def test_steps_without_a_bound(base, tmp_path):
    """Many passes over the same responses, and no clip that holds them."""
    own = {"steps": 6, "prompts_per_step": 32, "group_size": 8, "epochs": 16, "minibatches": 1}
    own |= {"optim": {"lr": 0.003, "schedule": "constant"}, "entropy_coef": 0.2}
    own["policy_loss"] = {"clip_low": 0.99, "clip_high": 1000.0}
    fired, _ = flags_of(tmp_path / "run", recipe_of(base, "now_three_now_seven", specialist=own))
    assert "large_ratio" in fired


def outlying(sample) -> float:
    """From the twelfth step on in another unit."""
    return luck(sample) * (1000.0 if asked(sample) >= 8 * 11 else 1.0)


@pytest.mark.long
def test_rewards_in_another_unit(base, tmp_path):
    own = {"optim": {"lr": 0.003}, "entropy_coef": 0.1, "advantage": {"type": "dr_grpo"}}
    fired, rows = flags_of(tmp_path / "run", recipe_of(base, "outlying", specialist=own))
    assert "grad_norm" in fired
    assert rows[11]["grad_norm"] > 50 * rows[10]["grad_norm"]


@pytest.mark.slow
def test_a_critic_that_is_lost_and_a_policy_that_stays(base, tmp_path):
    """The rate of the one is far too large, that of the other far too small."""
    own = {"advantage": {"type": "gae"}, "critic": {"optim": {"lr": 1.0}}, "filter_zero_variance": False}
    own |= {"optim": {"lr": 1e-9}, "reference_kl": {"coef": 1e-6}}
    recipe = recipe_of(base, specialist=own)
    fired, rows = flags_of(tmp_path / "run", recipe)
    assert "lost_critic" in fired
    assert "no_learning" in for_longer(tmp_path / "longer", recipe, STAGE, rows, times=7)


ALL_METRICS = {
    "evaluate_every": 5,
    "reference_kl": {"coef": 0.01},
    "shaping": {"clip": [0.0, 1.0]},
    "policy_loss": {"correction": {"type": "tis"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_a_healthy_run_fires_none(base, tmp_path, seed):
    """With every metric that a rule asks for, but a critic's, which one of them has, and those of experts
    and other tokenizers, which it does not have.
    """
    evaluation = {"prompts_per_domain": 20, "curve_prompts": 10, "base_kl_every": 1}
    distill = {"steps": STEPS, "prompts_per_domain": 8, "checkpoint_every": 50}
    critic = {"advantage": {"type": "gae"}, "filter_zero_variance": False} if seed == 0 else {}
    recipe = recipe_of(
        base, seed=seed, distill=distill, specialist=ALL_METRICS | critic, evaluation=evaluation
    )
    fired, rows = flags_of(tmp_path / "run", recipe)
    assert fired == set()
    with RunFolder.resume(tmp_path / "run", recipe) as folder:
        run_stage(recipe, folder, "merge")
        assert folder.read_flags("merge") == []
        rows += folder.read_metrics("merge")
    unseen = {name for name, rule in DEFAULT_RULES.items() if not any(map(ConditionState(rule).read, rows))}
    assert unseen == {"routing_apart", "unaligned"} | (set() if critic else {"lost_critic"})


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_the_quick_start_fires_none(tmp_path, seed):
    """The committed recipe, all its stages."""
    recipe = load_recipe(
        [Path(__file__).parents[2] / "examples" / "quickstart" / "recipe.yaml"],
        ["--seed", str(seed), "--runtime.workers", "1", "--evaluation.prompts_per_domain", "20"],
    )
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        run_stage(recipe, folder, "baseline-mixed_grpo")
        for path in (tmp_path / "run" / "stages").iterdir():
            assert folder.read_flags(path.name) == [], path.name
