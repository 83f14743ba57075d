"""Faults of a store under streamed teachers: a step's gradient is right to the bit, or there is none."""

import time
from dataclasses import replace

import pytest
import ranks
import tiny
import torch
from fault_proxy import FaultProxy
from seaweedfs import aws_environment

from opd.errors import StorageError
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.retry import Retry
from opd.storage.object_store import StoreOptions
from opd.storage.published import PublishedModel
from opd.teachers.kinds import Placement
from opd.teachers.schedule import Router, TeacherSchedule
from opd.teachers.streamed_teacher import StreamedTeacher, streamed_teachers

NAMES = ["a", "b"]
OPTIONS = StoreOptions(retry=Retry(attempts=6, pause=0.01, longest=0.05), rereads=2, threads=2)
HASTY = replace(OPTIONS, stall_seconds=0.4)
"""Where answers stall. A busy store may be as slow: some attempts are left for that."""
STOPPED = r"check that the store is reachable"


@pytest.fixture(scope="module")
def urls(s3, tmp_path_factory):
    """name -> where it is published, in 2 shards; "other" is a stranger of the same shape."""
    folder, found = tmp_path_factory.mktemp("faults"), {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in aws_environment(s3.endpoint).items():
            patch.setenv(name, value)
        for seed, name in enumerate([*NAMES, "other"]):
            found[name] = f"s3://models/{folder.name}/{name}"
            save_checkpoint(tiny.model(seed=seed), tiny.tokenizer(), folder / name, {})
            publish_checkpoint(folder / name, found[name], shards=2)
    return found


@pytest.fixture
def fault():
    return ""


@pytest.fixture
def teachers(urls, proxy, fault):
    """Teachers that have read their manifests; they share a stream."""
    made = streamed_teachers({name: urls[name] for name in NAMES}, Placement(max_tokens=16))
    options = HASTY if fault == "stalled" else OPTIONS
    for name, teacher in made.items():
        teacher.__dict__["published"] = PublishedModel.open(urls[name], options=options)
    yield made
    for teacher in made.values():
        teacher.close()


def gradient(teachers: dict[str, StreamedTeacher]) -> dict[str, torch.Tensor]:
    router = Router({name: {name: 1.0} for name in NAMES}, "one_hot")
    return ranks.gradient(TeacherSchedule(teachers, router), ranks.samples(NAMES))


@pytest.fixture(scope="module")
def expected(urls, s3):
    """The gradient without a fault."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in aws_environment(s3.endpoint).items():
            patch.setenv(name, value)
        made = streamed_teachers({name: urls[name] for name in NAMES}, Placement(max_tokens=16))
        found = gradient(made)
        for teacher in made.values():
            teacher.close()
    return found


FAULTS = {
    "503": ({"kind": "status"}, "the store answered 503 SlowDown, 6 times"),
    "stalled": ({"kind": "stall", "after": 300}, "no answer in time.*, 6 times"),
    "reset": ({"kind": "reset", "after": 300}, "after .* bytes, 6 times"),
    "short body": ({"kind": "short", "after": 300}, "the connection ended after .* bytes, 6 times"),
    "flipped bit": ({"kind": "flip", "after": 300}, "corrupt: the checksum differs in each of 3 reads"),
    "expired": (
        {"kind": "status", "status": 403, "code": "ExpiredToken"},
        "403 ExpiredToken, also with credentials looked up anew; check AWS_ACCESS_KEY_ID",
    ),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_changes_no_bit_of_the_gradient(teachers, expected, proxy, fault):
    options, _ = FAULTS[fault]
    proxy.inject(**options, path="shard-00000", times=2)
    proxy.inject(**options, path="shard-00001", times=1)
    found = gradient(teachers)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(one.times == 0 for one in proxy.faults)


@pytest.mark.some(2)
@pytest.mark.parametrize("part", ["layers", "head"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_stops_with_object_range_and_cause(teachers, urls, proxy, fault, part):
    options, cause = FAULTS[fault]
    proxy.inject(**options | {"after": 0}, path="shard-00001", times=10_000)  # no byte further, so no end
    teacher, samples = teachers["a"], ranks.samples(["a"])
    with pytest.raises(StorageError, match=cause) as caught:
        teacher.score(samples) if part == "layers" else teacher.load_head()
    _check_sentence(str(caught.value), urls["a"])
    proxy.faults.clear()
    assert torch.isfinite(teacher.score(samples).rows).all()  # the same teacher goes on afterwards
    assert torch.isfinite(teacher.load_head().weight).all()


def _check_sentence(message: str, url: str) -> None:
    assert f"{url}/" in message
    assert "shard-0000" in message
    assert "bytes " in message
    assert "\n" not in message
    assert message.count(". ") == 0


def test_a_slow_store_is_waited_for(teachers, expected, proxy):
    proxy.bytes_per_second = 400_000
    begin, found = time.monotonic(), gradient(teachers)
    assert time.monotonic() - begin > sum(t.bytes_read for t in teachers.values()) / 400_000 * 0.5
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_store_that_was_away_is_waited_for(teachers, expected, proxy):
    for teacher in teachers.values():
        teacher.published.store.options = StoreOptions(retry=Retry(attempts=40, pause=0.1, longest=0.5))
    proxy.away_for(0.8)
    found = gradient(teachers)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_store_that_stays_away_stops_with_a_sentence(teachers, urls, proxy):
    proxy.stop()
    with pytest.raises(StorageError, match=f"6 times in .* s; {STOPPED}") as caught:
        gradient(teachers)
    _check_sentence(str(caught.value), urls["a"])


@pytest.mark.some(1)
@pytest.mark.parametrize("shard", [0, 1])
def test_a_missing_shard_and_one_of_another_version_reach_no_gradient(urls, s3, proxy, tmp_path, shard):
    url = f"s3://models/damaged-{tmp_path.name}"
    save_checkpoint(tiny.model(), tiny.tokenizer(), tmp_path / "a", {})
    publish_checkpoint(tmp_path / "a", url, shards=2)
    made = streamed_teachers({"a": url, "b": urls["b"]}, Placement(max_tokens=16))
    store, path = made["a"].published.store, made["a"].published.manifest.shard_path(shard)
    whole = store.get(path)
    with PublishedModel.open(urls["other"]) as other:
        store.put(path, other.store.get(other.manifest.shard_path(shard)))
    with pytest.raises(StorageError, match="corrupt: the checksum differs in each of 4 reads") as caught:
        gradient(made)
    _check_sentence(str(caught.value), url)
    store.delete(path)
    with pytest.raises(StorageError, match=rf"{path} does not exist; check the URL"):
        gradient(made)
    store.put(path, whole)
    gradient(made)
    for teacher in made.values():
        teacher.close()


def test_credentials_that_were_revoked_stop_with_a_sentence(teachers, urls, proxy: FaultProxy):
    proxy.inject("status", status=403, code="AccessDenied", path="shard-", times=10_000)
    with pytest.raises(StorageError, match="403 AccessDenied; check AWS_ACCESS_KEY_ID") as caught:
        gradient(teachers)
    _check_sentence(str(caught.value), urls["a"])
