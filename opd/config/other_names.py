"""Answers for other libraries' options, from the table in `other_names.yaml`.

The command line and the recipe reader answer with a row. `markdown_table()` generates the documentation's
(`docs/reference/other_names.md`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from opd.errors import ConfigError

_FLAGS = ("slime", "miles", "OpenRLHF")
"""Libraries whose options are flags, written with leading dashes."""
_HERE = {"kl_coef", "entropy_coef"}
"""Other libraries' names that are settings here."""


@dataclass(frozen=True, slots=True)
class OptionRow:
    """Equivalent options of other libraries, and the field here."""

    here: tuple[str, ...]
    """Dotted fields of a recipe. If empty there is no such setting, and `note` says why."""
    note: str
    names: dict[str, tuple[str, ...]]
    """Name of a library -> its options, without leading dashes."""


@lru_cache(maxsize=1)
def table_rows() -> tuple[OptionRow, ...]:
    data = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    called, rows = data["libraries"], []
    for row in data["rows"]:
        names = {
            called[key]: tuple(row[key].replace("@", "actor_rollout_ref.").split())
            for key in row
            if key not in ("here", "note")
        }
        rows.append(OptionRow(tuple(row.get("here", "").split()), row.get("note", ""), names))
    return tuple(rows)


@lru_cache(maxsize=1)
def _by_name() -> dict[str, tuple[list[str], OptionRow]]:
    """Map a name, with underscores for dashes, to its libraries and its row."""
    by_name: dict[str, tuple[list[str], OptionRow]] = {}
    for row in table_rows():
        for library, names in row.names.items():
            for name in names:
                by_name.setdefault(name.lower().replace("-", "_"), ([], row))[0].append(library)
    return by_name


def other_name(name: str, mark: str = "") -> str | None:
    """Return the field here for `name`, another library's option; `None` if no library has it.

    Dashes and underscores are the same, and so are capitals. `mark` precedes each field of the answer.
    """
    libraries, row = _by_name().get(name.lower().replace("-", "_"), ([], None))
    if row is None or name in _HERE:
        return None
    whose = " and ".join(f"{library}'s" for library in dict.fromkeys(libraries))
    note = row.note.replace("`", "")
    if not row.here:
        return f"is {whose} name; there is no such setting here: {note}"
    fields = " or ".join(f"{mark}{field}" for field in row.here)
    return f"is {whose} name; here it is {fields}" + (f" ({note})" if note else "")


def other_section(name: str) -> str | None:
    """The library with the configuration section `name`, and where its settings are listed, or `None`."""
    of = {
        library: None
        for one, (libraries, _) in _by_name().items()
        for library in libraries
        if one.startswith(f"{name.lower()}.")
    }
    if not of:
        return None
    whose = " and ".join(f"{library}'s" for library in of)
    return (
        f"is a section of {whose} configuration, and this setting of it has no answer; see"
        " docs/reference/other_names.md"
    )


def refuse_other_name(option: str) -> None:
    """Raise `ConfigError` with the field to use if `option` (`--opd-kl-coef`) is another library's.

    An option without a row belongs to the family of its first word (`--sglang-*`) if that has one.
    """
    name = option.removeprefix("--")
    answer = other_name(name, "--") or other_name(f"{name.partition('-')[0]}-*" if "-" in name else "", "--")
    if answer is not None:
        raise ConfigError(f"{option} {answer}")


FORMER = {
    "teachers.*.server": "write the servers beside the path, `{type: sglang, path: ..., urls: [...]}`",
    "distill.backend": "set `distill.teachers` to `{type: megatron}`, or leave it out for torch",
    "distill.teachers.path": "it says of which kind teachers are; give each its own `teachers.NAME.path`",
    "distill.megatron": "set `distill.teachers` to `{type: megatron, tensor_parallel: ...}`",
}
"""Former or missing settings, with their replacement."""


def former_hint(path: Sequence[str | int]) -> str | None:
    """Return the replacement of the setting at `path`, if known."""
    for pattern, now in FORMER.items():
        parts = pattern.split(".")
        if len(path) >= len(parts) and all(a in ("*", str(b)) for a, b in zip(parts, path, strict=False)):
            return now
    return None


def markdown_table() -> Iterator[str]:
    """Yield the rows as lines of a Markdown table."""
    yield "| there | here |"
    yield "|---|---|"
    for row in table_rows():
        theirs = (
            f"{library} {_names_cell(_as_written(library, name) for name in names)}"
            for library, names in row.names.items()
        )
        ours = ": ".join(filter(None, (_names_cell(row.here) or "none", row.note)))
        yield f"| {'; '.join(theirs)} | {ours} |"


def _as_written(library: str, name: str) -> str:
    return f"--{name}" if library in _FLAGS else name


def _names_cell(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
