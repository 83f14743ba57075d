"""Domains side by side: no domain's slow tail keeps the engine from the others."""

from dataclasses import replace

import numpy as np
import pytest
import worlds
from exact import Recorded, check_exact
from test_episodes import contents, digits_engine, episodes, prompts, sampling

from opd.errors import RolloutError
from opd.pipelines.stages.teachers import ScoreAhead
from opd.rollout.collect import DomainSampling, collect, generate_groups
from opd.types import SampleGroup


def ways(**kinds) -> dict[str, DomainSampling]:
    """By domain: what its episodes are, or `None` for single answers."""
    return {
        name: DomainSampling(sampling(), collect if kind is None else episodes(kind, turn_tokens=5))
        for name, kind in kinds.items()
    }


def asked(*domains: str):
    return [replace(one, uid=f"{name}{one.uid}", domain=name) for name in domains for one in prompts(2)]


class Once(Recorded):
    """Counts the calls."""

    calls = 0

    def generate(self, requests, more=None):
        self.calls += 1
        self.asked |= {one.uid: one for one in requests}
        return super().generate(requests, more)


def test_one_domain_ends_while_another_waits_for_its_environment():
    """Each episode of the first is answered only when one of the second is over."""
    worlds.Last.over.clear()
    engine = Once(digits_engine())
    found = generate_groups(
        engine, asked("a", "s", "b"), 2, ways(a="worlds:Last", s=None, b="worlds:First"), 0
    )
    assert engine.calls == 1
    assert [group.uid for group in found] == [prompt.uid for prompt in asked("a", "s", "b")]
    check_exact([group for group in found if group.domain != "s"], engine)


def test_each_response_is_what_its_domain_alone_would_have_written():
    kinds = {"a": "worlds:Sum", "s": None, "b": "worlds:Blocking"}
    together = generate_groups(digits_engine(), asked(*kinds), 2, ways(**kinds), 3)
    alone: list[SampleGroup] = []
    for name in kinds:
        alone += generate_groups(digits_engine(), asked(name), 2, ways(**kinds), 3)
    for one, other in zip(together, alone, strict=True):
        for mine, theirs in zip(one.samples, other.samples, strict=True):
            assert mine.response_ids.tolist() == theirs.response_ids.tolist()
            assert mine.loss_mask.tolist() == theirs.loss_mask.tolist()
            np.testing.assert_allclose(mine.rollout_logprobs, theirs.rollout_logprobs, atol=1e-5)
    assert contents(together[:2]) == contents(alone[:2])


def test_a_domain_that_fails_ends_all_and_closes_every_world():
    worlds.MADE.clear()
    kinds = {"a": "worlds:Hangs", "s": None}
    bad = {"b": DomainSampling(sampling(), episodes("worlds:Answers", params={"what": "nan"}, attempts=1))}
    with pytest.raises(RolloutError, match="reward nan"):
        generate_groups(digits_engine(), asked("a", "s", "b"), 1, ways(**kinds) | bad, 0)
    assert all(world.closed for world in worlds.MADE if hasattr(world, "task"))


class Listening:
    """A schedule that keeps what it was told has ended."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, list[int]]] = []

    def begin_scoring(self, samples) -> None:
        self.begun += [(sample.uid, sample.response_ids.tolist()) for sample in samples]


def test_single_answers_are_scored_ahead_also_beside_episodes():
    schedule, kinds = Listening(), {"a": "worlds:Sum", "s": None}
    engine = ScoreAhead(digits_engine(), schedule, asked(*kinds))  # type: ignore[arg-type]
    found = generate_groups(engine, asked(*kinds), 2, ways(**kinds), 0)
    answers = {
        s.uid: s.response_ids.tolist() for group in found if group.domain == "s" for s in group.samples
    }
    assert dict(schedule.begun) == answers
    assert len(schedule.begun) == len(answers) == 4
