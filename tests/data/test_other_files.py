"""Files and columns as others have them: what a file is that cannot be read, and what to rename."""

# ruff: noqa: E501

import bz2
import gzip
import io
import json
import lzma
import zipfile
from pathlib import Path

import pytest

from opd.config import DomainConfig
from opd.data.demonstrations import read_demonstrations
from opd.data.file_kinds import SHOWN, THOUGHT
from opd.data.load import load_domain, prompt_of
from opd.errors import DataError
from opd.rewards.registry import check_labels
from opd.rollout.prompts import Prompt

ROWS = [{"prompt": f"say {n}", "completion": str(n), "label": str(n)} for n in range(40)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zipped() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("rows.jsonl", LINES)
    return packed.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
PAGE = "is a web page .*download the file itself"
LONG = json.dumps({"prompt": "\u2028 x,\n" * 3000, "completion": "y"}, ensure_ascii=False).encode()
FILES = {
    "page": ("jsonl", b"<!DOCTYPE html>\n<html><body>404</body></html>", PAGE),
    "page, small letters and blanks": ("jsonl", b"\n  <html lang='en'>", PAGE),
    "page as a table": ("parquet", b"<!doctype html><html></html>", PAGE),
    "answer of a store": ("jsonl", b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", PAGE),
    "pointer": ("jsonl", POINTER, "is a pointer of Git LFS .*git lfs pull"),
    "pointer for a table": ("parquet", POINTER, "is a pointer of Git LFS .*git lfs pull"),
    "gzip": ("jsonl", gzip.compress(LINES), r"is packed \(gzip\); unpack it"),
    "gzip as a table": ("parquet", gzip.compress(LINES), r"is packed \(gzip\); unpack it"),
    "bzip2": ("jsonl", bz2.compress(LINES), r"is packed \(bzip2\)"),
    "xz": ("jsonl", lzma.compress(LINES), r"is packed \(xz\)"),
    "zstd": ("jsonl", b"\x28\xb5\x2f\xfd\x04\x00A\x00\x00", r"is packed \(Zstandard\)"),
    "zip": ("jsonl", zipped(), "is a ZIP archive or a spreadsheet"),
    "parquet": ("jsonl", b"PAR1\x15\x04\x15", "is a Parquet file; name it .parquet"),
    "arrow": ("jsonl", b"ARROW1\0\0\xff\xff", "is an Arrow file"),
    "pickle": ("jsonl", b"\x80\x04\x95", "looks like a pickle, which is never read"),
    "lines as a table": ("parquet", LINES, "holds JSON and is no Parquet file; name it .jsonl"),
    "text as a table": ("parquet", b"prompt,label\n1,2\n", "is a text and no Parquet file"),
    "csv": ("jsonl", b"prompt,label\nsay 1,1\n", r"is a table of text .*'prompt,label'.*lines=True"),
    "csv, quoted": ("jsonl", b'\xef\xbb\xbf"prompt","label"\r\n"a","b"\r\n', "is a table of text"),
    "csv, semicolons": ("jsonl", b"prompt; label\n1;2\n", "is a table of text"),
    "tsv": ("jsonl", b"prompt\tlabel\n1\t2\n", "is a table of text"),
    "text": ("jsonl", b"# Rows\nof a file", "begins with '# Rows', which is no JSON"),
    "yaml": ("jsonl", b"- prompt: a\n  label: b\n", "begins with '- prompt: a', which is no JSON"),
    "python": ("jsonl", b"{'prompt': 'a', 'label': None}\n", "what Python prints of its rows"),
    "python, a list": ("jsonl", b"[{'prompt': 'a'}]\n", "what Python prints of its rows"),
    "a comma behind each row": ("jsonl", LINES.replace(b"}\n", b"},\n"), "has a comma behind its first row"),
    "list over lines": ("jsonl", json.dumps(ROWS, indent=2).encode(), "over several lines; write every object"),
    "list, object by object": (
        "jsonl", ("[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]").encode(), "over several lines",
    ),
    "list that begins with an object": (
        "jsonl", ("[" + ",\n".join(map(json.dumps, ROWS)) + "]").encode(), "over several lines",
    ),
    "object over lines": ("jsonl", json.dumps(ROWS[0], indent=1).encode(), "over several lines"),
    "list on a line": ("jsonl", json.dumps(ROWS).encode(), r":1: a list where .*write every object on a line"),
    "list in an object": ("jsonl", json.dumps({"data": ROWS}).encode(), "each object of its `data` on a line"),
    "a broken first line": ("jsonl", b'{"prompt": "a"\n{"prompt": "b"}\n', r":1: not a line of JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_file_of_another_kind_is_called_what_it_is(case, tmp_path):
    ending, content, told = FILES[case]
    if ending == "parquet" or case == "parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"rows.{ending}"
    path.write_bytes(content)
    config = DomainConfig.model_validate({"source": str(path)})
    with pytest.raises(DataError, match=rf"rows\.{ending}.*{told}") as caught:
        load_domain("d", config, seed=0, held_out_prompts=2)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "Expecting value" not in sentence
    if case != "list in an object":  # of which the columns are said
        with pytest.raises(DataError) as caught:
            read_demonstrations(str(path), None)
        assert str(caught.value) == sentence


@pytest.mark.parametrize("content", [LINES, b"\xef\xbb\xbf" + LINES, b"\n\n" + LINES, LONG + b"\n" + LINES])
def test_a_file_that_is_right_is_read(content, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert len(read_demonstrations(str(path), None)) >= len(ROWS)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"problem": "a", "answer": "b"}, "rename `problem` to `prompt` and `answer` to `label`"),
        ({"question": "a", "ground_truth": "b"}, "`question` to `prompt` and `ground_truth` to `label`"),
        ({"query": "a", "response": "b"}, "`query` to `prompt` and `response` to `label`"),
        ({"Question": "a", "Answer": "b"}, "`Question` to `prompt` and `Answer` to `label`"),
        ({"Prompt ": "a", "LABEL": "b"}, "`Prompt ` to `prompt` and `LABEL` to `label`"),
        ({"problem": "a", "solution": "b", "answer": "c"}, "`problem` to `prompt` and `answer` to `label`"),
        ({"instruction": "a", "output": "b"}, "`instruction` to `prompt` and `output` to `label`"),
        ({"question": "a", "label": "b"}, "rename `question` to `prompt`\\."),
        ({"question": "a", "reward_model": {"ground_truth": "b"}}, "`reward_model.ground_truth` to `label`"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "rename `conversations` to `prompt`"),
        ({"data": [{"question": "a"}]}, "each object of its `data` on a line"),
        ({"prompt": None, "label": 1}, "it is null; mend the row"),
        ({"id": 1}, "every row needs one"),
    ],
)
def test_a_prompt_of_another_name_is_to_be_renamed(row, told):
    with pytest.raises(DataError, match=rf"a:1: there is no `prompt` \(columns: {', '.join(row)}\).*{told}"):
        prompt_of("a:1", row, "d")


@pytest.mark.parametrize(
    "name", ["answer", "ground_truth", "solution", "target", "Answer", "output", "Label"]
)
def test_a_label_of_another_name_is_to_be_renamed(name):
    config = DomainConfig.model_validate({"source": "a.jsonl", "reward": "choice"})
    for label in ({}, {"label": None}):
        prompt = prompt_of("a:1", {"prompt": "x", name: "A", **label}, "d")
        with pytest.raises(DataError, match=rf"a:1: the label, .* is missing; rename `{name}` to `label`\."):
            check_labels(config, "d", [prompt])
    with pytest.raises(DataError, match="is missing; give the letter"):
        check_labels(config, "d", [Prompt.from_content("x", None, "d", where="a:1")])


TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"question": "a", "answer": "b"}, "rename `question` to `prompt` and `answer` to `completion`"),
        ({"query": "a", "response": "b"}, "rename `query` to `prompt` and `response` to `completion`"),
        ({"prompt": "a", "response": "b"}, "rename `response` to `completion`"),
        ({"problem": "a", "completion": "b"}, "rename `problem` to `prompt`"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "of `chosen`: rename it to `completion`"),
        *[
            ({**form, name: "Think"}, f"it has `{name}` beside `{column}`, which the model would not")
            for name in (*SHOWN, *THOUGHT)
            for column, form in (("messages", {"messages": TALK}), ("prompt", {"prompt": "a", "completion": "b"}))
        ],
        *[
            ({"prompt": "a", "completion": "b", name: "Be brief"}, f"it has `{name}`, which a `prompt` of text")
            for name in ("system", "system_prompt", "system_message")
        ],
        ({"prompt": "a", "completion": "b", "label": 0}, "its `label` is 0, which says .*leave such rows out"),
        ({"prompt": "a", "completion": "b", "label": 0.0}, "its `label` is 0.0"),
        ({"messages": TALK, "label": False}, "its `label` is false"),
    ],
)  # fmt: skip
def test_what_stands_beside_a_demonstration_is_used_or_refused(row, told, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{told}"):
        read_demonstrations(str(path), None)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK, "instruction": "a", "response": "b"},
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "a", "completion": "b", "label": "0"},
        {"prompt": "a", "completion": "b", "input": "", "source": "there"},
    ],
)
def test_columns_that_say_the_same_or_nothing_are_no_fault(row, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    assert len(read_demonstrations(str(path), None)) == 1


@pytest.mark.parametrize("column", ["system", "system_prompt", "system_message"])
def test_what_the_system_says_is_said_in_every_form(column, tmp_path):
    system = {"role": "system", "content": "Be brief"}
    asked = prompt_of("a", {"prompt": TALK[:1], column: "Be brief"}, "d")
    assert asked.messages == [system, TALK[0]]
    assert prompt_of("a", {"prompt": [system, TALK[0]], column: "Be brief"}, "d").messages == asked.messages
    path = tmp_path / "rows.jsonl"
    rows = [{"messages": TALK}, {"prompt": TALK[:1], "completion": "b"}]
    path.write_text("\n".join(json.dumps({**row, column: "Be brief"}) for row in rows))
    assert [(one.messages or [])[0] for one in read_demonstrations(str(path), None)] == [system, system]
    with pytest.raises(DataError, match=f"the column `{column}` and the first message both say"):
        prompt_of("a", {"prompt": [system, TALK[0]], column: "Be long"}, "d")
    if column != "system":
        with pytest.raises(DataError, match=f"its `system` and `{column}` differ; give one"):
            prompt_of("a", {"prompt": TALK[:1], "system": "x", column: "y"}, "d")


def test_an_ending_of_another_kind_is_told(tmp_path: Path):
    for name in ("a.csv", "a.json"):
        with pytest.raises(DataError, match=r"path ending in \.jsonl or \.parquet"):
            load_domain("d", DomainConfig.model_validate({"source": name}), seed=0, held_out_prompts=2)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"prompt": "a", "label": "1", "input": "more"},
            "it has `input` beside `prompt`, which the model would not",
        ),
        ({"prompt": "a", "label": "1", "context": "more"}, "it has `context` beside `prompt`"),
        ({"prompt": "Which?", "label": "A", "choices": ["red", "blue"]}, "it has `choices` beside `prompt`"),
        ({"prompt": TALK[:1], "label": "1", "history": ["before"]}, "it has `history` beside `prompt`"),
        (
            {"instruction": "a", "input": "b", "output": "c"},
            r"rename `instruction` \(with `input` written into it\) to `prompt` and `output` to `label`",
        ),
        (
            {"question": "a", "choices": ["b"], "answer": 0},
            r"rename `question` \(with `choices` written into it\) to `prompt` and `answer` to `label`",
        ),
    ],
)
def test_a_part_of_what_is_asked_is_shown_or_refused(row, told):
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{told}"):
        prompt_of("rows.jsonl:1", row, "d")


