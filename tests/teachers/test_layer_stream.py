"""The stream under every order of asking, using and dropping: right bytes, bounded memory, no thread left."""

import threading

import pretend_cuda
import pytest
import tiny
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_published import publish

from opd.errors import StorageError, TeacherError
from opd.storage.published import PublishedModel
from opd.teachers.layer_stream import LayerStream
from opd.teachers.unit_memory import ByteMeter


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two published models of different unit sizes."""
    folder = tmp_path_factory.mktemp("models")
    urls = [publish(tiny.model(hidden_size=size), folder / str(size), shards=2)[1] for size in (16, 48)]
    opened = [PublishedModel.open(url) for url in urls]
    yield opened
    for model in opened:
        model.close()


def content(model, unit):
    into = bytearray(model.manifest.units[unit].nbytes)
    model.read_part(unit, 0, 1, memoryview(into))
    return bytes(into)


@pytest.fixture(scope="module")
def contents(models):
    return [{unit: content(model, unit) for unit in model.manifest.units} for model in models]


@settings(max_examples=cases(40))
@given(
    orders=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4), st.booleans()), min_size=1, max_size=6),
    window=st.sampled_from([0, 5_000, 40_000]),
)
def test_passes_give_the_right_bytes_in_any_order_of_use(models, contents, orders, window):
    """Each pass is asked for early or late, used up or left after some units."""
    stream = LayerStream(prefetch_bytes=window)

    def ask(which):
        return stream.request_pass(models[which], list(contents[which]))

    early = [ask(which) if ahead else None for which, _, ahead in orders]
    for (which, stop, _), asked in zip(orders, early, strict=True):
        units = stream.iterate_pass(asked or ask(which))
        for count, (unit, flat) in enumerate(units):
            assert flat.numpy().tobytes() == contents[which][unit]
            if count == stop:
                break
        units.close()
    largest = max(unit.nbytes for model in models for unit in model.manifest.units.values())
    assert stream.nbytes <= largest + window + 256
    stream.close()
    assert stream.nbytes == 0


def test_later_passes_are_read_while_an_earlier_one_is_used(models):
    stream = LayerStream(prefetch_bytes=10**6)
    first, second = (stream.request_pass(model, list(model.manifest.units)) for model in reversed(models))
    seen = []
    for unit, _ in stream.iterate_pass(first):
        seen.append(unit)
        if len(seen) == len(first.units):  # what the units before it have left is room for the next pass
            with stream._changed:
                assert stream._changed.wait_for(lambda: len(second.ready) >= 2, 30)
    assert seen == list(first.units)
    assert len(list(stream.iterate_pass(second))) == len(second.units)
    stream.close()


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_unit_is_read_while_another_is_used(models, contents, monkeypatch, device):
    """The reader ends when the unit before is in use, and the user when the next one is begun: who reads and
    uses in turn does neither.
    """
    model, units = models[1], list(contents[1])
    begun, used = ({unit: threading.Event() for unit in units} for _ in range(2))
    read = PublishedModel.read_part

    def slow(own, unit, *args):
        begun[unit].set()
        before = units.index(unit) - 1
        assert before < 0 or used[units[before]].wait(30)
        read(own, unit, *args)

    monkeypatch.setattr(PublishedModel, "read_part", slow)
    with pretend_cuda.on(device) as gpu:
        stream = LayerStream(prefetch_bytes=10**6, device=device)
        found = {}
        for unit, flat in stream.iterate_pass(stream.request_pass(model, units)):
            used[unit].set()
            following = units[units.index(unit) + 1 :]
            assert not following or begun[following[0]].wait(30)
            found[unit] = (flat if gpu is None else gpu.get(flat)).numpy().tobytes()
        stream.close()
    assert found == contents[1]


def test_on_a_cpu_nothing_is_staged(models):
    stream = LayerStream(prefetch_bytes=1000)
    for model in models:
        assert len(list(stream.iterate_pass(stream.request_pass(model, list(model.manifest.units))))) == 5
    assert stream.gather.staged_bytes == 0
    stream.close()


def test_what_was_overtaken_is_read_again(models):
    stream = LayerStream(prefetch_bytes=1000)
    first, second = (stream.request_pass(model, list(model.manifest.units)) for model in models)
    assert len(list(stream.iterate_pass(second))) == 5
    assert first.cancelled
    assert [unit for unit, _ in stream.iterate_pass(first)] == list(first.units)
    stream.close()


def test_a_window_of_zero_still_makes_progress(models):
    stream = LayerStream(prefetch_bytes=0)
    for model in (*models, *models):
        assert len(list(stream.iterate_pass(stream.request_pass(model, list(model.manifest.units))))) == 5
    stream.close()


def test_a_pass_that_failed_leaves_the_later_ones_as_they_are(models, tmp_path):
    _, url = publish(tiny.model(), tmp_path / "gone")
    with PublishedModel.open(url) as gone:
        for shard in (tmp_path / "gone").rglob("shard-*"):
            shard.unlink()
        stream = LayerStream(prefetch_bytes=10**6)
        broken = stream.request_pass(gone, list(gone.manifest.units))
        whole = stream.request_pass(models[0], list(models[0].manifest.units))
        with stream._changed:
            assert stream._changed.wait_for(lambda: len(whole.ready) == len(whole.units), 30)
        with pytest.raises(StorageError, match="shard-00000"):
            list(stream.iterate_pass(broken))
        assert not whole.cancelled
        before = models[0].bytes_read
        assert len(list(stream.iterate_pass(whole))) == 5
        assert models[0].bytes_read == before
        stream.close()


def test_a_small_model_gets_a_small_buffer_whatever_the_budget(models):
    for model in models:
        stream = LayerStream(prefetch_bytes=2**40)
        units = list(model.manifest.units)
        for _ in range(2):
            assert len(list(stream.iterate_pass(stream.request_pass(model, units)))) == 5
        assert stream.nbytes == stream.meter.drain_peak()
        assert stream.nbytes <= model.manifest.nbytes + 256 * len(units)
        stream.close()


def test_the_next_peak_begins_at_what_is_held():
    meter = ByteMeter()
    meter.add_bytes(5)
    with meter.track_bytes(7):
        pass
    assert (meter.drain_peak(), meter.drain_peak()) == (12, 5)


def test_closing_ends_the_thread_and_whoever_waits(models):
    before = threading.active_count()
    stream = LayerStream(prefetch_bytes=0)
    model = models[0]
    units = stream.iterate_pass(stream.request_pass(model, list(model.manifest.units)))
    _, flat = next(units)
    assert flat.dtype == torch.uint8
    stream.close()
    assert threading.active_count() <= before + 1  # a store's own workers may have started
    assert "layer-stream" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(TeacherError, match="closed"):
        next(units)
    with pytest.raises(TeacherError, match="closed"):
        stream.request_pass(model, ["norm"])
