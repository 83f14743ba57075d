"""Servers that a run starts: ready, watched, started again, and gone with it, however it ends."""

import asyncio
import math
import mmap
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from dataclasses import replace
from functools import partial
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

import pytest
from recipes import tiny_recipe
from watched import is_alive, wait_until

from opd.child import Child
from opd.config.servers import ServerGroupConfig
from opd.config.teachers import SGLangTeacherConfig, VLLMTeacherConfig
from opd.errors import ConfigError, LaunchError, PreemptedError, TeacherError
from opd.pipelines.check.servers import check_servers
from opd.pipelines.launch import server_guard, server_key, started_server
from opd.pipelines.launch import servers as module
from opd.pipelines.launch.local import check_ranks, is_rank
from opd.pipelines.launch.server_key import key_of, run_key
from opd.pipelines.launch.servers import Servers, StartedGroup
from opd.pipelines.launch.started_server import StartedServer
from opd.rollout import weight_mirror
from opd.rollout.preemption import Preemption
from opd.served.http_client import RefusedError
from opd.served.http_pool import HTTPPool
from opd.served.plugin import opd_server_key
from opd.teachers.served_teacher import pool_options

LITTLE = [sys.executable, str(Path(__file__).with_name("little_server.py"))]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(module, "AGAIN", module.Retry(pause=0.01, longest=0.05))
    monkeypatch.setattr(module, "LOOK", 0.1)
    monkeypatch.setattr(started_server, "ANSWER", 0.2)
    monkeypatch.setattr(started_server, "GRACE", 0.5)


def little(folder, **settings):
    arguments = {"pids": str(folder)} | settings.pop("arguments", {})
    return ServerGroupConfig(command=LITTLE, arguments=arguments, start_seconds=60, **settings)


@pytest.fixture
def start(tmp_path, closing):
    """Starts groups, which are closed."""

    def start(**settings):
        return closing(begun(little(tmp_path, **settings), tmp_path / "logs"))

    return start


@pytest.fixture
def made(tmp_path, closing):
    """Makes what a run has of groups, and closes it."""

    def make(groups=None, **settings):
        return closing(Servers(groups or {"own": little(tmp_path)}, begins(tmp_path / "logs"), **settings))

    return make


OWN = (SGLangTeacherConfig(servers="own", path="x"), Path("model"))


def begun(config, logs):
    group = StartedGroup.start_servers("own", config, Path("model"), logs)
    try:
        group.wait()
    except BaseException:
        group.close()
        raise
    return group


def begins(logs):
    return lambda name, group, model, any_weights: StartedGroup.start_servers(name, group, model, logs)


def parts(folder, server):
    """Processes and shared memory of a server: itself, its child, the file."""
    own, child, shared = (folder / str(server.port)).read_text().split()
    return int(own), int(child), Path("/dev/shm", shared)


def hidden(folder):
    """The folders of hidden states of the servers that have been ready."""
    return [Path(file.read_text()) for file in folder.glob("hidden-*")]


def answers(url):
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        return answer.status == 200


def test_servers_are_ready_when_they_are_handed_out_and_gone_with_all_they_have(start, tmp_path):
    group = start(count=2)
    assert len(set(group.urls)) == 2
    assert all(answers(url) for url in group.urls)
    own = [part for server in group.servers for part in parts(tmp_path, server)]
    own += hidden(tmp_path)
    assert len(set(own)) == 8
    assert all(folder.exists() for folder in hidden(tmp_path))
    group.close()
    assert [part for part in own if (part.exists() if isinstance(part, Path) else is_alive(part))] == []


def test_a_server_that_ends_is_started_again_where_it_was(start, tmp_path):
    group = start()
    url, (own, child, _) = group.urls[0], parts(tmp_path, group.servers[0])
    os.kill(own, signal.SIGKILL)
    wait_until(lambda: group.restarts == 1 and group.servers[0].served)
    assert group.urls == [url]
    assert answers(url)
    assert not is_alive(child)


def test_a_server_that_answers_nothing_is_started_again(start, tmp_path):
    group = start(silence_seconds=1.0)
    own = parts(tmp_path, group.servers[0])[0]
    os.kill(own, signal.SIGSTOP)
    wait_until(lambda: not is_alive(own))
    wait_until(lambda: group.restarts == 1 and group.servers[0].served)
    assert answers(group.urls[0])


def test_a_group_is_given_up_after_as_many_starts_as_it_may_have(start, tmp_path, caplog):
    group = start(restarts=0)
    os.kill(parts(tmp_path, group.servers[0])[0], signal.SIGKILL)
    wait_until(lambda: group.trouble is not None)
    assert "servers.own.restarts 0 are used up" in str(group.trouble)
    assert not group.can_serve(Path("model"), any_weights=False)


def test_a_server_that_cannot_start_says_why(start, tmp_path):
    with pytest.raises(LaunchError, match=r"own-0 ended with exit status 3 .*the model is too large"):
        start(arguments={"fail-once": str(tmp_path / "failed")})


def test_a_program_that_is_not_there_is_named(tmp_path):
    group = ServerGroupConfig(command=[str(tmp_path / "nothing")], start_seconds=60)
    with pytest.raises(LaunchError, match="nothing cannot be started: No such file"):
        begun(group, tmp_path)


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path):
    group = little(tmp_path, arguments={"slow": 100}).model_copy(update={"start_seconds": 0.5})
    with pytest.raises(LaunchError, match=r"not ready after 0\.5 s"):
        begun(group, tmp_path)
    assert not [line for line in _commands() if str(tmp_path) in line]


