"""The verdict says what the numbers say, also when they are bad."""

from html import unescape

import pytest

from opd.pipelines.report.load import load_run
from opd.pipelines.report.page import draw_template
from opd.pipelines.report.results import Run
from opd.pipelines.report.tables import alternatives_table
from opd.pipelines.report.verdict import Verdict, closing_summary, retained_shares, write_verdict

from .conftest import DOMAINS, SAMPLED, RunMaker, results


def caveats(run: Run) -> str:
    """What the page says that the run does not show."""
    return unescape(draw_template("caveats.html", run=run))


@pytest.fixture
def judge(make_run: RunMaker):
    """`judge(merged=(...), ...)`: the run and verdict of the synthetic results with some models replaced."""

    def run_and_verdict(drop: tuple[str, ...] = (), **shares: tuple[float, ...]) -> tuple[Run, Verdict]:
        chosen = {name: value for name, value in {**SAMPLED, **shares}.items() if name not in drop}
        run = load_run(make_run(results(chosen)))
        return run, write_verdict(run)

    return run_and_verdict


def test_headline_is_the_mean_and_the_weakest_share(judge) -> None:
    _, verdict = judge(merged=(0.479, 0.986, 0.994))
    # 239.5 of 500 rounds to 240: 0.48 / 0.958 = 50.1 %, and (50.1 + 100 + 100) / 3 = 83.4 %.
    assert "keeps only 83.4\u202f% of its specialists" in verdict.headline
    assert verdict.headline.endswith("its weakest domain is sort, at 50.1\u202f%.")


def test_outcomes_follow_the_interval_of_the_difference(judge) -> None:
    _, verdict = judge()
    text = dict(verdict.points)
    assert "weight average (14.8 points)" in text["Ahead of"]
    assert "mixed-domain GRPO (18.5 points, equal student tokens)" in text["Ahead of"]
    assert "off-policy distillation (+1.0 points" in text["Too close to tell from"]
    assert "7.9 times the merge\u2019s student tokens" in text["Too close to tell from"]
    assert "Behind" not in text


def test_a_bad_merge_is_called_bad(judge) -> None:
    _, verdict = judge(merged=(0.10, 0.60, 0.70))
    text = dict(verdict.points)
    assert "Ahead of" not in text
    assert "TIES (34.7 points)" in text["Behind"]
    assert text["Worse than the base"] == "on sort."
    assert "keeps only" in verdict.headline


def test_a_better_student_is_not_said_to_keep(judge) -> None:
    assert "reaches 100.6\u202f%" in judge()[1].headline


@pytest.mark.parametrize(
    ("base", "teachers", "merged", "says"),
    [
        (0.02, 0.05, 0.047, "The specialists are weak: 5.0\u202f% of their sampled answers are right"),
        (
            0.0,
            0.0,
            0.0,
            "No verdict on the merge: its specialists are not clearly above the base (0.0 points",
        ),
        (
            0.6,
            0.604,
            0.6,
            "No verdict on the merge: its specialists are not clearly above the base (+0.4 points",
        ),
        (
            0.9,
            0.7,
            0.7,
            "No verdict on the merge: its specialists are not clearly above the base (\u221220.0",
        ),
        (
            0.02,
            0.25,
            0.24,
            "keeps 96.0\u202f% of its specialists\u2019 sampled accuracy on average (24.0\u202f% right",
        ),
        (
            0.2,
            0.95,
            0.94,
            "keeps 98.9\u202f% of its specialists\u2019 sampled accuracy on average (94.0\u202f% right",
        ),
    ],
)
def test_the_headline_knows_how_good_the_teachers_are(
    judge, base: float, teachers: float, merged: float, says: str
) -> None:
    own = {f"specialist:{d}": tuple(teachers if d == e else 0.0 for e in DOMAINS) for d in DOMAINS}
    _, verdict = judge(base=(base,) * 3, merged=(merged,) * 3, **own)
    assert says in verdict.headline
    if "keeps" not in says:  # the share kept of next to nothing is not the news
        assert "keeps" not in verdict.headline
        assert "% right, they" not in verdict.headline


