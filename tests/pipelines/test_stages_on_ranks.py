"""Stages of every kind on two ranks, some of unequal pace, in one launch, compared with one process."""

import functools
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import stage_ranks
import tiny
import torch
from attempts import run_only
from full import FULL
from rank_processes import run_ranks
from recipes import tiny_recipe
from safetensors.torch import load_file

from opd.metrics import read_metrics
from opd.models.adapters import BASE_DIGEST, read_adapter
from opd.pipelines.records.run_folder import RunFolder
from opd.storage.tensors import TensorParts
from opd.train.optimizer import learning_rate

SPECIALIST = {"steps": 3, "prompts_per_step": 8, "group_size": 4, "minibatches": 2}
TIS = {"policy_loss": {"correction": {"type": "tis"}}}
KIT = {
    "prompts_per_step": 7,  # more for one rank than for the other
    "refill": {"limit": 3},
    "epochs": 2,
    "advantage": {"type": "reinforce_plus_plus_baseline"},
    "policy_loss": {"type": "gspo", "clip_low": 0.2, "clip_high": 0.3},
    "reference_kl": {"coef": 0.1, "target": 0.02, "placement": "advantage", "estimator": "k1"},
}
PPO = {
    "advantage": {"type": "gae", "lam": 0.9},
    "critic": {"warmup_steps": 1},
    "filter_zero_variance": False,
    "reference_kl": {"coef": 0.1, "placement": "reward", "estimator": "k1"},
}
MERGE = {"steps": 3, "prompts_per_domain": 4, "checkpoint_every": 2}
MIXED = {"dtype": "bfloat16"}
ADAPTERS = {"distill": MERGE | {"optim": {"lr": 0.01}}, "lora": {"rank": 4, "alpha": 8}}
MEGATRON = {"train": {"backend": "megatron", "tensor_parallel": 2}}
RULES = {
    "slower": {"metric": "step", "above": 0, "steps": 1, "action": "lower_rate", "factor": 0.9},
    "enough": {"metric": "step", "above": 1, "steps": 1, "action": "stop", "lever": "go home"},
}
WATCHED = {"specialist": SPECIALIST | {"checkpoint_every": 50}, "watch": RULES}
SETS = {"sets": {"longer": {"source": "procedural:add3", "params": {"digits": 4}, "prompts": 9}}}
SHARDED = {"engine": {"type": "torch", "sharded": True}}
EVALUATED = {"prompts_per_domain": 20, "every": 2, "curve_prompts": 8}
TASKS = {
    "specialist": ("specialist-add3", {"specialist": SPECIALIST}),
    "kit": (
        "specialist-add3",
        {
            "specialist": SPECIALIST | KIT,
            "storage": {"trajectories": "disk"},
            "rollout": SHARDED,
            "evaluation": EVALUATED | {"base_kl_every": 1},
        },
    ),
    "critic": ("specialist-add3", {"specialist": SPECIALIST | PPO | {"opd": {"teacher": "old"}}}),
    "critic, shared sequences": (
        "specialist-add3",
        {"specialist": SPECIALIST | PPO, "train": {"context_parallel": 2}},
    ),
    "taught": (
        "specialist-add3",
        {
            "specialist": SPECIALIST | {"opd": {"teacher": "old", "loss": {"type": "full"}}},
            "lora": {"rank": 4, "alpha": 8},
            "train": {"context_parallel": 2},
        },
    ),
    "ahead": ("specialist-add3", {"specialist": SPECIALIST | TIS, "rollout": {"schedule": "ahead"}}),
    "async": ("merge", {"distill": MERGE | {"steps": 4}, "rollout": {"schedule": "async", "max_ahead": 2}}),
    "adapters": ("merge", ADAPTERS | {"rollout": SHARDED}),
    "adapters, megatron": ("merge", ADAPTERS | MEGATRON),
    "adapters, megatron, cut engine": ("merge", ADAPTERS | MEGATRON | {"rollout": SHARDED}),
    "stopped": ("specialist-add3", WATCHED),
    "goes_on": ("specialist-add3", WATCHED | {"watch": {"slower": RULES["slower"]}}),
    "measured": ("evaluate", {"evaluation": {"prompts_per_domain": 8, "samples_per_prompt": 2, **SETS}}),
    "weights": ("baseline-ties", {"baselines": {"methods": ["ties"], "scales": [0.5, 1.0]}}),
    "measured together": ("evaluate", {"evaluation": {"prompts_per_domain": 9}, "rollout": SHARDED}),
    "mixed": ("merge", {"distill": MERGE | {"steps": 2}, "lora": {"rank": 4, "alpha": 8}} | MIXED),
}
STEPS = {
    "specialist": 3,
    "kit": 3,
    "critic": 3,
    "critic, shared sequences": 3,
    "taught": 3,
    "ahead": 3,
    "async": 4,
    "adapters": 3,
    "adapters, megatron": 3,
    "adapters, megatron, cut engine": 3,
    "mixed": 2,
}
SOME = {"specialist", "measured", "weights"}
"""What is always tried."""


