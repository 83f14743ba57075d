"""Write a few samples of a stage's last step, or of one shortly before, for viewers of the run."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from opd.errors import error_fix
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.samples import StepSamples
from opd.redact import redact
from opd.storage.files import json_bytes, read_plain, write_atomic
from opd.types import Sample, SampleGroup, Status, prompt_text
from opd.untrusted import read_document

_log = logging.getLogger(__name__)
KEPT_PROMPTS, KEPT_RESPONSES = 6, 4
"""Maximum prompts of the last step, and maximum responses to each."""
_CHARACTERS, _TOKENS = 3000, 2048
"""Characters of a stored text (its beginning and its end), and tokens that are decoded for it."""
_MOST_BYTES = 1 << 20
EVERY = 1.0
"""Minimum seconds between two writes. In short steps of a toy one write took a fortieth."""
Text = Callable[[Sample], str]
"""A response as its reward sees it."""


class LastSamples:
    """A few samples of a stage's last step with their rewards, for viewers of the run.

    Each step rewrites the small file, unless one did within `EVERY` seconds. Nothing else reads it, and a
    step does not fail without it.

    Args:
        text: A response as its reward sees it. `None`: nothing is stored.
        clock: Seconds, from anywhere.
    """

    def __init__(self, path: Path, text: Text | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._text, self._failed = path, text, False
        self._clock, self._due = clock, -math.inf

    @classmethod
    def for_stage(cls, context: StageContext, algorithm: object, step: int) -> LastSamples:
        """Return the writer of a stage that continues after step number `step`. Only the first rank writes,
        and only if `algorithm` rewards responses. Then its `data` decodes them.
        """
        path = context.folder.last_samples(context.stage)
        data = getattr(algorithm, "data", None)
        if not context.ranks.is_main or not isinstance(data, DomainSet):
            return cls(path, None)
        last = cls(path, data.rewards.readable_text)
        last.discard_later(step)
        return last

    def write(self, step: int, samples: StepSamples, *, final: bool = False) -> None:
        """Store some samples of step number `step`, the first being 1, once they are rewarded. It writes if
        it is time, or if the step is the stage's `final` one.
        """
        if self._text is None or not (final or self._clock() >= self._due):
            return
        # At most `KEPT_PROMPTS` groups: the first of each domain, then the second ones.
        turns: dict[str, int] = {}
        ranked: list[tuple[int, SampleGroup]] = []
        for group in samples.groups:
            if group.samples:
                turns[group.domain] = turn = turns.get(group.domain, 0) + 1
                ranked.append((turn, group))
        prompts = []
        for _, group in sorted(ranked, key=lambda entry: entry[0])[:KEPT_PROMPTS]:
            best = sorted(
                group.samples, key=lambda s: -math.inf if s.reward is None else s.reward, reverse=True
            )
            half = KEPT_RESPONSES // 2
            chosen = [*best[:half], *best[-half:]] if len(best) > KEPT_RESPONSES else best
            with samples.with_tokens(replace(group, samples=chosen)) as loaded:
                prompts.append(_group_entry(loaded, len(best), self._text))
        try:
            document = {"step": step, "prompts": prompts}
            write_atomic(self._path, json_bytes(document), durable=False)
        except OSError as error:
            if not self._failed:
                reason = f"{error.strerror or error}; {error_fix(error, 'look at the disk')}"
                _log.warning("samples of the last step are not kept in %s: %s", self._path, reason)
            self._failed = True
        self._due = self._clock() + EVERY

    def discard_later(self, step: int) -> None:
        """Remove samples that a killed attempt wrote after step number `step`."""
        written = None
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            written = read_document(read_plain(self._path), _MOST_BYTES)["step"]
        if type(written) is not int or written > step:
            with contextlib.suppress(OSError):
                self._path.unlink()


def _group_entry(group: SampleGroup, size: int, text: Text) -> dict[str, Any]:
    first = group.samples[0]
    label = first.label if isinstance(first.label, str) else json.dumps(first.label, default=str)
    responses = []
    for sample in group.samples:
        if len(sample.response_ids) <= _TOKENS:
            response = text(sample)
        else:
            ends = [
                replace(sample, response_ids=sample.response_ids[part], loss_mask=sample.loss_mask[part])
                for part in (slice(_TOKENS // 2), slice(-(_TOKENS // 2), None))
            ]
            ends[0].status = Status.TRUNCATED
            response = " [...] ".join(map(text, ends))
        responses.append(
            {
                "text": _shorten_text(response),
                "reward": sample.reward,
                "parts": dict(islice(sample.reward_parts.items(), 16)),
                "tokens": len(sample.response_ids),
                "cut": sample.status is Status.TRUNCATED,
                "teacher": sample.teacher,
            }
        )
    return {
        "domain": group.domain,
        "prompt": _shorten_text(prompt_text(first.metadata)),
        "label": _shorten_text(label),
        "responses": size,
        "shown": responses,
    }


def _shorten_text(text: str) -> str:
    """Return the beginning and end of a text. Secrets are hidden before the cut could leave half of one."""
    text, half = redact(text), _CHARACTERS // 2
    return text if len(text) <= _CHARACTERS else f"{text[:half]} [...] {text[-half:]}"
