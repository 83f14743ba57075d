"""The default training step of one GPU: bfloat16 over float32 masters."""

import numpy as np
import pytest
import tiny
import torch

from opd.config import PolicyLossConfig, TrainConfig
from opd.models.causal_lm import CausalLM
from opd.ranks import Ranks
from opd.train.backend import Backend
from opd.train.backends import open_backend
from opd.train.terms import PolicyTerm
from opd.train.torch_backend import MastersBackend, TorchBackend
from opd.types import RolloutBatch, TokenTerms


def batch() -> RolloutBatch:
    samples = tiny.samples([(3, 4), (5, 1), (2, 7), (6, 3)])
    rng = np.random.default_rng(1)
    terms = [TokenTerms.zeros(len(sample.response_ids)) for sample in samples]
    for term in terms:
        term.advantages = rng.normal(size=len(term.advantages)).astype(np.float32)
        term.policy_weight = np.full(len(term.advantages), 1 / 15, np.float32)
    return RolloutBatch(samples, terms)


def moved(backend: Backend, begin: torch.Tensor) -> tuple[list[float], torch.Tensor]:
    """The gradient norms of three steps, and how far they have moved the weights."""
    norms = []
    for _ in range(3):
        backend.forward_backward(batch())
        norms.append(backend.step(1e-2)["grad_norm"])
    return norms, weights(backend) - begin


def weights(backend: Backend) -> torch.Tensor:
    state = backend.state()["model"]
    return torch.cat([state[name].detach().cpu().float().flatten() for name in sorted(state)])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_moves_as_float32_does(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    training = tiny.training([PolicyTerm(PolicyLossConfig())], max_tokens=16)
    plain = TorchBackend(tiny.model(), training)
    norms, expected = moved(plain, weights(plain))

    def load(dtype: str | None, *, empty: bool = False) -> CausalLM:
        assert dtype == "float32"
        model = tiny.model()
        model.module.to(device)
        return model

    with open_backend(load, TrainConfig(), training, Ranks(), dtype="bfloat16") as backend:
        assert isinstance(backend, MastersBackend)
        assert {p.dtype for p in backend.model.module.parameters()} == {torch.bfloat16}
        assert {tensor.dtype for tensor in backend.state()["model"].values()} == {torch.float32}
        found, far = moved(backend, weights(backend))
    assert found == pytest.approx(norms, rel=0.1)
    assert torch.nn.functional.cosine_similarity(far, expected, dim=0) > 0.9
