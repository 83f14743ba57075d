"""The compiled row kernel on this machine's CPU against float64 enumeration."""

import pytest
import torch
from full import cases
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opd.kernels import ops, tilelang_rows, tilelang_target
from opd.kernels.divergences import DIVERGENCES, divergence_
from opd.kernels.head import Head

KINDS = ("reverse", "forward", "jsd")
TILE = tilelang_target.CPU.lanes * tilelang_target.CPU.unroll

pytestmark = pytest.mark.skipif(
    tilelang_target.missing("cpu") is not None, reason=str(tilelang_target.missing("cpu"))
)


def exact(student, teacher, kind, beta, coef):
    """Values `[R]` and `coef * d value / d student` in float64."""
    z = student.double().clone().requires_grad_()
    values = DIVERGENCES[kind].formula(z.log_softmax(1), teacher.double().log_softmax(1), beta)
    (gradient,) = torch.autograd.grad((values * coef.double()).sum(), z)
    return values.detach(), gradient


def logits(seed, rows, vocabulary, scale, distance, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(rows, vocabulary, generator=generator, dtype=dtype) * scale
    teacher = student + torch.randn(rows, vocabulary, generator=generator, dtype=dtype) * distance
    return student, teacher, torch.randn(rows, generator=generator, dtype=dtype)


@pytest.mark.slow
@settings(max_examples=cases(120))
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    vocabulary=st.one_of(st.integers(1, 70), st.sampled_from([TILE - 1, TILE, TILE + 1, 3 * TILE + 17])),
    scale=st.sampled_from([0.0, 1.0, 5.0, 1e4]),
    distance=st.sampled_from([0.0, 1e-4, 1.0, 1e4]),
    offset=st.sampled_from([0.0, 1e4, -1e4]),
    kind=st.sampled_from(KINDS),
    beta=st.sampled_from([0.1, 0.5, 0.9]),
)
@example(seed=0, rows=1, vocabulary=1, scale=1.0, distance=1.0, offset=0.0, kind="jsd", beta=0.5)
@example(seed=0, rows=2, vocabulary=TILE + 1, scale=1e4, distance=1e4, offset=1e4, kind="reverse", beta=0.5)
def test_values_and_gradient_match_float64(seed, rows, vocabulary, scale, distance, offset, kind, beta):
    student, teacher, coef = logits(seed, rows, vocabulary, scale, distance)
    teacher = teacher + offset
    values, gradient = exact(student, teacher, kind, beta, coef)
    arrays = student.clone(), teacher.clone()
    got = tilelang_rows.divergence_(*arrays, kind, beta, coef)
    assert torch.all(got >= 0)
    # Absolute 1e-6 near zero, where the logits themselves are not larger than float32 can tell apart.
    torch.testing.assert_close(got.double(), values.clamp_min(0), rtol=1e-5, atol=1e-6)
    # A gradient p (d - E_p[d]) cancels: its error is relative to d.
    spread = (teacher - student - offset).abs().max().item() if kind == "reverse" else 1.0
    torch.testing.assert_close(arrays[0].double(), gradient, rtol=1e-5, atol=2e-6 * max(1.0, spread))
    without = tilelang_rows.divergence_(student.clone(), teacher.clone(), kind, beta, None)
    assert torch.equal(without, got)


@pytest.mark.parametrize("kind", KINDS)
def test_nearly_equal_models_have_a_divergence_near_zero(kind):
    student, teacher, coef = logits(3, 8, 20000, 2.0, 1e-4)
    values, gradient = exact(student, teacher, kind, 0.5, coef)
    got = tilelang_rows.divergence_(student, teacher, kind, 0.5, coef)
    assert values.max() < 1e-8
    assert (got - values).abs().max() < 1e-6
    # p - t subtracts two probabilities; the other gradients are made from log-ratios.
    assert (student - gradient).abs().max() < (1e-8 if kind == "forward" else 1e-9)
    same = logits(4, 3, 5000, 3.0, 0.0)
    assert torch.equal(tilelang_rows.divergence_(*same[:2], kind, 0.5, None), torch.zeros(3))


