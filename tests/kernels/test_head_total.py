"""A head with a `total`: every operation adds its weight's gradient there, whatever arrives from above."""

import pytest
import torch
from torch import Tensor

from opd.kernels import chunked
from opd.kernels.head import Head

TOKENS, WIDTH, VOCABULARY, CHUNK = 70, 6, 40, 32


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def student(dtype: torch.dtype, total: bool) -> tuple[Tensor, Head]:
    hidden = normal(TOKENS, WIDTH).to(dtype).requires_grad_()
    weight, bias = normal(VOCABULARY, WIDTH, seed=1).to(dtype), normal(VOCABULARY, seed=2).to(dtype)
    sums = torch.ones(VOCABULARY, WIDTH) if total else None
    form = {"scale": 1.5, "softcap": 4.0, "vocab_size": VOCABULARY - 3}
    return hidden, Head(weight.requires_grad_(), bias.requires_grad_(), **form, total=sums)


DECLARED = torch.where(torch.arange(TOKENS) % 3 > 0, normal(TOKENS, seed=3).abs() + 0.1, 0.0)
TEACHER = normal(TOKENS, 5, seed=4), Head(normal(VOCABULARY, 5, seed=5), vocab_size=VOCABULARY - 3)
OPTIONS = {"temperature": 0.7, "chunk": CHUNK}


def divergence(hidden: Tensor, head: Head) -> Tensor:
    return chunked.linear_kl(hidden, head, *TEACHER, kind="reverse", beta=0.5, weight=DECLARED, **OPTIONS)


def mixture(hidden: Tensor, head: Head) -> Tensor:
    pair = [TEACHER[0], TEACHER[0].flip(0)], [TEACHER[1]] * 2
    return chunked.linear_mixture_kl(hidden, head, *pair, [0.3, 0.7], weight=DECLARED, **OPTIONS)


def logprobs(hidden: Tensor, head: Head) -> Tensor:
    ids = torch.arange(TOKENS) % (VOCABULARY - 3)
    found, entropy = chunked.linear_logprobs_entropy(hidden, head, ids, **OPTIONS)
    return found + 0.3 * entropy


ARRIVING = {
    "declared": DECLARED,
    "scaled": 0.25 * DECLARED,
    "of another form": DECLARED * normal(TOKENS, seed=6),
    "nothing": torch.zeros(TOKENS),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arriving", ARRIVING)
@pytest.mark.parametrize("operation", [divergence, mixture, logprobs])
def test_the_total_gets_what_autograd_would(operation, arriving, dtype):
    (hidden, head), (other, with_total) = student(dtype, False), student(dtype, True)
    expected = operation(hidden, head)
    found = operation(other, with_total)
    assert torch.equal(found, expected)
    expected.backward(ARRIVING[arriving])
    found.backward(ARRIVING[arriving])
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    assert with_total.weight.grad is None
    assert with_total.total is not None
    torch.testing.assert_close(with_total.total - 1, head.weight.grad.float(), rtol=rounding, atol=rounding)
    torch.testing.assert_close(other.grad, hidden.grad, rtol=rounding, atol=rounding)
    torch.testing.assert_close(with_total.bias.grad, head.bias.grad, rtol=rounding, atol=rounding)


def test_a_second_backward_adds_once_more():
    hidden, head = student(torch.float32, True)
    loss = (DECLARED * divergence(hidden, head)).sum()
    before = head.total.clone()  # what was declared is there already
    loss.backward(retain_graph=True)
    torch.testing.assert_close(head.total, before)
    loss.backward()
    torch.testing.assert_close(head.total - 1, 2 * (before - 1))


def test_statistics_of_another_dtype_go_through_autograd():
    hidden, head = student(torch.float32, True)
    divergence(hidden.double(), head).backward(DECLARED.double())
    assert torch.equal(head.total, torch.ones_like(head.total))
    assert head.weight.grad is not None


def test_without_a_gradient_nothing_is_added():
    hidden, head = student(torch.float32, True)
    with torch.no_grad():
        divergence(hidden, head)
        logprobs(hidden, head)
    assert torch.equal(head.total, torch.ones_like(head.total))


def test_a_total_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"total has shape \[3, 2\]; its weight has \[4, 2\]"):
        Head(torch.zeros(4, 2), total=torch.zeros(3, 2))
