"""Rules over metrics: when they fire, and what a run does then, also when it is killed and resumed."""

import json
import shlex
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import yaml
from attempts import made_base, stop
from recipes import NO_CURVE, tiny_recipe

from opd.config.watch import RuleConfig
from opd.errors import DataError, TrainingError
from opd.metrics import FlagsWriter, read_metrics
from opd.pipelines.cli import main
from opd.pipelines.records.run_folder import AcceptedChanges, RunFolder
from opd.pipelines.report import write_report
from opd.pipelines.run import run_stage
from opd.pipelines.stages.alert_rules import AlertRule, Flag

STAGE = "specialist-add3"


def fired(settings: dict, columns: Mapping[str, Iterable[float | None]]) -> list[Flag]:
    """What a rule says of a stage whose metrics are `columns`; a step without one has `None`."""
    rule = AlertRule("mine", RuleConfig.model_validate(settings))
    steps = zip(*columns.values(), strict=True)
    rows = [
        {"step": number, **dict(zip(columns, values, strict=True))} for number, values in enumerate(steps)
    ]
    return [flag for row in rows for flag in rule.check_step({k: v for k, v in row.items() if v is not None})]


def at(flags: list[Flag]) -> list[int]:
    return [flag.step for flag in flags]


def test_a_rule_fires_once_for_as_long_as_it_goes_on():
    rule = {"metric": "m", "above": 1, "steps": 3}
    column = [2, 2, 0, 2, 2, 2, 2, 2, 2, 2, 0, 2, 2, 2]
    assert at(fired(rule, {"m": column})) == [5, 13]
    assert at(fired(rule | {"action": "lower_rate"}, {"m": column})) == [5, 8, 13]
    assert at(fired(rule | {"action": "stop"}, {"m": column})) == [5, 8, 13]
    assert at(fired(rule, {"m": [1] * 9})) == []  # at the bound is within it


def test_a_step_without_the_metric_neither_counts_nor_begins_anew():
    rule = {"metric": "m", "below": 1, "steps": 2}
    assert at(fired(rule, {"m": [0, None, None, 0, 2]})) == [3]


def test_forms_are_taken_to_the_first_values():
    ratio = {"metric": "m", "below": 0.5, "form": "ratio", "first": 2, "steps": 1}
    (flag,) = fired(ratio, {"m": [3.0, 1.0, 1.5, 0.9]})
    assert (flag.step, flag.value, flag.bound) == (3, 0.9, 1.0)
    assert flag.sentence.startswith("m is 0.9, below 1 (0.5 times the mean of its first 2); look at the")
    assert fired(ratio, {"m": [1.0, -1.0, -9.0, -9.0]}) == []  # a mean of 0 is nothing to be divided by
    change = ratio | {"form": "change", "above": 1.0, "below": None}
    (flag,) = fired(change, {"m": [-3.0, -1.0, -1.5, 0.9]})
    assert (flag.value, flag.bound) == (0.9, -1.0)
    assert at(fired({"metric": "m", "above": 1, "below": -1, "steps": 1}, {"m": [2, 0, -2]})) == [0, 2]


def test_a_mean_of_the_latest_values_is_held_against_the_bounds():
    rule = {"metric": "m", "above": 1, "last": 3, "steps": 2}
    (flag,) = fired(rule, {"m": [0, 3, 0, 0, 3, 3, 0]})
    assert (flag.step, flag.value, flag.bound) == (6, 2.0, 1.0)
    assert flag.sentence.startswith("m (mean of its last 3) is 2, above 1, for 2 in a row")
    ratio = {"metric": "m", "above": 2, "form": "ratio", "first": 2, "last": 2, "steps": 1}
    assert at(fired(ratio, {"m": [1, 1, 3, 1, 5]})) == [4]  # of the values after the first ones


def test_each_of_several_names_is_looked_at_by_itself():
    rule = {"metric": "kl/*", "above": 1, "steps": 2}
    columns = {"kl/a": [2, 2, 2], "kl/b": [0, 2, 2], "kl/mean": [9, 9, 9], "other": [9, 9, 9]}
    assert [(flag.step, flag.metric) for flag in fired(rule, columns)] == [(1, "kl/a"), (2, "kl/b")]


