"""Responses go to their teachers when they end, while others are still being written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from opd.config import Recipe
from opd.rollout.transcript import Tokens, Transcript
from opd.teachers.schedule import TeacherSchedule
from opd.types import Chunk, RolloutRequest, Sample

if TYPE_CHECKING:
    from opd.rollout.collect import EncodedPrompt, Generates


def scoring_ahead(
    recipe: Recipe, engine: Generates, schedule: TeacherSchedule, prompts: Sequence[EncodedPrompt]
) -> Generates:
    """`engine`, telling the teachers what ends, where that helps: with served teachers and batches written in
    turn. Batches written ahead are written in another thread than the one that scores.
    """
    elsewhere = any(teacher.elsewhere for teacher in recipe.teachers.values())
    if elsewhere and recipe.rollout.schedule == "in_turn":
        return ScoreAhead(engine, schedule, prompts)
    return engine


class ScoreAhead:
    """Stands before an engine and changes nothing in what it writes.

    Only teachers that compute elsewhere are asked early. Should a response turn out otherwise in the end, it
    is asked about again: what was begun is known by its tokens. Everything happens in the caller's thread.

    Args:
        engine: What writes.
        schedule: Whose teachers are told.
        prompts: Domain and group of each request, whose uid begins with its prompt's.
    """

    def __init__(
        self, engine: Generates, schedule: TeacherSchedule, prompts: Sequence[EncodedPrompt]
    ) -> None:
        self._engine, self._schedule = engine, schedule
        self._prompts = {prompt.uid: prompt for prompt in prompts}

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[Chunk]:
        """The engine's steps, as they come."""
        asked = {request.uid: request for request in requests}
        transcript = Transcript({uid: Tokens.empty() for uid in asked})
        for step in self._engine.generate(requests):
            transcript.add(step)
            ended = [self._sample(asked[uid], transcript) for uid in step.finished if uid in asked]
            self._schedule.begin([sample for sample in ended if sample is not None])
            yield step

    def _sample(self, request: RolloutRequest, transcript: Transcript) -> Sample | None:
        group_uid = request.uid.rpartition("/")[0]
        prompt = self._prompts.get(group_uid)
        if prompt is None:
            return None  # a request of the recipe's own `generate`, named as it likes
        ids = transcript.tokens(request.uid).token_ids
        return Sample(request.uid, group_uid, prompt.domain, prompt.token_ids, response_ids=ids)
