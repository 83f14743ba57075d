import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from watched import without_waiting

from opd.config.load import load_recipe
from opd.errors import ConfigError
from opd.pipelines import cli
from opd.pipelines.cli import main
from opd.pipelines.options import split_overrides

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """\
name: demo
model:
  config: {model_type: llama}
domains:
  sort: {source: "procedural:sort"}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return str(path)


def test_dry_run_prints_the_resolved_recipe_and_writes_nothing(recipe, tmp_path, ends):
    out = tmp_path / "run"
    printed = ends(0, ["run", recipe, "--distill.lr", "3e-5", "--dry-run", "--out", str(out), "--seed=4"]).out
    (tmp_path / "resolved.yaml").write_text(printed)
    resolved = load_recipe([tmp_path / "resolved.yaml"])
    assert resolved == load_recipe([recipe], ["--distill.lr", "3e-5", "--seed", "4"])
    assert not out.exists()


def test_options_before_the_recipe_do_not_swallow_it(recipe, ends):
    assert "steps: 3" in ends(0, ["run", "--dry-run", "--distill.steps", "3", recipe]).out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["run", "none.yaml"], "none.yaml: there is no such recipe file"),
        (["run", "{recipe}", "--distill.stps", "3", "--dry-run"], "did you mean --distill.steps?"),
        (["run", "{recipe}", "--resum"], "unknown option --resum; did you mean --resume?"),
        (["run", "{recipe}", "--seed"], "--seed needs a value"),
        (["run", "{recipe}", "--out", "", "--dry-run"], "--out: it is empty; give a path"),
        (["run", "{recipe}", "--dry-run", "--name", "../../x"], "'../../x' cannot name a folder"),
        (
            ["run", "{recipe}", "--dry-run", "--train.ranks", "2", "--runtime.workers", "2"],
            "but several ranks",
        ),
        (["run", "{recipe}", "--dry-run", "--runtime.threads", "4096"], "threads is 4096, and this machine"),
        (["specialist", "{recipe}", "--dry-run", "--domain", "chess"], "it trains sort"),
        (
            ["plan", "{recipe}", "--ranks", "9" * 6000],
            "--ranks: give a whole number from 1 to 1,000,000, not",
        ),
        (["publish", "a", "b", "--shards", "9" * 6000], "--shards: give a number of 1 to 15 digits"),
        (["plan", "{recipe}", "--ranks", "0"], "--ranks: give a whole number from 1 to 1,000,000, not '0'"),
        (["run"], "the following arguments are required: RECIPE; see `opd run --help`"),
        (["rum", "{recipe}"], "invalid choice: 'rum'"),
        (["specialist", "{recipe}", "--domain", "chess"], "it trains sort"),
        (
            ["distill", "{recipe}", "--domain", "sort"],
            "distill takes no --domain, which is an option of `opd sp",
        ),
        (
            ["doctor", "{recipe}", "--shards", "2"],
            "opd doctor takes no --shards, which is an option of `opd publ",
        ),
        (
            ["publish", "a", "b", "--resume"],
            "opd publish takes no --resume, which is an option of `opd run` and",
        ),
        (["--resume", "run", "{recipe}"], "--resume stands before the command; write it behind `opd run`"),
        (["report", "a", "b"], "opd report does not know what to do with 'b'; see `opd report --help`"),
        (["report", "none"], "there is no run folder none"),
        (["report", ".", "--seed", "1"], "takes a run folder and no settings"),
    ],
)
def test_a_users_error_is_one_line_and_status_2(recipe, words, part, ends):
    captured = ends(2, [word.format(recipe=recipe) for word in words])
    assert captured.out == ""
    assert without_waiting(captured.err).startswith("opd: error: ")
    assert without_waiting(captured.err).count("\n") == 1
    assert part in captured.err


def test_an_existing_folder_is_refused_before_anything_else(recipe, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    for command in ("run", "specialist", "distill", "evaluate"):
        assert main([command, recipe, "--out", str(tmp_path / "run")]) == 2
        assert "exists already; add --resume" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.json").read_text() == "{}"


HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "matplotlib",
    "pyarrow",
    "ray",
    "fsspec",
    "aiohttp",
    "lmdb",
)
"""Of these alone the first four take seconds to import."""


def test_examples_are_listed_and_printed_and_can_be_loaded(capsys, ends, tmp_path):
    *listed, _ = ends(0, ["example"]).out.splitlines()
    names = [line.split()[0] for line in listed]
    assert {"quickstart", "merge", "lora", "specialist", "served"} <= set(names)
    for name in names:
        assert main(["example", name]) == 0
        path = tmp_path / f"{name}.yaml"
        path.write_text(capsys.readouterr().out)
        assert load_recipe([path]).domains, name
    assert "choose from" in ends(2, ["example", "nosuch"]).err


def test_help_lists_sections_a_section_or_every_field(capsys, ends):
    def lines(*words: str) -> list[str]:
        assert main([*words]) == 0
        return capsys.readouterr().out.splitlines()

    short, everything = lines("run", "--help"), lines("run", "recipe.yaml", "--help", "all")
    assert len(short) < 80
    assert any(line.startswith("  distill ") for line in short)
    assert any(line.startswith("  --distill.optim.lr ") for line in short)
    assert not any(line.startswith("  --distill.optim.beta1") for line in short)
    section = lines("distill", "--help", "distill")
    assert "  --distill.steps  int [120]" in section
    assert "      39 fields: --help distill.loss" in section
    assert not {line for line in section if line.startswith(("  --specialist", "  --distill.loss."))}
    assert any(line.startswith("  --distill.loss.kind") for line in lines("plan", "--help=distill.loss"))
    assert {line for line in section if line.startswith("  --")} < set(everything)
    assert len(everything) > 2000
    assert "did you mean distill.teachers?" in ends(2, ["run", "--help", "distill.tachers"]).err


@pytest.mark.parametrize("words", [["--help"], ["examples/quickstart/recipe.yaml", "--dry-run"]])
def test_what_trains_nothing_imports_no_library_of_models(words):
    code = (
        "import sys\nfrom opd.pipelines.cli import main\n"
        f"print(main(sys.argv[1:]), sorted(set({HEAVY}) & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "run", *words]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert said.endswith("0 []\n")
    assert "distill" in said


def test_version_and_help_leave_at_once():
    code = (
        "import sys\nfrom opd.pipelines.cli import main\n"
        "for word in sys.argv[1:]: print(main([word]), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "--version", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("0 False\n")
    assert said[0].startswith("opd ")
    assert "specialist" in said[1]
    assert said[2:] == [""]


def test_ctrl_c_ends_with_130(recipe):
    # The process interrupts itself where it would print, as a terminal would at that moment. It hears it
    # although tests run in the background ignore the signal, and with them what they start.
    code = (
        "import os, signal, sys\nfrom opd.pipelines.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Out:\n"
        "    def write(self, text): os.kill(os.getpid(), signal.SIGINT)\n"
        "    def flush(self): pass\n"
        "sys.stdout = Out()\nsys.exit(main(['run', sys.argv[1], '--dry-run']))"
    )
    command = [sys.executable, "-c", code, recipe]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 130
    assert without_waiting(result.stderr) == "opd: interrupted\n"


def test_overrides_are_told_from_the_commands_own_words():
    own, overrides = split_overrides(["run", "--a.b", "-1", "r.yaml", "--out=x", "--c=1", "--resume"])
    assert own == ["run", "r.yaml", "--out=x", "--resume"]
    assert overrides == ["--a.b", "-1", "--c=1"]
    assert split_overrides(["--domains", "{}"]) == ([], ["--domains", "{}"])
    with pytest.raises(ConfigError, match="did you mean --dry-run"):
        split_overrides(["--dryrun"])


def test_a_run_stays_where_it_began_when_code_of_ones_own_goes_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe([Path(__file__).parents[2] / "examples" / "quickstart" / "recipe.yaml"], [])
    for out in (None, Path("here")):
        place = cli._run_path(recipe, argparse.Namespace(out=out))
        monkeypatch.chdir("/")
        assert place.is_relative_to(tmp_path)
        monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["opd", "dis"], ["distill"]),
        (["opd", "specialist", "--dom"], ["--domain", "--domains"]),
        (["opd", "run", "r.yaml", "--distill.optim.lr"], ["--distill.optim.lr"]),
        (["opd", "publish", "m", "--"], ["--dtype", "--help", "--shards"]),
        (["opd", "publish", "m", "x"], []),
    ],
)
def test_bash_completes_commands_options_and_fields(typed, offered, capsys):
    assert main(["completion", "bash"]) == 0
    words = " ".join(f"'{word}'" for word in typed)
    script = f"{capsys.readouterr().out}\nCOMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}\n"
    script += '_opd; printf "%s\\n" "${COMPREPLY[@]}"'
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert sorted(said.stdout.split()) == offered, said.stderr
