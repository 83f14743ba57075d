"""A run that is being written: what a look reads, how little is kept of it, and what its page shows."""

import json
import os
import re
import shutil
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path

import pytest

from opd.metrics import MetricsWriter
from opd.pipelines.evaluation.statistics import at_the_end
from opd.pipelines.report import live_page, load, write_report
from opd.pipelines.report.live_page import SCRIPT, SHARE, PageBoard, flags_of, open_runs, status_line
from opd.pipelines.report.load import AppendedFile, LiveRun
from opd.pipelines.report.results import POINTS, RECENT, Curve, Run, StageResult
from opd.storage.files import write_sealed

from .conftest import metrics, write_lines

HOSTILE = [
    "<script>window.hit = 1</script>", '"><img src=x onerror="window.hit=1">', "</title><base href=//x>",
    "a' onload='x", "\x1b[2J\x1b]0;t\x07\x9b", "a\u202ebc\u2066", "\ud800", "</dd></main><h1>", "$\\frac{x$",
]  # fmt: skip
ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def flag(step: int, **changes) -> dict:
    told = {"step": step, "rule": "entropy", "metric": "entropy", "value": 0.1, "bound": 0.2}
    return told | {"action": "warn", "sentence": "Entropy fell."} | changes


def samples(step: int, text: str) -> dict:
    shown = {"text": text, "reward": 1, "parts": {text: 0.5}, "tokens": 3, "cut": True, "teacher": text}
    return {
        "step": step,
        "prompts": [{"domain": text, "prompt": text, "label": text, "responses": 9, "shown": [shown]}],
    }


def make(folder: Path, stage: str = "merge", steps: int = 30, text: str = "x", first: int = 1) -> Path:
    """A run in the middle of `stage`, with `text` wherever a run has some."""
    (folder / "stages" / stage).mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"domains": {"sort": {}, text: {}}, "name": text}))
    place = folder / "stages" / stage
    rows = [row | {f"kl/{text}": 1 / row["step"], f"time/{text}": 1.0} for row in metrics("merge", steps)]
    write_lines(place / "metrics.jsonl", rows)
    write_lines(place / "flags.jsonl", [flag(first, rule=text, metric=text, action=text, sentence=text)])
    (place / "last_samples.json").write_text(json.dumps(samples(steps, text)))
    return folder


def seen(path: Path) -> LiveRun:
    run = LiveRun(path, path.name)
    run.read_changes()
    return run


def merge_of(run: LiveRun) -> StageResult:
    found = run.current_run().stage("merge")
    assert found is not None
    return found


