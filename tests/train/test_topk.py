"""Top-k forms: what each is worth, with the exact divergence beside it."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opd.config.rl import TopKKL
from opd.errors import ConfigError, TeacherError
from opd.kernels.head import Head
from opd.train.distill_terms import TopKTerm
from opd.train.losses import SampledTokens, outside_support, topk_reverse_kl
from opd.train.teacher_views import ScoredView, TeacherView
from opd.train.terms import StudentRows

seeds = st.integers(0, 2**32 - 1)


def value(state, k, form):
    """[] the divergence of one state on the teacher's top k; forms that need no sample."""
    support = state.support(k)
    return topk_reverse_kl(state.logprobs[support][None], state.teacher[support][None], form=form)[0]


def gradient(state, loss):
    return torch.autograd.grad(loss, state.logits, retain_graph=True)[0]


def relative_error(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


@given(seeds, st.integers(2, 24), st.data())
def test_tail_bucket_is_a_lower_bound_that_grows_with_k(position, seed, vocabulary, data):
    state = position.random(seed, vocabulary)
    k = data.draw(st.integers(1, vocabulary - 1))
    small, large = value(state, k, "tail").item(), value(state, k + 1, "tail").item()
    assert -1e-12 <= small <= large + 1e-9
    assert large <= state.kl.item() + 1e-9


@given(seeds, st.integers(2, 24))
def test_all_forms_are_exact_on_the_whole_vocabulary(position, seed, vocabulary):
    state = position.random(seed, vocabulary)
    for form in ("tail", "truncated"):
        loss = value(state, vocabulary, form)
        torch.testing.assert_close(loss.detach(), state.kl, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(gradient(state, loss), state.reverse_gradient, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(state.topk_losses(vocabulary, "hybrid").detach(), state.kl.expand(vocabulary))


@given(seeds, st.integers(2, 24), st.data())
def test_tail_gradient_is_that_of_its_value(position, seed, vocabulary, data):
    """Against autograd through the plain formula with `1 - sum p` as the tail."""
    state = position.random(seed, vocabulary)
    support = state.support(data.draw(st.integers(1, vocabulary - 1)))
    logp, logt = state.logprobs[support], state.teacher[support]
    tail_p, tail_t = 1 - logp.exp().sum(), 1 - logt.exp().sum()
    plain = (logp.exp() * (logp - logt)).sum() + tail_p * (tail_p.log() - tail_t.log())
    loss = value(state, len(support), "tail")
    torch.testing.assert_close(loss.detach(), plain.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient(state, loss), gradient(state, plain), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("k", [16, 64, 256])
def test_at_a_large_vocabulary_truncation_is_worst_and_the_hybrid_exact(position, k):
    state = position.random(0, 2000, spread=2.0, distance=0.72)
    truncated, tail = (gradient(state, value(state, k, form)) for form in ("truncated", "tail"))
    exact = state.reverse_gradient
    assert relative_error(truncated, exact) > 1.5 * relative_error(tail, exact) > 0.01
    assert relative_error(state.expected_gradient(state.topk_losses(k, "hybrid")), exact) < 1e-10


def test_the_hybrid_is_the_only_exact_form_on_a_small_support(position):
    """Neither renormalising both sides over the support nor the generalised form closes the gap."""
    state = position.random(0, 2000, spread=2.0, distance=0.72)
    logp, logt = (x[state.support(64)] for x in (state.logprobs, state.teacher))
    own_p, own_t = logp.log_softmax(-1), logt.log_softmax(-1)
    renormalised = (own_p.exp() * (own_p - own_t)).sum()
    generalised = (logp.exp() * (logp - logt) - logp.exp() + logt.exp()).sum()
    for biased in (renormalised, generalised, value(state, 64, "tail"), value(state, 64, "truncated")):
        assert relative_error(gradient(state, biased), state.reverse_gradient) > 0.01
    exact = state.expected_gradient(state.topk_losses(64, "hybrid"))
    assert relative_error(exact, state.reverse_gradient) < 1e-10


def test_truncated_is_biased_negative_and_not_zero_at_equality(position):
    equal = position.random(3, 50, distance=0.0)
    assert value(equal, 8, "truncated").item() == pytest.approx(0.0, abs=1e-12)
    push = gradient(equal, value(equal, 8, "truncated"))
    support = equal.support(8)
    assert push[support].min() > 1e-4  # descent lowers every logit of the support ...
    outside = torch.ones(50, dtype=torch.bool)
    outside[support] = False
    assert push[outside].max() < 0  # ... and raises every other one
    states = [position.random(seed, 50, distance=1.5) for seed in range(20)]
    assert min(value(state, 4, "truncated").item() for state in states) < 0


def test_descending_the_truncated_form_leaks_mass_out_of_the_support(position):
    """A good student is ruined by it, while the tail bucket goes on improving; one gradient does not tell."""
    final = {}
    for form in ("truncated", "tail"):
        state = position.random(5, 50, spread=3.0, distance=0.5)
        start = state.kl.item()
        for _ in range(400):
            step = gradient(state, value(state, 4, form))
            with torch.no_grad():
                state.logits.sub_(2.0 * step)
        final[form] = (state.kl.item(), state.probs[state.support(4)].sum().item())
    teacher_mass = state.teacher.exp()[state.support(4)].sum().item()
    assert final["tail"][0] < start < final["truncated"][0]
    assert final["tail"][1] == pytest.approx(teacher_mass, abs=0.02)
    assert final["truncated"][1] < 0.5 * teacher_mass


@given(seeds, st.integers(3, 24), st.data())
def test_hybrid_equals_the_uncentred_form_in_expectation(position, seed, vocabulary, data):
    """`(r + 1)` on the tail beside the exact sum on the support; without the 1 the sum is biased."""
    state = position.random(seed, vocabulary)
    k = data.draw(st.integers(1, vocabulary - 1))
    support = state.support(k)
    outside = outside_support(torch.arange(vocabulary), support.expand(vocabulary, -1))
    exact_part = (state.logprobs[support].exp() * (state.logprobs - state.teacher)[support]).sum()

    def expected(offset):
        tail = torch.where(outside, (state.log_ratio + offset) * state.logprobs, 0.0)
        return state.expected_gradient(exact_part + tail)

    torch.testing.assert_close(expected(1.0), state.reverse_gradient, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        state.expected_gradient(state.topk_losses(k, "hybrid")), expected(1.0), rtol=1e-8, atol=1e-10
    )
    missing = gradient(state, state.logprobs[support].exp().sum())
    torch.testing.assert_close(expected(0.0) - state.reverse_gradient, missing, rtol=1e-6, atol=1e-12)


def test_hybrid_is_less_noisy_than_the_uncentred_form_and_than_k1(position):
    state = position.random(0, 200, spread=2.0, distance=0.7)
    support = state.support(16)
    outside = outside_support(torch.arange(200), support.expand(200, -1))
    exact_part = (state.logprobs[support].exp() * (state.logprobs - state.teacher)[support]).sum()
    uncentred = exact_part + torch.where(outside, (state.log_ratio + 1.0) * state.logprobs, 0.0)
    ours = state.gradient_variance(state.topk_losses(16, "hybrid"))
    assert ours < 0.5 * state.gradient_variance(uncentred)
    assert ours < 0.5 * state.gradient_variance(state.log_ratio * state.logprobs)


def test_hybrid_needs_importance_weights_off_policy(position):
    state = position.random(0, 40)
    mu = (state.logits + 0.4 * position.random(1, 40).logits).detach().softmax(-1)
    weighted = state.expected_gradient(state.topk_losses(4, "hybrid", state.probs / mu), behaviour=mu)
    torch.testing.assert_close(weighted, state.reverse_gradient, rtol=1e-8, atol=1e-10)
    plain = state.expected_gradient(state.topk_losses(4, "hybrid"), behaviour=mu)
    assert relative_error(plain, state.reverse_gradient) > 0.01


@given(seeds, st.integers(2, 24))
def test_generalised_form_is_a_lower_bound_too(position, seed, vocabulary):
    """`p log(p / t) - p + t` is >= 0 token by token, so any partial sum is below the KL."""
    state = position.random(seed, vocabulary)
    terms = state.probs * state.log_ratio - state.probs + state.teacher.exp()
    assert (terms >= -1e-15).all()
    torch.testing.assert_close(terms.sum(), state.kl, rtol=1e-9, atol=1e-12)


def test_float32_is_zero_at_equality_even_for_a_peaked_teacher():
    logits = torch.tensor([[20.0, 5.0, 1.0, 0.0], [90.0, 0.0, 0.0, 0.0]], requires_grad=True)
    logp = logits.log_softmax(-1)
    loss = topk_reverse_kl(logp[:, :2], logp[:, :2].detach(), form="tail").sum()
    assert loss.item() == 0.0
    assert torch.autograd.grad(loss, logits)[0].abs().max() == 0.0


def test_outside_support_and_empty_input():
    support = torch.tensor([[3, 1], [0, 2]])
    assert outside_support(torch.tensor([1, 1]), support).tolist() == [False, True]
    empty = torch.zeros(0, 4)
    assert topk_reverse_kl(empty, empty, form="tail").shape == (0,)


def test_wrong_arguments_are_named():
    logp = torch.zeros(3, 2)
    with pytest.raises(ConfigError, match=r"hybrid .* needs the sampled tokens"):
        topk_reverse_kl(logp, logp, form="hybrid")
    with pytest.raises(ConfigError, match="renormalised"):
        topk_reverse_kl(logp, logp, form="renormalised")
    with pytest.raises(ValueError, match=r"student_logprobs \[3, 2\], teacher_logprobs \[3, 3\]"):
        topk_reverse_kl(logp, torch.zeros(3, 3), form="tail")


@given(seeds, st.integers(3, 24), st.data())
def test_any_support_is_exact_in_expectation_and_below_the_kl(position, seed, vocabulary, data):
    """The student's own top k as well as the teacher's, and what both choose."""
    state = position.random(seed, vocabulary)
    k = data.draw(st.integers(1, vocabulary - 1))
    mine, theirs = state.logprobs.topk(k).indices, state.support(k)
    for support in (mine, torch.cat([mine, theirs]).unique()):
        rows = support.expand(vocabulary, -1)
        student, teacher = state.logprobs[support].expand_as(rows), state.teacher[support].expand_as(rows)
        outside = outside_support(torch.arange(vocabulary), rows)
        sampled = SampledTokens(state.logprobs, state.teacher, outside)
        losses = topk_reverse_kl(student, teacher, form="hybrid", sampled=sampled)
        torch.testing.assert_close((state.probs * losses.detach()).sum(), state.kl, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(
            state.expected_gradient(losses), state.reverse_gradient, rtol=1e-8, atol=1e-10
        )
        assert -1e-12 <= topk_reverse_kl(student, teacher, form="tail")[0].item() <= state.kl.item() + 1e-9


def test_the_students_own_support_has_the_gradient_where_the_teachers_misses_it(position):
    """A student whose mass is where the teacher has next to none: what the reverse KL is there to mend."""
    state = position.random(2, 400, spread=2.0, distance=2.5)
    exact = state.reverse_gradient
    error = {}
    for name, support in (("teacher", state.support(8)), ("student", state.logprobs.topk(8).indices)):
        tail = topk_reverse_kl(state.logprobs[support][None], state.teacher[support][None], form="tail")[0]
        error[name] = relative_error(gradient(state, tail), exact)
    assert error["student"] < 0.5 * error["teacher"], error


ENUMERATED = SimpleNamespace(vocabulary=11, hidden=6)


def enumerated(term, seed=0):
    """The divergence of each of V rows, one state with every token in turn as the one that was written; the
    probabilities; and the gradients `[D]` of the KL and of the term's expectation by the state's hidden."""
    size, dim = ENUMERATED.vocabulary, ENUMERATED.hidden
    generator = torch.Generator().manual_seed(seed)
    state, theirs = torch.randn(2, dim, generator=generator)
    head, other = (Head(torch.randn(size, dim, generator=generator)) for _ in range(2))
    hidden = state.clone().requires_grad_()
    actions = torch.arange(size)
    student = StudentRows(hidden.expand(size, -1), head, actions, 0.8, 4)
    view = TeacherView("t", 1.0, theirs.expand(size, -1), other)
    losses = term.view_divergence(SimpleNamespace(targets=actions, importance=None), student, view)
    logp = (hidden @ head.weight.T / 0.8).log_softmax(-1)
    logt = (theirs @ other.weight.T / 0.8).log_softmax(-1)
    kl = (logp.exp() * (logp - logt)).sum()
    probs = logp.exp().detach()
    mine = torch.autograd.grad((probs * losses).sum(), hidden, retain_graph=True)[0]
    exact = torch.autograd.grad(kl, hidden)[0]
    return losses.detach(), probs, kl.detach(), mine, exact


@pytest.mark.parametrize("k", [1, 3, 8, 11, 64])
@pytest.mark.parametrize("support", ["teacher", "student", "union"])
def test_who_chooses_changes_no_expectation(support, k):
    """8 of 11 tokens: most of what both choose stands twice, and must count once."""
    term = TopKTerm(lambda micro: [], "one_hot", TopKKL(k=k, form="hybrid", support=support))
    losses, probs, kl, mine, exact = enumerated(term)
    torch.testing.assert_close((probs * losses).sum(), kl, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["tail", "truncated"])
def test_a_union_that_holds_every_token_is_the_whole_divergence(form):
    term = TopKTerm(lambda micro: [], "one_hot", TopKKL(k=11, form=form, support="union"))
    losses, _, kl, mine, exact = enumerated(term, seed=3)
    torch.testing.assert_close(losses, kl.expand_as(losses), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-5)


def test_what_the_student_chooses_needs_a_teacher_that_can_be_asked():
    assert TopKKL().signal == "topk"
    assert TopKKL(support="student").signal == TopKKL(support="union").signal == "hidden"
    term = TopKTerm(lambda micro: [], "one_hot", TopKKL(k=2, support="student"))
    scored = ScoredView("t", 1.0, torch.zeros(1))
    written = torch.zeros(1, dtype=torch.int64)
    student = StudentRows(torch.ones(1, 6), Head(torch.ones(11, 6)), written, 1.0, 4)
    with pytest.raises(TeacherError, match=r"teachers\.t\.signal to hidden"):
        term.view_divergence(SimpleNamespace(), student, scored)
