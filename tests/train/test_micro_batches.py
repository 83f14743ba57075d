"""How large micro-batches are where a recipe leaves it open, and that their size changes no gradient."""

import logging

import numpy as np
import pytest
import tiny
import torch

from opd.config import BatchConfig, FullVocabularyKL
from opd.kernels.head import Head
from opd.ranks import Ranks
from opd.train import plan
from opd.train.distill_terms import FullVocabularyTerm
from opd.train.plan import MOST, PLAIN, SCORED, choose_tokens, fitting_tokens, scored_tokens
from opd.train.teacher_views import TeacherView
from opd.train.torch_backend import TorchBackend
from opd.types import MicroBatch, RolloutBatch, TokenTerms


class ByToken:
    """A teacher whose hidden state depends on the token that is to come: the same in any packing."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        size = len(tiny.tokenizer())
        self._rows = torch.randn(size, 24, generator=generator)
        self._head = Head(torch.randn(size, 24, generator=generator))

    def __call__(self, micro: MicroBatch) -> list[TeacherView]:
        return [TeacherView("a", 1.0, self._rows[micro.targets], self._head)]


def gradient(max_tokens: int, batch: RolloutBatch) -> torch.Tensor:
    term = FullVocabularyTerm(ByToken(), "one_hot", FullVocabularyKL())
    backend = TorchBackend(tiny.model(), tiny.training([term], 0.7, max_tokens=max_tokens))
    backend.forward_backward(batch)
    gradients = [parameter.grad for parameter in backend.model.module.parameters()]
    return torch.cat([one.flatten().double() for one in gradients if one is not None])


@pytest.mark.parametrize("seed", [0, 1])
def test_larger_micro_batches_give_the_gradient_of_smaller_ones(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [(int(rng.integers(1, 30)), int(rng.integers(1, 250))) for _ in range(130)]
    assert sum(map(sum, lengths)) > 3 * PLAIN
    samples = tiny.samples(lengths, teachers=["a"] * len(lengths), seed=seed)
    terms, total = [], sum(response for _, response in lengths)
    for _, response in lengths:
        term = TokenTerms.zeros(response)
        term.kl_weight = np.where(rng.random(response) < 0.8, 1 / total, 0).astype(np.float32)
        terms.append(term)
    batch = RolloutBatch(samples, terms)
    large, small = gradient(16_384, batch), gradient(4096, batch)
    assert (large - small).norm() <= 1e-6 * small.norm()
    assert not torch.equal(large, small)  # they were packed otherwise


@pytest.mark.parametrize(
    ("room", "tokens"),
    [(-1, PLAIN), (0, PLAIN), (2 * 5000 * 10, PLAIN), (2 * 20_000 * 10, 19_456), (1 << 60, MOST)],
)
def test_half_of_the_room_is_taken_in_whole_thousands(room: int, tokens: int) -> None:
    assert fitting_tokens(room, 10) == tokens


def test_a_pass_without_a_gradient_is_as_long_as_asked_or_as_suits_the_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 3)
    assert [scored_tokens("auto", cpu), scored_tokens("auto", cuda)] == [PLAIN, SCORED]
    assert [scored_tokens(7, cpu), scored_tokens(7, cuda)] == [7, 7]


def test_a_cpu_has_what_it_always_had() -> None:
    backend = TorchBackend(tiny.model(), tiny.training([]))
    choose_tokens(backend, BatchConfig(), Ranks(), width=4, reserved=0)
    assert backend.max_tokens == PLAIN == 4096


def test_a_device_has_what_is_free_beside_what_is_still_to_come(pretended, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO, plan.__name__)
    backend = TorchBackend(pretended.model(tiny.model()), tiny.training([]))
    learns = sum(parameter.nbytes for parameter in backend.model.module.parameters())
    token = backend.layers * plan.layer_bytes(1, backend.hidden_size, 2)
    logits = plan.logits_bytes(16, backend.vocabulary)
    batch, found = BatchConfig(kl_chunk=16), []
    for beside in (0, 2 * 1024 * token, 1 << 40):
        free = 3 * learns + logits + 2 * 10_000 * token
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 1 << 40))
        choose_tokens(backend, batch, Ranks(), width=2, reserved=beside)
        found.append(backend.max_tokens)
    assert found == [9 * 1024, 8 * 1024, PLAIN]
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        f"micro-batches of up to {tokens} tokens" for tokens in found
    ]
    ranks = Ranks()
    monkeypatch.setattr(ranks, "max_over_ranks", lambda count, _: max(count, -7 * 1024))  # of one with less
    choose_tokens(backend, batch, ranks, width=2, reserved=0)
    assert backend.max_tokens == 7 * 1024
    given = TorchBackend(backend.model, tiny.training([], max_tokens=50))
    choose_tokens(given, BatchConfig(max_tokens=50), Ranks(), width=2, reserved=0)
    assert given.max_tokens == 50
    assert given.packed_as(9 * 1024) == 50  # what a recipe says holds when a stage is resumed, too
