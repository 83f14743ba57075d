"""An engine in a process and on a cluster of its own: what it writes, with which weights, and its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
from ray_runs import Run, digest, ended, learnt, settings, undisturbed, write_recipe
from recipes import tiny_recipe
from test_fleet import answers, assert_drawn_alike, cut_requests, drawn, drawn_here

from opd.config import RayLaunch
from opd.config.writing import MOST_KEPT
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.launch.ray.actors import ActorSpec, RemoteActor, start_actors
from opd.pipelines.launch.ray.cluster import BundleLayout, open_cluster, reserve_bundles, resources_of
from opd.pipelines.launch.ray.engine import EngineFleet
from opd.pipelines.records.run_folder import RunFolder
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.preemption import Preemption
from opd.rollout.torch_engine import TorchEngine
from opd.rollout.weight_sync import sync_weights
from opd.storage.transcript import Tokens
from opd.storage.wal import TokenWAL

pytest.importorskip("ray")


@pytest.mark.slow
def test_an_engine_elsewhere_writes_what_one_here_does(tmp_path):
    """With its first weights, and with the next ones, which it takes again after it was killed."""
    model = save_checkpoint(tiny.model(seed=1), tiny.tokenizer(), tmp_path / "model", {})
    with running_engine(tmp_path, model) as (remote, folder):
        process = remote.call("ping")
        rollout = FaultTolerantRollout(EngineFleet([remote], model).engine_pool())
        assert answers(rollout) == answers_here(CausalLM.from_pretrained(model))
        other = tiny.model(seed=2)
        sync_weights(rollout, other.weights(), 1)
        os.kill(process, signal.SIGKILL)
        assert answers(rollout) == answers_here(other)
        last = remote.call("ping")
        assert len({process, last, os.getpid()}) == 3
        assert str(process) in folder.actor_log(remote.name).read_text()
    assert ended([process, last])


MIXTURE = {
    **{"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"head_dim": 8, "initializer_range": 0.3},
}


@pytest.mark.slow
def test_masks_and_choices_of_an_engine_elsewhere_are_those_of_one_here(tmp_path):
    """Also of responses in the middle of which it is killed: the first part is in the log, with its masks."""
    module = CausalLM.from_config(tiny.LLAMA | MIXTURE, tokenizer=tiny.tokenizer(), seed=1)
    model = save_checkpoint(module, tiny.tokenizer(), tmp_path / "model", {})
    expected = drawn_here(CausalLM.from_pretrained(model), record_experts=True)
    # With a stop string a message is one step, so that a kill is in the middle of responses.
    rollout = {"stop": ["=="], "max_sequence": 60}
    with running_engine(tmp_path, model, rollout=rollout) as (remote, _), TokenWAL(tmp_path / "log") as log:
        pool = EngineFleet([remote], model).engine_pool()
        pool.engines[0].record_masks(MOST_KEPT)  # pyright: ignore[reportAttributeAccessIssue]
        assert_drawn_alike(drawn(FaultTolerantRollout(pool)), expected)
        writer = FaultTolerantRollout(pool, log)
        process = remote.call("ping")
        for count, chunk in enumerate(writer.generate(cut_requests())):
            if count == 5:
                assert not chunk.finished
                os.kill(process, signal.SIGKILL)
        assert writer.take_counters()["engine_failures"] == 1
        assert remote.call("ping") != process
        logged = log.requests()
        assert_drawn_alike({uid: Tokens.from_logged(logged[uid]) for uid in logged}, expected, 1e-5)


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


@contextmanager
def running_engine(path: Path, model: Path, **settings: Any) -> Iterator[tuple[RemoteActor, RunFolder]]:
    """An engine's actor on a cluster of its own, for the model in a folder, and its run folder."""
    launch = RayLaunch(max_restarts=1)
    of_model = {"path": str(model), "device": "cpu"}
    recipe = tiny_recipe(base=None, model=of_model, launch=launch.model_dump(), **settings)
    name, asked = "engine-0", Preemption(5.0)
    layout = BundleLayout([resources_of(launch.engine)], "STRICT_PACK", {name: 0}, {name: launch.engine})
    with RunFolder.create(path / "run", recipe) as folder, open_cluster(launch, layout, asked) as cluster:
        spec = ActorSpec(name, recipe.model_dump_json(), str(folder.path), str(Path.cwd()))
        placement = reserve_bundles(cluster, launch, layout, asked)
        yield start_actors(launch, layout, placement, {name: spec}, asked)[name], folder


def answers_here(model: CausalLM) -> dict[str, list[int]]:
    return answers(TorchEngine(model, vocab_size=len(tiny.tokenizer())))
