"""The table of families: what the sweep found of each model type, as data and as a page of the docs."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_name("families.jsonl")
REWRITE = ".venv/bin/python tests/models/sweep.py"
PAGE = ROOT / "docs" / "reference" / "families.md"
MARK = ("<!-- families: written by tests/models/sweep.py -->", "<!-- end of families -->")
USES = {
    "student": "student",
    "lora": "with LoRA",
    "local": "teacher: `local`",
    "streamed": "`streamed`",
    "served": "student on servers",
    "megatron": "teacher: `megatron`",
}
_SEEN = {
    "student": ("library", "sample", "doctor", "run"),
    "lora": ("library", "doctor", "run"),
    "local": ("library", "doctor", "run"),
    "streamed": ("library", "publish", "doctor", "run"),
    "served": ("doctor",),
    "megatron": ("library",),
}
"""Who is asked about each use; who was not asked has nothing of its own to say."""
RIGHT, REFUSED, FAILS = "right", "refused", "fails"
LONGEST = 500
"""Characters of a sentence that somebody reads."""
_NAMES = (
    (r"(?<![\w.])/[\w./-]+", "FOLDER"),
    (r"\b[A-Z]\w*?(ForCausalLM|LMHeadModel|Model|Decoder\w*|ForConditionalGeneration)\b", "the model"),
    (r"\b[A-Z]\w*Attention\w*", "its attention"),
    (r"(?<=\btensor )[\w.]+", "T"),
    (r"(?<=\bholds )[\w.]+(?= as )", "T"),
    (r"(?<=\bties )[\w.]+ to [\w.]+(?=,)", "one tensor to another"),
    (r"model_type '\w+'", "this model_type"),
    (r"\blayers\.\d+", "a layer"),
)
"""Names in a sentence that differ by type, and what stands for them."""


def cause(sentence: str) -> str:
    """What a refusal says is wrong, without the model's name, numbers, paths and advice."""
    text = re.sub(r"^((student|teacher|lora|stop ids|domain)\b[^:]{0,40}: )+", "", sentence)
    for pattern, name in _NAMES:
        text = re.sub(pattern, name, text)
    text = re.sub(r"(?<![\w.'])\d[\d.]*(e[+-]?\d+)?(?!\w)", "N", text)
    text = re.sub(r"\s*\(difference (N|nan|inf)\)", "", text)
    return text.partition(";")[0].strip().rstrip(".")


def verdict(record: dict[str, Any], use: str) -> dict[str, Any]:
    """`{"right": error}`, `{"refused": cause}` or `{"fails": what}` of one use, over all who were asked."""
    found = {}
    for one in _SEEN[use]:
        result = record["library"].get(use) if one == "library" else record["commands"].get(one)
        result = result or record["commands"].get(f"{use}: {one}")
        if result is not None:
            found[one] = result
    for kind in ("traceback", "wrong"):
        where = [one for one, result in found.items() if kind in result]
        if where:
            return {FAILS: f"{', '.join(where)}: {kind}: {cause(found[where[0]][kind])}"}
    long = [one for one, result in found.items() if len(result.get(REFUSED, "")) > LONGEST]
    if long:
        start = cause(found[long[0]][REFUSED])[:100]
        return {FAILS: f"{', '.join(long)}: a sentence of more than {LONGEST} characters: {start} ..."}
    told = {one: cause(result[REFUSED]) for one, result in found.items() if REFUSED in result}
    if not told:
        return {RIGHT: float(f"{max(result[RIGHT] for result in found.values()):.1g}")}
    if len(told) < len(found):
        silent = [one for one in found if one not in told]
        return {FAILS: f"{', '.join(told)}: refused: {next(iter(told.values()))}; not by {', '.join(silent)}"}
    if len(set(told.values())) > 1:
        return {FAILS: "other sentences: " + " | ".join(f"{one}: {text}" for one, text in told.items())}
    return {REFUSED: next(iter(told.values()))}


def row(record: dict[str, Any]) -> dict[str, Any]:
    """One line of the data."""
    head = {"type": record["type"], "class": record["class"]}
    if "hangs" in record:
        return head | {use: {FAILS: record["hangs"]} for use in USES}
    if "library" not in record:
        return head | {"untried": record["unbuilt"]}
    uses = {use: verdict(record, use) for use in USES}
    if RIGHT not in uses["student"]:  # nothing is put on, or served of, what is no student
        for use in ("lora", "served"):
            uses[use] = uses["student"]
    return head | uses


def write(records: Iterable[dict[str, Any]], version: str) -> None:
    """Write data and page anew."""
    lines = [{"transformers": version}, *sorted((row(one) for one in records), key=lambda one: one["type"])]
    DATA.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    text = PAGE.read_text("utf-8")
    start, end = (text.index(mark) for mark in MARK)
    PAGE.write_text(text[: start + len(MARK[0])] + "\n" + page(*read()) + text[end:], "utf-8")


def read() -> tuple[str, dict[str, dict[str, Any]]]:
    """The version of transformers, and every line by type."""
    first, *lines = [json.loads(line) for line in DATA.read_text("utf-8").splitlines()]
    return first["transformers"], {line["type"]: line for line in lines}


def written() -> str:
    """What the page has between its marks."""
    text = PAGE.read_text("utf-8")
    return text[text.index(MARK[0]) + len(MARK[0]) + 1 : text.index(MARK[1])]


def page(version: str, lines: dict[str, dict[str, Any]]) -> str:
    """The part of the page that is made of the data."""
    tried = [line for line in lines.values() if "untried" not in line]
    some = [line for line in tried if any(RIGHT in line[use] for use in ("student", "local", "streamed"))]
    none = [line for line in tried if line not in some]
    letters: dict[str, str] = {}
    head = ["type", "class", *USES.values()]
    rows = [
        [f"`{line['type']}`", line["class"], *(_cell(line[use], letters) for use in USES)] for line in some
    ]
    counts = ", ".join(f"{sum(RIGHT in line[use] for line in tried)} {name}" for use, name in USES.items())
    out = [
        f"transformers {version}: {len(lines)} model types. Right or accepted: {counts}.", "",
        "## Right in some use", "", _line(head), _line(["---"] * len(head)), *map(_line, rows), "",
    ]  # fmt: skip
    out += [f"- **{letter}**: {text}." for text, letter in letters.items()]
    out += ["", "## Refused in every use", "", "| what the student is refused with | types |", "|---|---|"]
    groups: dict[str, list[str]] = {}
    for line in none:
        groups.setdefault(_said(line["student"]), []).append(f"`{line['type']}`")
    out += [
        _line([text, ", ".join(names)]) for text, names in sorted(groups.items(), key=lambda g: -len(g[1]))
    ]
    untried = [line for line in lines.values() if "untried" in line]
    if untried:
        out += ["", "## Not tried", "", "No tiny model was made: transformers says", ""]
        out += [f"- `{line['type']}`: {_plain(line['untried'])}" for line in untried]
    return "\n".join(out) + "\n"


def _cell(result: dict[str, Any], letters: dict[str, str]) -> str:
    if RIGHT in result:
        return "yes"
    return letters.setdefault(_said(result), _letter(len(letters)))


def _letter(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else _letter(number // 26 - 1) + _letter(number % 26)


def _said(result: dict[str, Any]) -> str:
    return _plain(result[REFUSED] if REFUSED in result else f"known to fail: {result[FAILS]}")


def _plain(text: str) -> str:
    """`text` where markdown has no say."""
    return re.sub(r"([<>*_|\\])", r"\\\1", text)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
