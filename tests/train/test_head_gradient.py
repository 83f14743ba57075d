"""The gradient of the head, and of a tied embedding: as autograd's, in one place for a whole step."""

from contextlib import nullcontext

import pytest
import tiny
import torch
from context_step import make_batch, teacher
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opd.config import FullVocabularyKL, PolicyLossConfig
from opd.errors import TrainingError
from opd.kernels.head import Head
from opd.kernels.ops import linear_kl
from opd.train.distill_terms import FullVocabularyTerm
from opd.train.teacher_views import TeacherView
from opd.train.terms import CrossEntropyTerm, PolicyTerm
from opd.train.torch_backend import TorchBackend

LENGTHS = [(3, 4), (5, 1), (2, 7), (4, 2), (6, 3), (1, 5), (2, 2), (3, 6), (4, 1), (2, 5)]
FORMS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "scaled": {"model_type": "granite", "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "softcap": {"model_type": "gemma2", "sliding_window": 6, "final_logit_softcapping": 5.0, "head_dim": 8},
}


class ByAutograd(TorchBackend):
    """What each operation finds is a gradient of its own."""

    def gradient_total(self):
        return nullcontext(None)


def doubled(micro, student, sums):
    """A loss of somebody's own, whose declared weights are not what is sent back."""
    (view,) = teacher(micro)
    return 2 * (micro.kl_weight * linear_kl(student.hidden, student.head, view.hidden, view.head)).sum()


def terms(kind):
    distill = FullVocabularyTerm(teacher, "one_hot", FullVocabularyKL())
    if kind == "kl":
        return [distill]
    return [distill, PolicyTerm(PolicyLossConfig(), 0.01), CrossEntropyTerm(), doubled]


def gradients(make, form, kind="kl", *, micro_batches=1, dtype=None):
    model = tiny.model(0, **{"initializer_range": 0.3} | FORMS[form])
    if dtype is not None:
        model.module.to(dtype)
    most = 1000 if micro_batches == 1 else 2
    back = make(model, tiny.training(terms(kind), 0.7, max_tokens=most, kl_chunk=3))
    seen = []
    passes = back._run_pass
    back._run_pass = lambda *given, **named: (seen.append(1), passes(*given, **named))
    metrics = back.forward_backward(make_batch(LENGTHS))
    assert len(seen) == micro_batches
    return {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}, metrics


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", ["kl", "all"])
@pytest.mark.parametrize("micro_batches", [1, 10])
@pytest.mark.parametrize("form", FORMS)
def test_one_sum_for_the_step_is_the_gradient_of_autograd(form, micro_batches, kind):
    found, metrics = gradients(TorchBackend, form, kind, micro_batches=micro_batches)
    expected, others = gradients(ByAutograd, form, kind, micro_batches=micro_batches)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].layout == torch.strided
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6 * float(tensor.abs().max()))
    assert metrics == pytest.approx(others, rel=1e-6)


@pytest.mark.parametrize("form", ["tied", "untied"])
def test_of_16_bits_the_sum_is_float32_and_rounded_once(form):
    exact, _ = gradients(TorchBackend, form, micro_batches=10)
    found, _ = gradients(TorchBackend, form, micro_batches=10, dtype=torch.bfloat16)
    before, _ = gradients(ByAutograd, form, micro_batches=10, dtype=torch.bfloat16)
    name = "lm_head.weight" if form == "untied" else "model.embed_tokens.weight"
    assert found[name].dtype == torch.bfloat16
    errors = [float((one[name].float() - exact[name]).norm() / exact[name].norm()) for one in (found, before)]
    assert errors[0] < min(0.1, 1.05 * errors[1])


class LargeTensors(TorchDispatchMode):
    """The most tensors of at least so many bytes that were there at once, beside some that are known."""

    def __init__(self, nbytes, known):
        super().__init__()
        self.nbytes, self.peak, self._seen = nbytes, 0, {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                if storage.nbytes() >= self.nbytes and storage._cdata not in self._known:
                    self._seen[storage._cdata] = StorageWeakRef(storage)
        self._seen = {key: ref for key, ref in self._seen.items() if not ref.expired()}
        self.peak = max(self.peak, len(self._seen))
        return found


@pytest.mark.some(1)
@pytest.mark.parametrize(("form", "sums"), [("tied", 1), ("untied", 2)])
def test_no_second_gradient_of_the_heads_size_exists_in_a_step(form, sums):
    """What remains is `.grad` of the head, and of an embedding of its own."""
    counts = {}
    for make in (TorchBackend, ByAutograd):
        # Larger than anything else in the step: chunks of logits are [64, V].
        model = tiny.model(0, **{"hidden_size": 256, "head_dim": 8, "intermediate_size": 8} | FORMS[form])
        model.module.resize_token_embeddings(4096, mean_resizing=False)
        back = make(model, tiny.training([wide_kl], 0.7, max_tokens=2, kl_chunk=3))
        with LargeTensors(4096 * 256 * 4, model.module.parameters()) as held:
            back.forward_backward(make_batch(LENGTHS))
        counts[make] = held.peak
    assert counts[TorchBackend] == sums
    assert counts[ByAutograd] > sums


def wide_kl(micro, student, sums):
    head = Head(torch.linspace(-1, 1, student.head.vocabulary * 4).view(-1, 4))
    rows = torch.ones(len(micro.rows), 4)
    weight = micro.kl_weight
    return (weight * linear_kl(student.hidden, student.own_head, rows, head, weight=weight, chunk=3)).sum()


def test_several_teachers_in_a_pass_need_no_second_gradient_of_the_heads_size():
    def wide_teacher(micro):
        head = Head(torch.linspace(-1, 1, 4096 * 4).view(-1, 4))
        return [TeacherView(micro.samples[0].teacher, 1.0, torch.ones(len(micro.rows), 4), head)]

    model = tiny.model(0, hidden_size=256, head_dim=8, intermediate_size=8)
    model.module.resize_token_embeddings(4096, mean_resizing=False)
    distill = FullVocabularyTerm(wide_teacher, "one_hot", FullVocabularyKL())
    back = TorchBackend(model, tiny.training([PolicyTerm(PolicyLossConfig()), distill], 0.7, kl_chunk=3))
    with LargeTensors(4096 * 256 * 4, model.module.parameters()) as held:
        metrics = back.forward_backward(make_batch(LENGTHS))
    assert {"kl/s", "kl/t"} < set(metrics)
    assert held.peak == 1


def test_a_step_that_fails_leaves_no_gradient_and_no_sparse_embedding():
    model = tiny.model(0)

    def broken(micro, student, sums):
        return student.logprobs.sum() * float("nan")

    back = TorchBackend(model, tiny.training([*terms("kl"), broken], 0.7))
    with pytest.raises(TrainingError, match="loss is nan"):
        back.forward_backward(make_batch(LENGTHS))
    assert all(p.grad is None for p in model.module.parameters())
    assert not model.module.get_input_embeddings().sparse
