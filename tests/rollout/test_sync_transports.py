"""New weights for an engine in another process: every transport brings the same, or says that it did not."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from sync_process import greedy

from opd.errors import RolloutError
from opd.models.digest import WeightsDigest, weights_digest
from opd.rendezvous import host_store
from opd.rollout.sync.broadcast import BroadcastReceiver, BroadcastSender
from opd.rollout.sync.disk import WeightFolder
from opd.rollout.sync.group import TIMEOUT, Seat, visit_store, weight_group
from opd.rollout.sync.in_process import InProcess
from opd.rollout.sync.parcel import Parcel
from opd.rollout.sync.shared_memory import FOLDER, PREFIX, SharedMemoryReceiver, SharedMemorySender, sweep
from opd.rollout.sync.verb import LocalTarget, sync_weights
from opd.rollout.torch_engine import TorchEngine

SCRIPT = Path(__file__).parent / "sync_process.py"


class Remote:
    """The engine of another process, as a `Target`; `verbs` is what it was asked."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process, self.verbs = process, []

    def ask(self, verb: str, parcel: Parcel | None = None) -> None:
        self.verbs.append(verb)
        asked = {"verb": verb} | ({"parcel": asdict(parcel)} if parcel else {})
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict:
        said = json.loads(self.process.stdout.readline())
        if "error" in said:
            raise RolloutError(said["error"])
        return said

    def pause(self) -> None:
        self.ask("pause")
        self.hear()

    def flush(self) -> None:
        self.ask("flush")
        self.hear()

    def resume(self) -> None:
        self.ask("resume")
        self.hear()

    def receive(self, parcel: Parcel) -> Callable[[], str]:
        self.ask("receive", parcel)
        return lambda: self.hear()["digest"]

    def greedy(self) -> tuple[list[int], int]:
        self.ask("greedy")
        said = self.hear()
        return said["tokens"], said["version"]


@pytest.fixture(scope="module")
def pair():
    """A remote engine and the group that this process is rank 0 of."""
    store, port = host_store("127.0.0.1", TIMEOUT)
    process = start("engine", "127.0.0.1", str(port))
    group = weight_group(store, Seat("test", 0, 2))
    remote = Remote(process)
    assert remote.hear() == {"ready": True}
    yield remote, group
    end(process)


def start(*arguments: str) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(SCRIPT), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)


