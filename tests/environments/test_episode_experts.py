"""Expert choices of episodes: each position's once, over turns, agents' branches, and kills in the middle."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import tiny
from exact import KilledError, Recorded
from packed import plain_choices
from test_agents import agent
from test_episodes import episodes, prompts, sampling

from opd.models.causal_lm import CausalLM
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.torch_engine import TorchEngine
from opd.storage.wal import TokenWAL
from opd.types import SampleGroup

MIXTURE = {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 8,
    "max_position_embeddings": 2048,
}


@cache
def mixture() -> CausalLM:
    return tiny.model(**MIXTURE)


def engine() -> TorchEngine:
    return TorchEngine(mixture(), max_running=8, max_sequence=1024, record_experts=True)


def assert_recorded(groups: list[SampleGroup]) -> None:
    for group in groups:
        for sample in group.samples_with_branches:
            assert not sample.loss_mask.all()
            assert sample.expert_choices is not None
            assert np.array_equal(sample.expert_choices, plain_choices(mixture(), sample.token_ids))


@pytest.mark.parametrize("kind", [lambda: episodes(turn_tokens=5), agent], ids=["episodes", "agents"])
def test_killed_and_resumed_every_position_has_its_choices(tmp_path, kind: Callable[[], Any]):
    for cut in (1, 4, 9):
        with TokenWAL(tmp_path) as log, pytest.raises(KilledError):
            kind()(
                Recorded(FaultTolerantRollout([engine()], log), die_after=cut), prompts(), 2, sampling(), 0
            )
    with TokenWAL(tmp_path) as log:
        last = FaultTolerantRollout([engine()], log)
        assert_recorded(kind()(last, prompts(), 2, sampling(), 0))
        assert last.counters["replayed_tokens"] > 0
        turns = log.requests().values()
        given = [sum(len(span.choices) for span in turn.expert_spans) for turn in turns]
        later = [n for n, turn in zip(given, turns, strict=True) if not turn.request.uid.endswith("/0")]
        assert later
        assert max(later) < max(len(turn.request.prompt_ids) for turn in turns) // 2  # no turn's once more
