"""The doctor's checks of tokenizers: ends of answers, chat template, teachers' tokens, lengths of prompts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config import Recipe
from opd.models.token_ids import id_count
from opd.pipelines.check.checks import Finding, given_teachers
from opd.untrusted import safe_excerpt

if TYPE_CHECKING:
    from opd.models.token_alignment import TokenTranslator
    from opd.pipelines.check.models import Models
    from opd.rollout.prompts import Domain, Prompt


@dataclass(frozen=True, slots=True)
class StopAdvice:
    """Advice for a model that does not end its answers, for users of a recipe."""

    stop: str = "add {id} to rollout.stop_ids"
    """Advice if it ends them with the token `id`."""
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
    mends: StopAdvice = StopAdvice(),
) -> list[Finding]:
    """Check that answers end as in the chat template, and that prompts have the generation prompt.

    `template`: its arguments. `stops`, `strings`: the ends of a response.
    """
    from opd.data.demonstrations import missing_header
    from opd.models.tokenizers import after_answer, end_of_turn

    findings, turn = [], end_of_turn(tokenizer, template)
    ending = after_answer(tokenizer, template)
    if turn is not None and turn not in stops:
        detail = (
            f"the chat template ends an answer with {turn} {tokenizer.convert_ids_to_tokens(turn)!r}, at"
            " which responses do not end"
        )
        findings.append(Finding("warning", "stop ids", f"{detail}; {mends.stop.format(id=turn)}"))
    elif ending is not None and not set(ending) & set(stops) and not strings:
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


def render_conversation(tokenizer: Any, template: Mapping[str, Any], day: str = "2020-01-01") -> str | None:
    """Render a conversation with the chat template, to compare templates."""
    from opd.models.chat_templates import TemplateError, render_messages

    if not tokenizer.chat_template:
        return None
    roles = ("user", "assistant", "user")
    conversation = [{"role": role, "content": f"words of {role}"} for role in roles]
    try:
        return render_messages(tokenizer, conversation, template, answer=True, day=day)
    except TemplateError as error:  # equal templates raise the same
        return str(error)


_DRAWS = re.compile(r"\|\s*random\b|\blipsum\s*\(")
_DATES = re.compile(r"\b\w*(?:date|today|time)\w*\b(?!\s*\()", re.IGNORECASE)


def check_sameness(tokenizer: Any, template: Mapping[str, Any]) -> list[Finding]:
    """Check that the chat template renders the same prompts at another time and on another day."""
    details = []
    source = str(tokenizer.chat_template)
    if _DRAWS.search(source):
        details.append(
            "it draws what it writes at random (`random`, `lipsum`): whoever writes a prompt again, such as a"
            " run that goes on, writes another; give model.chat_template one that does not"
        )
    now = render_conversation(tokenizer, template)
    if now != render_conversation(tokenizer, template, "2020-01-01T23:59:59"):
        details.append(
            "it writes the time of day (`strftime_now`) into prompts, so that no two are written alike;"
            f" {_time_advice(tokenizer, template)}"
        )
    elif now != render_conversation(tokenizer, template, "2021-12-31"):
        details.append(
            "it writes the date into prompts: a run that goes on on another day gives other prompts;"
            f" {_time_advice(tokenizer, template)}"
        )
    return [Finding("warning", "chat template", detail) for detail in details]


def _time_advice(tokenizer: Any, template: Mapping[str, Any]) -> str:
    """Return the fix for a template that renders the time: an argument in its place, or another template."""
    for name in dict.fromkeys(_DATES.findall(str(tokenizer.chat_template))):
        dated = {**template, name: "1 Jan 2020"}
        later = render_conversation(tokenizer, dated, "2021-12-31T23:59:59")
        if render_conversation(tokenizer, dated) == later:
            return f"give it in model.chat_template_kwargs, as {name}"
    return "give model.chat_template one without it"


def check_tokenizer(title: str, path: Path, recipe: Recipe, models: Models) -> list[Finding]:
    """Check that the teacher's tokens are the student's: one sentence for each difference."""
    from opd.models.tokenizers import compare_tokenizers, has_tokenizer, load_tokenizer

    if not has_tokenizer(path):
        detail = "its folder has no tokenizer, so nothing shows that its tokens are the student's"
        return [Finding("warning", title, f"{detail}; copy the tokenizer it was trained with there")]
    tokenizer = load_tokenizer(path)
    comparison = compare_tokenizers(models.tokenizer, tokenizer, models.stops)
    model, name = recipe.model, title.removeprefix("teacher ")
    advice = aligned = f"name its tokenizer in teachers.{name}.tokenizer, or {SAME_TOKENS}"
    # A student's weights know one tokenizer. Only an explicit tokenizer, or a student that is not yet
    # trained, can be changed.
    if not comparison.wrong:
        advice = ""
    elif model.path is None:
        if len(given_teachers(recipe)) == 1:
            advice = f"set model.tokenizer to the teacher's, which a new student can have, or {aligned}"
    elif model.tokenizer is not None and has_tokenizer(Path(model.path)):
        ours = load_tokenizer(model.path)
        if not compare_tokenizers(ours, tokenizer, models.stops).wrong:
            advice = "leave out model.tokenizer: the tokenizer in model.path has the teacher's tokens"
    wrong = [Finding("error", title, f"{sentence}; {advice}") for sentence in comparison.wrong]
    harmless = [Finding("warning", title, sentence) for sentence in comparison.harmless]
    return wrong + harmless + _check_turns(title, path, tokenizer, recipe, models)


def check_own_tokenizer(
    title: str, path: str, folder: Path, config: Any, recipe: Recipe, models: Models
) -> list[Finding]:
    """Check that a teacher's own tokenizer is its model's, in `folder`, and that tokens can be aligned."""
    from opd.models.tokenizers import compare_tokenizers, has_tokenizer, load_tokenizer
    from opd.pipelines.stages.student import load_own_tokenizer

    theirs = load_own_tokenizer(recipe, path)
    findings = check_rows(title, config, theirs, "name the tokenizer that it was trained with")
    shared = models.translator(recipe, path).shared.shape[1]
    detail = f"{shared} of the student's {id_count(models.tokenizer)} tokens are the teacher's, too"
    findings.append(Finding("ok", title, f"a tokenizer of its own: {detail}"))
    trained = load_tokenizer(folder) if has_tokenizer(folder) else theirs
    if compare_tokenizers(theirs, trained, ()).wrong:
        detail = f"{path} has other tokens than the tokenizer in its model's folder; name the latter"
        findings.append(Finding("error", title, detail))
    elif not (
        compare_tokenizers(models.tokenizer, theirs, models.stops).wrong
        or compare_tokenizers(theirs, models.tokenizer, ()).wrong  # it has more, and writes texts in them
    ):
        detail = "its tokenizer has the student's tokens, which need no alignment; leave tokenizer out"
        findings.append(Finding("warning", title, detail))
    if models.chat and not theirs.chat_template:
        detail = "prompts are messages, but its tokenizer has no chat template; give a tokenizer with one"
        findings.append(Finding("error", title, detail))
    return findings


def check_own_prompts(
    recipe: Recipe, teacher: str, folder: Path, domains: Mapping[str, Domain], models: Models
) -> list[Finding]:
    """Check that a teacher's own chat template writes the prompts that it scores and is measured on, and that
    they leave room for its answers.
    """
    from opd.models.hf_folder import positions_of, read_config
    from opd.pipelines.evaluation.evaluate import with_own_tokens
    from opd.pipelines.stages.domains import prompt_capacity, template_arguments
    from opd.pipelines.stages.student import load_own_tokenizer
    from opd.rollout.prompts import encode_taught, teacher_prompt

    assert models.tokenizer is not None
    path = recipe.teacher_tokenizer(teacher)
    assert path is not None
    tokenizer, measured = load_own_tokenizer(recipe, path), with_own_tokens(recipe, folder, path)
    findings, positions = [], positions_of(read_config(folder))
    for name, whole in domains.items():
        domain, _ = _fit_domain(recipe, whole, models.tokenizer)
        is_taught = teacher in recipe.teacher_weights(name)
        prompts = _select_forms([*(domain.train if is_taught else []), *domain.held_out])
        read = recipe.domains[name].teacher_prompt if is_taught else None
        asked = prompts if read is None else [teacher_prompt(prompt, read) for prompt in prompts]
        encoded = encode_taught(asked, tokenizer, template_arguments(recipe, name), path)
        longest = max(map(len, encoded), default=0)
        if is_taught and positions is not None and longest >= positions:
            mend = "shorten the prompts" if read is None else f"shorten domains.{name}.teacher_prompt"
            detail = (
                f"prompts of {name} have up to {longest} of its own tokens, but its model has {positions}"
                f" positions; {mend}, or choose another teacher"
            )
            findings.append(Finding("error", f"teacher {teacher}", detail))
        room = prompt_capacity(measured, tokenizer, name).tokens
        if longest > room:
            detail = (
                f"prompts of {name} have up to {longest} of its own tokens, of which {room} leave room for an"
                " answer, so that it is measured without their beginnings; raise rollout.max_sequence, if its"
                " model has the positions"
            )
            findings.append(Finding("warning", f"teacher {teacher}", detail))
    return findings


def _fit_domain(recipe: Recipe, domain: Domain, tokenizer: Any) -> tuple[Domain, list[str]]:
    """Return `domain` with the prompts that fit, as a run has it, and what was too long."""
    from opd.pipelines.stages.domains import prompt_capacity, template_arguments
    from opd.rollout.prompts import encode_prompts, fit_domain

    config, name = recipe.domains[domain.name], domain.name
    encoded = partial(encode_prompts, tokenizer=tokenizer, template=template_arguments(recipe, name))
    capacity = prompt_capacity(recipe, tokenizer, name)
    return fit_domain(domain, capacity, config.long_prompts, encoded, config.teacher_prompt)


def _select_forms(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts from all parts of `prompts`, and one for each sequence of roles and set of arguments."""
    forms: dict[tuple[Any, ...], Prompt] = {}
    for one in prompts:
        roles = [(message.get("role"), *sorted(message)) for message in one.messages or []]
        forms.setdefault((*map(str, roles), *sorted(one.arguments)), one)
        if len(forms) == _MEASURED:
            break
    spread = prompts[:: -(-len(prompts) // _MEASURED) or 1]
    return list({id(one): one for one in [*forms.values(), *spread]}.values())


def check_alignment(recipe: Recipe, domain: Domain, models: Models) -> list[Finding]:
    """Measure on a domain's prompts how many of the student's tokens its teachers can be compared at."""
    from opd.models.token_ids import encode_texts

    prompts = [*domain.train[:_MEASURED], *domain.held_out[:_MEASURED]][:_MEASURED]
    texts = [prompt.text or str((prompt.messages or [{}])[-1].get("content", "")) for prompt in prompts]
    ids = encode_texts(models.tokenizer, texts)
    path = recipe.domain_tokenizer(domain.name)
    assert path is not None
    return alignment_findings(domain.name, models.translator(recipe, path), ids, "prompts")


def alignment_findings(
    domain: str, translator: TokenTranslator, ids: Sequence[Sequence[int]], what: str
) -> list[Finding]:
    """Measure how many of the student's tokens `ids` of `what` the domain's teachers can be compared at."""
    import numpy as np

    aligned = [translator.translate(np.array(one, np.int64)) for one in ids if len(one)]
    if not aligned:
        return []
    chunks = np.concatenate([one.student_chunks for one in aligned])
    exact = np.concatenate([one.exact for one in aligned]) >= 0
    shares = [float(rows.mean()) for rows in (exact, (chunks >= 0) & ~exact, chunks < 0)]
    detail = (
        f"of the student's {len(exact)} tokens of {what}, {shares[0]:.1%} are compared by class,"
        f" {shares[1]:.1%} in chunks of several alone, and {shares[2]:.1%} have no counterpart"
    )
    numbers: dict[str, float] = dict(zip(("exact", "chunk", "none"), shares, strict=True))
    return [Finding("warning" if shares[2] > _LOST else "ok", f"tokens {domain}", detail, numbers)]


_LOST = 0.05
"""Share of tokens without a counterpart above which the doctor warns."""


def _check_turns(title: str, path: Path, tokenizer: Any, recipe: Recipe, models: Models) -> list[Finding]:
    """Check that the teacher ends its responses and renders prompts as the student does."""
    from opd.models.tokenizers import stops_of

    findings, model = [], recipe.model
    ends = [stop for stop in stops_of(tokenizer, path) if stop.token_id not in models.stops]
    if ends:
        detail = f"it also ends its responses at {', '.join(map(str, ends))}, where the student's go on"
        findings.append(Finding("warning", title, f"{detail}; consider rollout.stop_ids"))
    if not models.chat:
        return findings
    theirs, ours = (
        render_conversation(each, model.chat_template_kwargs) for each in (tokenizer, models.tokenizer)
    )
    if theirs != ours and ours is not None:
        fault = "no chat template" if theirs is None else "another chat template"
        detail = (
            f"it has {fault}: prompts are written with the student's; model.chat_template can name another"
        )
        findings.append(Finding("warning", title, detail))
    return findings


def check_stops(recipe: Recipe, models: Models) -> list[Finding]:
    """Find the stop ids, and check that they are the chat template's end of turn."""
    from opd.pipelines.stages.student import model_stops

    tokenizer, title = models.tokenizer, "stop ids"
    stops = model_stops(recipe, tokenizer)
    models.stops = tuple(stop.token_id for stop in stops)
    ids = id_count(tokenizer)
    outside = [str(token) for token in models.stops if not 0 <= token < ids]
    if outside:
        detail = f"rollout.stop_ids {', '.join(outside)} lie outside of the tokenizer's {ids} tokens"
        return [Finding("error", title, f"{detail}; give ids that it has")]
    if recipe.base is not None and tokenizer.eos_token_id is None:
        detail = "the tokenizer has no end-of-sequence token, which the warm-up's demonstrations end with"
        return [Finding("error", title, f"{detail}; set its eos_token")]
    if not stops and not recipe.rollout.stop:
        detail = "neither tokenizer nor model has an end-of-sequence token, so no response could end"
        return [Finding("error", title, f"{detail}; set eos_token, or give rollout.stop_ids")]
    findings = [Finding("ok", title, "a response ends at " + ", ".join(map(str, stops)))] if stops else []
    if not models.chat or not tokenizer.chat_template:
        return findings
    template, strings = recipe.model.chat_template_kwargs, recipe.rollout.stop
    findings += template_findings(tokenizer, template, models.stops, strings)
    return findings + check_sameness(tokenizer, template)


def check_rows(title: str, config: Any, tokenizer: Any, advice: str) -> list[Finding]:
    """Check that a model has a row for every token of the student's tokenizer. Extra rows are cut off."""
    from opd.models.tokenizers import rows_fault

    fault = rows_fault(config, tokenizer)
    return [] if fault is None else [Finding("error", title, f"{fault}; {advice}")]


def check_bos(title: str, config: Any, tokenizer: Any) -> list[Finding]:
    """Warn if a model and the student's tokenizer have different begin-of-sequence tokens."""
    theirs, ours = getattr(config.get_text_config(), "bos_token_id", None), tokenizer.bos_token_id
    if ours is None or theirs is None or ours == theirs:
        return []
    detail = f"config.json says bos_token_id {theirs}, the tokenizer {ours}; the latter is used"
    return [Finding("warning", title, detail)]


def check_prompts(recipe: Recipe, domain: Domain, tokenizer: Any) -> list[Finding]:
    """Check that all prompts fit and have a chat template if they need one, and measure some lengths."""
    from opd.pipelines.stages.domains import template_arguments
    from opd.rollout.prompts import encode_prompt, encode_prompts, teacher_prompt

    title = f"prompts {domain.name}"
    prompts = [*domain.train, *domain.held_out]
    if any(prompt.messages is not None for prompt in prompts) and not tokenizer.chat_template:
        detail = (
            "prompts are messages but the tokenizer has no chat template; set model.chat_template to a file"
            " or a folder that has one, or model.tokenizer"
        )
        return [Finding("error", title, detail)]
    kwargs = template_arguments(recipe, domain.name)
    read = recipe.domains[domain.name].teacher_prompt
    fitted, notes = _fit_domain(recipe, domain, tokenizer)
    prompts = [*fitted.train, *fitted.held_out]
    some = _select_forms(prompts)
    lengths = [len(ids) for ids in encode_prompts(some, tokenizer, kwargs)]
    if min(lengths, default=0) == 0:
        return [Finding("error", title, "a prompt has no tokens; every prompt needs at least one")]
    spread = f"{min(lengths)} to {max(lengths)} tokens"
    if len(some) < len(prompts):
        spread += f" in {len(some)} of them"
    findings = [Finding("ok", title, f"{len(prompts)} prompts looked at, {spread}")]
    if read is not None and fitted.train:
        first = encode_prompt(teacher_prompt(fitted.train[0], read), tokenizer, kwargs)
        shown = safe_excerpt(tokenizer.decode(first.tolist()))
        findings.append(Finding("ok", title, f"for the first, teachers read {len(first)} tokens: {shown}"))
    findings += [Finding("warning", title, note) for note in notes]
    messages = next((one for one in [*domain.train, *domain.held_out] if one.messages is not None), None)
    if kwargs.get("tools") and messages is not None:
        without = {name: value for name, value in kwargs.items() if name != "tools"}
        with_tools, alone = (encode_prompt(messages, tokenizer, one).tolist() for one in (kwargs, without))
        if with_tools == alone:
            detail = (
                "the chat template writes no tools, so the model is not told what it may call; set"
                " model.chat_template to one that does, or describe them in the prompts"
            )
            findings.append(Finding("warning", f"tools {domain.name}", detail))
    return findings


_MEASURED = 256
"""Prompts of a domain that are encoded to measure their lengths."""

SAME_TOKENS = "use a teacher with the student's tokens"
