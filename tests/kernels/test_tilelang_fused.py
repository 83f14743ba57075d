"""The fused kernels on this machine's CPU against float64 enumeration."""

import pytest
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.kernels import ops, tilelang_fused, tilelang_target
from opd.kernels.divergences import DIVERGENCES
from opd.kernels.head import Head

KINDS = ("reverse", "forward", "jsd")
WIDTHS = (40, 70)

pytestmark = pytest.mark.skipif(
    tilelang_target.missing("cpu") is not None, reason=str(tilelang_target.missing("cpu"))
)


def models(seed, tokens, vocabulary, *, size=1.0, dtype=torch.float32, softcap=None):
    """Student hidden states and head, teacher hidden states and head."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    rows = vocabulary + 3
    student = Head(
        (randn(rows, WIDTHS[0]) * size).to(dtype),
        bias=randn(rows).to(dtype),
        scale=0.3,
        softcap=softcap,
        vocab_size=vocabulary,
    )
    teacher = Head((randn(rows, WIDTHS[1]) * size * 0.3).to(dtype), vocab_size=vocabulary)
    return randn(tokens, WIDTHS[0]).to(dtype), student, randn(tokens, WIDTHS[1]).to(dtype), teacher


def exact(hidden, student, teacher_hidden, teacher, kind, beta, temperature, coef):
    z = (student.logits(hidden.double()) / temperature).requires_grad_()
    t = (teacher.logits(teacher_hidden.double()) / temperature).log_softmax(1)
    values = DIVERGENCES[kind].formula(z.log_softmax(1), t, beta)
    (gradient,) = torch.autograd.grad((values * coef.double()).sum(), z)
    return values.detach(), gradient


def check(arguments, options, atol=1e-5, rtol=1e-5):
    coef = torch.linspace(-1, 2, len(arguments[0]))
    values, gradient = exact(*arguments, *options.values(), coef)
    scores = tilelang_fused.fused_kl(*arguments, **options)
    torch.testing.assert_close(scores.values.double(), values, rtol=rtol, atol=atol)
    got = tilelang_fused.logits_gradient(*arguments, scores.totals, coef, **options)
    assert got.dtype == arguments[0].dtype
    torch.testing.assert_close(got.double(), gradient, rtol=rtol * 100, atol=atol)


@pytest.mark.slow
@settings(max_examples=cases(40))
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 20),
    vocabulary=st.integers(1, 100),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    kind=st.sampled_from(["reverse", "forward"]),
)
def test_scores_match_float64(seed, tokens, vocabulary, temperature, kind):
    arguments = models(seed, tokens, vocabulary)
    options = {"kind": kind, "beta": 0.5, "temperature": temperature}
    values, _ = exact(*arguments, *options.values(), torch.ones(tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPD_KERNELS", "tilelang")
        scores = ops.score_kl(*arguments, **options)
    # The matmul's own rounding, absolute, comes before every statistic.
    torch.testing.assert_close(scores.double(), values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["reverse", *(pytest.param(k, marks=pytest.mark.long) for k in KINDS[1:])])
def test_values_and_gradient(kind):
    check(models(1, 13, 90), {"kind": kind, "beta": 0.3, "temperature": 1.5})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reverse", *(pytest.param(k, marks=pytest.mark.long) for k in KINDS[1:])])
def test_a_softcap(kind):
    check(models(2, 9, 65, softcap=3.0), {"kind": kind, "beta": 0.6, "temperature": 0.8})


@pytest.mark.slow
def test_float16():
    check(
        models(3, 9, 65, dtype=torch.float16),
        {"kind": "reverse", "beta": 0.5, "temperature": 1.0},
        2e-3,
        1e-4,
    )


def test_extreme_logits_and_tiles_without_any_mass():
    arguments = models(4, 6, 100, size=1e4)
    options = {"kind": "reverse", "beta": 0.5, "temperature": 1.0}
    values, _ = exact(*arguments, *options.values(), torch.ones(6))
    scores = tilelang_fused.fused_kl(*arguments, **options)
    assert values.max() > 1e4
    torch.testing.assert_close(scores.values.double(), values, rtol=1e-5, atol=1e-5)


def test_the_same_model_twice_diverges_by_nothing():
    hidden, head, _, _ = models(5, 7, 80)
    scores = tilelang_fused.fused_kl(hidden, head, hidden, head)
    assert torch.all(scores.values <= 1e-6)
    assert scores.totals.shape == (5, 7)


def test_no_tokens_and_what_it_cannot_take():
    hidden, student, teacher_hidden, teacher = models(6, 3, 20)
    empty = tilelang_fused.fused_kl(hidden[:0], student, teacher_hidden[:0], teacher)
    assert empty.values.shape == (0,)
    assert empty.totals.shape == (5, 0)
    with pytest.raises(TypeError, match="fused kernels"):
        tilelang_fused.fused_kl(hidden.double(), student, teacher_hidden, teacher)
    with pytest.raises(ValueError, match="vocabulary"):
        tilelang_fused.fused_kl(hidden, student, teacher_hidden, Head(teacher.weight))


def test_widths_that_a_gpu_cannot_stage_are_refused():
    refuse = tilelang_fused.check_width
    refuse(72, tilelang_target.CUDA)
    refuse(1, tilelang_target.CPU)
    for width in (64, 100):
        with pytest.raises(ValueError, match=f"width {width}"):
            refuse(width, tilelang_target.CUDA)
