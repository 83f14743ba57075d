"""What a user writes: one of everything a recipe names by dotted path. Used by test_extension_points.py."""

from dataclasses import replace

import numpy as np
import torch

from opd.kernels.ops import linear_kl
from opd.rollout.collect import responses
from opd.types import RolloutBatch, RolloutRequest, Sample, SampleGroup, Status

TURNS = 2
OBSERVATION = np.array([3, 4, 5], dtype=np.int32)
seen: dict[str, list] = {}
"""What was called with what, for the tests."""


def note(name: str, value: object) -> None:
    seen.setdefault(name, []).append(value)


def two_turns(engine, prompts, group_size, sampling, seed):
    """Each response: a turn, the environment's answer, another turn."""
    groups = []
    for prompt in prompts:
        uids = [f"{prompt.uid}/{i}" for i in range(group_size)]
        groups.append(
            SampleGroup(
                prompt.uid,
                prompt.domain,
                [Sample(uid, prompt.uid, prompt.domain, prompt.token_ids, prompt.label) for uid in uids],
            )
        )
    samples = [sample for group in groups for sample in group.samples]
    for turn in range(TURNS):
        requests = [RolloutRequest(f"{s.uid}/turn{turn}", s.token_ids, sampling, seed) for s in samples]
        ended = {uid: (status, tokens) for uid, status, tokens in responses(engine, requests)}
        for sample, request in zip(samples, requests, strict=True):
            sample.status, written = ended[request.uid]
            append(sample, written.token_ids, written.logprobs, written.policy_versions, wrote=True)
            if turn + 1 < TURNS:
                version = sample.policy_versions[-1:]
                quiet = np.zeros(len(OBSERVATION), np.float32)
                append(sample, OBSERVATION, quiet, version.repeat(len(OBSERVATION)), wrote=False)
    note("two_turns", groups)
    return groups


def append(sample, ids, logprobs, versions, *, wrote):
    """Tokens of the student or of the environment, at the end of a response."""
    sample.response_ids = np.concatenate([sample.response_ids, ids]).astype(np.int32)
    sample.rollout_logprobs = np.concatenate([sample.rollout_logprobs, logprobs]).astype(np.float32)
    sample.policy_versions = np.concatenate([sample.policy_versions, versions]).astype(np.int32)
    sample.loss_mask = np.concatenate([sample.loss_mask, np.full(len(ids), wrote)])


def turns_around(*given):
    return two_turns(*given)[::-1]


def gives_one_less(*given):
    groups = two_turns(*given)
    groups[-1].samples.pop()
    return groups


def is_sure_beyond_bounds(*given):
    groups = two_turns(*given)
    groups[0].samples[0].rollout_logprobs[-1] = np.inf
    return groups


def branches_from_nowhere(*given):
    groups = two_turns(*given)
    groups[0].branches = [replace(groups[0].samples[0], uid="branch", branch_of="nobody")]
    return groups


def branches_twice(*given):
    groups = two_turns(*given)
    first = groups[0].samples[0]
    groups[0].branches = [replace(first, uid="branch", branch_of=first.uid) for _ in range(2)]
    return groups


def drops_a_prompt(engine, prompts, group_size, sampling, seed):
    return two_turns(engine, prompts, group_size, sampling, seed)[1:]


def forgets_masks(engine, prompts, group_size, sampling, seed):
    groups = two_turns(engine, prompts, group_size, sampling, seed)
    groups[0].samples[0].loss_mask = groups[0].samples[0].loss_mask[1:]
    return groups


def never_ends(engine, prompts, group_size, sampling, seed):
    groups = two_turns(engine, prompts, group_size, sampling, seed)
    groups[0].samples[0].status = Status.PENDING
    return groups


def reward(sample):
    """Longer answers are better, in parts."""
    note("reward", sample.uid)
    return {"length": float(len(sample.text)), "even": float(len(sample.uid) % 2)}


def best_of_group(group):
    """1 on the tokens of the best response, 0 elsewhere."""
    note("advantage", group.uid)
    best = group.rewards.max()
    return [(s.loss_mask * (s.reward == best)).astype(np.float32) for s in group.samples]


def not_the_first(group):
    """Whether the group's prompt is an odd one."""
    note("filter", group.uid)
    return int(group.uid.rsplit("/", 1)[1]) % 2 == 1


def maybe(group):
    return None


def by_response(logprobs, old_logprobs, advantages, config, *, bounds):
    """REINFORCE, in which every response weighs the same."""
    note("bounds", bounds.tolist())
    lengths = bounds.diff()
    return -advantages * logprobs / lengths.repeat_interleave(lengths)


def plain_policy_gradient(logprobs, old_logprobs, advantages, config):
    """REINFORCE: no ratio, no clip."""
    note("policy", config.path)
    return -advantages * logprobs


def twice_the_kl(micro, student, view):
    """The reverse KL, doubled."""
    note("divergence", view.name)
    t = student.temperature
    return 2 * linear_kl(student.hidden, student.head, view.hidden, view.head, temperature=t)


def a_number(*_):
    return torch.tensor(1.0)


def first_half(batch):
    """Every second sample."""
    note("to_batch", len(batch.samples))
    return RolloutBatch(batch.samples[::2], batch.terms[::2])


def nothing(batch):
    return None


not_callable = 3


def over_a_half(group: SampleGroup) -> list[np.ndarray]:
    """An estimator that compares with a number and not with the rest of the group."""
    return [
        np.where(sample.loss_mask, (sample.reward or 0.0) - 0.5, 0.0).astype(np.float32)
        for sample in group.samples
    ]


def spoils_sampling_masks(*given):
    groups = two_turns(*given)
    count = len(groups[0].samples[0].response_ids)
    groups[0].samples[0].sampling_masks = np.ones(count - 1, np.int32)
    return groups
