"""Evaluation sets: prompts of their own, several answers each, measured on every model and shown."""

import json
from pathlib import Path

import pytest
from recipes import own_rollout, tiny_recipe

from opd.data.load import load_domain
from opd.errors import DataError, RewardError
from opd.pipelines.check.examine import check_contamination, run_checks
from opd.pipelines.evaluation import evaluate
from opd.pipelines.evaluation.evaluate import find_contamination
from opd.pipelines.evaluation.prompt_sets import load_sets
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.report import write_report
from opd.pipelines.run import run_stage
from opd.rollout.prompts import content_key, hash_fraction
from opd.types import SampleGroup

BAD = "<script>alert(1)</script>"
called: list[tuple[str, int, float]] = []


def agent(engine, prompts, group_size, sampling, seed) -> list[SampleGroup]:
    """A rollout of one's own that writes down what it was asked."""
    called.append((prompts[0].domain, group_size, sampling.temperature))
    return own_rollout(engine, prompts, group_size, sampling, seed)


def even(sample) -> float:
    """Right where the response is of an even length; what is voted on is whether it is."""
    return float(sample.length % 2 == 0)


even.answer = lambda sample: str(sample.length % 2)  # type: ignore[attr-defined]


def broken(sample) -> float:
    return 1.0


broken.answer = lambda sample: 3  # type: ignore[attr-defined]