class Page(HTMLParser):
    """Tags, names of attributes, and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.attributes: set[str] = set()
        self.text = ""
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes |= {name for name, _ in attrs}
        self._in_script = tag == "script"

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts.append(data)
            self._in_script = False
        self.text += data


def test_only_whole_lines_are_read_and_each_once(tmp_path):
    path = tmp_path / "lines"
    appended = AppendedFile(path)
    assert appended.read_appended(99) == (False, [])
    path.write_bytes(b"a\nbb\nc")
    assert appended.read_appended(99) == (False, [b"a", b"bb"])
    assert (appended.read_appended(99), appended.unread) == ((False, []), 1)
    with path.open("ab") as file:
        file.write(b"cc\nd\n")
    assert appended.read_appended(4) == (False, [b"ccc"])
    assert appended.read_appended(99) == (False, [b"d"])
    assert (appended.read_appended(99), appended.unread) == ((False, []), 0)


@pytest.mark.parametrize("how", ["replaced", "in place", "shorter", "gone"])
def test_a_file_that_was_written_anew_is_read_anew(tmp_path, how):
    path = tmp_path / "lines"
    path.write_bytes(b"a\nb\n")
    appended = AppendedFile(path)
    appended.read_appended(99)
    data = b"a\n" if how == "shorter" else b"a\nc\nd\n"
    if how == "gone":
        path.unlink()
        assert appended.read_appended(99) == (True, [])
        assert appended.read_appended(99) == (False, [])
    elif how == "replaced":
        (tmp_path / "other").write_bytes(data)
        os.replace(tmp_path / "other", path)
    if how != "replaced":
        path.write_bytes(data)
    assert appended.read_appended(99) == (how != "gone", data[:-1].split(b"\n"))


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_plain_file_of_the_run_is_not_read(tmp_path, kind):
    path = tmp_path / "lines"
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(b"secret\n")
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert AppendedFile(path).read_appended(99) == (False, [])


def test_a_line_without_an_end_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "LONGEST_LINE", 64)
    path = tmp_path / "lines"
    path.write_bytes(b"a\n" + b"x" * 1000 + b"\nb\n")
    appended, found = AppendedFile(path), []
    for _ in range(40):
        found += appended.read_appended(65)[1]
    assert found == [b"a", b"?", b"b"]


@pytest.mark.parametrize("count", [1, 79, POINTS, POINTS + 1, 5 * POINTS + 7])
def test_a_curve_ends_as_the_reports_does_and_stays_short(count):
    values = [((7 * step) % 13) / 13 + step / count for step in range(count)]
    curve = Curve()
    for step, value in enumerate(values):
        curve.add_point(step, 2 * step, value)
    steps, tokens, found = curve.column_values()
    assert at_the_end(found) == pytest.approx(at_the_end(values))
    assert len(found) <= POINTS + RECENT
    assert steps == sorted(steps)
    assert tokens == [2 * step for step in steps]
    assert (steps[-1], curve.count) == (count - 1, count)
    assert found[len(found) // 2] == pytest.approx(values[round(steps[len(found) // 2])], abs=0.7)
    if count <= POINTS:
        assert found == values


def test_a_run_that_comes_grows_resumes_and_goes(tmp_path):
    run, folder = LiveRun(tmp_path / "run", "run"), tmp_path / "run"
    run.read_changes()
    assert "there is no run in" in status_line(run)
    assert not run.is_present
    writer = MetricsWriter(folder / "stages" / "merge")
    for step in range(1, 8):
        writer.write(step, {"reward/mean": step}, step)
        run.read_changes()
    assert status_line(run) == "run: Merge, at step 7"
    write_lines(folder / "stages" / "merge" / "flags.jsonl", [flag(3), flag(7), flag(7)])
    run.read_changes()
    assert [found.step for _, found in flags_of([run])] == [7, 3]
    writer.truncate(4)  # as a resumed stage does
    run.read_changes()
    assert merge_of(run).column_values("reward/mean")[2] == [1, 2, 3, 4]
    assert [found.step for _, found in flags_of([run])] == [3]
    (folder / "stages" / "merge" / "done.json").touch()
    run.read_changes()
    assert status_line(run) == "run: Merge, done"
    shutil.rmtree(folder)
    before = run.version
    run.read_changes()
    assert not run.is_present
    assert run.version > before


@pytest.mark.parametrize("when", [-(1 << 40), 1 << 40, 1 << 55])
def test_a_file_of_any_time_is_shown(tmp_path, when):
    folder = make(tmp_path / "run", steps=3)
    os.utime(folder / "stages" / "merge" / "metrics.jsonl", (0, when))
    assert "at step 3" in PageBoard([seen(folder)]).render_page(0)


def test_nothing_new_is_no_news(tmp_path):
    run = seen(make(tmp_path / "run"))
    before = run.version
    run.read_changes()
    assert run.version == before


BAD = [
    b"{", b"[1]", b"null", b'{"step": "1"}', b'{"step": true}', b"\xff", b"[" * 5000, b'{"step": 1e5}',
    b'{"step": NaN}', b'{"step": ' + b"9" * 900 + b"}", b'{"step": ' + b"9" * 9000 + b"}", b"",
]  # fmt: skip


@pytest.mark.parametrize("line", BAD)
def test_what_cannot_be_read_is_left_out_and_counted(tmp_path, line):
    folder = make(tmp_path / "run", steps=3)
    for name in ("metrics.jsonl", "flags.jsonl"):
        path = folder / "stages" / "merge" / name
        path.write_bytes(path.read_bytes() + line + b"\n" + json.dumps(flag(4)).encode() + b"\n")
    (folder / "stages" / "merge" / "last_samples.json").write_bytes(line)
    (folder / "config.json").write_bytes(line)
    run = seen(folder)
    merge = merge_of(run)
    assert (merge.step, merge.unreadable) == (4, 1)
    assert [found.step for found in merge.flags] == [1, 4]
    assert merge.samples == []
    assert "1 lines of metrics cannot be read" in PageBoard([run]).render_content(0)


@pytest.mark.parametrize("value", [None, "x", [], {}, 1e200, 10**400, True, [[1]], {"a": {}}, [{"shown": 3}]])
def test_values_of_another_form_are_no_values(tmp_path, value):
    folder = make(tmp_path / "run", steps=3)
    place = folder / "stages" / "merge"
    write_lines(
        place / "metrics.jsonl", [{"step": n, "tokens/student": value, "a": value, "b": n} for n in (1, 2)]
    )
    write_lines(place / "flags.jsonl", [dict.fromkeys(flag(1), value) | {"step": 1}])
    told = samples(3, "x")
    (place / "last_samples.json").write_text(json.dumps({"step": 3, "prompts": value}))
    (folder / "config.json").write_text(json.dumps({"domains": value, "distill": value, "name": value}))
    run = seen(folder)
    assert list(merge_of(run).curves) == ["b"]
    assert "Red flags" in PageBoard([run]).render_content(0)
    told["prompts"][0] |= dict.fromkeys(("domain", "prompt", "label", "responses"), value)
    told["prompts"][0]["shown"][0] = dict.fromkeys(told["prompts"][0]["shown"][0], value)
    (place / "last_samples.json").write_text(json.dumps(told))
    assert "Samples of the last step" in PageBoard([run]).render_content(0)


def test_a_link_leads_out_of_no_run(tmp_path):
    make(tmp_path / "other")
    (tmp_path / "run" / "stages").mkdir(parents=True)
    (tmp_path / "run" / "stages" / "merge").symlink_to(tmp_path / "other" / "stages" / "merge")
    assert not seen(tmp_path / "run").is_present
    shutil.rmtree(tmp_path / "run" / "stages")
    (tmp_path / "run" / "stages").symlink_to(tmp_path / "other" / "stages")
    assert not seen(tmp_path / "run").is_present


@pytest.mark.slow
def test_no_text_of_a_run_becomes_part_of_its_page(tmp_path):
    """Nor of the page of several, whatever their folders are called; and the one script is the page's own."""
    plain = PageBoard(open_runs([make(tmp_path / "plain"), make(tmp_path / "second", "specialist-sort")]))
    pages = [Page(plain.render_page(number)) for number in (None, 0, 1)]
    tags = {tag for page in pages for tag in page.tags} | {"br"}
    attributes = {name for page in pages for name in page.attributes}
    for number, text in enumerate(HOSTILE):
        name = text.replace("/", "").replace("\ud800", "\udcff")
        stage = f"specialist-{name}"
        folders = [
            make(tmp_path / str(number), text=text),
            make(tmp_path / f"{number}{name}", stage, text=text),
        ]
        board = PageBoard(open_runs(folders))
        for page in (board.render_page(None), board.render_page(0), board.render_page(1)):
            found = Page(page)
            assert set(found.tags) <= tags
            assert found.attributes <= attributes
            assert found.scripts == [SCRIPT]
            assert not ACTS.search(page)
    assert {"script", "dl", "svg", "details"} <= tags
    assert not {name for name in attributes if name.startswith("on") or name in ("src", "action")}