def _commands():
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                yield (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue


def test_a_port_that_another_took_first_is_left_to_it(start, monkeypatch):
    import socket

    free = started_server.free_port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1]])
        monkeypatch.setattr(started_server, "free_port", lambda host: next(ports, None) or free(host))
        group = start()
        assert group.servers[0].port != taken.getsockname()[1]
        assert answers(group.urls[0])


@pytest.mark.some(1)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_run_is_ended(tmp_path, how):
    read, write = os.pipe()
    run = os.fork()
    if run == 0:
        try:
            for each in (signal.SIGTERM, signal.SIGINT):  # a shell's jobs ignore the latter
                signal.signal(each, signal.SIG_DFL)
            StartedGroup.start_servers(
                "own", little(tmp_path, count=2), Path("model"), tmp_path / "logs"
            ).wait()
            os.write(write, b"ready")
            time.sleep(1000)
        finally:
            os._exit(1)
    os.close(write)
    assert os.read(read, 5) == b"ready"
    os.close(read)
    files = [file for file in tmp_path.iterdir() if file.name.isdigit()]
    own = [(int(a), int(b), Path("/dev/shm", c)) for a, b, c in (file.read_text().split() for file in files)]
    assert len(own) == 2
    os.kill(run, how)
    os.waitpid(run, 0)
    wait_until(lambda: not any(is_alive(a) or is_alive(b) or c.exists() for a, b, c in own))
    assert len(hidden(tmp_path)) == 2
    wait_until(lambda: not any(folder.exists() for folder in hidden(tmp_path)))


def test_a_killed_guard_takes_its_server_with_it_and_both_are_started_again(start, tmp_path):
    group = start()
    server = group.servers[0]
    own, guard = parts(tmp_path, server)[0], server._guard
    assert guard is not None
    [left] = hidden(tmp_path)
    guard.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_alive(own))
    wait_until(lambda: group.restarts == 1 and server.served)
    assert not left.exists()
    assert answers(server.url)


HOLDS = """
import mmap, sys, time
files = [open(path, "r+b") for path in sys.argv[1:]]
held = [mmap.mmap(file.fileno(), 0) for file in files]
print("held", flush=True)
time.sleep(1000)
"""


def test_shared_memory_goes_with_its_server_unless_others_use_it_too():
    names = [f"/dev/shm/opd-test-{os.getpid()}-{whose}" for whose in ("own", "others")]
    own, others = map(Path, names)
    try:
        for file in (own, others):
            file.write_bytes(bytes(mmap.PAGESIZE))
        read, write = os.pipe()
        command = [sys.executable, "-I", server_guard.__file__, "60", sys.executable, "-c", HOLDS, *names]
        with (
            others.open("r+b") as opened,
            mmap.mmap(opened.fileno(), 0),
            subprocess.Popen(
                command, env=os.environ | {"OPD_PARENT": str(read)}, pass_fds=[read], stdout=subprocess.PIPE
            ) as guard,
        ):
            assert guard.stdout is not None
            said = guard.stdout.readline()
            os.close(read)
            os.close(write)  # the run is gone
            guard.wait()
            assert (said, own.exists(), others.exists()) == (b"held\n", False, True)
    finally:
        for file in (own, others):
            file.unlink(missing_ok=True)


