"""Bad recipes by the hundred: each is answered with one sentence and status 2, in seconds, or is a recipe."""

import contextlib
import io
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_recipes import FAMILIES, Case, cases
from full import FULL

from opd.config.load import dump_recipe, load_recipe
from opd.pipelines.cli import main
from opd.pipelines.options import split_overrides
from opd.progress import suppress_heartbeats

PATIENCE = 20
"""Seconds of processor time that no case may take."""
ABSENT = "is not a folder: nothing is there|does not exist or is no file"
"""What a recipe names that is not on this machine. The recipe itself is sound."""
FOREIGN = re.compile(r"pydantic|Traceback|Errno|<unicode string>|<class|object at 0x|\n.")


@contextlib.contextmanager
def patience() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"took more than {PATIENCE} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def answer(path: Path, words: tuple[str, ...]) -> tuple[int, str, str]:
    """Status, output and errors of `opd run PATH WORDS --dry-run`."""
    out, err = io.StringIO(), io.StringIO()
    with patience(), suppress_heartbeats(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["run", str(path), "--dry-run", *words])  # a busy machine's "so far" is no answer
    return status, out.getvalue(), err.getvalue()


def complaint(path: Path, case: Case) -> str | None:
    """What is wrong with the answer to a case; `None` if nothing is."""
    try:
        status, out, err = answer(path, case.words)
    except BaseException as error:
        return f"raised {type(error).__name__}: {str(error)[:200]}"
    absent = re.fullmatch(rf"(opd: error: .* ({ABSENT}); .*\n)+", err) is not None
    if status == 0 or absent:
        recipe = load_recipe([path], split_overrides(case.words)[1])
        resolved = path.parent / "resolved.yaml"
        resolved.write_text(dump_recipe(recipe) if absent else out, encoding="utf-8")
        same = load_recipe([resolved]) == recipe
        return None if same and (absent or not err) else f"the resolved recipe is another one: {err}"
    if status != 2 or out or not err.startswith("opd: error: "):
        return f"status {status}, {out[:100]!r}, {err[:200]!r}"
    said = err.removeprefix("opd: error: ").removesuffix("\n")
    if FOREIGN.search(said) or len(said) > 2000 or not said.isprintable():
        return f"not a sentence of ours: {said[:300]!r}"
    named = path.name in said or any(word.partition("=")[0][:20] in said for word in case.words)
    named = named or re.search(r"`[\w.]+`|--\w|option|^\w+\.[\w.]+: ", said) is not None
    return None if named else f"names nothing: {said[:300]!r}"


@pytest.mark.some(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_is_a_recipe_or_one_sentence(tmp_path, family):
    path = tmp_path / "recipe.yaml"
    faults = []
    made = cases(family, FULL)
    for case in made:
        path.write_bytes(case.content)
        fault = complaint(path, case)
        if fault is not None:
            faults.append(f"{case.name}: {fault}")
    assert not faults, f"{len(faults)} of {len(made)}:\n" + "\n".join(faults[:30])
