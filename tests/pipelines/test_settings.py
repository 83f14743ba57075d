"""Every setting of the specialists and of the merge runs, and its metrics say what it did."""

from pathlib import Path

import pytest
from attempts import run_only
from recipes import NO_CURVE, tiny_recipe

from opd.metrics import read_metrics
from opd.models.causal_lm import CausalLM

SPECIALIST = {"steps": 3, "prompts_per_step": 8, "group_size": 4, "minibatches": 2}
DISTILL = {"steps": 2, "prompts_per_domain": 6}


def run(path: Path, stage: str, **settings) -> list[dict]:
    """The metrics of one stage."""
    recipe = tiny_recipe(base=None, baselines={"methods": []}, evaluation=NO_CURVE, **settings)
    run_only(recipe, path, stage)
    return read_metrics(path / "stages" / stage / "metrics.jsonl")


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({"advantage": {"type": "dr_grpo"}, "policy_loss": {"aggregation": "constant"}}, "policy/clip_ratio"),
        ({"advantage": {"type": "rloo"}, "policy_loss": {"aggregation": "sequence"}}, "policy/ratio_min"),
        ({"policy_loss": {"dual_clip": 3.0}, "entropy_coef": 0.01}, "policy/dual_clip"),
        (
            {"policy_loss": {"type": "cispo"}, "advantage": {"type": "rloo", "whiten": True}},
            "policy/clip_low",
        ),
        ({"reference_kl": {"coef": 0.1, "estimator": "k2"}}, "reference_kl"),
        ({"reference_kl": {"coef": 0.1, "estimator": "k3"}}, "reference_kl"),
        ({"reference_kl": {"coef": 0.1, "estimator": "k1", "placement": "advantage"}}, "reference_kl"),
        ({"filter_zero_variance": False}, "frac_reward_zero_std"),
        ({"policy_loss": {"correction": {"type": "seq_mask_tis"}}}, "correction/ess"),
    ],
    ids=str,
)
def test_specialist(tiny_run, tmp_path, changes, metric):
    model = {"path": str(tiny_run / "base")}
    rows = run(tmp_path / "run", "specialist-add3", model=model, specialist=SPECIALIST | changes)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert any(metric in row for row in rows)
    assert all(row["mismatch/max_abs"] < 1e-3 for row in rows if "mismatch/max_abs" in row)
    before = CausalLM.from_pretrained(tiny_run / "base").digest()
    assert CausalLM.from_pretrained(tmp_path / "run/specialists/add3").digest() != before


BOTH = {"sort": 0.5, "add3": 0.5}


def merge(tiny_run, path, **distill):
    teacher, storage = distill.pop("teacher", None), distill.pop("storage", {})
    more = {"rollout": distill.pop("rollout")} if "rollout" in distill else {}
    domains = tiny_recipe().model_dump(mode="json")["domains"]
    domains["sort"]["teacher"] = teacher
    return run(
        path,
        "merge",
        model={"path": str(tiny_run / "base")},
        teachers={d: {"path": str(tiny_run / "specialists" / d)} for d in ("sort", "add3")},
        domains=domains,
        distill=DISTILL | distill,
        storage=storage,
        **more,
    )


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "loss",
    [
        {"type": "full", "kind": "forward"},
        {"type": "full", "kind": "jsd", "beta": 0.3},
        {"type": "full", "kind": "forward", "later": [[1, "skew_reverse"]], "select": {"share": 0.4}},
        {"type": "k1"},
        {"type": "k1", "baseline": "none", "discount": 0.9},
        {"type": "k1", "loss": {"correction": {"type": "tis"}}},
        {"type": "k2"},
        {"type": "topk", "k": 4, "form": "tail"},
        {"type": "topk", "k": 4, "form": "hybrid"},
        {"type": "topk", "k": 4, "form": "truncated"},
    ],
    ids=str,
)
def test_merge_by_every_estimator(tiny_run, tmp_path, loss):
    rows = merge(tiny_run, tmp_path / "run", loss=loss)
    assert len(rows) == 2
    assert rows[0]["kl/mean"] != 0
    assert rows[0]["mismatch/max_abs"] < 1e-3
    assert rows[0]["token_share/sort"] + rows[0]["token_share/add3"] == pytest.approx(1)


