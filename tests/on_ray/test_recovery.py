"""An actor killed in the middle of a step costs time alone: the student is the same, bit for bit."""

import pytest
from ray_runs import STEPS, Run, digest, ended, learnt, rows, settings, undisturbed, write_recipe

from opd.models.adapters import read_adapter
from opd.models.causal_lm import CausalLM

pytest.importorskip("ray")


def ray(cluster, *more: str) -> list[str]:
    return ["--launch.type", "ray", "--launch.address", cluster.address, *more]


@pytest.mark.slow
def test_engine_teacher_and_trainer_killed_in_one_run(tmp_path, cluster):
    recipe = write_recipe(tmp_path)
    expected = undisturbed(recipe)
    with Run(recipe, tmp_path / "run", *ray(cluster, "--launch.engines", "2")) as run:
        # One engine can write the rest of the run while the other comes back; the rest cannot be spared.
        for actor, step, held in (("engine-0", 1, "engine-1"), ("teacher-0", 3, None), ("trainer", 5, None)):
            run.kill_in_step(actor, step, held)
            run.until(lambda actor=actor: len(run.pids(actor)) == 2)
        status, said = run.finish()
        assert status == 0, said
    assert "engine-0 failed and is brought back" in said
    assert "is asked again, for teacher-0" in said
    assert "started anew from the newest checkpoint" in said
    assert learnt(run.out) == learnt(expected)
    assert [row["step"] for row in learnt(run.out)] == list(range(1, STEPS + 1))
    assert digest(run.out) == digest(expected)
    assert ended(run.all_pids())


@pytest.mark.slow
def test_a_specialist_learns_over_the_same_masks_with_engines_on_ray(tmp_path, cluster):
    """Of a recipe with a cut, `replay_masks: auto`. An engine is killed while it writes."""
    given, stage = settings(tmp_path), "specialist-sort"
    domains = {name: one | {"reward": "recipes:varied"} for name, one in given["domains"].items()}
    specialist = {"steps": 5, "prompts_per_step": 8, "group_size": 4, "optim": {"lr": 0.001}}
    rollout = given["rollout"] | {"temperature": 0.3, "top_p": 0.8}
    recipe = write_recipe(tmp_path, domains=domains, rollout=rollout, specialist=specialist, teachers={})
    expected = rows(undisturbed(recipe, stage), stage)
    options = ray(cluster, "--launch.engines", "2", "--launch.teachers", "0")
    with Run(recipe, tmp_path / "run", "--domain", "sort", *options, verb="specialist") as run:
        run.kill_in_step("engine-0", 1, "engine-1", stage)
        status, said = run.finish()
        assert status == 0, said
    assert "engine-0 failed and is brought back" in said
    found = rows(run.out, stage)
    names = ("sampling/kept", "entropy", "grad_norm", "reward/mean")
    for row, due in zip(found, expected, strict=True):
        assert {name: row[name] for name in names} == {name: due[name] for name in names}
        assert row["mismatch/mean_abs"] < 2e-6
    assert {row["sampling/masked"] for row in found} == {1.0}


@pytest.mark.slow
@pytest.mark.long
def test_adapters_alone_travel_and_an_engine_that_was_killed_merges_them_again(tmp_path, cluster):
    pytest.importorskip("peft")
    given = settings(tmp_path)
    distill = given["distill"] | {"steps": 5}
    recipe = write_recipe(tmp_path, model=given["model"] | {"lora": {"rank": 2}}, distill=distill)
    expected = undisturbed(recipe)
    options = ray(cluster, "--launch.engines", "2", "--launch.teachers", "0")
    with Run(recipe, tmp_path / "run", *options) as run:
        run.kill_in_step("engine-0", 1, "engine-1")
        status, said = run.finish()
        assert status == 0, said
    assert "engine-0 failed and is brought back" in said
    assert learnt(run.out) == learnt(expected)
    assert digest(run.out) == digest(expected)
    pairs = read_adapter(run.out / "merged").pairs.values()
    adapters = sum(a.nbytes + b.nbytes for a, b in pairs)
    whole = sum(tensor.nbytes for _, tensor in CausalLM.from_pretrained(tmp_path / "base").weights())
    # With the digest of the base, once each: the fleet puts them where all engines read them.
    assert {row["rollout/pushed_bytes"] for row in rows(run.out)} == {adapters + 32}
    assert 3 * adapters < whole
