"""Identify files that are no rows of data, and other data sets' names for columns.

A file is identified by its first bytes. The error names the fix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from opd.untrusted import POINTER, is_pointer, safe_excerpt

HEAD = 4096
"""Number of bytes read."""
_PACKED = "is packed ({}); unpack it, and name the file that comes out"
_BINARY = {
    b"\x1f\x8b": _PACKED.format("gzip"),
    b"\x28\xb5\x2f\xfd": _PACKED.format("Zstandard"),
    b"\xfd7zXZ\0": _PACKED.format("xz"),
    b"BZh": _PACKED.format("bzip2"),
    b"PK\x03\x04": "is a ZIP archive or a spreadsheet; unpack it, or write its rows as .jsonl or .parquet",
    b"ARROW1": "is an Arrow file; write it with `to_parquet`, or `to_json` of datasets",
    b"\xff\xff\xff\xff": "is a stream of Arrow; write it with `to_parquet`, or `to_json` of datasets",
    b"SQLite format 3": "is a database of SQLite; write its rows as .jsonl or .parquet",
    b"\x89HDF": "is an HDF5 file; write its rows as .jsonl or .parquet",
    b"\x93NUMPY": "is an array of NumPy; write its rows as .jsonl or .parquet",
    b"\x80": "looks like a pickle, which is never read; write its rows as .jsonl or .parquet",
    b"%PDF": "is a PDF; write its rows as .jsonl or .parquet",
}
"""Magic bytes -> description and fix."""
_PAGE = re.compile(rb"\s*<(?:!doctype|html|head|body|\?xml|!--|error)", re.IGNORECASE)
_TABLE = re.compile(r"""\s*"?[\w .-]+"?\s*(?:[,;\t|]\s*"?[\w .-]+"?\s*)+""")
_BEGUN = re.compile(r"[\[{]\s*[\[{]?|.*[\[{,:]")
"""First line of a JSON document that spans lines."""


def file_fault(path: Path, head: bytes) -> str | None:
    """Return why the file `path`, which begins with `head`, does not match its name, with the fix. `None` if
    it may match.
    """
    head = head.removeprefix(b"\xef\xbb\xbf")
    if is_pointer(head):
        return f"cannot be read: {POINTER}"
    fault = next((meaning for magic, meaning in _BINARY.items() if head.startswith(magic)), None)
    if fault is not None and not _is_text(head):
        return fault
    if _PAGE.match(head):
        return (
            "is a web page (HTML or XML), such as an error or a page about the file; download the file itself"
            " (of the Hub by `hf://datasets/...`, or its `resolve` address)"
        )
    if path.suffix == ".parquet":
        if head.lstrip()[:1] in (b"{", b"[") and _is_text(head):
            return "holds JSON and is no Parquet file; name it .jsonl, with an object on every line"
        if head.strip() and not head.startswith(b"PAR1") and _is_text(head):
            return "is a text and no Parquet file; write its rows as .jsonl, an object on every line"
        return None
    if head.startswith(b"PAR1"):
        return "is a Parquet file; name it .parquet"
    line, newline, _ = head.decode("utf-8", "ignore").lstrip().partition("\n")
    try:
        json.loads(line or "0")
    except (ValueError, RecursionError):
        return _text_fault(line.strip(), bool(newline))
    return None


def _is_text(head: bytes) -> bool:
    return all(byte >= 32 or byte in b"\t\r\n" for byte in head[:64]) and head[:1] < b"\x80"


def _text_fault(line: str, more_lines: bool) -> str | None:
    """Return the fault of a text whose first line is no JSON."""
    if "\0" in line or "\ufffd" in line:
        return None
    if line.startswith(("{'", "[{'")):
        return "holds what Python prints of its rows; write each with `json.dumps`, on a line of its own"
    if line.startswith(("{", "[")):
        if line.startswith("{") and line.endswith("},"):
            return "has a comma behind its first row; write an object on a line, with nothing between them"
        if more_lines and _BEGUN.fullmatch(line):
            return (
                "is one document of JSON over several lines; write every object on a line of its own, as"
                " `jq -c '.[]'` does with a list"
            )
        return None
    if len(line) < 300 and _TABLE.fullmatch(line):
        return (
            f"is a table of text (its first line is {safe_excerpt(repr(line[:60]))}) and not JSON; write"
            " every row as an object on a line, as pandas' `to_json(orient='records', lines=True)` does, or"
            " as .parquet"
        )
    begins = safe_excerpt(repr(line[:40]))
    return f"begins with {begins}, which is no JSON; write every row as an object on a line"


_QUESTIONS = ("problem", "question", "query", "instruction", "input", "inputs", "user", "text", "task")
_LABELS = (
    *("answer", "ground_truth", "final_answer", "correct_answer", "expected_answer", "gold", "target"),
    *("targets", "solution", "reference", "reference_answer", "answers", "response", "output"),
    *("completion", "labels"),
)
_ANSWERS = (
    *("response", "answer", "output", "chosen", "solution", "completions", "target", "generation"),
    "assistant",
)
_NAMES = {"prompt": _QUESTIONS, "label": _LABELS, "completion": _ANSWERS}
SHOWN = ("instruction", "input", "context", "passage", "history", "choices", "options")
"""Columns of other formats with a part of the question."""
THOUGHT = ("thinking", "reasoning", "reasoning_content", "thoughts")
"""Columns with a part of the answer."""
SPOKEN = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns")
"""Columns of conversations."""


def rename_hint(row: Mapping[str, object], *wanted: str) -> str:
    """Return how to rename columns of `row` to the missing ones of `wanted`: `; rename ...`, or nothing."""
    renames, free = [], {name.strip().lower(): name for name in row if row[name] is not None}
    for column in wanted:
        if row.get(column) is not None:
            continue
        source = next((free[name] for name in (column, *_NAMES[column]) if name in free), None)
        if source is not None:
            free = {key: name for key, name in free.items() if name != source}
            parts = [f"`{name}`" for name in row if name in SHOWN and name != source and row[name]]
            addition = (
                f" (with {' and '.join(parts)} written into it)" if column == "prompt" and parts else ""
            )
            renames.append(f"`{source}`{addition} to `{column}`")
    reward_model = row.get("reward_model")
    if (
        "label" in wanted
        and row.get("label") is None
        and isinstance(reward_model, Mapping)
        and "ground_truth" in reward_model
    ):
        renames = [
            *(one for one in renames if not one.endswith("`label`")),
            "`reward_model.ground_truth` to `label`",
        ]
    return f"; rename {' and '.join(renames)}" if renames else ""


def rows_within(row: Mapping[str, object]) -> str | None:
    """Return the column of `row` that holds the rows themselves, as in `{"data": [{...}, ...]}`."""
    columns = {"prompt", "messages", *_QUESTIONS}
    lists = ((name, value[0]) for name, value in row.items() if isinstance(value, list) and value)
    names = (name for name, first in lists if isinstance(first, dict) and first.keys() & columns)
    return next((name for name in names if name not in SPOKEN), None)
