"""Whether demonstrations can be read, written as tokens, and teach the model to end."""

from __future__ import annotations

from functools import partial

from opd.config import Recipe, SFTConfig
from opd.pipelines.doctor.checks import Finding, attempt
from opd.pipelines.doctor.models import Models

_LOOKED_AT = 500
"""Demonstrations that are written as tokens for the check; the stage does so with all of them first."""


def check_demonstrations(recipe: Recipe, models: Models) -> list[Finding]:
    """What every `sft` of the recipe would learn from. What is wrong with a file that several share is said
    once.
    """
    findings: list[Finding] = []
    for domain, config in recipe.demonstrated().items():
        title = f"sft {domain}" if domain else "sft"
        found = attempt(title, partial(_check, title, recipe, domain or None, config, models))
        told = {finding.detail for finding in findings if finding.level == "error"}
        findings += [finding for finding in found if finding.detail not in told]
    return findings


def _check(
    title: str, recipe: Recipe, domain: str | None, config: SFTConfig, models: Models
) -> list[Finding]:
    from opd.data.demonstrations import read_demonstrations, sized
    from opd.pipelines.stages.sft import length_limit, refuse_template, written_by

    rows = read_demonstrations(config.source, domain)
    if models.tokenizer is None:
        return []
    writes = written_by(recipe, models.tokenizer)
    refuse_template(rows, writes)
    limit, why = length_limit(recipe, config, models.tokenizer)
    some = rows[:: -(-len(rows) // _LOOKED_AT)]
    found = sized(some, writes, limit, config.too_long, why)
    told = found.sentence(limit, why)
    if not found.rows:
        mend = "shorten them" if why.startswith("the model") else "give `sft` a larger max_length"
        return [Finding("error", title, f"none can be learnt from: {told}; {mend}")]
    lengths = [len(encoded) for _, encoded in found.rows]
    counted = sum(int(encoded.mask.sum()) for _, encoded in found.rows)
    text = (
        f"{len(rows)} demonstrations, {min(lengths)} to {max(lengths)} tokens in the {len(some)} looked at,"
        f" of which {counted / sum(lengths):.0%} are learnt"
    )
    findings = [Finding("ok", title, text)]
    if told:
        findings.append(Finding("warning", title, told))
    cut = set(found.cut)
    ends = {
        int(encoded.response_ids[encoded.mask][-1])
        for row, encoded in found.rows
        if row.prompt.where not in cut
    }
    if ends and not ends & {*writes.stops} and not recipe.rollout.stop:
        last = min(ends)
        detail = (
            f"answers end with {last} {models.tokenizer.convert_ids_to_tokens(last)!r}, at which responses do"
            " not end: the model would never learn to stop; add the id that the chat template ends an answer"
            " with to rollout.stop_ids, or give model.chat_template one that writes an end-of-sequence token"
        )
        findings.append(Finding("error", title, detail))
    return findings
