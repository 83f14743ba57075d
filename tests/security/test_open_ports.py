"""Every port is opened on the address that is asked for: what listens is read from the system."""

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import sockets
from torch.distributed import TCPStore

from opd.ranks import EVERY, address_of, host_store, interface_towards
from opd.rollout.sglang_engine import GroupMember, weight_group

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
LOOPBACK = "127.0.0.1"


def run_ranks(host: str, port: int, agent: bool) -> list[list[str]]:
    """Where each of two ranks listens that meet at `host`."""
    environment = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"}
    environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    if agent:
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    command = [sys.executable, str(Path(__file__).with_name("rank_process.py"))]
    started = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        return [json.loads(process.communicate(timeout=240)[0]) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def free_port(host: str) -> int:
    with socket.create_server((host, 0)) as taken:
        return taken.getsockname()[1]


def own_address() -> str | None:
    """An address of this machine other than loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return None
        return asking.getsockname()[0]


@pytest.mark.slow
@pytest.mark.parametrize("agent", [False, True])
def test_ranks_listen_on_loopback_alone(agent):
    """Both ways to meet: rank 0 has the store, or the process that started them, as `train.ranks` does."""
    with ExitStack() as stack:
        port = free_port(LOOPBACK)
        if agent:
            before = sockets.listening(os.getpid())
            store, port = host_store(LOOPBACK, 60.0)
            stack.callback(lambda: store)
            assert sockets.listening(os.getpid()) - before <= {LOOPBACK}
        assert run_ranks(LOOPBACK, port, agent) == [[LOOPBACK], [LOOPBACK]]


@pytest.mark.slow
def test_ranks_listen_on_the_address_that_is_asked_for():
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    assert run_ranks(address, free_port(address), agent=False) == [[address], [address]]


def test_the_store_of_train_ranks_listens_on_loopback_alone():
    from recipes import tiny_recipe

    from opd.pipelines.launch.local import _open_store

    before = sockets.listening(os.getpid())
    store = _open_store(tiny_recipe(train={"ranks": 2}))
    assert sockets.listening(os.getpid()) | {LOOPBACK} == before | {LOOPBACK}
    with socket.create_connection((LOOPBACK, store.port), timeout=5):
        pass
    if (address := own_address()) is not None:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address, store.port), timeout=5)


def test_a_weight_group_listens_on_loopback_alone():
    before = sockets.listening(os.getpid())
    store, port = host_store(LOOPBACK, 60.0)
    made = []
    member = threading.Thread(
        target=lambda: made.append(
            weight_group(TCPStore(LOOPBACK, port, wait_for_workers=False), GroupMember("ports", 1, 2))
        )
    )
    member.start()
    made.append(weight_group(store, GroupMember("ports", 0, 2)))
    member.join()
    assert sockets.listening(os.getpid()) - before <= {LOOPBACK}
    assert len(made) == 2


def test_a_name_that_stands_for_loopback_is_not_taken_for_the_machines_address(monkeypatch):
    """A machine's own name often does: other machines could not come."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1" if name == "node7" else name)
    assert address_of("node7") == EVERY
    assert interface_towards("node7") is None
    assert address_of("127.0.0.1") == LOOPBACK
    assert interface_towards("127.0.0.1") == "lo"


@pytest.mark.slow
def test_a_ray_cluster_of_our_own_listens_on_loopback_alone(tmp_path):
    pytest.importorskip("ray")
    script = Path(__file__).with_name("ray_process.py")
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert set(found["addresses"]) == {LOOPBACK}
    assert found["processes"] >= 3
