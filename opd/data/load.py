"""Load a recipe's domain as prompts, and read source files.

Files are .jsonl or .parquet: columns `prompt`, `label`, and `domain` if several share one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from opd.config.recipe import DomainConfig
from opd.data.file_kinds import HEAD, SHOWN, SPOKEN, file_fault, rename_hint, rows_within
from opd.data.messages import Message, MessageError, arguments_of, from_text, read_messages, refuse_learnt
from opd.data.procedural import load_procedural, load_reasoning_gym
from opd.errors import DataError, needs_extra, reason_of
from opd.rollout.prompts import Domain, Prompt, hash_fraction, plain_label
from opd.storage.files import file_digest
from opd.untrusted import (
    MAX_DEPTH,
    POINTER,
    depth_exceeds,
    is_pointer,
    machine_memory,
    parse_integer,
    safe_excerpt,
)

_SOURCES = {"procedural": load_procedural, "reasoning-gym": load_reasoning_gym}


_KEPT_BYTES, _KEPT_FILES = 64 << 20, 16
"""Maximum bytes of a cached file, and number of cached files."""
_loaded: dict[tuple[str, ...], Domain] = {}


def load_domain(name: str, config: DomainConfig, *, seed: int, held_out_prompts: int) -> Domain:
    """Load the prompts of `config.source`, split into training and held-out.

    Generated sources give exactly the requested numbers. A file gives at most `held_out_prompts` held-out
    prompts. The same arguments give the same prompts in the same order. Raises `DataError` if the source is
    unknown, unreadable, malformed or empty, and `MissingExtraError` if it needs an optional package.
    """
    kind, separator, argument = config.source.partition(":")
    if separator and kind in _SOURCES:
        return _SOURCES[kind](argument, name, config, seed=seed, held_out_prompts=held_out_prompts)
    if config.is_file:
        # Checks and stages load a file several times, so it is kept, by its bytes.
        path = Path(config.source)
        try:
            if path.stat().st_size > _KEPT_BYTES:
                return load_file(name, config, held_out_prompts=held_out_prompts)
            fields = {"source", "params", "held_out", "environment"}
            key = name, config.model_dump_json(include=fields), file_digest(path)
        except OSError:  # reading it reports the error
            return load_file(name, config, held_out_prompts=held_out_prompts)
        domain = _loaded.pop(key, None) or load_file(name, config, held_out_prompts=sys.maxsize)
        _loaded[key] = domain  # the newest comes last
        while len(_loaded) > _KEPT_FILES:
            del _loaded[next(iter(_loaded))]
        return replace(domain, train=list(domain.train), held_out=list(domain.held_out[:held_out_prompts]))
    raise DataError(
        f"domains.{name}.source {config.source!r} is unknown; give procedural:NAME, reasoning-gym:NAME, or a "
        "path ending in .jsonl or .parquet."
    )


Row = tuple[str, dict[str, Any], int]
"""Location for error messages (`FILE:LINE`), columns, and their bytes."""

_LONGEST_ROW = 64 * 2**20
"""Maximum bytes of one line or row: some twenty million tokens."""
_ROWS_AT_ONCE = 16
"""Rows read at a time from a .parquet file, whose few bytes may stand for rows of any length."""
_ROW_BYTES = 1000
"""Approximate memory of a row other than its text."""


def load_file(name: str, config: DomainConfig, *, held_out_prompts: int) -> Domain:
    """Load the file's prompts. A share of `config.held_out`, chosen by a hash of the prompt, is held out.

    If rows have a `domain` column, only those of `params.domain` (default: the domain's name) count. Columns
    other than `prompt`, `label`, `domain` and `messages` become metadata. Raises `DataError` for a bad row,
    naming file and line, and if nothing is left to train or to evaluate on. With a share of 1 (an evaluation
    set) there is nothing to train on.
    """
    unknown = sorted(config.params.keys() - {"domain"})
    if unknown:
        raise DataError(f"domains.{name}.params: unknown parameter {unknown[0]!r}; files take `domain` only.")
    wanted = config.params.get("domain", name)
    names: set[str] = set()
    train: list[Prompt] = []
    held_out: list[Prompt] = []
    for where, row in rows_of(Path(config.source), wanted, names):
        prompt = prompt_of(where, row, name)
        if prompt.arguments and config.environment is not None:
            raise DataError(
                f"{where}: it gives the chat template {', '.join(prompt.arguments)}, but in an episode what"
                f" the template is given is the same for all rows; leave them out, or rename the columns for"
                f" domains.{name}.environment to read."
            )
        (held_out if hash_fraction(prompt.key) < config.held_out else train).append(prompt)
    _refuse_empty(name, config, names, train, held_out)
    held_out.sort(key=lambda prompt: prompt.key)  # a prefix is then a sample of the whole file
    return Domain(name, train, held_out[:held_out_prompts])


def rows_of(path: Path, wanted: str | None, names: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield location (`FILE:LINE`) and columns of the rows whose column `domain` is `wanted` or missing; of
    all rows for `None`. The names in that column are added to `names`.

    Raises `DataError` for an unreadable file, and for more rows than this machine can hold.
    """
    free_bytes = machine_memory() // 2
    for where, row, size in _read_rows(path):
        domain = row.get("domain")
        if domain is not None and wanted is not None:
            names.add(str(domain))
            if domain != wanted:
                continue
        free_bytes -= size + _ROW_BYTES
        if free_bytes < 0:
            raise DataError(
                f"{where}: the rows up to here take more than half of this machine's memory; give a smaller"
                " file, or leave out columns that no reward needs."
            )
        yield where, row


def _refuse_empty(
    name: str, config: DomainConfig, names: set[str], train: list[Prompt], held_out: list[Prompt]
) -> None:
    if not train and not held_out:
        if names:
            raise DataError(
                f"{config.source} has no rows of domain {config.params.get('domain', name)!r}, only of "
                f"{', '.join(sorted(names))}; set domains.{name}.params.domain to one of these."
            )
        needed = "two prompts" if config.held_out < 1 else "one prompt"
        raise DataError(f"{config.source} is empty; domain {name} needs at least {needed}.")
    if (not train and config.held_out < 1) or not held_out:
        pile, rows = "training" if held_out else "held-out", [*train, *held_out]
        if len(rows) > 1 and len({prompt.key for prompt in rows}) == 1:
            raise DataError(
                f"{config.source}: all {len(rows)} rows of domain {name} ask the same prompt, which is either"
                " trained on or held out; add rows that ask another."
            )
        raise DataError(
            f"{config.source}: no {pile} prompts are left of {len(train) + len(held_out)} in domain {name}; "
            f"add rows or change domains.{name}.held_out from {config.held_out:g}."
        )


def require_file(path: Path) -> None:
    """Raise `DataError` if `path` is not a file."""
    if not path.is_file():
        raise DataError(f"{path} does not exist or is no file; check the path of the source.")


def _read_rows(path: Path) -> Iterator[Row]:
    require_file(path)
    try:
        with path.open("rb") as file:
            fault = file_fault(path, file.read(HEAD))
        if fault is not None:
            raise DataError(f"{path} {fault}.")
        yield from _jsonl_rows(path) if path.suffix == ".jsonl" else _parquet_rows(path)
    except OSError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path} cannot be read ({error.strerror or error}); check its permissions, or write it again."
        ) from error


