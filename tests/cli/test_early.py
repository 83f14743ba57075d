"""What `opd run` and `opd doctor` say before any library of models is imported or anything is trained."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import tiny
from recipes import tiny_recipe, write_recipe
from watched import without_waiting

from opd.config import Recipe
from opd.config.schema import key_paths
from opd.errors import StorageError
from opd.pipelines.check.checks import check_paths, check_publishing, check_sizes, refuse_place, run_check
from opd.pipelines.check.domains import check_domains, check_held_out, check_rewards
from opd.pipelines.check.models import check_device
from opd.pipelines.cli import main
from opd.storage.sample_lot import encode_records, record_of

REWARDS = """
calls = []

def of_length(sample):
    calls.append(sample.text)
    return float(len(sample.text))

def needs_a_number(sample):
    return float(int(sample.text))

def needs_a_column(prompts, completions, difficulty):
    return [0.0 for _ in completions]

def leaves(sample):
    import os
    os._exit(0)

def says_nan(sample):
    return float("nan")

def constant(sample):
    return 1

def constants(prompts, completions):
    return [0 for _ in completions]

def is_zero(sample):
    return float(sample.text == "0")

def is_written(sample):
    return float(bool(sample.text))

def divides(sample):
    return 1 / len(sample.text)

def divides_all(prompts, completions):
    return [1 / len(text) for text in completions]
