"""Progress, in a terminal and in a log."""

import io
import logging
import re
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from rich.console import Console
from watched import wait_until, without_waiting

from opd import progress as progress_module
from opd.models.checkpoint import save_checkpoint
from opd.output import LogForwarder, log_again, record_fields
from opd.pipelines.cli import main
from opd.progress import (
    Heartbeat,
    Progress,
    current_activity,
    never_silent,
    set_activity,
    suppress_heartbeats,
)
from opd.redact import HIDDEN, hide_secret
from opd.storage.sample_lot import SampleRecord
from opd.storage.sample_store import SampleWriter
from opd.storage.wal import TokenWAL
from opd.types import RolloutRequest, SamplingParams

log = logging.getLogger("opd.test")


def _log(width: int = 60) -> tuple[io.StringIO, Console]:
    stream = io.StringIO()
    return stream, Console(file=stream, force_terminal=False, width=width)


def test_a_log_gets_one_line_a_stage_and_interval() -> None:
    stream, console = _log()
    with Progress(console, seconds_between_lines=3600) as progress:
        for step in range(1, 101):
            progress.update_stage("sort", step, 100, f"reward {step / 100:.2f}")
            progress.update_stage("reverse", step, 100)
        progress.finish_stage("sort", "accuracy 97.1 %")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].split() == ["sort", "1/100", "reward", "0.01"]
    assert lines[2].startswith("sort")
    assert lines[2].endswith("accuracy 97.1 %")


def test_a_log_with_no_interval_gets_every_update_with_the_time_left() -> None:
    stream, console = _log()
    with Progress(console, seconds_between_lines=0) as progress:
        for step in (1, 2, 3):
            progress.update_stage("merge", step, 3)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert "eta" in lines[1]
    assert "eta" not in lines[2]


