"""A training step on a device: the CPU's numbers, what a micro-batch waits for, and its launches."""

from dataclasses import replace

import numpy as np
import pretend_kernels
import pytest
import tiny
import torch

from opd.config import BatchConfig, FullVocabularyKL, OptimConfig, PolicyLossConfig
from opd.config.rl import CISPOLoss, GSPOLoss, ReferenceKLConfig, TopKKL
from opd.errors import TrainingError
from opd.kernels.head import Head
from opd.train.backend import TrainingSettings
from opd.train.distill_terms import FullVocabularyTerm, K2Term, TopKTerm
from opd.train.offload import OffloadBuffer
from opd.train.teacher_views import TeacherView
from opd.train.terms import CrossEntropyTerm, MetricSums, MismatchProbe, PolicyTerm, ReferenceTerm
from opd.train.torch_backend import MastersBackend, TorchBackend
from opd.types import MicroBatch, RolloutBatch, TokenTerms

LENGTHS = [(3, 4), (5, 1), (2, 7), (6, 3), (1, 5)]
WAITS = {"full vocabulary": 2, "distillation that is watched": 2, "k2": 2, "cross-entropy": 2, "top k": 3}
"""Most of a micro-batch, forward and backward: all checks are read at once, and a backward asks once."""
POLICY_WAITS = 4
"""The same with a policy gradient, whose statistics take two more."""


def batch(copies: int = 1) -> RolloutBatch:
    """Samples of one teacher, every third token left out of every loss."""
    samples = tiny.samples(LENGTHS * copies, teachers=["a"] * len(LENGTHS) * copies)
    rng = np.random.default_rng(1)
    terms = []
    for sample in samples:
        n = len(sample.response_ids)
        weight = np.where(np.arange(n) % 3 == 2, 0, 1 / 20).astype(np.float32)
        term = TokenTerms.zeros(n)
        term.advantages = rng.normal(size=n).astype(np.float32)
        term.old_logprobs = rng.normal(-2.5, 0.3, size=n).astype(np.float32)
        term.ref_logprobs = rng.normal(-2.5, 0.3, size=n).astype(np.float32)
        term.policy_weight = term.kl_weight = term.ce_weight = weight
        terms.append(term)
    return RolloutBatch(samples, terms)


class Teacher:
    """Hands out hidden states of a width of its own, where the micro-batch is."""

    def __init__(self, put=lambda value: value) -> None:
        generator = torch.Generator().manual_seed(3)
        self._rows = put(torch.randn(1000, 24, generator=generator))
        self._head = Head(put(torch.randn(len(tiny.tokenizer()), 24, generator=generator)))

    def __call__(self, micro: MicroBatch) -> list[TeacherView]:
        return [TeacherView("a", 1.0, self._rows[: len(micro.targets)], self._head)]


TERMS = {
    "full vocabulary": lambda teacher: [FullVocabularyTerm(teacher, "one_hot", FullVocabularyKL())],
    "k2": lambda teacher: [K2Term(teacher, "one_hot")],
    "top k": lambda teacher: [TopKTerm(teacher, "one_hot", TopKKL(k=3, form="hybrid"))],
    "policy": lambda _: [PolicyTerm(PolicyLossConfig(), entropy_coef=0.1)],
    "gspo": lambda _: [PolicyTerm(GSPOLoss())],
    "cispo": lambda _: [PolicyTerm(CISPOLoss())],
    "policy and reference": lambda _: [
        PolicyTerm(PolicyLossConfig()),
        ReferenceTerm(ReferenceKLConfig(coef=0.1, placement="loss", estimator="k2")),
    ],
    "cross-entropy": lambda _: [CrossEntropyTerm()],
    "distillation that is watched": lambda teacher: [
        FullVocabularyTerm(teacher, "one_hot", FullVocabularyKL()),
        MismatchProbe(entropy=True),
    ],
}


def two_steps(backend: TorchBackend) -> tuple[list[dict[str, float]], torch.Tensor]:
    """Their metrics, and the weights after them, end to end."""
    metrics = [backend.forward_backward(batch()) | backend.step(1e-2) for _ in range(2)]
    return metrics, torch.cat([tensor.flatten() for _, tensor in backend.weights()])


