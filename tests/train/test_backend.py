import platform
import weakref
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from backend_ranks import batch_of
from test_head_gradient import ByAutograd
from watched import own_bytes

from opd.config import DistillConfig, PolicyLossConfig
from opd.config.rl import FullVocabularyKL, SampledTokenK2, SelectedTokens, TopKKL
from opd.errors import CheckpointError, TrainingError
from opd.kernels import chunked
from opd.kernels.head import Head
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.schedule import Router, TeacherSchedule
from opd.train import distill_terms
from opd.train.distill_terms import build_distill_term
from opd.train.terms import CrossEntropyTerm, MismatchProbe, PolicyTerm
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, TokenTerms

LENGTHS = [(3, 4), (5, 1), (2, 7), (4, 0), (6, 3), (1, 5)]
TEACHERS = ["a", "b", "a", "b", "b", "a"]


@pytest.fixture
def batch():
    return batch_of(LENGTHS, TEACHERS, seed=1)


@pytest.fixture
def schedule(tmp_path):
    from opd.models.checkpoint import save_checkpoint

    teachers = {}
    for i, name in enumerate(("a", "b")):
        save_checkpoint(tiny.model(seed=10 + i), tiny.tokenizer(), tmp_path / name, {})
        teachers[name] = LocalTeacher(name, tmp_path / name)
    return TeacherSchedule(teachers, Router({"a": {"a": 1.0}, "b": {"b": 1.0}}, "one_hot"))


def backend(terms, max_tokens=1000, seed=0):
    return TorchBackend(tiny.model(seed), tiny.training(terms, 0.7, max_tokens=max_tokens))


def gradient(back, batch):
    back.forward_backward(batch)
    return torch.cat([p.grad.flatten() for p in back.model.module.parameters()])


def distill(schedule, loss):
    return [build_distill_term(DistillConfig(loss=loss), schedule)]


LOSSES = [
    FullVocabularyKL(),
    FullVocabularyKL(kind="forward"),
    FullVocabularyKL(kind="jsd", beta=0.3),
    FullVocabularyKL(kind="skew_reverse", beta=0.3, select=SelectedTokens(share=0.5)),
    FullVocabularyKL(select=SelectedTokens(by="entropy", share=0.4)),
    SampledTokenK2(),
    TopKKL(k=3, form="tail"),
    TopKKL(k=3, form="hybrid"),
    TopKKL(k=3, form="tail", support="student"),
    TopKKL(k=3, form="hybrid", support="union"),
]


@pytest.mark.some(1)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: str(loss.model_dump()))
def test_order_and_packing_never_change_the_step(schedule, batch, loss):
    schedule.assign(batch.samples)
    schedule.score(batch.samples)
    one = gradient(backend(distill(schedule, loss), max_tokens=8), batch)
    sorted_batch = schedule.sort(batch)
    assert [s.teacher for s in sorted_batch.samples] == ["a", "a", "a", "b", "b", "b"]
    other = gradient(backend(distill(schedule, loss)), sorted_batch)
    assert one.norm() > 0
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


STREAMS = {
    "alone": lambda: [],
    "policy": lambda: [PolicyTerm(PolicyLossConfig(), entropy_coef=0.01), CrossEntropyTerm()],
}


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: str(loss.model_dump()))
def test_teachers_in_one_pass_change_nothing(schedule, batch, loss, streams):
    """In float64: gradient, to the last digits, and metrics of a pass for each teacher, and for nobody."""
    batch.samples[4].teacher_prompt_ids = np.zeros(0, np.int32)
    batch.terms[4].kl_weight[:] = 0.0
    schedule.assign(batch.samples)
    schedule.score(batch.samples)
    batch = schedule.sort(batch)

    def pass_on(make, one_teacher: bool):
        probe = MismatchProbe(entropy=streams == "alone")
        model = tiny.model(0)
        model.module.double()
        terms = [*STREAMS[streams](), *distill(schedule, loss), probe]
        back = make(model, tiny.training(terms, 0.7, max_tokens=1000))
        back.one_teacher = one_teacher
        passes, run_pass = [], back._run_pass
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(back, "_run_pass", lambda *given, **named: passes.append(run_pass(*given, **named)))
            metrics = back.forward_backward(batch)
        return len(passes), back, metrics | probe.drain_metrics()

    many, theirs, others = pass_on(TorchBackend, True)
    for make in (TorchBackend, ByAutograd):
        few, ours, metrics = pass_on(make, False)
        assert (few, many) == (1, 3)
        assert metrics == pytest.approx(others, rel=1e-6, abs=1e-9)
        for mine, other in zip(ours.model.module.parameters(), theirs.model.module.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-13)