"""


@pytest.fixture(autouse=True)
def rewards(tmp_path, monkeypatch):
    (tmp_path / "early_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("early_rewards", None)


def domains(**changes):
    return {"sort": {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 200} | changes}


IMPOSSIBLE = {
    "train.ranks": {"train": {"ranks": 4000}},
    "runtime.workers": {"runtime": {"workers": 4000}},
    "runtime.threads": {"runtime": {"threads": 4000}},
    "specialist.prompts_per_step": {"specialist": {"prompts_per_step": 1_000_000, "group_size": 1000}},
    "distill.prompts_per_domain": {"distill": {"prompts_per_domain": 1_000_000, "samples_per_prompt": 100}},
    "evaluation.prompts_per_domain": {
        "evaluation": {"prompts_per_domain": 1_000_000, "samples_per_prompt": 99}
    },
    "tokens": {
        "rollout": {"max_new_tokens": 90_000_000, "max_sequence": 100_000_000},
        "specialist": {"prompts_per_step": 1_000_000},
    },
    "domains.sort": {
        "domains": domains(held_out=0.0001),
        "evaluation": {"prompts_per_domain": 1_000_000},
    },
    "domains.*.prompts": {"domains": {f"d{i}": domains(prompts=10_000_000)["sort"] for i in range(400)}},
}


@pytest.mark.parametrize("key", IMPOSSIBLE)
def test_impossible_sizes_are_named(key):
    findings = check_sizes(tiny_recipe(**IMPOSSIBLE[key]))
    assert findings
    assert {finding.level for finding in findings} == {"error"}
    assert any(key in finding.detail for finding in findings), findings


def test_possible_sizes_pass():
    assert check_sizes(tiny_recipe()) == []


@pytest.mark.parametrize(
    "place", ["", " ", "memory://a", "memory://", "model", "model/below", "file://{}/model"]
)
def test_places_where_nobody_may_publish(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    with pytest.raises(StorageError):
        refuse_place(place.format(tmp_path), ["model", "s3://bucket/model"])


def test_places_where_one_may_publish(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for place in ("models", str(tmp_path), "s3://bucket/model", "gs://x", "../model-2"):
        refuse_place(place, ["model", "s3://bucket/model"])


@pytest.mark.parametrize(
    "place", ["{}/file/below", "{}/file", "/proc/nothing/below", "nosuch://x", "memory://x"]
)
def test_a_place_that_cannot_be_written_is_found(tmp_path, place):
    (tmp_path / "file").write_text("")
    recipe = tiny_recipe(storage={"published": place.format(tmp_path)})
    assert [finding.level for finding in run_check("published", check_publishing, recipe)] == ["error"]


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path):
    recipe = tiny_recipe(storage={"published": str(tmp_path / "new" / "place")})
    assert [finding.level for finding in check_publishing(recipe)] == ["ok"]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"specialist": {"advantage": {"type": "custom", "path": "gone:x"}}}, "specialist.advantage.path"),
        ({"distill": {"advantage": {"type": "custom", "path": "gone:x"}}}, "distill.advantage.path"),
        ({"distill": {"loss": {"type": "k1", "loss": {"path": "gone:x"}}}}, "distill.loss.loss.path"),
        ({"distill": {"loss": {"type": "custom", "path": "early_rewards:of_length"}}}, "distill.loss.path"),
        ({"rollout": {"generate": "early_rewards:of_length"}}, "rollout.generate"),
        ({"specialist": {"to_batch": "early_rewards:needs_a_column"}}, "specialist.to_batch"),
    ],
)
def test_every_path_is_loaded_and_its_arguments_compared(changes, key):
    (found,) = check_paths(tiny_recipe(**changes))
    assert (found.title, found.level) == (key, "error")
    assert key not in found.detail, "the line that is printed begins with it"


def test_no_path_of_the_schema_is_forgotten():
    last = ("path", "generate", "group_filter", "to_batch")
    models = (("model",), ("base",), ("distill", "teachers"))
    refused = ("specialist", "opd", "loss", "loss", "path")  # a specialist has its own policy loss
    paths = [p for p in key_paths(Recipe, {}) if p[-1] in last and not {p[:1], p[:2]} & {*models}]
    paths.remove(refused)
    assert len(paths) >= 9
    for path in paths:
        changes: dict = {}
        inner, outer = changes, changes
        for key in path[:-1]:
            inner, outer = inner.setdefault(key, {}), inner
        inner[path[-1]] = "gone:x"
        if path[-3:] == ("loss", "loss", "path"):
            outer["type"] = "k1"
        elif path[-2:] in (("advantage", "path"), ("loss", "path")):
            inner["type"] = "custom"
        if path[:2] == ("specialist", "opd"):
            changes |= {"teachers": {"old": {"path": "old"}}}
            changes["specialist"]["opd"]["teacher"] = "old"
        if path[:2] == ("distill", "policy_loss"):
            changes["distill"] |= {"rl_coef": 1.0, "samples_per_prompt": 2}
        found = {finding.title: finding.level for finding in check_paths(tiny_recipe(**changes))}
        assert found == {".".join(path): "error"}


@pytest.mark.parametrize("name", ["needs_a_number", "needs_a_column", "says_nan"])
def test_a_reward_that_fails_on_an_answer_is_found(name):
    recipe, loaded = tiny_recipe(domains=domains(reward=f"early_rewards:{name}")), {}
    assert [finding.level for finding in check_domains(recipe, loaded)] == ["ok"]
    (finding,) = check_rewards(recipe, loaded)
    assert finding.level == "error"
    assert name in finding.detail


def test_what_a_reward_gives_is_shown():
    recipe, loaded = tiny_recipe(domains=domains(reward="early_rewards:of_length")), {}
    check_domains(recipe, loaded)
    (finding,) = check_rewards(recipe, loaded)
    assert finding.detail.startswith("0 for an empty answer, 1 for '0', 3 for its label")
    (of_base,) = check_rewards(recipe, loaded, {"sort": [(loaded["sort"].train[0], "12345")]})
    assert (of_base.level, of_base.detail) == ("ok", "5 for '12345'")
    assert of_base.title != finding.title
    sys.modules["early_rewards"].calls.clear()
    right = [(prompt, prompt.label) for prompt in loaded["sort"].held_out[:3]]
    (checker,) = check_rewards(tiny_recipe(domains=domains()), loaded, {"sort": right})
    assert checker.detail.count("1 for '") == 3, "each answer is scored by its own prompt's label"
    (checker,) = check_rewards(tiny_recipe(domains=domains()), loaded)
    assert checker.detail == "0 for an empty answer, 0 for '0', 1 for its label"


@pytest.mark.parametrize(
    ("name", "written", "level"),
    [
        ("constant", ["12", "3"], "warning"),
        ("constants", ["12", "3"], "warning"),
        ("constant", [], None),
        ("of_length", ["1"], "ok"),
        ("of_length", ["12", "34"], "ok"),
        (None, ["12", "3"], "ok"),
    ],
)
def test_a_reward_that_says_the_same_of_every_answer_is_a_warning(name, written, level):
    own = {} if name is None else {"reward": f"early_rewards:{name}"}
    recipe, loaded = tiny_recipe(domains=domains(**own)), {}
    check_domains(recipe, loaded)
    (unasked,) = check_rewards(recipe, loaded)
    assert "the same for" not in unasked.detail, "a base may be asked yet"
    prompt = loaded["sort"].train[0]
    findings = check_rewards(recipe, loaded, {"sort": [(prompt, text) for text in written]})
    assert [finding.level for finding in findings] == ([] if level is None else [level])
    if level == "warning":
        told = (
            "the same for an empty answer, '0', its label: where every answer is worth the same, GRPO has no"
        )
        assert told in findings[0].detail


ALWAYS = "1 for an empty answer, 1 for 'zxqv wkjy', 1 for '%%%'"
WORTH = [
    (("python", "x = [1]\nassert x[0] == 1"), "1 for 'zxqv wkjy', 1 for '%%%'"),
    (("regex", "(?s).*"), ALWAYS),
    (("regex", "[a-z ]+"), "1 for 'zxqv wkjy'"),
    (
        ({"type": "regex", "pattern": "."}, "6"),
        "1 for 'zxqv wkjy', 1 for '%%%', 1 for '0', 1 for its label 6",
    ),
    (("early_rewards:constant", "6"), f"{ALWAYS}, 1 for '0', 1 for its label 6"),
    (("early_rewards:constant", None), ALWAYS),
    (("early_rewards:constant", ["6"]), ALWAYS),
    (("early_rewards:of_length", "6"), "9 for 'zxqv wkjy', 3 for '%%%', 1 for '0', 1 for its label 6"),
    (("early_rewards:is_zero", "6"), "1 for '0', 0 for its label 6"),
    (("early_rewards:is_zero", 6), "1 for '0', 0 for its label 6"),
    (("early_rewards:is_written", "6"), "1 for 'zxqv wkjy', 1 for '%%%', 1 for '0', 1 for its label 6"),
    (("early_rewards:is_zero", "0"), None),
    (("early_rewards:is_zero", "#### 0"), None),
    (("early_rewards:constants", "6"), None),
    (("exact", "6"), None),
    (("exact", ["6", "six"]), None),
    (("f1", "6 or 7"), None),
    (("regex", r"\d+"), None),
    (("regex", "0|6"), None),
    (("choice", "I"), None),
    (("math", "6"), None),
    (("json_schema", {"type": "number"}), None),
    (("python", "assert add(1, 2) == 3"), None),
]
"""Reward and label of the rows, and what garbage is worth there, if that is something."""


@pytest.mark.some(9)
@pytest.mark.parametrize("place", range(len(WORTH)))
def test_a_reward_that_takes_garbage_for_right_is_told(tmp_path, place):
    (reward, label), told = WORTH[place]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}=", "label": label}) + "\n" for n in range(40)))
    source = {"sort": {"source": str(path), "reward": reward}}
    recipe, loaded = tiny_recipe(domains=source, base=None, model={"path": "/base"}), {}
    assert [finding.level for finding in check_domains(recipe, loaded)] == ["ok"]
    (finding,) = check_rewards(recipe, loaded)
    if told is None:
        assert finding.level == "ok", finding.detail
        return
    assert finding.level == "warning"
    assert re.search(rf"at {re.escape(str(path))}:\d+ garbage is right \({re.escape(told)}", finding.detail)
    assert finding.detail.endswith("mend domains.sort.reward, or the labels that it reads")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "divides",
            r"\(domain sort, answer ''\) raised ZeroDivisionError: .* \(early_rewards\.py:\d+\); mend it",
        ),
        ("needs_a_number", r"\(domain sort, answer ''\) raised ValueError"),
        ("divides_all", r"\(domain sort, answer '' and 2 more\) raised ZeroDivisionError"),
        ("says_nan", r"\(domain sort, answer ''\) returned nan"),
    ],
)
def test_an_error_of_a_reward_names_the_answer(name, told):
    recipe, loaded = tiny_recipe(domains=domains(reward=f"early_rewards:{name}")), {}
    check_domains(recipe, loaded)
    (finding,) = check_rewards(recipe, loaded)
    assert re.search(told, finding.detail), finding.detail


@pytest.mark.parametrize("prompts", [12, 99, 100, 500])
def test_few_held_out_prompts_are_a_warning(prompts):
    recipe, loaded = tiny_recipe(evaluation={"prompts_per_domain": prompts}), {}
    check_domains(recipe, loaded)
    findings = check_held_out(recipe, loaded)
    assert [finding.level for finding in findings] == ["warning"] * (prompts < 100)
    if prompts == 12:
        assert findings[0].detail.startswith("sort 12, add3 12: with 12 an accuracy of 50 % is known to ± 25")


@pytest.mark.parametrize("reward", [None, "gone:x"])
def test_a_missing_source_hides_no_missing_reward(reward):
    recipe = tiny_recipe(domains={"sort": {"source": "gone.jsonl", "reward": reward}})
    findings = check_domains(recipe, {})
    assert [(finding.level, finding.title) for finding in findings] == [("error", "domain sort")] * 2
    assert "gone:x" in findings[0].detail if reward else "domains.sort.reward" in findings[0].detail
    assert "gone.jsonl" in findings[1].detail


@pytest.mark.parametrize("device", ["cuda:99", "meta", "gpu", "", "cuda:x"])
def test_a_device_that_is_not_there_is_found(device):
    (finding,) = run_check(
        "device", lambda: check_device(tiny_recipe(model={"path": "/x", "device": device}))
    )
    assert finding.level == "error"
    assert "model.device" in finding.detail
    assert run_check("device", lambda: check_device(tiny_recipe(model={"path": "/x", "device": "cpu"}))) == []


def test_a_wrong_source_brings_no_second_sentence(tmp_path, capsys):
    for command in ("run", "doctor"):
        recipe = write_recipe(tmp_path / "recipe.yaml", domains={"sort": {"source": "procedral:sort"}})
        assert (
            main([command, str(recipe), *(["--out", str(tmp_path / "run")] if command == "run" else [])]) == 2
        )
        captured = capsys.readouterr()
        assert "alphabet" not in captured.out + captured.err
        if command == "run":
            assert without_waiting(captured.err).count("\n") == 1


LIGHT = """
import json, sys
from opd.pipelines.cli import main
for words in json.loads(sys.argv[1]):
    status = main(words)
    print(status, sorted({"torch", "transformers", "matplotlib"} & set(sys.modules)))