def write_set(path: Path, count: int = 12) -> str:
    rows = [{"prompt": f"<sort>{i:03d}=", "label": f"{BAD}{i}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sets_of(tmp: Path) -> dict:
    several = {"samples_per_prompt": 4, "pass_at": [1, 2, 4], "maj_at": [1, 3]}
    return {
        "file": {"source": write_set(tmp / "set.jsonl"), "reward": f"{__name__}:even"} | several,
        "gen": {
            "source": "procedural:add3",
            "params": {"digits": 3},
            "prompts": 9,
            "rollout": {"temperature": 0.5, "generate": f"{__name__}:agent"},
        },
    }


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    tmp = tmp_path_factory.mktemp("sets")
    recipe = recipe_of(tmp)
    with RunFolder.create(tmp / "run", recipe) as folder:
        run_stage(recipe, folder, "base")
        called.clear()
        run_stage(recipe, folder, "evaluate")
    return tmp


def recipe_of(tmp: Path, **evaluation):
    settings = {"prompts_per_domain": 10, "samples_per_prompt": 2, "pass_at": [2]}
    return tiny_recipe(base=None, evaluation=settings | {"sets": sets_of(tmp)} | evaluation)


def results(tmp: Path) -> dict:
    return json.loads((tmp / "run/results.json").read_text())


def test_every_set_is_measured_beside_the_domains(measured):
    (base,) = results(measured)["models"]
    assert set(base["domains"]) == {"sort", "add3"}
    assert set(base["sets"]) == {"file", "gen"}
    own, gen = base["sets"]["file"], base["sets"]["gen"]
    assert (own["prompts"], own["sampled"]["total"], own["greedy"]["total"]) == (12, 48, 12)
    assert 12 <= own["sampled"]["worth"] <= 48
    assert gen["sampled"]["total"] == 9
    assert "worth" not in gen["sampled"]
    assert set(own["pass_at"]) == {"1", "2", "4"}
    assert own["pass_at"]["1"]["value"] == pytest.approx(own["sampled"]["accuracy"])
    values = [own["pass_at"][k]["value"] for k in ("1", "2", "4")]
    assert values == sorted(values)
    assert own["maj_at"]["1"]["value"] <= own["pass_at"]["4"]["value"]
    for found in (*own["pass_at"].values(), *own["maj_at"].values()):
        assert 0 <= found["low"] <= found["value"] <= found["high"] <= 1
    domain = base["domains"]["sort"]
    assert (domain["prompts"], domain["samples_per_prompt"], [*domain["pass_at"]]) == (10, 2, ["2"])


def test_a_set_is_answered_by_its_own_agent_at_its_own_temperature(measured):
    assert called == [("gen", 1, 0.5), ("gen", 1, 0.0)]


def test_sets_and_their_answers_are_in_the_report(measured):
    page = write_report(measured / "run").read_text()
    assert "<h3>Evaluation sets</h3>" in page
    assert "pass@4" in page
    assert "maj@3" in page
    assert BAD not in page
    card = (measured / "run/base/README.md").read_text()
    assert "pass@4" in card


def test_prompts_in_training_are_counted_in_results_and_report_and_warned_of(measured, tmp_path):
    """Digit tasks of their own held-out strings never are; a file that repeats training prompts is."""
    found = results(measured)["contamination"]
    assert found["ngram"] == 13
    assert found["texts"] == 400
    repeated = found["found"].pop("file")["contaminated"]
    trained = load_domain("sort", tiny_recipe().domains["sort"], seed=0, held_out_prompts=1).train
    assert repeated == sum(prompt.text in {f"<sort>{i:03d}=" for i in range(12)} for prompt in trained) > 0
    assert all(row["contaminated"] == 0 for row in found["found"].values())
    page = write_report(measured / "run").read_text()
    assert "Evaluation prompts in training" in page
    warned = check_contamination(recipe_of(tmp_path), load_sets(recipe_of(tmp_path)))
    (warning,) = warned
    assert warning.level == "warning"
    assert f"{repeated} of 12 evaluation prompts of file" in warning.detail
    assert "of domain sort" in warning.detail


def test_demonstrations_count_unless_they_are_held_out(tmp_path):
    rows = [{"prompt": f"question {i}", "completion": "no"} for i in range(40)]
    rows.append({"prompt": "another", "completion": "as asked: <add3>105= and so on"})
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = [{"prompt": f"Question {i}", "label": ""} for i in range(40)]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    recipe = tiny_recipe(
        base=None,
        sft={"source": str(tmp_path / "sft.jsonl"), "held_out": 0.3},
        evaluation={"sets": {"q": {"source": str(tmp_path / "set.jsonl"), "reward": f"{__name__}:even"}}},
    )
    found = find_contamination(recipe, {}, load_sets(recipe))
    kept = sum(hash_fraction(content_key(row["prompt"])) >= 0.3 for row in rows[:-1])
    assert found["found"]["q"]["contaminated"] == kept
    assert 0 < kept < 40
    off = recipe.model_copy(
        update={"evaluation": recipe.evaluation.model_copy(update={"contamination": None})}
    )
    assert find_contamination(off, {}, {}) == {}


def test_what_was_measured_is_kept(measured, monkeypatch):
    """As after a kill between two models: the evaluation of a run without a merge is never done."""
    before = results(measured)["models"]
    monkeypatch.setattr(evaluate, "measure_model", None)
    recipe = recipe_of(measured)
    with RunFolder.resume(measured / "run", recipe) as folder:
        run_stage(recipe, folder, "evaluate")
    assert results(measured)["models"] == before


def test_all_of_a_file_is_held_out_and_of_generated_prompts_what_no_domain_trains_on(tmp_path):
    recipe = recipe_of(tmp_path)
    sets = load_sets(recipe)
    assert len(sets["file"].held_out) == 12
    assert not sets["file"].train
    assert not sets["gen"].train
    trained = load_domain("add3", recipe.domains["add3"], seed=0, held_out_prompts=1).train
    assert not {p.key for p in trained} & {p.key for p in sets["gen"].held_out}


def test_what_is_wrong_with_a_set_is_said_of_it_before_the_run(tmp_path):
    source = {"source": str(tmp_path / "set.jsonl")}
    write_set(tmp_path / "set.jsonl")
    wrong = {
        "gone": {"source": str(tmp_path / "no.jsonl"), "reward": f"{__name__}:even"},
        "silent": source,
        "few": {"source": "procedural:sort", "params": {"digits": 2}},
        "odd": {"source": "procedural:sort", "params": {"digit": 2}},
    }
    found = run_checks(recipe_of(tmp_path, sets=wrong), run_dir=tmp_path / "run", thorough=False)
    said = {finding.title: finding.detail for finding in found if finding.level == "error"}
    assert set(said) == {f"evaluation set {name}" for name in wrong}
    assert "no.jsonl does not exist" in said["evaluation set gone"]
    assert "evaluation.sets.silent.reward" in said["evaluation set silent"]
    assert "or evaluation.sets.few.prompts" in said["evaluation set few"]
    assert "evaluation.sets.odd.params" in said["evaluation set odd"]
    long = {"long": source | {"reward": f"{__name__}:even", "rollout": {"max_new_tokens": 16}}}
    found = run_checks(recipe_of(tmp_path, sets=long), run_dir=tmp_path / "run", thorough=False)
    (error,) = [finding for finding in found if finding.level == "error"]
    assert "evaluation.sets.long.rollout.max_new_tokens 16 leaves no room" in error.detail


def test_a_set_without_its_file_stops_the_evaluation_with_its_name(tmp_path):
    recipe = recipe_of(tmp_path)
    Path(recipe.evaluation.sets["file"].source).write_text("{}\n")
    with pytest.raises(DataError, match=r"set\.jsonl:1: there is no `prompt`"):
        load_sets(recipe)


def test_an_answer_that_is_no_text_is_said_of_the_set(measured, tmp_path):
    sets = {
        "file": {
            "source": write_set(tmp_path / "set.jsonl", 2),
            "reward": f"{__name__}:broken",
            "samples_per_prompt": 2,
            "maj_at": [2],
        }
    }
    recipe = tiny_recipe(
        base=None,
        model={"path": str(measured / "run/base")},
        evaluation={"prompts_per_domain": 2, "sets": sets},
    )
    with RunFolder.create(tmp_path / "run", recipe) as folder, pytest.raises(RewardError) as error:
        run_stage(recipe, folder, "evaluate")
    assert "evaluation set file" in str(error.value)
    assert "returned a int" in str(error.value)
