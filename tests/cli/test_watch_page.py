"""`opd watch` of a real run: its page over HTTP and in a browser, and its view in a terminal."""

import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sockets
from browser import browser, installed
from recipes import tiny_recipe, write_recipe
from shared_runs import go_on

from opd.metrics import MetricsWriter
from opd.pipelines.cli import main
from opd.pipelines.commands.watch import LOOPBACK, WatchServer, spark_line
from opd.pipelines.report.live_page import SCRIPT, PageBoard, open_runs

HOSTILE = (
    '</dd><script>window.hit = 1</script><img src=x onerror="window.hit = 2"><svg onload="window.hit=3">'
)
ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b2J\u202e\r"


@pytest.fixture(scope="module")
def run(tiny_run, tmp_path_factory) -> Path:
    """Of a tiny recipe, with a specialist that is trained."""
    folder = tmp_path_factory.mktemp("watch")
    small = {"steps": 3, "prompts_per_step": 4, "group_size": 6, "minibatches": 1, "checkpoint_every": 3}
    recipe = write_recipe(folder / "recipe.yaml", specialist=small)
    path = go_on(tiny_run, folder / "run", tiny_recipe(specialist=small), "base")
    assert main(["specialist", str(recipe), "--domain", "sort", "--out", str(path), "--resume"]) == 0
    return path


@contextmanager
def served(*folders: Path) -> Iterator[WatchServer]:
    with WatchServer(PageBoard(open_runs(folders))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(run) -> Iterator[WatchServer]:
    with served(run) as found:
        yield found


def ask(server: WatchServer, path: str = "/", method: str = "GET", host: str = "localhost", **headers: str):
    """(status, headers, body) of one request."""
    connection = http.client.HTTPConnection(LOOPBACK, server.server_port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in (({"Host": host} if host else {}) | headers).items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.slow
def test_the_page_of_a_real_run(server, run):
    status, headers, page = ask(server)
    assert status == 200
    assert "run: Specialist, sort, done" in page
    for part in ("Samples of the last step", "4 of 6 responses", "&lt;sort&gt;", "Specialists: reward",
                 "Time and memory", "Red flags", "reward/sort"):  # fmt: skip
        assert part in page
    written = json.loads((run / "stages" / "specialist-sort" / "last_samples.json").read_text())
    assert written["step"] == 3
    assert [one["responses"] for one in written["prompts"]] == [6] * 4
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    (allowed,) = re.findall(r"script-src ([^;]*)", headers["Content-Security-Policy"])
    assert allowed == f"'sha256-{b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"


def test_what_has_not_changed_is_not_sent_again(server):
    _, headers, part = ask(server, "/?part")
    assert SCRIPT not in part
    status, _, nothing = ask(server, "/?part", If_None_Match=headers["ETag"])
    assert (status, nothing) == (304, "")
    assert ask(server, "/", "HEAD")[2] == ""


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "",
             "127.0.0.1@evil.example", "localhost:1:2", "0.0.0.0", "192.168.0.1", "localhost:80/"],
)  # fmt: skip
def test_another_name_of_this_machine_reads_nothing(server, host):
    """A page from elsewhere whose name was made to lead here sends its own name."""
    assert ask(server, host=host)[0] == 421


def test_a_tunnels_port_is_any(server):
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:65535"):
        assert ask(server, host=host)[0] == 200


@pytest.mark.parametrize(
    "path", ["/1", "/99999", "/../config.json", "/%2e%2e/config.json", "/config.json", "/stages", "/%B2",
             "/0/0", "/?part=1", "/?x", "/-1", "/%D9%A3", "http://localhost/", "/0?part&x"],
)  # fmt: skip
def test_no_path_leads_to_a_file(server, path):
    status, _, body = ask(server, path)
    assert status == 404
    assert body == "There is no such page.\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "<script>"])
def test_nothing_can_be_done_but_look(server, method):
    status, _, body = ask(server, method=method)
    assert status == 501
    assert "script" not in body


def raw(server: WatchServer, data: bytes) -> bytes:
    with socket.create_connection((LOOPBACK, server.server_port), timeout=60) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
        return answer


NO_REQUESTS = {
    "nothing": b"",
    "zeros": b"\0" * 99,
    "a word": b"GET\r\n\r\n",
    "another version": b"GET / HTTP/9.9\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01",
    "two hosts": b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    "script": b"GET /<script> HTTP/1.1\r\nHost: <script>\r\n\r\n",
    "a long path": b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n",
}


@pytest.mark.some(1)
@pytest.mark.parametrize("data", NO_REQUESTS.values(), ids=NO_REQUESTS)
def test_what_is_no_request_is_refused(server, data, capfd):
    answer = raw(server, data)
    assert b" 200 " not in answer.partition(b"\r\n")[0]
    assert b"script>" not in answer
    assert ask(server)[0] == 200
    assert capfd.readouterr().err == ""


def test_many_that_ask_nothing_keep_nobody_out_for_ever(server):
    """Those beyond the most are sent away; when they leave, others are answered."""
    waiting = [socket.create_connection((LOOPBACK, server.server_port)) for _ in range(40)]
    for connection in waiting:
        connection.close()
    answers = 0
    while not answers:
        try:
            answers += ask(server)[0] == 200
        except OSError:
            continue


def test_only_loopback_is_listened_on(run):
    before = sockets.listening(os.getpid())
    with served(run):
        assert sockets.listening(os.getpid()) | {LOOPBACK} == before | {LOOPBACK}
        assert LOOPBACK in sockets.listening(os.getpid())


