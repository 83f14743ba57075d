"""Where tensors go on a machine with several GPUs, as far as a machine without one can tell."""

import threading

import pytest
import torch

from opd.models import attention
from opd.models.attention import AttentionCall, causal_attention, kernels_share_heads
from opd.models.causal_lm import torch_device
from opd.teachers.layer_stream import LayerStream, in_background


@pytest.fixture
def gpus(monkeypatch):
    """Four GPUs, of which each thread works on its own; what was chosen."""
    own, chosen = threading.local(), []

    def choose(device):
        own.index = torch.device(device).index
        chosen.append(own.index)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(own, "index", 0))
    return chosen


@pytest.mark.parametrize("asked", ["auto", "cuda", torch.device("cuda")])
def test_a_device_without_a_number_is_that_of_the_rank(gpus, asked):
    torch.cuda.set_device("cuda:3")
    assert torch_device(asked) == torch.device("cuda", 3)
    assert torch_device("cuda:1") == torch.device("cuda", 1)
    assert torch_device("cpu") == torch.device("cpu")


def test_threads_that_read_teachers_work_on_the_ranks_device(gpus):
    torch.cuda.set_device("cuda:2")
    device = torch_device("auto")
    assert in_background("head", torch.cuda.current_device, device).result() == 2
    assert in_background("head", torch.cuda.current_device, torch.device("cpu")).result() == 0
    stream = LayerStream()
    stream.close()
    stream.gather.device = device
    thread = threading.Thread(target=stream._run)
    thread.start()
    thread.join()
    assert gpus == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float32_on_a_gpu_repeats_keys_that_heads_share(dtype):
    assert kernels_share_heads(torch.device("cpu"), dtype)
    assert kernels_share_heads(torch.device("cuda"), dtype) == (dtype != torch.float32)


def test_repeated_keys_give_what_shared_ones_give(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 8, 5, 4, generator=generator)
    key, value = (torch.randn(2, 2, 5, 4, generator=generator) for _ in range(2))
    call = AttentionCall(0, query, key, value, 0.5)
    shared = causal_attention(query, key, value, call)
    monkeypatch.setattr(attention, "kernels_share_heads", lambda *_: False)
    torch.testing.assert_close(causal_attention(query, key, value, call), shared, rtol=1e-5, atol=1e-6)
