"""Log-probabilities, entropy, top-k, mixtures and floors against float64 enumeration."""

import math

import pytest
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from kl_problems import DTYPES, for_each_implementation
from torch import Tensor

from opd.kernels import ops
from opd.kernels.head import Head

GRADIENT_ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


class Random:
    """Seeded tensors of one dtype."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def ids(self, *shape: int, vocabulary: int) -> Tensor:
        return torch.randint(vocabulary, shape, generator=self.generator)


def wide_logprobs(hidden: Tensor, head: Head, temperature: float = 1.0) -> Tensor:
    """Log-probabilities `[N, V]` in float64; gradients still reach the inputs they came from."""
    bias = None if head.bias is None else head.bias.double()
    wide = Head(head.weight.double(), bias, head.scale, head.softcap, head.vocab_size)
    return (wide.logits(hidden.double()) / temperature).log_softmax(dim=1)


def assert_gradients(loss: Tensor, exact_loss: Tensor, leaves: list[Tensor]) -> None:
    """Both losses have the same gradient at `leaves`, relative to the largest entry (at least 1)."""
    got = torch.autograd.grad(loss, leaves)
    exact = torch.autograd.grad(exact_loss, leaves)
    for a, b, leaf in zip(got, exact, leaves, strict=True):
        scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=0, atol=GRADIENT_ROUNDING[leaf.dtype] * scale)


@pytest.mark.some(1)
@for_each_implementation
@settings(max_examples=cases(100), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    tokens=st.sampled_from([0, 1, 7]),
    picks=st.sampled_from([None, 1, 4]),
    form=st.sampled_from([(1.0, None), (0.3, None), (1.0, 2.0), (-0.7, 5.0)]),
    temperature=st.sampled_from([1.0, 0.6, 2.0]),
    chunk=st.sampled_from([1, 3, 64]),
    entropy=st.booleans(),
)
def test_logprobs_and_entropy(seed, dtype, tokens, picks, form, temperature, chunk, entropy) -> None:
    random = Random(seed, dtype)
    hidden, weight, bias = random.normal(tokens, 3), random.normal(15, 3), random.normal(15)
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight, bias)]
    head = Head(weight, bias, scale=form[0], softcap=form[1], vocab_size=13)
    ids = random.ids(tokens, *([] if picks is None else [picks]), vocabulary=13)
    exact = wide_logprobs(hidden, head, temperature)
    exact_picked = exact.gather(1, ids.reshape(tokens, -1 if tokens else picks or 1)).reshape(ids.shape)
    exact_entropy = -(exact.exp() * exact).sum(dim=1)
    if entropy:
        picked, spread = ops.linear_logprobs_entropy(hidden, head, ids, temperature=temperature, chunk=chunk)
        torch.testing.assert_close(spread.double(), exact_entropy, rtol=1e-5, atol=1e-5)
    else:
        picked = ops.linear_logprobs(hidden, head, ids, temperature=temperature, chunk=chunk)
        spread = torch.zeros(tokens)
    assert picked.dtype == torch.float32
    torch.testing.assert_close(picked.double(), exact_picked, rtol=1e-5, atol=1e-5)
    upstream, upstream_entropy = random.normal(*ids.shape).double(), random.normal(tokens).double()
    upstream[: tokens // 2] = 0
    loss = (picked * upstream.float()).sum() + (spread * upstream_entropy.float()).sum()
    exact_loss = (exact_picked * upstream).sum() + entropy * (exact_entropy * upstream_entropy).sum()
    assert_gradients(loss, exact_loss, leaves)


def test_logprobs_gradcheck(kernels: str) -> None:
    random = Random(5, torch.float64)
    leaves = [random.normal(*shape).requires_grad_() for shape in ((4, 3), (6, 3), (6,))]
    ids = random.ids(4, 2, vocabulary=6)
    ids[0] = 3  # the same token twice in one row

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        head = Head(weight, bias, scale=0.5, softcap=2.0)
        return ops.linear_logprobs_entropy(hidden, head, ids, temperature=0.8, chunk=3)

    assert torch.autograd.gradcheck(function, leaves)


def test_only_one_of_the_two_results_may_get_a_gradient(kernels: str) -> None:
    random = Random(6)
    hidden, head, ids = random.normal(4, 3).requires_grad_(), Head(random.normal(6, 3)), torch.arange(4)
    logprobs, _ = ops.linear_logprobs_entropy(hidden, head, ids, chunk=3)
    exact = wide_logprobs(hidden, head)
    assert_gradients(logprobs.sum(), exact.gather(1, ids.unsqueeze(1)).sum(), [hidden])
    _, entropy = ops.linear_logprobs_entropy(hidden, head, ids, chunk=3)
    exact = wide_logprobs(hidden, head)
    assert_gradients(entropy.sum(), -(exact.exp() * exact).sum(), [hidden])


@for_each_implementation
@settings(max_examples=cases(60), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    tokens=st.sampled_from([0, 1, 7]),
    k=st.sampled_from([1, 5, 13]),
    spread=st.sampled_from([1.0, 20.0]),
)
def test_topk(seed: int, dtype: torch.dtype, tokens: int, k: int, spread: float) -> None:
    random = Random(seed, dtype)
    hidden, head = random.normal(tokens, 3), Head(random.normal(16, 3), scale=spread, vocab_size=13)
    ids, logprobs, tail = ops.linear_topk(hidden, head, k, temperature=0.9, chunk=3)
    exact = wide_logprobs(hidden, head, 0.9)
    assert (ids.shape, ids.dtype, tail.shape) == ((tokens, k), torch.int64, (tokens,))
    assert not logprobs.requires_grad
    torch.testing.assert_close(logprobs.double(), exact.gather(1, ids), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(logprobs.double(), exact.topk(k, dim=1).values, rtol=1e-5, atol=2e-5)
    # Relative precision: a tail of 1e-12 is not rounded to 0.
    exact_tail = exact.exp().scatter(1, ids, 0).sum(dim=1)
    torch.testing.assert_close(tail.double(), exact_tail, rtol=1e-3, atol=1e-37)


@pytest.mark.some(1)
@for_each_implementation
@settings(max_examples=cases(60), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    tokens=st.sampled_from([0, 1, 7]),
    weights=st.sampled_from([[1.0], [0.3, 0.7], [0.5, 0.25, 0.25], [0.999, 0.001]]),
    chunk=st.sampled_from([2, 64]),
    masked=st.booleans(),
)
def test_mixture_kl_and_geometric_floor(seed, dtype, tokens, weights, chunk, masked) -> None:
    random = Random(seed, dtype)
    hidden, weight = random.normal(tokens, 3).requires_grad_(), random.normal(17, 3).requires_grad_()
    head = Head(weight, softcap=4.0)
    hiddens = [random.normal(tokens, 2 + i) for i in range(len(weights))]
    heads = [Head(random.normal(17, 2 + i), scale=1.5) for i in range(len(weights))]
    token_weight = (torch.arange(tokens) % 3 != 1).float() if masked else None
    values = ops.linear_mixture_kl(
        hidden, head, hiddens, heads, weights, temperature=0.8, weight=token_weight, chunk=chunk
    )
    exact = wide_logprobs(hidden, head, 0.8)
    teachers = torch.stack([wide_logprobs(*pair, 0.8) for pair in zip(hiddens, heads, strict=True)])
    shares = torch.tensor(weights, dtype=torch.float64).reshape(-1, 1, 1)
    mixture = (shares * teachers.exp()).sum(dim=0).log()
    counted = torch.ones(tokens) if token_weight is None else token_weight
    exact_values = (exact.exp() * (exact - mixture)).sum(dim=1) * counted
    torch.testing.assert_close(values.double(), exact_values, rtol=1e-5, atol=1e-5)
    upstream = random.normal(tokens).double()
    assert_gradients((values * upstream.float()).sum(), (exact_values * upstream).sum(), [hidden, weight])
    floor = ops.geometric_floor(hiddens, heads, weights, temperature=0.8, chunk=chunk)
    exact_floor = -(shares * teachers).sum(dim=0).logsumexp(dim=1)
    torch.testing.assert_close(floor.double(), exact_floor, rtol=1e-5, atol=2e-6)


def test_mixture_of_teachers_that_rule_out_each_other_stays_finite(kernels: str) -> None:
    certain = torch.eye(3) * 1e4
    head = Head(torch.eye(3))
    hiddens = [certain, certain.roll(1, 0)]
    student = torch.zeros(3, 3).requires_grad_()
    values = ops.linear_mixture_kl(student, head, hiddens, [head, head], [0.5, 0.5])
    values.sum().backward()
    # p is uniform; the mixture gives two tokens a half each and the third e^-1e4.
    expected = -math.log(3) + (2 * math.log(2) + 1e4 + math.log(1)) / 3
    assert values.detach().tolist() == pytest.approx([expected] * 3, rel=1e-5)
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()


def test_geometric_pool_identity(kernels: str) -> None:
    """`sum_i w_i KL(p || t_i) = KL(p || pool) - log Z`, and so never below the floor."""
    random = Random(9)
    hidden, head = random.normal(6, 3), Head(random.normal(17, 3))
    hiddens, heads = [random.normal(6, 3) for _ in range(2)], [Head(random.normal(17, 3)) for _ in range(2)]
    weights = [0.4, 0.6]
    parts = [w * ops.linear_kl(hidden, head, h, t) for w, h, t in zip(weights, hiddens, heads, strict=True)]
    mean = sum(w * wide_logprobs(h, t) for w, h, t in zip(weights, hiddens, heads, strict=True))
    assert isinstance(mean, Tensor)
    student, pool = wide_logprobs(hidden, head), mean.log_softmax(dim=1)
    to_pool = (student.exp() * (student - pool)).sum(dim=1)
    floor = ops.geometric_floor(hiddens, heads, weights)
    torch.testing.assert_close(sum(parts), (to_pool + floor).float(), rtol=1e-5, atol=1e-6)
    agreeing = ops.geometric_floor([hidden, hidden], [head, head], weights)
    assert float(agreeing.abs().max()) <= 1e-6