FORMS = [{"max_tokens": 12}, {"recompute_layers": True}, {"sequence_chunk": 4}]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in TERMS] + [("full vocabulary", form) for form in FORMS],
    ids=str,
)
def test_two_steps_are_those_of_a_cpu(gpu, name, options) -> None:
    limits = {"max_tokens": 1000} | options
    # AdamW divides by the gradient's size: a small eps would make a step of what is rounding alone.
    optim = OptimConfig(eps=1e-3)
    plain, there = (
        TrainingSettings(optim, BatchConfig(**limits), 0.7, TERMS[name](Teacher(put)))
        for put in (lambda value: value, gpu.put)
    )
    expected, weights = two_steps(TorchBackend(tiny.model(), plain))
    backend = TorchBackend(gpu.model(tiny.model()), there)
    found, moved = two_steps(backend)
    assert moved.device == gpu.device
    torch.testing.assert_close(gpu.get(moved), weights, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_what_learns_leaves_the_device_through_pinned_memory_without_a_wait(gpu, tmp_path) -> None:
    training = tiny.training(TERMS["policy"](None), 0.7, max_tokens=1000)
    there = TorchBackend(gpu.model(tiny.model()), training)
    away = TorchBackend(gpu.model(tiny.model()), replace(training, shelf=OffloadBuffer(tmp_path)))
    for _ in range(3):
        with gpu.counted() as counts:
            away.offload_state()
            away.reload_weights()
            away.offload_state()
        assert counts.unpinned_bytes == 0
        assert counts.waits == []
        assert not sum(parameter.untyped_storage().nbytes() for parameter in away.model.module.parameters())
        for backend in (there, away):
            backend.forward_backward(batch())
            backend.step(1e-2)
    ours, theirs = (torch.cat([t.flatten() for _, t in backend.weights()]) for backend in (away, there))
    assert torch.equal(gpu.get(ours), gpu.get(theirs))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.some(1)
@pytest.mark.parametrize("name", TERMS)
def test_a_micro_batch_waits_a_bounded_number_of_times(gpu, name) -> None:
    seen = []
    for copies in (1, 3):
        limits = {"max_tokens": sum(map(sum, LENGTHS)), "kl_chunk": 4}
        terms = TERMS[name](Teacher(gpu.put))
        backend = TorchBackend(gpu.model(tiny.model()), tiny.training(terms, 0.7, **limits))
        with gpu.counted() as counts:
            backend.forward_backward(batch(copies))
        seen.append(counts)
    assert len(seen[1].waits) - len(seen[0].waits) <= 2 * WAITS.get(name, POLICY_WAITS), seen[0]
    with gpu.counted() as counts:
        backend.step(1e-3)
    assert len(counts.waits) <= 1, counts


def test_masters_wait_no_more_and_learn_what_they_do_on_a_cpu(gpu) -> None:
    found = []
    for put, there in ((lambda value: value, lambda model: model), (gpu.put, gpu.model)):
        limits = BatchConfig(max_tokens=sum(map(sum, LENGTHS)))
        training = TrainingSettings(OptimConfig(eps=1e-3), limits, 0.7, TERMS["k2"](Teacher(put)))
        backend = MastersBackend(there(tiny.model()), training, torch.bfloat16)
        backend.forward_backward(batch())
        with gpu.counted() as one:
            backend.forward_backward(batch())
        with gpu.counted() as three:
            backend.forward_backward(batch(3))
        if put is gpu.put:
            assert len(three.waits) - len(one.waits) <= 2 * WAITS["k2"], three
        with gpu.counted() as step:
            metrics = backend.step(1e-2)
        assert len(step.waits) <= 1, step
        weights = torch.cat([gpu.get(master).flatten() for master in backend.local_tensors().weights])
        found.append((metrics["grad_norm"], weights.float()))
    started = torch.cat([parameter.flatten() for parameter in tiny.model().module.parameters()])
    moved = (found[0][1] - torch.cat([started, started]).detach()).norm()
    assert (found[1][1] - found[0][1]).norm() <= 0.05 * moved
    assert found[1][0] == pytest.approx(found[0][0], rel=2**-6)


WRONG = ["teacher", "weight", "target", "loss"]


def said_of(what: str, put, there) -> str:
    """What a step says of one wrong number; its weights are what they were."""
    teacher, wrong, vocabulary = Teacher(put), batch(), None
    terms = [*TERMS["full vocabulary"](teacher), MismatchProbe()]
    if what == "teacher":
        teacher._rows[4, 2] = float("nan")
    elif what == "weight":
        wrong.terms[1].kl_weight[0] = float("inf")
    elif what == "target":
        vocabulary = 9
        teacher._head = replace(teacher._head, vocab_size=vocabulary)
    else:
        terms.append(lambda micro, student, sums: student.hidden.sum() * float("inf"))
    model = there(tiny.model())
    model.vocabulary = vocabulary
    backend = TorchBackend(model, tiny.training(terms, 0.7))
    with pytest.raises((TrainingError, ValueError)) as raised:
        backend.forward_backward(wrong)
    return str(raised.value)


@pytest.mark.parametrize("what", WRONG)
def test_what_is_read_together_is_told_in_the_words_of_a_cpu(pretended, what) -> None:
    here = said_of(what, lambda value: value, lambda model: model)
    assert said_of(what, pretended.put, pretended.model) == here


LAUNCHES = {"layer": 138, "attended by one kernel": 119, "beside": 156, "teacher": 101, "update": 10}
"""Of a micro-batch of full-vocabulary distillation, forward and backward, and of an update of all weights."""


@pytest.mark.slow
def test_launches_of_a_micro_batch_and_of_an_update(pretended) -> None:
    totals = []
    for layers in (2, 4):
        term = FullVocabularyTerm(Teacher(pretended.put), "one_hot", FullVocabularyKL())
        model = pretended.model(tiny.model(num_hidden_layers=layers))
        backend = TorchBackend(model, tiny.training([term], 0.7, max_tokens=1000))
        backend.forward_backward(batch())
        with pretended.counted() as forward:
            backend.forward_backward(batch())
        backend.step(1e-3)
        backend.forward_backward(batch())
        with pretended.counted() as update:
            backend.step(1e-3)
        totals.append((forward.launches, update.launches))
    layer = (totals[1][0] - totals[0][0]).total() / 2
    assert layer <= LAUNCHES["layer"], totals[1][0] - totals[0][0]
    assert totals[0][0].total() - 2 * layer <= LAUNCHES["beside"], totals[0][0]
    assert totals[1][1].total() <= LAUNCHES["update"], totals[1][1]


def test_a_teacher_more_in_a_pass_waits_once_and_launches_no_layer(pretended) -> None:
    mixed, counts = batch(), {}
    for sample in mixed.samples[2:]:
        sample.teacher = "b"
    for one_teacher in (False, True):
        term = FullVocabularyTerm(Teacher(pretended.put), "one_hot", FullVocabularyKL())
        backend = TorchBackend(pretended.model(tiny.model()), tiny.training([term], 0.7, max_tokens=1000))
        backend.one_teacher = one_teacher
        backend.forward_backward(mixed)
        with pretended.counted() as counts[one_teacher]:
            backend.forward_backward(mixed)
    together, apart = counts[False], counts[True]
    assert len(apart.waits) - len(together.waits) == 1, together
    alone = 2 * LAUNCHES["layer"] + LAUNCHES["beside"]
    assert together.launches.total() <= alone + LAUNCHES["teacher"], together.launches
    assert apart.launches.total() >= 1.5 * together.launches.total()


@pytest.mark.slow
def test_launches_and_waits_where_attention_is_one_kernel(pretended, monkeypatch) -> None:
    pretend_kernels.install_triton(monkeypatch)
    totals, waits = [], []
    many = batch(12)  # more tokens than a block
    with pretend_kernels.attention_kernels(monkeypatch):
        for layers in (2, 4):
            term = FullVocabularyTerm(Teacher(pretended.put), "one_hot", FullVocabularyKL())
            model = pretended.model(tiny.model(num_hidden_layers=layers, head_dim=16))
            backend = TorchBackend(model, tiny.training([term], 0.7, max_tokens=1000))
            backend.forward_backward(many)
            with pretended.counted() as counts:
                backend.forward_backward(many)
            totals.append(counts.launches)
            waits.append(len(counts.waits))
    assert totals[1]["flex"] == 4
    assert (totals[1] - totals[0]).total() / 2 <= LAUNCHES["attended by one kernel"], totals[1] - totals[0]
    assert waits[1] == waits[0]


@pytest.mark.slow
def test_what_is_resumed_goes_on_as_before(gpu) -> None:
    def backend() -> TorchBackend:
        terms = TERMS["policy"](None)
        return TorchBackend(gpu.model(tiny.model()), tiny.training(terms, 0.7, max_tokens=1000))

    first, second = backend(), backend()
    two_steps(first)
    saved = {name: {k: v.cpu() for k, v in part.items()} for name, part in first.state().items()}
    second.load_state(saved)
    assert two_steps(second)[0] == two_steps(first)[0]


def test_log_probabilities_of_packs(gpu) -> None:
    samples = batch().samples
    plain = TorchBackend(tiny.model(), tiny.training([], 0.7, max_tokens=16)).recompute_logprobs(samples)
    backend = TorchBackend(gpu.model(tiny.model()), tiny.training([], 0.7, max_tokens=16))
    for ours, theirs in zip(backend.recompute_logprobs(samples), plain, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_metrics_are_read_once_a_step_and_are_what_they_were(gpu) -> None:
    here, plain = MetricSums(), MetricSums()
    values = torch.arange(12.0).sin()
    there, three = gpu.put(values), gpu.put(torch.tensor(3))
    with gpu.counted() as seen:
        for value in there:
            here.add("mean", value, three)
            here.add("count", 2.0)
            here.record_max("most", value)
            value.fill_(100.0)  # what was added is the number it was
        assert not seen.waits, seen
        means = here.means()
    assert len(seen.waits) == 1, seen
    for value in values:
        plain.add("mean", value, torch.tensor(3))
        plain.add("count", 2.0)
        plain.record_max("most", value)
    assert means == plain.means()
    assert here.raw_sums() == plain.raw_sums()