def end(process: subprocess.Popen) -> None:
    """Kill it, whatever it does."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


@pytest.fixture(params=["disk", "disk in shards", "shared memory", "broadcast", "small buckets"])
def sender(request, pair, tmp_path):
    made = {
        "disk": lambda: WeightFolder(tmp_path / "weights"),
        "disk in shards": lambda: WeightFolder(tmp_path / "weights", shard_bytes=9_000),
        "shared memory": SharedMemorySender,
        "broadcast": lambda: BroadcastSender(pair[1]),
        "small buckets": lambda: BroadcastSender(pair[1], bucket_bytes=777),
    }[request.param]()
    yield made
    made.close()


versions = iter(range(1, 1000))


def test_an_engine_elsewhere_writes_with_the_new_weights(pair, sender):
    """Twice, so that the second push meets what the first one left."""
    remote, _ = pair
    for seed in (1, 2):
        model, version = tiny.model(seed=seed), next(versions)
        remote.verbs.clear()
        digest = sync_weights([remote], sender, model.weights(), version)
        assert digest == model.digest()
        assert remote.verbs == ["pause", "flush", "receive", "resume"]
        assert remote.greedy() == (greedy(TorchEngine(model)), version)
    assert not list(FOLDER.glob(f"{PREFIX}{os.getpid()}-*"))


def test_weights_that_differ_are_found_out_and_nothing_is_resumed(pair, sender, monkeypatch):
    remote, _ = pair
    monkeypatch.setattr(WeightsDigest, "hex", lambda self: "another")
    version = next(versions)
    with pytest.raises(RolloutError, match=f"after the push of version {version} engine 0 holds other"):
        sync_weights([remote], sender, tiny.model(seed=3).weights(), version)
    remote.ask("greedy")
    with pytest.raises(RolloutError, match="paused"):
        remote.hear()
    monkeypatch.undo()
    sync_weights([remote], sender, tiny.model(seed=3).weights(), next(versions))


def test_a_version_that_does_not_grow_is_refused_and_the_next_one_works(pair, sender):
    remote, _ = pair
    model = tiny.model(seed=4)
    sync_weights([remote], sender, model.weights(), version := next(versions))
    if not isinstance(sender, BroadcastSender):  # which cannot be left alone in the middle
        with pytest.raises(RolloutError, match="must grow"):
            sync_weights([remote], sender, model.weights(), version)
    model = tiny.model(seed=5)
    assert sync_weights([remote], sender, model.weights(), next(versions)) == model.digest()
    assert remote.greedy()[0] == greedy(TorchEngine(model))


def test_in_process_nothing_is_copied_on_the_way():
    model, both = tiny.model(seed=1), InProcess()
    engine = TorchEngine(tiny.model(seed=2))
    assert sync_weights([LocalTarget(engine, both)], both, model.weights(), 1) == model.digest()
    assert engine.policy_version == 1
    assert greedy(engine) == greedy(TorchEngine(model))
    seen = []

    def tell(parcel):
        seen.extend(both.receive(parcel))
        with pytest.raises(RolloutError, match="already taken"):
            both.receive(parcel)
        return list

    both.send(model.weights(), 2, tell)
    assert [t.data_ptr() for _, t in seen] == [t.data_ptr() for _, t in model.weights()]


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def any_weights(draw):
    tensors = {}
    for index in range(draw(st.integers(0, 6))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        content = torch.arange(torch.Size(shape).numel()) * 7 % 251 + index
        tensors[f"t.{index}"] = content.reshape(shape).to(dtype)
    return tensors


@settings(max_examples=40, deadline=None)
@given(weights=any_weights(), bucket=st.integers(2, 300), shard=st.integers(1, 400))
def test_every_transport_gives_back_the_same_bytes(weights, bucket, shard, tmp_path_factory):
    folder = WeightFolder(tmp_path_factory.mktemp("weights"), shard_bytes=shard)
    ends = {"disk": (folder, folder), "shared": (SharedMemorySender(), SharedMemoryReceiver())}
    for sender, receiver in ends.values():
        check(weights, sender, receiver)
    group = Loop()
    check(weights, BroadcastSender(group, bucket), BroadcastReceiver(group.twin()))


def check(weights, sender, receiver) -> None:
    """In one process, the receiver in a thread of its own."""
    found: dict[str, torch.Tensor] = {}

    def tell(parcel):
        parcel = Parcel(**json.loads(json.dumps(asdict(parcel))))

        def run() -> None:
            found.update({name: tensor.clone() for name, tensor in receiver.receive(parcel)})

        thread = threading.Thread(target=run, daemon=True)
        thread.start()

        def answers() -> list[str]:
            thread.join(60)
            return [weights_digest(found.items())]

        return answers

    sent, held = sender.send(weights.items(), 1, tell)
    assert held == [sent] == [weights_digest(weights.items())]
    assert list(found) == list(weights)
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    sender.close()


class Loop:
    """A group of two in one process: what one end broadcasts is what the other end gets next."""

    def __init__(self, other: "Loop | None" = None) -> None:
        self.buckets = [] if other is None else other.buckets
        self.arrived = threading.Condition() if other is None else other.arrived
        self.receives = other is not None

    def twin(self) -> "Loop":
        return Loop(self)

    def broadcast(self, tensors, options):
        return _Work(self, tensors[0])


class _Work:
    def __init__(self, loop: Loop, bucket: torch.Tensor) -> None:
        self.loop, self.bucket = loop, bucket
        if not loop.receives:
            # Read only when it is waited for, as a network may: a bucket filled too early is a wrong bucket.
            self.mine = bucket

    def wait(self) -> None:
        with self.loop.arrived:
            if self.loop.receives:
                assert self.loop.arrived.wait_for(lambda: self.loop.buckets, 60)
                self.bucket.copy_(self.loop.buckets.pop(0))
            else:
                self.loop.buckets.append(self.mine.clone())
                self.loop.arrived.notify_all()


def test_what_a_killed_sender_left_is_gone_when_the_next_one_starts():
    process = start("sender", str(FOLDER))
    path = Path(json.loads(process.stdout.readline())["file"])
    assert path.exists()
    assert path not in sweep()  # it lives
    end(process)
    assert path.exists()
    SharedMemorySender().close()
    assert not path.exists()


def test_half_a_version_is_never_read(tmp_path):
    """A sender that dies while it writes leaves the version before, and its own rest goes with the next."""

    def dying():
        yield from list(tiny.model(seed=1).weights())[:3]
        raise KeyboardInterrupt

    first = WeightFolder(tmp_path)
    kept = first.write(tiny.model(seed=0).weights(), 1)
    with pytest.raises(KeyboardInterrupt):
        WeightFolder.write(first, dying(), 2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == [".version-2", "version-1"]
    found = first.receive(Parcel("disk", 1, {"folder": str(kept)}))
    assert weights_digest(found) == tiny.model(seed=0).digest()
    WeightFolder(tmp_path).write(tiny.model(seed=2).weights(), 2)
    assert [p.name for p in tmp_path.iterdir()] == ["version-2"]


def test_what_is_not_there_is_refused(tmp_path):
    gone = str(tmp_path / "gone")
    with pytest.raises(RolloutError, match=r"cannot be read from .*one file system"):
        list(WeightFolder(tmp_path).receive(Parcel("disk", 3, {"folder": gone})))
    entry = {"name": "w", "dtype": "float32", "shape": [4], "start": 0}
    with pytest.raises(RolloutError, match=r"version 3 is not in .*another machine"):
        list(SharedMemoryReceiver().receive(Parcel("shared_memory", 3, {"file": gone, "tensors": [entry]})))
    half = tmp_path / "half"
    half.write_bytes(b"12345678")
    with pytest.raises(RolloutError, match="or not whole"):
        list(
            SharedMemoryReceiver().receive(
                Parcel("shared_memory", 3, {"file": str(half), "tensors": [entry]})
            )
        )
    with pytest.raises(RolloutError, match="not a folder"):
        SharedMemorySender(gone)
    with pytest.raises(RolloutError, match="cannot be reached"):
        visit_store("127.0.0.1", 1, timeout=0.5)
    with pytest.raises(RolloutError, match="not every member"):
        weight_group(host_store("127.0.0.1", timeout=0.5)[0], Seat("alone", 0, 2), timeout=0.5)


def test_a_killed_engine_is_named_and_the_sender_leaves_nothing(pair):
    """The last test that uses it."""
    remote, group = pair
    remote.pause()
    end(remote.process)
    with pytest.raises(RolloutError, match="a member of the weight group was lost"):
        # Larger than what the connection takes without a reader.
        BroadcastSender(group, 1 << 20).send([("w", torch.zeros(1 << 23))], 1, lambda parcel: list)
    with pytest.raises(ValueError, match="closed file"):
        SharedMemorySender().send(tiny.model().weights(), 1, lambda parcel: remote.receive(parcel))
    assert not list(FOLDER.glob(f"{PREFIX}{os.getpid()}-*"))
