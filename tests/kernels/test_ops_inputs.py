"""What the operations refuse, and the sentences they refuse it with; the choice of implementation."""

import subprocess
import sys

import pytest
import torch

from opd.kernels import chunked, ops, reference, tilelang_target, triton_rows
from opd.kernels.head import Head

STUDENT, TEACHER = Head(torch.ones(5, 3)), Head(torch.ones(5, 2))


def call(**changes):
    """A valid `linear_kl` call with some arguments replaced."""
    arguments = {
        "student_hidden": torch.ones(4, 3),
        "student_head": STUDENT,
        "teacher_hidden": torch.ones(4, 2),
        "teacher_head": TEACHER,
        **changes,
    }
    return ops.linear_kl(**arguments)


def with_nan(token: int, width: int, value: float = torch.nan) -> torch.Tensor:
    hidden = torch.ones(4, width)
    hidden[token, -1] = value
    return hidden


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"teacher_head": Head(torch.ones(6, 2))},
            ValueError,
            "vocabulary has 5 tokens and the teacher's 6; set",
        ),
        ({"student_hidden": torch.ones(4, 2)}, ValueError, r"student hidden states have shape \[4, 2\]"),
        ({"teacher_hidden": torch.ones(4)}, ValueError, r"teacher hidden states have shape \[4\]"),
        ({"teacher_hidden": torch.ones(3, 2)}, ValueError, "student has 4 tokens and the teacher 3"),
        ({"student_hidden": torch.ones(4, 3).long()}, TypeError, "student hidden states are torch.int64"),
        ({"student_hidden": torch.ones(4, 3, device="meta")}, ValueError, "on meta and the head on cpu"),
        ({"kind": "backward"}, ValueError, "kind is 'backward'"),
        ({"kind": "jsd", "beta": 1.0}, ValueError, "beta is 1.0"),
        ({"temperature": 0.0}, ValueError, "temperature is 0.0"),
        ({"temperature": float("nan")}, ValueError, "temperature is nan"),
        ({"chunk": 0}, ValueError, "chunk is 0"),
        ({"weight": torch.ones(3)}, ValueError, r"weight has shape \[3\]"),
        ({"weight": torch.ones(4).bool()}, TypeError, "weight is torch.bool"),
        ({"weight": torch.tensor([1, 1, torch.inf, 1])}, FloatingPointError, r"weight\[2\] is inf"),
        ({"student_hidden": with_nan(2, 3)}, FloatingPointError, "student hidden state of token 2 "),
        (
            {"teacher_hidden": with_nan(3, 2, torch.inf)},
            FloatingPointError,
            "teacher hidden state of token 3 ",
        ),
        (
            {"student_head": Head(with_nan(3, 3).repeat(2, 1)[:5])},
            FloatingPointError,
            "of token 0 is not finite",
        ),
    ],
)
def test_linear_kl_refuses(kernels: str, changes, error, words) -> None:
    assert call().shape == (4,)
    with pytest.raises(error, match=words):
        call(**changes)


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        (torch.zeros(4), TypeError, "ids are torch.float32"),
        (torch.zeros(3).long(), ValueError, r"ids have shape \[3\]"),
        (torch.zeros(4, 2, 2).long(), ValueError, "ids have shape"),
        (torch.tensor([0, 5, 0, 0]), ValueError, r"ids\[1\] is 5; the vocabulary has ids 0 to 4"),
        (torch.tensor([[0], [0], [-100], [0]]), ValueError, r"ids\[2, 0\] is -100"),
    ],
)
def test_ids_are_checked(ids: torch.Tensor, error: type[Exception], words: str) -> None:
    for function in (ops.linear_logprobs, ops.linear_logprobs_entropy):
        with pytest.raises(error, match=words):
            function(torch.ones(4, 3), STUDENT, ids)


def test_other_operations_name_the_token_with_a_nan() -> None:
    spoiled, ids = with_nan(1, 3), torch.zeros(4).long()
    message = "hidden state of token 1 "
    with pytest.raises(FloatingPointError, match=message):
        ops.linear_logprobs(spoiled, STUDENT, ids)
    with pytest.raises(FloatingPointError, match=message):
        ops.linear_topk(spoiled, STUDENT, 2)
    with pytest.raises(FloatingPointError, match=f"teacher 1 {message}"):
        ops.geometric_floor([torch.ones(4, 3), spoiled], [STUDENT, STUDENT], [0.5, 0.5])
    with pytest.raises(FloatingPointError, match=f"teacher 0 {message}"):
        ops.linear_mixture_kl(torch.ones(4, 3), STUDENT, [spoiled], [STUDENT], [1.0])