POLICY = {"discount": 0.5, "loss": {"correction": {"type": "icepop", "lower": 0.99, "upper": 1.01}}}
AHEAD = {"max_new_tokens": 5, "max_sequence": 16, "schedule": "ahead"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": {"type": "topk", "k": 4}},
        {"loss": {"type": "k1", **POLICY}, "rollout": AHEAD, "steps": 3},
        {"loss": {"type": "k1", "baseline": "none"}, "rl_coef": 0.5, "samples_per_prompt": 2},
        {"rl_coef": 0.5, "samples_per_prompt": 3, "normalise": "token"},
        {
            "rl_coef": 0.5,
            "samples_per_prompt": 2,
            "advantage": {"type": "custom", "path": "recipes:by_tokens"},
        },
    ],
    ids=["kl", "top-k", "k1 and a correction", "k1 and a reward", "reward", "somebody's estimator"],
)
def test_samples_on_disk_and_sequences_in_pieces_make_the_same_merge(tiny_run, tmp_path, changes):
    plain = merge(tiny_run, tmp_path / "memory", **changes)
    batch = {"max_tokens": 40, "sequence_chunk": 8}
    rows = merge(tiny_run, tmp_path / "disk", batch=batch, storage={"trajectories": "disk"}, **changes)
    passing = (
        "time",
        "memory/",
        "teacher/",
        "rollout/log",
        "stall",
        "bytes_read",
        "weight_bytes",
        "token",
        "cached",
    )
    assert ("correction/ess" in plain[-1]) == ("rollout" in changes)
    assert plain[-1].get("correction/rejected", 0.5) > 0
    for mine, other in zip(rows, plain, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            if not name.startswith(passing) or name.startswith("token_share"):
                assert mine[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name
    weights = [CausalLM.from_pretrained(tmp_path / name / "merged").weights() for name in ("memory", "disk")]
    for (name, tensor), (_, other) in zip(*weights, strict=True):
        assert float((tensor - other).abs().max()) < 1e-3, name
    assert not (tmp_path / "disk/stages/merge/trajectories").exists()


def test_a_reward_beside_the_distillation(tiny_run, tmp_path):
    rows = merge(tiny_run, tmp_path / "run", rl_coef=0.5, samples_per_prompt=4)
    assert "policy/clip_ratio" in rows[0]
    assert rows[0]["kl/mean"] > 0


@pytest.mark.some(1)
@pytest.mark.parametrize("mixture", ["one_hot", "geometric", "arithmetic"])
@pytest.mark.parametrize("loss", [{"type": "full"}, {"type": "k1"}], ids=str)
def test_two_teachers_for_one_domain(tiny_run, tmp_path, mixture, loss):
    rows = merge(tiny_run, tmp_path / "run", mixture=mixture, teacher=BOTH, loss=loss)
    assert rows[0]["resident_heads_peak"] == (1 if mixture == "one_hot" else 2)
    assert rows[0]["head_loads"] <= 3
    if mixture == "geometric" and loss["type"] == "full":
        assert 0 < rows[0]["kl/floor"] < rows[0]["kl/mean"]


@pytest.mark.parametrize("mixture", ["entropy", pytest.param("lowest_entropy", marks=pytest.mark.slow)])
def test_two_teachers_weigh_by_their_entropies(tiny_run, tmp_path, mixture):
    rows = merge(tiny_run, tmp_path / "run", mixture=mixture, teacher=BOTH, loss={"type": "full"})
    assert rows[0]["gate/sort"] + rows[0]["gate/add3"] == pytest.approx(1)
    assert 0 < rows[0]["gate/sort"] < 1
    assert rows[0]["resident_heads_peak"] == 2
    assert rows[0].get("kl/floor", 0.0) < rows[0]["kl/sort+add3"]
    assert ("kl/floor" in rows[0]) == (mixture == "entropy")


def test_a_domain_has_its_own_divergence(tiny_run, tmp_path):
    """Only its own metric changes in the first step, in which no weight has moved."""
    rows = {}
    for kind in ("reverse", "forward"):
        domains = tiny_recipe().model_dump(mode="json", exclude_none=True)["domains"]
        domains["sort"]["distill"] = {"loss": {"kind": kind}}
        rows[kind] = run(
            tmp_path / kind,
            "merge",
            model={"path": str(tiny_run / "base")},
            teachers={d: {"path": str(tiny_run / "specialists" / d)} for d in ("sort", "add3")},
            domains=domains,
            distill=DISTILL,
        )[0]
    assert rows["forward"]["kl/add3"] == rows["reverse"]["kl/add3"]
    assert rows["forward"]["kl/sort"] != rows["reverse"]["kl/sort"]


def test_settings_without_effect_are_refused():
    with pytest.raises(ValueError, match="samples_per_prompt"):
        tiny_recipe(distill={"rl_coef": 0.5})
    with pytest.raises(ValueError, match="mixture arithmetic"):
        tiny_recipe(distill={"mixture": "arithmetic", "loss": {"type": "k2"}})
    with pytest.raises(ValueError, match="zero or wrong gradient"):
        tiny_recipe(specialist={"reference_kl": {"coef": 0.1, "estimator": "k1", "placement": "loss"}})


def test_stop_strings_end_responses(tiny_run, tmp_path):
    own = tiny_recipe().model_dump(mode="json")["rollout"]
    model = {"path": str(tiny_run / "base")}
    rollout = own | {"stop": ["7"]}
    first = SPECIALIST | {"steps": 1}
    rows = run(tmp_path / "run", "specialist-add3", model=model, specialist=first, rollout=rollout)
    plain = run(tmp_path / "plain", "specialist-add3", model=model, specialist=first)
    assert rows[0]["length/mean"] < plain[0]["length/mean"]
    assert rows[0]["reward/mean"] < plain[0]["reward/mean"]


def test_an_empty_stop_string_is_refused():
    rollout = tiny_recipe().model_dump(mode="json")["rollout"] | {"stop": [""]}
    with pytest.raises(ValueError, match=r"rollout\.stop\.0"):
        tiny_recipe(rollout=rollout)
