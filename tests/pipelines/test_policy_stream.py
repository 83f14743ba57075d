"""What the policy stream makes of a whole step: the same numbers in memory, on disk and for any back end."""

from pathlib import Path

import numpy as np
import pytest
import tiny
from test_samples_on_disk import holding

from opd.pipelines.stages.policy_stream import PolicyStream
from opd.pipelines.stages.samples import StepSamples
from opd.train.advantages import Reinforce
from opd.train.torch_backend import TorchBackend
from opd.types import Sample, SampleGroup

LENGTHS = [(3, 4), (5, 1), (2, 37), (4, 0), (6, 3), (1, 5), (2, 9)]
COEFS = {"a": 0.5, "b": 2.0}


def samples() -> list[Sample]:
    made = tiny.samples(LENGTHS, teachers=["a", "b", "a", "b", "b", "a", "b"])
    rng = np.random.default_rng(5)
    for sample in made:
        sample.loss_mask = rng.random(len(sample.response_ids)) < 0.8
        sample.reward = float(rng.normal(3.0, 2.0))
    return made


def advantages(step: StepSamples, coefs=None, **how) -> dict[str, np.ndarray]:
    stream = PolicyStream(step, None)
    stream.estimate_advantages(Reinforce(), coefs, **how)
    stream.measure_step()
    return {s.uid: stream.policy_tokens(s).advantages.copy() for lot in step.local_samples() for s in lot}


@pytest.mark.parametrize("coefs", [None, COEFS])
def test_advantages_are_whitened_over_the_step_and_then_scaled(tmp_path: Path, coefs):
    made, backend = samples(), TorchBackend(tiny.model(), tiny.training([], max_tokens=16))
    tokens = np.array([s.reward for s in made for counts in s.loss_mask if counts])
    step = StepSamples([SampleGroup(s.group_uid, s.domain, [s]) for s in made], backend)
    found = advantages(step, coefs, whiten=made)
    for sample in made:
        scale = 1.0 if coefs is None else coefs[sample.domain]
        expected = scale * (sample.reward - tokens.mean()) / tokens.std()
        np.testing.assert_allclose(found[sample.uid], np.where(sample.loss_mask, expected, 0), rtol=1e-5)
    with holding(tmp_path / "store", made, backend) as stored:
        for light, sample in zip(stored.samples, made, strict=True):
            light.reward = sample.reward
        on_disk = advantages(stored, coefs, whiten=stored.samples)
    assert all(np.array_equal(on_disk[uid], values) for uid, values in found.items() if len(values))
    plain = advantages(step, coefs)
    assert not np.allclose(plain["s2"], found["s2"])


def test_what_is_not_learnt_from_does_not_count_for_the_whitening():
    """As truncated responses do not, where `shaping.mask_truncated` leaves them out."""
    made, backend = samples(), TorchBackend(tiny.model(), tiny.training([], max_tokens=16))
    step = StepSamples([SampleGroup(s.group_uid, s.domain, [s]) for s in made], backend)
    found = advantages(step, whiten=made[:5])
    learnt = np.concatenate([found[s.uid][s.loss_mask] for s in made[:5]]).astype(np.float64)
    np.testing.assert_allclose([learnt.mean(), learnt.var()], [0.0, 1.0], atol=1e-5)