def test_with_a_balancing_loss_each_pass_has_one_teacher(schedule, batch, monkeypatch):
    schedule.assign(batch.samples)
    schedule.score(batch.samples)
    training = tiny.training(distill(schedule, FullVocabularyKL()), 0.7, max_tokens=1000)
    back = TorchBackend(tiny.model(0), replace(training, balance_loss=0.1))
    seen, run_pass = [], back._run_pass

    def noted(batch, *given, **named):
        seen.append({sample.teacher for sample in batch.samples})
        run_pass(batch, *given, **named)

    monkeypatch.setattr(back, "_run_pass", noted)
    back.forward_backward(schedule.sort(batch))
    assert seen == [{"a"}, {"b"}]


@pytest.mark.parametrize("make", [TorchBackend, ByAutograd])
@pytest.mark.parametrize("loss", [FullVocabularyKL(), TopKKL(k=3, form="hybrid", support="union")])
@pytest.mark.parametrize("most", [1000, 9])
def test_one_teachers_head_is_in_memory_at_a_time(schedule, batch, loss, most, make):
    """Whatever holds its tensors: in a pass of several teachers, too, and if one is in two passes."""
    alive, loads = [], []

    def counted(load):
        def load_head():
            head = load()
            weight = head.weight.clone()
            assert all(other() is None for other in alive)
            alive.append(weakref.ref(weight))
            loads.append(1)
            return Head(weight, head.bias, head.scale, head.softcap, head.vocab_size)

        return load_head

    for teacher in schedule._teachers.values():
        teacher.load_head = counted(teacher.load_head)
    schedule.assign(batch.samples)
    schedule.score(batch.samples)
    back = make(tiny.model(0), tiny.training(distill(schedule, loss), 0.7, max_tokens=most))
    back.forward_backward(schedule.sort(batch))
    assert len(loads) == 2


def test_sorted_batches_load_each_head_once_and_hold_one(schedule, batch):
    schedule.assign(batch.samples)
    schedule.score(batch.samples)
    backend(distill(schedule, FullVocabularyKL()), max_tokens=8).forward_backward(schedule.sort(batch))
    counters = schedule.take_counters()
    assert counters["head_loads"] == 2
    assert counters["resident_heads_peak"] == 1
    assert counters["teacher_tokens"] == 20
    backend(distill(schedule, FullVocabularyKL()), max_tokens=8).forward_backward(batch)
    assert schedule.take_counters()["head_loads"] > 2, "unsorted samples must cost more loads"


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: str(loss.model_dump()))
def test_student_equal_to_teacher_gives_no_gradient(schedule, batch, loss):
    for sample in batch.samples:
        sample.domain = "a"
    schedule.assign(batch.samples)
    schedule.score(batch.samples)
    back = backend(distill(schedule, loss), seed=10)
    metrics = back.forward_backward(batch)
    norm = torch.cat([p.grad.flatten() for p in back.model.module.parameters()]).norm()
    assert abs(metrics["kl/mean"]) < 1e-5
    assert norm < 1e-5


def test_the_full_vocabulary_stream_does_not_ask_who_wrote_the_tokens(schedule, batch):
    schedule.assign(batch.samples)
    schedule.score(batch.samples)
    fresh = gradient(backend(distill(schedule, FullVocabularyKL())), batch)
    for sample in batch.samples:
        sample.policy_versions = sample.policy_versions - 3
        sample.rollout_logprobs = sample.rollout_logprobs - 1.0
    assert torch.equal(gradient(backend(distill(schedule, FullVocabularyKL())), batch), fresh)


