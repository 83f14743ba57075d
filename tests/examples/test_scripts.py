"""What the scripts of `examples/` hand on: their extra to the installation, the caller's arguments to `opd`.

They run for real in a copy of the folder, with an environment whose programs note how they are called.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "examples/quickstart.sh": "core",
    "examples/agents/run.sh": "textworld",
    "examples/deepspeed/run.sh": "deepspeed",
    "examples/five_tasks/run.sh": "reasoning-gym",
    "examples/megatron/run.sh": "megatron",
    "examples/megatron_teachers/run.sh": "megatron",
    "examples/mixtures/run.sh": "core",
    "examples/ray_cluster/run.sh": "ray",
    "examples/real_model/run.sh": "lora",
    "examples/other_tokenizer/real.sh": "lora",
    "examples/other_tokenizer/run.sh": "core",
    "examples/self_distillation/run.sh": "core",
    "examples/served/run.sh": "sglang",
}
EXTRA = {**SCRIPTS, "tests/run.sh": "test", "examples/install.sh": "core"}
ALIKE = set(EXTRA) - {"examples/quickstart.sh", "examples/served/run.sh", "tests/run.sh"}
"""What is asked of these is asked of the others with `--full` alone."""
LOCKED = "linux x86_64 3 11"
STUB = """#!{real} -IS
import json, os, pathlib, shutil, subprocess, sys
name, words = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
with open({calls!r}, "a") as calls:
    print(json.dumps([name, *words]), file=calls)
if words[:2] == ["-m", "venv"]:
    folder = pathlib.Path(words[-1]) / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    for other in ("python", "opd"):
        shutil.copy(sys.argv[0], folder / other)
if words[:1] == ["-c"] and "import platform" in words[1]:
    print(os.environ["PLATFORM"])
elif words[:1] == ["-c"] and "urllib" not in words[1] and "import torch" not in words[1]:
    sys.exit(subprocess.call([{real!r}, *words], close_fds=False))
if words[:1] and words[0].endswith("cluster.py"):
    sys.exit(subprocess.call(words[1:]))
if "--out" in words:
    pathlib.Path(words[words.index("--out") + 1]).mkdir(parents=True, exist_ok=True)
sys.exit(words[:1] == ["-c"] and words[1] == "import torch")
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout with the scripts alone, and an environment of stubs that counts as installed."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "examples", root / "examples", ignore=shutil.ignore_patterns("*results*"))
    (root / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "run.sh", root / "tests")
    shutil.copy(ROOT / "pyproject.toml", root)
    shutil.copytree(ROOT / ".ci" / "requirements", root / ".ci" / "requirements")
    for environment in (".venv/bin", "sglang/venv/bin", "vllm/venv/bin", "stub"):
        folder = root / environment
        folder.mkdir(parents=True)
        for name in ("python", "opd"):
            (folder / name).write_text(STUB.format(real=sys._base_executable, calls=str(root / "calls")))
            (folder / name).chmod(0o755)
    for servers in ("sglang", "vllm"):
        (root / servers / "ready").touch()
    for made in ("model/config.json", "data/words.jsonl"):  # by an earlier run of real_model/
        (root / "runs" / "real-model-inputs" / made).parent.mkdir(parents=True)
        (root / "runs" / "real-model-inputs" / made).touch()
    for extra in set(EXTRA.values()):
        (root / ".venv" / f".installed-{extra}").write_text(f"{root}\n")
    return root


def call(root: Path, script: str, *arguments: str, platform: str = LOCKED) -> list[list[str]]:
    """How the script called `python` and `opd`; it must end well."""
    (root / "calls").unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", str(root / script), *arguments],
        env=os.environ
        | {"OPD_SGLANG_ENV": str(root / "sglang"), "OPD_VLLM_ENV": str(root / "vllm")}
        | {"XDG_CACHE_HOME": str(root / "cache")}  # what a stub would install stays here
        | {"PYTHON": str(root / "stub" / "python"), "PLATFORM": platform},
        cwd=root.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (root / "calls").read_text().splitlines()]


def runs(calls: list[list[str]]) -> list[list[str]]:
    return [words for words in calls if words[0] == "opd" and words[1] in ("run", "specialist")]


def test_every_script_is_in_the_table():
    shell = (*ROOT.glob("examples/*.sh"), *ROOT.glob("examples/*/*.sh"), ROOT / "tests" / "run.sh")
    assert {str(path.relative_to(ROOT)) for path in shell} == set(EXTRA)


