"""Stages that begin a step with the groups that have ended: the same weights after any kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attempts import digests, killed_run, stop
from recipes import NO_CURVE, tiny_recipe, write_recipe

from opd.metrics import read_metrics
from opd.models.causal_lm import CausalLM
from opd.pipelines.check.checks import check_schedule
from opd.pipelines.cli import main
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages.sample_source import AsyncRollouts
from opd.rollout.torch_engine import TorchEngine

MERGE, SPECIALIST = "merge", "specialist-sort"
OUT = {MERGE: "merged", SPECIALIST: "specialists/sort"}
TIS = {"policy_loss": {"correction": {"type": "tis"}}}
ANY_LENGTH = {"max_new_tokens": 24, "max_sequence": 32}
LEARNERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "corrected": TIS,
    "critic": {"advantage": {"type": "gae"}, "filter_zero_variance": False},
}


def settings(
    models: Path, schedule: str = "in_turn", learner: str = "plain", **rollout: Any
) -> dict[str, Any]:
    specialist = {"steps": 6, "prompts_per_step": 6, "group_size": 3, "minibatches": 1, "checkpoint_every": 2}
    own = {"params": {"digits": 3}, "prompts": 50, "reward": "recipes:varied"}
    return {
        "base": None,
        "model": {"path": str(models / "base")},
        "teachers": {"add3": {"path": str(models / "sort")}},
        "domains": {name: {"source": f"procedural:{name}"} | own for name in ("sort", "add3")},
        "rollout": {"schedule": schedule, "over_sample": 1.5} | ANY_LENGTH | rollout,
        "specialist": specialist | LEARNERS[learner],
        "distill": {"steps": 6, "prompts_per_domain": 4, "checkpoint_every": 2},
        "baselines": {"methods": []},
        "evaluation": NO_CURVE,
    }


def weights(out: Path, recipe: Any, stage: str, dies_at: int = -1) -> tuple[str, list[dict]]:
    """Digest and metrics of a stage, which may be killed before a chunk and go on."""
    plain, chunks = TorchEngine.next_chunk, iter(range(dies_at)) if dies_at >= 0 else None

    def dying(engine: TorchEngine) -> Any:
        if chunks is not None and next(chunks, None) is None:
            raise KeyboardInterrupt
        return plain(engine)

    with RunFolder.create(out, recipe) as folder:
        if stage == MERGE:
            run_stage(recipe, folder, SPECIALIST)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TorchEngine, "next_chunk", dying)
            if chunks is not None:
                with pytest.raises(KeyboardInterrupt):
                    run_stage(recipe, folder, stage)
        run_stage(recipe, folder, stage)
    return CausalLM.from_pretrained(out / OUT[stage]).digest(), read_metrics(
        out / "stages" / stage / "metrics.jsonl"
    )


NUMBERS = ("rollout/carried", "rollout/out_of_order", "rollout/age", "length/mean", "tokens/student")


@pytest.mark.parametrize("stage", [SPECIALIST, MERGE])
@pytest.mark.parametrize(
    "learner", ["plain", *(pytest.param(n, marks=pytest.mark.slow) for n in list(LEARNERS)[1:])]
)
def test_killed_at_a_token_a_stage_ends_with_the_same_weights(models, tmp_path, stage, learner):
    recipe = tiny_recipe(**settings(models, learner=learner, max_staleness=2))
    expected, rows = weights(tmp_path / "undisturbed", recipe, stage)
    assert sum(row["rollout/out_of_order"] for row in rows) > 3
    assert [row["rollout/carried"] for row in rows][-1] == 0.0
    assert 0 < max(row.get("staleness/max", 0.0) for row in rows) <= 2
    chunks = int(rows[-1]["step"]) * 9
    for number, dies_at in enumerate((chunks // 3, chunks - 20)):
        digest, found = weights(tmp_path / str(number), recipe, stage, dies_at)
        if learner != "corrected":  # whose weights see how log-probabilities round after a kill
            assert digest == expected
        assert [[row[name] for name in NUMBERS] for row in found] == [
            [row[n] for n in NUMBERS] for row in rows
        ]
        assert (tmp_path / str(number) / "stages" / stage / "last_samples.json").read_bytes() == (
            tmp_path / "undisturbed" / "stages" / stage / "last_samples.json"
        ).read_bytes()


@pytest.mark.parametrize("stage", [SPECIALIST, pytest.param(MERGE, marks=pytest.mark.slow)])
def test_with_samples_on_disk_it_takes_the_same_groups(models, tmp_path, stage):
    """As in memory, and killed at a token."""
    own = settings(models, max_staleness=2)
    expected, rows = weights(tmp_path / "memory", tiny_recipe(**own), stage)
    on_disk = tiny_recipe(**own, storage={"trajectories": "disk"})
    for name, dies_at in (("whole", -1), ("early", 20), ("late", int(rows[-1]["step"]) * 9 - 20)):
        digest, found = weights(tmp_path / name, on_disk, stage, dies_at)
        assert [[row[n] for n in NUMBERS] for row in found] == [[row[n] for n in NUMBERS] for row in rows]
        assert digest == expected
        assert not (tmp_path / name / "stages" / stage / "trajectories").exists()


def test_it_goes_with_batches_written_ahead(models, tmp_path, monkeypatch):
    plain, lost = AsyncRollouts.on_checkpoint, []

    def watched(source: AsyncRollouts) -> Callable[[], None]:
        carried, release = source._carried.uids, plain(source)

        def release_and_look() -> None:
            release()
            with source.rollout_ahead.lock.between_chunks():
                lost.append(carried - set(source._rollouts.logs.tokens.uids()))

        return release_and_look

    monkeypatch.setattr(AsyncRollouts, "on_checkpoint", watched)
    recipe = tiny_recipe(**settings(models, "ahead"))
    first, rows = weights(tmp_path / "a", recipe, SPECIALIST)
    second, _ = weights(tmp_path / "b", recipe, SPECIALIST)
    third, resumed = weights(tmp_path / "c", recipe, SPECIALIST, 25)
    assert first == second
    assert sum(row["rollout/out_of_order"] for row in rows) > 3
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5, 6]
    assert {row["length/mean"] > 0 for row in resumed} == {True}
    assert resumed[-1]["rollout/carried"] == 0.0
    assert third
    assert lost == [set()] * len(lost) != []  # ended answers of groups that go on stay in the log


def repeated(row: dict) -> dict:
    """What of a step's metrics is the same if it learns from the same tokens again."""
    same = ("step", "reward", "length", "tokens/", "staleness", "grad", "kl", "entropy", "policy", *NUMBERS)
    return {name: value for name, value in row.items() if name.startswith(same)}