def _refuse_long(where: str, size: int) -> None:
    if size > _LONGEST_ROW:
        raise DataError(
            f"{where}: it has more than {_LONGEST_ROW >> 20} MiB, which is no prompt; is the file what it"
            " should be?"
        )


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_ROW + 1), b""), start=1):
            where = f"{path}:{number}"
            _refuse_long(where, len(line))
            if not line.strip():
                continue
            row = _parse_line(where, line)
            if not isinstance(row, dict):
                hint = (
                    "; of a file that is one list, write every object on a line"
                    if isinstance(row, list)
                    else ""
                )
                raise DataError(
                    f"{where}: {json_kind(row)} where an object with the columns is needed{hint}."
                )
            yield where, row, len(line)


def _parse_line(where: str, line: bytes) -> Any:
    try:
        row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_unique_object, parse_int=parse_integer)
        if depth_exceeds(row, MAX_DEPTH):
            raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise DataError(
            f"{where}: not UTF-8 (byte {byte:#04x} at {error.start}); write the file as UTF-8, uncompressed."
        ) from error
    except (ValueError, RecursionError) as error:  # bad JSON, or endless nesting
        if b"\0" in line:  # ASCII as UTF-16 or UTF-32 has one in every character
            raise DataError(
                f"{where}: it holds NUL bytes, so the file is damaged or of another encoding; write it again,"
                " as UTF-8."
            ) from error
        mend = f"; {POINTER}" if is_pointer(line) else "; mend or remove it"
        raise DataError(f"{where}: not a line of JSON ({error}){mend}.") from error
    return row


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Raises `ValueError` for a duplicate key."""
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return parsed


def json_kind(value: object) -> str:
    """Return the name of a JSON value's type."""
    names = {type(None): "null", bool: "true or false", str: "a text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


_SPOKEN = (
    *("prompt", "messages", "conversations", "completion", "chosen", "rejected"),
    *("tools", "functions", "chat_template_kwargs"),
)
"""Columns whose objects get the keys of all rows in a table."""


def _without_nulls(value: object) -> Any:
    """Remove keys of `value` that only other rows of its table have, except a message's content."""
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(one) for key, one in value.items() if one is not None or key == "content"}


