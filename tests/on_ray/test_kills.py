"""Each actor killed or stopped on its own, and the whole cluster: minutes, so only with --full."""

import os
import resource
import signal
import time
from pathlib import Path

import pytest
from ray_runs import STEPS, Run, digest, ended, learnt, rows, settings, undisturbed, wal_bytes, write_recipe

from opd.pipelines.launch.ray.cluster import descendant_processes

pytestmark = [pytest.mark.slow, pytest.mark.long]
LONGER = 40
RAY = ["--launch.type", "ray", "--launch.engines", "2", "--launch.teachers", "2"]
TWO = [*RAY, "--train.ranks", "2", "--train.timeout_seconds", "40"]


@pytest.fixture(scope="module")
def merge(tmp_path_factory):
    """(recipe, run folder of the merge without Ray)."""
    recipe = write_recipe(tmp_path_factory.mktemp("merge"))
    return recipe, undisturbed(recipe)


@pytest.fixture(scope="module")
def merge_of_two(tmp_path_factory, cluster, merge):
    """Run folder of the merge by two ranks whom nothing disturbs."""
    with Run(
        merge[0], tmp_path_factory.mktemp("two") / "run", *TWO, "--launch.address", cluster.address
    ) as run:
        status, said = run.finish()
        assert status == 0, said
    return run.out


@pytest.fixture(scope="module")
def longer_merge(tmp_path_factory):
    """The same of a merge that lasts longer."""
    folder = tmp_path_factory.mktemp("longer")
    recipe = write_recipe(folder, distill=settings(folder)["distill"] | {"steps": LONGER})
    return recipe, undisturbed(recipe)


def same(run: Run, expected: Path) -> None:
    assert learnt(run.out) == learnt(expected)
    assert digest(run.out) == digest(expected)
    assert ended(run.all_pids())


def noticed(run: Run, actor: str, said: str) -> bool:
    """Whether the run went on without `actor`: it may end before an engine is back."""
    if actor.startswith("engine"):
        return f"{actor} failed and is brought back" in said
    return len(run.pids(actor)) == 2


@pytest.mark.parametrize("layout", ["colocated", "disaggregated"])
@pytest.mark.parametrize("actor", ["engine-1", "teacher-0", "trainer"])
def test_actor_killed(tmp_path, cluster, merge, actor, layout):
    recipe, expected = merge
    options = [*RAY, "--launch.address", cluster.address, "--launch.layout", layout]
    with Run(recipe, tmp_path / "run", *options) as run:
        run.kill_in_step(actor, 4)
        status, said = run.finish()
        assert status == 0, said
        assert noticed(run, actor, said)
    same(run, expected)


@pytest.mark.parametrize("actor", ["engine-0", "teacher-1", "trainer"])
def test_actor_hangs(tmp_path, cluster, merge, actor):
    recipe, expected = merge
    limits = ["--launch.step_timeout", "20"]
    with Run(recipe, tmp_path / "run", *RAY, *limits, "--launch.address", cluster.address) as run:
        run.until(lambda: len(rows(run.out)) >= 4)
        os.kill(run.pids(actor)[-1], signal.SIGSTOP)
        status, said = run.finish()
        assert status == 0, said
        assert noticed(run, actor, said)
    same(run, expected)


def test_every_engine_killed_at_once(tmp_path, cluster, merge):
    recipe, expected = merge
    with Run(recipe, tmp_path / "run", *RAY, "--launch.address", cluster.address) as run:
        run.until(lambda: len(rows(run.out)) >= 4)
        for actor in ("engine-0", "engine-1"):
            os.kill(run.pids(actor)[-1], signal.SIGKILL)
        status, said = run.finish()
        assert status == 0, said
    same(run, expected)


@pytest.mark.parametrize("which", ["everything", "gcs_server", "raylet"])
def test_cluster_killed_and_resumed(tmp_path, longer_merge, which):
    recipe, expected = longer_merge
    with Run(recipe, tmp_path / "run", *RAY) as run:
        run.until(lambda: len(rows(run.out)) >= 5)
        written = wal_bytes(run.out)
        run.until(lambda: wal_bytes(run.out) > written)
        everything = descendant_processes(run.process.pid)
        names = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0] for pid in everything}
        chosen = [pid for pid, name in names.items() if which == "everything" or name.endswith(f"/{which}")]
        assert chosen
        for pid in chosen:
            os.kill(pid, signal.SIGKILL)
        status, said = run.finish(120)
        assert status == 2, said
        errors = [line for line in said.splitlines() if line.startswith("opd: error:")]
        assert len(errors) == 1
        assert "--resume" in errors[0]
        assert ended(list(everything))
    if which != "gcs_server":  # without the head it may make all steps before it is missed
        assert len(rows(run.out)) < LONGER
    with Run(recipe, tmp_path / "run", *RAY, "--resume") as run:
        status, said = run.finish()
        assert status == 0, said
    same(run, expected)