def test_servers_are_kept_for_a_model_of_the_same_form_if_it_is_given_its_weights(made, tmp_path):
    for name, text in (("a", "{}"), ("b", "{}"), ("c", '{"other": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    config = SGLangTeacherConfig(servers="own", path="x")
    servers = made()

    def at(model, **way):
        return servers.serve_models({"teacher": (config, tmp_path / model)}, **way)["teacher"]

    first = at("a", any_weights=True, arguments={"enable-memory-saver": True})
    assert first.servers is None
    said = (tmp_path / "arguments").read_text()
    assert "--enable-return-hidden-states" in said  # for the signal `hidden`
    assert "--enable-memory-saver" in said
    assert at("b", any_weights=True).urls == first.urls
    second = at("b")
    assert second.urls != first.urls
    assert at("b").urls == second.urls
    assert at("c", any_weights=True).urls != second.urls
    servers.close()
    assert not [line for line in _commands() if str(tmp_path) in line]


def told(folder) -> list[list[str]]:
    """What servers were asked to do: port and verb."""
    return [line.split() for line in (folder / "told").read_text().splitlines()]


SLEEPS = ["abort_request", "flush_cache", "flush_cache", "release_memory_occupation"]


def test_servers_that_take_turns_are_awake_one_group_at_a_time(made, tmp_path):
    """From the moment they are ready, and each is told what it has not been told already."""
    groups = {"a": little(tmp_path, count=2), "b": little(tmp_path)}
    servers = made(groups, turns=["a", "b"])
    config = {name: SGLangTeacherConfig(servers=name, path="x", signal="topk") for name in groups}
    for _ in range(2):  # a later stage finds them asleep
        found = servers.serve_models({name: (config[name], Path("model")) for name in groups})
    ports = {name: [url.rpartition(":")[2] for url in found[name].urls] for name in groups}
    for port in (*ports["a"], *ports["b"]):
        assert [verb for at, verb in told(tmp_path) if at == port] == SLEEPS
    first = [at for at, _ in told(tmp_path)]
    assert set(first[:8]) == set(ports["a"])  # before the other group is started
    asked = (tmp_path / "arguments").read_text()
    assert "--enable-memory-saver" in asked
    assert "--enable-weights-cpu-backup" in asked
    (tmp_path / "told").unlink()
    for name in ("b", "a"):
        with servers.awake_group(name):
            woken = told(tmp_path)
            assert sorted(woken) == sorted([port, "resume_memory_occupation"] for port in ports[name])
        assert {at for at, _ in told(tmp_path)} == set(ports[name])
        (tmp_path / "told").unlink()
    assert all(group.restarts == 0 for group in servers._started.values())


def test_who_was_to_be_started_again_when_its_turn_ended_is_started_once(monkeypatch):
    """When it wakes; what it was due for before is forgotten."""
    starts: list[str] = []
    server = StartedServer("own-0", ServerGroupConfig(), 0, Path("model"), Path("log"))

    def start(own):
        starts.append(own.name)
        own.served, own.answered = True, time.monotonic()

    monkeypatch.setattr(StartedServer, "start", start)
    monkeypatch.setattr(StartedServer, "status", lambda own: None if starts else 1)
    monkeypatch.setattr(StartedServer, "check_ready", lambda own: True)
    monkeypatch.setattr(StartedServer, "silent_seconds", lambda own: 0.0)
    group = StartedGroup("own", server.group, [server], Path("model"))
    group._restart_failed()
    assert list(group._due) == ["own-0"]
    group.sleep()
    group.wake()
    group._due.update(dict.fromkeys(group._due, 0.0))  # whatever it was due for is now
    group._restart_failed()
    assert starts == ["own-0"]


def test_who_is_being_started_when_its_turn_ends_is_ready_before_it_sleeps(monkeypatch):
    """Of two servers the second one is: the first one sleeps no earlier."""
    servers = [
        StartedServer(f"own-{number}", ServerGroupConfig(), number, Path("model"), Path("log"))
        for number in range(2)
    ]
    servers[0].served = True
    looks, slept, checks = [], [], []

    def look(own):
        looks.append(own.name)
        own.served = len(looks) > 2
        return own.served

    monkeypatch.setattr(StartedServer, "status", lambda own: None)
    monkeypatch.setattr(StartedServer, "check_ready", look)
    monkeypatch.setattr(StartedServer, "sleep", lambda own: slept.append(servers[1].served))
    StartedGroup("own", servers[0].group, servers, Path("model")).sleep(lambda: checks.append(1))
    assert slept == [True, True]
    assert looks == ["own-1"] * 3
    assert len(checks) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("when", ["asleep", "awake"])
def test_a_server_that_is_killed_is_started_again_in_its_turn_alone(made, tmp_path, when):
    servers = made(turns=["own"])
    servers.serve_models({"teacher": OWN})
    [group] = servers._started.values()
    [server] = group.servers
    own = parts(tmp_path, server)[0]
    if when == "asleep":
        os.kill(own, signal.SIGKILL)
        wait_until(lambda: server.status() is not None)
        looks = server.answered
        time.sleep(1.0)  # ten looks of the watcher
        assert (group.restarts, server.answered) == (0, looks)
    with servers.awake_group("own"):
        if when == "awake":
            os.kill(own, signal.SIGKILL)
        wait_until(lambda: group.restarts == 1 and server.served)
        assert answers(server.url)
    (tmp_path / "told").write_text("")
    with servers.awake_group("own"):  # it was put to sleep as it is, and not as it was
        assert told(tmp_path) == [[str(server.port), "resume_memory_occupation"]]
        assert answers(server.url)


@pytest.mark.slow
def test_a_server_that_is_being_started_when_its_turn_ends_is_waited_for(made, tmp_path):
    """Turns are shorter than starts: none is ended for that, and its restarts are not used up."""
    slow = little(tmp_path, count=2, restarts=1, arguments={"slow": 1.0})
    servers = made({"own": slow}, turns=["own"])
    servers.serve_models({"teacher": OWN})
    [group] = servers._started.values()
    with servers.awake_group("own"):
        os.kill(parts(tmp_path, group.servers[0])[0], signal.SIGKILL)
        wait_until(lambda: group.restarts == 1 and group.servers[0].status() is None)
    for _ in range(2):
        assert all(server.asleep for server in group.servers)
        with servers.awake_group("own"):
            assert all(answers(url) for url in group.urls)
    assert (group.restarts, group.trouble) == (1, None)


def test_a_run_that_is_to_stop_does_not_wait_for_a_server_that_does_not_wake(made, tmp_path):
    servers = made(turns=["own"])
    asked = Preemption(grace=0.5)
    servers.serve_models({"teacher": OWN})
    [group] = servers._started.values()
    own = parts(tmp_path, group.servers[0])[0]
    os.kill(own, signal.SIGSTOP)
    asked.stop()
    with pytest.raises(PreemptedError), servers.awake_group("own", asked.check_waiting):
        pass
    servers.close()
    assert not is_alive(own)


def test_a_server_that_cannot_sleep_is_ended_and_started_again_in_its_turn(made, monkeypatch):
    monkeypatch.setattr(started_server, "_IDLE", -1.0)  # it is not idle at once
    servers = made(turns=["own"])
    servers.serve_models({"teacher": OWN})
    [group] = servers._started.values()
    assert group.servers[0].status() is not None
    with servers.awake_group("own"):
        wait_until(lambda: group.servers[0].served)


def test_a_server_is_told_its_devices_and_not_which_rank_has_started_it(monkeypatch):
    group = ServerGroupConfig(count=2, tensor_parallel=2, devices=[3, 1, 0, 2], environment={"OWN": "x"})
    for name in ("RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = started_server._server_environment(group, 1)
    assert (found["CUDA_VISIBLE_DEVICES"], found["OWN"]) == ("0,2", "x")
    assert not {"RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & found.keys()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
    assert started_server._server_environment(group, 0)["CUDA_VISIBLE_DEVICES"] == "GPU-d,GPU-b"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match="device 3, but CUDA_VISIBLE_DEVICES shows 2"):
        started_server._server_environment(group, 0)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("kind", "arguments", "developers"),
    [("sglang", {}, "0"), ("vllm", {}, "1"), ("vllm", {}, "0"), ("vllm", {"runner": "pooling"}, "0")],
)
def test_a_server_in_which_what_computes_hangs_is_started_again(start, tmp_path, kind, arguments, developers):
    """It says that it is ready all the while: another process of it answers that."""
    variables = {"VLLM_SERVER_DEV_MODE": developers}
    group = start(type=kind, silence_seconds=1.0, arguments=arguments, environment=variables)
    own, seen = parts(tmp_path, group.servers[0])[0], group.servers[0].worked
    wait_until(lambda: group.servers[0].worked > seen)
    assert group.restarts == 0
    (tmp_path / "hung").touch()
    wait_until(lambda: not is_alive(own))
    (tmp_path / "hung").unlink()
    wait_until(lambda: group.restarts == 1 and group.servers[0].served)
    seen = group.servers[0].worked
    wait_until(lambda: group.servers[0].worked > seen)


def asked(url, key="", path="/server_info"):
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as refusal:
        return refusal.code


@pytest.mark.parametrize(("kind", "locked"), [("sglang", True), ("vllm", True), ("sglang", False)])
def test_servers_answer_the_run_alone(loop, made, tmp_path, kind, locked):
    """And nobody else can read what it asks them with."""
    group, logs = little(tmp_path, type=kind, key=locked, silence_seconds=4), tmp_path / "logs"
    config = {"sglang": SGLangTeacherConfig, "vllm": VLLMTeacherConfig}[kind](servers="own", path="x")
    config = config.model_copy(update={"signal": "sampled", "max_in_flight_tokens": 9})
    key = run_key(logs)
    servers = made({"own": group}, key=key)
    found = servers.serve_models({"teacher": (config, Path("model"))})["teacher"]
    pool = HTTPPool("teacher x", pool_options(found), TeacherError)
    assert loop.run(pool.request_json(pool.servers[0], "GET", "/server_info")) == {}
    assert loop.run(pool.post_json("/abort_request", {}, 1, lambda answer: answer, 100)) is None
    assert pool.options.max_in_flight_tokens == 9
    loop.run(pool.close())
    assert asked(found.urls[0]) == (401 if locked else 200)
    assert asked(found.urls[0], "other") == (401 if locked else 200)
    assert asked(found.urls[0], key) == asked(found.urls[0], path="/health") == 200
    [server] = servers._started["own"].servers
    seen = server.worked
    wait_until(lambda: server.worked > seen)
    files = [file for file in logs.iterdir() if key in file.read_text()]
    assert {file.stat().st_mode & 0o777 for file in [*files, server.log]} == {0o600}
    assert not [line for line in _commands() if key in line]
    assert key not in f"{found!r}{pool_options(found)!r}{server!r}"


@pytest.mark.slow
def test_all_processes_of_a_run_find_one_key(tmp_path):
    code = "import sys; from pathlib import Path; from opd.pipelines.launch.server_key import run_key\n"
    code += "print(run_key(Path(sys.argv[1])))"
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "logs")], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    [key] = {run.communicate()[0].decode().strip() for run in runs}
    assert [file.name for file in (tmp_path / "logs").iterdir()] == [".key"]
    assert re.fullmatch("opd-[0-9a-f]{64}", key)  # a server takes what begins with a dash for an argument