@pytest.mark.parametrize("given_", [False, True])
def test_given_teachers_are_not_said_to_have_started_from_the_base(make_run: RunMaker, given_: bool) -> None:
    config = {"teachers": {"sort": {"path": "/models/sort"}}} if given_ else {}
    text = dict(write_verdict(load_run(make_run(results(), config=config))).points)["Accuracy."]
    assert ("they all started from" in text) is not given_


def test_teachers_that_read_another_prompt_are_named(make_run: RunMaker) -> None:
    config = {"domains": {"sort": {"teacher_prompt": {"user": "{label}={prompt}"}}, "add3": {}}}
    folder = make_run(results(), config=config)
    told = "on sort the specialists answered teacher_prompt, all others the student\u2019s prompt"
    assert dict(write_verdict(load_run(folder)).points)["Two prompts:"] == f"{told}."
    assert told in closing_summary(folder)
    run = load_run(folder)
    run.config["domains"]["sort"]["teacher_prompt"] = None
    assert "Two prompts:" not in dict(write_verdict(run).points)


def test_a_command_ends_with_verdict_table_and_folders(make_run: RunMaker) -> None:
    folder = make_run(results(), stages=["merge"])
    (folder / "merged").mkdir()
    (folder / "report.html").touch()
    text = closing_summary(folder)
    verdict, table, places = text.split("\n\n")
    assert verdict == write_verdict(load_run(folder)).headline
    lines = table.splitlines()
    assert lines[0].split() == ["sampled", "accuracy,", "%", *DOMAINS, "mean", "kept"]
    assert [line[:12].strip() for line in lines[1:6]] == [
        "Base",
        "Specialists,",
        "Merged stude",
        "Mixed-domain",
        "Off-policy d",
    ]
    assert lines[3].split()[2:] == ["97.0", "98.8", "99.6", "98.5", "100.6", "%"]
    assert lines[6] == "and 5 more in the report"
    assert lines[7] == "each known to ± 3.6 points or better (95\u202f% intervals)"
    assert len(lines) == 8
    model, report = places.splitlines()
    assert model.split(maxsplit=2) == ["merged", "model", str(folder / "merged")]
    assert report.split(maxsplit=1) == ["report", str(folder / "report.html")]


def test_the_table_says_what_it_cannot_know(make_run: RunMaker) -> None:
    data = results()
    own = {m["name"]: m for m in data["models"]}
    add3 = own["specialist:add3"]["domains"]["add3"]
    add3["sampled"] = add3["sampled"] | {"correct": 0}
    del own["specialist:sort"]["domains"]["sort"]
    lines = closing_summary(make_run(data)).splitlines()
    why = "add3, where the teacher is never right; sort, whose teacher was not measured"
    assert f"kept leaves out {why}" in lines


def test_few_answers_on_one_domain_are_said(make_run: RunMaker) -> None:
    data = results()
    few = next(model for model in data["models"] if model["name"] == "merged")["domains"]["add3"]
    few["sampled"] = few["sampled"] | {"correct": 39, "total": 40}
    assert ": 40 answers are few, raise evaluation.prompts_per_domain" in closing_summary(make_run(data))


def test_a_command_without_an_evaluation_says_how_to_get_one(make_run: RunMaker) -> None:
    data = results({})
    data["teachers"]["sort"]["kl_steps"] = 20
    text = closing_summary(make_run(data))
    assert text.startswith(
        "KL to the teachers at the end of the merge (nats per token, mean of the last 20 steps)"
    )
    assert "opd evaluate RECIPE --resume" in text


def test_without_specialists_the_accuracy_itself_is_the_headline(judge) -> None:
    _, verdict = judge(drop=tuple(f"specialist:{domain}" for domain in DOMAINS))
    assert verdict.headline == (
        "The merged student samples 98.5\u202f% right answers on average over its domains."
    )
    assert "the specialists" not in dict(verdict.points)["Accuracy."]


