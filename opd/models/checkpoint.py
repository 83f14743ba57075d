"""Write Hugging Face folders atomically: sharded safetensors, tokenizer, checksums and a model card."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers import PreTrainedTokenizerBase

from opd.config.hub_names import hub_name
from opd.models.causal_lm import CausalLM
from opd.models.hf_folder import CARD, write_checksums
from opd.models.hf_weights import quiet_loading
from opd.redact import redact
from opd.storage.files import atomic_folder, permit_as
from opd.untrusted import escape_controls

SECTIONS = ("accuracy", "prompt_format", "loading", "base", "teachers", "data", "settings", "results")


def model_card(name: str, card: dict[str, Any]) -> str:
    """Markdown for a model called `name`.

    `card` maps section names to text, numbers, lists or dictionaries. `SECTIONS` come first, in that order,
    then the others in theirs. A dictionary of dictionaries becomes a table with one row per key, deeper
    nesting a YAML block. "about" is the sentence below the title. "base_model" is in the front matter too.
    """
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if "base_model" in card:
        hub = hub_name(card["base_model"])  # the Hub expects the repository's name only
        front["base_model"] = card["base_model"] if hub is None else hub.repo
    front["tags"] = ["on-policy-distillation", "opd"]
    lines = ["---", yaml.safe_dump(front, sort_keys=False, width=1000).strip(), "---", ""]
    about = [escape_markdown(card["about"])] if "about" in card else []
    lines += [f"# {escape_markdown(name)}", "", " ".join([*about, "Made with `opd`."]), ""]
    if "base_model" in card:
        card = {**card, "base_model": escape_markdown(card["base_model"])}
    sections = [section for section in card if section != "about"]
    for section in [*(s for s in SECTIONS if s in sections), *(s for s in sections if s not in SECTIONS)]:
        lines += [f"## {section.replace('_', ' ').capitalize()}", "", _section_body(card[section]), ""]
    return escape_controls(redact("\n".join(lines)))


def escape_markdown(text: str) -> str:
    """Escape `text` for a line of Markdown, so it starts no paragraph, HTML element or code."""
    return escape_controls(text, "").replace("<", "&lt;").replace("`", "'")


def _section_body(value: object) -> str:
    if isinstance(value, dict) and value:
        rows = list(value.values())
        if all(isinstance(row, dict) and row and all(map(_is_plain, row.values())) for row in rows):
            return _markdown_table(value)
        if all(map(_is_plain, rows)):
            return "\n".join(
                f"- {escape_markdown(str(key))}: {_escaped_value(item)}" for key, item in value.items()
            )
    if isinstance(value, list) and value and all(map(_is_plain, value)):
        return "\n".join(f"- {_escaped_value(item)}" for item in value)
    if _is_plain(value):
        return _value_text(value)
    block = yaml.safe_dump(value, sort_keys=False, allow_unicode=True).strip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", block)), default=0))  # longer than any in it
    return f"{fence}yaml\n{block}\n{fence}"


def _markdown_table(rows: dict[str, dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = ["| | " + " | ".join(map(_table_cell, columns)) + " |", "|---" * (len(columns) + 1) + "|"]
    for key, row in rows.items():
        lines.append(
            " | ".join([f"| {_table_cell(key)}", *(_table_cell(row.get(column, "")) for column in columns)])
            + " |"
        )
    return "\n".join(lines)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _value_text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _escaped_value(value: object) -> str:
    return escape_markdown(_value_text(value))


def _table_cell(value: object) -> str:
    return _escaped_value(value).replace("|", "\\|")


MAX_SHARD_BYTES = 4 * 2**30


def save_checkpoint(
    model: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    card: dict[str, Any],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    quantize: Literal["fp8"] | None = None,
    add_files: Callable[[Path], None] | None = None,
) -> Path:
    """Write `folder` so that it loads with `CausalLM.from_pretrained` and with plain transformers.

    `card` becomes README.md (see `model_card`). Everything is written to a temporary sibling, flushed to disk
    and renamed, so `folder` is complete or absent. An older one is replaced, and the remains of a killed save
    are removed. There may be one writer per `folder`. `add_files(draft)` may add files of its own.
    With `quantize` the layers' matrices are written as `opd publish --dtype fp8` writes them.
    """
    target = Path(folder).absolute()
    with atomic_folder(target, replace=True) as draft:
        with quiet_loading():
            plain = draft if quantize is None else draft / "plain"
            model.module.save_pretrained(plain, max_shard_size=max_shard_bytes)
        if quantize is not None:
            from opd.models.converted_folder import convert_folder

            convert_folder(plain, draft, quantize, lambda name: None)
            shutil.rmtree(plain)
        tokenizer.save_pretrained(draft)
        (draft / CARD).write_text(model_card(target.name, card), "utf-8")
        if add_files is not None:
            add_files(draft)
        write_checksums(draft)
        permit_as(draft / CARD, draft)
    return target