@pytest.mark.parametrize(
    ("made", "mode", "words"),
    [
        (b"", 0o600, "is damaged"),
        (b"opd-0123\nhost: 0.0.0.0", 0o600, "is damaged"),
        (b"\xff\xfe", 0o600, "is damaged"),
        (b"opd-" + 64 * b"0" + b"\n", 0o600, "is damaged"),
        (b"opd-" + 64 * b"0", 0o640, r"can be read by others \(mode 640\)"),
        ("folder", 0o700, r"cannot be read \(it is no plain file\)"),
        ("link", 0o600, r"cannot be read \(it is no plain file\)"),
    ],
)
def test_a_key_that_nobody_has_made_so_is_refused(tmp_path, monkeypatch, made, mode, words):
    """Without one, or with one that others know, servers would be open to them."""
    monkeypatch.setattr(server_key, "_WRITTEN", 0.05)
    logs = tmp_path / "logs"
    logs.mkdir()
    path = logs / ".key"
    if isinstance(made, bytes):
        path.write_bytes(made)
        path.chmod(mode)
    elif made == "folder":
        path.mkdir()
    else:
        (tmp_path / "elsewhere").write_text("opd-" + 64 * "0")
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match=rf"\.key, the key of the run's servers, {words}; remove it"):
        StartedGroup.start_servers("own", little(tmp_path), Path("model"), logs)
    assert key_of([little(tmp_path, key=False)], logs) == ""