@pytest.mark.some(3)
@pytest.mark.parametrize("script", SCRIPTS)
def test_arguments_go_to_opd_and_not_to_the_installation(copy, script):
    calls = call(copy, script, "--seed", "1", "--out", "runs/mine")
    assert runs(calls)
    for words in runs(calls):
        assert words[words.index("--seed") + 1] == "1"
        assert words.count("--out") == 1
        assert words[words.index("--out") + 1].startswith("runs/mine")
        assert "--resume" not in words
    assert not [words for words in calls if "pip" in words], "it is installed already"

    for words in runs(call(copy, script, "--resume", "--seed", "1", "--out", "runs/mine")):
        assert "--resume" in words
        assert words[words.index("--out") + 1].startswith("runs/mine")


@pytest.mark.parametrize("script", ["examples/megatron_teachers/run.sh"])
def test_a_run_that_had_not_begun_is_begun_on_resume(copy, script):
    first = next(iter(runs(call(copy, script, "--out=runs/mine"))))
    for folder in (copy / "runs").glob("mine*"):
        if str(folder) != str(copy / first[first.index("--out") + 1]):
            shutil.rmtree(folder)
    (copy / first[first.index("--out") + 1]).mkdir(parents=True, exist_ok=True)
    later = runs(call(copy, script, "--out=runs/mine", "--resume"))
    assert ["--resume" in words for words in later] == [True] + [False] * (len(later) - 1)


def fresh(root: Path) -> None:
    """Take the environment away; the program that makes a new one stays."""
    shutil.rmtree(root / ".venv")


def installed(calls: list[list[str]]) -> list[list[str]]:
    return [words for words in calls if words[0] == "python" and words[2:3] in (["pip"], ["uv"])]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "script", [pytest.param(one, marks=[pytest.mark.long] * (one in ALIKE)) for one in EXTRA]
)
def test_a_fresh_checkout_installs_the_scripts_own_extra_from_the_lock(copy, script):
    fresh(copy)
    arguments = () if script.endswith("install.sh") else ("--seed", "1", "--out", "runs/mine")
    torch, tools, lock, package = installed(call(copy, script, *arguments))
    files = [f"{copy}/.ci/requirements/{name}.txt" for name in ("torch", "tools", EXTRA[script])]
    assert [words[-1] for words in (torch, tools, lock, package)] == [*files, str(copy)]
    assert {"--require-hashes", "--no-deps"} <= set(lock)
    assert {"--no-deps", "--editable"} <= set(package)


def test_another_platform_gets_what_the_bounds_allow(copy):
    fresh(copy)
    calls = installed(call(copy, "examples/install.sh", "ray", platform="darwin arm64 3 12"))
    assert calls[-1][-1] == f"{copy}[ray]"
    assert not any("--require-hashes" in words for words in calls)


@pytest.mark.some(1)
@pytest.mark.parametrize("changed", ["pyproject.toml", ".ci/requirements/ray.txt", ".ci/requirements"])
def test_it_is_installed_once_and_again_when_the_lock_or_the_package_changed(copy, changed):
    assert not installed(call(copy, "examples/ray_cluster/run.sh"))
    later = time.time() + 60
    os.utime(copy / changed, (later, later))
    assert installed(call(copy, "examples/ray_cluster/run.sh"))


