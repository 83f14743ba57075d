"""Attention and whole models on a device: the CPU's numbers, fused kernels where there are some, no waits."""

import numpy as np
import pretend_cuda
import pretend_kernels
import pytest
import tiny
import torch

from opd.models import attention, causal_lm, long_sequence
from opd.models.attention import AttentionCall, PackedAttention
from opd.models.causal_lm import CausalLM, DigestedTensors, WeightsDigest, weights_digest
from opd.models.checkpoint import save_checkpoint
from opd.models.long_sequence import LayerMemory

LENGTHS = (5, 12, 3, 40, 12)
EXACT = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def leaves(dtype: torch.dtype, heads: int, shared: int) -> list[torch.Tensor]:
    """Query, key, value [1, H, T, d] of packed sequences, and what arrives from above [1, T, H, d]."""
    generator = torch.Generator().manual_seed(0)
    tokens, size = sum(LENGTHS), 16
    made = [torch.randn(1, h, tokens, size, generator=generator) for h in (heads, shared, shared)]
    return [x.to(dtype) for x in [*made, torch.randn(1, tokens, heads, size, generator=generator)]]


def attend(given: list[torch.Tensor], **call) -> list[torch.Tensor]:
    """The output and the three gradients."""
    inputs = [x.clone().requires_grad_() for x in given[:3]]
    bounds = np.concatenate([[0], np.cumsum(LENGTHS)])
    output = PackedAttention(bounds)(AttentionCall(0, *inputs, scaling=0.3, **call))
    return [output.detach(), *torch.autograd.grad(output, inputs, given[3])]


@pytest.mark.some(9)
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("shared", [4, 2], ids=["every head its own", "heads share keys"])
@pytest.mark.parametrize(
    ("call", "masked"),
    [
        ({}, 1024),
        ({"sliding_window": 8}, 1024),
        ({"softcap": 2.0}, 1024),
        ({"softcap": 2.0, "sliding_window": 8}, 16),
        ({"sliding_window": 8}, 16),
    ],
    ids=str,
)
def test_packed_attention(gpu, monkeypatch, dtype, shared, call, masked):
    monkeypatch.setattr(attention, "_MASKED", masked)  # longer ones go block by block
    given = leaves(dtype, 4, shared)
    exact = attend([x.double() for x in given], **call)
    here = [gpu.put(x) for x in given]
    with gpu.counted() as seen:
        found = attend(here, **call)
    assert not seen.waits, seen
    if isinstance(gpu, pretend_cuda.Gpu) and not call:
        assert seen.launches["attention"] == seen.launches["attention_backward"] == 2, seen  # two buckets
    for ours, theirs in zip(found, exact, strict=True):
        difference = (gpu.get(ours).double() - theirs).norm() / theirs.norm()
        assert difference < EXACT[dtype]


LONGER = (5, 120, 3, 400, 120)
"""More than a block, with blocks that are seen whole."""


@pytest.fixture
def kernels(gpu, monkeypatch):
    """The device has kernels of packed attention: its own, or such as are not there."""
    if not isinstance(gpu, pretend_cuda.Gpu):
        yield gpu
        return
    with pretend_kernels.attention_kernels(monkeypatch):
        yield gpu