def test_nothing_is_written_into_the_run(run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with served(run) as server:
        assert ask(server)[0] == ask(server, "/0?part")[0] == 200
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_the_pages_of_several_runs(run, tmp_path):
    shutil.copytree(run, tmp_path / "second")
    with served(run, tmp_path / "second", tmp_path / "none") as server:
        page = ask(server)[2]
        assert "Specialist, sort: reward" in page
        assert "there is no run in" in page
        assert '<a href="/1">second</a>' in page
        assert "second: Specialist, sort, done" in ask(server, "/1")[2]
        assert ask(server, "/3")[0] == 404


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["watch"], "the following arguments are required: RUN"),
        (["watch", "{file}"], "is no folder; give the folder of a run"),
        (["watch", "a", "a"], "each of them once"),
        (["watch", *map(str, range(20))], "at most 16 run folders"),
        (["watch", "a", "--port", "0"], "--port: give a number of 1 to 15 digits"),
        (["watch", "a", "--port", "65536"], "--port 65536 is no port"),
        (["watch", "a", "--port", "1", "--port", "2"], "--port is given twice"),
        (["watch", "a", "--port", "1", "--terminal"], "keep one of the two"),
        (["watch", "a", "--seed", "1"], "opd watch takes no --seed"),
    ],
)
def test_a_users_error_is_one_line_and_status_2(tmp_path, words, part, ends, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    said = ends(2, [word.format(file=tmp_path / "file") for word in words])
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert part in said.err


def test_a_port_that_is_taken_is_said(run, capsys):
    with socket.create_server((LOOPBACK, 0)) as taken:
        assert main(["watch", str(run), "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot be had (Address already in use); give another --port" in capsys.readouterr().err


@pytest.mark.slow
def test_it_is_served_until_ctrl_c(run, tmp_path):
    """The process hears the signal although tests run in the background ignore it."""
    code = (
        "import signal, sys\nfrom opd.pipelines.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nsys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "watch", str(run), str(tmp_path / "none")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        host, _, port = address.removeprefix("http://").rstrip("/").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "")
    assert errors == f"opd: there is no run in {tmp_path / 'none'} yet; waiting for it\n"


def hostile(run: Path, folder: Path) -> Path:
    """A copy of the run whose texts are somebody else's."""
    shutil.copytree(run, folder)
    place = folder / "stages" / "specialist-sort"
    path = place / "last_samples.json"
    text = HOSTILE + ESCAPES
    document = json.loads(path.read_text())
    for prompt in document["prompts"]:
        prompt |= {"domain": text, "prompt": text, "label": text}
        for one in prompt["shown"]:
            one |= {"text": text, "teacher": text, "parts": {text: 1.0}}
    path.write_text(json.dumps(document))
    flag = {"step": 2, "rule": text, "metric": text, "value": 1, "bound": 2, "action": text, "sentence": text}
    (place / "flags.jsonl").write_text(json.dumps(flag) + "\n")
    return folder


def test_the_terminal_shows_and_does_nothing_else(run, tmp_path, ends):
    said = ends(0, ["watch", str(hostile(run, tmp_path / "run")), str(tmp_path / "none"), "--terminal"]).out
    assert "run: Specialist, sort, done" in said
    assert "there is no run in" in said
    assert "\\x1b[2J" in said
    assert "[reward" in said
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", said)


def test_a_curve_of_a_lines_height():
    assert spark_line([]) == ""
    assert spark_line([1.0]) == "\u2581 1 to 1"
    assert spark_line([0.0, 1.0]) == "\u2581\u2588 0 to 1"
    assert spark_line(list(range(480)), 4) == "\u2581\u2583\u2586\u2588 59.5 to 420"


@pytest.mark.slow
def test_in_a_browser_it_follows_the_run_and_runs_nothing_of_it(run, tmp_path):
    program = installed()
    if program is None:
        pytest.skip("there is no Chromium")
    folder = hostile(run, tmp_path / "run")
    place = folder / "stages" / "specialist-sort"
    (place / "done.json").unlink()
    with browser(program, tmp_path / "profile") as page:
        with served(folder) as server:
            page.open(f"http://{LOOPBACK}:{server.server_port}/")
            page.wait("document.querySelectorAll('svg[role=img]').length > 3")
            page.says("document.querySelector('details').open = true")
            assert page.says("document.querySelector('dd').textContent").startswith(HOSTILE)
            assert "at step 3" in page.says("document.querySelector('h1').textContent")
            height = page.says("document.querySelector('svg[role=img]').getBoundingClientRect().height")
            assert height > 100
            MetricsWriter(place).write(
                4, {"reward/mean": 0.75, "reward/sort": 0.75, "tokens/student": 400}, 9.0
            )
            page.wait("document.querySelector('h1').textContent.includes('at step 4')")
            assert page.says("document.querySelector('details').open") is True
            assert page.says("document.querySelector('#said').textContent") == ""
        page.wait("document.querySelector('#said').textContent.includes('does not answer')")
        assert page.says("typeof window.hit") == "undefined"
        assert page.says("document.querySelectorAll('main img, main script').length") == 0
        asked = {event["request"]["url"].split("?")[0] for event in page.of("Network.requestWillBeSent")}
        assert asked <= {f"http://{LOOPBACK}:{server.server_port}/", "about:blank"}
        assert page.of("Runtime.exceptionThrown") == []
        refused = [entry["entry"]["text"] for entry in page.of("Log.entryAdded")]
        assert not [text for text in refused if "ERR_CONNECTION" not in text]
