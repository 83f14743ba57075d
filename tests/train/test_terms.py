"""What each term makes of a micro-batch, against the plain softmax: values, gradients, shares, rows."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from opd.config.distill import DistillConfig
from opd.config.rl import FullVocabularyKL, TopKKL
from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.train.distill_terms import FullVocabularyTerm, K2Term, TopKTerm, build_distill_term
from opd.train.losses import topk_reverse_kl
from opd.train.packing import teacher_runs
from opd.train.teacher_views import ScoredView, TeacherView
from opd.train.terms import MetricSums, MismatchProbe, StudentRows

TOKENS, DIM, VOCABULARY, TEMPERATURE = 5, 6, 11, 0.8


class Case:
    """Five tokens of one sample and two teachers, with shares that are not each other's."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        draw = partial(torch.randn, generator=generator)
        self.hidden = draw(TOKENS, DIM).requires_grad_()
        heads = [Head(draw(VOCABULARY, DIM)) for _ in range(3)]
        states = [draw(TOKENS, DIM) for _ in range(2)]
        self.views = [
            TeacherView(name, weight, state, head)
            for name, weight, state, head in zip("ab", (0.8, 0.2), states, heads[1:], strict=True)
        ]
        self.targets = torch.tensor([3, 0, 10, 7, 3])
        self.weight = torch.tensor([0.5, 0.0, 1.0, 0.25, 2.0])
        self.student = StudentRows(self.hidden, heads[0], self.targets, TEMPERATURE, 2)
        self.logp = (self.hidden @ heads[0].weight.T / TEMPERATURE).log_softmax(-1)
        self.logt = [(v.hidden @ v.head.weight.T / TEMPERATURE).log_softmax(-1) for v in self.views]

    def micro(self, **changes):
        sample = SimpleNamespace(
            counted=None, kl_covers=False, teacher="mix", domain="d", response_ids=list(range(TOKENS))
        )
        given = {"targets": self.targets, "importance": None, "kl_weight": self.weight, "kept": None}
        shared = {"counted": None, "kl_covers": False, "samples": [sample], "runs": teacher_runs([sample])}
        return SimpleNamespace(**shared | given | changes)

    def kl_to(self, logt):
        return (self.logp.exp() * (self.logp - logt)).sum(1)

    def of_written(self, logprobs):
        return logprobs.gather(1, self.targets[:, None]).squeeze(1)

    def compare(self, term, per_token, gradient_of=None, **changes):
        """The loss is the weighted sum of `per_token`, with the gradient of that of `gradient_of`."""
        sums = MetricSums()
        micro = self.micro(**changes)
        found = term(micro, self.student, sums)
        torch.testing.assert_close(found, (micro.kl_weight * per_token).sum(), rtol=1e-5, atol=1e-5)
        wanted = (micro.kl_weight * (per_token if gradient_of is None else gradient_of)).sum()
        ours, theirs = (
            torch.autograd.grad(one, self.hidden, retain_graph=True)[0] for one in (found, wanted)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        counted = per_token.detach()[micro.kl_weight != 0].mean().item()
        said = sums.means()
        assert said["kl/mean"] == pytest.approx(counted, rel=1e-4)


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("importance", [None, [1.0, 2.0, 0.5, 3.0, 0.0]])
def test_k2_is_told_as_the_log_ratio_and_has_the_gradient_of_its_square(scored, importance):
    case = Case()
    theirs = case.of_written(case.logt[0])
    view = ScoredView("a", 1.0, theirs) if scored else replace(case.views[0], weight=1.0)
    ratio = case.of_written(case.logp) - theirs
    given = None if importance is None else torch.tensor(importance)
    square = ratio**2 / 2 if given is None else given * ratio**2 / 2
    case.compare(K2Term(lambda micro: [view], "one_hot"), ratio, square, importance=given)


@pytest.mark.parametrize("mixture", ["geometric", "arithmetic"])
def test_several_teachers_count_by_their_shares(mixture):
    case = Case()
    term = FullVocabularyTerm(lambda micro: case.views, mixture, FullVocabularyKL())
    if mixture == "geometric":
        each = [view.weight * case.kl_to(logt) for view, logt in zip(case.views, case.logt, strict=True)]
        case.compare(term, sum(each))
    else:
        mixed = sum(view.weight * logt.exp() for view, logt in zip(case.views, case.logt, strict=True))
        case.compare(term, case.kl_to(mixed.log()))


def test_a_term_that_knows_no_mixture_says_so():
    case = Case()
    with pytest.raises(TypeError, match="K2Term cannot score an arithmetic mixture"):
        K2Term(lambda micro: case.views, "arithmetic")(case.micro(), case.student, MetricSums())


def test_tokens_without_a_teacher_have_no_loss():
    case = Case()
    micro, sums = case.micro(), MetricSums()
    micro.samples[0].teacher = None
    term = FullVocabularyTerm(lambda micro: case.views, "geometric", FullVocabularyKL())
    assert term(micro, case.student, sums).item() == 0.0
    assert sums.means() == {}


@pytest.mark.parametrize("scored", [False, True])
def test_a_rank_that_has_some_of_the_tokens_takes_those_of_the_teacher(scored):
    """Of a scored teacher's most likely tokens, too; where they stand in the sample is what they count at."""
    case = Case()
    kept = torch.tensor([1, 2, 4])
    (logt, *_), (view, *_) = case.logt, case.views
    top = logt.topk(3)
    view = (
        ScoredView("a", 1.0, case.of_written(logt), top.indices, top.values)
        if scored
        else replace(view, weight=1.0)
    )
    case.student = StudentRows(case.hidden[kept], case.student.head, case.targets[kept], TEMPERATURE, chunk=2)
    term = TopKTerm(lambda micro: [view], "one_hot", TopKKL(k=3, form="truncated"))
    support, teacher = top.indices[kept], top.values[kept]
    student = case.logp[kept].gather(1, support)
    expected = topk_reverse_kl(student, teacher, form="truncated")
    case.compare(term, expected, targets=case.targets[kept], kl_weight=case.weight[kept], kept=kept)
    sums = MetricSums()
    term(case.micro(targets=case.targets[kept], kl_weight=torch.ones(3), kept=kept), case.student, sums)
    places = {"kl_at/2": expected[:2].mean(), "kl_at/4": expected[2]}  # tokens 2 and 3, and 5
    assert {key: sums.means()[key] for key in places} == pytest.approx(
        {key: value.item() for key, value in places.items()}, rel=1e-4
    )


@pytest.mark.parametrize("columns", [None, 2])
def test_a_teacher_that_told_too_few_tokens_is_named(columns):
    case = Case()
    top = None if columns is None else case.logt[0].topk(columns)
    known = (None, None) if top is None else (top.indices, top.values)
    view = ScoredView("a", 1.0, case.of_written(case.logt[0]), *known)
    term = TopKTerm(lambda micro: [view], "one_hot", TopKKL(k=3))
    with pytest.raises(
        TeacherError, match=r"no log-probabilities of its 3 most likely .* teachers\.a\.signal"
    ):
        term(case.micro(), case.student, MetricSums())


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        ({"type": "full"}, FullVocabularyTerm),
        ({"type": "topk"}, TopKTerm),
        ({"type": "k2"}, K2Term),
        ({"type": "k1"}, type(None)),
    ],
)
def test_each_loss_of_a_recipe_has_its_term(loss, kind):
    assert type(build_distill_term(DistillConfig(loss=loss), lambda micro: [])) is kind


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kept", [None, [1, 2, 4]])
def test_a_probe_compares_the_tokens_that_count_and_tells_the_entropy_where_asked(shared, kept):
    case = Case()
    rows = torch.arange(TOKENS) if kept is None else torch.tensor(kept)
    case.student = StudentRows(case.hidden[rows], case.student.head, case.targets[rows], TEMPERATURE, 2)
    counted = np.array([True, False, True, True, True])
    drawn = np.float32(case.of_written(case.logp).detach()) - np.float32([0.5, 9.0, 0.25, 0.125, 0.0])
    kept = None if kept is None else rows
    micro = case.micro(targets=case.targets[rows], kept=kept)
    micro.samples[0].loss_mask, micro.samples[0].rollout_logprobs = counted, drawn
    micro.samples[0].domain = "a"
    plain, full = MismatchProbe(shared=shared), MismatchProbe(entropy=True, shared=shared)
    sums = [MetricSums(), MetricSums()]
    for probe, own in zip((plain, full), sums, strict=True):
        assert probe(micro, case.student, own).item() == 0.0
    entropy = -(case.logp.exp() * case.logp).sum(1).detach()[rows][torch.tensor(counted)[rows]]
    assert sums[0].means() == {}
    assert sums[1].means() == {"entropy": pytest.approx(entropy.mean().item(), rel=1e-4)}
    apart = np.array([0.5, 9.0, 0.25, 0.125, 0.0])[rows][counted[rows]]
    found = plain.drain_metrics()
    assert found["mismatch/mean_abs"] == pytest.approx(apart.mean(), rel=1e-3)
    assert found["mismatch/max_abs"] == pytest.approx(apart.max(), rel=1e-3)
    assert plain.drain_metrics()["mismatch/max_abs"] == 0.0
    assert MismatchProbe(apart=["a"]).drain_metrics() == {}
