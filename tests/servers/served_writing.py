"""What tests of served engines ask them to write, and what is right of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from opd.errors import RolloutError
from opd.kernels.ops import linear_logprobs
from opd.models.causal_lm import CausalLM
from opd.rollout.collect import EncodedPrompt
from opd.train.packing import pack_tokens
from opd.types import RolloutRequest, SamplingParams

IDS = ([3, 4, 5, 6, 7, 8, 9, 3], [5, 5, 6, 7, 4, 3, 3, 8, 9, 4])
PROMPTS = [np.array(ids, dtype=np.int32) for ids in IDS]


def requests(count: int, new: int, *, temperature: float = 0.7, stop: tuple[int, ...] = ()):
    sampling = SamplingParams(temperature=temperature, max_new_tokens=new, stop_ids=stop)
    return [RolloutRequest(f"r{i}", PROMPTS[i % len(PROMPTS)], sampling) for i in range(count)]


def rescored(model: CausalLM, samples, temperature: float, vocabulary=None) -> list[np.ndarray]:
    """[R] log-probabilities of each response under `model`."""
    with torch.no_grad():
        ids, positions, lengths, rows = pack_tokens(samples)
        hidden = model.hidden(ids, positions, lengths)[rows]
        targets = torch.from_numpy(np.concatenate([s.response_ids for s in samples]).astype(np.int64))
        values = linear_logprobs(hidden, model.head(vocabulary), targets, temperature=temperature).numpy()
    return np.split(values, np.cumsum([len(s.response_ids) for s in samples])[:-1])


def prompts():
    return [EncodedPrompt(f"p{i}", "sort", ids, None) for i, ids in enumerate(PROMPTS)]


def written_over_an_update(served, wanted, model, version: int) -> dict[str, tuple[list, list, list]]:
    """Tokens, log-probabilities and policy versions by uid, of `wanted` with `model` pushed while they are
    written.
    """
    steps = served.generate(wanted)
    seen = [next(steps)]
    served.pause()
    served.flush()
    with pytest.raises(RolloutError, match="must grow"):
        served.update_weights(model.weights(), version - 1)
    assert served.update_weights(model.weights(), version) == model.quick_digest()
    served.resume()
    assert served.policy_version == version
    seen += list(steps)
    written = {r.uid: ([], [], []) for r in wanted}
    for step in seen:
        for uid, place, token, logprob in zip(
            step.uids, step.positions, step.token_ids, step.logprobs, strict=True
        ):
            assert place == len(written[uid][0])  # none is lost, none comes twice
            for column, value in zip(written[uid], (token, logprob, step.policy_version), strict=True):
                column.append(value)
    return written


def update(served, model, version: int) -> None:
    served.pause()
    served.flush()
    served.update_weights(model.weights(), version)
    served.resume()


class Corrupting:
    """A push that changes one bit of one number of one tensor on its way, by default the least."""

    def __init__(self, push, name: str, bit: int = 0) -> None:
        self._push, self._name, self._bit = push, name, bit

    def prepare(self, weights, version):
        kept = [(name, tensor.clone()) for name, tensor in weights]
        sent = [(name, tensor.clone()) for name, tensor in kept]
        dict(sent)[self._name].view(-1).view(torch.int32)[3] ^= 1 << self._bit
        self._sent = self._push.prepare(sent, version)
        return replace(self._sent, weights=kept)

    async def load(self, ask, server, name, prepared):
        await self._push.load(ask, server, name, self._sent)