"""
REFUSED = [
    ["--distill.steps", "many"],
    ["--domains.sort.source", "procedral:sort"],
    ["--domains.sort.source", "gone.jsonl", "--domains.sort.reward", "early_rewards:of_length"],
    ["--domains.sort.reward", "gone:x"],
    ["--domains.sort.reward", "early_rewards:needs_a_number"],
    ["--domains.sort.reward", "early_rewards_that_exit:x"],
    ["--specialist.advantage", "{type: custom, path: gone:x}"],
    ["--storage.published", "memory://x"],
    ["--runtime.threads", "4000"],
    ["--out", "."],
    ["--out", "early_rewards.py/run"],
]


def test_a_reward_that_ends_the_process_is_no_success(tmp_path):
    write_recipe(tmp_path / "recipe.yaml")
    words = [sys.executable, "-m", "opd.pipelines.cli", "run", "recipe.yaml", "--out", "run"]
    words += ["--domains.sort.reward", "early_rewards:leaves"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "ended by os._exit(0) in early_rewards.py:" in result.stderr
    assert without_waiting(result.stderr).count("\n") == 1


def test_help_imports_no_library_of_models():
    words = [["--help"], ["run", "--help"], ["run", "--help", "distill"], ["example"], ["example", "--help"]]
    command = [sys.executable, "-c", LIGHT, json.dumps(words)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert [line for line in result.stdout.splitlines() if line.endswith("]") and line[1:3] == " ["] == [
        f"{status} []" for status in (0, 0, 0, 0, 0)
    ], result.stderr


def test_a_cheap_refusal_imports_no_library_of_models(tmp_path):
    write_recipe(tmp_path / "recipe.yaml")
    (tmp_path / "early_rewards_that_exit.py").write_text("raise SystemExit(0)")
    given = [
        ["run", "recipe.yaml", *([] if "--out" in words else ["--out", "run"]), *words] for words in REFUSED
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [sys.executable, "-c", LIGHT, json.dumps(given)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    said = dict(zip(map(str, REFUSED), result.stdout.splitlines(), strict=True))
    assert said == dict.fromkeys(map(str, REFUSED), "2 []"), result.stderr
    assert without_waiting(result.stderr).count("\n") == len(REFUSED), result.stderr


@pytest.mark.parametrize("held_out", [0.1, 0.9])
@pytest.mark.parametrize(
    "row", ['"label": Infinity', '"label": 1, "n": NaN', '"label": 1, "deep": [[-Infinity]]']
)
def test_columns_that_a_trajectory_store_cannot_keep_are_named_before_a_run(tmp_path, row, held_out):
    """In memory they are what they are; on the disk they were a traceback after the specialists."""
    lines = [f'{{"prompt": "{number}", "label": 1}}' for number in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, f'{{"prompt": "x", {row}}}']))
    domains = {"a": {"source": str(tmp_path / "a.jsonl"), "reward": "math:sqrt", "held_out": held_out}}
    evaluation = {"prompts_per_domain": 101}
    for kept, found in (("memory", []), ("disk", ["error"])):
        storage = {"trajectories": kept}
        recipe = tiny_recipe(domains=domains, base=None, storage=storage, evaluation=evaluation)
        findings = check_domains(recipe, {})
        assert [finding.level for finding in findings if finding.level != "ok"] == found
    assert "a.jsonl:101: " in findings[0].detail
    assert "set storage.trajectories to memory" in findings[0].detail


def test_what_no_store_can_keep_of_a_sample_is_a_sentence():
    """Code of the user's own may add it later."""
    for label in (datetime.now(UTC), float("nan"), b"x"):
        with pytest.raises(StorageError, match="keep label and metadata to what JSON can hold"):
            encode_records([record_of(replace(tiny.samples([(1, 1)])[0], label=label))])
