"""Environments of the library verifiers, by id, in a process that has it: a real one, over real HTTP."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import chatting
import numpy as np
import pytest
from memory_log import MemoryLog
from test_agents import chat_engine, chat_sampling, check_exact, contents
from test_episodes import KilledError, Recorded

from opd.config.environments import EnvironmentConfig
from opd.environments import verifiers
from opd.environments.agents import Agents
from opd.environments.protocol import EPISODE
from opd.errors import ConfigError, RolloutError
from opd.rollout.collect import EncodedPrompt
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.torch_engine import TorchEngine
from opd.types import Status

PYTHON = os.environ.get("OPD_VERIFIERS_PYTHON") or sys.executable
pytestmark = pytest.mark.skipif(
    sys.executable == PYTHON and find_spec("verifiers") is None,
    reason="verifiers 0.4 is not here; give OPD_VERIFIERS_PYTHON an interpreter that has it",
)


@pytest.fixture(autouse=True)
def found_by_the_library(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def made(env=None, **settings) -> Agents:
    params = {"id": "spoken-digits", "python": PYTHON, **({"env": env} if env else {})}
    given = {"type": "verifiers", "params": params, **settings}
    return Agents(EnvironmentConfig.model_validate(given), "digits", chatting.tokenizer(), {})


def tasks(*labels) -> list[EncodedPrompt]:
    tok = chatting.tokenizer()
    found = []
    for label in labels:
        asked = [{"role": "user", "content": f"say {label}"}]
        ids = tok(tok.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))["input_ids"]
        row = np.array(ids, np.int32)
        found.append(EncodedPrompt(f"p{label}", "digits", row, label, {"messages": asked}))
    return found


def test_an_environment_by_its_id_is_episodes_of_exact_tokens():
    engine = chat_engine()
    groups = made()(engine, tasks(0, 1, 2, 3), 4, chat_sampling(), 5)
    check_exact(groups, engine)
    tok, rewards = chatting.tokenizer(), set()
    for group in groups:
        for sample in group.samples:
            told = sample.metadata[EPISODE]
            assert (told["turns"], told["branches"], sample.status) == (2, 1, Status.COMPLETED)
            assert tok.decode(sample.response_ids).count("again 0") == 1
            assert told["info"]["metrics"] == {"turns": 2.0}
            said = told["info"]["rewards"]["says"]
            assert told["reward"] == said + 0.25
            rewards.add(told["reward"])
    assert rewards <= {0.25, 0.75}
    again = made()(chat_engine(), tasks(0, 1, 2, 3), 4, chat_sampling(), 5)
    assert contents(again) == contents(groups)


def test_killed_and_resumed_it_is_asked_the_same():
    def engine():
        return TorchEngine(chatting.model(), max_running=16, max_sequence=1000)

    wanted = contents(made()(engine(), tasks(4, 5), 2, chat_sampling(), 0))
    log = MemoryLog()
    for cut in (0, 2, 5):
        dying = Recorded(FaultTolerantRollout([engine()], log), die_after=cut)
        with pytest.raises(KilledError):
            made()(dying, tasks(4, 5), 2, chat_sampling(), 0)
    last = FaultTolerantRollout([engine()], log)
    assert contents(made()(last, tasks(4, 5), 2, chat_sampling(), 0)) == wanted
    assert last.counters["replayed_tokens"] > 0


@pytest.mark.long
def test_what_the_recipe_does_not_allow_ends_the_episode_and_what_fails_stops_the_run():
    groups = made({"agent": {"harness": {"id": "spoken-digits", "turns": 5}}}, max_turns=3)(
        chat_engine(), tasks(0), 2, chat_sampling(), 0
    )
    for sample in groups[0].samples:
        told = sample.metadata[EPISODE]
        assert (told["turns"], told["ended"], told["reward"], sample.status) == (
            3, "turns", 0.0, Status.TRUNCATED,
        )  # fmt: skip
    failing = {"agent": {"harness": {"id": "spoken-digits", "fails": "out of luck"}}}
    with pytest.raises(RolloutError, match=r"out of luck.*, 2 times; mend it .*--resume"):
        made(failing, attempts=2)(chat_engine(), tasks(0), 1, chat_sampling(), 0)
    for label, said in ((10, "there is no task 10"), ("3", "is no number of a task")):
        with pytest.raises(RolloutError, match=said):
            made(attempts=1)(chat_engine(), tasks(label), 1, chat_sampling(), 0)


DIGITS = {"id": "spoken-digits"}
LOADED = [
    ({"id": "nowhere-to-be-found"}, "nowhere_to_be_found"),
    ({**DIGITS, "env": {"agent": {"harness": {"id": "bash"}}}}, "in no sandbox; set agent.runtime"),
    ({**DIGITS, "env": {"id": "user-sim"}}, "has 2 agents"),
    ({**DIGITS, "env": {"agent": {"harness": {"turn": 3}}}}, "turn"),
]
"""What the library is loaded for to be refused: seconds each."""


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({**DIGITS, "python": "/bin/false"}, "its process ended with status 1"),
        ({**DIGITS, "python": "/no/python"}, "cannot be run"),
        *[pytest.param(*one, marks=pytest.mark.long) for one in LOADED],
    ],
)
def test_what_cannot_be_loaded_is_refused_before_the_run(params, said):
    config = EnvironmentConfig.model_validate({"type": "verifiers", "params": {"python": PYTHON, **params}})
    with pytest.raises(ConfigError, match=said) as caught:
        Agents(config, "digits", chatting.tokenizer(), {})
    assert "\n" not in str(caught.value)


def test_an_id_is_needed():
    with pytest.raises(ValueError, match=r"needs params\.id"):
        EnvironmentConfig.model_validate({"type": "verifiers"})


def test_the_command_writes_rows_of_its_tasks(tmp_path):
    out = tmp_path / "digits.jsonl"
    verifiers.main([str(out), "--id", "spoken-digits", "--tasks", "4", "--python", PYTHON])
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [row["label"] for row in rows] == [0, 1, 2, 3]
    assert rows[3]["prompt"] == [{"role": "user", "content": "say 3"}]
    verifiers.main([str(out), "--id", "spoken-digits", "--python", PYTHON])
    assert len(out.read_text("utf-8").splitlines()) == 10