@pytest.mark.some(5)
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize(
    "call", [{}, {"sliding_window": 300}, {"softcap": 2.0}, {"softcap": 2.0, "sliding_window": 8}], ids=str
)
def test_packed_attention_is_one_kernel(kernels, monkeypatch, dtype, call):
    monkeypatch.setitem(globals(), "LENGTHS", LONGER)
    given = leaves(dtype, 4, 2)
    exact = attend([x.double() for x in given], **call)
    here = [kernels.put(x) for x in given]
    attend(here, **call)  # where a kernel is compiled, it is tried too
    with kernels.counted() as seen:
        found = attend(here, **call)
    assert not seen.waits, seen
    if isinstance(kernels, pretend_cuda.Gpu):
        assert (seen.launches["flex"], seen.launches["flex_backward"]) == (1, 2), seen
        assert seen.launches.total() == 6 + ("softcap" in call), seen  # three are the clones here
    for ours, theirs in zip(found, exact, strict=True):
        assert (kernels.get(ours).double() - theirs).norm() / theirs.norm() < EXACT[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("call", [{}, {"sliding_window": 8}], ids=str)
def test_prefill_is_one_kernel_that_nothing_compiles(kernels, dtype, call):
    given = leaves(dtype, 4, 2)[:3]
    bounds = np.concatenate([[0], np.cumsum(LENGTHS)])
    exact = PackedAttention(bounds)(AttentionCall(0, *(x.double() for x in given), scaling=0.3, **call))
    here = [kernels.put(x) for x in given]
    with torch.inference_mode():
        PackedAttention(bounds)(AttentionCall(0, *here, scaling=0.3, **call))
        with kernels.counted() as seen:
            found = PackedAttention(bounds)(AttentionCall(0, *here, scaling=0.3, **call))
    assert not seen.waits, seen
    if isinstance(kernels, pretend_cuda.Gpu):
        assert seen.launches == {"torch_attn::_varlen_attn": 1}, seen
    assert (kernels.get(found).double() - exact).norm() / exact.norm() < EXACT[dtype]


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_is_loaded_onto_the_device_and_checked_there(gpu, tmp_path, dtype):
    folder = save_checkpoint(tiny.model(), tiny.tokenizer(), tmp_path / "m", {})
    plain = CausalLM.from_pretrained(folder, dtype=dtype)
    model = CausalLM.from_pretrained(folder, dtype=dtype, device=str(gpu.device))
    assert model.device == gpu.device
    assert len({id(p) for p in model.module.parameters()}) == len({id(p) for p in plain.module.parameters()})
    ids = torch.arange(13)
    bounds, exact = [0, 5, 13], 1e-5 if dtype == "float32" else 2e-2
    with torch.no_grad():
        expected = plain.hidden(ids, ids, bounds)
        for memory in (LayerMemory(), LayerMemory(chunk=4)):
            found = model.hidden(ids.to(model.device), ids.to(model.device), bounds, memory)
            torch.testing.assert_close(gpu.get(found), expected, rtol=exact, atol=exact)
    assert model.digest() == plain.digest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("count", [0, 1, 16, 63, 1000])
def test_a_digest_of_the_device_is_that_of_a_cpu(gpu, monkeypatch, dtype, count):
    """Part by part through two pinned buffers, each of which is digested before it is written again."""
    monkeypatch.setattr(causal_lm, "STAGED_BYTES", 64)
    value = (torch.arange(count) * 7 % 251).to(dtype)
    whole = weights_digest([("a", value), ("b", value[:5])])
    there = gpu.put(value)
    with gpu.counted() as seen:
        assert weights_digest([("a", there), ("b", there[:5])]) == whole
    assert not any("copy" in wait for wait in seen.waits), seen
    strided = gpu.put(torch.stack([value, value], dim=1))[:, 0]
    assert weights_digest([("a", strided), ("b", there[:5])]) == whole


def test_the_next_part_is_on_its_way_while_one_is_digested(pretended, monkeypatch):
    monkeypatch.setattr(causal_lm, "STAGED_BYTES", 16)
    there, begun = pretended.put(torch.arange(10.0)), []
    for index, part in enumerate(causal_lm._staged_chunks(there)):
        begun.append(pretended.counts.copies["to the host"])
        assert bytes(part) == np.arange(4 * index, min(4 * index + 4, 10), dtype=np.float32).tobytes()
    assert begun == [2, 3, 3]


def test_weights_are_copied_and_proven_on_the_device(gpu):
    trained, held = gpu.model(tiny.model(seed=1)), gpu.model(tiny.model(seed=2))
    sent, found = WeightsDigest(quick=True), WeightsDigest(quick=True)
    with gpu.counted() as seen:
        held.load_weights(DigestedTensors(trained.weights(), sent), found)
    assert sent.hex_digest() == found.hex_digest() == tiny.model(seed=1).quick_digest()
    assert not any("copy" in wait for wait in seen.waits), seen


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "memory", [LayerMemory(), LayerMemory(recompute=True), LayerMemory(chunk=4)], ids=str
)
def test_a_forward_and_its_backward_do_not_wait(gpu, memory):
    model = gpu.model(tiny.model())
    model.pieces_checked = True
    ids = gpu.put(torch.arange(13))
    with gpu.counted() as seen:
        model.hidden(ids, ids, [0, 5, 13], memory).sum().backward()
    assert not seen.waits, seen