def _parquet_rows(path: Path) -> Iterator[Row]:
    with needs_extra(f"reading {path}", "parquet"):
        import pyarrow
        import pyarrow.parquet
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            # A row would hold the last of two columns of one name.
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise DataError(f"{path}: the column {twice!r} is there twice; take one of them out.")
            narrow = {
                field.name: np.float16 if field.type == pyarrow.float16() else np.float32
                for field in file.schema_arrow
                if field.type in (pyarrow.float16(), pyarrow.float32())
            }
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                share = batch.nbytes // max(batch.num_rows, 1)
                _refuse_long(f"{path}: row {number + 1}", share)
                for row in batch.to_pylist():
                    number += 1
                    # Rows may share one text in the batch, but not in the parsed rows.
                    size = max(
                        share, sum(len(text) for text in row.values() if isinstance(text, str | bytes))
                    )
                    _refuse_long(f"{path}: row {number}", size)
                    row |= {name: _as_written(row[name], narrow[name]) for name in narrow}
                    row |= {name: _without_nulls(row[name]) for name in _SPOKEN if row.get(name)}
                    yield f"{path}: row {number}", row, size
    except DataError:
        raise
    # ValueError: values without a Python type, and pyarrow's own errors.
    except (pyarrow.ArrowException, ValueError, OverflowError, MemoryError) as error:
        raise DataError(f"{path} is no readable parquet file ({reason_of(error)}).") from error


def _as_written(value: Any, kind: type[np.floating[Any]]) -> Any:
    """Return the shortest number that a column of `kind` holds as `value`: 0.1, not 0.10000000149011612."""
    return value if value is None else float(str(kind(value)))


_OWN = ("prompt", "label", "domain", "messages")
"""Columns that are not metadata."""
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def prompt_of(where: str, row: dict[str, Any], domain: str) -> Prompt:
    """Return the prompt of a row. Raises `DataError` if it is missing or invalid."""
    content = row.get("prompt")
    if content is None:
        columns, spoken = ", ".join(row) or "none", next((one for one in SPOKEN if row.get(one)), None)
        mend = rename_hint(row, "prompt", "label") or "; every row needs one"
        if spoken is not None:
            mend = (
                f"; rename `{spoken}` to `prompt`, as it is called here: that takes a text, or a list of"
                " messages that ends before the answer"
            )
        elif (within := rows_within(row)) is not None:
            mend = f"; write each object of its `{within}` on a line of its own"
        elif "prompt" in row:
            mend = ": it is null; mend the row, or remove it"
        raise DataError(f"{where}: there is no `prompt` (columns: {columns}){mend}.")
    refuse_media(where, row)
    content, arguments = with_system(where, row, said_in(where, content)), template_arguments(where, row)
    if isinstance(content, list):
        messages = check_messages(where, content)
        with locating_errors(where):
            refuse_learnt(content)
        content = messages
        if content[-1]["role"] == "assistant":
            raise DataError(
                f"{where}: `prompt` ends with what the assistant says, and an answer would follow on that;"
                " cut the last message off."
            )
    elif not isinstance(content, str) or not content:
        raise DataError(f"{where}: `prompt` is {content!r}; give a non-empty text or a list of messages.")
    else:
        check_text(where, content)
        refuse_beside_text(where, row)
    refuse_unshown(where, row, "prompt", content)
    label = row.get("label")
    try:  # a spreadsheet's date is no JSON
        json.dumps(plain_label(label))
    except (TypeError, ValueError):
        raise DataError(
            f"{where}: its `label` is {safe_excerpt(repr(label))}, a {type(label).__name__}; write it as a"
            " text, a number, or a list or object of them."
        ) from None
    # `messages` belong to the prompt, and tell rewards and reports that it is a conversation.
    metadata = {key: value for key, value in row.items() if key not in _OWN}
    return Prompt.from_content(content, label, domain, metadata, where, arguments)


