"""Data files that are small on the disk and large in memory, or that nothing can read: one sentence each."""

import datetime
import json
import random

import pytest

from opd.config.recipe import DomainConfig
from opd.data import load as sources
from opd.data.load import load_domain
from opd.errors import DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
MIB = 2**20


def load(path):
    return load_domain("d", DomainConfig(source=str(path), reward="x:y"), seed=0, held_out_prompts=5)


def refused(path, named: str) -> str:
    with pytest.raises(DataError) as caught:
        load(path)
    said = str(caught.value)
    assert named in said
    assert str(path) in said
    assert len(said) < 1000
    return said


def nested(depth: int, form):
    made = pa.string()
    for _ in range(depth):
        made = form(made)
    return made


@pytest.fixture
def short_rows(monkeypatch):
    monkeypatch.setattr(sources, "_LONGEST_ROW", MIB)


@pytest.fixture
def small_machine(monkeypatch):
    monkeypatch.setattr(sources, "machine_memory", lambda: 2 * MIB)


@pytest.mark.parametrize("end", ["", '"}\n'])
def test_a_line_without_end_is_not_read_to_its_end(tmp_path, short_rows, end):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "first"}\n{"prompt": "' + "a" * 3 * MIB + end)
    assert "a.jsonl:2" in refused(file, "more than 1 MiB")


def test_a_hole_is_not_read(tmp_path, short_rows):
    file = tmp_path / "a.jsonl"
    with file.open("wb") as hole:
        hole.truncate(2**40)
    refused(file, "more than 1 MiB")


def test_few_bytes_that_stand_for_long_rows(tmp_path, monkeypatch):
    """One value in a dictionary and 10,000 references to it."""
    monkeypatch.setattr(sources, "_LONGEST_ROW", MIB // 4)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 10_000, pa.int32()), pa.array(["x" * (MIB // 2)]))
    pq.write_table(pa.table({"prompt": column}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    refused(tmp_path / "a.parquet", "which is no prompt")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_that_fill_the_memory_together(tmp_path, small_machine, kind):
    rows = [{"prompt": f"{number} {'x' * 1000}", "domain": "d"} for number in range(2000)]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    refused(path, "half of this machine's memory")
    others = [row | {"domain": "other"} for row in rows] + rows[:50]  # are not kept
    path.write_text("".join(json.dumps(row) + "\n" for row in others))
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(others), path)
    assert len(load(path).train) > 30


COLUMNS = {
    "nanoseconds": lambda: pa.array([1] * 9, pa.timestamp("ns")),
    "deep structures": lambda: pa.nulls(9, nested(300, lambda inner: pa.struct([("a", inner)]))),
    "deep lists": lambda: pa.nulls(9, nested(200, pa.list_)),
    "bytes": lambda: pa.array([b"\xff"] * 9),
    "numbers": lambda: pa.array(range(9)),
    "dates": lambda: pa.array([datetime.date(2020, 1, 1)] * 9),
    "nothing": lambda: pa.nulls(9),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_prompts_of_odd_types(tmp_path, kind):
    pq.write_table(pa.table({"prompt": COLUMNS[kind]()}), tmp_path / "a.parquet")
    assert "(None)" not in refused(tmp_path / "a.parquet", "a.parquet")


@pytest.mark.slow
def test_any_byte_of_a_parquet_file_may_be_wrong(tmp_path):
    rows = [{"prompt": f"abc{number % 97}", "label": number, "n": [number]} for number in range(300)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "whole.parquet")
    whole, rng, found = (tmp_path / "whole.parquet").read_bytes(), random.Random(0), 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 3])):
            data[rng.randrange(len(data))] = rng.choice([0, 127, 128, 255, rng.randrange(256)])
        (tmp_path / "a.parquet").write_bytes(data)
        try:
            load(tmp_path / "a.parquet")
        except DataError as error:  # anything else fails the test
            found += str(tmp_path / "a.parquet") in str(error)
    assert found > 100