@pytest.mark.parametrize("broken", ["elsewhere", "interrupted", "without pip", "no program", "odd stamp"])
def test_an_environment_of_another_checkout_or_half_of_one_is_made_anew(copy, broken):
    (copy / ".venv" / "of-the-original").touch()
    if broken == "elsewhere":
        for stamp in (copy / ".venv").glob(".installed-*"):
            stamp.write_text("/another/checkout\n")
    elif broken == "interrupted":
        (copy / ".venv" / ".installing").touch()
    elif broken == "odd stamp":
        (copy / ".venv" / ".installed-ray").unlink()
        (copy / ".venv" / ".installed-ray").symlink_to("nowhere/at/all")
        (copy / ".venv" / ".installed-docs").touch()
    else:
        shutil.rmtree(copy / ".venv" / "bin")
    if broken == "without pip":
        (copy / ".venv" / "bin").mkdir()
        (copy / ".venv" / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
        (copy / ".venv" / "bin" / "python").chmod(0o755)
    assert installed(call(copy, "examples/install.sh", "ray"))[-1][-1] == str(copy)
    anew = broken in ("elsewhere", "interrupted")
    assert (copy / ".venv" / "of-the-original").exists() == (not anew)
    assert not installed(call(copy, "examples/install.sh", "ray"))


def test_a_python_that_is_not_there_is_said(copy):
    fresh(copy)
    command = ["bash", str(copy / "examples" / "install.sh"), "ray"]
    environment = os.environ | {"PYTHON": "/nowhere/python"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = "opd: there is no /nowhere/python: set PYTHON to a Python 3.11 or newer\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["data"], ["tests/data"]),
        (["--full", "data/"], ["--full", "tests/data"]),
        (["-m", "data", "--lf", "data"], ["-m", "data", "--lf", "tests/data"]),
        (["-k", "nosuch", "--check"], ["-k", "nosuch", "-m=check"]),
        (["tests/run.sh::one"], ["tests/run.sh::one"]),
        (["data/test_mix.py::one[a/b]"], ["tests/data/test_mix.py::one[a/b]"]),
        (["--cov-report", "json", "data"], ["--cov-report", "json", "tests/data"]),
        (["--junit-xml", "found.xml"], ["--junit-xml", "found.xml"]),
        (["--tb=short", "data", "data"], ["--tb=short", "tests/data", "tests/data"]),
        (["-x", "data", "-W", "ignore"], ["-x", "tests/data", "-W", "ignore"]),
        (["-rA", "data"], ["-rA", "tests/data"]),
        (["--no-header", "data", "-n", "data"], ["--no-header", "tests/data", "-n", "data"]),
        (["--unknown", "5"], ["--unknown", "5"]),
        (["--cov", "data"], ["--cov=", "tests/data"]),
    ],
)
def test_folders_are_named_alone_and_values_of_options_stay(copy, words, wanted):
    (copy / "tests" / "data").mkdir()
    (copy / "tests" / "data" / "test_mix.py").touch()
    extra = copy / ".venv" / ".installed-test-full"
    extra.write_text(f"{copy}\n")
    assert call(copy, "tests/run.sh", *words)[-1][-len(wanted) :] == wanted


def test_an_empty_argument_is_said(copy):
    command = ["bash", str(copy / "tests" / "run.sh"), "--full", ""]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "opd: an argument is empty: leave it out\n")


@pytest.mark.parametrize("word", ["nosuch", "nosuch/", "tests/nosuch.py", "data/nosuch.py"])
def test_what_is_not_there_is_said_before_anything_is_installed(copy, word):
    command = ["bash", str(copy / "tests" / "run.sh"), "--full", f"{word}::one" if ".py" in word else word]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"there is no {word} in {copy}, nor in its tests/: name a folder" in done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [(["nosuch"], 2), (["s3", "ray"], 2), (["s3 ray"], 2), (["s3\nray"], 2), ([""], 0), (["--help"], 0)],
)
def test_an_extra_that_is_none_is_said_before_anything_is_installed(copy, words, code):
    """The empty name is no extra at all, which the stub counts as installed."""
    command = ["bash", str(copy / "examples" / "install.sh"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("usage: bash examples/install.sh [EXTRA]" in done.stderr) == (words != [""])


def test_a_second_installation_says_that_it_waits(copy):
    fresh(copy)
    environment = os.environ | {"PYTHON": str(copy / "stub" / "python"), "PLATFORM": LOCKED}
    with (copy / ".venv-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.Popen(
            ["bash", str(copy / "examples" / "install.sh"), "ray"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        said = second.stderr.readline()
    rest = second.communicate()[1]
    assert said == "opd: waiting for another installation in this folder\n"
    assert (second.returncode, (copy / ".venv" / ".installed-ray").exists()) == (0, True), rest


def test_a_checkout_that_cannot_be_written_is_one_sentence():
    """Whoever is root may write everywhere, and asks as another."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").mkdir()
        shutil.copy(ROOT / "examples" / "install.sh", Path(folder) / "examples")
        shutil.copy(ROOT / "pyproject.toml", folder)
        Path(folder).chmod(0o555)
        command = ["bash", f"{folder}/examples/install.sh", "ray"]
        user = 65534 if os.getuid() == 0 else None
        done = subprocess.run(command, user=user, cwd="/", capture_output=True, text=True, check=False)
        Path(folder).chmod(0o755)
    said = f"opd: cannot write to {Path(folder).resolve()}: install from a checkout of your own\n"
    assert (done.returncode, done.stderr) == (1, said)