def refuse_unshown(
    where: str, row: Mapping[str, Any], column: str, text: str | list[Message], parts: Collection[str] = SHOWN
) -> None:
    """Raise `DataError` for a column of `parts` with a text that is not in `part`, the row's `column`,
    because no model would see it.
    """
    if not isinstance(text, str):
        text = "\n".join(
            str(one[key]) for one in text for key in ("content", "reasoning_content") if key in one
        )
    for name in row:
        if name.strip().lower() in parts and any(
            part.strip() not in text for part in _column_texts(row[name])
        ):
            raise DataError(
                f"{where}: it has `{name}` beside `{column}`, which the model would not be shown; write it"
                f" into `{column}`, or give the column another name."
            )


def _column_texts(value: object) -> Iterator[str]:
    """Yield the texts of a column: itself, or those in its lists and in its objects' text fields."""
    if isinstance(value, str):
        yield value
    within = [value.get(key) for key in ("text", "content", "value")] if isinstance(value, dict) else value
    for one in within if isinstance(within, list) else ():
        yield from _column_texts(one)


def refuse_media(where: str, row: Mapping[str, object]) -> None:
    """Raise `DataError` for a row with images or other media, because no model here sees them."""
    for column in _MEDIA:
        if row.get(column):
            raise DataError(
                f"{where}: it has `{column}`, and models here read text alone; leave out the column, or the"
                " rows that cannot be answered without it."
            )


def said_in(where: str, content: object, column: str = "prompt") -> Any:
    """Return `content`, or the messages if it is their JSON text. Raises `DataError`."""
    if not isinstance(content, str):
        return content
    if column == "prompt" and content.strip() == "[]":
        return []
    try:
        messages = from_text(content)
    except MessageError as error:
        raise DataError(f"{where}: `{column}` is no text to answer: {error}.") from None
    return content if messages is None else messages


_SYSTEM = ("system", "system_prompt", "system_message")
"""Columns of the system message."""


def with_system(where: str, row: Mapping[str, object], content: object) -> Any:
    """Prepend the column `system` to `content`, unless it has such a message."""
    texts = {column: row[column] for column in _SYSTEM if row.get(column)}
    if not texts or not isinstance(content, list) or not content:
        return content
    (column, text), *others = texts.items()
    if any(other != text for _, other in others):
        raise DataError(f"{where}: its {' and '.join(f'`{name}`' for name in texts)} differ; give one.")
    first = check_messages(where, content[:1])[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *content]
    if first["content"] != text:
        raise DataError(
            f"{where}: the column `{column}` and the first message both say what the system says; give one."
        )
    return content


def refuse_beside_text(where: str, row: Mapping[str, object]) -> None:
    """Raise `DataError` for columns that a text prompt cannot use."""
    column = next((name for name in _SYSTEM if row.get(name)), None)
    if column is not None:
        raise DataError(
            f"{where}: it has `{column}`, which a `prompt` of text has no place for; write messages, or give"
            " the column another name."
        )
    if arguments := template_arguments(where, row):
        raise DataError(
            f"{where}: {', '.join(arguments)} are for the chat template, which no `prompt` of text goes"
            " through; give messages, or leave them out."
        )


def template_arguments(where: str, row: Mapping[str, object]) -> dict[str, Any]:
    """Return the chat template's arguments of this row. Raises `DataError`."""
    try:
        return arguments_of(row)
    except MessageError as error:
        raise DataError(f"{where}: {error}.") from None


def check_text(where: str, text: str, column: str = "prompt") -> None:
    """Raise `DataError` for a text that no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: `{column}` holds {text[error.start]!a}, half of a character; mend the text."
        ) from None


def check_messages(where: str, messages: object, column: str = "prompt") -> list[Message]:
    """Return `messages` in the form for a chat template. Raises `DataError`."""
    if not isinstance(messages, list):
        raise DataError(f"{where}: `{column}` is {json_kind(messages)}; give a list of messages.")
    if not messages:
        raise DataError(f"{where}: `{column}` is an empty list; give at least one message.")
    with locating_errors(where, column):
        read = read_messages(messages)
    check_text(where, json.dumps(read, ensure_ascii=False), column)
    return read


@contextmanager
def locating_errors(where: str, column: str = "prompt") -> Iterator[None]:
    """Turn a `MessageError` into a `DataError` that names its message, counted from 1."""
    try:
        yield
    except MessageError as error:
        number = int(error.where[1:].partition("]")[0]) + 1
        raise DataError(f"{where}: `{column}`, message {number}: {error}.") from None
