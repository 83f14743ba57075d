"""Three ranks write with one model, of which each holds a third: the tokens of one process, in step."""

import json
import math
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import sharded_engine_ranks
import tiny

from opd.models.checkpoint import save_checkpoint

pytestmark = pytest.mark.slow

WORLD = 3
MODELS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "gemma": {"model_type": "gemma2", "head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 3.0},
}
TASKS = {
    "many": {"model": "tied", "prompts": 7, "each": 3, "most": 12},  # more than there are slots
    "one prompt": {"model": "tied", "prompts": 1, "each": 2, "most": 9},  # two ranks write nothing
    "none": {"model": "tied", "prompts": 0, "each": 2, "most": 9},
    "untied": {"model": "untied", "prompts": 4, "each": 2, "most": 10},
    "no lean decoder": {"model": "gemma", "prompts": 4, "each": 2, "most": 10},
    "bfloat16": {"model": "untied", "prompts": 4, "each": 1, "most": 6, "dtype": "bfloat16"},
}
RAISES = {"name": "raises", "stops": "raises", "model": "tied", "prompts": 7, "each": 2, "most": 12}
KILLED = RAISES | {"name": "killed", "stops": "killed"}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Models, and what the ranks have said; the last task is the end of one of them."""
    root = tmp_path_factory.mktemp("sharded-engine")
    for name, changes in MODELS.items():
        save_checkpoint(tiny.model(**changes), tiny.tokenizer(), root / name, {})
    tasks = [{"name": name} | task for name, task in TASKS.items()]
    (root / "tasks.json").write_text(json.dumps([*tasks, RAISES, KILLED]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, sharded_engine_ranks.__file__]
    with ExitStack() as stack:
        ranks = []
        for rank in range(WORLD):
            log = stack.enter_context((root / f"rank-{rank}.log").open("wb"))
            line = [*command, str(rank), str(WORLD), str(root)]
            ranks.append(subprocess.Popen(line, env=environment, stdout=log, stderr=log))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        codes = [process.wait(500) for process in ranks]
    said = "\n".join((root / f"rank-{rank}.log").read_text()[-2000:] for rank in range(WORLD))
    assert codes == [0, -signal.SIGKILL, 0], said
    return root


def said(place: Path, name: str) -> list[dict]:
    """What each rank has answered to a task."""
    return [json.loads((place / f"{name}-{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("name", [name for name in TASKS if name != "bfloat16"])
def test_ranks_write_the_tokens_of_one_process(place, name):
    assert_written(place, TASKS[name], said(place, name))


def assert_written(place: Path, task: dict, results: list[dict]) -> None:
    """Every rank has the tokens that one process writes."""
    engine = sharded_engine_ranks.whole_engine(place, task)
    given = sharded_engine_ranks.prompts(task["prompts"])
    groups = sharded_engine_ranks.answered(engine, given, task["each"], task["most"]) if given else []
    expected = sharded_engine_ranks.told(groups)
    for result in results:
        assert "error" not in result, result
        assert [one["uid"] for one in result["said"]] == [one["uid"] for one in expected]
        for mine, theirs in zip(result["said"], expected, strict=True):
            assert mine["ids"] == theirs["ids"]
            assert mine["versions"] == theirs["versions"]
            for a, b in zip(mine["logprobs"], theirs["logprobs"], strict=True):
                assert math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-4)


def test_each_rank_holds_its_share_and_writes_its_own(place):
    results = said(place, "many")
    steps = [result["steps"] for result in results]
    assert len(set(steps)) > 1  # three prompts for one rank, two for the others
    assert [result["steps"] for result in said(place, "one prompt")][1:] == [0, 0]
    assert sum(result["held"] for result in results) == results[0]["of"]
    assert max(result["held"] for result in results) < 0.4 * results[0]["of"]


def test_ranks_agree_in_bfloat16(place):
    first, *others = said(place, "bfloat16")
    assert first["said"]
    assert all(other["said"] == first["said"] for other in others)


def test_a_rank_that_fails_stops_the_others_with_a_sentence(place):
    results = said(place, "raises")
    assert results[1] == {"error": "RolloutError", "message": "rank 1 has had enough."}
    for result in (results[0], results[2]):
        assert result["error"] == "RanksError"
        assert result["message"].startswith("a rank has stopped writing, and no other goes on alone with")
        assert result["message"].endswith("start again with --resume.")


def test_nobody_waits_for_a_rank_that_was_killed(place):
    for rank in (0, 2):
        result = json.loads((place / f"killed-{rank}.json").read_text())
        assert result["error"] == "RanksError"
        assert "did not come to a pass of the model that ranks share" in result["message"]
