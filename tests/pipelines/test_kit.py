"""Epochs, an adaptive reference KL, whitening and GSPO together: resumed bit for bit, and what each does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import yaml
from attempts import run_only, stop
from dialects import SGLANG
from little_models import little
from recipes import tiny_recipe
from safetensors.torch import load_file

from opd.config import Recipe
from opd.metrics import read_metrics
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages.supervised import new_base
from opd.train.terms import LARGEST, SMALLEST, next_coefficient

KIT = {
    "steps": 4,
    "prompts_per_step": 8,
    "group_size": 4,
    "minibatches": 2,
    "epochs": 2,
    "checkpoint_every": 2,
    "advantage": {"type": "reinforce_plus_plus_baseline"},
    "policy_loss": {"type": "gspo", "clip_low": 0.02, "clip_high": 0.03},
    "reference_kl": {"coef": 0.1, "target": 0.02, "gain": 1.0},
    "entropy_coef": 0.01,
}
STAGE = "specialist-add3"


@pytest.fixture(scope="module")
def base(tiny_run) -> Path:
    return tiny_run / "base"


def recipe_of(base: Path, changes: dict, **more) -> Recipe:
    """With a teacher that is there to be followed: the base."""
    settings = {"model": {"path": str(base)}, "teachers": {"start": {"path": str(base)}}} | more
    return tiny_recipe(base=None, **settings, specialist=KIT | changes)


def outcome(base: Path, path: Path, changes: dict, stop_after: int | None = None, **more):
    """Digest and metrics of the specialist, after an attempt that was stopped if `stop_after` says when."""
    recipe = recipe_of(base, changes, **more)
    with RunFolder.create(path, recipe) as folder:
        if stop_after is not None:
            stop(recipe, folder, STAGE, stop_after)
        run_stage(recipe, folder, STAGE)
        done = folder.stage_done(STAGE)
    assert done is not None
    rows = read_metrics(path / "stages" / STAGE / "metrics.jsonl")
    kept = ("reward/", "policy/", "reference_kl", "entropy", "grad_norm", "critic/", "staleness/")
    return done["digest"], [{k: v for k, v in row.items() if k.startswith(kept)} for row in rows]


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    return outcome(base, tmp_path_factory.mktemp("whole") / "run", {})


@pytest.mark.slow
def test_a_stopped_attempt_goes_on_bit_for_bit(base, whole, tmp_path):
    """It is stopped in a step after the checkpoint, whose coefficient the counters hold."""
    assert outcome(base, tmp_path / "run", {}, stop_after=3) == whole


PPO = {
    "advantage": {"type": "gae", "lam": 0.9},
    "critic": {"clip": 0.3, "warmup_steps": 1, "optim": {"lr": 3e-3}},
    "policy_loss": {"type": "clip"},
    "reference_kl": {"coef": 0.1, "target": 0.02, "estimator": "k1", "placement": "reward"},
    "filter_zero_variance": False,
    "group_size": 2,
    "steps": 3,
    "opd": {"teacher": "start", "coef": 0.5},
}


@pytest.fixture(scope="module")
def ppo(base, tmp_path_factory):
    return outcome(base, tmp_path_factory.mktemp("ppo") / "run", PPO)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 2])
def test_a_critic_goes_on_bit_for_bit_too(base, ppo, tmp_path, after):
    """Stopped in a step of its warm-up, before a checkpoint; and after one, with its moments."""
    assert outcome(base, tmp_path / "run", PPO, stop_after=after) == ppo


@pytest.mark.slow
def test_a_critic_learns_alone_first_and_then_beside_the_policy(ppo):
    _, rows = ppo
    assert "policy/kl_old" not in rows[0]
    assert all(row["policy/kl_old"] >= 0 for row in rows[1:])
    assert rows[1]["reference_kl/measured"] == pytest.approx(0.0, abs=1e-6)  # nothing has moved yet
    assert rows[0]["reference_kl/coef"] == rows[1]["reference_kl/coef"] == 0.1  # nor could it have
    assert rows[2]["reference_kl/measured"] != 0.0
    assert all(row["reference_kl"] == row["reference_kl/measured"] for row in rows)  # no loss says it
    assert rows[0]["critic/value_mean"] == 0.0
    assert rows[2]["reference_kl/coef"] == pytest.approx(0.098)
    for row in rows:
        assert {"critic/loss", "critic/return_mean", "critic/explained_variance"} <= row.keys()
        assert {"critic/clip_ratio", "critic/lr", "critic/grad_norm"} <= row.keys()
    assert rows[2]["critic/value_mean"] != rows[1]["critic/value_mean"] != 0.0


@pytest.mark.slow
def test_a_critic_is_kept_with_the_stage_and_a_damaged_one_is_not_used(base, ppo, tmp_path):
    """The checkpoint whose critic is damaged counts as none: the stage begins again, to the same weights."""
    recipe = recipe_of(base, PPO)
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        stop(recipe, folder, STAGE, 2)
        (kept,) = folder.checkpoints_folder(STAGE).glob("*/critic_model.safetensors")
        assert kept.with_name("critic_optimizer.safetensors").stat().st_size > 1.9 * kept.stat().st_size
        data = bytearray(kept.read_bytes())
        data[-1] ^= 1
        kept.write_bytes(data)
        run_stage(recipe, folder, STAGE)
        assert (folder.stage_done(STAGE) or {})["digest"] == ppo[0]


@pytest.mark.slow
def test_a_critic_learns_beside_a_student_on_a_server(tmp_path):
    """Both engines write the most likely token, so the same. So student and critic learn the same."""
    greedy, ends, base = {"top_k": 1, "max_new_tokens": 5, "max_sequence": 16}, {}, tmp_path / "base"
    config = tiny_recipe().model.config or {}
    new_base(tiny_recipe(base=None, model={"config": config | {"tie_word_embeddings": False}}), base)
    digits = {"params": {"digits": 3}, "prompts": 50}
    domains = {"add3": {"source": "procedural:add3", "reward": "recipes:varied"} | digits}
    with little(SGLANG.little, base) as server:
        for name, engine in {"here": {}, "served": {"type": "sglang", "urls": [server.url]}}.items():
            rollout = greedy | ({"engine": engine} if engine else {})
            _, rows = outcome(base, tmp_path / name, PPO, rollout=rollout, domains=domains)
            ends[name] = load_file(tmp_path / name / "specialists/add3/model.safetensors"), rows
        assert server.received > 0
    (ours, rows), (theirs, others) = ends["served"], ends["here"]
    assert rows[-1]["critic/value_mean"] != 0.0
    for row, other in zip(rows, others, strict=True):
        for key in ("critic/loss", "critic/value_mean", "reward/mean"):
            assert row[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5)
    tiny.assert_learnt_alike(ours, theirs, load_file(base / "model.safetensors"))


@pytest.mark.slow
def test_a_critic_learns_in_the_trainer_of_a_cluster(base, ppo, tmp_path):
    pytest.importorskip("ray")
    recipe = recipe_of(base, PPO).model_dump(mode="json", exclude_none=True)
    path, out = tmp_path / "recipe.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(recipe | {"launch": {"type": "ray"}, "runtime": {"threads": 1}}))
    command = [sys.executable, "-m", "opd.pipelines.cli", "specialist", str(path), "--out", str(out)]
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    done = subprocess.run(
        [*command, "--domain", "add3"], env=os.environ | quiet, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_metrics(out / "stages" / STAGE / "metrics.jsonl")
    for row, other in zip(rows, ppo[1], strict=True):
        for key in ("critic/loss", "critic/value_mean", "reward/mean"):
            assert row[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5)


def now_and_then(sample) -> float:
    """The same for every answer of each second step, which so has no signal."""
    number = sample.uid.split("/")[2]
    return 0.0 if number.isdigit() and int(number) // KIT["prompts_per_step"] % 2 == 0 else ones(sample)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "reward"),
    [
        (PPO | {"critic": {"warmup_steps": 2}}, "ones"),
        pytest.param({}, "now_and_then", marks=pytest.mark.long),
    ],
)
def test_weights_that_stay_as_they_are_do_not_age(base, tmp_path, changes, reward):
    """In a critic's warm-up, and in a step without signal: what is written next is as new as can be."""
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    domains["add3"]["reward"] = f"{__name__}:{reward}"
    rollout = tiny_recipe().rollout.model_dump(mode="json") | {"max_staleness": 0}
    more = {"domains": domains, "rollout": rollout}
    whole = outcome(base, tmp_path / "whole", changes, **more)
    assert not [row for row in whole[1] if any(name.startswith("staleness/") for name in row)]
    learnt = [row.get("grad_norm", row.get("critic/grad_norm", 0.0)) > 0 for row in whole[1]]
    assert learnt == ([True] * 3 if changes else [False, True, False, True])
    for after in (1, 3 if not changes else 2):
        assert outcome(base, tmp_path / f"killed-{after}", changes, after, **more) == whole