SHOWN = [
    "Merge, at step 30", "Samples of the last step", "Merge: KL to each teacher", "Gradient share",
    "Time per phase", "reward 1 (x 0.5), cut at the length limit, 3 tokens", "1 of 9 responses",
]  # fmt: skip


def test_a_page_has_what_the_run_shows(tmp_path):
    folder = make(tmp_path / "run")
    write_lines(
        folder / "stages" / "merge" / "flags.jsonl", [flag(n, sentence=f"S{n}.") for n in range(1, 26)]
    )
    page = Page(PageBoard([seen(folder)]).render_page(0)).text
    assert [part for part in SHOWN if part not in page] == []
    assert [f"S{n}." in page for n in (25, 6, 5)] == [True, True, False]
    assert "And 5 more in flags.jsonl" in page


def record(folder: Path, stage: str, seconds: float) -> None:
    """Of a stage that writes no steps: a merge of weights, the evaluation."""
    own = {"stage": stage, "run": "", "files": {}, "from": {}}
    told = {"seconds": seconds, "student_tokens": 0, "steps": 0, "peak_rss_mb": 9.0, "phases": {}}
    write_sealed(folder / "stages" / stage / "done.json", own | told)


def times(page: str) -> dict[str, str]:
    """Stage -> time, of the table of stages."""
    section = page.partition("<h2>Time and memory</h2>")[2].partition("</section>")[0]
    return dict(re.findall(r'<th scope="row">([^<]*)</th><td>([^<]*)</td>', section))


def test_curves_come_first_and_times_are_the_reports(tmp_path):
    """Those of merges of weights and of the evaluation, too."""
    folder = make(tmp_path / "run", steps=12)
    record(folder, "baseline-ties", 2.1)
    record(folder, "evaluate", 75.0)
    page, report = PageBoard([seen(folder)]).render_page(0), write_report(folder).read_text("utf-8")
    heads = re.findall("<h2>(.*?)</h2>", page)
    assert heads[:3] == ["Learning curves", "Red flags", "run"]
    assert page.index('role="img"') < page.index("<table")
    narrow = "\u202f"
    assert times(page) == {
        "Merge": f"1.9{narrow}s", "TIES": f"2.1{narrow}s", "Evaluation": f"1{narrow}min 15{narrow}s",
    }  # fmt: skip
    assert times(report) == times(page)


