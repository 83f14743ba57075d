"""Other libraries' options: true of the recipe, the documentation's table, what the command line answers."""

import re
from pathlib import Path

import pytest
import yaml

from opd.config import Recipe
from opd.config.load import load_recipe, parse_overrides
from opd.config.other_names import markdown_table, other_name, table_rows
from opd.config.schema import annotation_at, key_paths
from opd.errors import ConfigError
from opd.pipelines.cli import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "other_names.md"
ROWS = table_rows()
NAMES = [name for row in ROWS for names in row.names.values() for name in names]
PATHS = list(dict.fromkeys(key_paths(Recipe, {})))
ELSEWHERE = Path(__file__).with_name("options_elsewhere.txt").read_text("utf-8").splitlines()[1:]


def test_every_answer_is_a_field_of_a_recipe():
    for row in ROWS:
        for field in row.here:
            assert annotation_at(Recipe, field.split(".")) is not None, field


def test_the_documentation_has_the_table():
    assert "\n".join(markdown_table()) in PAGE.read_text("utf-8")


def test_a_name_has_one_answer_whatever_libraries_share_it():
    answers = {}
    for row in ROWS:
        for names in row.names.values():
            assert len(set(names)) == len(names)
            for name in names:
                assert answers.setdefault(name.lower().replace("-", "_"), row) is row, name


def test_a_row_without_a_field_says_why():
    assert all(row.here or row.note for row in ROWS)


def settings(name):
    """Fields of a recipe that the option `--name` would stand for."""
    *parents, last = name.split(".")
    found = []
    for path in PATHS:
        rest = iter(path[:-1])
        if path[-1] == last and all(part in rest for part in parents):
            found.append(path)
    return found


def test_no_name_means_something_here():
    known = {name for name in NAMES if len(settings(name)) == 1}
    assert known == set()


@pytest.mark.some(18)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.here[0] if row.here else row.note[:30])
def test_the_command_line_answers_with_the_field(row, ends):
    for name in (name for names in row.names.values() for name in names):
        for words in ([f"--{name}", "1"], [f"--{name}=1"], [f"{name}=1"], [f"--{name}"]):
            said = ends(2, ["run", *words, "recipe.yaml"]).err
            assert (f"--{row.here[0]}" if row.here else row.note.replace("`", "")) in said
            assert said.count("\n") == 1


def nested(name):
    """The recipe of the key `a.b` as YAML has it: `{a: {b: 1}}`."""
    first, dot, rest = name.partition(".")
    return {first: nested(rest) if dot else 1}


