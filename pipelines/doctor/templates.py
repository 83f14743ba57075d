"""What the doctor can tell of a chat template: how its answers end, and whether it writes the same again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opd.pipelines.doctor.checks import Finding


@dataclass(frozen=True, slots=True)
class Mends:
    """What somebody can do about a model that does not end its answers: here by a recipe."""

    stop: str = "add {id} to rollout.stop_ids"
    """Where it ends them with the token `id`."""
    endless: str = (
        "give rollout.stop what it writes there, or model.chat_template one that ends an answer: else it goes"
        " on to rollout.max_new_tokens"
    )
    header: str = "give model.chat_template one that heeds add_generation_prompt"


def template_findings(
    tokenizer: Any,
    template: Mapping[str, Any],
    stops: Sequence[int],
    strings: Sequence[str] = (),
    mends: Mends = Mends(),
) -> list[Finding]:
    """Whether answers end where the chat template ends them, and prompts go on to where the model begins.

    `template`: its own arguments; `stops`, `strings`: what ends a response.
    """
    from opd.data.demonstrations import missing_header
    from opd.models.tokenizers import after_answer, end_of_turn

    findings, turn = [], end_of_turn(tokenizer, template)
    after = after_answer(tokenizer, template)
    if turn is not None and turn not in stops:
        detail = (
            f"the chat template ends an answer with {turn} {tokenizer.convert_ids_to_tokens(turn)!r}, at"
            " which responses do not end"
        )
        findings.append(Finding("warning", "stop ids", f"{detail}; {mends.stop.format(id=turn)}"))
    elif after is not None and not set(after) & set(stops) and not strings:
        detail = (
            "the chat template writes nothing after an answer at which responses end, so a model that has"
            " learnt from it does not end them"
        )
        findings.append(Finding("warning", "stop ids", f"{detail}; {mends.endless}"))
    header = missing_header(tokenizer, template)
    if header is not None:
        detail = (
            f"it has no generation prompt: prompts end before {header!r}, which the model would have to write"
        )
        findings.append(Finding("warning", "chat template", f"{detail}; {mends.header}"))
    return findings


def written(tokenizer: Any, template: Mapping[str, Any], day: str = "2020-01-01") -> str | None:
    """A conversation as the chat template writes it: templates that write the same are the same."""
    from opd.models.chat_templates import TemplateError, render

    if not tokenizer.chat_template:
        return None
    roles = ("user", "assistant", "user")
    conversation = [{"role": role, "content": f"words of {role}"} for role in roles]
    try:
        return render(tokenizer, conversation, template, answer=True, day=day)
    except TemplateError as error:  # equal ones raise the same
        return str(error)


_DRAWS = re.compile(r"\|\s*random\b|\blipsum\s*\(")
_DATES = re.compile(r"\b\w*(?:date|today|time)\w*\b(?!\s*\()", re.IGNORECASE)


def check_sameness(tokenizer: Any, template: Mapping[str, Any]) -> list[Finding]:
    """Whether the chat template writes the same prompts when they are written again: another time, another
    day.
    """
    said = []
    source = str(tokenizer.chat_template)
    if _DRAWS.search(source):
        said.append(
            "it draws what it writes at random (`random`, `lipsum`): whoever writes a prompt again, such as a"
            " run that goes on, writes another; give model.chat_template one that does not"
        )
    now = written(tokenizer, template)
    if now != written(tokenizer, template, "2020-01-01T23:59:59"):
        said.append(
            "it writes the time of day (`strftime_now`) into prompts, so that no two are written alike;"
            f" {_mend_of_time(tokenizer, template)}"
        )
    elif now != written(tokenizer, template, "2021-12-31"):
        said.append(
            "it writes the date into prompts: a run that goes on on another day gives other prompts;"
            f" {_mend_of_time(tokenizer, template)}"
        )
    return [Finding("warning", "chat template", detail) for detail in said]


def _mend_of_time(tokenizer: Any, template: Mapping[str, Any]) -> str:
    """Return what makes a template write the same: an argument of its own in the time's place, or another."""
    for name in dict.fromkeys(_DATES.findall(str(tokenizer.chat_template))):
        given = {**template, name: "1 Jan 2020"}
        if written(tokenizer, given) == written(tokenizer, given, "2021-12-31T23:59:59"):
            return f"give it in model.chat_template_kwargs, as {name}"
    return "give model.chat_template one without it"
