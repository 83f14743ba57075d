"""Servers that a run starts: ready, watched, started again, and gone with it, however it ends."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from recipes import tiny_recipe

from opd.config.servers import ServerGroupConfig
from opd.config.teachers import SGLangTeacherConfig
from opd.errors import ConfigError, LaunchError
from opd.pipelines.doctor.checks import check_servers
from opd.pipelines.launch import servers as module
from opd.pipelines.launch.local import check_ranks
from opd.pipelines.launch.servers import Servers, StartedGroup
from opd.pipelines.records.settings import Change

LITTLE = [sys.executable, str(Path(__file__).with_name("little_server.py"))]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(module, "AGAIN", module.Retry(pause=0.01, longest=0.05))
    monkeypatch.setattr(module, "LOOK", 0.1)
    monkeypatch.setattr(module, "ANSWER", 0.2)
    monkeypatch.setattr(module, "GRACE", 0.5)


def little(folder, **settings):
    arguments = {"pids": str(folder)} | settings.pop("arguments", {})
    return ServerGroupConfig(command=LITTLE, arguments=arguments, start_seconds=60, **settings)


def start(folder, **settings):
    return begun(little(folder, **settings), folder / "logs")


def begun(config, logs):
    group = StartedGroup.begin("own", config, Path("model"), logs)
    try:
        group.wait()
    except BaseException:
        group.close()
        raise
    return group


def parts(folder, server):
    """Processes and shared memory of a server: itself, its child, the file."""
    own, child, shared = (folder / str(server.port)).read_text().split()
    return int(own), int(child), Path("/dev/shm", shared)


def hidden(folder):
    """The folders of hidden states of the servers that have been ready."""
    return [Path(file.read_text()) for file in folder.glob("hidden-*")]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def answers(url):
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        return answer.status == 200


def test_servers_are_ready_when_they_are_handed_out_and_gone_with_all_they_have(tmp_path, monkeypatch):
    group = start(tmp_path, count=2)
    try:
        assert len(set(group.urls)) == 2
        assert all(answers(url) for url in group.urls)
        own = [part for server in group.servers for part in parts(tmp_path, server)]
        own += hidden(tmp_path)
        assert len(set(own)) == 8
        assert all(folder.exists() for folder in hidden(tmp_path))
    finally:
        group.close()
    assert [part for part in own if (part.exists() if isinstance(part, Path) else alive(part))] == []


def test_a_server_that_ends_is_started_again_where_it_was(tmp_path):
    group = start(tmp_path)
    try:
        url, (own, child, _) = group.urls[0], parts(tmp_path, group.servers[0])
        os.kill(own, signal.SIGKILL)
        until(lambda: group.restarts == 1 and group.servers[0].served)
        assert group.urls == [url]
        assert answers(url)
        assert not alive(child)
    finally:
        group.close()


def test_a_server_that_answers_nothing_is_started_again(tmp_path):
    group = start(tmp_path, silence_seconds=1.0)
    try:
        own = parts(tmp_path, group.servers[0])[0]
        os.kill(own, signal.SIGSTOP)
        until(lambda: not alive(own))
        until(lambda: group.restarts == 1 and group.servers[0].served)
        assert answers(group.urls[0])
    finally:
        group.close()


def test_a_group_is_given_up_after_as_many_starts_as_it_may_have(tmp_path, caplog):
    group = start(tmp_path, restarts=0)
    try:
        os.kill(parts(tmp_path, group.servers[0])[0], signal.SIGKILL)
        until(lambda: group.trouble is not None)
        assert "servers.own.restarts 0 are used up" in str(group.trouble)
        assert not group.serves(Path("model"), any_weights=False)
    finally:
        group.close()


def test_a_server_that_cannot_start_says_why(tmp_path):
    with pytest.raises(LaunchError, match=r"own-0 ended with exit status 3 .*the model is too large"):
        start(tmp_path, arguments={"fail-once": str(tmp_path / "failed")})


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


def test_a_port_that_another_took_first_is_left_to_it(tmp_path, monkeypatch):
    import socket

    free = module._free_port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1]])
        monkeypatch.setattr(module, "_free_port", lambda: next(ports, None) or free())
        group = start(tmp_path)
        try:
            assert group.servers[0].port != taken.getsockname()[1]
            assert answers(group.urls[0])
        finally:
            group.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_run_is_ended(tmp_path, how):
    code = (
        "import signal, sys, time; from pathlib import Path\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's jobs ignore it
        "from opd.config.servers import ServerGroupConfig\n"
        "from opd.pipelines.launch import servers\n"
        "servers.GRACE = 0.5\n"
        "group = ServerGroupConfig.model_validate_json(sys.argv[1])\n"
        "group = servers.StartedGroup.begin('own', group, Path('model'), Path(sys.argv[2]))\n"
        "group.wait()\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, little(tmp_path, count=2).model_dump_json(), str(tmp_path / "logs")],
        stdout=subprocess.PIPE,
    )
    assert run.stdout is not None
    assert run.stdout.readline() == b"ready\n"
    run.stdout.close()
    files = [file for file in tmp_path.iterdir() if file.name.isdigit()]
    own = [(int(a), int(b), Path("/dev/shm", c)) for a, b, c in (file.read_text().split() for file in files)]
    assert len(own) == 2
    run.send_signal(how)
    run.wait()
    until(lambda: not any(alive(a) or alive(b) or c.exists() for a, b, c in own))
    assert len(hidden(tmp_path)) == 2
    until(lambda: not any(folder.exists() for folder in hidden(tmp_path)))


def test_a_killed_guard_takes_its_server_with_it_and_both_are_started_again(tmp_path):
    group = start(tmp_path)
    try:
        server = group.servers[0]
        own, guard = parts(tmp_path, server)[0], server._guard
        assert guard is not None
        [left] = hidden(tmp_path)
        guard.kill()
        until(lambda: not alive(own))
        until(lambda: group.restarts == 1 and server.served)
        assert not left.exists()
        assert answers(server.url)
    finally:
        group.close()


def test_servers_are_kept_for_a_model_of_the_same_form_if_it_is_given_its_weights(tmp_path):
    for name, text in (("a", "{}"), ("b", "{}"), ("c", '{"other": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    config = SGLangTeacherConfig(servers="own", path="x")
    servers = Servers({"own": little(tmp_path)}, tmp_path / "logs")

    def at(model, **way):
        return servers.at({"teacher": (config, tmp_path / model)}, **way)["teacher"]

    try:
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
    finally:
        servers.close()
    assert not [line for line in _commands() if str(tmp_path) in line]


def test_a_server_is_told_its_devices_and_not_which_rank_has_started_it(monkeypatch):
    group = ServerGroupConfig(count=2, tensor_parallel=2, devices=[3, 1, 0, 2], environment={"OWN": "x"})
    for name in ("RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = module._environment(group, 1)
    assert (found["CUDA_VISIBLE_DEVICES"], found["OWN"]) == ("0,2", "x")
    assert not {"RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & found.keys()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
    assert module._environment(group, 0)["CUDA_VISIBLE_DEVICES"] == "GPU-d,GPU-b"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match="device 3, but CUDA_VISIBLE_DEVICES shows 2"):
        module._environment(group, 0)


def test_where_servers_run_may_change_between_attempts_and_what_they_compute_not():
    def change(*path):
        return Change(("servers", "group", *path), 1, 2).free

    assert change("count")
    assert change("devices")
    assert not change("arguments", "dtype")
    assert not change("command")


SERVED = {"type": "sglang", "servers": "group"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"servers": {"group": {}}}, "servers.group has no effect"),
        ({"teachers": {"sort": SERVED}}, "'group', but `servers` has nothing"),
        (
            {"servers": {"group": {}}, "teachers": {"sort": SERVED, "add3": SERVED}},
            "both name the servers group",
        ),
        ({"teachers": {"sort": {"type": "sglang", "path": "x"}}}, "give either urls, or servers"),
        ({"teachers": {"sort": {"type": "sglang", "urls": ["http://a:1"]}}}, "give path, the model"),
        (
            {"servers": {"group": {}}, "teachers": {"sort": SERVED}, "launch": "ray"},
            "give their urls, or set launch to local",
        ),
        (
            {"servers": {"group": {"count": 2, "devices": [0]}}, "teachers": {"sort": SERVED}},
            "names 1 devices, but 2 servers of 1 each need 2",
        ),
        (
            {
                "servers": {"group": {}},
                "teachers": {"other": {**SERVED, "path": "x"}},
                "specialist": {"opd": {"teacher": "other"}},
                "runtime": {"workers": 2},
            },
            "would each start the servers group; set runtime.workers to 1",
        ),
        ({"servers": {"group": {"arguments": {"port": 1}}}}, "port is set by opd"),
        ({"servers": {"group": {"arguments": {"--dtype": "x"}}}}, "without its dashes"),
        ({"servers": {"../x": {}}}, "name"),
    ],
)
def test_what_cannot_be_is_said_of_the_recipe(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny_recipe(**changes)


def test_the_doctor_looks_for_the_program(tmp_path):
    def found(**group):
        teachers = {"sort": {"type": "sglang", "servers": "group"}}
        [finding] = check_servers(tiny_recipe(servers={"group": group}, teachers=teachers))
        return finding.level, finding.detail

    assert found(command=LITTLE)[0] == "ok"
    assert "no program here" in found(command=["/nothing/there"])[1]
    assert "needs SGLang" in found()[1]


def test_every_rank_has_a_server_of_its_own_to_write_with():
    recipe = tiny_recipe(
        servers={"group": {"count": 2}}, rollout={"engine": {"type": "sglang", "servers": "group"}}
    )
    check_ranks(recipe, 2)
    with pytest.raises(ConfigError, match="2 workers for 3 ranks"):
        check_ranks(recipe, 3)