def test_what_a_server_says_of_its_key_is_in_no_error(tmp_path):
    """Not half of it either, where the words are cut."""
    key = run_key(tmp_path / "logs")
    for before in (0, 280):
        command = [sys.executable, "-c", f"print('x' * {before} + \"api_key='{key}'\"); raise SystemExit(3)"]
        with pytest.raises(LaunchError, match=r"the last it said was: x*api_key=") as refusal:
            begun(ServerGroupConfig(command=command, start_seconds=60), tmp_path / "logs")
        assert "opd-" not in refusal.value.args[0].partition("was: ")[2].partition("see")[0]


def test_a_server_of_vllm_asks_everybody_for_its_key(monkeypatch):
    monkeypatch.setenv(opd_server_key.VARIABLE, "secret")
    said = []

    async def app(scope, receive, send):
        said.append("answered")

    closed = []

    async def send(message):
        said.append(message.get("status", message["type"]))
        closed.extend([message["code"]] if "code" in message else [])

    def ask(kind, path, *headers, root=""):
        said.clear()
        scope = {"type": kind, "path": root + path, "root_path": root, "headers": headers}
        asyncio.run(opd_server_key.RequireKey(app)(scope, None, send))
        return said[0]

    for path in ("/collective_rpc", "/pause", "/v1/completions", "/healthy", "//health"):
        assert ask("http", path) == ask("http", path, (b"authorization", b"Bearer other")) == 401
        assert ask("http", path, (b"authorization", b"Bearer secret")) == "answered"
    assert ask("http", "/health") == ask("lifespan", "") == "answered"
    assert ask("http", "/health", root="/below") == "answered"
    assert ask("http", "/pause", root="/health") == 401
    assert ask("websocket", "/v1/realtime") == "websocket.close"
    assert closed == [1008]  # against the policy
    monkeypatch.setenv(opd_server_key.VARIABLE, "")  # or not passed on to it
    with pytest.raises(RuntimeError, match="OPD_SERVER_KEY is not set"):
        opd_server_key.RequireKey(app)


def test_a_request_ends_with_what_its_servers_were_given_up_for(loop, made, tmp_path):
    """At once: not when its own patience is over, and not in words of its own."""
    config = SGLangTeacherConfig(servers="own", path="x", patience=10_000.0)
    servers = made({"own": little(tmp_path, restarts=0)})
    config = servers.serve_models({"teacher": (config, Path("model"))})["teacher"]
    given_up = partial(servers.group_trouble, config.urls)
    pool = HTTPPool("teacher x", replace(pool_options(config), given_up=given_up), TeacherError)
    assert servers.group_trouble(config.urls) is None
    [group] = servers._started.values()
    os.kill(parts(tmp_path, group.servers[0])[0], signal.SIGKILL)
    with pytest.raises(LaunchError, match=r"own-0 ended .*restarts 0 are used up"):
        loop.run(pool.post_json("/generate", {}, 1, lambda answer: answer, 100))
    assert servers.group_trouble(["http://127.0.0.1:1"]) is None
    loop.run(pool.close())


def test_a_refusal_of_a_server_that_the_run_has_started_says_where_its_settings_and_log_are(
    loop, made, tmp_path
):

    async def refuses(server) -> None:
        raise RefusedError("it serves another model", status)

    config = SGLangTeacherConfig(servers="own", path="x")
    given = SGLangTeacherConfig(urls=["http://127.0.0.1:1"], path="x")
    servers = made({"own": little(tmp_path, restarts=0)})
    started = servers.serve_models({"teacher": (config, Path("model"))})["teacher"]
    wheres = (
        (started, 400, r"check servers\.own, and .* logs/servers"),
        (given, 403, "check its URL and key"),
        (given, 404, "give the URL of a server of this kind itself, not of a router before some"),
    )
    for one, status, where in wheres:  # noqa: B007 - `refuses` reads it
        pool = HTTPPool("teacher x", pool_options(one), TeacherError, refuses)
        with pytest.raises(TeacherError, match=f"teacher x: it serves another model; {where}"):
            loop.run(pool.post_json("/generate", {}, 1, lambda answer: answer, 100))
        loop.run(pool.close())


@pytest.mark.parametrize("own", [True, False])
def test_what_is_to_be_done_about_a_server_that_does_not_answer_depends_on_who_starts_it(loop, own):
    config = SGLangTeacherConfig(urls=["http://127.0.0.1:1"], path="x", patience=0)
    if own:
        config = SGLangTeacherConfig(servers="own", path="x", patience=0).with_servers(config.urls)
    pool = HTTPPool("teacher x", pool_options(config), TeacherError)
    mend = "the run starts servers.own again by itself: see in logs/servers" if own else "mend or start it"
    with pytest.raises(TeacherError, match=f"; {mend}.* continue with --resume"):
        loop.run(pool.post_json("/generate", {}, 1, lambda answer: answer, 100))
    loop.run(pool.close())


