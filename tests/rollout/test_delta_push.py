"""Weights to a mirror beside a server: whole, then what has changed, and whole again where it is lost."""

import asyncio
import json
import shutil
import threading
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from opd.errors import RolloutError
from opd.models.causal_lm import weights_digest
from opd.rollout import weight_mirror
from opd.rollout.delta_push import DeltaPush
from opd.rollout.weight_delta import all_blocks, form_as_json, form_of, group_blocks, pack_blocks
from opd.rollout.weight_mirror import WeightMirror, mirror_places
from opd.served.http_client import Server, UnavailableError

URL = "http://127.0.0.1:1"


async def nobody(server: Server, method: str, path: str, body: dict) -> None:
    """An `Ask` that is not asked."""


@pytest.fixture
def places(tmp_path) -> list[Path]:
    found = [tmp_path / "shared" / "opd-weights-1", tmp_path / "disk" / "opd-weights-1"]
    for place in found:
        place.mkdir(parents=True)
    return found


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "README.md").touch()
    return folder


def weights(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    own = [("b", torch.randn(300, 400, generator=generator).bfloat16()), ("a", torch.randn(9))]
    return [*own, ("none", torch.zeros(0, 3)), ("half", torch.randn(77).half()), ("one", torch.tensor(2.5))]


def learnt(base, step: int) -> list[tuple[str, torch.Tensor]]:
    """A few of `base` changed."""
    found = [(name, tensor.clone()) for name, tensor in base]
    found[0][1].view(-1)[step::1000] += 1
    return found


class Sender:
    """A push over mirrors, and what it has sent."""

    def __init__(self, model: Path, *mirrors, part_bytes: int = 50_000) -> None:
        self.read: list[tuple[str, str, str]] = []
        self.shared: list[int] = []
        self.names = [name for name, _ in weights()]
        urls = [f"{URL}{number}" for number in range(len(mirrors))]
        self.servers = [Server(url) for url in urls]
        self.receivers = dict(zip(urls, mirrors, strict=True))
        self.push = DeltaPush(self.receivers, self._share, self._read, model, part_bytes)

    def _share(self, part: bytes) -> bytes:
        self.shared.append(len(part))
        return part

    async def _read(self, ask, server, name, folder) -> None:
        held = load_file(folder / "model.safetensors")
        digest = weights_digest([(name, held[name]) for name in self.names], quick=True)
        self.read.append((server.url, name, digest))

    def give(self, own, version: int, *servers: Server) -> int:
        """Have servers (all) take these; returns the bytes that were sent."""
        before, self.names = self.push.sent_bytes, [name for name, _ in own]
        prepared = self.push.prepare(own, version)
        self.load(prepared, version, *servers)
        due = weights_digest(own, quick=True)
        assert {digest for _, name, digest in self.read if name == f"v{version}"} == {due}
        return self.push.sent_bytes - before

    def load(self, prepared, version: int, *servers: Server) -> None:
        async def all_of_them() -> None:
            loads = (self.push.load(nobody, own, f"v{version}", prepared) for own in servers or self.servers)
            await asyncio.gather(*loads)

        asyncio.run(all_of_them())


class Losing:
    """A mirror of which verbs fail."""

    def __init__(self, mirror: WeightMirror, **verbs) -> None:
        self._mirror, self._verbs = mirror, verbs

    def __getattr__(self, verb: str):
        return self._verbs.get(verb) or getattr(self._mirror, verb)


class Meeting(Losing):
    """The same, which takes its first part together with others."""

    def __init__(self, mirror: WeightMirror, together: threading.Barrier) -> None:
        super().__init__(mirror, take=self._first)
        self._together = together

    def _first(self, part) -> None:
        self._together.wait(60)
        del self._verbs["take"]
        self._mirror.take(part)


def test_everything_goes_once_and_then_what_has_changed(places, model):
    sender = Sender(model, WeightMirror(places))
    own = weights()
    total = sum(tensor.nbytes for _, tensor in own)
    assert total < sender.give(own, 0) < 1.1 * total
    assert len(sender.shared) > 3  # no part is much larger than it may be
    assert max(sender.shared) < 300_000
    for version in range(1, 4):
        own = learnt(own, version)
        assert 0 < sender.give(own, version) < total / 50
    assert sender.give(own, 4) == 0  # nothing has changed, and the server reads it all the same
    assert [name for _, name, _ in sender.read] == ["v0", "v1", "v2", "v3", "v4"]
    assert sorted(file.name for file in places[0].iterdir()) == ["config.json", "model.safetensors"]
    assert not list(places[1].iterdir())


def test_weights_that_changed_all_over_go_whole(places, model):
    sender = Sender(model, WeightMirror(places))
    first = sender.give(weights(0), 0)
    assert sender.give(weights(1), 1) == first
    other = [("more", torch.ones(4)), *weights(1)]
    assert sender.give(other, 2) > 0  # of another form
    assert sender.give([(name, -tensor) for name, tensor in other], 3) > first


def test_what_is_sent_to_several_is_shared_once(tmp_path, model):
    together = threading.Barrier(3)
    mirrors = []
    for number in range(3):
        place = tmp_path / f"opd-weights-{number}"
        place.mkdir()
        mirrors.append(Meeting(WeightMirror([place]), together))
    sender = Sender(model, *mirrors)
    own = weights()
    total = sum(tensor.nbytes for _, tensor in own)
    assert sender.give(own, 0) < 1.1 * total
    own = learnt(own, 1)
    sender.give(own, 1, *sender.servers[:2])
    behind = learnt(own, 2)
    assert total < sender.give(behind, 2) < 1.2 * total  # one was away, and is sent everything
    assert len({mirror.held() for mirror in mirrors}) == 1


def test_no_more_than_two_parts_are_kept_for_one_server(places, model):
    class Kept:
        """A part as an object store keeps it: for as long as somebody knows it."""

        now = most = 0

        def __init__(self, part: bytes) -> None:
            self.part, Kept.now = part, Kept.now + 1
            Kept.most = max(Kept.most, Kept.now)

        def __del__(self) -> None:
            Kept.now -= 1

    mirror = WeightMirror(places)
    sender = Sender(model, Losing(mirror, take=lambda kept: mirror.take(kept.part)), part_bytes=20_000)
    sender.push = DeltaPush(sender.receivers, Kept, sender._read, model, 20_000)
    for version in range(3):
        sender.give(weights(version), version)
    assert len(sender.read) == 3
    assert (Kept.most, Kept.now) == (2, 0)


def test_a_mirror_that_is_torn_or_new_is_sent_everything(places, model, caplog):
    mirror = WeightMirror(places)
    sender = Sender(model, mirror)
    own = weights()
    whole = sender.give(own, 0)
    assert mirror.change(mirror.held() or "")  # somebody began, and never came to the end
    assert mirror.held() is None
    assert mirror.folder() is None
    own = learnt(own, 1)
    assert sender.give(own, 1) == whole
    sender.receivers[sender.servers[0].url] = WeightMirror(places)  # of an actor that was started again
    (places[0] / "model.safetensors").unlink()
    own = learnt(own, 2)
    assert sender.give(own, 2) == whole
    flip(places[0] / "model.safetensors")  # the changes come out as something else than they are
    own = learnt(own, 3)
    with caplog.at_level("WARNING"):
        assert sender.give(own, 3) > whole
    assert "could not be given what has changed" in caplog.text


def flip(file: Path) -> None:
    with file.open("r+b") as content:
        content.seek(-1, 2)
        last = content.read(1)[0]
        content.seek(-1, 2)
        content.write(bytes([last ^ 1]))


def test_a_receiver_that_is_away_makes_its_server_away(places, model):
    def away(*_):
        raise UnavailableError("server-0 died", answered=False)

    mirror = WeightMirror(places)
    prepared = None
    for verb in ("held", "begin", "take", "settle"):
        sender = Sender(model, Losing(mirror, **{verb: away}))
        prepared = sender.push.prepare(weights(), 0)
        with pytest.raises(UnavailableError, match="server-0 died"):
            sender.load(prepared, 0)
        assert not sender.read
    for place in places:
        place.rename(place.with_name("gone"))  # as the guard of a server that has ended does
    sender = Sender(model, mirror)
    with pytest.raises(UnavailableError, match="has gone while new weights came"):
        sender.load(sender.push.prepare(weights(), 0), 0)


def test_wrong_bytes_are_never_read(places, model):
    mirror = WeightMirror(places)

    def take(part):
        own = weights(7)
        for blocks in group_blocks(all_blocks(own), 1 << 20):
            mirror.take(pack_blocks(blocks))

    sender = Sender(model, Losing(mirror, take=take))
    with pytest.raises(RolloutError, match=r"and not .*, as were sent; send them anew"):
        sender.load(sender.push.prepare(weights(), 0), 0)
    assert not sender.read
    assert mirror.held() is None


def test_a_server_of_somebody_else_is_refused(model):
    sender = Sender(model)
    with pytest.raises(RolloutError, match=r"leave rollout\.engine\.sync out"):
        sender.load(sender.push.prepare(weights(), 0), 0, Server(URL))


def test_weights_that_never_change_are_sent_as_they_are(places, model):
    sender = Sender(model, WeightMirror(places))
    tied = torch.ones(4, 4)
    own = [(name, tied) if name == "b" else (name, tensor) for name, tensor in weights()]
    own = [(name, tied) if name == "a" else (name, tensor) for name, tensor in own]
    sender.load(sender.push.prepare_static(iter(own)), 0)
    assert sender.read[0][2] == weights_digest(own, quick=True)


def test_a_mirror_takes_only_what_was_begun_and_has_room_for_it(places, monkeypatch):
    mirror, own = WeightMirror(places), weights()
    (part,) = [pack_blocks(blocks) for blocks in group_blocks(all_blocks(own), 1 << 30)]
    with pytest.raises(RolloutError, match="nobody had begun"):
        mirror.take(part)
    assert mirror.settle("0") is None
    assert not mirror.change("0")
    form = form_as_json(form_of(own))
    for name in ("../config.json", "run.py", ".json", "a/b.json"):
        with pytest.raises(RolloutError, match="was sent beside new weights"):
            mirror.begin(form, {name: b""})
    assert mirror.begin(json.loads(json.dumps(form)), {})
    mirror.take(part)
    assert mirror.settle(weights_digest(own, quick=True)) == str(places[0])
    with pytest.raises(RolloutError, match="nobody had begun"):
        mirror.take(part)
    assert not mirror.change("0")

    def full(descriptor, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_mirror.os, "posix_fallocate", full)
    with pytest.raises(
        RolloutError, match=r"has no room for \d+ MiB of new weights in .* or .*No space left"
    ):
        mirror.begin(form, {})
    assert not [file for place in places for file in place.iterdir()]


def test_without_room_in_shared_memory_the_disk_is_taken(places, model, monkeypatch):
    real, asked = weight_mirror.os.posix_fallocate, []

    def full_once(descriptor, offset, size):
        asked.append(size)
        if len(asked) == 1:
            raise OSError(28, "No space left on device")
        real(descriptor, offset, size)

    monkeypatch.setattr(weight_mirror.os, "posix_fallocate", full_once)
    sender = Sender(model, WeightMirror(places))
    sender.give(weights(), 0)
    assert not list(places[0].iterdir())
    assert (places[1] / "model.safetensors").exists()


def test_shared_memory_that_is_promised_to_others_is_left_to_them(places, model, monkeypatch):
    monkeypatch.setattr(weight_mirror, "SHARED", str(places[0].parent))
    free = shutil.disk_usage(places[0]).free
    Sender(model, WeightMirror(places, free // 2)).give(weights(), 0)
    assert (places[0] / "model.safetensors").exists()
    (places[0] / "model.safetensors").unlink()
    Sender(model, WeightMirror(places, 2 * free)).give(weights(), 0)
    assert not (places[0] / "model.safetensors").exists()
    assert (places[1] / "model.safetensors").exists()
    with pytest.raises(RolloutError, match=r"has no room .* is promised to others"):
        WeightMirror(places[:1], 2 * free).begin(form_as_json(form_of(weights())), {})


def test_places_are_nobody_elses():
    first, second = mirror_places(), mirror_places()
    assert not set(first) & set(second)
    assert {place.name[:12] for place in first} == {"opd-weights-"}


def test_a_model_comes_out_of_its_mirror_as_it_went_in(places, tmp_path):
    trained = tiny.model(seed=0)
    (tmp_path / "empty").mkdir()
    sender = DeltaPush({URL: WeightMirror(places)}, bytes, lambda *_: _nothing(), tmp_path / "empty", 1 << 20)
    asyncio.run(sender.load(nobody, Server(URL), "v", sender.prepare(trained.weights(), 0)))
    held = load_file(places[0] / "model.safetensors")
    assert weights_digest([(name, held[name]) for name, _ in trained.weights()]) == trained.digest()


async def _nothing() -> None:
    pass
