"""The loss against a teacher with another tokenizer: values and gradients against the plain softmax,
in float64, and the expected gradient of a chunk against an enumeration.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from opd.config.rl import FullVocabularyKL
from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.kernels.token_classes import TokenClasses
from opd.models.token_alignment import TokenAlignment
from opd.train.aligned_kl import AlignedRows
from opd.train.distill_terms import FullVocabularyTerm, K2Term
from opd.train.packing import teacher_runs
from opd.train.teacher_views import TeacherView
from opd.train.terms import MetricSums, StudentRows

TEMPERATURE = 0.8
FIRST = TokenAlignment(
    np.array([4, 2, 6, 1], np.int32),
    np.array([0, 1, 1, 2]),
    np.array([0, 1, 2, 2]),
    np.array([0, 1, -1, -1]),
)
"""An exact token, two of the student's for one of the teacher's and in one class with it, one for two."""
SECOND = TokenAlignment(np.array([0], np.int32), np.array([0, -1]), np.array([0]), np.array([0, -1]))
"""An exact token, and one without a chunk."""
CLASSES = (
    TokenClasses(torch.tensor([0, 2, 3, 8, 5, 6]), torch.tensor([0, 1, 2, 3, 1, 2]), 4),
    TokenClasses(torch.tensor([4, 0, 5, 7, 2, 6]), torch.tensor([0, 1, 2, 3, 2, 3]), 4),
)


def rows(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Case:
    def __init__(self, alignments=(FIRST, SECOND), bias: bool = True) -> None:
        count = sum(len(one.student_chunks) for one in alignments)
        self.hidden = rows(count, 6, seed=0).requires_grad_()
        self.head = Head(
            rows(9, 6, seed=1).requires_grad_(), rows(9, seed=2).requires_grad_() if bias else None
        )
        self.theirs = Head(rows(8, 5, seed=3), softcap=3.0)
        self.targets = torch.tensor([0, 3, 5, 7, 2, 1])[:count]
        self.weight = rows(count, seed=4).abs()
        states = rows(sum(len(one.teacher_ids) for one in alignments), 5, seed=5)
        aligned = AlignedRows.from_alignments(alignments, CLASSES)
        self.view = TeacherView("t", 1.0, states, self.theirs, aligned)
        self.logits = self.head.logits(self.hidden) / TEMPERATURE
        self.their_logits = self.theirs.logits(states) / TEMPERATURE

    def loss_of(self, term, importance=None):
        student = StudentRows(self.hidden, self.head, self.targets, TEMPERATURE, 2)
        sample = SimpleNamespace(teacher="t", domain="d", response_ids=list(range(len(self.targets))))
        micro = SimpleNamespace(
            targets=self.targets,
            importance=importance,
            kl_weight=self.weight,
            kept=None,
            samples=[sample],
            counted=None,
            runs=teacher_runs([sample]),
            kl_covers=False,
        )
        sums = MetricSums()
        return term(micro, student, sums), sums.means()

    def compare(self, found, wanted):
        torch.testing.assert_close(found, wanted.to(found.dtype), rtol=1e-5, atol=1e-6)

    def compare_gradients(self, found, surrogate):
        inputs = [self.hidden, self.head.weight, self.head.bias]
        ours, theirs = (torch.autograd.grad(one, inputs, retain_graph=True) for one in (found, surrogate))
        for left, right in zip(ours, theirs, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def class_logprobs(logits: torch.Tensor, classes: TokenClasses) -> torch.Tensor:
    """[R, 4]: among all tokens."""
    logprobs = logits.log_softmax(-1)
    parts = [logprobs[:, classes.ids[classes.classes == one]].logsumexp(1) for one in range(4)]
    return torch.stack(parts, 1)


def class_divergence(case: Case, kind: str, beta: float) -> torch.Tensor:
    """[3]: at the student's tokens 0, 1 and 4 and the teacher's of the same places."""
    rows = [0, 1, 4]
    logp = class_logprobs(case.logits[rows], CLASSES[0]).log_softmax(-1)
    logt = class_logprobs(case.their_logits[rows], CLASSES[1]).log_softmax(-1)
    if kind == "reverse":
        return (logp.exp() * (logp - logt)).sum(-1)
    if kind == "forward":
        return (logt.exp() * (logt - logp)).sum(-1)
    logm = torch.logsumexp(torch.stack([logt + np.log(beta), logp + np.log(1 - beta)]), 0)
    return (beta * logt.exp() * (logt - logm) + (1 - beta) * logp.exp() * (logp - logm)).sum(-1)


def given_class(case: Case) -> torch.Tensor:
    """[]: what is to be taken from the ratio of the first chunk, whose tokens are of class 2."""
    sides = ((case.logits[1:2], CLASSES[0]), (case.their_logits[1:2], CLASSES[1]))
    ours, theirs = (class_logprobs(*side)[0, 2] for side in sides)
    return ours - theirs


def chunk_ratios(case: Case) -> torch.Tensor:
    """[2]: of the student's tokens 1 and 2, and of its token 3."""
    logp, logt = case.logits.log_softmax(-1), case.their_logits.log_softmax(-1)
    return torch.stack([logp[1, 3] + logp[2, 5] - logt[1, 2], logp[3, 7] - logt[2, 6] - logt[3, 1]])