def ones(sample) -> float:
    """A reward that every token has its share in."""
    return sample.text.count("1") / 5


@pytest.mark.slow
def test_a_policy_learns_from_a_critics_advantages(base, tmp_path):
    domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
    domains["add3"]["reward"] = f"{__name__}:ones"
    own = {
        "steps": 15,
        "prompts_per_step": 16,
        "group_size": 1,
        "filter_zero_variance": False,
        "advantage": {"type": "gae", "gamma": 0.99, "lam": 0.95},
        "critic": {"optim": {"lr": 3e-3}},
        "optim": {"lr": 3e-3},
        "checkpoint_every": 20,
    }
    recipe = tiny_recipe(base=None, model={"path": str(base)}, domains=domains, specialist=own)
    run_only(recipe, tmp_path / "run", STAGE)
    rows = read_metrics(tmp_path / "run" / "stages" / STAGE / "metrics.jsonl")
    rewards, losses = ([row[name] for row in rows] for name in ("reward/mean", "critic/loss"))
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3]) > 0
    assert losses[0] > 0
    assert "frac_reward_zero_std" not in rows[0]


SMALL = {
    "steps": 3,
    "prompts_per_step": 2,
    "group_size": 2,
    "minibatches": 1,
    "epochs": 1,
    "filter_zero_variance": False,
}