@pytest.mark.parametrize(
    "told", ["[1]", "{", '{"seconds": "x"}', '{"seconds": 1e200}', '{"phases": [1]}', '{"steps": [0]}', "",
             '{"seconds": 3, "phases": {"a": "b"}}', f'{{"seconds": 1{"0" * 400}}}',
             '{"seconds": true, "student_tokens": NaN}'],
)  # fmt: skip
def test_a_record_of_another_form_tells_no_time(tmp_path, told):
    folder = make(tmp_path / "run", steps=12)
    (folder / "stages" / "merge" / "done.json").write_text(told)
    (folder / "stages" / "evaluate").mkdir()
    (folder / "stages" / "evaluate" / "done.json").write_text(told)
    run = seen(folder)
    assert "Merge, done" in status_line(run)
    assert merge_of(run).seconds == pytest.approx(0.16 * 12)
    assert "Evaluation" in PageBoard([run]).render_page(0)


def test_several_runs_are_lines_of_one_chart(tmp_path):
    board = PageBoard(open_runs([make(tmp_path / "a" / "run"), make(tmp_path / "b" / "run")]))
    page = Page(board.render_page(None)).text
    assert "Merge: reward" in page
    assert page.count(str(tmp_path / "a" / "run")) > 3
    assert "Specialists: reward" not in page


def test_charts_are_drawn_anew_when_there_is_something_new_and_time_for_it(tmp_path, monkeypatch):
    now, drawn = [100.0], []
    folder = make(tmp_path / "run")
    board = PageBoard(open_runs([folder]), lambda: now[0], lambda: now[0])

    def draw(runs: list[Run], *, several: bool) -> tuple[str, str]:
        now[0] += 0.5
        drawn.append(runs[0].stages[0].step)
        return ("several" if several else "one", "")

    monkeypatch.setattr(live_page, "draw_charts", draw)
    for wait, more in ((0.0, False), (60.0, False), (0.0, True), (0.5 / SHARE - 3, True), (5.0, False)):
        now[0] += wait
        if more:
            rows = (folder / "stages" / "merge" / "metrics.jsonl").read_text()
            step = rows.count("\n") + 1
            write_lines(folder / "stages" / "merge" / "metrics.jsonl", metrics("merge", step))
        board.refresh_runs()
        now[0] += 2
        board.render_content(0)
    assert drawn == [30, 31, 32]


def test_the_page_goes_on_while_a_long_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "LONGEST_LINE", 1 << 12)
    monkeypatch.setattr(load, "LONGEST_LINE", 1 << 12)
    monkeypatch.setattr(load, "AT_ONCE", 1 << 14)
    path = make(tmp_path / "run", steps=3) / "stages" / "merge" / "metrics.jsonl"
    write_lines(path, metrics("merge", 3000))
    run, looks = seen(tmp_path / "run"), 1
    assert re.search(r"at step \d+", status_line(run))
    while left := run.unread_bytes:
        run.read_changes()
        assert left - run.unread_bytes <= 1 << 14
        looks += 1
    assert merge_of(run).step == 3000
    assert looks > 20


@pytest.mark.long
def test_a_million_lines_are_kept_in_bounded_memory(tmp_path):
    path = make(tmp_path / "run", steps=3) / "stages" / "merge" / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(1, 10**6 + 1):
            file.write(
                f'{{"step": {step}, "tokens/student": {step}, "reward/mean": {step % 7}, "lr": 0.1}}\n'
            )
    run = LiveRun(tmp_path / "run", "run")
    tracemalloc.start()
    run.read_changes()
    while run.unread_bytes:
        run.read_changes()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert merge_of(run).step == 10**6
    assert kept < 2 << 16, kept  # two curves


def test_a_curve_is_over_steps_and_over_the_tokens_that_the_student_had_learnt_from():
    stage = StageResult("merge")
    rows = [
        {"step": 1, "time": 10.0, "tokens/student": 100, "lr": 0.5, "time/train": 2.0},
        {"step": 2, "time": 30.0, "tokens/student": 250, "lr": 0.25, "time/train": 3.0, "odd": "a word"},
        {"step": 3, "time": 60.0, "tokens/student": "none", "lr": 0.125},
    ]
    for row in rows:
        stage.add_row(row)
    assert stage.column_values("lr") == ([1, 2, 3], [100, 250, 0], [0.5, 0.25, 0.125])
    assert stage.column_values("time/train") == ([1, 2], [100, 250], [2.0, 3.0])
    assert set(stage.curves) == {"lr", "time/train"}
    assert (stage.step, stage.rows) == (3, 3)
