"""Domains from the `reasoning-gym` library: generators with verifiers, for text models."""

from __future__ import annotations

import difflib
import functools
from typing import Any

from opd.config.data import DomainConfig
from opd.data.prompts import Checker, Domain, Prompt, fraction
from opd.errors import DataError, MissingExtraError

_PATIENCE = 2000
"""A task counts as exhausted after this many entries in a row that brought no new prompt."""


def load_reasoning_gym(
    task: str, name: str, config: DomainConfig, *, seed: int, held_out_prompts: int
) -> Domain:
    """Distinct questions of a reasoning-gym task, held out by a hash of the question, with its own verifier.

    `config.params` are the task's own arguments, and `chat: true` to ask as a user message instead of plain
    text. A label is `{"answer": ..., "index": ...}`: the verifier generates the entry of that index again. A
    task with few different questions gives fewer training prompts than asked for. Raises `DataError` for an
    unknown task or argument, or if nothing is left to train or to evaluate on; `MissingExtraError` without
    the library.
    """
    params = dict(config.params)
    chat = bool(params.pop("chat", False))
    wanted = (config.prompts, held_out_prompts)
    dataset = _create(task, name, params | {"seed": seed, "size": _PATIENCE * (sum(wanted) + 1)})
    piles: tuple[dict[str, Prompt], dict[str, Prompt]] = ({}, {})
    newest = index = 0
    while index - newest < _PATIENCE and any(len(p) < n for p, n in zip(piles, wanted, strict=True)):
        entry = dataset[index]
        question = str(entry["question"])
        pile = int(fraction(question) < config.held_out)
        if question not in piles[pile] and len(piles[pile]) < wanted[pile]:
            content = [{"role": "user", "content": question}] if chat else question
            piles[pile][question] = Prompt.of(content, {"answer": entry["answer"], "index": index}, name)
            newest = index
        index += 1
    if not piles[0] or len(piles[1]) < min(1, held_out_prompts):
        raise DataError(
            f"domains.{name}: reasoning-gym task {task!r} has only {len(piles[0])} training and "
            f"{len(piles[1])} held-out questions with these params; make them harder or change held_out."
        )
    return Domain(name, list(piles[0].values()), list(piles[1].values()), _verifier(dataset))


def _create(task: str, name: str, params: dict[str, Any]) -> Any:
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError(f"the source reasoning-gym:{task}", "reasoning-gym") from error
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"did you mean {near[0]}?" if near else "see the library's gallery for its tasks."
        raise DataError(f"domains.{name}.source: there is no reasoning-gym task {task!r}; {hint}")
    try:
        return reasoning_gym.create_dataset(task, **params)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(
            f"domains.{name}.params do not fit reasoning-gym task {task!r}: {' '.join(str(error).split())}."
        ) from error


def _verifier(dataset: Any) -> Checker:
    entry = functools.lru_cache(maxsize=4096)(dataset.__getitem__)

    def check(completion: str, label: Any) -> float:
        return float(dataset.score_answer(completion.strip(), entry(label["index"])))

    return check
