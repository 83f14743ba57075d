"""What tests of served engines ask them to write, and what is right of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import tiny
import torch

from opd.errors import RolloutError
from opd.kernels.ops import linear_logprobs
from opd.models.causal_lm import CausalLM
from opd.rollout.collect import EncodedPrompt, collect
from opd.train.packing import pack_tokens
from opd.types import RolloutRequest, Sample, SamplingParams, Status

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


def collected(served, count: int, seed: int, **sampling) -> list[Sample]:
    """`count` samples of each prompt."""
    groups = collect(served, prompts(), count, SamplingParams(**sampling), seed=seed)
    return [sample for group in groups for sample in group.samples]


def assert_of(model: CausalLM, samples: Sequence[Sample], temperature=1.0, vocabulary=None) -> None:
    """Their log-probabilities are those of `model`."""
    for sample, due in zip(samples, rescored(model, samples, temperature, vocabulary), strict=True):
        assert len(sample.response_ids) > 0
        np.testing.assert_allclose(sample.rollout_logprobs, due, atol=1e-4)


@dataclass
class Written:
    """A response as it came."""

    ids: list[int] = field(default_factory=list)
    """With the prefix."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ended: Status | None = None


def written(chunks: Iterable, wanted: Sequence[RolloutRequest]) -> dict[str, Written]:
    """What `chunks` hold of each request: no token is lost, and none comes twice."""
    found = {request.uid: Written([int(token) for token in request.prefix_ids]) for request in wanted}
    for chunk in chunks:
        assert len(chunk.uids) == len(chunk.token_ids)
        columns = chunk.uids, chunk.positions.tolist(), chunk.token_ids.tolist(), chunk.logprobs
        for uid, place, token, logprob in zip(*columns, strict=True):
            assert place == len(found[uid].ids)
            found[uid].ids.append(token)
            found[uid].logprobs.append(logprob)
            found[uid].versions.append(chunk.policy_version)
        for uid, status in chunk.finished.items():
            found[uid].ended = status
    return found


def assert_written(
    wanted: Sequence[RolloutRequest], found: Mapping[str, Written], models: Mapping[int, CausalLM]
) -> set[int]:
    """Each response is whole, and each token has the log-probability of the model that its version says; the
    versions of those requests that have several.
    """
    mixed: set[int] = set()
    samples = tiny.samples([(len(r.prompt_ids), 1) for r in wanted])
    for sample, request in zip(samples, wanted, strict=True):
        sample.prompt_ids = request.prompt_ids
        sample.response_ids = np.array(found[request.uid].ids, dtype=np.int32)
        assert len(sample.response_ids) == request.sampling.max_new_tokens
    due = {v: rescored(model, samples, wanted[0].sampling.temperature) for v, model in models.items()}
    for place, request in enumerate(wanted):
        versions = found[request.uid].versions
        assert versions == sorted(versions)
        assert set(versions) <= models.keys()
        mixed |= set(versions) if len(set(versions)) > 1 else set()
        told = np.array(found[request.uid].logprobs)
        for version, rows in due.items():
            of = np.array(versions) == version
            np.testing.assert_allclose(told[of], rows[place][of], atol=1e-4)
    return mixed


def written_over_an_update(served, wanted, model, version: int) -> dict[str, Written]:
    """What comes of `wanted` with `model` pushed while it is written."""
    steps = served.generate(wanted)
    seen = [next(steps)]
    served.pause()
    served.flush()
    with pytest.raises(RolloutError, match="must grow"):
        served.update_weights(model.weights(), version - 1)
    assert served.update_weights(model.weights(), version) == model.quick_digest()
    served.resume()
    assert served.policy_version == version
    return written([*seen, *steps], wanted)


def assert_written_over_updates(served, wanted, models: list[CausalLM], make) -> None:
    """Push one after another of `make(version)`, after the `models` of its versions so far, in the middle of
    responses, until some are of two: on a busy machine a server may have written all before the pause.
    """
    mixed: set[int] = set()
    while not mixed and len(models) < 7:
        models.append(make(len(models)))
        version = len(models) - 1
        found = written_over_an_update(served, wanted, models[version], version)
        mixed = assert_written(wanted, found, {v: models[v] for v in (version - 1, version)})
    assert mixed


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
        return await self._push.load(ask, server, name, self._sent)