def test_a_resumed_stage_is_timed_by_the_steps_it_took_itself(monkeypatch) -> None:
    stream, console = _log()
    now = [0.0]
    monkeypatch.setattr("opd.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    with Progress(console, seconds_between_lines=0, silence=3600) as progress:
        for step, now[0] in ((200, 0.0), (201, 10.0), (202, 20.0)):
            progress.update_stage("base", step, 206)
    lines = [line.split() for line in stream.getvalue().splitlines()]
    assert [line[2:] for line in lines] == [[], ["eta", "0:50"], ["eta", "0:40"]]


def test_notes_are_printed_as_they_are_on_one_line() -> None:
    stream, console = _log(width=20)
    note = "[bold]resumed[/bold] from step 40, which is quite a long note for so narrow a place"
    with Progress(console) as progress:
        log.info(note)
        progress.finish_stage("never began", "already done")
    assert stream.getvalue().splitlines()[0] == note
    assert stream.getvalue().splitlines()[1].endswith("already done")
    assert "\x1b" not in stream.getvalue()


def test_a_log_is_never_silent_for_long() -> None:
    stream, console = _log(width=200)
    told = r"^still at work \(\d+:\d\d since the last line\): merge %s; publishing teacher math$"
    with Progress(console, silence=0.05) as progress, set_activity("publishing teacher math"):
        progress.begin_stage("merge")
        wait_until(lambda: re.search(told % "begins", stream.getvalue(), re.M))
        progress.update_stage("merge", 3, 10)
        wait_until(lambda: re.search(told % "3/10", stream.getvalue(), re.M))
    count = stream.getvalue().count("still at work")
    assert count == len([line for line in stream.getvalue().splitlines() if line.startswith("still")])


def test_what_is_quick_says_nothing(capsys) -> None:
    with never_silent("a check", silence=60), set_activity("nothing"):
        pass
    assert capsys.readouterr().err == ""
    assert current_activity() == ""


def test_a_long_check_says_what_it_waits_for() -> None:
    with (
        redirect_stderr(io.StringIO()) as said,
        set_activity(lambda: "the server is away"),
        never_silent("checking teacher math", silence=0.05),
    ):
        wait_until(lambda: "\n" in said.getvalue())
    assert re.match(r"opd: checking teacher math: \d+ s so far, the server is away\n", said.getvalue())
    assert without_waiting(f"a\n{said.getvalue()}b\n") == "a\nb\n"


def test_a_terminal_shows_a_bar_per_running_stage_and_a_line_per_finished_one() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    with Progress(console) as progress:
        progress.update_stage("sort", 3, 10, "reward [0.3]")
        progress.update_stage("reverse", 1, 10)
        assert progress._bars is not None
        progress._bars.refresh()
        progress.finish_stage("reverse", "accuracy 98 %")
        log.info("a note")
    text = stream.getvalue()
    for expected in ("sort", "3/10", "reward [0.3]", "reverse", "accuracy 98 %", "a note"):
        assert expected in text
    assert list(progress._tasks) == ["sort"]


def test_threads_may_report_at_once() -> None:
    stream, console = _log(width=200)
    with Progress(console, seconds_between_lines=0) as progress:

        def report(stage: str) -> None:
            for step in range(50):
                progress.update_stage(stage, step, 50, stage * 3)

        threads = [threading.Thread(target=report, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 200
    assert all(line.endswith(line[0] * 3) for line in lines)


def test_the_innermost_speaks_and_at_every_interval() -> None:
    said = io.StringIO()

    def lines(name: str) -> int:
        return said.getvalue().count(f"opd: {name}: ")

    with redirect_stderr(said), never_silent("outer", silence=0.02):
        wait_until(lambda: lines("outer"))
        with never_silent("inner", silence=0.02):
            before = lines("outer")
            wait_until(lambda: lines("inner") >= 3)  # again and again, not less and less often
            assert lines("outer") <= before + 1  # one may have been under way
        with suppress_heartbeats():
            before, inner = lines("outer"), lines("inner")
            time.sleep(0.2)
            assert lines("outer") <= before + 1
        before = lines("outer")
        wait_until(lambda: lines("outer") > before + 1)
    assert lines("inner") == inner


def _nothing_ends_unsaid(monkeypatch) -> None:
    """However fast it is, what is being done lasts until it said so once."""
    make, leave = Heartbeat.__init__, Heartbeat.__exit__

    def made(self: Heartbeat, say, silence=None) -> None:
        self.said = threading.Event()
        make(self, lambda seconds: (say(seconds), self.said.set()), silence)

    def left(self: Heartbeat, *failure) -> None:
        self.said.wait(60)
        leave(self, *failure)

    monkeypatch.setattr(Heartbeat, "__init__", made)
    monkeypatch.setattr(Heartbeat, "__exit__", left)


@pytest.mark.some(1)
@pytest.mark.parametrize("command", ["wal", "plan", "publish", "doctor"])
def test_every_command_says_that_it_is_at_work(command: str, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(progress_module, "AFTER", 0.0)
    _nothing_ends_unsaid(monkeypatch)
    with TokenWAL(tmp_path / "wal", fsync="os") as log:
        for i in range(3000):
            log.open(RolloutRequest(f"{i}", np.ones(8, np.int32), SamplingParams(), 3), {})
    with SampleWriter(tmp_path / "store", durable=False) as writer:
        writer.put([(SampleRecord(f"{i}", 0, 5), {}) for i in range(5000)])
    save_checkpoint(tiny.model(), tiny.tokenizer(), tmp_path / "model", {})
    (tmp_path / "recipe.yaml").write_text(
        "name: a\nmodel: {path: model}\ndomains: {d: {source: gone.jsonl}}\n"
    )
    words = {
        "wal": ["verify", "wal"],
        "plan": ["--store", "store"],
        "publish": ["model", "place"],
        "doctor": ["recipe.yaml"],
    }
    monkeypatch.chdir(tmp_path)
    assert main([command, *words[command]]) == (2 if command == "doctor" else 0)
    assert re.search(rf"opd: {command}: \d+ s so far", capsys.readouterr().err)


def test_what_every_stage_says_of_a_domain_is_told_once() -> None:
    stream, console = _log()
    sent: list[logging.LogRecord] = []
    with LogForwarder(sent.append):
        log.info("domain sort: %d of 9 prompts is left out", 1)
        log.info("resumed from step %d", 4)
    with Progress(console):
        for stage in ("specialist-sort", "merge", "evaluate"):
            for record in sent:  # as from processes of their own
                log_again(*record_fields(record), stage=stage)
    first, *others = stream.getvalue().splitlines()
    assert first == "domain sort: 1 of 9 prompts is left out"
    assert others == [f"{stage}: resumed from step 4" for stage in ("specialist-sort", "merge", "evaluate")]


def test_what_is_logged_is_shown_once_without_secrets_while_a_command_shows_it(caplog) -> None:
    hide_secret("correct-horse-battery")
    stream, console = _log(width=200)
    logger = logging.getLogger("opd")
    before = logger.level, logger.propagate, list(logger.handlers)
    log.info("nobody asked")
    with Progress(console):
        log.info("asked with %s", "correct-horse-battery")
        log.warning("a warning")
        log.debug("details")
        logging.getLogger("others").info("not ours")
    log.info("over")
    assert stream.getvalue().splitlines() == [f"asked with {HIDDEN}", "a warning"]
    assert caplog.messages == [], "handlers of the user's own code do not repeat it"
    assert (logger.level, logger.propagate, logger.handlers) == before


def test_who_has_asked_for_our_records_gets_them_all(caplog) -> None:
    caplog.set_level("INFO")
    _, console = _log()
    with Progress(console):
        log.info("shown")
    log.info("not shown")
    assert caplog.messages == ["shown", "not shown"]


@pytest.mark.slow
def test_a_library_is_silent_and_leaves_logging_as_it_is() -> None:
    program = (
        "import logging, opd.progress, opd.pipelines.run\n"
        "logging.getLogger('opd.test').warning('nobody listens')\n"
        "assert not logging.root.handlers and not logging.getLogger('opd').level\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")