def test_the_full_vocabulary_stream_equals_autograd_on_plain_logits(schedule, batch):
    schedule.assign(batch.samples)
    schedule.score(batch.samples)
    ours = gradient(backend(distill(schedule, FullVocabularyKL())), batch)
    back = backend([])
    loss = torch.zeros(())
    for sample, terms in batch:
        n, ids = len(sample.response_ids), torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        if not n:
            continue
        first = len(sample.prompt_ids) - 1
        plain = {}
        for name, model in (("s", back.model), ("t", schedule._teachers[sample.teacher].model)):
            hidden = model.hidden(ids[0], torch.arange(ids.shape[1]), [0, ids.shape[1]])
            logits = hidden @ model.module.lm_head.weight.T / 0.7
            plain[name] = logits[first : first + n].log_softmax(-1)
        kl = (plain["s"].exp() * (plain["s"] - plain["t"])).sum(-1)
        loss = loss + (torch.from_numpy(terms.kl_weight) * kl).sum()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in back.model.module.parameters()])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def test_policy_and_cross_entropy_do_not_depend_on_micro_batches(batch):
    terms = [PolicyTerm(PolicyLossConfig(), entropy_coef=0.01), CrossEntropyTerm()]
    whole, parts = backend(terms), backend(terms, max_tokens=7)
    torch.testing.assert_close(gradient(whole, batch), gradient(parts, batch), rtol=1e-4, atol=1e-6)


def test_recomputed_logprobs_equal_one_by_one_forwards(batch):
    back = backend([])
    found = back.recompute_logprobs(batch.samples)
    for sample, logprobs in zip(batch.samples, found, strict=True):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        hidden = back.model.hidden(ids, torch.arange(len(ids)), [0, len(ids)])
        logits = hidden @ back.model.module.lm_head.weight.T / 0.7
        rows = logits.log_softmax(-1)[len(sample.prompt_ids) - 1 : -1]
        expected = rows.gather(1, ids[len(sample.prompt_ids) :, None])[:, 0]
        np.testing.assert_allclose(logprobs, expected.detach().numpy(), atol=1e-5)


def test_shares_of_tokens_and_gradient_sum_to_one(schedule, batch):
    schedule.assign(batch.samples)
    schedule.score(batch.samples)
    metrics = backend(distill(schedule, FullVocabularyKL())).forward_backward(schedule.sort(batch))
    assert metrics["token_share/a"] == pytest.approx(16 / 20)
    for kind in ("token_share", "grad_share"):
        assert metrics[f"{kind}/a"] + metrics[f"{kind}/b"] == pytest.approx(1)


def test_state_continues_bit_for_bit(batch):
    terms = [CrossEntropyTerm()]

    def steps(back, n):
        for _ in range(n):
            back.forward_backward(batch)
            back.step(1e-2)
        return back

    straight = steps(backend(terms), 4)
    first = steps(backend(terms), 2)
    resumed = backend(terms, seed=5)
    resumed.load_state(first.state())
    steps(resumed, 2)
    assert resumed.digest() == straight.digest()


def test_state_of_another_model_is_refused(batch):
    state = backend([CrossEntropyTerm()]).state()
    state["optimizer"]["model.nowhere.weight/step"] = torch.zeros(())
    with pytest.raises(CheckpointError, match="nowhere"):
        backend([]).load_state(state)


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(batch):
    back = backend([CrossEntropyTerm()])
    before = back.digest()
    batch.terms[0].ce_weight[:] = np.nan
    with pytest.raises(TrainingError, match="s0"):
        back.forward_backward(batch)
    assert back.digest() == before


def test_empty_responses_are_skipped_and_a_step_of_nothing_else_is_an_error():
    samples = tiny.samples([(3, 0), (2, 2), (4, 0)])
    batch = RolloutBatch(samples, [TokenTerms.zeros(len(s.response_ids)) for s in samples])
    batch.terms[1].ce_weight[:] = 0.5
    backend([CrossEntropyTerm()]).forward_backward(batch)
    empty = RolloutBatch([samples[0], samples[2]], [TokenTerms.zeros(0), TokenTerms.zeros(0)])
    with pytest.raises(TrainingError, match="all 2 responses of this step are empty"):
        backend([CrossEntropyTerm()]).forward_backward(empty)


