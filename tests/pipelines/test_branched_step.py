"""An episode of several branches in a step: it counts once, and so does each of its tokens."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from test_samples_on_disk import gradient

from opd.config import PolicyLossConfig
from opd.config.rl import ShapingConfig
from opd.pipelines.stages.grpo import _split_episodes
from opd.pipelines.stages.policy_stream import PolicyStream
from opd.pipelines.stages.sample_files import SampleFiles, SignalFiles, gather_uids, groups_of
from opd.pipelines.stages.samples import StepSamples
from opd.pipelines.stages.samples_on_disk import SamplesOnDisk
from opd.ranks import Ranks
from opd.rollout.rewards import RewardRunner, wrap_reward
from opd.train.advantages import RLOO, DrGRPO, GroupNormalisedEstimator, shape_rewards
from opd.train.loss_weights import normalised_scales, response_scales, token_weights, turn_shares, turns_of
from opd.train.terms import PolicyTerm
from opd.train.torch_backend import TorchBackend
from opd.types import Sample, SampleGroup, Status, TokenTerms

REWARDS = {"a": [1.0, 0.25, 0.0], "b": [0.5, 0.75]}
"""Of the episodes of each domain's one group."""
TREES = {
    "a/0": [[4]],
    "a/1": [[3, 2, 5], [3, 2, 2, 2, 1], [6]],
    "a/2": [[2, 1, 4], [2, 1, 1]],
    "b/0": [[3]],
    "b/1": [[1], [4]],
}
"""Of each episode its branches: tokens that were written, said, written, ...; turns are the same as long as
branches of the same length so far begin alike, as `shared` says.
"""
SHARED = {("a/1", 1): 1, ("a/2", 1): 1}
"""How many turns a branch has from the episode's first one."""


def made(shuffled: int | None = None) -> list[SampleGroup]:
    """Two groups, of three episodes and of two, some with branches."""
    rng = np.random.default_rng(7)
    groups = {name: SampleGroup(name, name, []) for name in REWARDS}
    for uid, branches in TREES.items():
        firsts: list[Sample] = []
        for number, lengths in enumerate(branches):
            count = SHARED.get((uid, number), 0)
            whole = firsts[0].prompt_ids if count else rng.integers(0, 11, 3)
            prompt, ids, mask = whole, [], []
            for place, length in enumerate(lengths):
                known = 2 * count - 1  # turns, and what lies between
                if place < known:
                    start = sum(lengths[:place])
                    ids += firsts[0].response_ids[start : start + length].tolist()
                else:
                    ids += rng.integers(0, 11, length).tolist()
                mask += [place % 2 == 0 and place >= known] * length
            firsts.append(_sample(uid, number, prompt, ids, mask))
        group = groups[uid[0]]
        group.samples.append(firsts[0])
        group.branches += firsts[1:]
    return list(groups.values())


def _sample(uid, number, prompt, ids, mask) -> Sample:
    count = len(ids)
    return Sample(
        f"{uid}/{number}" if number else uid,
        uid[0],
        uid[0],
        np.asarray(prompt, np.int32),
        response_ids=np.array(ids, np.int32),
        rollout_logprobs=np.zeros(count, np.float32),
        policy_versions=np.zeros(count, np.int32),
        loss_mask=np.array(mask, bool),
        status=Status.COMPLETED,
        branch_of=uid if number else "",
    )


@contextmanager
def opened(home: str, groups, backend, folder: Path) -> Iterator[StepSamples]:
    """The step in memory, or on disk."""
    if home == "memory":
        yield StepSamples(groups, backend)
        return
    with SampleFiles.open(folder / "store") as files:
        for group in groups:
            parts = (group.samples, group.branches)
            places = {one.uid: place for part in parts for place, one in enumerate(part)}
            files.put([*group.branches, *group.samples], 0, {group.uid: "asked"}, places)
        store = files.open_view()
        light, rows = groups_of(store, gather_uids(groups, Ranks()))
        with SignalFiles(folder / "signals") as signals:
            yield SamplesOnDisk(light, rows, store, signals, backend)


def rewards() -> RewardRunner:
    """What counts the episodes that it is asked about."""

    def reward(sample):
        assert sample.uid in TREES  # never a branch
        return REWARDS[sample.domain][int(sample.uid[2:])]

    function = wrap_reward(reward, "reward")
    return RewardRunner(dict.fromkeys(REWARDS, function), tiny.tokenizer())


