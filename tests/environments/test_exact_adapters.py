"""What is trained on is what was written, over every adapter, also where no text leads back to its tokens."""

import dataclasses
from pathlib import Path

import chatting
import numpy as np
import pytest
from exact import check_exact
from test_agents import chat_engine, chat_sampling

from opd.config.environments import EnvironmentConfig
from opd.environments.episodes import Episodes
from opd.environments.protocol import EPISODE, Action, Step, ToolCall
from opd.environments.tools import Tools
from opd.environments.trajectory import TrajectoryLog
from opd.rollout.collect import EncodedPrompt

LAKE = {"id": "FrozenLake-v1", "kwargs": {"render_mode": "ansi", "is_slippery": False}}


class Calling(Tools):
    """A random model writes no calls: whatever it writes is calculated with."""

    async def step(self, action: Action) -> Step:
        """See `Tools`."""
        calls = [ToolCall("calculator", {"expression": f"{len(action.text)}+1"})] * 2
        return await super().step(dataclasses.replace(action, calls=calls))


@pytest.fixture(scope="module")
def games(tmp_path_factory) -> Path:
    textworld = pytest.importorskip("opd.environments.textworld")
    pytest.importorskip("textworld")
    folder = tmp_path_factory.mktemp("games")
    textworld.main([str(folder), "--games", "1", "--rooms", "2", "--objects", "2", "--seed", "3"])
    return folder


def adapter(kind: str, request) -> tuple[dict, object]:
    """The settings of an environment, and the label of its task."""
    if kind == "textworld":
        params = {"games": str(request.getfixturevalue("games")), "show_commands": True}
        return {"type": "textworld", "params": params}, "game-3.z8"
    if kind == "gymnasium":
        pytest.importorskip("gymnasium")
        return {"type": "gymnasium", "params": LAKE}, 3
    return {"type": "test_exact_adapters:Calling", "params": {"tools": ["calculator"]}}, "7"


@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore:Game .* is not fully supported")  # as TextWorld does
@pytest.mark.parametrize("lossy", [False, True], ids=["several encodings", "lossy"])
@pytest.mark.parametrize("kind", ["textworld", "gymnasium", "tools"])
def test_what_is_trained_on_is_what_was_written(kind, lossy, request, tmp_path):
    settings, label = adapter(kind, request)
    config = EnvironmentConfig.model_validate({**settings, "max_turns": 3, "turn_tokens": 12})
    tok, engine = chatting.tokenizer("chatml", lossy), chat_engine()
    asked = [{"role": "user", "content": "the cat"}]
    ids = tok(tok.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))["input_ids"]
    prompt = EncodedPrompt("p", "a", np.array(ids, np.int32), label, {"messages": asked})
    with TrajectoryLog(tmp_path / "log") as log:
        (group,) = Episodes(config, "a", tok, {}, log)(engine, [prompt], 2, chat_sampling(900), 3)
        if kind == "tools":
            assert [len(log.find(sample.uid).commands) for sample in group.samples] == [6, 6]
    check_exact([group], engine, limit=1000)
    changed = 0
    for sample in group.samples:
        assert sample.metadata[EPISODE]["turns"] == 3
        assert 0 < sample.loss_mask.sum() < len(sample.loss_mask)
        text = tok.decode(sample.response_ids)
        encoded = tok(text, add_special_tokens=False)["input_ids"]
        assert encoded != sample.response_ids.tolist()
        changed += tok.decode(encoded) != text
    assert changed == 2 or not lossy
