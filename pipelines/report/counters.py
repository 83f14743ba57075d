"""The counters of the merge, in words: what was read and held, and what became of the rollouts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from opd.pipelines.report.load import Run
from opd.pipelines.report.words import NARROW, amount, duration, percent

COUNTS = {
    "head_loads": "Heads loaded",
    "resident_heads_peak": "Heads in memory at once, at most",
    "prefetched_heads_peak": "Heads read ahead beside them, at most",
    "teacher_tokens": "Tokens scored by teachers",
    "cached_tokens": "Tokens whose hidden states were in the cache",
    "rollout/requests": "Responses asked for",
    "rollout/completed": "Responses completed",
    "rollout/truncated": "Responses cut at the length limit",
    "rollout/failed": "Responses failed",
    "rollout/aborted": "Responses aborted",
    "rollout/replayed_requests": "Responses taken whole from the log",
    "rollout/resumed_requests": "Responses continued from the log",
    "rollout/interrupted_requests": "Responses interrupted",
    "rollout/hedged_requests": "Responses asked for twice",
    "rollout/deadlines": "Responses that missed their deadline",
    "rollout/engine_failures": "Engines that failed",
    "rollout/engine_timeouts": "Engines that did not answer in time",
    "rollout/suspensions": "Times the engine made room",
    "rollout/tokens": "Tokens written",
    "rollout/observation_tokens": "Tokens of an environment",
    "rollout/prefilled_tokens": "Tokens of prompts and prefixes computed",
    "rollout/kv_restored_sequences": "Responses whose keys and values were restored",
    "rollout/kv_restored_tokens": "Tokens whose keys and values were restored",
    "rollout/replayed_tokens": "Tokens taken from the log",
}
BYTES = {
    "bytes_read": "Read from the stores",
    "weight_bytes_peak": "Weights in memory at once, at most",
    "rollout/kv_saved_bytes": "Keys and values kept",
}
SECONDS = {"stall_seconds": "Waited for layers and heads", "rollout/log_seconds": "Waited for the log"}


WAITED = re.compile(r"teacher/(?P<teacher>.+)/wait_seconds")


def rows(run: Run) -> Iterator[tuple[str, str]]:
    """(label, value) of every counter that is not 0, in a fixed order; those without a label come last."""
    known = [*COUNTS, *BYTES, *SECONDS]
    for name in [*known, *(name for name in run.counters if name not in known)]:
        value = run.counters.get(name, 0)
        if not value:
            continue
        if name in COUNTS:
            yield COUNTS[name], amount(value)
        elif name in BYTES:
            yield BYTES[name], f"{amount(value)}B"
        elif name in SECONDS:
            yield SECONDS[name], duration(value) + _share(run, name, value)
        elif found := WAITED.fullmatch(name):
            yield f"Waited for teacher {found['teacher']}", duration(value) + _share_of_steps(run, value)
        else:
            yield name.replace("_", " ").replace("/", ": "), f"{value:,.6g}".replace(",", NARROW)


def _share(run: Run, name: str, value: float) -> str:
    """The part of the phase that a wait belongs to."""
    phase = "rollout" if name.startswith("rollout/") else "score"
    merge = run.stage("merge")
    whole = merge.phases.get(phase, 0.0) if merge else 0.0
    return f" ({percent(value / whole)} of {phase})" if whole > 0 else ""


def _share_of_steps(run: Run, value: float) -> str:
    """The part of the merge's steps, without what is measured in between."""
    merge = run.stage("merge")
    phases = merge.phases.items() if merge else ()
    whole = sum(seconds for phase, seconds in phases if phase != "evaluate")
    return f" ({percent(value / whole)} of the steps)" if whole > 0 else ""
