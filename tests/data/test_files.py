"""Prompts from .jsonl and .parquet files: splits, domains in one file, and every kind of bad row."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from opd.config import DomainConfig
from opd.data.load import load_domain
from opd.errors import DataError, MissingExtraError
from opd.rollout.prompts import Domain

ROWS = [{"prompt": f"{i} + 1 =", "label": i + 1, "level": i % 3} for i in range(200)]


def _jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def _parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pytest.importorskip("pyarrow.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def _load(path: Path, *, held_out_prompts: int = 1000, **fields: Any) -> Domain:
    config = DomainConfig.model_validate({"source": str(path), **fields})
    return load_domain("math", config, seed=0, held_out_prompts=held_out_prompts)


def test_jsonl_and_parquet_give_the_same_domain(tmp_path: Path) -> None:
    from_jsonl = _load(_jsonl(tmp_path / "a.jsonl", ROWS))
    from_parquet = _load(_parquet(tmp_path / "a.parquet", ROWS))
    assert from_jsonl == from_parquet
    assert len(from_jsonl.train) + len(from_jsonl.held_out) == 200
    assert 5 <= len(from_jsonl.held_out) <= 40
    prompt = from_jsonl.train[0]
    assert prompt.text == f"{prompt.label - 1} + 1 ="
    assert prompt.metadata == {"level": (prompt.label - 1) % 3}
    assert from_jsonl.checker is None


def test_split_depends_on_each_prompt_alone(tmp_path: Path) -> None:
    whole = _load(_jsonl(tmp_path / "a.jsonl", ROWS))
    part = _load(_jsonl(tmp_path / "b.jsonl", ROWS[:100][::-1]))
    assert {p.key for p in part.held_out} < {p.key for p in whole.held_out}
    assert {p.key for p in part.train} < {p.key for p in whole.train}
    assert _load(tmp_path / "a.jsonl", held_out_prompts=3).held_out == whole.held_out[:3]


def test_messages_are_kept_and_given_as_metadata(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}], "label": str(i)} for i in range(100)]
    for path in (_jsonl(tmp_path / "a.jsonl", rows), _parquet(tmp_path / "a.parquet", rows)):
        prompt = _load(path).train[0]
        assert prompt.text is None
        assert prompt.messages == [{"role": "user", "content": f"say {prompt.label}"}]
        assert prompt.metadata == {"messages": prompt.messages}


def test_rows_of_several_domains_in_one_file(tmp_path: Path) -> None:
    rows = [row | {"domain": "math" if i % 2 else "code"} for i, row in enumerate(ROWS)]
    path = _jsonl(tmp_path / "a.jsonl", rows)
    own, named = _load(path), _load(path, params={"domain": "code"})
    assert all(p.label % 2 == 0 for p in [*own.train, *own.held_out])
    assert all(p.label % 2 == 1 for p in [*named.train, *named.held_out])
    assert own.train[0].domain == named.train[0].domain == "math"
    with pytest.raises(
        DataError, match=r"no rows of domain 'law', only of code, math; set domains\.math\.params"
    ):
        _load(path, params={"domain": "law"})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt": "x"', "not a line of JSON"),
        ('"prompt"', "a str where an object"),
        ('{"question": "x", "label": 1}', r"no `prompt` \(columns: question, label\)"),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            r"no `prompt` \(columns: messages\); rename `messages` to `prompt`, .* list of messages",
        ),
        ('{"prompt": ""}', "non-empty text"),
        ('{"prompt": 3}', "`prompt` is 3"),
        ('{"prompt": []}', "empty list"),
        ('{"prompt": ["hello"]}', "'hello' is not an object with `role`"),
        ('{"prompt": [{"role": "user"}]}', "with `role` and `content`"),
        (b'{"prompt": "\xff"}', "not a line of JSON"),
        (r'{"prompt": "a \ud800"}', "half of a character"),
        (r'{"prompt": [{"role": "user", "content": "\udfff"}]}', "half of a character"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str | bytes, told: str) -> None:
    path = tmp_path / "bad.jsonl"
    bad = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"prompt": "fine"}\n\n' + bad + b"\n")
    with pytest.raises(DataError, match=rf"bad\.jsonl:3: .*{told}"):
        _load(path)


def test_a_bad_parquet_row_and_a_broken_file_are_named(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "a.parquet", [{"prompt": "fine"}, {"prompt": ""}])
    with pytest.raises(DataError, match=r"a\.parquet: row 2: `prompt` is ''"):
        _load(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet is no readable parquet file"):
        _load(path)


@pytest.mark.parametrize(
    ("rows", "held_out", "told"),
    [
        ([], 0.1, "is empty"),
        (ROWS[:1], 0.001, "no held-out prompts are left of 1"),
        (ROWS[:1], 0.999, "no training prompts are left of 1"),
    ],
)
def test_an_empty_data_set_or_split_is_an_error(
    tmp_path: Path, rows: list, held_out: float, told: str
) -> None:
    with pytest.raises(DataError, match=told):
        _load(_jsonl(tmp_path / "a.jsonl", rows) if rows else _touch(tmp_path / "a.jsonl"), held_out=held_out)


def _touch(path: Path) -> Path:
    path.touch()
    return path


def test_missing_file_unknown_source_and_unknown_parameter(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl does not exist"):
        _load(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"source .*csv' is unknown; give procedural:NAME"):
        _load(tmp_path / "a.csv")
    with pytest.raises(DataError, match="unknown parameter 'digits'"):
        _load(_jsonl(tmp_path / "a.jsonl", ROWS), params={"digits": 8})


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _touch(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"opd\[parquet\]"):
        _load(path)
