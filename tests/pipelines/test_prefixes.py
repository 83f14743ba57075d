"""A merge on answers of its teachers: they do not depend on the student, and all else is the merge's."""

from pathlib import Path

import pytest
from attempts import run_only
from recipes import tiny_recipe

from opd.errors import ConfigError
from opd.metrics import read_metrics
from opd.pipelines.evaluation.evaluate import measured_accuracies
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages import student as stages_student
from opd.storage.wal import TokenWAL
from opd.train.torch_backend import TorchBackend


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A model that knows the tasks a little, and one of random weights."""
    made = []
    for name, changes in {"warm": {}, "random": {"base": None, "seed": 1}}.items():
        out = tmp_path_factory.mktemp("runs") / name
        recipe = tiny_recipe(**changes)
        run_only(recipe, out, "base")
        made.append(out / "base")
    return made[0], made[1]


def merged(out: Path, student: Path, teacher: Path, **distill) -> tuple[list[dict], dict]:
    """The steps' metrics of a merge, and what is measured of its models, with an off-policy baseline."""
    recipe = tiny_recipe(
        base=None,
        model={"path": str(student)},
        teachers={"sort": {"path": str(teacher)}, "add3": {"path": str(teacher)}},
        distill={"steps": 4, "prompts_per_domain": 6, "checkpoint_every": 2} | distill,
        baselines={"methods": ["off_policy"]},
        evaluation={"prompts_per_domain": 40, "every": 4, "curve_prompts": 40},
    )
    with RunFolder.create(out, recipe) as folder:
        for stage in ("baseline-off_policy", "evaluate"):
            run_stage(recipe, folder, stage)
        tokens = {s: (folder.stage_done(s) or {})["student_tokens"] for s in ("merge", "baseline-off_policy")}
        assert tokens["merge"] == tokens["baseline-off_policy"]
        return read_metrics(folder.metrics_path("merge")), measured_accuracies(folder)


WRITTEN = ("tokens/student", "length/mean", "length/p50", "reward/mean", "truncated")


@pytest.mark.slow
def test_answers_are_the_teachers_whatever_the_student_has_learnt(models, tmp_path):
    warm, random = models
    slow, fast = (
        merged(tmp_path / f"{lr}", random, warm, prefixes="teacher", optim={"lr": lr, "warmup_steps": 0})[0]
        for lr in (1e-5, 3e-2)
    )
    own = merged(tmp_path / "own", random, warm)[0]
    assert [[row[key] for key in WRITTEN] for row in slow] == [[row[key] for key in WRITTEN] for row in fast]
    assert slow[-1]["kl/mean"] != fast[-1]["kl/mean"]
    # The teacher is right now and then and ends its answers; random weights do neither.
    assert max(row["truncated"] for row in slow) < min(row["truncated"] for row in own)
    assert "off-policy: it followed" in (tmp_path / "1e-05" / "merged" / "README.md").read_text("utf-8")
    assert all("entropy" in row and "mismatch/mean_abs" not in row for row in slow)


@pytest.mark.slow
def test_the_learning_curve_is_of_the_newest_weights(models, tmp_path):
    """A warm student that has followed a random teacher is right no more, and the curve says so."""
    warm, random = models
    steps = {
        "steps": 12,
        "optim": {"lr": 3e-2, "warmup_steps": 0},
        "loss": {"type": "full", "kind": "forward"},
    }
    rows, models_measured = merged(tmp_path / "run", warm, random, prefixes="teacher", **steps)
    for domain in ("sort", "add3"):
        found = {name: models_measured[name][domain]["sampled"]["accuracy"] for name in ("base", "merged")}
        assert rows[-1][f"accuracy/{domain}"] == found["merged"] < found["base"]


class Killed(BaseException):
    """Stands for a kill."""


class Dying:
    """Counts what a method was given, and dies of what takes the count to `at`."""

    def __init__(self, monkeypatch, owner: type, name: str, size=lambda given: 1) -> None:
        self.count, self.at = 0, 10**9
        real = getattr(owner, name)

        def counted(this, given):
            if self.count + size(given) >= self.at:
                raise Killed
            self.count += size(given)
            return real(this, given)

        monkeypatch.setattr(owner, name, counted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "lora"),
    [
        pytest.param("merge", None, marks=pytest.mark.long),
        ("merge", {"rank": 2}),
        ("baseline-off_policy", None),
    ],
)
def test_killed_while_teachers_write_or_while_it_learns_it_ends_alike(
    models, tmp_path, monkeypatch, stage, lora
):
    """What a teacher has written is taken from the log: to the same bits, and nothing is written twice."""
    warm, random = models
    prefixes, methods = ("teacher", []) if stage == "merge" else ("student", ["off_policy"])
    recipe = tiny_recipe(
        base=None,
        model={"path": str(random), "lora": lora},
        teachers={"sort": {"path": str(warm)}, "add3": {"path": str(warm)}},
        distill={"steps": 5, "prompts_per_domain": 3, "checkpoint_every": 2, "prefixes": prefixes},
        baselines={"methods": methods},
    )
    if stage != "merge":  # whose tokens say how long the baseline is
        for name in ("undisturbed", "disturbed"):
            run_only(recipe, tmp_path / name, "merge")
    monkeypatch.setattr(stages_student, "CHUNK_SECONDS", 0.0)  # a chunk each token, however fast it is here
    wrote = Dying(monkeypatch, TokenWAL, "append", lambda chunk: len(chunk.token_ids))
    learnt = Dying(monkeypatch, TorchBackend, "step")

    def run(name: str) -> tuple[list[list[float]], str]:
        begin = RunFolder.resume if (tmp_path / name).exists() else RunFolder.create
        with begin(tmp_path / name, recipe) as folder:
            run_stage(recipe, folder, stage)
            rows = read_metrics(folder.metrics_path(stage))
            assert not folder.wal_folder(stage).exists()
            keys = (*WRITTEN, "kl/mean") if stage == "merge" else (WRITTEN[0], "loss/ce")
            told = [[row[key] for key in (*keys, "grad_norm")] for row in rows]
            return told, (folder.stage_done(stage) or {})["digest"]

    undisturbed, tokens = run("undisturbed"), wrote.count
    wrote.count = learnt.count = 0
    for who, place in ((wrote, tokens // 4), (wrote, 3 * tokens // 4), (learnt, 4)):
        who.at = place
        with pytest.raises(Killed):
            run("disturbed")
        who.at = 10**9
    assert run("disturbed") == undisturbed
    assert wrote.count == tokens


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"distill": {"prefixes": "teacher", "loss": {"type": "k1"}}}, "loss k1 is an expectation"),
        ({"distill": {"prefixes": "teacher", "loss": {"type": "k2"}}}, "loss k2 is an expectation"),
        ({"distill": {"prefixes": "teacher", "loss": {"type": "topk", "form": "hybrid"}}}, "loss topk is an"),
        (
            {"distill": {"prefixes": "teacher", "rl_coef": 0.1, "samples_per_prompt": 2}},
            "rl_coef is an expectation",
        ),
        (
            {
                "distill": {"prefixes": "teacher"},
                "rollout": {"max_new_tokens": 5, "max_sequence": 16, "schedule": "ahead"},
            },
            "needs rollout.schedule in_turn",
        ),
        (
            {"distill": {"prefixes": "teacher"}, "storage": {"trajectories": "disk"}},
            "needs storage.trajectories memory",
        ),
    ],
)
def test_what_needs_the_students_own_answers_is_refused(changes, told):
    with pytest.raises((ConfigError, ValueError), match=told):
        tiny_recipe(**changes)