def test_driver_killed_and_resumed_without_ray(tmp_path, merge):
    recipe, expected = merge
    with Run(recipe, tmp_path / "run", *RAY) as run:
        run.until(lambda: len(rows(run.out)) >= 5)
        everything = descendant_processes(run.process.pid)
        run.process.kill()
        run.process.wait()
        assert ended(run.all_pids())
        assert ended(list(everything), 120)  # helpers of Ray's own wait a minute for its head
    with Run(recipe, tmp_path / "run", "--resume") as run:
        status, said = run.finish()
        assert status == 0, said
    same(run, expected)


def test_run_told_to_stop_leaves_and_goes_on(tmp_path, cluster, merge):
    recipe, expected = merge
    options = [*RAY, "--launch.address", cluster.address]
    with Run(recipe, tmp_path / "run", *options) as run:
        run.until(lambda: len(rows(run.out)) >= 4)
        run.process.send_signal(signal.SIGTERM)
        status, said = run.finish(60)
        assert status == 143, said
        assert ended(run.all_pids())
    with Run(recipe, tmp_path / "run", *options, "--resume") as run:
        status, said = run.finish()
        assert status == 0, said
    same(run, expected)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_one_of_two_ranks_lost(tmp_path, cluster, merge, merge_of_two, sent):
    with Run(merge[0], tmp_path / "run", *TWO, "--launch.address", cluster.address) as run:
        run.until(lambda: len(rows(run.out)) >= 4)
        os.kill(run.pids("trainer-1")[-1], sent)
        status, said = run.finish()
        assert status == 0, said
        assert len(run.pids("trainer-0")) == 2
        assert len(run.pids("trainer-1")) == 2
    same(run, merge_of_two)


def test_trainer_without_memory_hangs_and_is_ended(tmp_path, cluster, merge):
    """Python waits for ever for a thread for which there was no memory."""
    recipe, _ = merge
    options = [*RAY, "--launch.address", cluster.address, "--launch.max_restarts", "0"]
    with Run(recipe, tmp_path / "run", *options, "--launch.trainer_timeout", "40") as run:
        run.until(lambda: len(rows(run.out)) >= 2)
        resource.prlimit(run.pids("trainer")[-1], resource.RLIMIT_AS, (1 << 20, 1 << 20))
        status, said = run.finish(120)
        assert status == 2, said
    errors = [line for line in said.splitlines() if line.startswith("opd: error:")]
    assert len(errors) == 1
    assert "the trainer of merge is lost" in errors[0]
    assert "--resume" in errors[0]
    assert ended(run.all_pids())


def test_engine_killed_while_it_writes_ahead(tmp_path, cluster):
    rollout = settings(tmp_path)["rollout"] | {"schedule": "ahead"}
    recipe = write_recipe(tmp_path, rollout=rollout)
    expected = undisturbed(recipe)
    options = [*RAY, "--launch.address", cluster.address, "--launch.layout", "disaggregated"]
    with Run(recipe, tmp_path / "run", *options) as run:
        run.kill_in_step("engine-1", 4)
        status, said = run.finish()
        assert status == 0, said
    assert "engine-1 failed and is brought back" in said
    same(run, expected)


@pytest.mark.parametrize("actor", ["engine-0", "trainer"])
def test_actor_killed_in_an_asynchronous_merge(tmp_path, cluster, actor):
    rollout = settings(tmp_path)["rollout"] | {"schedule": "async", "max_ahead": 2}
    recipe = write_recipe(tmp_path, rollout=rollout)
    options = [*RAY, "--launch.address", cluster.address, "--launch.layout", "disaggregated"]
    with Run(recipe, tmp_path / "run", *options) as run:
        run.kill_in_step(actor, 4)
        status, said = run.finish()
        assert status == 0, said
        assert noticed(run, actor, said)
    found = rows(run.out)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    stale = [row.get("staleness/max", 0.0) for row in found]
    assert max(stale) in (1.0, 2.0), stale
    assert ended(run.all_pids())


def test_restarts_are_counted(tmp_path, cluster, merge):
    recipe, _ = merge
    options = [*RAY, "--launch.address", cluster.address, "--launch.max_restarts", "0"]
    with Run(recipe, tmp_path / "run", *options) as run:
        run.until(lambda: len(rows(run.out)) >= 2)
        begin = time.monotonic()
        os.kill(run.pids("teacher-0")[-1], signal.SIGKILL)
        status, said = run.finish(60)
        assert status == 2, said
        assert "is lost" in said
        assert "--resume" in said
        assert time.monotonic() - begin < 60
    assert ended(run.all_pids())