def test_another_condition_holds_by_its_latest_value():
    rule = {"metric": "m", "above": 1, "steps": 2, "also": {"metric": "n/*", "below": 5}}
    assert at(fired(rule, {"m": [2, 2, 2, 2], "n/a": [None, None, None, None]})) == []
    (flag,) = fired(rule, {"m": [2, 2, 2, 2], "n/a": [9, 9, 3, None], "n/b": [7, 7, 7, 7]})
    assert flag.step == 3
    assert "m is 2, above 1, for 2 in a row, while n/a is 3, below 5" in flag.sentence


def test_a_second_condition_on_the_same_metric_is_of_the_same_name():
    rule = {"metric": "kl/*", "above": 0.9, "form": "ratio", "first": 1, "steps": 1}
    rule["also"] = {"metric": "kl/*", "above": 0.1}
    found = fired(rule, {"kl/small": [0.01, 0.01], "kl/large": [0.5, 0.5]})
    assert [flag.metric for flag in found] == ["kl/large"]


def test_a_file_of_flags_keeps_exactly_what_the_checkpoint_knew(tmp_path):
    writer = FlagsWriter(tmp_path)
    assert not writer.path.exists()
    flags = [Flag(step, "r", "m", 1.0, 0.5, "warn", "s") for step in (3, 3, 7)]
    tails = [""]
    for flag in flags:
        writer.append({"step": flag.step, "rule": flag.rule})
        tails.append(writer.last_chain)
    whole = writer.path.read_bytes()
    for kept, tail in enumerate(tails):
        writer.path.write_bytes(whole + b'{"step": 8, "ru')
        FlagsWriter(tmp_path).truncate(5 if kept < 3 else 9, tail)
        assert writer.path.read_bytes().splitlines() == whole.splitlines()[:kept]
    writer.path.write_bytes(whole.replace(b'"r"', b'"q"'))
    with pytest.raises(DataError, match=r"flags\.jsonl:1"):
        FlagsWriter(tmp_path).truncate(9, tails[3])
    writer.path.unlink()
    with pytest.raises(DataError, match="has lost what was written up to step 9"):
        FlagsWriter(tmp_path).truncate(9, tails[1])


