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
from sync_process import greedy

from opd.errors import RolloutError
from opd.models.causal_lm import WeightsDigest, weights_digest
from opd.rendezvous import host_store
from opd.rollout.sync.disk import WeightFolder
from opd.rollout.sync.group import Seat, weight_group
from opd.rollout.sync.in_process import InProcess
from opd.rollout.sync.parcel import Parcel
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
def remote():
    """The engine of another process."""
    process = start()
    found = Remote(process)
    assert found.hear() == {"ready": True}
    yield found
    end(process)


def start() -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, str(SCRIPT)], stdin=pipe, stdout=pipe, env=environment, text=True
    )


def end(process: subprocess.Popen) -> None:
    """Kill it, whatever it does."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


@pytest.fixture(params=[None, 9_000], ids=["one file", "shards"])
def sender(request, tmp_path):
    options = {} if request.param is None else {"shard_bytes": request.param}
    made = WeightFolder(tmp_path / "weights", **options)
    yield made
    made.close()


versions = iter(range(1, 1000))


def test_an_engine_elsewhere_writes_with_the_new_weights(remote, sender):
    """Twice, so that the second push meets what the first one left."""
    for seed in (1, 2):
        model, version = tiny.model(seed=seed), next(versions)
        remote.verbs.clear()
        digest = sync_weights([remote], sender, model.weights(), version)
        assert digest == model.digest()
        assert remote.verbs == ["pause", "flush", "receive", "resume"]
        assert remote.greedy() == (greedy(TorchEngine(model)), version)


def test_weights_that_differ_are_found_out_and_nothing_is_resumed(remote, sender, monkeypatch):
    monkeypatch.setattr(WeightsDigest, "hex", lambda self: "another")
    version = next(versions)
    with pytest.raises(RolloutError, match=f"after the push of version {version} engine 0 holds other"):
        sync_weights([remote], sender, tiny.model(seed=3).weights(), version)
    remote.ask("greedy")
    with pytest.raises(RolloutError, match="paused"):
        remote.hear()
    monkeypatch.undo()
    sync_weights([remote], sender, tiny.model(seed=3).weights(), next(versions))


def test_a_version_that_does_not_grow_is_refused_and_the_next_one_works(remote, sender):
    model = tiny.model(seed=4)
    sync_weights([remote], sender, model.weights(), version := next(versions))
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
@given(weights=any_weights(), shard=st.integers(1, 400))
def test_a_folder_gives_back_the_same_bytes(weights, shard, tmp_path_factory):
    """In one process, the receiver in a thread of its own."""
    folder = WeightFolder(tmp_path_factory.mktemp("weights"), shard_bytes=shard)
    found: dict[str, torch.Tensor] = {}

    def tell(parcel):
        parcel = Parcel(**json.loads(json.dumps(asdict(parcel))))

        def run() -> None:
            found.update({name: tensor.clone() for name, tensor in folder.receive(parcel)})

        thread = threading.Thread(target=run, daemon=True)
        thread.start()

        def answers() -> list[str]:
            thread.join(60)
            return [weights_digest(found.items())]

        return answers

    sent, held = folder.send(weights.items(), 1, tell)
    assert held == [sent] == [weights_digest(weights.items())]
    assert list(found) == list(weights)
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    folder.close()


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
    with pytest.raises(RolloutError, match="not every member"):
        weight_group(host_store("127.0.0.1", timeout=0.5)[0], Seat("alone", 0, 2), timeout=0.5)
