"""The page: self-contained, well formed, complete, and calm about what is missing."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd import redact
from opd.errors import RunFolderError
from opd.pipelines.evaluation.measure import side_by_side
from opd.pipelines.evaluation.statistics import at_the_end
from opd.pipelines.records.results import _teacher_entries
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.report import write_report
from opd.pipelines.report.charts import ROLES, SERIES, Axis
from opd.pipelines.report.figures import ChartCues, gaps, learning_panels, teacher_panels
from opd.pipelines.report.load import load_run
from opd.pipelines.report.page import TEMPLATES
from opd.pipelines.report.results import Run, StageResult
from opd.pipelines.report.tables import ordered, teachers_table

from .conftest import DOMAINS, RunMaker, metrics, results, write_lines, write_run

ANSWERS = {
    model: {
        d: [{"uid": "0", "prompt": "p", "label": "l", "text": "t", "right": model == "base", "cut": False}]
    }
    for model, d in (("base", "sort"), ("specialist:sort", "sort"), ("merged", "sort"))
}
STAGES = ["base", *(f"specialist-{d}" for d in DOMAINS), "merge", "baseline-mixed_grpo"]
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Outline(HTMLParser):
    """Collects headings, ids, references and remote addresses; fails on tags that do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.headings: list[str] = []
        self.loaded: list[str] = []
        self.charts = 0
        self.feed(page)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.loaded += [
            v for n, v in attrs if n in ("src", "href", "xlink:href") and v and not v.startswith("#")
        ]
        self.charts += values.get("role") == "img"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has everything, and its page."""
    config = {"name": "synthetic", "base": {"right": 0.3}}
    folders = {"merged": {"folder": "/m", "digest": "0123456789abcdef0", "loading": "```python\nx < 1\n```"}}
    data = results() | {
        "answers": side_by_side(ANSWERS, DOMAINS, {"sort": "specialist:sort"}),
        "folders": folders,
    }
    folder = write_run(tmp_path_factory.mktemp("full") / "run", data, STAGES, config)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def page(full: Path) -> str:
    return (full / "report.html").read_text(encoding="utf-8")


def test_full_run_has_every_section_and_nothing_remote(page: str) -> None:
    outline = Outline(page)
    assert outline.headings[1:] == [
        "Accuracy",
        "Answers side by side",
        "Learning curves",
        "Teachers",
        "Lengths and training health",
        "Models",
        "Time and memory",
        "What these numbers do not show",
    ]
    assert outline.charts == 11
    assert outline.loaded == []
    assert len(outline.ids) == len(set(outline.ids))
    assert not re.search(r"<script|@import|url\((?!#)|https?://(?!www\.w3\.org)", page)
    used = set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", page))
    assert used <= set(outline.ids)
    assert "right: 0.3" in page
    assert "scale 0.6, density 0.5" in page
    assert "<code>/m</code></td>" in page
    assert "<code>0123456789abcdef</code>" in page
    assert "<pre>x &lt; 1\n</pre>" in page


def test_every_chart_says_in_words_where_it_ends(page: str) -> None:
    told = re.findall(r'<svg viewBox[^>]*role="img"[^>]*><desc>(.*?)</desc>', page)
    assert len(told) == Outline(page).charts
    assert all(any(sign.isdigit() for sign in words) for words in told)


@pytest.mark.some(1)
@pytest.mark.parametrize("key", ["mismatch/ess", "sampling/kept", "lr", "token_share/sort"])
def test_what_never_changes_is_a_line_and_no_chart(make_run: RunMaker, key: str) -> None:
    folder = make_run(results())
    rows = [{"step": i, "tokens/student": i, key: 1.0 + (1e-9 * i)} for i in range(1, 30)]
    write_lines(folder / "stages" / "merge" / "metrics.jsonl", rows)
    page = write_report(folder).read_text(encoding="utf-8")
    still = re.search(r"Constant within 2 %, so not drawn:</p><ul class=\"note\"><li>(.*?)</li>", page)
    assert still
    assert re.search(r"\b1(00\u202f%)?$", still[1])
    write_lines(folder / "stages" / "merge" / "metrics.jsonl", [row | {key: i} for i, row in enumerate(rows)])
    assert "so not drawn" not in write_report(folder).read_text(encoding="utf-8")


def test_the_best_comes_first_and_the_student_is_the_line(make_run: RunMaker) -> None:
    run = load_run(make_run(results()))
    baselines = [model for model in ordered(run) if model.kind == "baseline"]
    means = [sum(a.interval.value for a in model.sampled.values()) for model in baselines]
    assert means == sorted(means, reverse=True)
    panel = gaps(run, ordered(run), ChartCues(run))
    assert panel is not None
    told = re.findall(r"<desc>(.*?)</desc>", panel.svg)[0]
    found = [float(x.replace("\u2212", "-")) for x in re.findall(r": ([+\u2212]?[\d.]+) \(", told)]
    assert found == sorted(found, reverse=True)
    assert len(found) == len(baselines) + 1
    assert "Specialists, own domain: \u22120.5 (" in told


@pytest.mark.parametrize(
    "lengths", [{}, {"p10": 9, "p50": 9, "p90": 9, "max": 9}, {"p10": 2, "p50": 5, "p90": 9, "max": 10}]
)
def test_lengths_of_answers_are_told(make_run: RunMaker, lengths: dict) -> None:
    data = results()
    for model in data["models"]:
        for number, domain in enumerate(model["domains"].values()):
            if lengths:
                domain["lengths"] = {k: v + (number if lengths["p10"] < 9 else 0) for k, v in lengths.items()}
    page = write_report(make_run(data)).read_text(encoding="utf-8")
    assert ("Length of held-out answers" in page) is bool(lengths)
    if lengths:
        assert ("9 (9\u20139, at most 9) tokens everywhere" in page) is (lengths["p10"] == 9)
        assert ("reverse, teacher: 6 (3\u201310, at most 11)" in page) is (lengths["p10"] == 2)


def test_the_kl_by_position_shows_beginning_and_end(make_run: RunMaker) -> None:
    folder = make_run(results())
    rows = [
        {"step": i, "tokens/student": i, "kl_at/1": 1 / i, "kl_at/2": 2 / i, "kl_at/4": 4 / i}
        for i in range(1, 101)
    ]
    write_lines(folder / "stages" / "merge" / "metrics.jsonl", rows)
    run = load_run(folder)
    panel = next(p for p in teacher_panels(run, ChartCues(run)) if p.title == "KL by position")
    first = sum(1 / i for i in range(1, 21)) / 20
    last = sum(1 / i for i in range(81, 101)) / 20
    assert f"first 20 steps: 1\u00a0{first:.3g}, 2\u20133\u00a0{2 * first:.3g}" in panel.svg
    assert (
        f"last 20 steps: 1\u00a0{last:.3g}, 2\u20133\u00a0{2 * last:.3g}, 4\u20137\u00a0{4 * last:.3g}"
        in panel.svg
    )


def test_charts_take_every_colour_from_the_scheme(page: str) -> None:
    charts = re.findall(r"<svg viewBox[^>]*role=\"img\".*?</svg>", page, flags=re.DOTALL)
    assert charts
    assert not [code for chart in charts for code in re.findall(r"(?:fill|stroke): (#\w+)", chart)]


def test_every_number_of_the_heat_map_is_the_runs_own(page: str) -> None:
    for model in results()["models"]:
        for domain in model["domains"].values():
            value = domain["sampled"]
            shown = (
                f"{100 * value['accuracy']:.1f}<small>{100 * value['low']:.1f}\u2013{100 * value['high']:.1f}"
            )
            assert shown in page


def test_same_run_same_bytes(full: Path, page: str) -> None:
    assert write_report(full).read_text(encoding="utf-8") == page


def test_a_run_that_has_only_begun(make_run: RunMaker) -> None:
    page = write_report(make_run(stages=["base", "specialist-sort"])).read_text(encoding="utf-8")
    assert Outline(page).headings == [
        "This run has no evaluated merge yet. Below is what it has produced so far.",
        "Learning curves",
        "Lengths and training health",
        "Time and memory",
    ]
    assert ">nan" not in page.lower()


def test_results_without_metrics_or_recipe(make_run: RunMaker) -> None:
    data = results()
    for key in ("stages", "teachers", "counters", "recovery", "machine"):
        del data[key]
    page = write_report(make_run(data)).read_text(encoding="utf-8")
    assert Outline(page).headings[1:] == ["Accuracy", "What these numbers do not show"]


def test_each_teachers_share_of_a_step_is_told(make_run: RunMaker) -> None:
    data = results()
    data["counters"] = {"teacher/sort/wait_seconds": 9.3, "teacher/a+b/wait_seconds": 0.93}
    page = write_report(make_run(data)).read_text(encoding="utf-8")
    text = page.replace("\u202f", " ")
    assert "Waited for teacher sort</th><td>9.3 s (50.0 % of the steps)</td>" in text
    assert "Waited for teacher a+b</th><td>0.9 s (5.0 % of the steps)</td>" in text


def test_one_domain_and_twelve(make_run: RunMaker, tmp_path) -> None:
    single = {"base": (0.2,), "specialist:sort": (0.9,), "merged": (0.88,)}
    page = write_report(make_run(results(single, ["sort"]))).read_text(encoding="utf-8")
    assert "of its specialist\u2019s sampled accuracy" in page
    assert ">mean</th>" not in page
    many = [f"domain{i}" for i in range(12)]
    shares = {"base": (0.2,) * 12, **{f"specialist:{d}": (0.9,) * 12 for d in many}, "merged": (0.88,) * 12}
    (tmp_path / "run" / "results.json").write_text(json.dumps(results(shares, many)))
    assert "12 domains" in write_report(tmp_path / "run").read_text(encoding="utf-8")


def test_text_of_the_run_is_escaped(make_run: RunMaker) -> None:
    bad = "<script>alert('&')</script>"
    shares = {"base": (0.2,), f"specialist:{bad}": (0.9,), "merged": (0.9,)}
    data = {**results(shares, [bad]), "name": bad, "teachers": {bad: {"kl": 0.1}}, "counters": {bad: 1}}
    folder = make_run(data, config={"name": bad})
    rows = [
        {"step": i, "tokens/student": 10 * i, f"kl/{bad}": 1.0 / i, f"reward/{bad}": 0.5} for i in (1, 2, 3)
    ]
    write_lines(folder / "stages" / "merge" / "metrics.jsonl", rows)
    write_lines(folder / "stages" / f"specialist-{bad.replace('/', '')}" / "metrics.jsonl", metrics("x"))
    page = write_report(folder).read_text(encoding="utf-8")
    assert "<script" not in page
    Outline(page)


def test_a_template_takes_only_the_projects_own_text_as_it_is() -> None:
    texts = [path.read_text("utf-8") for path in TEMPLATES.glob("*.html")]
    found = {name for text in texts for name in re.findall(r"([\w.\[\]]+)\s*\|\s*safe", text)}
    assert found == {"policy", "script", "panel.svg", "shapes[cue.marker]"}
    assert not [text for text in texts if "autoescape" in text]


def test_steps_with_missing_or_unusable_values_are_skipped(make_run: RunMaker) -> None:
    folder = make_run(results())
    rows = [
        {"step": i, "tokens/student": 10 * i, "kl/sort": v}
        for i, v in enumerate([0.5, None, 0.0, -1.0, 0.1], 1)
    ]
    rows[1]["kl/reverse"] = 0.3
    write_lines(folder / "stages" / "merge" / "metrics.jsonl", rows)
    page = write_report(folder).read_text(encoding="utf-8")
    assert "At the last step: sort\u00a00.1." in page


@given(values=st.lists(st.floats(1e-6, 10), min_size=4, max_size=200), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_one_number_stands_for_the_end_of_a_curve(values: list[float], seed: int) -> None:
    """The caption, the mark in the chart and the teachers' table say the same, whatever the last step did."""
    end, steps = at_the_end(values)
    assert steps == min(20, max(1, len(values) // 4))
    rows = [{"step": i + 1, "tokens/student": 9 * i + seed, "kl/sort": v} for i, v in enumerate(values)]
    merge = StageResult("merge", rows)
    with TemporaryDirectory() as name:
        place = RunFolder(Path(name), None)
        write_lines(place.metrics_path("merge"), [{**row, "token_share/sort": 1.0} for row in rows])
        teacher = _teacher_entries(place, "merge")["sort"]
    assert (teacher["kl"], teacher["kl_steps"]) == (end, steps)
    run = Run("r", {}, ["sort"], [], {}, [merge], {"sort": teacher}, {}, {})
    panel = next(p for p in learning_panels(run, ChartCues(run)) if p.title == "Merge: KL to each teacher")
    shown = Axis(log=True).format_value(end)
    what = "At the last step" if steps == 1 else f"Mean of the last {steps} steps"
    assert (f"{what}: sort\u00a0{shown}." in panel.caption) if panel.svg else panel.caption == shown
    table = teachers_table(run, ChartCues(run))
    assert table is not None
    assert table.rows[0].cells[0].text == f"{end:.4f}"


def test_a_half_written_last_line_is_ignored(make_run: RunMaker) -> None:
    folder = make_run(stages=["base"])
    path = folder / "stages" / "base" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 121, "loss/')
    assert "Demonstrations: loss" in write_report(folder).read_text(encoding="utf-8")


@pytest.mark.parametrize("line", ["{broken", "[1]"])
def test_a_broken_line_is_named(make_run: RunMaker, line: str) -> None:
    folder = make_run(stages=["base"])
    path = folder / "stages" / "base" / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl:2: not a"):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_an_empty_folder_is_refused(make_run: RunMaker) -> None:
    with pytest.raises(RunFolderError, match=r"holds no results\.json"):
        write_report(make_run())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no JSON object"),
        ('{"models": [{"name": "merged"}]}', "there is no 'kind'"),
        ('{"models": 3}', "is malformed"),
    ],
)
def test_unusable_results_are_named(make_run: RunMaker, text: str, message: str) -> None:
    folder = make_run()
    (folder / "results.json").write_text(text)
    with pytest.raises(RunFolderError, match=message):
        write_report(folder)


