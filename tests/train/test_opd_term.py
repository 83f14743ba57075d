"""The distillation term on advantages: where it enters, its baseline, and its return-to-go."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from whole_step import opd_advantages

from opd.errors import TeacherError
from opd.train.advantages import discounted_returns, opd_returns

seeds = st.integers(0, 2**32 - 1)


def batch(seed, lengths=(3, 0, 5, 1)):
    rng = np.random.default_rng(seed)
    arrays = [[rng.normal(size=n).astype(np.float32) for n in lengths] for _ in range(3)]
    return (*arrays, [rng.random(n) < 0.7 for n in lengths])


def term(seed, **options):
    base, student, teacher, masks = batch(seed)
    settings = {"coef": 1.0, "baseline": "none", "discount": 0.0, "teachers": ["a", "a", "b", "b"]} | options
    return opd_advantages(base, student, teacher, masks, **settings), (base, student, teacher, masks)


@given(seeds, st.floats(0.0, 3.0))
def test_term_is_the_log_ratio_of_the_sampled_token(seed, coef):
    found, (base, student, teacher, masks) = term(seed, coef=coef)
    for i, mask in enumerate(masks):
        expected = np.where(mask, base[i] - coef * (student[i] - teacher[i]), 0.0)
        np.testing.assert_allclose(found[i], expected, atol=1e-5)
        assert found[i].dtype == np.float32


@given(seeds, st.sampled_from([0.0, 0.5, 1.0]))
def test_batch_mean_is_one_constant_per_teacher_and_centres_its_terms(seed, discount):
    plain, (base, _, _, masks) = term(seed, discount=discount)
    centred, _ = term(seed, discount=discount, baseline="batch_mean")
    for members in ((0, 1), (2, 3)):
        shift = np.concatenate([(centred[i] - plain[i])[masks[i]] for i in members])
        own = np.concatenate([(centred[i] - base[i])[masks[i]] for i in members])
        if len(shift):
            np.testing.assert_allclose(shift, shift[0], atol=1e-5)
            assert own.mean() == pytest.approx(0.0, abs=1e-5)


@given(st.lists(st.floats(-3.0, 3.0), max_size=40), st.floats(0.0, 1.0))
def test_discounted_returns_follow_the_recursion(values, discount):
    expected, carry = [], 0.0
    for value in reversed(values):
        carry = value + discount * carry
        expected.append(carry)
    found = discounted_returns(np.array(values, dtype=np.float32), discount)
    reference = np.array(expected[::-1])
    np.testing.assert_allclose(found, reference, rtol=1e-5, atol=1e-4)


def test_environment_tokens_are_no_steps_of_the_return():
    mask = np.array([True, False, False, True])
    student, teacher = np.array([1.0, 50.0, np.nan, 2.0]), np.zeros(4)
    (found,) = opd_advantages(
        [np.zeros(4)], [student], [teacher], [mask], coef=1.0, baseline="none", discount=0.5, teachers=["t"]
    )
    np.testing.assert_allclose(found, [-2.0, 0.0, 0.0, -2.0])


def whiten(arrays):
    flat = np.concatenate(arrays)
    return [(a - flat.mean()) / flat.std() for a in arrays]


def test_whitening_belongs_before_the_term():
    """Whitened afterwards, the coefficient of pure distillation no longer matters."""
    rng = np.random.default_rng(0)
    student, teacher, base = ([rng.normal(size=20)] for _ in range(3))

    def run(advantages, coef):
        return opd_advantages(
            advantages,
            student,
            teacher,
            [np.ones(20, dtype=bool)],
            coef=coef,
            baseline="none",
            discount=0.0,
            teachers=["t"],
        )

    zero = [np.zeros(20)]
    np.testing.assert_allclose(run(zero, 2.0)[0], 2.0 * run(zero, 1.0)[0])
    np.testing.assert_allclose(whiten(run(zero, 2.0))[0], whiten(run(zero, 1.0))[0])  # lambda is gone
    added = run(whiten(base), 1.0)[0] - whiten(base)[0]
    np.testing.assert_allclose(added, run(whiten([5.0 * base[0]]), 1.0)[0] - whiten(base)[0])
    assert abs(added.mean()) > 0.1  # the mean of the term survives; whitening after would have removed it


class TwoSteps:
    """Every response of a process that writes one token, or two unless the first is 0 (the stop token)."""

    def __init__(self, seed: int, vocabulary: int = 4) -> None:
        generator = torch.Generator().manual_seed(seed)
        noise = [
            torch.randn(1 + vocabulary, vocabulary, generator=generator, dtype=torch.float64)
            for _ in range(2)
        ]
        self.logits = noise[0].requires_grad_()  # row 0: first token; row 1 + a: second token after a
        self.teacher = noise[1].log_softmax(-1)
        first_stop = [[(0, 0)]]
        self.responses = first_stop + [
            [(0, a), (1 + a, b)] for a in range(1, vocabulary) for b in range(vocabulary)
        ]

    def logprobs(self, table):
        return [torch.stack([table[row, token] for row, token in response]) for response in self.responses]

    def gradient(self, loss):
        return torch.autograd.grad(loss, self.logits, retain_graph=True)[0]

    def sequence_kl_gradient(self):
        loss = torch.zeros((), dtype=torch.float64)
        for student, teacher in zip(*self.pairs(), strict=True):
            loss = loss + student.sum().exp() * (student - teacher).sum()
        return self.gradient(loss)

    def pairs(self):
        return self.logprobs(self.logits.log_softmax(-1)), self.logprobs(self.teacher)

    def policy_gradient(self, advantages):
        loss = torch.zeros((), dtype=torch.float64)
        for student, advantage in zip(self.pairs()[0], advantages, strict=True):
            loss = loss - student.sum().exp().detach() * (torch.as_tensor(advantage) * student).sum()
        return self.gradient(loss)

    def k1_gradient(self, discount):
        student, teacher = self.pairs()
        return self.policy_gradient(
            opd_advantages(
                [np.zeros(len(s)) for s in student],
                [s.detach().numpy() for s in student],
                [t.numpy() for t in teacher],
                [np.ones(len(s), dtype=bool) for s in student],
                coef=1.0,
                baseline="none",
                discount=discount,
                teachers=["t"] * len(student),
            )
        )


@given(seeds)
def test_discount_one_is_the_gradient_of_the_kl_between_responses(seed):
    process = TwoSteps(seed)
    torch.testing.assert_close(
        process.k1_gradient(1.0), process.sequence_kl_gradient(), rtol=1e-8, atol=1e-10
    )


@given(seeds)
def test_discount_zero_is_the_kl_per_state_and_leaves_out_later_effects(seed):
    process = TwoSteps(seed)
    logp = process.logits.log_softmax(-1)
    per_state = (logp.exp() * (logp - process.teacher)).sum(-1)
    reach = torch.cat([torch.ones(1, dtype=torch.float64), logp[0].exp().detach()])
    reach[1] = 0.0  # nothing follows the stop token
    torch.testing.assert_close(process.k1_gradient(0.0), process.gradient((reach * per_state).sum()))
    assert (process.k1_gradient(0.0) - process.sequence_kl_gradient()).abs().max() > 1e-3


@given(seeds)
def test_a_constant_per_return_is_a_baseline_and_a_constant_per_token_rewards_length(seed):
    process = TwoSteps(seed)
    lengths = [len(response) for response in process.responses]
    constant = process.policy_gradient([np.ones(n) for n in lengths])
    remaining = process.policy_gradient([np.arange(n, 0, -1.0) for n in lengths])
    assert constant.abs().max() < 1e-12
    assert remaining[0, 0] > 1e-3  # descent lowers the stop token


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_log_probability_that_is_not_finite_is_named(value):
    ones = np.ones(2, dtype=bool)
    teacher = [np.zeros(2), np.array([0.0, value])]
    with pytest.raises(TeacherError, match=r"sample 1, teacher 'b': .* response token 1 is not"):
        opd_advantages(
            [np.zeros(2)] * 2,
            [np.zeros(2)] * 2,
            teacher,
            [ones] * 2,
            coef=1.0,
            baseline="none",
            discount=0.0,
            teachers=["a", "b"],
        )


def test_missing_scores_are_named():
    with pytest.raises(TeacherError, match="s: 1 teacher and 2 student log-probabilities for 2"):
        opd_returns(np.zeros(2), np.zeros(1), np.ones(2, dtype=bool), 0.0, "s")