def check_order(rows: list[dict], most: int) -> None:
    """Rows of a stage whose weights came at any token."""
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert sum(row["rollout/out_of_order"] for row in rows) > 3
    assert rows[-1]["rollout/carried"] == 0.0
    assert 0 < max(row.get("staleness/max", 0.0) for row in rows) <= most


@pytest.mark.parametrize(
    ("stage", "storage"),
    [
        (SPECIALIST, "memory"),
        pytest.param(MERGE, "memory", marks=pytest.mark.slow),
        pytest.param(SPECIALIST, "disk", marks=pytest.mark.slow),
        (MERGE, "disk"),
    ],
)
def test_asynchronous_steps_are_repeated_as_they_were(models, tmp_path, stage, storage):
    """From the beginning, because there is no checkpoint: each step that was taken before the kill."""
    never = {"checkpoint_every": 100}
    own = settings(models, "async", max_ahead=3)
    own |= {name: own[name] | never for name in ("specialist", "distill")}
    own["storage"] = {"trajectories": storage}
    recipe = tiny_recipe(**own)
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        if stage == MERGE:
            run_stage(recipe, folder, SPECIALIST)
        stop(recipe, folder, stage, 4)
        first = read_metrics(tmp_path / "run" / "stages" / stage / "metrics.jsonl")
        assert len(first) == 4
        run_stage(recipe, folder, stage)
    rows = read_metrics(tmp_path / "run" / "stages" / stage / "metrics.jsonl")
    assert list(map(repeated, rows[:4])) == list(map(repeated, first))
    check_order(rows, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "storage"), [(1, "memory"), (2, "memory"), (1, "disk"), (2, "disk")])
def test_killed_by_the_system_an_asynchronous_run_repeats_its_steps(models, tmp_path, ranks, storage):
    own = settings(models, "async", max_ahead=3)
    own["storage"] = {"trajectories": storage}
    own |= {name: own[name] | {"checkpoint_every": 3} for name in ("specialist", "distill")}
    recipe, out = write_recipe(tmp_path / "recipe.yaml", **own, train={"ranks": ranks}), tmp_path / "run"
    command = [sys.executable, "-m", "opd.pipelines.cli", "run", str(recipe), "--out", str(out)]
    seen: dict[tuple[str, int], dict] = {}

    def look(stage: str) -> list[dict]:
        rows = read_metrics(out / "stages" / stage / "metrics.jsonl")
        for row in rows:
            assert repeated(row) == seen.setdefault((stage, row["step"]), repeated(row))
        return rows

    for stage, lines in [(SPECIALIST, 2), (SPECIALIST, 5), (MERGE, 2), (MERGE, 5)]:
        path = out / "stages" / stage / "metrics.jsonl"
        options = ["--resume"] if (out / "config.json").exists() else []
        process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") >= lines):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert len(look(stage)) >= lines
    finish = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300)
    assert finish.returncode == 0, finish.stderr
    for stage in (SPECIALIST, MERGE):
        check_order(look(stage), 3)