def expected(groups, advantages, units: str) -> torch.Tensor:
    """The gradient by its definition, in float64: of each episode every written token once, times its
    advantage, where tokens, episodes or turns of the step weigh alike.
    """
    model = tiny.model(0).module.double()
    model.set_attn_implementation("eager")
    turns: dict[tuple[str, bytes], list[tuple[str, int, int, np.ndarray]]] = {}
    for one in (one for group in groups for one in group.samples_with_branches):
        bounds = np.flatnonzero(np.diff(np.concatenate([[0], one.loss_mask.astype(int), [0]])))
        for start, stop in bounds.reshape(-1, 2):
            first = len(one.prompt_ids) + start
            key = (one.episode, one.token_ids[: first + stop - start].tobytes())
            assert key not in turns  # or it would be learnt twice
            turns[key] = [(one.episode, first, stop - start, one.token_ids)]
    written = [turn for found in turns.values() for turn in found]
    episodes: dict[str, int] = {}
    for uid, _, count, _ in written:
        episodes[uid] = episodes.get(uid, 0) + count
    total = torch.zeros((), dtype=torch.float64)
    for uid, first, count, ids in written:
        weight = {
            "token": 1 / sum(episodes.values()),
            "sequence": 1 / (len(episodes) * episodes[uid]),
            "constant": 1 / (len(episodes) * 16),
            "turn": 1 / (len(written) * count),
        }[units]
        ids = torch.from_numpy(ids[: first + count].astype(np.int64))
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
        drawn = logprobs[torch.arange(first - 1, first + count - 1), ids[first:]]
        total = total - weight * advantages[uid] * drawn.sum()
    total.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("estimator", "units", "home"),
    [
        (GroupNormalisedEstimator(eps=0.0), "token", "memory"),
        (GroupNormalisedEstimator(eps=0.0), "sequence", "memory"),
        (GroupNormalisedEstimator(eps=0.0), "sequence", "disk"),
        (DrGRPO(), "constant", "memory"),
        (RLOO(), "turn", "memory"),
    ],
)
def test_the_gradient_is_that_of_every_token_once_and_every_episode_once(tmp_path, estimator, units, home):
    groups = made()
    backend = TorchBackend(tiny.model(0), tiny.training([PolicyTerm(PolicyLossConfig())], max_tokens=64))
    with opened(home, copy.deepcopy(groups), backend, tmp_path) as step:
        step.reward_responses(rewards())
        step.deal_samples()
        stream = PolicyStream(step, None)
        stream.estimate_advantages(estimator)
        stream.measure_step()
        own = step.samples
        counts, turns = [one.trainable_tokens for one in own], [turns_of(one.loss_mask) for one in own]
        scales = response_scales(own, counts, units, 16, turns)

        def terms(sample: Sample) -> TokenTerms:
            policy, found = stream.policy_tokens(sample), TokenTerms.zeros(len(sample.response_ids))
            shares = turn_shares(sample.loss_mask) if units == "turn" else None
            found.old_logprobs, found.advantages = policy.old_logprobs, policy.advantages
            found.policy_weight = token_weights(sample.loss_mask, scales[sample.uid], shares)
            return found

        backend.accumulate_gradient(own, step.batch_reader(own, terms))
    advantages = {}
    for name, values in REWARDS.items():  # of the episodes, in float64
        found, size = np.array(values), len(values)
        centred = found - found.mean()
        scales = {GroupNormalisedEstimator: 1 / found.std(ddof=1), DrGRPO: 1.0, RLOO: size / (size - 1)}
        scale = scales[type(estimator)]
        advantages |= {f"{name}/{place}": float(value * scale) for place, value in enumerate(centred)}
    torch.testing.assert_close(
        gradient(backend).double(), expected(groups, advantages, units), rtol=2e-4, atol=2e-7
    )


@pytest.mark.parametrize("home", ["memory", "disk"])
def test_branches_have_the_shaped_reward_and_custom_estimators_see_whole_groups(tmp_path, home):
    from opd.train.advantages import UserAdvantage

    backend = TorchBackend(tiny.model(0), tiny.training([PolicyTerm(PolicyLossConfig())], max_tokens=64))
    with opened(home, made(), backend, tmp_path) as step:
        step.reward_responses(rewards())
        shape_rewards(step.groups, ShapingConfig(clip=(0.2, 0.6)), lambda name: 16, {})
        by_uid = {one.uid: one for one in step.samples}
        assert {one.uid: one.reward for one in step.responses} == {
            "a/0": 0.6, "a/1": 0.25, "a/2": 0.2, "b/0": 0.5, "b/1": 0.6,
        }  # fmt: skip
        assert all(one.reward == by_uid[one.episode].reward for one in step.samples)
        stream = PolicyStream(step, None)
        stream.estimate_advantages(UserAdvantage("test_branched_step:by_position"))
        stream.measure_step()
        for lot in step.local_samples():
            for one in lot:
                size = len(REWARDS[one.domain])
                wanted = np.where(one.loss_mask, size * (one.reward or 0.0) + one.response_ids[0], 0.0)
                np.testing.assert_allclose(stream.policy_tokens(one).advantages, wanted, rtol=1e-6)


def by_position(group: SampleGroup) -> list[np.ndarray]:
    """An estimator of the user's own, which looks at tokens."""
    assert not group.branches
    size = len(group.samples)
    return [np.where(s.loss_mask, size * (s.reward or 0.0) + s.response_ids[0], 0.0) for s in group.samples]


def test_minibatches_cut_no_episode_and_a_budget_counts_branches():
    groups = made()
    own = [one for group in groups for one in group.samples_with_branches]
    for parts in range(1, 8):
        found = _split_episodes(own, parts)
        assert [one.uid for part in found for one in part] == [one.uid for one in own]
        assert len(found) == min(parts, len(TREES))
        assert len({one.episode for part in found for one in part}) == sum(
            len({one.episode for one in part}) for part in found
        )
    step = StepSamples(groups, None)  # type: ignore[arg-type]
    first = sum(one.trainable_tokens for one in groups[0].samples_with_branches)
    assert step.tokens == sum(one.trainable_tokens for one in own)
    step.limit_tokens(first)
    assert len(step.groups) == 1
    step.groups = groups
    step.limit_tokens(first + 1)
    assert len(step.groups) == 2


def test_in_a_merge_an_episode_weighs_what_an_answer_does():
    own = [one for group in made() for one in group.samples_with_branches]
    counts = [one.trainable_tokens for one in own]
    shares = {"a": 0.3, "b": 0.7}
    domains = [one.domain for one in own]
    found = normalised_scales(own, counts, domains, shares, [1] * len(own), "episode")
    weights: dict[str, float] = {}
    for one, count in zip(own, counts, strict=True):
        weights[one.episode] = weights.get(one.episode, 0.0) + found[one.uid] * count
    assert weights == pytest.approx({uid: shares[uid[0]] / len(REWARDS[uid[0]]) for uid in TREES}, rel=1e-12)
