"""The compiled row kernel on a real GPU, against float64 and against PyTorch's."""

import pytest
import torch

from opd.kernels import divergences, triton_rows, triton_tokens
from opd.kernels.divergences import divergence_
from opd.kernels.head import Head
from opd.kernels.ops import linear_kl, linear_mixture_kl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton_rows.missing() is not None, reason=str(triton_rows.missing())),
]
SHAPES = [(1, 1), (3, 7), (64, 2048), (65, 2049), (5, 50257), (130, 151936)]


def logits(shape: tuple[int, int], spread: float, offset: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    student = torch.randn(*shape, device="cuda", generator=generator) * spread
    return student, student + torch.randn(*shape, device="cuda", generator=generator) + offset


@pytest.mark.parametrize("kind", triton_rows.KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("spread", "offset"), [(0.1, 0.0), (4.0, 0.0), (30.0, 0.0), (2.0, -100.0)])
def test_values_and_gradient_are_those_of_float64(kind, shape, spread, offset):
    student, teacher = logits(shape, spread, offset)
    coef = torch.rand(len(student), device="cuda")
    exact = student.double()
    values = divergence_(exact, teacher.double(), kind, 0.3, coef.double())
    got_student = student.clone()
    got = triton_rows.launch_rows(got_student, teacher.clone(), kind, 0.3, coef, None)
    size = max(1.0, float(student.abs().max()), abs(offset)) / 8
    torch.testing.assert_close(got.double(), values, rtol=1e-5, atol=2e-6 * size)
    torch.testing.assert_close(got_student.double(), exact, rtol=1e-4, atol=2e-6 * size)


@pytest.mark.parametrize("kind", triton_rows.KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rounded_gradient_is_the_wide_one_rounded_in_its_own_memory(kind, shape):
    student, teacher = logits(shape, 3.0)
    coef = torch.rand(len(student), device="cuda")
    wide, room = student.clone(), student.clone()
    values = triton_rows.launch_rows(wide, teacher.clone(), kind, 0.3, coef, None)
    narrow = divergences.first_halves(room)
    again = triton_rows.launch_rows(room, teacher.clone(), kind, 0.3, coef, narrow)
    # Another compilation, whose sums may have another order.
    torch.testing.assert_close(values, again, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(narrow.float(), wide, rtol=2**-8, atol=1e-5 * float(wide.abs().max()))


@pytest.mark.parametrize("kind", triton_rows.KINDS)
@pytest.mark.parametrize("vocabulary", [32000, 32003])
def test_a_row_does_not_depend_on_the_others_and_keeps_its_bits(kind, vocabulary):
    student, teacher = logits((37, vocabulary), 3.0)
    coef = torch.rand(37, device="cuda")
    whole = student.clone()
    values = triton_rows.launch_rows(whole, teacher.clone(), kind, 0.3, coef, None)
    for take in (slice(5, 6), slice(10, 30)):
        part = student[take].clone()
        got = triton_rows.launch_rows(part, teacher[take].clone(), kind, 0.3, coef[take].clone(), None)
        assert torch.equal(got, values[take])
        assert torch.equal(part, whole[take])


@pytest.mark.parametrize("kind", triton_rows.KINDS)
@pytest.mark.parametrize("vocabulary", [17, 32003, 151936])
def test_it_is_trusted_here(kind, vocabulary):
    assert triton_rows.trusted(kind, vocabulary, torch.device("cuda", 0))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("spread", "offset"), [(0.1, 0.0), (4.0, 0.0), (30.0, -100.0)])
def test_single_tokens_are_those_of_float64(shape, width, entropy, spread, offset):
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"device": "cuda", "generator": generator}
    given = torch.randn(*shape, **options) * spread + offset
    ids = torch.randint(shape[1], (shape[0], width), **options)
    coef, of_entropy = torch.randn(shape[0], width, **options), torch.randn(shape[0], **options)
    exact = given.double()
    values = divergences.token_statistics_(exact.clone(), ids, entropy)
    wide_entropy = of_entropy.double() if entropy else None
    divergences.token_gradient_(exact, ids, coef.double(), wide_entropy)
    got, room = given.clone(), given.clone()
    for found, value in zip(triton_tokens.launch_statistics(given, ids, entropy), values, strict=True):
        torch.testing.assert_close(found.double(), value, rtol=1e-5, atol=1e-4 if offset else 1e-5)
    narrow = divergences.first_halves(room)
    narrow_entropy = of_entropy if entropy else None
    triton_tokens.launch_gradient(got, ids, coef, narrow_entropy, None)
    triton_tokens.launch_gradient(room, ids, coef, narrow_entropy, narrow)
    near = 1e-5 * float(coef.abs().max())
    torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=near)
    torch.testing.assert_close(narrow.float(), got, rtol=2**-8, atol=near)


@pytest.mark.parametrize("vocabulary", [17, 32003, 151936])
def test_single_tokens_are_trusted_here(vocabulary):
    assert triton_tokens.trusted(vocabulary, torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [{}, {"softcap": 5.0}, {"scale": 0.3}, {"vocab_size": 3000}])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [64, 1024])
def test_the_operation_is_that_of_the_reference(dtype, form, bias, chunk, monkeypatch):
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, device="cuda", generator=generator) * scale).to(dtype)

    hidden, weight = normal(200, 96), normal(3001, 96, scale=0.3)
    shift = normal(3001) if bias else None
    other, other_weight = normal(200, 64), normal(3001, 64, scale=0.3)
    token_weight = torch.rand(200, device="cuda", generator=generator)
    found = {}
    for name in ("triton", "reference"):
        monkeypatch.setenv("OPD_KERNELS", name)
        cast = torch.float64 if name == "reference" else dtype
        h = hidden.to(cast, copy=True).requires_grad_()
        w = weight.to(cast, copy=True).requires_grad_()
        b = None if shift is None else shift.to(cast, copy=True).requires_grad_()
        teacher_head = Head(other_weight.to(cast), vocab_size=form.get("vocab_size"))
        values = linear_kl(
            h,
            Head(w, b, **form),
            other.to(cast),
            teacher_head,
            weight=token_weight,
            chunk=chunk,
            temperature=0.7,
        )
        (values * token_weight.to(values.dtype)).sum().backward()
        found[name] = [values, h.grad, w.grad] + ([] if b is None else [b.grad])
    unit = {torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-8}[dtype]
    torch.testing.assert_close(found["triton"][0].double(), found["reference"][0], rtol=1e-4, atol=1e-5)
    for got, exact in zip(found["triton"][1:], found["reference"][1:], strict=True):
        assert float((got.double() - exact).norm() / exact.norm()) < unit


def test_a_mixture_too(monkeypatch):
    generator = torch.Generator("cuda").manual_seed(1)
    options = {"device": "cuda", "generator": generator}
    hidden, weight = torch.randn(50, 32, **options), torch.randn(1001, 32, **options)
    teachers = [torch.randn(50, 32, **options) for _ in range(2)]
    heads = [torch.randn(1001, 32, **options) for _ in range(2)]
    found = []
    for name, cast in (("triton", torch.float32), ("reference", torch.float64)):
        monkeypatch.setenv("OPD_KERNELS", name)
        h = hidden.to(cast, copy=True).requires_grad_()
        values = linear_mixture_kl(
            h,
            Head(weight.to(cast)),
            [t.to(cast) for t in teachers],
            [Head(x.to(cast)) for x in heads],
            [0.3, 0.7],
        )
        values.sum().backward()
        found.append((values.double(), h.grad.double()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-4)
