"""`Head`: its formula, its slice of the vocabulary, and what it refuses."""

import math

import pytest
import torch

from opd.kernels.head import Head


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_logits_follow_the_formula_term_by_term() -> None:
    weight, bias, hidden = normal(7, 3), normal(7), normal(4, 3)
    head = Head(weight, bias, scale=0.25, softcap=2.0, vocab_size=5)
    logits = head.logits(hidden)
    assert logits.shape == (4, 5)
    for n in range(4):
        for v in range(5):
            plain = 0.25 * (sum(float(hidden[n, d] * weight[v, d]) for d in range(3)) + float(bias[v]))
            assert float(logits[n, v]) == pytest.approx(2.0 * math.tanh(plain / 2.0), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_narrow_dtypes_are_float32_without_rounding_the_products(dtype: torch.dtype) -> None:
    weight, hidden = normal(9, 16, dtype=dtype), normal(5, 16, dtype=dtype)
    logits = Head(weight).logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), hidden.double() @ weight.double().t(), rtol=0, atol=1e-5)


def test_gradient_reaches_the_parameter_itself_and_not_its_padding() -> None:
    weight = torch.nn.Parameter(normal(6, 3, dtype=torch.float32))
    Head(weight, vocab_size=4).logits(normal(2, 3, dtype=torch.float32)).sum().backward()
    assert weight.grad is not None
    assert weight.grad[:4].abs().sum() > 0
    assert weight.grad[4:].abs().sum() == 0


def test_sizes() -> None:
    head = Head(normal(6, 3, dtype=torch.bfloat16), normal(6, dtype=torch.float32), vocab_size=5)
    assert (head.vocabulary, head.hidden_size, head.nbytes) == (5, 3, 6 * 3 * 2 + 6 * 4)
    assert Head(normal(6, 3)).vocabulary == 6


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"weight": torch.zeros(4, 2, dtype=torch.int64)}, TypeError, "weight is torch.int64"),
        ({"weight": torch.zeros(4)}, ValueError, r"\[V, D\]"),
        ({"weight": torch.zeros(4, 2), "bias": torch.zeros(3)}, ValueError, r"bias has shape \[3\]"),
        ({"weight": torch.zeros(4, 2), "bias": torch.zeros(4).long()}, TypeError, "bias is torch.int64"),
        ({"weight": torch.zeros(4, 2), "scale": math.nan}, ValueError, "scale is nan"),
        ({"weight": torch.zeros(4, 2), "softcap": 0.0}, ValueError, "softcap is 0.0"),
        ({"weight": torch.zeros(4, 2), "vocab_size": 5}, ValueError, "vocab_size is 5"),
        ({"weight": torch.zeros(4, 2), "vocab_size": 0}, ValueError, "vocab_size is 0"),
    ],
)
def test_refuses(arguments: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Head(**arguments)