# What a run does.


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Two layers, made from noise."""
    return made_base(tmp_path_factory.mktemp("base") / "run", tiny_recipe(base=None))


def nearly_the_same(sample) -> float:
    """A reward of a model made from noise that differs, and little."""
    return sum(map(ord, sample.text)) / 1000


RULES = {
    "slower": {"metric": "grad_norm", "above": 0.0, "steps": 2, "action": "lower_rate", "factor": 0.5},
    "gone": {"metric": "lr", "below": 3e-4, "steps": 1, "action": "stop", "lever": "take another rate."},
}


def watched(base: Path, steps: int = 6, **rules):
    """Steps at a rate of 1e-3, with checkpoints after every third."""
    own = {"optim": {"lr": 1e-3, "schedule": "constant"}, "steps": steps, "checkpoint_every": 3}
    domain = {"source": "procedural:add3", "params": {"digits": 3}, "prompts": 64}
    return tiny_recipe(
        base=None,
        model={"path": str(base)},
        domains={"add3": domain | {"reward": f"{__name__}:nearly_the_same"}},
        specialist={"prompts_per_step": 4, "group_size": 4, "minibatches": 1} | own,
        watch=rules,
        evaluation=NO_CURVE,
    )


def rates(folder: RunFolder) -> list[float]:
    return [row["lr"] for row in folder.read_metrics(STAGE)]


def test_a_rate_is_lowered_bit_for_bit_also_after_a_kill(base, tmp_path):
    recipe = watched(base, slower=RULES["slower"])
    with RunFolder.create(tmp_path / "whole", recipe) as whole:
        run_stage(recipe, whole, STAGE)
    assert rates(whole) == [1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4, 2.5e-4]
    with RunFolder.create(tmp_path / "killed", recipe) as folder:
        stop(recipe, folder, STAGE, 5)
        assert [flag["step"] for flag in folder.read_flags(STAGE)] == [2, 4]  # the second is dropped first
        run_stage(recipe, folder, STAGE)
        done = [each.stage_done(STAGE) or {} for each in (whole, folder)]
    assert rates(folder) == rates(whole)
    assert done[0]["digest"] == done[1]["digest"]
    assert folder.flags_path(STAGE).read_bytes() == whole.flags_path(STAGE).read_bytes()
    assert [flag["step"] for flag in folder.read_flags(STAGE)] == [2, 4, 6]


def test_a_stop_leaves_a_checkpoint_and_a_sentence_and_is_gone_on_with(base, tmp_path):
    recipe = watched(base, 8, **RULES)
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        for step in (5, 6):  # with the same rules it stops again where they hold again
            with pytest.raises(TrainingError) as stopped:
                run_stage(recipe, folder, STAGE)
            said = str(stopped.value)
            assert said.startswith(f"{STAGE}: the rule gone of `watch` has stopped it at step {step}: lr is")
            assert said.endswith(
                "take another rate. Then go on with: the same command and --resume --accept-changed-settings"
            )
            assert (folder.checkpoints_folder(STAGE) / f"step_{step}").is_dir()
    lifted = watched(base, 8, slower=RULES["slower"])
    with RunFolder.resume(tmp_path / "run", lifted) as folder:
        run_stage(lifted, folder, STAGE)
        done = folder.stage_done(STAGE) or {}
    with RunFolder.create(tmp_path / "never", lifted) as never:
        run_stage(lifted, never, STAGE)
        assert (never.stage_done(STAGE) or {})["digest"] == done["digest"]


@pytest.mark.slow
def test_a_stop_says_the_command_that_goes_on_with_the_lever_pulled(base, tmp_path, capsys, ends):
    written = tmp_path / "a recipe.yaml"
    settings = watched(base, 7, **RULES).model_dump(mode="json", exclude_none=True)
    written.write_text(yaml.safe_dump(settings, sort_keys=False))
    begun = ["specialist", str(written), "--out", str(tmp_path / "run"), "--name", "mine"]
    said = ends(2, begun).err
    command = said.partition("Then go on with: ")[2].splitlines()[0]
    assert shlex.split(command) == ["opd", *begun, "--resume", "--accept-changed-settings"]
    again = [*shlex.split(command)[1:], "--specialist.optim.lr", "0.004"]
    assert main([word for word in again if word != "--accept-changed-settings"]) == 2
    assert "go on with what it says now by --resume --accept-changed-settings" in capsys.readouterr().err
    assert main(again) == 0
    change = "specialist.optim.lr 0.001 -> 0.004 (specialist-add3 after step 5, baseline-mixed_grpo)"
    assert (
        f"going on with changed settings, as inputs.json, results.json and the report will say: {change}"
        in (capsys.readouterr().err)
    )
    results = json.loads((tmp_path / "run/results.json").read_text())
    (row,) = results["setting_changes"]
    assert (row["field"], row["old"], row["new"]) == ("specialist.optim.lr", 1e-3, 4e-3)
    assert row["stages"][STAGE] == 5
    folder = RunFolder.attach(tmp_path / "run")
    # The rate is the new one, times what rules have left of it: a half after steps 2, 4 and 6.
    assert rates(folder)[4:] == [2.5e-4, 1e-3, 5e-4]
    write_report(folder.path)
    assert change.replace(">", "&gt;") in (folder.path / "report.html").read_text("utf-8")
    card = (folder.specialist_folder("add3") / "README.md").read_text("utf-8")
    assert "optim.lr 0.001 up to step 5" in card


@pytest.mark.slow
def test_other_settings_count_from_the_checkpoint_on_bit_for_bit(base, tmp_path):
    recipe = watched(base, 8, slower=RULES["slower"])
    own = recipe.specialist.model_copy(
        update={"optim": recipe.specialist.optim.model_copy(update={"lr": 5e-4})}
    )
    lower = recipe.model_copy(update={"specialist": own})
    with RunFolder.create(tmp_path / "whole", recipe) as folder:
        stop(recipe, folder, STAGE, 4)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    with RunFolder.resume(tmp_path / "whole", lower, AcceptedChanges(settings=True)) as whole:
        run_stage(lower, whole, STAGE)
    with RunFolder.resume(tmp_path / "killed", lower, AcceptedChanges(settings=True)) as killed:
        stop(lower, killed, STAGE, 7)
    with RunFolder.resume(tmp_path / "killed", lower) as killed:
        run_stage(lower, killed, STAGE)
        done = [each.stage_done(STAGE) or {} for each in (whole, killed)]
    assert done[0]["digest"] == done[1]["digest"]
    assert rates(killed) == rates(whole)
    assert rates(whole)[2:7] == [5e-4, 2.5e-4, 1.25e-4, 1.25e-4, 6.25e-5]
    assert [row.stages[STAGE] for row in killed.setting_changes] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("trajectories", ["memory", "disk"])
def test_at_another_temperature_no_response_of_the_old_one_is_learnt_from(base, tmp_path, trajectories):
    """Those of the step that was under way lay in the log, or on disk."""
    recipe = watched(base, 5).model_copy(update={"watch": None})
    storage = recipe.storage.model_copy(update={"trajectories": trajectories})
    recipe = recipe.model_copy(update={"storage": storage})
    cooler = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"temperature": 0.1})})
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        stop(recipe, folder, STAGE, 4)
    with RunFolder.resume(tmp_path / "run", cooler, AcceptedChanges(settings=True)) as folder:
        run_stage(cooler, folder, STAGE)
        rows = folder.read_metrics(STAGE)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert max(row["mismatch/mean_abs"] for row in rows) < 1e-4
    assert rows[3]["rollout/replayed_requests"] == 0
    assert rows[3]["entropy"] < 0.8 * rows[2]["entropy"]


@pytest.mark.slow
@pytest.mark.parametrize("trajectories", ["memory", "disk"])
@pytest.mark.parametrize("lever", ["rate", "rule", "steps"])
def test_no_response_of_weights_that_do_not_come_again_is_learnt_from(base, tmp_path, trajectories, lever):
    """The log held those of two steps beyond the checkpoint; what its weights have written stays."""
    recipe = watched(base, 7, faster=RULES["slower"] | {"factor": 0.9}).model_copy(
        update={"storage": tiny_recipe().storage.model_copy(update={"trajectories": trajectories})}
    )
    optim = recipe.specialist.optim.model_copy(update={"lr": 0.03})
    changed = {
        "rate": {"specialist": recipe.specialist.model_copy(update={"optim": optim})},
        "rule": {"watch": None},
        "steps": {"specialist": recipe.specialist.model_copy(update={"steps": 6})},
    }[lever]
    other = recipe.model_copy(update=changed)
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        stop(recipe, folder, STAGE, 5)
    with RunFolder.resume(tmp_path / "run", other, AcceptedChanges(settings=True)) as folder:
        run_stage(other, folder, STAGE)
        rows = folder.read_metrics(STAGE)
    assert max(row["mismatch/mean_abs"] for row in rows) < 1e-4
    assert [row["rollout/replayed_requests"] for row in rows[4:]] == [0.0] * len(rows[4:])
    assert trajectories == "disk" or rows[3]["rollout/replayed_requests"] == 16


def test_a_warning_is_a_line_of_the_terminal_of_the_file_and_of_the_report(base, tmp_path, capsys):
    settings = {"metric": "reward/add3", "above": -1, "steps": 2, "lever": "do <b>this</b>"}
    recipe = watched(base, mine=settings)
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        run_stage(recipe, folder, STAGE)
        (flag,) = [flag for flag in folder.read_flags(STAGE) if flag["rule"] == "mine"]
        value = folder.read_metrics(STAGE)[1]["reward/add3"]
        sentence = f"reward/add3 is {value:.4g}, above -1, for 2 in a row; do <b>this</b>."
        known = {"step": 2, "rule": "mine", "metric": "reward/add3", "value": value, "bound": -1.0}
        assert flag == known | {"action": "warn", "sentence": sentence}
        assert f"{STAGE}: step 2, mine: {sentence}\n" in capsys.readouterr().err
        write_report(folder.path)
        page = (folder.path / "report.html").read_text("utf-8")
        assert "Red flags" in page
        assert "do &lt;b&gt;this&lt;/b&gt;." in page
        folder.flags_path(STAGE).write_text(json.dumps({**flag, "step": 1}) + "\n")
        with pytest.raises(Exception, match=r"flags\.jsonl"):
            folder.stage_done(STAGE)


def test_what_is_watched_changes_no_weight(base, tmp_path):
    ends = []
    for name, recipe in (("on", watched(base)), ("off", watched(base).model_copy(update={"watch": None}))):
        with RunFolder.create(tmp_path / name, recipe) as folder:
            run_stage(recipe, folder, STAGE)
            ends.append((folder.stage_done(STAGE) or {})["digest"])
    assert ends[0] == ends[1]
    assert read_metrics(tmp_path / "off" / "stages" / STAGE / "flags.jsonl") == []
