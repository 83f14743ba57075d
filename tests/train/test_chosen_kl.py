"""Divergences by domain, by step, at chosen tokens and by gated teachers: values and gradients in float64."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opd.config.rl import FullVocabularyKL, SelectedTokens
from opd.kernels.head import Head
from opd.kernels.ops import geometric_floor
from opd.train.distill_terms import FullVocabularyTerm, K2Term
from opd.train.losses import entropy_gates, selected_weights
from opd.train.packing import teacher_runs
from opd.train.teacher_views import TeacherView
from opd.train.terms import MetricSums, StudentRows

LENGTHS, DIM, VOCABULARY, TEMPERATURE = (5, 0, 1, 7), 6, 11, 0.8
TOKENS = sum(LENGTHS)
WEIGHTS = (0.7, 0.2, 0.1)


class Case:
    """Responses of several lengths, some of whose tokens do not count, and three teachers; all in float64."""

    def __init__(self, seed: int = 0) -> None:
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.hidden, self.weight = draw(TOKENS, DIM).requires_grad_(), draw(TOKENS).abs()
        self.weight[[1, 9]] = 0.0
        self.head = Head(draw(VOCABULARY, DIM).requires_grad_())
        self.views = [
            TeacherView(name, weight, draw(TOKENS, DIM), Head(draw(VOCABULARY, DIM) * sharp))
            for name, weight, sharp in zip("abc", WEIGHTS, (0.5, 1.0, 1.5), strict=True)
        ]
        self.targets = torch.arange(TOKENS) % VOCABULARY
        self.logp = (self.hidden @ self.head.weight.T / TEMPERATURE).log_softmax(-1)
        self.logt = [(v.hidden @ v.head.weight.T / TEMPERATURE).log_softmax(-1) for v in self.views]

    def run(self, term, domain: str = "math"):
        """The term's loss and metrics."""
        samples = [SimpleNamespace(teacher="t", domain=domain, response_ids=range(n)) for n in LENGTHS]
        streams = {"targets": self.targets, "importance": None, "kl_weight": self.weight, "kept": None}
        micro = SimpleNamespace(
            counted=None, kl_covers=False, samples=samples, runs=teacher_runs(samples), **streams
        )
        sums = MetricSums()
        student = StudentRows(self.hidden, self.head, self.targets, TEMPERATURE, 4)
        return term(micro, student, sums), sums.means()

    def divergence(self, kind: str, teacher: int = 0, beta: float = 0.3) -> torch.Tensor:
        """[N]: the definition, with the student's graph."""
        p, t = self.logp.exp(), self.logt[teacher].exp()
        mixed = (beta * t + (1 - beta) * p).log()
        return {
            "reverse": lambda: (p * (self.logp - self.logt[teacher])).sum(1),
            "forward": lambda: (t * (self.logt[teacher] - self.logp)).sum(1),
            "skew_reverse": lambda: (p * (self.logp - mixed)).sum(1),
            "skew_forward": lambda: (t * (self.logt[teacher] - mixed)).sum(1),
        }[kind]()

    def compare(self, found: torch.Tensor, surrogate: torch.Tensor) -> None:
        """The gradients of both are equal."""
        inputs = [self.hidden, self.head.weight]
        ours, theirs = (torch.autograd.grad(one, inputs, retain_graph=True) for one in (found, surrogate))
        for left, right in zip(ours, theirs, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)

    def chosen(self, scores: torch.Tensor, share: float) -> torch.Tensor:
        """[N]: the weights that are learnt with, one response and one token at a time."""
        weights, start = torch.zeros_like(self.weight), 0
        for length in LENGTHS:
            rows = [i for i in range(start, start + length) if self.weight[i] != 0]
            count = -(-len(rows) * round(share * 100) // 100)
            best = sorted(rows, key=lambda i: (-float(scores[i]), i))[:count]
            for i in best:
                weights[i] = self.weight[i] * self.weight[rows].sum() / self.weight[best].sum()
            start += length
        return weights


def one_teacher(case: Case, config: FullVocabularyKL, **options) -> FullVocabularyTerm:
    view = TeacherView("a", 1.0, case.views[0].hidden, case.views[0].head)
    return FullVocabularyTerm(lambda micro: [view], "one_hot", config, **options)


@pytest.mark.parametrize("kind", ["reverse", "forward", "skew_reverse", "skew_forward"])
@pytest.mark.parametrize("by", ["divergence", "entropy"])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.99])
def test_selected_tokens_are_learnt_with_the_weight_of_all(kind, by, share):
    case = Case()
    config = FullVocabularyKL(kind=kind, beta=0.3, select=SelectedTokens(by=by, share=share))
    found, said = case.run(one_teacher(case, config))
    values = case.divergence(kind)
    scores = values if by == "divergence" else -(case.logp.exp() * case.logp).sum(1)
    weights = case.chosen(scores.detach(), share)
    assert 0 < (weights != 0).sum() < (case.weight != 0).sum() or share == 0.99
    assert weights.sum().item() == pytest.approx(case.weight.sum().item())
    case.compare(found, (weights * values).sum())
    counted = case.weight != 0
    assert said["kl/mean"] == pytest.approx(values[counted].mean().item())  # of all tokens


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 2.0])), max_size=9), max_size=6
    ),
    st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.7, 0.99]),
)
def test_each_response_keeps_its_weight_and_its_share_of_tokens(responses, share):
    flat = [token for response in responses for token in response]
    scores = torch.tensor([float(score) for score, _ in flat])
    weights = torch.tensor([weight for _, weight in flat])
    found = selected_weights(scores, weights, [len(response) for response in responses], share)
    start = 0
    for response in responses:
        rows = slice(start, start + len(response))
        start += len(response)
        counted = [score for score, weight in response if weight]
        stays = found[rows] != 0
        assert int(stays.sum()) == -(-len(counted) * round(share * 100) // 100)
        assert float(found[rows].sum()) == pytest.approx(float(weights[rows].sum()))
        if stays.any():
            left = (weights[rows] != 0) & ~stays
            assert not left.any() or scores[rows][left].max() <= scores[rows][stays].min()


def test_packing_does_not_change_what_is_selected():
    case = Case()
    scores, share = case.divergence("reverse").detach(), 0.4
    whole, start = selected_weights(scores, case.weight, LENGTHS, share), 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        alone = selected_weights(scores[rows], case.weight[rows], [length], share)
        torch.testing.assert_close(alone, whole[rows])
        start += length


def test_a_domain_and_a_step_have_their_kind():
    case = Case()
    own = {"code": FullVocabularyKL(kind="skew_forward", beta=0.3)}
    config = FullVocabularyKL(kind="forward", later=[(2, "skew_reverse"), (5, "reverse")], beta=0.3)
    term = one_teacher(case, config, of_domain=own)
    for step, kind in enumerate(["forward"] * 2 + ["skew_reverse"] * 3 + ["reverse"] * 2):
        term.step = step
        for domain, wanted in (("math", kind), ("code", "skew_forward")):
            found, _ = case.run(term, domain)
            value = (case.weight * case.divergence(wanted)).sum()
            torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-11)
            case.compare(found, value)