@pytest.mark.parametrize("kind", ["reverse", pytest.param("jsd", marks=pytest.mark.slow)])
def test_float64_has_float64_precision(kind):
    student, teacher, coef = logits(5, 4, TILE + 100, 3.0, 1.0, torch.float64)
    values, gradient = exact(student, teacher, kind, 0.3, coef)
    got = tilelang_rows.divergence_(student, teacher, kind, 0.3, coef)
    torch.testing.assert_close(got, values, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(student, gradient, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("place", [0, TILE - 1, TILE + 6])
def test_nan_passes_through_to_its_own_row(kind, side, place):
    arrays = logits(6, 3, TILE + 7, 1.0, 1.0)[:2]
    arrays[side][1, place] = float("nan")
    got = tilelang_rows.divergence_(*arrays, kind, 0.5, None)
    assert got.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_masked_tokens_take_no_probability(kind):
    student, teacher, coef = logits(7, 2, 900, 1.0, 1.0)
    kept = exact(student[:, 700:], teacher[:, 700:], kind, 0.5, coef)
    student[:, :700] = teacher[:, :700] = -1e30
    got = tilelang_rows.divergence_(student, teacher, kind, 0.5, coef)
    torch.testing.assert_close(got.double(), kept[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(student[:, :700], torch.zeros(2, 700))
    torch.testing.assert_close(student[:, 700:].double(), kept[1], rtol=1e-5, atol=1e-6)


def test_a_row_depends_on_no_other_row_and_on_no_thread():
    student, teacher, coef = logits(8, 7, 2 * TILE + 5, 2.0, 1.0)
    together = student.clone()
    values = tilelang_rows.divergence_(together, teacher.clone(), "reverse", 0.5, coef)
    for row in range(7):
        alone = student[row : row + 1].clone()
        value = tilelang_rows.divergence_(
            alone, teacher[row : row + 1].clone(), "reverse", 0.5, coef[row : row + 1]
        )
        assert torch.equal(value, values[row : row + 1])
        assert torch.equal(alone, together[row : row + 1])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        shared = student.clone()
        assert torch.equal(tilelang_rows.divergence_(shared, teacher.clone(), "reverse", 0.5, coef), values)
        assert torch.equal(shared, together)
    finally:
        torch.set_num_threads(threads)


def test_what_it_cannot_take_is_refused():
    student, teacher, _ = logits(9, 2, 10, 1.0, 1.0)
    with pytest.raises(TypeError, match="float32 or float64"):
        tilelang_rows.divergence_(student.half(), teacher.half(), "reverse", 0.5, None)
    with pytest.raises(ValueError, match="contiguous"):
        tilelang_rows.divergence_(student.t(), teacher.t(), "reverse", 0.5, None)
    assert tilelang_rows.divergence_(student[:0], teacher[:0], "reverse", 0.5, None).shape == (0,)


LARGE = ops.LARGE


@pytest.mark.parametrize("kind", ["reverse", pytest.param("forward", marks=pytest.mark.slow)])
def test_a_large_vocabulary_is_the_compiled_kernels_by_default(kind):
    tilelang_rows.trusted.cache_clear()
    student, teacher, coef = logits(10, 3, LARGE, 2.0, 1.0)
    wanted = student.clone()
    values = tilelang_rows.divergence_(wanted, teacher.clone(), kind, 0.5, coef)
    got = student.clone()
    assert torch.equal(tilelang_rows.verified_divergence_(got, teacher.clone(), kind, 0.5, coef), values)
    assert torch.equal(got, wanted)
    assert kind in tilelang_rows.PROVED


def kl_of(student, teacher):
    """`linear_kl` of logits: the identity as hidden states makes the head's weight the logits."""
    hidden = torch.eye(2, dtype=student.dtype)
    return ops.linear_kl(hidden, Head(student.t()), hidden, Head(teacher.t()))


def test_what_is_small_or_wide_stays_pytorchs(monkeypatch):
    monkeypatch.setenv("OPD_KERNELS", "auto")
    monkeypatch.setattr(tilelang_rows, "divergence_", lambda *arguments: pytest.fail("compiled"))
    for vocabulary, dtype in ((LARGE - 1, torch.float32), (LARGE, torch.float64)):
        student, teacher, _ = logits(11, 2, vocabulary, 1.0, 1.0, dtype)
        assert kl_of(student, teacher).isfinite().all()
    with pytest.raises(pytest.fail.Exception, match="compiled"):
        kl_of(*logits(11, 2, LARGE, 1.0, 1.0)[:2])


def wrong_value(student, teacher, kind, beta, coef):
    return divergence_(student, teacher, kind, beta, coef) * (1 + 1e-4)


def wrong_gradient(student, teacher, kind, beta, coef):
    values = divergence_(student, teacher, kind, beta, coef)
    student[:, 7] *= 1.5
    return values


def swallowed_nan(student, teacher, kind, beta, coef):
    return divergence_(student.nan_to_num_(0.0), teacher, kind, beta, coef)


def other_bits(student, teacher, kind, beta, coef, calls=[]):  # noqa: B006 - counts
    calls.append(1)
    return divergence_(student, teacher, kind, beta, coef) + 3e-8 * len(calls)


def raised(student, teacher, kind, beta, coef):
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (wrong_value, "gives other values than float64"),
        (wrong_gradient, "gives another gradient than float64"),
        (swallowed_nan, "gives other values than float64"),
        (other_bits, "gives other bits the second time"),
        (raised, "cannot be compiled or launched .*no such instruction"),
    ],
)
def test_a_kernel_that_fails_its_proof_is_left_aside(kernel, fault, monkeypatch):
    monkeypatch.setattr(tilelang_rows, "divergence_", kernel)
    monkeypatch.setattr(tilelang_rows, "PROVED", set())
    tilelang_rows.trusted.cache_clear()
    student, teacher, coef = logits(12, 3, LARGE, 2.0, 1.0)
    wanted = student.clone()
    values = divergence_(wanted, teacher.clone(), "reverse", 0.5, coef)
    try:
        with pytest.warns(RuntimeWarning, match=f"{fault}.* PyTorch's row kernel is used"):
            got = tilelang_rows.verified_divergence_(student, teacher, "reverse", 0.5, coef)
    finally:
        tilelang_rows.trusted.cache_clear()
    assert torch.equal(got, values)
    assert torch.equal(student, wanted)
    assert not tilelang_rows.PROVED


def test_asking_for_compiled_kernels_without_a_compiler_is_an_error(monkeypatch):
    monkeypatch.setenv("OPD_KERNELS", "tilelang")
    assert ops.implementation().name == "tilelang"
    monkeypatch.setenv("PATH", "/nonexistent")
    tilelang_target.missing.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"cannot run here: .*install"):
            ops.implementation()
    finally:
        tilelang_target.missing.cache_clear()


def test_a_cache_that_cannot_be_made_is_said(monkeypatch):
    monkeypatch.setenv("TILELANG_CACHE_DIR", "/dev/null/cache")
    tilelang_target.missing.cache_clear()
    assert "cache /dev/null/cache cannot be made (Not a directory)" in str(tilelang_target.missing("cpu"))
    tilelang_target.missing.cache_clear()