ENDS_SLOWLY = """
import ctypes, signal, subprocess, sys, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
threading.Thread(target=time.sleep, args=(1000,)).start()
print(child.pid, flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_what_a_dying_server_has_started_is_ended_though_it_looks_dead_already():
    """Its first thread has ended, others have not: a server under load ends like that."""
    command = [sys.executable, "-I", str(started_server.GUARD), "0.5", sys.executable, "-c", ENDS_SLOWLY]
    read, write = os.pipe()
    guard = Child(command, log=write)
    os.close(write)
    with open(read) as said:
        child = int(said.readline())
    wait_until(lambda: _state(_parent(child)) == "Z")
    guard.channel.hang_up()
    assert guard.wait(60) == 0
    assert guard.channel.wait_closed(60.0)
    guard.channel.close()
    assert not is_alive(child)


@pytest.fixture
def guarded():
    """Starts a guard of `sleep` that makes folders for weights."""
    started = []

    def start(*folders):
        command = [sys.executable, "-I", str(started_server.GUARD), "5", "sleep", "1000"]
        guard = Child(command, os.environ | {"OPD_WEIGHTS_FOLDERS": os.pathsep.join(map(str, folders))})
        started.append(guard)
        wait_until(
            lambda: all(folder.exists() for folder in folders if folder.name.startswith("opd-weights-"))
        )
        return guard

    yield start
    for guard in started:
        guard.send_signal(signal.SIGTERM)
        guard.wait(60)
        guard.channel.close()


def test_folders_for_weights_live_as_long_as_their_server(tmp_path, guarded):
    mirror, spare, other = [tmp_path / f"{name}-1" for name in ("opd-weights", "opd-weights-b", "x")]
    guard = guarded(mirror, spare, other)
    assert mirror.stat().st_mode & 0o777 == 0o700
    assert not other.exists()  # of a name that is nobody's
    other.mkdir()
    (mirror / "model.safetensors").write_bytes(b"weights")
    guard.channel.close()  # the run has ended, however that was
    guard.wait(60)
    assert list(tmp_path.iterdir()) == [other]


def test_folders_for_weights_of_those_who_were_killed_at_once_are_removed_by_the_next(
    tmp_path, monkeypatch, guarded
):
    monkeypatch.setattr(weight_mirror, "_root_folders", lambda: [str(tmp_path), str(tmp_path / "missing")])
    killed, lives = tmp_path / "opd-weights-1", tmp_path / "opd-weights-2"
    (tmp_path / "opd-weights-link").symlink_to(tmp_path)
    first = guarded(killed)
    second = guarded(lives)
    (killed / "model.safetensors").write_bytes(b"weights")
    wait_until(lambda: _children(first.pid) and _children(_children(first.pid)[0]))
    [inner] = _children(first.pid)
    first.send_signal(signal.SIGSTOP)  # one that sees the other end ends itself in order
    for pid in (inner, first.pid):
        os.kill(pid, signal.SIGKILL)
    first.wait(60)
    first.channel.close()
    assert killed.exists()
    weight_mirror.remove_ownerless()  # its server may be starting at this moment
    assert killed.exists()
    monkeypatch.setattr(weight_mirror, "_YOUNG", 0.0)

    def removed():
        weight_mirror.remove_ownerless()
        return not killed.exists()

    wait_until(removed)  # who was killed holds the lock until it is gone, which takes a moment
    assert lives.exists()
    assert (tmp_path / "opd-weights-link").is_symlink()
    second.channel.close()
    second.wait(60)
    assert not lives.exists()


def _children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_servers_that_other_machines_cannot_reach_are_refused(monkeypatch):
    teachers = {"sort": {"type": "sglang", "servers": "group"}}
    recipe = tiny_recipe(servers={"group": {}}, teachers=teachers)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 of the 4 ranks cannot reach it; start the servers yourself"):
        is_rank(recipe)
    assert is_rank(tiny_recipe())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert is_rank(recipe)


SERVED = {"type": "sglang", "servers": "group"}


OFFLOAD = {"runtime": {"offload": {"teachers": True}}}
GROUP = {"servers": {"group": {}}}
TAUGHT = GROUP | {"teachers": {"sort": SERVED}}
TWO = {"group": {"devices": [1]}, "other": {"count": 2, "devices": [0, 1]}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (GROUP, "servers.group has no effect"),
        ({"teachers": {"sort": SERVED}}, "'group', but `servers` has nothing"),
        (GROUP | {"teachers": {"sort": SERVED, "add3": SERVED}}, "both name the servers group"),
        ({"teachers": {"sort": {"type": "sglang", "path": "x"}}}, "give either urls, or servers"),
        ({"teachers": {"sort": {"type": "sglang", "urls": ["http://a:1"]}}}, "give path, the model"),
        (
            TAUGHT | {"servers": {"group": {"devices": [0]}}, "launch": "ray"},
            "the cluster hands them out; leave it out, and set launch.server.gpus",
        ),
        (OFFLOAD, "whose servers the run starts, and there are none"),
        (TAUGHT | OFFLOAD | {"launch": "ray"}, "with launch ray each has GPUs of its own"),
        (
            TAUGHT | OFFLOAD | {"rollout": {"schedule": "ahead"}},
            "runtime.offload.teachers needs rollout.schedule in_turn",
        ),
        (
            TAUGHT | OFFLOAD | {"storage": {"trajectories": "disk"}},
            "for every micro-batch of samples on disk",
        ),
        (
            TAUGHT | {"servers": {"group": {"count": 2, "devices": [0]}}},
            "names 1 devices, but 2 servers of 1 each need 2",
        ),
        (
            GROUP
            | {"teachers": {"other": {**SERVED, "path": "x"}}, "specialist": {"opd": {"teacher": "other"}}}
            | {"runtime": {"workers": 2}},
            "would each start the servers group; set runtime.workers to 1",
        ),
        (
            GROUP | {"teachers": {"sort": {**SERVED, "api_key_env": "KEY"}}},
            "servers have a key of the run; leave api_key_env out",
        ),
        (
            {"servers": TWO, "teachers": {"sort": SERVED, "add3": {**SERVED, "servers": "other"}}},
            "servers.group and servers.other share device 1, which both would fill",
        ),
        ({"servers": {"../x": {}}}, r"'\.\./x' cannot be a name: .* do not begin with a dot"),
    ],
)
def test_what_cannot_be_is_said_of_the_recipe(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny_recipe(**changes)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"port": 1}, "port is set by opd"),
        ({"admin-api-key": "k"}, "admin-api-key is set by opd"),
        ({"hos": "x"}, "takes hos for host, which is set by opd"),
        ({"mem-frac": 1}, "for mem-fraction-static, .* write it out"),
        ({"quantiz": "fp8"}, "for quantization, .* write it out"),
        (
            {"lora-target-modules": ["q_proj", "--host", "x"]},
            "lora-target-modules has '--host', which a server takes for another argument",
        ),
        ({"dtype": "--host=x"}, "dtype has '--host=x', which"),
        ({"dtype": "-tp"}, "dtype has '-tp', which"),
        ({"a b": 1}, "'a b' is no name of an argument"),
        ({"--dtype": "x"}, "without dashes in front: dtype"),
        ({"max_len": 1}, "with dashes: max-len"),
        ({"mem_fraction_static": 0.3}, ": mem-fraction-static"),
        ({"mem-fraction-static": "much"}, "'much'; give a number above 0"),
        ({"mem-fraction-static": math.nan}, "a number above 0, at most 1"),
        ({"lora-paths": ["a", 1]}, "give true, false, a number, a text, or several texts"),
        ({"config": "x.yaml"}, "arguments has config, by which .* set key to false"),
    ],
)
def test_what_cannot_be_an_argument_is_said(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny_recipe(servers={"group": {"arguments": arguments}})


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        (
            {"command": ["x", "--config", "x.yaml"]},
            "command has --config, and opd gives a server its key; take it out, or set key to false",
        ),
        (
            {"type": "vllm", "command": ["x", "--api-key=secret"]},
            "command has --api-key, and opd gives a server its key",
        ),
        ({"environment": {"A=B": "x"}}, "'A=B' is no name of a variable"),
        ({"environment": {"": "x"}}, "'' is no name of a variable"),
        ({"command": [""]}, "begins with an empty text"),
    ],
)
def test_what_cannot_start_a_server_is_said(group, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny_recipe(servers={"group": group})


def test_numbers_below_zero_are_arguments():
    arguments = {"chunked-prefill-size": -1, "seed": "-2", "ratio": -1e-5}
    assert ServerGroupConfig(arguments=arguments).command_line[1::2] == ["-1", "-2", "-1e-05"]


def test_groups_share_a_device_if_they_leave_each_other_room():
    def recipe(share, **settings):
        group = {"devices": [0], "arguments": {"mem-fraction-static": share}}
        teachers = {"sort": SERVED, "add3": {**SERVED, "servers": "other"}}
        return tiny_recipe(servers={"group": group, "other": group}, teachers=teachers, **settings)

    assert len(recipe(0.5).servers) == 2
    with pytest.raises(ValueError, match="share device 0"):
        recipe(0.6)
    in_turn = {"runtime": {"offload": {"teachers": True}}}
    assert recipe(0.9, **in_turn).servers_in_turn == ["group", "other"]
    made = recipe(0.9, **in_turn)
    started = {name: one.with_servers(["http://127.0.0.1:9"]) for name, one in made.teachers.items()}
    assert made.model_copy(update={"teachers": started}).servers_in_turn == ["group", "other"]
    student = {"servers": {"student": {"devices": [0], "arguments": {"mem-fraction-static": 0.4}}}}
    writes = {"rollout": {"engine": {"type": "sglang", "servers": "student"}}}

    def beside(share):
        group = {"devices": [0], "arguments": {"mem-fraction-static": share}}
        servers = {**student["servers"], "group": group}
        return tiny_recipe(servers=servers, teachers={"sort": SERVED}, **writes, **in_turn)

    assert beside(0.6).servers_in_turn == ["group"]
    with pytest.raises(ValueError, match="share device 0"):
        beside(0.7)


def test_a_server_in_this_environment_and_one_beside_it_find_one_plug_in():
    """Under one name: SGLang runs one entry point of a name, wherever it has found others."""
    root = Path(__file__).resolve().parents[2]
    group = "sglang.srt.plugins"
    [(name, where)] = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"][
        group
    ].items()
    [beside] = Distribution.at(next(started_server.PLUGIN.glob("*.dist-info"))).entry_points
    assert (beside.group, beside.name) == (group, name)
    found = EntryPoint(name, where, group).load()
    assert (found.__module__, found.__name__) == ("opd.served.plugin.opd_hidden_states", "register")


def checked(**settings) -> tuple[str, str]:
    """What the doctor says first of a recipe's servers."""
    first, *_ = check_servers(tiny_recipe(**settings))
    return first.level, first.detail