@pytest.mark.parametrize(("kind", "beta"), [("reverse", 0.5), ("forward", 0.5), ("jsd", 0.3)])
def test_starts_have_the_divergence_over_classes_and_chunks_their_ratio_given_it(kind, beta):
    case = Case()
    term = FullVocabularyTerm(lambda micro: [case.view], "one_hot", FullVocabularyKL(kind=kind, beta=beta))
    found, said = case.loss_of(term)
    exact, ratios, weight = class_divergence(case, kind, beta), chunk_ratios(case), case.weight
    ratios = torch.stack([ratios[0] - given_class(case), ratios[1]])
    whole = weight[0] * exact[0] + weight[1] * exact[1] + weight[4] * exact[2]
    shares = torch.stack([(weight[1] + weight[2]) / 2, weight[3]])
    case.compare(found, whole + (shares * ratios).sum())
    case.compare_gradients(found, whole + (shares * ratios**2 / 2).sum())
    measured = [said[f"align/{name}"] for name in ("exact", "chunk", "none")]
    assert measured == pytest.approx([3 / 6, 2 / 6, 1 / 6])
    for name, logits, classes in zip(
        ("outside", "teacher_outside"), (case.logits, case.their_logits), CLASSES, strict=True
    ):
        inside = class_logprobs(logits[[0, 1, 4]], classes).exp().sum(-1)
        assert said[f"align/{name}"] == pytest.approx(1 - inside.mean().item(), rel=1e-4)


@pytest.mark.parametrize("importance", [None, [1.0, 2.0, 0.5, 3.0, 0.0, 1.0]])
def test_k2_compares_all_of_them_as_chunks(importance):
    case = Case()
    given = None if importance is None else torch.tensor(importance, dtype=torch.float64)
    found, said = case.loss_of(K2Term(lambda micro: [case.view], "one_hot"), given)
    logp, logt = case.logits.log_softmax(-1), case.their_logits.log_softmax(-1)
    ratios = torch.stack([logp[0, 0] - logt[0, 4], *chunk_ratios(case), logp[4, 2] - logt[4, 0]])
    each = torch.tensor([1.0, 1.0, 3.0, 0.0] if importance else [1.0] * 4)
    weight = case.weight
    weights = torch.stack([weight[0], (weight[1] + weight[2]) / 2, weight[3], weight[4]])
    case.compare(found, (weights * ratios).sum())
    case.compare_gradients(found, (weights * each * ratios**2 / 2).sum())
    assert "align/outside" not in said


def test_the_expected_gradient_of_a_chunk_is_that_of_the_divergence_between_chunks():
    """Two tokens of the student for one of the teacher: over all pairs, weighted by their probability."""
    first, second = rows(1, 3, seed=0).requires_grad_(), rows(3, 3, seed=1).requires_grad_()
    teacher = rows(9, seed=2).log_softmax(0)
    logp = (first.log_softmax(-1).T + second.log_softmax(-1)).reshape(-1)
    exact = torch.autograd.grad((logp.exp() * (logp - teacher)).sum(), (first, second), retain_graph=True)
    sampled = torch.autograd.grad((logp.exp().detach() * (logp - teacher) ** 2 / 2).sum(), (first, second))
    for left, right in zip(exact, sampled, strict=True):
        torch.testing.assert_close(left, right)


def test_ranks_that_share_a_response_are_refused():
    with pytest.raises(TeacherError, match="tokenizer of its own"):
        Case().view.select_rows(torch.tensor([0]))


@pytest.mark.parametrize("kind", ["full", "k2"])
def test_a_response_that_the_teacher_cannot_write_adds_nothing(kind):
    nothing = TokenAlignment(np.zeros(0, np.int32), np.full(2, -1), np.zeros(0, np.int64), np.full(2, -1))
    case = Case((nothing,))
    one = (lambda micro: [case.view]), "one_hot"
    term = FullVocabularyTerm(*one, FullVocabularyKL()) if kind == "full" else K2Term(*one)
    found, said = case.loss_of(term)
    assert found.item() == 0.0
    assert said["align/none"] == 1.0
    for gradient in torch.autograd.grad(found, [case.hidden, case.head.weight, case.head.bias]):
        assert not gradient.any()
