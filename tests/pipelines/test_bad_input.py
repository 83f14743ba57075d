"""Bad input ends a run early, with exit status 2 and one sentence that says what and how to mend it."""

import json

import pytest
import tiny
from recipes import write_recipe

from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.cli import main

REWARDS = """
def constant(sample):
    return 1.0

def raises(sample):
    raise KeyError("no such label")

def not_a_number(sample):
    return float("nan")
"""


@pytest.fixture
def base(tmp_path):
    """A small random model that knows the tags of the tiny recipe."""
    from opd.models.causal_lm import CausalLM

    tokenizer = character_tokenizer("0123456789=", ["<sort>", "<add3>"])
    model = CausalLM.from_config(tiny.LLAMA, tokenizer=tokenizer, seed=0)
    save_checkpoint(model, tokenizer, tmp_path / "base", {})
    return tmp_path / "base"


@pytest.fixture
def run(tmp_path, base, capsys, monkeypatch):
    """Run a tiny recipe on `base` with some settings changed; returns (exit status, stderr)."""
    (tmp_path / "bad_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(command="run", **changes):
        settings = {"model": {"path": str(base)}, "base": None} | changes
        recipe = write_recipe(tmp_path / "recipe.yaml", **settings)
        status = main([command, str(recipe), "--out", str(tmp_path / "run")])
        return status, capsys.readouterr().err

    return run


def one_sentence(error: str, *words: str) -> None:
    complaints = [line for line in error.splitlines() if line.startswith("opd: error:")]
    assert complaints, error
    for word in words:
        assert word in complaints[0], error
    assert "Traceback" not in error


def sort_domain(**changes):
    return {"sort": {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 200} | changes}


def test_unknown_key(tmp_path, ends):
    recipe = write_recipe(tmp_path / "recipe.yaml")
    recipe.write_text(recipe.read_text().replace("prompts_per_domain: 8", "promts_per_domain: 8"))
    said = ends(2, ["run", str(recipe), "--out", str(tmp_path / "run")])
    one_sentence(said.err, "promts_per_domain", "prompts_per_domain")
    assert not (tmp_path / "run").exists()


def test_missing_teacher_for_a_domain(tmp_path, ends):
    recipe = write_recipe(tmp_path / "recipe.yaml")
    recipe.write_text(
        recipe.read_text().replace("source: procedural:sort", "source: procedural:sort\n    teacher: nobody")
    )
    said = ends(2, ["run", str(recipe), "--out", str(tmp_path / "run")])
    one_sentence(said.err, "domains.sort.teacher", "nobody", "teachers.nobody.path")


@pytest.mark.some(1)
@pytest.mark.parametrize("of", ["merge", "specialist"])
def test_teacher_with_another_tokenizer(tmp_path, run, of):
    other = character_tokenizer("9876543210=", ["<sort>", "<add3>"])
    from opd.models.causal_lm import CausalLM

    model = CausalLM.from_config(tiny.LLAMA, tokenizer=other, seed=0)
    save_checkpoint(model, other, tmp_path / "other", {})
    name = {"merge": "sort", "specialist": "big"}[of]
    own = {"specialist": {"opd": {"teacher": "big"}}} if of == "specialist" else {}
    status, error = run(teachers={name: {"path": str(tmp_path / "other")}}, **own)
    assert status == 2
    one_sentence(error, name, "token")


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_corrupt_safetensors(tmp_path, run, base, damage):
    teacher = tmp_path / "teacher"
    from shutil import copytree

    copytree(base, teacher)
    shard = next(teacher.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    if damage == "flipped":
        content[-100] ^= 1
    shard.write_bytes(content if damage == "flipped" else content[:-100])
    status, error = run(teachers={"sort": {"path": str(teacher)}})
    assert status == 2
    one_sentence(error, shard.name)


def test_empty_data_set(tmp_path, run):
    (tmp_path / "empty.jsonl").write_text("")
    status, error = run(
        domains={"sort": {"source": str(tmp_path / "empty.jsonl"), "reward": "bad_rewards:constant"}}
    )
    assert status == 2
    one_sentence(error, "empty.jsonl")


@pytest.mark.parametrize(("function", "words"), [("raises", "no such label"), ("not_a_number", "nan")])
def test_reward_function_that_fails(run, function, words):
    status, error = run(domains=sort_domain(reward=f"bad_rewards:{function}"), baselines={"methods": []})
    assert status == 2
    one_sentence(error, f"bad_rewards:{function}", "sort", words)


@pytest.mark.some(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_all_groups_filtered(tmp_path, run, workers):
    specialist = {"prompts_per_step": 4, "group_size": 2, "max_steps_without_signal": 3, "steps": 50}
    status, error = run(
        domains=sort_domain(reward="bad_rewards:constant") | {"add3": sort_domain()["sort"]},
        specialist=specialist,
        runtime={"workers": workers},
        baselines={"methods": []},
    )
    assert status == 2
    one_sentence(error, "specialist-", "equal rewards")
    stage = "specialist-add3" if "specialist-add3: every" in error else "specialist-sort"
    rows = (tmp_path / f"run/stages/{stage}/metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["frac_reward_zero_std"] == 1.0, "what was measured before the error is kept"


def test_no_demonstrations_to_warm_up_on(tmp_path, run):
    rows = [json.dumps({"prompt": f"<sort>{i:03}=", "label": "1"}) for i in range(100)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    domains = {"sort": {"source": str(tmp_path / "data.jsonl"), "reward": "bad_rewards:constant"}}
    status, error = run(domains=domains, base={"steps": 2})
    assert status == 2
    one_sentence(error, "sort", "demonstrations")