LONGEST = {"sglang": "context-length", "vllm": "max-model-len"}


def writing(kind, most, limit, **settings):
    """The same of servers to write with that take `most` tokens, of `limit`."""
    group = {"type": kind, "command": LITTLE, "arguments": {LONGEST[kind]: most}}
    rollout = {"engine": {"type": kind, "servers": "group"}, "max_sequence": limit}
    return checked(servers={"group": group}, rollout=rollout, **settings)


def test_the_doctor_looks_for_the_program():
    def found(**group):
        return checked(servers={"group": group}, teachers={"sort": SERVED})

    assert found(command=LITTLE)[0] == "ok"
    assert "no program here" in found(command=["/nothing/there"])[1]
    assert "needs sglang" in found()[1]
    assert "runs serve.sh, and there is no such file" in found(command=["bash", "serve.sh"])[1]
    assert found(command=["bash", "-c", "serve.sh"])[0] == "ok"


def test_the_doctor_looks_for_the_program_where_the_run_starts_its_own_cluster():
    def found(**launch):
        ray = {"launch": {"type": "ray"} | launch, "runtime": {"workers": 1}}
        return checked(servers={"group": {"command": ["bash", "serve.sh"]}}, teachers={"sort": SERVED}, **ray)

    assert "runs serve.sh, and there is no such file" in found()[1]
    assert found(address="10.0.0.1:6379") == ("ok", "1 to be started on the cluster")