@pytest.mark.parametrize("mixture", ["lowest_entropy", "entropy"])
def test_gated_teachers_count_by_their_entropies(mixture):
    case = Case()
    entropies = torch.stack([-(logt.exp() * logt).sum(1) for logt in case.logt])
    gates = torch.zeros_like(entropies)
    if mixture == "lowest_entropy":
        gates[entropies.argmin(0), torch.arange(TOKENS)] = 1.0
    else:
        raw = torch.tensor(WEIGHTS, dtype=torch.float64)[:, None] * torch.exp(-entropies)
        gates = raw / raw.sum(0)
    found, said = case.run(FullVocabularyTerm(lambda micro: case.views, mixture, FullVocabularyKL()))
    each = sum(gate * case.divergence("reverse", i) for i, gate in enumerate(gates))
    wanted = (case.weight * each).sum()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    case.compare(found, wanted)
    counted = case.weight != 0
    for name, gate in zip("abc", gates, strict=True):
        assert said[f"gate/{name}"] == pytest.approx(gate[counted].mean().item())
    pooled = sum(gate[:, None] * logt for gate, logt in zip(gates, case.logt, strict=True))
    floor = -pooled.logsumexp(1)[counted].mean().item()
    assert said.get("kl/floor", 0.0) == pytest.approx(floor if mixture == "entropy" else 0.0, abs=1e-12)


def test_gates_weigh_sampled_tokens_too():
    case = Case()
    found, _ = case.run(K2Term(lambda micro: case.views, "entropy"))
    entropies = torch.stack([-(logt.exp() * logt).sum(1) for logt in case.logt])
    gates = entropy_gates(entropies, WEIGHTS, "entropy")
    rows = torch.arange(TOKENS)
    ratios = [case.logp[rows, case.targets] - logt[rows, case.targets] for logt in case.logt]
    each = sum(gate * ratio**2 / 2 for gate, ratio in zip(gates, ratios, strict=True))
    case.compare(found, (case.weight * each).sum())


def test_equal_entropies_take_the_first_teacher():
    gates = entropy_gates(
        torch.tensor([[2.0, 1.0, 3.0], [2.0, 2.0, 1.0], [2.0, 1.0, 1.0]]), WEIGHTS, "lowest_entropy"
    )
    assert gates.tolist() == [[1, 1, 0], [0, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize("name", ["chunked", "reference"])
def test_a_floor_with_weights_by_token_is_the_pools(name, monkeypatch):
    monkeypatch.setenv("OPD_KERNELS", name)
    case = Case(1)
    raw = torch.rand(3, TOKENS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights = raw / raw.sum(0)
    models = [view.hidden for view in case.views], [view.head for view in case.views]
    found = geometric_floor(*models, list(weights), temperature=TEMPERATURE, chunk=4)
    pooled = sum(weight[:, None] * logt for weight, logt in zip(weights, case.logt, strict=True))
    torch.testing.assert_close(found, -pooled.logsumexp(1), rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match="weights by token are not one of each token"):
        geometric_floor(*models, list(weights[:, :-1]), temperature=TEMPERATURE, chunk=4)
