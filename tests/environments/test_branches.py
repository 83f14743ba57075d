"""Conversations that branch: each branch is a sample, and what two of them share is learnt once."""

from collections import Counter

import numpy as np
import pytest
from memory_log import MemoryLog
from test_agents import agent, check_exact, contents
from test_episodes import KilledError, Recorded, digits_engine, prompts, sampling

from opd.environments.protocol import EPISODE
from opd.errors import RolloutError
from opd.pipelines.stages.samples import rollout_metrics
from opd.rollout.collect import EncodedPrompt, _check_groups
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.shared_groups import decode_groups, encode_groups
from opd.types import Sample, SampleGroup, Status

pytest.importorskip("aiohttp")


def written(engine=None, count: int = 2):
    return agent("branching")(engine or digits_engine(), prompts(count), 2, sampling(), 0)


def test_every_branch_is_a_sample_and_every_token_counts_once():
    engine = Recorded(digits_engine())
    groups = written(engine)
    check_exact(groups, engine)
    for group in groups:
        assert len(group.samples) == 2
        assert len({one.uid for one in group.samples_with_branches}) == 8
        owners = [one.branch_of for one in group.branches]
        assert owners == [sample.uid for sample in group.samples for _ in range(3)]  # whoever ended first
        for sample in group.samples:
            own = [one for one in group.samples_with_branches if one.episode == sample.uid]
            assert own[0] is sample
            told = sample.metadata[EPISODE]
            assert (told["turns"], told["branches"], sample.status) == (5, 4, Status.COMPLETED)
            assert all(one.status is sample.status and EPISODE not in one.metadata for one in own[1:])
            asked = [uid for uid in engine.asked if uid.startswith(f"{sample.uid}/")]
            tokens = sum(len(engine.written[uid]) for uid in asked)
            assert sum(one.trainable_tokens for one in own) == tokens
            shared = [one for one in own[1:] if not one.loss_mask.all() and not one.loss_mask[0]]
            (second,) = shared
            ends = [np.flatnonzero(np.diff(one.loss_mask.astype(int)))[-1] + 1 for one in (sample, second)]
            assert ends[0] == ends[1]
            draft = int(np.flatnonzero(~sample.loss_mask)[0])
            assert sample.loss_mask[:draft].all()
            assert second.response_ids[:draft].tolist() == sample.response_ids[:draft].tolist()
            assert not second.loss_mask[: ends[1]].any()
            assert not second.rollout_logprobs[: ends[1]].any()


def test_a_reward_is_shared_and_an_episode_is_one_response_of_the_metrics():
    groups = written()
    alone = agent("plain")(digits_engine(), prompts(2), 2, sampling(), 0)
    for group in (*groups, *alone):
        for place, sample in enumerate(group.samples):
            sample.reward, sample.reward_parts = float(place), {"part": 2.0 * place}
        group.share_rewards()
    by_uid = {one.uid: one for group in groups for one in group.samples_with_branches}
    for one in by_uid.values():
        episode = by_uid[one.episode]
        assert (one.reward, one.reward_parts) == (episode.reward, episode.reward_parts)
    found, other = rollout_metrics(groups), rollout_metrics(alone)
    for name in ("reward/mean", "reward/std", "truncated", "frac_reward_zero_std", "reward/a/part"):
        assert found[name] == other[name]
    assert (found["episode/branches"], other["episode/branches"]) == (4.0, 1.0)
    assert (found["episode/turns"], other["episode/turns"]) == (5.0, 3.0)


def test_killed_at_any_chunk_and_resumed_the_branches_are_the_same():
    wanted = contents(written())
    assert Counter(uid.count("/") for uid, *_ in wanted) == {1: 4, 2: 12}
    log = MemoryLog()
    for cut in (0, 1, 3, 5, 2, 7):
        engine = Recorded(FaultTolerantRollout([digits_engine()], log), die_after=cut)
        with pytest.raises(KilledError):
            written(engine)
    last = FaultTolerantRollout([digits_engine()], log)
    assert contents(written(last)) == wanted
    assert last.counters["replayed_tokens"] > 0


def test_ranks_tell_each_other_of_branches():
    groups, known = written(), {prompt.uid: prompt for prompt in prompts(2)}
    told, _ = decode_groups(encode_groups(groups, known), known)
    assert contents(told) == contents(groups)
    assert [[one.uid for one in group.branches] for group in told] == [
        [one.uid for one in group.branches] for group in groups
    ]
    assert [one.episode for group in told for one in group.samples_with_branches] == [
        one.episode for group in groups for one in group.samples_with_branches
    ]


@pytest.mark.parametrize(
    ("branch", "said"),
    [
        ("b", "hold str"),
        (Sample("b", "g", "a", np.zeros(1, np.int32)), "branch_of one of the group's"),
        (Sample("b", "g", "a", np.zeros(1, np.int32), branch_of="b"), "branch_of one of the group's"),
        (Sample("s", "g", "a", np.zeros(1, np.int32), branch_of="s"), "uids of their own"),
        (Sample("b", "g", "a", np.zeros(1, np.int32), branch_of="s"), "status completed or truncated"),
    ],
)
def test_branches_that_a_rollout_of_ones_own_returns_are_looked_at(branch, said):
    sample = Sample("s", "g", "a", np.zeros(1, np.int32), status=Status.COMPLETED)
    prompt = EncodedPrompt("g", "a", np.zeros(1, np.int32), None)
    with pytest.raises(RolloutError, match=said):
        _check_groups("mine:generate", [SampleGroup("g", "a", [sample], [branch])], [prompt], 1)
    branch = Sample("b", "g", "a", np.zeros(1, np.int32), status=Status.TRUNCATED, branch_of="s")
    _check_groups("mine:generate", [SampleGroup("g", "a", [sample], [branch])], [prompt], 1)