def test_the_doctor_finds_servers_that_are_told_to_take_no_adapters():
    def found(lora, **arguments):
        group = {"command": LITTLE, "arguments": arguments}
        engine = {"type": "sglang", "servers": "group", "lora": lora}
        model = {"config": tiny_recipe().model.config, "lora": {"rank": 4}}
        return checked(servers={"group": group}, rollout={"engine": engine}, model=model)

    assert found("adapters", **{"max-lora-rank": 4})[0] == "ok"
    assert found("merged", **{"enable-lora": False})[0] == "ok"
    level, said = found("adapters", **{"enable-lora": False})
    assert level == "error"
    assert "servers.group.arguments.enable-lora is false" in said
    level, said = found(None, **{"max-lora-rank": 2})
    assert level == "warning"
    assert "max-lora-rank is 2, below model.lora.rank 4" in said


def test_the_doctor_tries_the_folder_of_new_weights(tmp_path):
    def found(folder):
        engine = {"type": "sglang", "servers": "group", "folder": str(folder)}
        return check_servers(tiny_recipe(servers={"group": {"command": LITTLE}}, rollout={"engine": engine}))

    (tmp_path / "file").write_text("")
    assert [finding.level for finding in found(tmp_path / "new" / "deeper")] == ["ok"]
    for place, reason in (
        (tmp_path / "file" / "below", "it is a file"),
        (Path("/proc/nothing"), "No such file"),
    ):
        wrong, _ = found(place)
        assert wrong.level == "error"
        assert f"rollout.engine.folder: {place.parent} cannot be written ({reason}" in wrong.detail


@pytest.mark.parametrize(("kind", "kept"), [("sglang", 6), ("vllm", 0)])
def test_the_doctor_finds_servers_that_take_too_few_tokens(kind, kept):
    assert writing(kind, 16 + kept, 16)[0] == "ok"
    level, detail = writing(kind, 15 + kept, 16)
    assert level == "error"
    assert f"{LONGEST[kind]} is {15 + kept}, and responses may need 16" in detail
    # No longer than what the model has positions for.
    assert writing(kind, 64, 4096)[0] == "ok"


_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    "model",
    [
        {"model_type": "gpt2", "n_positions": 32},
        {"model_type": "opt", "max_position_embeddings": 32},
        {
            "model_type": "phi3", "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64,
            "original_max_position_embeddings": 32, "rope_parameters": _LONG,
        },
    ],
    ids=lambda model: model["model_type"],
)  # fmt: skip
def test_servers_need_no_more_tokens_than_positions_by_whatever_name(model):
    own = {"model": {"config": model}, "base": None}
    assert writing("vllm", 32, 4096, **own)[0] == "ok"
    assert "is 31, and responses may need 32" in writing("vllm", 31, 4096, **own)[1]


def test_ranks_may_be_more_than_the_servers_that_they_write_with():
    recipe = tiny_recipe(
        servers={"group": {"count": 2}}, rollout={"engine": {"type": "sglang", "servers": "group"}}
    )
    for ranks in (1, 2, 3):
        check_ranks(recipe, ranks)


def test_a_question_that_cannot_be_asked_is_forgotten(start, tmp_path, monkeypatch):
    monkeypatch.setattr(started_server, "ASKED", 1 << 30)
    group = start()
    group._over.set()
    group._watcher.join()
    [server] = group.servers
    own, *_ = parts(tmp_path, server)
    os.kill(own, signal.SIGKILL)
    while server.status() is None:
        time.sleep(0.01)
    server._forget_question()
    first = server.silent_seconds()  # nobody listens
    time.sleep(0.01)
    assert server._question is None
    assert server.silent_seconds() > first


def test_servers_that_nobody_watches_any_more_end_the_run(start, monkeypatch):
    def broken(self):
        raise AttributeError("no such thing")

    monkeypatch.setattr(started_server.StartedServer, "silent_seconds", broken)
    group = start()
    group._watcher.join(10)
    assert isinstance(group.trouble, LaunchError)
    assert "servers own cannot be watched any more (no such thing)" in str(group.trouble)