def _luminance(code: str) -> float:
    channels = [int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    dark, bright = sorted((_luminance(a), _luminance(b)))
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(scheme: str) -> None:
    """WCAG 2.2: 4.5 for text, 3 for lines and marks."""
    code = {role: getattr(colour, scheme) for role, colour in ROLES.items()}
    assert min(_contrast(code[role], code["page"]) for role in ("ink", "muted")) >= 4.5
    assert min(_contrast(code["ink"], code[role]) for role in ("heat", "panel")) >= 4.5
    assert min(_contrast(code[f"c{i}"], code["page"]) for i in range(SERIES)) >= 3
    assert len({colour.light for colour in ROLES.values()}) == len(ROLES)


def test_a_secret_with_quotes_is_in_no_page(make_run, monkeypatch):
    monkeypatch.setattr(redact, "_values", set())
    monkeypatch.setattr(redact, "_pattern", None)
    secret = "pa'ss\"wo<rd>&99"
    redact.hide_secret(secret)
    folder = make_run({**results(), "name": f"a run of {secret}"})
    page = write_report(folder).read_text("utf-8")
    assert redact.HIDDEN in page
    assert not [form for form in ("ss&#34;wo", "ss&quot;wo", 'ss"wo', "wo&lt;rd") if form in page]


@pytest.mark.parametrize(
    "config",
    [{"domains": None}, {"domains": {"sort": 5}}, {"distill": 5}, {"base": "x"}, {"evaluation": None}],
)
def test_settings_of_another_form_are_one_sentence(make_run, config):
    folder = make_run(results(), stages=["base", "merge"], config=config)
    with pytest.raises(RunFolderError, match=r"cannot be drawn .*config\.json or results\.json is not as"):
        write_report(folder)


def test_a_metric_of_no_place_is_not_drawn(make_run):
    folder = make_run(results())
    rows = [{"step": n, "time": n, "kl_at/final": 1.0, "kl_at/1e9": 1.0, "kl_at/1": 1.0} for n in range(4)]
    write_lines(folder / "stages/merge/metrics.jsonl", rows)
    assert "1e9" not in write_report(folder).read_text("utf-8")
