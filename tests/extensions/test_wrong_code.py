"""Code of the user's own that has a wrong signature, raises, or returns something else: one sentence each, at
every extension point, that names key, path and what is wrong.
"""

import numpy as np
import pytest
import tiny
import wrong_code  # noqa: F401 - named by paths

from opd.config import DistillConfig, PolicyLossConfig
from opd.config.rl import CustomAdvantage, CustomDivergence
from opd.errors import ConfigError, OpdError, RewardError, RolloutError, TrainingError
from opd.rollout.collect import EncodedPrompt, load_generate
from opd.rollout.rewards import RewardRunner, load_reward
from opd.train.advantages import build_advantage, keep_groups
from opd.train.distill_terms import build_distill_term
from opd.train.packing import convert_batch
from opd.train.terms import PolicyTerm
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, SampleGroup, SamplingParams, TokenTerms
from opd.user_code import call_user_code


def scored() -> list:
    samples = tiny.samples([(2, 3), (2, 2), (3, 4)], teachers=["t"] * 3)
    for i, sample in enumerate(samples):
        sample.reward, sample.teacher = float(i), "t"
    return samples


def batch() -> RolloutBatch:
    samples = scored()
    terms = [TokenTerms.zeros(len(s.response_ids)) for s in samples]
    for term in terms:
        term.policy_weight = term.kl_weight = np.full(len(term.kl_weight), 0.1, np.float32)
    return RolloutBatch(samples, terms)


def train(term) -> None:
    TorchBackend(tiny.model(), tiny.training([term])).forward_backward(batch())


def generate(path: str) -> None:
    prompts = [EncodedPrompt("p/0", "a", np.array([2, 5], np.int32), None)]
    load_generate(path)(None, prompts, 2, SamplingParams(max_new_tokens=3), 0)


POINTS = {
    "rollout.generate": generate,
    "advantage.path": lambda path: build_advantage(CustomAdvantage(path=path))(
        SampleGroup("g", "a", scored())
    ),
    "specialist.group_filter": lambda path: keep_groups(
        [SampleGroup("g", "a", scored())], path, zero_variance=True
    ),
    "policy_loss.path": lambda path: train(PolicyTerm(PolicyLossConfig(path=path))),
    "distill.loss.path": lambda path: train(
        build_distill_term(DistillConfig(loss=CustomDivergence(path=path)), tiny.teacher_views)
    ),
    "distill.to_batch": lambda path: convert_batch(batch(), path, "distill.to_batch"),
    "reward": lambda path: RewardRunner({"t": load_reward(path)}, tiny.tokenizer()).score(scored()),
}
EVERYWHERE = (
    *("too_few", "too_many", "not_callable", "missing", "raises", "gives_none", "gives_text"),
    *("exits", "raises_mute", "gives_what_fights", "gives_list_of_fights"),
)
TENSORS = ("gives_scalar", "gives_number", "gives_integers", "gives_no_gradient", "gives_infinite")
ARRAYS = (
    "gives_nan",
    "gives_short_arrays",
    "gives_fewer",
    "gives_empty_list",
    "gives_list_of_none",
    "gives_number",
)
WRONG = {
    "rollout.generate": (*EVERYWHERE, "gives_empty_list", "gives_list_of_none", "gives_number"),
    "advantage.path": (*EVERYWHERE, *ARRAYS, "Abstract", "gives_no_end", "gives_huge"),
    "specialist.group_filter": (*EVERYWHERE, "gives_number", "gives_empty_list"),
    "policy_loss.path": (*EVERYWHERE, *TENSORS),
    "distill.loss.path": (*EVERYWHERE, "gives_scalar", "gives_number"),
    "distill.to_batch": (*EVERYWHERE, *ARRAYS),
    "reward": (
        *(*EVERYWHERE, "gives_empty_list", "gives_number_that_raises", "gives_parts", "gives_huge_parts"),
        *("gives_a_list_that_lies", "gives_endless_list", "gives_huge"),
    ),
}


@pytest.mark.parametrize(
    ("point", "name"), [(point, name) for point, names in WRONG.items() for name in names]
)
def test_wrong_code_is_one_sentence(point, name):
    path = f"wrong_code:{name}"
    with pytest.raises(OpdError) as caught:
        POINTS[point](path)
    said = str(caught.value)
    assert path in said
    assert "\n" not in said
    assert point in said or point in ("policy_loss.path", "distill.loss.path")
    assert "accepted forms" not in said or name in ("too_few", "too_many")
    if name in ("too_few", "too_many", "not_callable", "missing"):
        assert isinstance(caught.value, ConfigError | RewardError)
    elif name == "raises":
        assert isinstance(caught.value, TrainingError | RolloutError | RewardError)
        assert "raised KeyError: 'no such key' (wrong_code.py:13)" in said


@pytest.mark.parametrize("error", ["SystemExit(0)", "Mute", "KeyError('a')"])
@pytest.mark.parametrize("point", POINTS)
def test_a_module_that_raises_or_exits_is_one_sentence(tmp_path, monkeypatch, point, error):
    (tmp_path / "raises_at_import.py").write_text(f"from wrong_code import Mute\nraise {error}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises((ConfigError, RewardError), match="raises_at_import:f' cannot be loaded"):
        POINTS[point]("raises_at_import:f")


def test_a_reward_beyond_all_bounds_names_domain_and_value():
    with pytest.raises(RewardError, match=r"domain t, .* returned 1e\+308; scale rewards to 1e\+09"):
        POINTS["reward"]("wrong_code:gives_huge")
    with pytest.raises(RewardError, match=r"parts whose sum is 2e\+09"):
        POINTS["reward"]("wrong_code:gives_huge_parts")
    with pytest.raises(TrainingError, match=r"returned 1e\+30 .*domain a.*scale advantages"):
        POINTS["advantage.path"]("wrong_code:gives_huge")


def test_an_exception_without_words_is_told_by_its_type():
    with (
        pytest.raises(
            TrainingError, match=r"^f raised AssertionError \(test_wrong_code.py:\d+\); mend it\.$"
        ),
        call_user_code("f", TrainingError),
    ):
        raise AssertionError


def test_what_is_not_the_users_fault_passes():
    for error in (RolloutError("of the engine"), MemoryError()):
        with pytest.raises(type(error)) as caught, call_user_code("rollout.generate a:b", TrainingError):
            raise error
        assert caught.value is error