@pytest.mark.parametrize(
    "value",
    [
        "more",
        ["a", "more"],
        [["a", "more"]],
        {"text": ["more"], "label": ["A"]},
        [{"role": "user", "content": "more"}],
    ],
    ids=["text", "list", "pairs", "object", "messages"],
)
@pytest.mark.parametrize("name", [*SHOWN, "Input", " Context"])
def test_no_door_leaves_out_a_part_of_what_is_asked(name, value, tmp_path):
    refused = (
        rf"rows\.jsonl:1: it has `{name}` beside `(prompt|messages)`, which the model would not be shown"
    )
    path = tmp_path / "rows.jsonl"
    for form in (
        {"messages": TALK},
        {"prompt": "a", "completion": "b"},
        {"prompt": TALK[:1], "completion": "b"},
    ):
        path.write_text(json.dumps({**form, name: value}))
        with pytest.raises(DataError, match=refused):
            read_demonstrations(str(path), None)
    for asked in ("a", TALK[:1]):
        with pytest.raises(DataError, match=refused):
            prompt_of("rows.jsonl:1", {"prompt": asked, "label": "1", name: value}, "d")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "label": "1", "reasoning": "of the solution", "choices": [3, 4]},
        {"prompt": "Which? red or blue", "label": "A", "choices": ["red", "blue"]},
        {"prompt": "a", "label": "1", "input": "", "context": None, "source": "there"},
        {"prompt": [{"role": "user", "content": "a b"}], "label": "1", "input": "b"},
    ],
)
def test_what_the_prompt_has_too_is_no_fault(row):
    assert prompt_of("rows.jsonl:1", row, "d").label == row["label"]
