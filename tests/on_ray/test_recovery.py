"""An actor killed in the middle of a step costs time alone: the student is the same, bit for bit."""

import pytest
from ray_runs import STEPS, Run, digest, ended, learnt, undisturbed, write_recipe

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