def test_without_a_merge_nothing_is_claimed(judge) -> None:
    run, verdict = judge(drop=("merged",))
    assert verdict.headline.startswith("This run has no evaluated merge yet.")
    assert "equal student tokens" not in caveats(run).lower()


def test_the_cost_sums_the_specialists(judge) -> None:
    _, verdict = judge()
    assert dict(verdict.points)["Cost."] == (
        "The merge sampled 207\u202fk student tokens in 20\u202fs; training 3 specialists took 1.41\u202fM "
        "tokens and 58\u202fs of stage time."
    )


def test_a_merge_on_its_teachers_answers_is_not_told_as_one_on_its_own(judge) -> None:
    run, _ = judge()
    assert "off-policy (distill" not in caveats(run)
    run.config["distill"] = {"prefixes": "teacher"}
    assert "The merge is off-policy (distill.prefixes: teacher)" in caveats(run)
    assert dict(write_verdict(run).points)["Cost."].startswith("The merge followed its teachers over 207")


def test_what_is_written_in_fp8_is_told(judge) -> None:
    run, _ = judge()
    assert "FP8" not in caveats(run)
    run.config["model"] = {"quantize": "fp8"}
    assert "Trained models compute, are measured and are written in FP8 (model.quantize)" in caveats(run)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "is level with it: \u22120.3 points (\u22121.3 to +0.6)"),
        ({}, "One training seed (0)"),
        ({"drop": ("mixed_grpo_all",)}, "was not measured here"),
        ({"merged": (0.8, 0.8, 0.8)}, "is behind it by 18.8 points"),  # a defeat at all tokens
    ],
)
def test_caveats_name_the_fair_rival(judge, changes: dict, said: str) -> None:
    run, _ = judge(**changes)
    assert said in caveats(run)


def test_the_teacher_of_a_domain_follows_the_recipe(make_run: RunMaker) -> None:
    mixed = {"reverse": 0.7, "sort": 0.3}
    config = {"domains": {"sort": {"teacher": mixed}, "reverse": {}, "add3": {"teacher": "sort"}}}
    run = load_run(make_run(results(), config=config))
    teachers = [run.best_teacher(domain) for domain in DOMAINS]
    names = [teacher.name for teacher in teachers if teacher is not None]
    assert names == ["specialist:sort", "specialist:reverse", "specialist:sort"]


def test_of_several_given_teachers_the_best_counts_by_name_and_none_is_called_a_specialist(make_run) -> None:
    shares = {"base": (0.1,) * 3, "teacher:sort": (0.9, 0.2, 0.8), "teacher:add3": (0.3, 0.9, 0.4)}
    both = {"sort": 0.1, "add3": 0.9}
    domains = {"sort": {}, "reverse": {"teacher": "add3"}, "add3": {"teacher": both}}
    data = results(shares | {"merged": (0.9, 0.9, 0.6)})
    data["stages"] = [stage for stage in data["stages"] if stage["name"] in ("merge", "evaluate")]
    folder = make_run(data, config={"domains": domains, "teachers": {name: {"path": "/t"} for name in both}})
    run = load_run(folder)
    assert run.best_of_several() == {"add3": "sort"}
    assert retained_shares(run, run.model("merged"))["add3"] == pytest.approx(0.6 / 0.8)
    verdict = write_verdict(run)
    assert dict(verdict.points)["Several teachers:"] == "on add3 the best of its teachers counts, sort."
    ended = closing_summary(folder)
    assert "on add3 the best of its teachers counts, sort" in ended
    assert "Teachers, own domain" in ended
    header, table = verdict.headline + str(verdict.points), alternatives_table(run)
    assert table is not None
    told = [text for row in table.rows for text in (row.label, *(cell.text for cell in row.cells))]
    assert "Teachers, own domain" in told
    assert "specialist" not in f"{header}{ended}{told}".lower()
