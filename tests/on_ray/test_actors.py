"""An engine in a process and on a cluster of its own: what it writes, with which weights, and its end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import tiny
from ray_runs import Run, digest, ended, learnt, settings, undisturbed, write_recipe
from recipes import tiny_recipe
from test_fleet import answers

from opd.config import RayLaunch
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.launch.ray.actors import ActorSpec, start_actors
from opd.pipelines.launch.ray.cluster import BundleLayout, open_cluster, reserve_bundles, resources_of
from opd.pipelines.launch.ray.engine import EngineFleet
from opd.pipelines.records.run_folder import RunFolder
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.preemption import Preemption
from opd.rollout.torch_engine import TorchEngine
from opd.rollout.weight_sync import sync_weights

pytest.importorskip("ray")


@pytest.mark.slow
def test_an_engine_elsewhere_writes_what_one_here_does(tmp_path):
    """With its first weights, and with the next ones, which it takes again after it was killed."""
    model = save_checkpoint(tiny.model(seed=1), tiny.tokenizer(), tmp_path / "model", {})
    launch = RayLaunch(max_restarts=1)
    recipe = tiny_recipe(base=None, model={"path": str(model), "device": "cpu"}, launch=launch.model_dump())
    name, asked = "engine-0", Preemption(5.0)
    layout = BundleLayout([resources_of(launch.engine)], "STRICT_PACK", {name: 0}, {name: launch.engine})
    with RunFolder.create(tmp_path / "run", recipe) as folder, open_cluster(launch, layout, asked) as cluster:
        spec = ActorSpec(name, recipe.model_dump_json(), str(folder.path), str(Path.cwd()))
        placement = reserve_bundles(cluster, launch, layout, asked)
        actors = start_actors(launch, layout, placement, {name: spec}, asked)
        process = actors[name].call("ping")
        fleet = EngineFleet([*actors.values()], model)
        rollout = FaultTolerantRollout(fleet.engine_pool())
        assert answers(rollout) == answers_here(CausalLM.from_pretrained(model))
        other = tiny.model(seed=2)
        sync_weights(rollout, other.weights(), 1)
        os.kill(process, signal.SIGKILL)
        assert answers(rollout) == answers_here(other)
        last = actors[name].call("ping")
        assert len({process, last, os.getpid()}) == 3
        assert str(process) in folder.actor_log(name).read_text()
    assert ended([process, last])


@pytest.mark.slow
def test_a_student_teaches_itself_in_the_trainer(tmp_path):
    domains = settings(tmp_path)["domains"]
    domains["sort"] |= {"teacher": "self", "teacher_prompt": "{label}={prompt}"}
    average = {"type": "student", "moving_average": 0.9}
    teachers = {"self": {"type": "student"}, "add3": average}
    recipe = write_recipe(tmp_path, domains=domains, teachers=teachers)
    expected = undisturbed(recipe)
    with Run(recipe, tmp_path / "run", "--launch.type", "ray") as run:
        status, said = run.finish()
    assert status == 0, said
    assert not run.pids("teacher-0")
    assert learnt(run.out) == learnt(expected)
    assert digest(run.out) == digest(expected)


def answers_here(model: CausalLM) -> dict[str, list[int]]:
    return answers(TorchEngine(model, vocab_size=len(tiny.tokenizer())))
