import numpy as np
import pytest
import tiny
import torch

from opd.config import DistillConfig
from opd.errors import CheckpointError, TeacherError
from opd.models.checkpoint import save_checkpoint
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.schedule import Router, TeacherSchedule, sampled_logprobs
from opd.train.distill_terms import build_distill_term
from opd.train.torch_backend import TorchBackend
from opd.types import HiddenStates, RolloutBatch, TokenLogprobs, TokenTerms

T = 0.7
WEIGHTS = {"a": 0.25, "b": 0.75}


@pytest.fixture
def teachers(tmp_path):
    made = {}
    for i, name in enumerate(WEIGHTS):
        save_checkpoint(tiny.model(seed=10 + i), tiny.tokenizer(), tmp_path / name, {})
        made[name] = LocalTeacher(name, tmp_path / name, max_tokens=9)
    return made


def logprobs(teacher, sample):
    """[R, V] float32, one sample at a time."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    hidden = teacher.model.hidden(ids, torch.arange(len(ids)), [0, len(ids)])
    rows = (hidden @ teacher.model.module.lm_head.weight.T / T).log_softmax(-1)
    return rows[len(sample.prompt_ids) - 1 : -1].detach()


@pytest.mark.parametrize("mixture", ["one_hot", "geometric", "arithmetic"])
def test_sampled_logprobs_pool_the_teachers_of_a_mixture(teachers, mixture):
    samples = tiny.samples([(3, 4), (2, 0), (5, 6), (4, 3)])
    schedule = TeacherSchedule(teachers, Router({"a": WEIGHTS}, mixture))
    schedule.assign(samples)
    schedule.score(samples)
    found = sampled_logprobs(schedule, samples, mixture, T)
    for sample, ours in zip(samples, found, strict=True):
        ids = torch.from_numpy(sample.response_ids.astype(np.int64))[:, None]
        each = {name: logprobs(teacher, sample).gather(1, ids)[:, 0] for name, teacher in teachers.items()}
        expected = {
            "one_hot": each.get(sample.teacher),
            "geometric": 0.25 * each["a"] + 0.75 * each["b"],
            "arithmetic": (0.25 * each["a"].exp() + 0.75 * each["b"].exp()).log(),
        }[mixture]
        np.testing.assert_allclose(ours, expected.numpy(), atol=1e-5)


def test_the_order_of_teachers_has_no_history(teachers):
    samples = tiny.samples([(3, 4)] * 12)
    batch = RolloutBatch(samples, [TokenTerms.zeros(4) for _ in samples])
    orders = []
    for warm in ([], samples[6:]):
        schedule = TeacherSchedule(teachers, Router({"a": WEIGHTS}, "one_hot"))
        schedule.assign(warm)
        schedule.assign(samples)
        orders.append([s.uid for s in schedule.sort(batch).samples])
        assert [s.teacher for s in schedule.sort(batch).samples] == sorted(s.teacher for s in samples)
    assert orders[0] == orders[1]


def test_the_floor_of_a_geometric_mixture(teachers):
    samples = tiny.samples([(3, 4), (5, 6)])
    schedule = TeacherSchedule(teachers, Router({"a": WEIGHTS}, "geometric"))
    schedule.assign(samples)
    schedule.score(samples)
    batch = RolloutBatch(samples, [TokenTerms.zeros(len(s.response_ids)) for s in samples])
    for terms in batch.terms:
        terms.kl_weight[:] = 0.1
    term = build_distill_term(DistillConfig(mixture="geometric"), schedule)
    backend = TorchBackend(tiny.model(), tiny.training([term], T))
    metrics = backend.forward_backward(batch)
    logs = [[logprobs(teacher, s) for s in samples] for teacher in teachers.values()]
    pooled = torch.cat([0.25 * a + 0.75 * b for a, b in zip(*logs, strict=True)])
    expected = -pooled.logsumexp(-1).mean().item()
    assert metrics["kl/floor"] == pytest.approx(expected, abs=1e-5)
    assert metrics["kl/mean"] > metrics["kl/floor"] > 0
    assert schedule.take_counters()["head_loads"] == 2


def test_a_sample_that_was_not_scored_is_named(teachers):
    samples = tiny.samples([(3, 4)])
    schedule = TeacherSchedule(teachers, Router({"a": {"a": 1.0}}, "one_hot"))
    schedule.assign(samples)
    with pytest.raises(TeacherError, match="s0 was not scored by teacher a"):
        schedule.teacher_views(samples)


class Broken:
    """A teacher that answers with the wrong rows."""

    name = "a"
    digest = "0"

    def __init__(self, rows):
        self.rows = rows

    def score(self, samples):
        return HiddenStates(self.rows)

    def load_head(self):
        raise AssertionError("a broken teacher's head is never needed")


@pytest.mark.parametrize(
    ("rows", "message"), [(torch.zeros(3, 8), "4 response tokens"), (torch.full((4, 8), torch.nan), "finite")]
)
def test_unusable_rows_stop_before_they_reach_a_loss(rows, message):
    samples = tiny.samples([(3, 4)])
    schedule = TeacherSchedule({"a": Broken(rows)}, Router({"a": {"a": 1.0}}, "one_hot"))
    schedule.assign(samples)
    with pytest.raises(TeacherError, match=message):
        schedule.score(samples)


def test_a_teacher_that_gives_logprobs_is_asked_once_a_step():
    asked: list[list[str]] = []

    class Gives:
        name, digest = "a", "a"

        def score(self, samples):
            asked.append([sample.uid for sample in samples])
            return TokenLogprobs(torch.full((sum(len(s.response_ids) for s in samples),), -1.5))

        def load_head(self):
            raise AssertionError("log-probabilities need no head")

    samples = tiny.samples([(3, 4), (2, 1), (5, 6)])
    schedule = TeacherSchedule({"a": Gives()}, Router({"a": {"a": 1.0}}, "one_hot"))
    schedule.assign(samples)
    schedule.score(samples[:2])
    schedule.drop_samples(samples[:2])
    schedule.score(samples)
    assert asked == [["s0", "s1"], ["s2"]]
    assert [len(own) for own in sampled_logprobs(schedule, samples, "one_hot", T)] == [4, 1, 6]
    schedule.release()
    schedule.score(samples)
    assert asked[2:] == [["s0", "s1", "s2"]]


def test_a_missing_teacher_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        LocalTeacher("t", tmp_path / "nowhere").score(tiny.samples([(2, 2)]))