@pytest.mark.parametrize("weights", [[0.5, 0.4], [1.5, -0.5], [1.0], []])
def test_mixture_weights_are_checked(weights: list[float]) -> None:
    hiddens, heads = [torch.ones(4, 3)] * 2, [STUDENT] * 2
    with pytest.raises(ValueError, match="weights"):
        ops.geometric_floor(hiddens, heads, weights)
    with pytest.raises(ValueError, match="weights"):
        ops.linear_mixture_kl(torch.ones(4, 3), STUDENT, hiddens, heads, weights)


@pytest.mark.parametrize("k", [0, 6])
def test_topk_refuses_a_k_outside_the_vocabulary(k: int) -> None:
    with pytest.raises(ValueError, match=f"k is {k}"):
        ops.linear_topk(torch.ones(4, 3), STUDENT, k)


def test_implementation_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in (("chunked", chunked), ("reference", reference)):
        monkeypatch.setenv("OPD_KERNELS", name)
        assert ops.implementation() is module
    monkeypatch.setenv("OPD_KERNELS", "fastest")
    with pytest.raises(
        ValueError, match="OPD_KERNELS is 'fastest'; set it to one of auto, chunked, reference"
    ):
        call()


def test_kernels_that_no_gpu_has_run_are_not_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tilelang_target, "missing", lambda device: None)
    monkeypatch.setenv("OPD_KERNELS", "auto")
    assert ops.implementation().name == "rows"  # which are TileLang's on a CPU alone
    monkeypatch.setenv("OPD_KERNELS", "tilelang")
    assert ops.implementation().name == "tilelang"


def test_large_vocabularies_are_compiled_where_a_compiler_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPD_KERNELS", raising=False)
    monkeypatch.setattr(triton_rows, "missing", lambda: "no CUDA device can be used")
    monkeypatch.setattr(tilelang_target, "missing", lambda device: None)
    assert ops.implementation().name == "rows"
    monkeypatch.setattr(tilelang_target, "missing", lambda device: "TileLang is not installed")
    assert ops.implementation() is chunked


def test_every_implementation_has_every_operation() -> None:
    names = [name for name in ops.__all__ if name not in ("Head", "implementation")]
    for module in (chunked, reference):
        assert all(callable(getattr(module, name)) for name in names)


def test_importing_the_kernels_loads_no_other_part_of_the_package() -> None:
    code = "import sys, opd.kernels.ops; print([m for m in sys.modules if m.startswith('opd.')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "opd.kernels.ops" in result.stdout
    assert all(name.strip(" '[]\n").startswith("opd.kernels") for name in result.stdout.split(","))


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between rows and between columns."""
    gap = torch.nan if tensor.is_floating_point() else -1
    room = torch.full((2 * tensor.shape[0], 3 * tensor.shape[1]), gap, dtype=tensor.dtype)
    view = room[::2, ::3]
    return view.copy_(tensor)


LAYOUTS = {
    "strided": strided,
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "repeated": lambda tensor: tensor[:1].expand_as(tensor),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_memory_layout_gives_the_same(kernels: str, dtype, layout) -> None:
    generator = torch.Generator().manual_seed(0)

    def results(arrange) -> list[torch.Tensor]:
        generator.manual_seed(0)
        hidden, weight, teacher, teacher_weight = (
            arrange(torch.randn(*shape, generator=generator).to(dtype)).requires_grad_()
            for shape in ((6, 4), (40, 4), (6, 3), (40, 3))
        )
        head, teacher_head = Head(weight), Head(teacher_weight)
        values = ops.linear_kl(hidden, head, teacher, teacher_head, chunk=4)
        ids = arrange(torch.randint(0, 40, (6, 2), generator=generator))
        logprobs = ops.linear_logprobs(hidden, head, ids, chunk=4)
        gradients = torch.autograd.grad(values.sum() + logprobs.sum(), (hidden, weight))
        return [values, logprobs, *gradients]

    plain = LAYOUTS[layout](torch.zeros(2, 2)).stride() != (2, 1)
    assert plain
    expected = results(lambda tensor: LAYOUTS[layout](tensor).contiguous())
    for got, contiguous in zip(results(LAYOUTS[layout]), expected, strict=True):
        torch.testing.assert_close(got, contiguous, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_mixed_dtypes_are_widened() -> None:
    hidden = torch.ones(4, 3, dtype=torch.bfloat16).requires_grad_()
    weight = torch.arange(15.0).reshape(5, 3).requires_grad_()
    values = call(student_hidden=hidden, student_head=Head(weight))
    assert values.dtype == torch.float32
    gradients = torch.autograd.grad(values.sum(), (hidden, weight))
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32]
