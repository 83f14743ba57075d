"""Model cards of a whole run: right by role, and their loading lines run with plain transformers."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from recipes import tiny_recipe
from shared_runs import go_on

from opd.config import Recipe
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import character_tokenizer, load_tokenizer
from opd.pipelines.evaluation.evaluate import measured_accuracies
from opd.pipelines.records.cards import Cards, _apply_changes, example_prompts, loading_lines
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.records.settings import RecordedChange
from opd.pipelines.run import run_pipeline
from opd.rollout.prompts import Prompt, encode_prompt

DISTILL = {"steps": 2, "prompts_per_domain": 4}
CARDS = ["base", "specialists/sort", "specialists/add3", "merged", "baselines/average", "baselines/dare"]


@pytest.fixture(scope="module")
def finished(tiny_run, tmp_path_factory) -> Path:
    recipe = tiny_recipe(
        distill=DISTILL,
        specialist={"steps": 2, "prompts_per_step": 8, "group_size": 4},
        baselines={"methods": ["average", "dare"], "scales": [1.0]},
    )
    path = go_on(tiny_run, tmp_path_factory.mktemp("cards") / "run", recipe, "base")
    with RunFolder.resume(path, recipe) as folder:
        run_pipeline(recipe, folder)
    return path


def parts(folder: Path) -> tuple[dict, str, dict[str, str]]:
    """Front matter, what stands below the title, and the sections of a card."""
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    head, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    return yaml.safe_load(front), head, {s.partition("\n")[0]: s.partition("\n")[2].strip() for s in sections}


@pytest.mark.slow
@pytest.mark.parametrize("name", CARDS)
def test_a_card_says_what_the_model_is(finished: Path, name: str) -> None:
    front, head, sections = parts(finished / name)
    role, _, which = name.partition("/")
    about = {
        "base": "warmed up on demonstrations, about 70% of them right",
        "specialists": f"specialist for the domain {which}",
        "merged": "student merged from its teachers",
        "baselines": "for comparison",
    }
    assert about[role] in head
    assert ("student merged" in head) is (role == "merged")
    assert (front.get("base_model") == str(finished / "base")) is (role != "base")
    assert ("Teachers" in sections) is (role in ("merged", "baselines"))
    if "Teachers" in sections:
        assert f"| sort | {finished / 'specialists/sort'} | sort |" in sections["Teachers"]
    stages = {"base": "base", "merged": "merge", "specialists": f"specialist-{which}"}
    stage = stages.get(role, f"baseline-{which}")
    folder = RunFolder(finished, None)
    done = folder.stage_done(stage)
    assert done is not None
    assert done["digest"] in sections["Weights"]
    rows = measured_accuracies(folder)[f"specialist:{which}" if role == "specialists" else which or role]
    for domain, row in rows.items():
        assert re.search(rf"\| {domain} \| {100 * row['sampled']['accuracy']:.1f} \(", sections["Accuracy"])
    assert "steps: 2" in sections["Settings"] or role in ("base", "baselines")


@pytest.mark.slow
@pytest.mark.parametrize("name", CARDS)
def test_the_loading_lines_run_as_they_are(finished: Path, name: str) -> None:
    _, _, sections = parts(finished / name)
    code = re.fullmatch(r"```python\n(.*)```", sections["Loading"], flags=re.DOTALL)
    assert code
    said = io.StringIO()
    names: dict = {}
    with contextlib.redirect_stdout(said):
        exec(compile(code[1], "card", "exec"), names)
    # Its answer may hold a tag: a model of a few steps says anything.
    assert set(re.sub(r"<\w+>", "", said.getvalue()).strip()) <= set("0123456789=")
    domain = "add3" if name == "specialists/add3" else "sort"
    recipe = Recipe.model_validate(json.loads((finished / "config.json").read_text()))
    prompt = example_prompts(recipe)[domain]
    ids = encode_prompt(prompt, load_tokenizer(finished / name))
    np.testing.assert_array_equal(names["asked"]["input_ids"][0].numpy(), ids)
    assert f"- {domain}: `{prompt.text}`" in sections["Prompt format"]


@pytest.mark.slow
def test_the_loading_lines_need_nothing_of_opd(finished: Path) -> None:
    code = parts(finished / "merged")[2]["Loading"].removeprefix("```python\n").removesuffix("```")
    look = "\nimport sys\nassert not [name for name in sys.modules if name.split('.')[0] == 'opd']\n"
    command = [sys.executable, "-c", code + look]
    assert subprocess.run(command, capture_output=True, timeout=300, check=False).returncode == 0


def test_chat_prompts_are_loaded_through_the_template(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz :'\"\n", [])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}assistant:"
    model = CausalLM.from_config(tiny_recipe().model.config or {}, tokenizer=tokenizer)
    save_checkpoint(model, tokenizer, tmp_path / "model", {})
    prompt = Prompt.from_content([{"role": "user", "content": 'say "it\'s"\nfor me'}], "x", "chat")
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(loading_lines(tiny_recipe(), tmp_path / "model", prompt), "card", "exec"), names)
    ids = encode_prompt(prompt, load_tokenizer(tmp_path / "model"))
    np.testing.assert_array_equal(names["asked"]["input_ids"][0].numpy(), ids)


@pytest.mark.slow
def test_given_teachers_are_named_with_their_path(finished: Path, tmp_path: Path) -> None:
    given = {name: {"path": str(finished / "specialists" / name)} for name in ("sort", "add3")}
    recipe = tiny_recipe(model={"path": str(finished / "base")}, base=None, teachers=given)
    card = Cards.from_run(recipe, RunFolder(tmp_path, None)).card_sections("merged", {"digest": "abc"}, {})
    assert card["teachers"]["sort"] == {"model": given["sort"]["path"], "teaches": "sort"}
    assert card["base_model"] == str(finished / "base")
    assert "Not measured yet" in card["accuracy"]


def test_a_source_that_is_gone_takes_the_example_and_nothing_else(tmp_path: Path) -> None:
    recipe = tiny_recipe(domains={"gone": {"source": str(tmp_path / "gone.jsonl"), "reward": "math:sqrt"}})
    card = Cards.from_run(recipe, RunFolder(tmp_path, None)).card_sections("merged", {}, {})
    assert "loading" not in card
    assert card["about"].startswith("A student merged")


def test_each_domain_is_told_with_its_own_prompt_format(tmp_path: Path) -> None:
    for name, prompt in (("chat", [{"role": "user", "content": "hello 0"}]), ("plain", "hello 0")):
        line = json.dumps({"prompt": prompt, "label": "x"}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text("".join(line.replace("0", str(n)) for n in range(9)))
    domains = {n: {"source": str(tmp_path / f"{n}.jsonl"), "reward": "math:sqrt"} for n in ("chat", "plain")}
    cards = Cards.from_run(tiny_recipe(domains=domains), RunFolder(tmp_path, None))
    used = cards.usage_sections(tmp_path, ["chat", "plain"])
    chat, plain = used["prompt_format"].split("Plain text, as it is")
    assert "- chat: `" in chat
    assert "- plain: `" in plain
    assert "- plain" not in chat
    chat, plain = used["loading"].split("# plain\n")
    assert "# chat\n" in chat
    assert "apply_chat_template" in chat
    assert "tokenizer('hello" in plain
    assert "Plain" not in cards.usage_sections(tmp_path, ["chat"])["prompt_format"]


def test_a_card_has_the_settings_that_its_stage_ended_with_and_what_they_had_been() -> None:
    """Of changes before it the last one counts; one that came afterwards is taken back, the newest first."""

    def change(field, old, new, *, at=None, done=False):
        return RecordedChange("now", field, old, new, {} if at is None else {"merge": at}, ["merge"] * done)

    changes = [
        change("distill.optim.lr", 1, 2, at=10),
        change("distill.optim.lr", 2, 3, at=20),
        change("distill.optim.lr", 3, 4, done=True),
        change("distill.optim.lr", 4, 5, done=True),
        change("distill.loss.beta", 0.5, 0.1, done=True),
        change("distill.steps", 30, 40, at=0),
        change("specialist.optim.lr", 7, 8, at=5),
    ]
    told = {"optim": {"lr": 5, "eps": 6}, "loss": None, "steps": 40}
    found = _apply_changes(told, "distill.", "merge", changes)
    assert found == {"before": ["optim.lr 1 up to step 10", "optim.lr 2 up to step 20"]}
    assert told == {"optim": {"lr": 3, "eps": 6}, "loss": None, "steps": 40}
    assert _apply_changes({"optim": {"lr": 5}}, "distill.", "other", changes) == {}