def cases(names: Iterable[str]) -> list:
    """These tasks as parameters."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in SOME)) for name in names]


CRITICS = [name for name in STEPS if name.startswith("critic")]
ON_ADAPTERS = [name for name in STEPS if name.startswith("adapters")]
RESUMED = {"goes_on": "stopped"}
"""Tasks that go on with the run of another."""
MODELS = {"specialist-add3": "specialists/add3", "merge": "merged", "baseline-ties": "baselines/ties"}
BOUND = {"ahead": 1.0, "async": 2.0}


def settings(base: Path, changes: dict) -> dict:
    """What a recipe says that starts from `base`."""
    plain = tiny_recipe()
    rollout = plain.rollout.model_dump(mode="json") | changes.get("rollout", {})
    model = {"path": str(base)} | {key: changes[key] for key in ("lora", "dtype") if key in changes}
    own = {key: value for key, value in changes.items() if key not in ("rollout", "lora", "dtype")}
    teachers = {name: {"path": str(base.parent / "specialists" / name)} for name in ("sort", "add3")}
    # Of an own specialist there is a teacher of another domain to follow.
    given = {"teachers": {"old": teachers["sort"]} if "specialist" in changes else teachers}
    return (
        {
            "base": None,
            "model": model,
            "rollout": rollout,
            "baselines": {"methods": []},
            "evaluation": EVALUATED,
        }
        | given
        | own
    )


@pytest.fixture(scope="module")
def base(tiny_run):
    """A base; and, beside it, two specialists."""
    return tiny_run / "base"


@pytest.fixture(scope="module")
def ranks(base, tmp_path_factory):
    """The folder in which two ranks have left their runs."""
    folder = tmp_path_factory.mktemp("ranks")
    tasks = []
    for name, (stage, changes) in TASKS.items():
        if not FULL and name not in SOME:
            continue
        recipe = settings(base, changes)
        run = folder / RESUMED.get(name, name)
        if name in RESUMED:
            (folder / name).symlink_to(run)
        else:
            RunFolder.create(run, tiny_recipe(**recipe)).close()
        slow = name in BOUND
        tasks.append({"name": name, "folder": str(run), "stage": stage, "recipe": recipe, "slow": slow})
    (folder / "tasks.json").write_text(json.dumps(tasks))
    run_ranks(stage_ranks.__file__, 2, folder, seconds=400)
    return folder


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    """The run of one process, by name of the task."""

    @functools.cache
    def run(name: str) -> Path:
        stage, changes = TASKS[name]
        recipe = tiny_recipe(**settings(base, changes) | {"train": {}})
        path = tmp_path_factory.mktemp("alone") / name
        run_only(recipe, path, stage)
        return path

    return run


def weights(run: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(run / MODELS[TASKS[name][0]] / "model.safetensors")


@pytest.mark.parametrize(
    "name", cases(["specialist", "kit", *CRITICS, "taught", "ahead", *ON_ADAPTERS, "goes_on"])
)
def test_a_stage_of_two_ranks_ends_with_the_weights_of_one(base, ranks, alone, name):
    ours, expected = weights(ranks / name, name), weights(alone(name), name)
    tiny.assert_learnt_alike(ours, expected, load_file(base / "model.safetensors"))


@pytest.mark.parametrize("name", cases(name for name in STEPS if name != "kit"))  # whose tokens are on disk
def test_ranks_learn_from_the_same_responses(ranks, name):
    first, second = (json.loads((ranks / f"{name}-{rank}.json").read_text()) for rank in (0, 1))
    steps = STEPS[name]
    assert len(read_metrics(ranks / name / "stages" / TASKS[name][0] / "metrics.jsonl")) == steps
    assert first[:steps] == second[:steps]
    assert len(set(first)) == len(first) >= steps


def test_ranks_know_what_happened_on_another(ranks):
    said = [json.loads((ranks / f"said-{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["rewards"] for one in said] == [[[3.0, "s0"], [4.0, "s1"], [5.0, "s2"]]] * 2
    assert all("step_1 is not JSON" in one["refusal"] for one in said)


@pytest.mark.slow
def test_a_rule_stops_all_ranks_and_leaves_a_checkpoint(ranks):
    said = [json.loads((ranks / f"stopped-{rank}.json").read_text()) for rank in (0, 1)]
    assert [words[-1] for words in said] == [said[0][-1]] * 2
    assert "the rule enough of `watch` has stopped it at step 2: step is 2, above 1; go home." in said[0][-1]
    run, stage = RunFolder.attach(ranks / "stopped"), "specialist-add3"
    assert [flag["rule"] for flag in run.read_flags(stage)] == ["slower", "slower", "enough", "slower"]
    assert [checkpoint.name for checkpoint in run.checkpoints_folder(stage).iterdir()] == ["step_2"]
    optim = tiny_recipe(specialist=SPECIALIST).specialist.optim
    full = [learning_rate(optim, step, step / 3) for step in range(3)]
    lowered = {row["step"]: row["lr"] for row in run.read_metrics(stage) if "lr" in row}  # where it learned
    assert {1, 2} <= set(lowered)
    assert lowered == pytest.approx({step: full[step - 1] * 0.9 ** (step - 1) for step in lowered})


def test_ranks_share_the_prompts_of_an_evaluation_and_measure_what_one_does(ranks, alone):
    """Answer by answer: sampled and greedy, several to a prompt, on held-out prompts and on a set."""
    ours, expected = (
        json.loads((run / "stages/evaluate/models.json").read_text())["models"]
        for run in (ranks / "measured", alone("measured"))
    )
    assert set(expected) == {"base", "teacher:sort", "teacher:add3"}
    assert ours == expected
    first, second = (set(json.loads((ranks / f"measured-{rank}.json").read_text())) for rank in (0, 1))
    assert not first & second
    assert min(len(first), len(second)) > 0.4 * len(first | second)


def test_ranks_share_the_prompts_by_which_a_merge_of_weights_is_chosen(ranks, alone):
    ours, expected = (
        json.loads((run / "stages/baseline-ties/done.json").read_text())
        for run in (ranks / "weights", alone("weights"))
    )
    assert set(expected["training_accuracy"]) == {"0.5", "1"}
    assert ours["training_accuracy"] == expected["training_accuracy"]
    assert ours["digest"] == expected["digest"]
    first, second = (set(json.loads((ranks / f"weights-{rank}.json").read_text())) for rank in (0, 1))
    assert not first & second
    assert first
    assert second


@pytest.mark.slow
def test_ranks_that_share_a_model_measure_what_one_does(ranks, alone):
    """Accuracies by an engine whose model is cut over both, and how far a student has come from its base."""
    together = "measured together"
    ours, expected = (
        json.loads((run / "stages/evaluate/models.json").read_text())["models"]
        for run in (ranks / together, alone(together))
    )
    assert set(expected) == {"base", "teacher:sort", "teacher:add3"}
    assert ours == expected
    rows = [
        read_metrics(run / "stages/specialist-add3/metrics.jsonl") for run in (ranks / "kit", alone("kit"))
    ]
    for key in ("base_kl", "reference_kl"):
        mine, theirs = ([row[key] for row in own if key in row] for own in rows)
        assert len(mine) >= 2
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", cases(BOUND))
def test_no_token_is_older_than_the_schedule_allows(ranks, name):
    rows = read_metrics(ranks / name / "stages" / TASKS[name][0] / "metrics.jsonl")
    ages = [row.get("staleness/max", 0.0) for row in rows]
    assert max(ages) <= BOUND[name]
    if name == "ahead":
        assert ages == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("name", cases(ON_ADAPTERS))
def test_adapters_are_kept_beside_the_merged_model(base, ranks, name):
    merged = weights(ranks / name, name)
    start, adapter = load_file(base / "model.safetensors"), read_adapter(ranks / name / "merged")
    changed = {key for key, tensor in merged.items() if not torch.equal(tensor, start[key])}
    assert changed == set(adapter.pairs)


@pytest.mark.slow
def test_a_model_comes_out_in_the_precision_it_computes_in(ranks, alone):
    """With float32 adapters beside a base in bfloat16, on two ranks and on one."""
    for run in (ranks / "mixed", alone("mixed")):
        assert {tensor.dtype for tensor in weights(run, "mixed").values()} == {torch.bfloat16}
        pairs = read_adapter(run / "merged").pairs.values()
        assert {part.dtype for pair in pairs for part in pair} == {torch.bfloat16}
        kept = TensorParts((run / "stages" / "merge" / "checkpoints").glob("*/model*.safetensors"))
        assert {t.dtype for name, t in kept.items() if name != BASE_DIGEST} == {torch.float32}
