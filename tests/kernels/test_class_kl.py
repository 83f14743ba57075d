"""The divergence over classes of tokens against float64 enumeration: values, gradients and bad input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kl_problems import KINDS, for_each_implementation, true_divergence

from opd.kernels.head import Head
from opd.kernels.ops import linear_class_kl, linear_kl
from opd.kernels.token_classes import TokenClasses


def partition(draw: torch.Generator, vocabulary: int, count: int) -> TokenClasses:
    """Return `count` classes of most of a vocabulary's tokens."""
    ids = torch.randperm(vocabulary, generator=draw)[
        : torch.randint(count, vocabulary + 1, (), generator=draw)
    ]
    others = torch.randint(0, count, (len(ids) - count,), generator=draw)
    return TokenClasses(ids, torch.cat([torch.arange(count), others]), count)


def class_logits(logits: torch.Tensor, classes: TokenClasses) -> torch.Tensor:
    parts = [logits[:, classes.ids[classes.classes == one]].logsumexp(1) for one in range(classes.count)]
    return torch.stack(parts, 1)


class Case:
    def __init__(self, seed: int, *, dtype=torch.float32, softcap=None, bias=True, count=4) -> None:
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (scale * torch.randn(*shape, generator=draw, dtype=torch.float64)).to(dtype)

        self.hidden = normal(6, 3, scale=2.0).requires_grad_()
        self.weight, self.bias = normal(9, 3).requires_grad_(), normal(9).requires_grad_() if bias else None
        self.theirs, self.teacher = normal(6, 5), Head(normal(12, 5), scale=1.5)
        self.classes = partition(draw, 8, count), partition(draw, 12, count)
        self.token_weight = torch.tensor([1.0, 0.0, 2.0, -0.5, 0.3, 1.0]).to(dtype)
        self.softcap = softcap

    def run(self, kind: str, hidden, head_weight, bias, **options) -> torch.Tensor:
        head = Head(head_weight, bias, scale=0.7, softcap=self.softcap, vocab_size=8)
        options = {"beta": 0.3, "temperature": 1.3, "chunk": 4} | options
        return linear_class_kl(hidden, head, self.theirs, self.teacher, self.classes, kind=kind, **options)

    def exact(self, kind: str, leaves) -> torch.Tensor:
        hidden, weight, bias = leaves
        head = Head(weight, bias, scale=0.7, softcap=self.softcap, vocab_size=8)
        teacher = Head(self.teacher.weight.double(), scale=1.5)
        sides = (head.logits(hidden), teacher.logits(self.theirs.double()))
        grouped = [class_logits(one / 1.3, classes) for one, classes in zip(sides, self.classes, strict=True)]
        return true_divergence(*grouped, kind, 0.3)


@for_each_implementation
@settings(max_examples=24, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10_000),
    softcap=st.sampled_from([None, 3.0]),
    bias=st.booleans(),
)
def test_values_and_gradients_are_those_of_the_classes(kind, seed, softcap, bias):
    case = Case(seed, softcap=softcap, bias=bias)
    leaves = [case.hidden, case.weight, case.bias]
    doubled = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    values, exact = case.run(kind, *leaves, weight=case.token_weight), case.exact(kind, doubled)
    kept = case.token_weight != 0
    torch.testing.assert_close(values[kept].double(), exact[kept], rtol=1e-5, atol=2e-6)
    assert (values[~kept] == 0).all()
    (values * case.token_weight).sum().backward()
    (exact * case.token_weight.double()).sum().backward()
    for leaf, other in zip(leaves, doubled, strict=True):
        if leaf is not None:
            torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    case = Case(3, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda *leaves: case.run(kind, *leaves), (case.hidden, case.weight, case.bias)
    )


def test_classes_of_one_token_each_are_the_tokens():
    case = Case(5, count=8)
    case.teacher = Head(case.teacher.weight[:8])
    alone = TokenClasses(torch.arange(8), torch.arange(8), 8)
    case.classes = alone, alone
    head = Head(case.weight, case.bias, scale=0.7, vocab_size=8)
    wanted = linear_kl(case.hidden, head, case.theirs, case.teacher, temperature=1.3)
    torch.testing.assert_close(case.run("reverse", case.hidden, case.weight, case.bias), wanted)


def test_large_logits_and_unlikely_classes_stay_finite():
    case = Case(7)
    case.theirs = case.theirs * 300
    values = case.run("reverse", case.hidden * 300, case.weight, case.bias)
    values.sum().backward()
    assert torch.isfinite(values).all()
    assert torch.isfinite(case.hidden.grad).all()


def test_members_and_classes_of_tokens():
    classes = TokenClasses(torch.tensor([4, 2, 7, 0, 5]), torch.tensor([0, 1, 2, 0, 2]), 3)
    ids, is_member = classes.members(torch.tensor([2, 1]))
    assert [row[kept].tolist() for row, kept in zip(ids, is_member, strict=True)] == [[7, 5], [2]]
    assert classes.classes_of(torch.tensor([0, 7, 2])).tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    ("ours", "sentence"),
    [
        (TokenClasses(torch.arange(3), torch.arange(3), 3), "has 3 classes|have 3 classes"),
        (TokenClasses(torch.tensor([0, 1, 2, 8]), torch.arange(4), 4), "vocabulary has ids 0 to 7"),
    ],
)
def test_classes_that_do_not_fit_are_one_sentence(ours, sentence):
    case = Case(1)
    case.classes = ours, case.classes[1]
    with pytest.raises(ValueError, match=sentence):
        case.run("reverse", case.hidden, case.weight, case.bias)