DIGITS = {"sort": {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 50}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rollout": {"schedule": "async"}}, "over_sample needs max_ahead 2 or more with schedule async"),
        (
            {"rollout": {"schedule": "async", "max_ahead": 3, "max_staleness": 1}},
            "over_sample needs max_staleness 2 or more",
        ),
        ({"rollout": {"log": None}}, "over_sample needs a log"),
        ({"rollout": {"max_staleness": 0}}, "over_sample needs max_staleness 1 or more"),
        ({"rollout": {"schedule": "ahead", "max_staleness": 1}}, "over_sample needs max_staleness 2 or more"),
        ({"rollout": {"generate": "recipes:varied"}}, "over_sample needs no generate"),
        (
            {"domains": {"sort": DIGITS["sort"] | {"rollout": {"generate": "recipes:varied"}}}},
            r"does not go with rollout.generate \(of domain sort\)",
        ),
        (
            {"domains": {"sort": DIGITS["sort"] | {"environment": {"type": "tools"}}}},
            "does not go with domains.sort.environment",
        ),
        ({"specialist": {"replay": {}}}, r"does not go with specialist.replay \(of domain sort\)"),
        ({"specialist": {"difficulty": {}}}, r"does not go with specialist.difficulty \(of domain sort\)"),
        ({"rollout": {"max_running": 40}}, "set max_running to 48 or more"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes, sentence):
    plain = {"domains": DIGITS, "distill": {"prompts_per_domain": 8}} | changes
    plain["rollout"] = {"over_sample": 1.5} | ANY_LENGTH | changes.get("rollout", {})
    plain["specialist"] = {"prompts_per_step": 8, "group_size": 4} | changes.get("specialist", {})
    with pytest.raises(ValueError, match=sentence):
        tiny_recipe(**plain)


def test_a_merge_of_given_teachers_has_room(models):
    given = {"teachers": {"sort": {"path": str(models / "sort")}}, "domains": DIGITS}
    own = settings(models, max_running=6) | given
    tiny_recipe(**own)
    with pytest.raises(ValueError, match="puts 9 requests in flight"):
        tiny_recipe(**own | {"distill": {"prompts_per_domain": 6}})


def test_the_doctor_says_that_it_needs_a_correction(models):
    (found,) = check_schedule(tiny_recipe(**settings(models)))
    assert found.level == "warning"
    assert "in_turn and over_sample tokens of older weights" in found.detail
    assert not check_schedule(tiny_recipe(**settings(models, over_sample=1.0)))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "storage"), [(1, "memory"), (2, "memory"), (1, "disk"), (2, "disk")])
def test_killed_by_the_system_a_run_ends_with_the_same_weights(models, tmp_path, ranks, storage):
    own = settings(models) | {"storage": {"trajectories": storage}}
    recipe = write_recipe(tmp_path / "recipe.yaml", **own, train={"ranks": ranks})
    killed_run(recipe, tmp_path / "undisturbed")
    killed_run(recipe, tmp_path / "killed", 6_000, 15_000)
    assert digests(tmp_path / "killed") == digests(tmp_path / "undisturbed")
    for stage in (SPECIALIST, MERGE):
        rows = read_metrics(tmp_path / "killed" / "stages" / stage / "metrics.jsonl")
        assert sum(row["rollout/out_of_order"] for row in rows) > 3
        assert rows[-1]["rollout/carried"] == 0.0


@pytest.mark.slow
def test_carried_groups_need_as_many_ranks_as_before(models, tmp_path, capfd):
    recipe = tiny_recipe(**settings(models))
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        stop(recipe, folder, SPECIALIST, 2)
    path = write_recipe(tmp_path / "recipe.yaml", **settings(models))
    assert main(["run", str(path), "--out", str(tmp_path / "run"), "--resume", "--train.ranks", "2"]) == 2
    assert (
        "are in the logs of 1 rank(s), and 2 were started; start as many as before" in capfd.readouterr().err
    )
