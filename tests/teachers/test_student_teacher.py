"""The student as its own teacher: the scores of a copy of its weights, its moving average against float64."""

import copy
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from opd.config.train import LoRAConfig
from opd.errors import CheckpointError, TeacherError, TrainingError
from opd.models.adapters import AdaptedLM
from opd.models.causal_lm import CausalLM
from opd.ranks import Ranks, process_group
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.schedule import Router, TeacherSchedule
from opd.teachers.student_teacher import StudentTeacher
from opd.train.fsdp_backend import FSDPBackend
from opd.train.teacher_views import TeacherView
from opd.train.terms import CrossEntropyTerm
from opd.train.torch_backend import MastersBackend, TorchBackend
from opd.types import RolloutBatch, Sample, TokenTerms

DECAY, LR, TOKENS = 0.9, 1e-2, 16
LENGTHS = [(3, 4), (5, 6), (2, 9), (1, 2)]
LORA = LoRAConfig(rank=4, alpha=8, targets=["q_proj", "down_proj"])


def backend_of(kind: str, seed: int = 0) -> TorchBackend:
    model, training = tiny.model(seed), tiny.training([CrossEntropyTerm()], max_tokens=TOKENS)
    if kind == "adapters":
        return TorchBackend(AdaptedLM(model, LORA, "base"), training)
    if kind == "masters":
        return MastersBackend(model, training, torch.bfloat16)
    return TorchBackend(model, training)


def step(backend: TorchBackend, seed: int) -> None:
    samples = tiny.samples(LENGTHS, seed=seed)
    terms = [TokenTerms.zeros(len(sample.response_ids)) for sample in samples]
    for term in terms:
        term.ce_weight = np.full_like(term.ce_weight, 0.05)
    backend.forward_backward(RolloutBatch(samples, terms))
    backend.step(LR)


def followed(backend: TorchBackend, decay: float | None = None, updates: int = 1) -> StudentTeacher:
    teacher = StudentTeacher("self", decay=decay, max_tokens=TOKENS, vocabulary=len(tiny.tokenizer()))
    teacher.follow(backend, updates)
    return teacher


def rows_of(model: CausalLM, samples: list[Sample]) -> torch.Tensor:
    """[N, D] of a model, as a teacher of its own."""
    teacher = LocalTeacher("copy", "nowhere", max_tokens=TOKENS)
    teacher.model = model
    return teacher.score(samples).rows


def weights_of(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.model.weights()}


@pytest.mark.parametrize("kind", ["plain", "adapters", "masters"])
def test_its_scores_are_those_of_a_copy_at_every_step(kind):
    backend, samples = backend_of(kind), tiny.samples(LENGTHS, seed=9)
    teacher, found, digests = followed(backend), [], set()
    for number in range(3):
        scores, live = teacher.score(samples).rows, copy.deepcopy(backend.model)
        assert not scores.requires_grad
        assert torch.equal(scores, rows_of(live, samples))
        head, expected = teacher.load_head(), live.head()
        assert head.vocabulary == len(tiny.tokenizer())
        assert not head.weight.requires_grad
        assert torch.equal(head.weight, expected.weight)
        assert head.weight.data_ptr() == backend.model.head().weight.data_ptr()  # one copy of the weights
        assert (teacher.weight_bytes, teacher.borrows) == (0, True)
        found.append(scores)
        digests.add(teacher.digest)
        step(backend, number)
        with pytest.raises(TeacherError, match="has scored nothing with the student's present weights"):
            teacher.load_head()
    assert len(digests) == 3
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    assert followed(backend).digest not in digests  # nor is another attempt's


def test_the_head_of_sharded_weights_is_a_copy():
    training = tiny.training([CrossEntropyTerm()], max_tokens=TOKENS)
    with process_group():
        backend = FSDPBackend(tiny.model(), training, Ranks(), torch.float32)
        teacher = followed(backend)
        teacher.score(tiny.samples(LENGTHS))
        step(backend, 0)
        assert torch.equal(teacher.load_head().weight, tiny.model().head().weight)


@pytest.mark.parametrize("kind", ["plain", "adapters", "masters"])
def test_a_moving_average_is_that_of_float64(kind):
    backend, samples = backend_of(kind), tiny.samples(LENGTHS, seed=9)
    teacher = followed(backend, DECAY)
    reference = {name: one.detach().double() for name, one in backend._parameters.items()}
    for number in range(5):
        step(backend, number)
        for name, one in backend._parameters.items():
            reference[name] = DECAY * reference[name] + (1 - DECAY) * one.detach().double()
    average = backend.average
    assert average is not None
    for name, expected in reference.items():
        assert (average.tensors[name].double() - expected).abs().max() < 1e-6 * expected.abs().max()
        assert not torch.equal(average.tensors[name], backend._parameters[name])
    before = weights_of(backend)
    scores, head = teacher.score(samples).rows, teacher.load_head().weight
    with backend.averaged_weights():
        smooth = copy.deepcopy(backend.model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.model.weights())
    assert torch.equal(scores, rows_of(smooth, samples))
    assert torch.equal(head, smooth.head().weight)
    assert not torch.equal(scores, rows_of(copy.deepcopy(backend.model), samples))
    assert teacher.weight_bytes == average.nbytes + head.nbytes