def test_the_coefficient_follows_what_was_measured(base, tmp_path):
    """Stopped and resumed it does so too: the coefficient of the next step is in the checkpoint."""
    found = outcome(base, tmp_path / "run", SMALL)
    assert outcome(base, tmp_path / "stopped", SMALL, stop_after=2) == found
    rows, coef = found[1], KIT["reference_kl"]["coef"]
    assert rows[0]["reference_kl/measured"] == pytest.approx(0.0, abs=1e-6)  # it starts as its reference
    for row in rows:
        assert row["reference_kl/coef"] == coef
        coef = next_coefficient(coef, row["reference_kl/measured"], 0.02, 1.0)
    assert rows[-1]["reference_kl/measured"] != 0.0
    assert rows[1]["reference_kl/coef"] == pytest.approx(0.08)  # a fifth of it down, as far below the target


@pytest.mark.slow
def test_epochs_are_more_updates_of_the_same_batch(base, whole, tmp_path):
    digest, rows = outcome(base, tmp_path / "run", {"epochs": 1})
    assert digest != whole[0]
    assert rows[0]["reward/mean"] == whole[1][0]["reward/mean"]  # the first batch is the same
    moved = [found[0]["policy/kl_old"] for found in (rows, whole[1])]
    assert moved[1] > moved[0] > 0  # and the second pass leaves its policy further behind


@pytest.mark.parametrize(
    ("measured", "expected"), [(0.05, 0.1), (0.06, 0.12), (0.055, 0.11), (9.0, 0.12), (-3.0, 0.08)]
)
def test_the_controller_is_that_of_the_paper(measured, expected):
    """1909.08593, 2.2: e = clip((KL - target) / target, -0.2, 0.2), beta' = beta (1 + K e)."""
    assert next_coefficient(0.1, measured, 0.05, 1.0) == pytest.approx(expected)


def test_no_push_takes_the_coefficient_out_of_the_numbers():
    least = most = 0.1
    for _ in range(3000):
        least, most = next_coefficient(least, 0.0, 1.0, 1.0), next_coefficient(most, 9.0, 1.0, 1.0)
    assert (least, most) == (SMALLEST, LARGEST)