def test_recomputed_layers_change_no_bit_and_pieces_no_more_than_rounding(schedule, batch):
    schedule.assign(batch.samples)
    schedule.score(batch.samples)

    def run(**memory):
        terms = distill(schedule, FullVocabularyKL())
        back = TorchBackend(tiny.model(0), tiny.training(terms, 0.7, max_tokens=1000, **memory))
        found = gradient(back, schedule.sort(batch))
        return found, back.recompute_logprobs(batch.samples)

    whole, again, pieces = run(), run(recompute_layers=True), run(sequence_chunk=3)
    assert torch.equal(whole[0], again[0])
    torch.testing.assert_close(pieces[0], whole[0], rtol=1e-4, atol=1e-6)
    for mine, other in zip(pieces[1], whole[1], strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


def leave_pieces() -> tuple[list[torch.Tensor], int]:
    """Pieces of memory with free ones between them, and how many bytes all of these have grown to."""
    before = own_bytes("RssAnon")
    pieces: list[torch.Tensor] = []
    while own_bytes("RssAnon") - before < 90 << 20:  # those that others have left free do not count
        assert len(pieces) < 32_000
        pieces += [torch.ones(16 * 1024) for _ in range(100)]  # of 64 KiB, below what gets a map of its own
    return pieces[::8], own_bytes("RssAnon") - before


GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps other things")


@GLIBC
def test_a_step_gives_back_what_lies_free_between_pieces_in_use(batch, monkeypatch):
    monkeypatch.setattr("opd.train.offload.TRIMMED", 1)
    back = backend([CrossEntropyTerm()])
    back.forward_backward(batch)
    before = own_bytes("RssAnon")
    kept, grown = leave_pieces()
    back.forward_backward(batch)
    assert own_bytes("RssAnon") - before < grown / 2
    assert len(kept) >= 180


class LeavesPieces(CrossEntropyTerm):
    """A loss that leaves pieces behind in each micro-batch but the first, whose size is the model's own."""

    def __init__(self) -> None:
        self.before: list[int] = []
        self.kept: list[tuple[list[torch.Tensor], int]] = []

    def __call__(self, micro, student, sums):
        self.before.append(own_bytes("RssAnon"))
        if len(self.before) > 1:
            self.kept.append(leave_pieces())
        return super().__call__(micro, student, sums)


@GLIBC
def test_micro_batches_do_not_add_up_what_they_leave_free(batch, monkeypatch):
    monkeypatch.setattr("opd.train.offload.TRIMMED", 1)
    term = LeavesPieces()
    backend([term], max_tokens=9).forward_backward(batch)
    assert len(term.before) >= 4
    grown = sum(size for _, size in term.kept[:-1])
    assert term.before[-1] - term.before[1] < grown / 2


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
@pytest.mark.parametrize("by", ["chunked", "reference"])
def test_a_probe_takes_what_the_divergence_has_in_hand(schedule, batch, kind, by, monkeypatch):
    """The same log-probabilities and entropy as by a product of their own, and no such product."""
    monkeypatch.setenv("OPD_KERNELS", by)
    schedule.assign(batch.samples)
    schedule.score(batch.samples)
    products = []
    counted = chunked.write_logits
    monkeypatch.setattr(chunked, "write_logits", lambda *given: products.append(1) or counted(*given))

    def probed(covers: bool) -> tuple[dict[str, float], dict[str, float], int]:
        probe = MismatchProbe(entropy=True)
        back = backend([*distill(schedule, FullVocabularyKL(kind=kind)), probe])
        if not covers:  # a token of a loss mask without weight: the divergence leaves it out
            batch.terms[0].kl_weight[0] = 0.0
        products.clear()
        return back.forward_backward(batch), probe.drain_metrics(), len(products)

    found, mismatch, few = probed(True)
    kept = batch.terms[0].kl_weight.copy()
    plain, other, many = probed(False)
    batch.terms[0].kl_weight[:] = kept
    assert mismatch == pytest.approx(other, rel=1e-6, abs=1e-7)
    assert found["entropy"] == pytest.approx(plain["entropy"], rel=1e-6)
    assert by == "reference" or few < many


def test_selected_tokens_train_the_weights_as_others_that_weigh_nothing_do(schedule, batch):
    """The head's gradient, too, which the passes over all tokens must not reach."""
    schedule.assign(batch.samples)
    schedule.score(batch.samples)
    batch = schedule.sort(batch)
    term = distill(schedule, FullVocabularyKL(select=SelectedTokens(share=0.5)))[0]
    chosen, choose = [], distill_terms.selected_weights

    def noted(*given):
        chosen.append(choose(*given))
        return chosen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill_terms, "selected_weights", noted)
        found = gradient(backend([term], max_tokens=8), batch)
    weights = np.split(
        torch.cat(chosen).numpy(), np.cumsum([len(s.response_ids) for s in batch.samples])[:-1]
    )
    assert any((part == 0).any() for part in weights)
    for terms, part in zip(batch.terms, weights, strict=True):
        terms.kl_weight = part
    wanted = gradient(backend(distill(schedule, FullVocabularyKL()), max_tokens=8), batch)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
