"""The Dockerfiles of `examples/containers`: what they are made from exists, and nothing runs as root.

No Docker daemon is needed: hadolint reads them, and with `--full` the CPU one is installed here.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "examples" / "containers").glob("*.Dockerfile"))
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def stages(file: Path) -> list[list[tuple[str, str]]]:
    """Instructions (word, rest) of each stage, lines joined, without comments."""
    text = re.sub(r"(?m)^#.*\n", "", file.read_text("utf-8"))
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    found: list[list[tuple[str, str]]] = []
    for word, _, rest in (line.partition(" ") for line in lines if line):
        if word == "FROM":
            found.append([])
        found[-1].append((word, rest))
    return found


@pytest.fixture(params=FILES, ids=lambda file: file.name)
def file(request):
    return request.param


def test_there_is_one_for_a_cpu_and_one_for_cuda():
    assert [file.name for file in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]


def test_bases_have_a_tag_of_the_locked_python_and_no_host(file):
    bases = [rest for stage in stages(file) for word, rest in stage if word == "FROM"]
    assert len(bases) == 2
    assert all(re.fullmatch(r"python:3\.11-slim-\w+( AS \w+)?", base) for base in bases)
    assert "Python 3.11" in (ROOT / ".ci" / "requirements" / "core.txt").read_text("utf-8").splitlines()[0]
    assert "://" not in file.read_text("utf-8")


def test_it_runs_opd_as_a_user_without_privileges(file):
    last = dict(stages(file)[-1])
    assert last["USER"] == "$UID"
    assert last["ARG"] == "UID=1000"
    assert last["HEALTHCHECK"] == "NONE"
    assert last["ENTRYPOINT"] == '["opd"]'
    words = [word for word, _ in stages(file)[-1]]
    assert words.index("USER") > max(n for n, word in enumerate(words) if word in ("RUN", "COPY"))


def test_what_it_copies_is_in_the_repository_and_makes_the_package(file):
    copied = [rest.split() for word, rest in stages(file)[0] if word == "COPY"]
    for *sources, _ in copied:
        assert all((ROOT / source).exists() for source in sources)
    given = {source.partition("/")[0] for *sources, _ in copied for source in sources}
    links = [path for path in (ROOT / "opd").rglob("*") if path.is_symlink()]
    links += [path for path in (ROOT / "pipelines").rglob("*") if path.is_symlink()]
    assert {path.resolve().relative_to(ROOT).parts[0] for path in links} | {"opd"} <= given


def test_each_step_is_a_script_that_a_shell_reads(file):
    for stage in stages(file):
        for _, script in (one for one in stage if one[0] == "RUN"):
            subprocess.run(["sh", "-n", "-c", script], check=True)


def test_versions_are_those_of_the_lock(file):
    steps = " ".join(rest for word, rest in stages(file)[0] if word == "RUN")
    assert steps.count("pip install") == 3
    assert "-r .ci/requirements/torch.txt" in steps
    assert '--no-deps --require-hashes -r ".ci/requirements/$EXTRA.txt"' in steps


@pytest.mark.check
def test_hadolint_has_nothing_to_say(file):
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, file], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_without_an_index_for_the_cpu_the_build_stops():
    script = next(rest for word, rest in stages(FILES[0])[0] if word == "RUN" and "PIP_EXTRA" in rest)
    done = subprocess.run(
        ["sh", "-c", script], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "PIP_EXTRA_INDEX_URL" in done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_the_steps_that_install_on_a_cpu_end_in_an_opd_that_runs(tmp_path):
    """In folders of the test in place of `/opt` and `/src`; the index is the one that pip is set up with."""
    source, target = tmp_path / "src", tmp_path / "opd"
    source.mkdir()
    environment = {**os.environ, "PATH": f"{target}/bin:{os.environ['PATH']}", "EXTRA": "core"}
    environment.setdefault("PIP_EXTRA_INDEX_URL", "file:///dev/null")
    for word, rest in stages(FILES[0])[0]:
        if word == "COPY":
            *names, where = rest.split()
            for name in names:
                goal = source / where / (Path(name).name if where.endswith("/") else "")
                goal.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                copy(ROOT / name, goal, **({"symlinks": True} if copy is shutil.copytree else {}))
        elif word == "RUN":
            script = rest.replace("/opt/opd", str(target)).replace(
                "python -m venv", f"{sys.executable} -m venv"
            )
            subprocess.run(["sh", "-ec", script], cwd=source, env=environment, check=True)
    said = subprocess.run(
        [target / "bin" / "opd", "example", "quickstart"], cwd=tmp_path, capture_output=True
    )
    assert said.stdout == (ROOT / "examples" / "quickstart" / "recipe.yaml").read_bytes()