@pytest.mark.parametrize("kind", ["plain", "masters"])
def test_a_copy_is_renewed_every_few_steps_also_after_a_checkpoint(kind):
    backend, resumed = backend_of(kind), backend_of(kind, seed=1)
    for one in (backend, resumed):
        StudentTeacher("copy", decay=0.0, every=3).follow(one, 1)
    assert backend.average is not None
    assert resumed.average is not None
    taken = {name: one.detach().clone() for name, one in backend._parameters.items()}
    for number in range(7):
        if number == 2:
            resumed.load_state(backend.state())  # pyright: ignore[reportArgumentType]
        step(backend, number)
        if number >= 2:
            step(resumed, number)
            assert all(torch.equal(backend.average.tensors[n], resumed.average.tensors[n]) for n in taken)
        if number % 3 == 2:
            taken = {name: one.detach().clone() for name, one in backend._parameters.items()}
        assert all(torch.equal(backend.average.tensors[name], one) for name, one in taken.items())
    other = backend_of(kind)
    StudentTeacher("average", decay=DECAY).follow(other, 1)
    with pytest.raises(CheckpointError, match="and the trained weights differ in"):
        other.load_state(backend.state())  # pyright: ignore[reportArgumentType]


def test_an_average_that_fails_meanwhile_leaves_the_weights(monkeypatch):
    backend = backend_of("plain")
    teacher = followed(backend, DECAY)
    step(backend, 0)
    before = weights_of(backend)
    monkeypatch.setattr(backend, "hidden", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        teacher.score(tiny.samples(LENGTHS))
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.model.weights())


@pytest.mark.parametrize("kind", ["plain", "masters"])
def test_a_checkpoint_goes_on_with_the_average(kind, tmp_path):
    whole = backend_of(kind)
    followed(whole, DECAY)
    for number in range(4):
        if number == 2:
            state = whole.state()
            assert tuple(state) == whole.files == ("model", "optimizer", "average")
            for file, tensors in state.items():
                save_file(dict(tensors), tmp_path / file)  # pyright: ignore[reportArgumentType]
        step(whole, number)
    resumed = backend_of(kind, seed=1)
    teacher = followed(resumed, DECAY)
    resumed.load_state({file: load_file(tmp_path / file) for file in resumed.files})
    for number in (2, 3):
        step(resumed, number)
    samples = tiny.samples(LENGTHS)
    assert torch.equal(teacher.score(samples).rows, followed(whole, DECAY).score(samples).rows)
    for name, tensor in whole.average.tensors.items():  # pyright: ignore[reportOptionalMemberAccess]
        assert torch.equal(tensor, resumed.average.tensors[name])  # pyright: ignore[reportOptionalMemberAccess]


def test_a_checkpoint_of_another_average_is_refused():
    backend = backend_of("plain")
    followed(backend, DECAY)
    assert backend.average is not None
    right = {name: tensor.clone() for name, tensor in backend.average.tensors.items()}
    first = min(right)
    missing = {name: tensor for name, tensor in right.items() if name != first}
    for wrong, sentence in ((missing, f"differ in {first}"), (right | {first: torch.zeros(1)}, r"is \[1\]")):
        with pytest.raises(CheckpointError, match=sentence):
            backend.average.load(wrong, lambda name, like, wrong=wrong: wrong[name])


def test_several_updates_use_the_head_that_scored():
    backend, samples = backend_of("plain"), tiny.samples(LENGTHS)
    teacher = followed(backend, updates=2)
    teacher.score(samples)
    head = teacher.load_head().weight.clone()
    step(backend, 0)
    assert torch.equal(teacher.load_head().weight, head)
    assert not torch.equal(backend.model.head().weight, head)
    assert not teacher.borrows
    teacher.score(samples)
    assert torch.equal(teacher.load_head().weight, backend.model.head().weight)


def test_a_schedule_scores_each_step_with_its_weights():
    backend, samples = backend_of("plain"), tiny.samples(LENGTHS)
    schedule = TeacherSchedule({"self": StudentTeacher("self")}, Router({"a": {"self": 1.0}}, "one_hot"))
    schedule.follow(backend)
    found = []
    for number in range(2):
        schedule.assign(samples)
        schedule.score(samples)
        found.append(schedule.hidden_rows("self", samples).clone())
        (view,) = schedule.teacher_views(samples)
        assert isinstance(view, TeacherView)
        assert view.head.weight.data_ptr() == backend.model.head().weight.data_ptr()
        resident = schedule.resident()
        assert (resident["teacher_weights"], resident["teacher_heads"]) == (0, 0)
        schedule.release()
        step(backend, number)
    assert not torch.equal(*found)


def test_weights_in_16_bits_have_no_average():
    model = tiny.model()
    model.module.bfloat16()
    backend = TorchBackend(model, tiny.training([CrossEntropyTerm()]))
    with pytest.raises(TrainingError, match=r"learn in bfloat16 would stand still; set train\.precision"):
        followed(backend, DECAY)


def test_a_student_that_nobody_trains_teaches_nothing(tmp_path: Path):
    teacher = StudentTeacher("self")
    with pytest.raises(TeacherError, match="follows none yet"):
        teacher.score(tiny.samples(LENGTHS))
    with pytest.raises(TeacherError, match=r"object cannot lend; set train\.backend to torch"):
        teacher.follow(object(), 1)  # pyright: ignore[reportArgumentType]
    assert (teacher.collective, teacher.weight_bytes) == (False, 0)
