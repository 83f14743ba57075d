"""What can be wrong with a launch on Ray ends with one sentence, soon, and leaves no process behind."""

import json
import os
import socket
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from ray_runs import write_recipe

from opd.config.load import load_recipe
from opd.errors import LaunchError
from opd.pipelines.check.servers import check_cluster
from opd.pipelines.cli import main
from opd.pipelines.launch.machine import out_of_memory
from opd.pipelines.launch.ray.cluster import Cluster, check_head, descendant_processes, end_left_over

RAY = ["--launch.type", "ray"]


@pytest.fixture
def complaint(tmp_path, capfd):
    """Runs the merge with options that cannot work; returns what was printed to the standard error."""
    recipe = write_recipe(tmp_path)
    before = descendant_processes(os.getpid())

    def run(*options: str) -> str:
        assert main(["distill", str(recipe), "--out", str(tmp_path / "run"), *options]) == 2
        others = {pid for root in before for pid in descendant_processes(root)} | before.keys()
        left = {pid: start for pid, start in descendant_processes(os.getpid()).items() if pid not in others}
        end_left_over(left, patience=0.0)
        assert not left
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("opd: error:")]
        assert len(lines) == 1
        return lines[0]

    return run


def test_a_head_that_answers_is_not_asked_at_every_look(monkeypatch):
    now = 100.0
    monkeypatch.setattr("opd.pipelines.launch.ray.cluster.time.monotonic", lambda: now)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5.0)
        head = Cluster(None, f"127.0.0.1:{server.getsockname()[1]}", own=True)
        assert not any(head.is_lost() for _ in range(20))
        server.accept()[0].close()
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
        now += 1.0
        assert not head.is_lost()
        server.accept()[0].close()
    assert not head.is_lost()  # nobody has asked
    now += 1.0
    assert not head.is_lost()
    now += 2.0
    assert head.is_lost()


def test_ray_is_not_installed(complaint, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'opd[ray]'" in complaint(*RAY)


def test_nothing_listens(complaint):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        said = complaint(*RAY, "--launch.address", address)
    assert f"the Ray cluster at {address} cannot be reached" in said


def test_address_of_another_form(complaint):
    assert "must be HOST:PORT" in complaint(*RAY, "--launch.address", "ray.example.org")


def test_auto_outside_of_a_cluster(complaint, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert "RAY_ADDRESS is not set" in complaint(*RAY, "--launch.address", "auto")


def test_a_cluster_that_does_not_start_in_time_is_told_with_the_way_out(complaint, monkeypatch):
    def late(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", late)
    said = complaint(*RAY)
    assert "timed out during startup; if the machine is busy, try again, with --resume" in said


def test_the_doctor_says_so_too(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)

    def found(**launch):
        [finding] = check_cluster(load_recipe([write_recipe(tmp_path, launch={"type": "ray"} | launch)]))
        return finding.level, finding.detail

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert found(port=port) == (
            "error",
            f"launch.port {port} is in use; choose another, or none to take a free one.",
        )
        level, said = found(address=f"127.0.0.1:{port}")
    assert level == "error"
    assert f"the Ray cluster at 127.0.0.1:{port} cannot be reached" in said
    assert "must be HOST:PORT" in found(address="ray.example.org")[1]
    assert found(address="auto") == (
        "warning",
        "launch.address is auto, and RAY_ADDRESS is not set here; a Ray job has it",
    )
    level, said = found(engine={"gpus": 1})
    assert level == "error"
    assert "launch.trainer.gpus is 0, so Ray hides the GPUs that are there (1)" in said
    roles = {"trainer": {"gpus": 0.25}, "teacher": {"gpus": 0.25}}
    assert found(engine={"gpus": 0.5}, **roles)[0] == "ok"
    level, said = found(engine={"gpus": 1}, **roles)
    assert level == "error"
    assert (
        "launch asks for 1.5 GPUs in all, and this machine, where the run starts its cluster, has 1" in said
    )


@contextmanager
def listener(answer: bytes | None):
    """The address of a server that takes a connection and sends `answer`, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def serve() -> None:
            connection, _ = server.accept()
            held.append(connection)
            if answer is not None:
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()
        for connection in held:
            connection.close()


def test_another_server_listens():
    with (
        listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address,
        pytest.raises(LaunchError, match="is no Ray"),
    ):
        check_head(address)


def test_a_server_that_says_nothing():
    with listener(None) as address, pytest.raises(LaunchError, match="does not answer within"):
        check_head(address, seconds=0.2)


@pytest.mark.slow
def test_port_in_use(complaint):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"launch.port {port} is in use" in complaint(*RAY, "--launch.port", str(port))


@pytest.mark.slow
def test_cluster_without_room(cluster, complaint):
    begin = time.monotonic()
    options = [
        "--launch.address",
        cluster.address,
        "--launch.engines",
        "20",
        "--launch.placement_timeout",
        "1",
    ]
    said = complaint(*RAY, *options)
    assert "did not give CPU 22 (1 bundles" in said
    assert "it has CPU 8" in said
    assert time.monotonic() - begin < 110  # by itself it waits for 120


@pytest.mark.slow
def test_cluster_of_another_version(cluster, complaint):
    from ray._raylet import GcsClient

    store = GcsClient(address=cluster.address)
    key, namespace = b"CLUSTER_METADATA", b"cluster"
    told = store.internal_kv_get(key, namespace=namespace)
    assert told is not None
    other = json.dumps(json.loads(told) | {"ray_version": "2.1.0"}).encode()
    store.internal_kv_put(key, other, overwrite=True, namespace=namespace)
    try:
        said = complaint(*RAY, "--launch.address", cluster.address)
    finally:
        store.internal_kv_put(key, told, overwrite=True, namespace=namespace)
    assert "runs other versions than this process" in said
    assert "2.1.0" in said


@pytest.mark.slow
def test_node_without_memory(complaint, monkeypatch):
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.001")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    said = complaint(*RAY, "--launch.max_restarts", "0")
    assert "memory" in said


def test_want_of_memory_is_recognised():
    with pytest.raises(RuntimeError) as asked:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert "1152921504606846976 bytes" in str(out_of_memory(asked.value))
    with pytest.raises(MemoryError) as asked:
        bytearray(1 << 60)
    assert out_of_memory(asked.value) == "no more is free"
    assert out_of_memory(RuntimeError("another")) is None
