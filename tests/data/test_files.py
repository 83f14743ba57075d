"""Prompts from .jsonl and .parquet files: splits, domains in one file, and every kind of bad row."""

import json
import os
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


@pytest.mark.parametrize(("kind", "labels"), [("float16", [0.5, 0.1, None]), ("float32", [0.1, 1e-5, None])])
def test_a_narrow_column_holds_the_numbers_that_were_written(tmp_path: Path, kind: str, labels: list) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pytest.importorskip("pyarrow.parquet")
    column = pyarrow.array(labels * 20, type=pyarrow.float32()).cast(kind)
    table = pyarrow.table({"prompt": [str(i) for i in range(60)], "label": column})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    domain = _load(tmp_path / "a.parquet", held_out_prompts=1)
    found = {one.text: one.label for one in (*domain.train, *domain.held_out)}
    assert found == {text: labels[int(text) % 3] for text in found}


def test_a_file_is_parsed_once_as_long_as_its_bytes_stay(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "a.jsonl", ROWS)
    fewer, first, again = _load(path, held_out_prompts=2), _load(path), _load(path)
    assert again == first
    assert again.train[0] is first.train[0]
    assert fewer.held_out == first.held_out[:2] != first.held_out
    assert _load(path, held_out=0.5).held_out != first.held_out
    stat = path.stat()
    path.write_text(path.read_text().replace("1 + 1", "1 - 1"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert _load(path).train != first.train or _load(path).held_out != first.held_out
    path.unlink()
    with pytest.raises(DataError, match="does not exist"):
        _load(path)


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


def test_a_message_without_content_is_the_same_in_either_file(tmp_path: Path) -> None:
    begun = [{"role": "assistant", "content": None}, {"role": "user", "content": "?"}]
    rows = [{"prompt": begun, "label": "a"}, {"prompt": begun[1:], "label": "b"}]
    found = [_load(_jsonl(tmp_path / "a.jsonl", rows)), _load(_parquet(tmp_path / "a.parquet", rows))]
    assert found[0] == found[1]


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
        ("version https://git-lfs/spec/v1", "it is a pointer of Git LFS"),
        ('"prompt"', "a text where an object"),
        ("[{}]", "a list where an object .* of a file that is one list, write every object on a line"),
        ("null", "null where an object"),
        (
            '{"prompt": "x", "label": 1, "prompt": "y"}',
            "not a line of JSON .the key 'prompt' is there twice.; mend",
        ),
        ('{"prompt": "x", "a": {"b": 1, "b": 1}}', "the key 'b' is there twice"),
        (
            '{"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}',
            "`prompt` ends with what the assistant says",
        ),
        (b"\0\0\0", "damaged or of another encoding; write it again, as UTF-8"),
        (
            '{"prompt": "x", "label": ' + "9" * 6000 + "}",
            r"\(a number has 6,000 digits where 1,000 are read\)",
        ),
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
        (b'{"prompt": "\xff"}', "not UTF-8 .byte 0xff at 12.; write the file as UTF-8"),
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


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_another_encoding_is_named_and_not_a_line_of_it(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"prompt": "1"}\n{"prompt": "2"}\n'.encode(encoding))
    with pytest.raises(DataError, match=r"a\.jsonl:1: .* as UTF-8"):
        _load(path)


def test_a_byte_order_mark_and_foreign_line_ends_change_nothing(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "a.jsonl", ROWS)
    plain = _load(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert [prompt.key for prompt in _load(path).train] == [prompt.key for prompt in plain.train]


def test_a_conversation_beside_a_prompt_of_text_is_not_taken_for_it(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "a.jsonl", [row | {"messages": 7, "of": "us"} for row in ROWS])
    assert {tuple(prompt.metadata.items()) for prompt in _load(path).train} == {
        (("level", level), ("of", "us")) for level in range(3)
    }


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
        (ROWS[:1] * 3, 0.001, "all 3 rows of domain .* ask the same prompt, which is either trained on"),
        (ROWS[:1] * 3, 0.999, "all 3 rows of domain .* ask the same prompt, which is either trained on"),
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


def test_a_parquet_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table([["a", "b"], ["c", "d"], ["1", "2"]], names=["prompt", "prompt", "label"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: the column 'prompt' is there twice"):
        _load(tmp_path / "a.parquet")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _touch(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"opd\[parquet\]"):
        _load(path)
