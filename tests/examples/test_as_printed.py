"""Every command of the examples' READMEs, as printed, in a fresh checkout; a wheel in an empty environment.

Installs from the registries that pip is set up for, and takes an hour: `pytest --full tests/examples`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from recipes import write_recipe

ROOT = Path(__file__).resolve().parents[2]
STARTS = ("bash examples/", ".venv/bin/python examples/", "python examples/", "opd plan --simulate examples/")
NOT_HERE = {
    "examples/merge_study/": "many hours",
    "examples/quickstart.sh": "test_the_quick_start_killed_in_the_middle",
    "examples/table.py": "rewrites results from many runs; test_table reads them",
    "experiment.py                  #": "the whole experiment: the second command is it with fewer rollouts",
}
SECONDS = 3600

pytestmark = [pytest.mark.long, pytest.mark.timeout(SECONDS)]


def printed() -> Iterator[str]:
    """Commands in the code blocks of the examples' READMEs."""
    for path in sorted((ROOT / "examples").rglob("README.md")):
        for block in re.findall(r"```bash\n(.*?)```", path.read_text("utf-8"), re.DOTALL):
            for line in block.splitlines():
                if line.startswith(STARTS) and not any(part in line for part in NOT_HERE):
                    yield line.partition("  #")[0].strip()


def environment(root: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"PATH": f"{root / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """The files that git knows, and no environment."""
    if not (ROOT / ".git").exists():
        pytest.skip("this folder was unpacked without git, which says what is part of it")
    root = tmp_path_factory.mktemp("fresh") / "opd"
    for name in subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0"):
        if name:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name, follow_symlinks=False)
    subprocess.run(["bash", "examples/install.sh"], cwd=root, env=environment(root), check=True)
    return root


@pytest.mark.parametrize("command", sorted(set(printed())))
def test_it_ends_well(checkout, command):
    place = checkout / "runs"
    if "--resume" not in command and place.exists():
        shutil.rmtree(place)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=checkout,
        env=environment(checkout),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_quick_start_killed_in_the_middle_goes_on_to_its_end(checkout, tmp_path):
    """SIGKILL to the whole run while the specialists learn, then the README's `--resume`."""
    out = tmp_path / "quickstart-1"
    command = ["bash", "examples/quickstart.sh", "--seed", "1", "--out", str(out)]
    run = subprocess.Popen(command, cwd=checkout, env=environment(checkout), start_new_session=True)
    try:
        metrics = out / "stages" / "specialist-sort" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 30):
            assert run.poll() is None
            time.sleep(0.5)
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    subprocess.run([*command, "--resume"], cwd=checkout, env=environment(checkout), check=True)
    results = json.loads((out / "results.json").read_text())
    merged = next(model for model in results["models"] if model["name"] == "merged")
    assert all(domain["sampled"]["accuracy"] > 0.9 for domain in merged["domains"].values())
    assert (out / "report.html").is_file()


def test_a_wheel_in_an_empty_environment_runs_a_recipe(checkout, tmp_path):
    """As the README says it is installed into a project of one's own: no file of the checkout is used."""
    python, away = tmp_path / "venv" / "bin" / "python", environment(tmp_path)

    def call(*words: str | Path) -> str:
        return subprocess.run(
            list(map(str, words)), cwd=tmp_path, env=away, capture_output=True, text=True, check=True
        ).stdout

    call(checkout / ".venv" / "bin" / "python", "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, checkout)
    (wheel,) = tmp_path.glob("opd-*.whl")
    call(sys.executable, "-m", "venv", tmp_path / "venv")
    install = (python, "-m", "pip", "install", "--quiet")
    call(*install, "-r", checkout / ".ci" / "requirements" / "torch.txt")
    call(*install, "--no-deps", "--require-hashes", "-r", checkout / ".ci" / "requirements" / "core.txt")
    call(*install, wheel)
    assert str(tmp_path / "venv") in call(python, "-c", "import opd; print(opd.__file__)")
    write_recipe(tmp_path / "recipe.yaml", baselines={"methods": ["average"], "scales": [0.5]})
    call(python.with_name("opd"), "run", "recipe.yaml", "--out", "run")
    assert (tmp_path / "run" / "merged" / "config.json").is_file()
    assert (tmp_path / "run" / "report.html").is_file()