def test_layers_inputs_wait_in_the_hosts_memory_where_they_would_take_much_of_the_devices(gpu, monkeypatch):
    model = gpu.model(tiny.model())
    model.pieces_checked = True
    ids = gpu.put(torch.arange(13))

    def gradients() -> list[torch.Tensor]:
        model.module.zero_grad()
        model.hidden(ids, ids, [0, 5, 13], LayerMemory(chunk=4)).sum().backward()
        return [gpu.get(p.grad) for p in model.module.parameters() if p.grad is not None]

    with gpu.counted() as before:
        expected = gradients()
    monkeypatch.setattr(long_sequence, "HOST_SHARE", 1 << 40)
    with gpu.counted() as seen:
        model.module.zero_grad()
        model.hidden(ids, ids, [0, 5, 13], LayerMemory(chunk=4)).sum().backward()
    assert not seen.waits, seen
    if isinstance(gpu, pretend_cuda.Gpu):
        inputs = len(model.layers) + 1  # and the norm's
        assert seen.copies["to the host"] == inputs
        assert seen.copies["to the device"] - before.copies["to the device"] == inputs
        assert seen.unpinned_bytes == 0
    for ours, theirs in zip(gradients(), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_without_pinned_memory_layers_inputs_stay_on_the_device(pretended, monkeypatch):
    there, empty = pretended.put(torch.arange(3.0)).requires_grad_(), torch.empty

    def refused(*shape, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", refused)
    with pretended.counted() as seen:
        with long_sequence.save_on_host():
            output = there.exp()
        output.sum().backward()
    assert seen.copies.total() == 0
    assert there.grad is not None
    torch.testing.assert_close(pretended.get(there.grad), torch.arange(3.0).exp())


@pytest.fixture
def host(monkeypatch):
    """Memory of a host on which nothing was pinned yet, in a list of one number."""
    bytes_free = [1 << 40]
    monkeypatch.setattr(long_sequence, "free_memory", lambda: bytes_free[0])
    monkeypatch.setattr(long_sequence, "_PINNED", {})
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return bytes_free


@pytest.mark.parametrize(
    ("count", "room", "wanted"), [(4, 1 << 40, False), (16, 1 << 40, True), (16, 1 << 32, False)]
)
def test_little_stays_on_the_device_and_what_the_host_cannot_hold(pretended, host, count, room, wanted):
    host[0] = room
    assert long_sequence.needs_host(count, 1 << 28, pretended.device) == wanted


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        ({}, True),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}, False),
        ({"WORLD_SIZE": "8"}, False),
        ({"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "8"}, True),
    ],
    ids=["alone", "of torchrun", "each with one device in sight", "one a machine"],
)
def test_ranks_of_a_machine_share_its_memory(pretended, host, monkeypatch, ranks, wanted):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    host[0] = 1 << 34
    assert long_sequence.needs_host(16, 1 << 28, pretended.device) == wanted


def test_a_later_micro_batch_waits_where_the_first_did(pretended, host, monkeypatch):
    """The memory that the first has pinned is kept for the next, but no longer free."""
    model = pretended.model(tiny.model())
    model.pieces_checked = True
    monkeypatch.setattr(long_sequence, "HOST_SHARE", 1 << 40)

    def waiting(tokens: int) -> int:
        ids = pretended.put(torch.arange(tokens) % model.vocab_size)
        with pretended.counted() as seen:
            model.hidden(ids, ids, [0, tokens], LayerMemory(chunk=4)).sum().backward()
        return seen.copies["to the host"]

    inputs = len(model.layers) + 1
    assert waiting(16) == inputs
    host[0] = 0
    assert waiting(16) == inputs
    assert waiting(13) == inputs  # of the same power of two
    assert waiting(32) == 0