@pytest.mark.some(20)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.here[0] if row.here else row.note[:30])
def test_a_recipe_with_the_key_is_answered_with_the_field(row, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    for name in (name for names in row.names.values() for name in names if "*" not in name):
        recipe.write_text(yaml.safe_dump(nested(name)), "utf-8")
        with pytest.raises(ConfigError) as caught:
            load_recipe([recipe], [])
        (said,) = [line for line in str(caught.value).splitlines() if "name; " in line]
        assert f"`{name}`" in said
        assert (row.here[0] if row.here else row.note.replace("`", "")) in said


@pytest.mark.parametrize("option", ELSEWHERE)
def test_options_that_surveys_of_the_field_name_are_answered(option, ends):
    said = ends(2, ["run", "recipe.yaml", f"{option}=1"]).err
    assert "'s name; " in said
    assert "did you mean" not in said


@pytest.mark.parametrize("spelling", ["--eps_clip", "--EPS-CLIP", "--lora-r", "--kl-coef", "--Learning-Rate"])
def test_dashes_and_capitals_make_no_other_option(spelling, ends):
    assert "'s name; here it is --" in ends(2, ["run", "recipe.yaml", spelling, "1"]).err


@pytest.mark.parametrize("mark", "-_")
def test_a_spelling_that_is_a_setting_here_stays_one(mark):
    spelt = {re.sub("[-_]", mark, name) for name in NAMES}
    assert [name for name in spelt if other_name(name) and name not in NAMES and settings(name)] == []


@pytest.mark.parametrize(("option", "field"), [("--kl_coef", "distill"), ("--entropy_coef", "specialist")])
def test_a_setting_that_another_library_spells_otherwise(option, field):
    assert field in parse_overrides([option, "1"], Recipe, {})[0]


def test_an_option_without_a_row_belongs_to_its_family(capsys):
    assert main(["run", "recipe.yaml", "--sglang-attention-backend", "triton"]) == 2
    assert "--servers.NAME.arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "answer"),
    [
        (
            "learning_rate: 1.0e-5",
            "`learning_rate` is TRL's and axolotl's name; here it is specialist.optim.lr",
        ),
        ("specialist: {num_generations: 8}", "`specialist.num_generations` is TRL's name"),
        ("distill: {use_kl_loss: true}", "`distill.use_kl_loss` is "),
        ("model: {load_in_4bit: true}", "there is no such setting here: weights are float32"),
        ("base_model: x", "`base_model` is axolotl's name; here it is model.path"),
        (
            "datasets: [{path: x}]",
            "`datasets` is axolotl's name; here it is domains.NAME.source or sft.source",
        ),
        ("sequence_len: 5", "`sequence_len` is axolotl's name; here it is sft.max_length"),
        ("trainer: {total_epochs: 3}", "`trainer.total_epochs` is verl's name; here it is specialist.steps"),
        (
            "actor_rollout_ref: {actor: {ppo_mini_batch_size: 1}}",
            "`actor_rollout_ref.actor.ppo_mini_batch_size` is verl's name; here it is specialist.minibatches",
        ),
        ("actor_rollout_ref: {x: 1, rollout: {n: 8}}", "`actor_rollout_ref.rollout.n` is verl's name"),
        ("algorithm: {adv_estimator: grpo}", "`algorithm.adv_estimator` is verl's name"),
        ("grpo: {num_prompts_per_step: 3}", "`grpo.num_prompts_per_step` is NeMo-RL's name"),
        ("actor_rollout_ref: {x: {y: 1}}", "`actor_rollout_ref` is a section of verl's configuration"),
        (
            "distillation: {teacher_models: {math: {model_path: x}}}",
            "`distillation.teacher_models` is verl's name; here it is teachers.NAME.path",
        ),
        (
            "on_policy_distillation: {teacher_model_by_agent_name: {math: x}}",
            "`on_policy_distillation.teacher_model_by_agent_name` is NeMo-RL's name; here it is domains.NAME",
        ),
        (
            "actor: {optimizer: {lr: 1}}",
            "`actor.optimizer.lr` is AReaL's name; here it is specialist.optim.lr",
        ),
        ("distill: {gradient_clipping: 1}", "`distill.gradient_clipping` is DeepSpeed's name"),
        ("train: {sequence-parallel: 2}", "there is no such setting here: tensor-parallel ranks"),
    ],
)
def test_a_recipe_with_another_librarys_key_is_answered(lines, answer, tmp_path):
    (tmp_path / "recipe.yaml").write_text(f"{lines}\n", "utf-8")
    with pytest.raises(ConfigError) as caught:
        load_recipe([tmp_path / "recipe.yaml"], [])
    assert answer in str(caught.value)


def test_a_key_near_one_of_its_own_place_is_that_one(tmp_path):
    (tmp_path / "recipe.yaml").write_text("specialist: {optim: {beta: 0.9}}\n", "utf-8")
    with pytest.raises(ConfigError, match="did you mean"):
        load_recipe([tmp_path / "recipe.yaml"], [])


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--gradient_clipping", "--specialist.optim.max_grad_norm or --distill.optim.max_grad_norm"),
        ("--gradient-clipping", "--specialist.optim.max_grad_norm"),
        ("--trainer.total_epochs", "--specialist.steps or --distill.steps or --sft.epochs"),
        ("--base_model", "--model.path"),
        ("--datasets", "--domains.NAME.source or --sft.source"),
        ("--sequence_len", "--sft.max_length"),
        (
            "--kl-coef",
            "--specialist.reference_kl.coef (the weight of the teachers' divergence in the merge is",
        ),
        ("--rollout.max_completion_length", "is TRL's name; here it is --rollout.max_new_tokens"),
        ("--specialist.optim.beta", "did you mean --specialist.optim.beta1?"),
        ("--DISTILL.STEPS", "did you mean --distill.steps?"),
        ("--Distill.Optim.LR", "did you mean --distill.optim.lr?"),
        ("--distill.optim.max-grad-norm", "did you mean --distill.optim.max_grad_norm?"),
        ("--actor_rollout_ref.nope", "`actor_rollout_ref` is a section of verl's configuration"),
    ],
)
def test_an_option_is_answered_with_the_one_that_is_meant(option, told, ends, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: r\nmodel: {path: x}\ndomains: {a: {source: a.jsonl, reward: exact}}\n", "utf-8")
    said = ends(2, ["run", str(recipe), option, "1", "--dry-run"]).err
    assert told in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("key", ["rollout_temprature", "train_rank", "critic_lrr", "evaluate"])
def test_a_misspelt_key_is_nobodys(key):
    assert other_name(key) is None
