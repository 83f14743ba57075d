"""Where tensors go on a machine with several GPUs, as far as a machine without one can tell."""

import asyncio
import subprocess
import sys
import threading

import pytest
import torch

from opd import ranks
from opd.errors import RanksError
from opd.models import attention
from opd.models.attention import ScoreForm, causal_attention, kernels_share_heads
from opd.models.causal_lm import torch_device
from opd.pipelines.launch.machine import configure_machine
from opd.rollout import sglang_engine
from opd.served.http_client import Server
from opd.teachers.layer_stream import LayerStream, in_background


@pytest.fixture
def gpus(monkeypatch):
    """Four GPUs, of which each thread works on its own; what was chosen."""
    own, chosen = threading.local(), []

    def choose(device):
        own.index = device if isinstance(device, int) else torch.device(device).index
        chosen.append(own.index)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
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
    thread = threading.Thread(target=stream._run_reader)
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
    form = ScoreForm(0.5)
    shared = causal_attention(query, key, value, form)
    monkeypatch.setattr(attention, "kernels_share_heads", lambda *_: False)
    torch.testing.assert_close(causal_attention(query, key, value, form), shared, rtol=1e-5, atol=1e-6)


def test_a_process_works_on_the_device_that_the_recipe_names(gpus, monkeypatch):
    """What is told no number, FSDP for one, takes the current device."""
    threads = torch.get_num_threads()
    configure_machine(threads, False, "cuda:2")
    assert gpus == [2]
    configure_machine(threads, False, "auto")
    assert gpus == [2, 2]
    configure_machine(threads, False, "cpu")
    assert gpus == [2, 2]


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1"])
def test_a_rank_takes_the_gpu_of_its_number(gpus, monkeypatch, device):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(ranks, "_find_others", alone)
    with pytest.raises(RanksError, match="found no others"), ranks.join_ranks(device, 1.0):
        pass
    assert gpus == [1]


def test_ranks_do_not_share_a_gpu(gpus, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    said = "model.device is cuda:0, but rank 1 works on cuda:1.*set model.device to auto"
    with pytest.raises(RanksError, match=said), ranks.join_ranks("cuda:0", 1.0):
        pass


def alone(*_):
    raise RuntimeError("nobody")


def test_a_served_worker_is_sent_weights_from_the_ranks_device(gpus, monkeypatch):
    """Whatever thread sends them."""
    torch.cuda.set_device("cuda:2")
    push = sglang_engine.TensorPush()
    push.prepare([], 1)
    monkeypatch.setattr(sglang_engine, "weight_group", lambda *_: None)

    async def ask(server, method, path, body):
        return {"device": "cuda", "tp_size": 1, "success": True}

    def join():
        return asyncio.run(push._join_group(ask, Server("http://127.0.0.1:1")))[2]

    assert in_background("loop", join, torch.device("cpu")).result() == torch.device("cuda", 2)


_TINY = """
import threading
import numpy as np
import torch
from opd.pipelines.launch.machine import configure_machine

tiny = torch.from_numpy(np.full(1 << 20, 2.0**-140, np.float32))  # enough for both threads to have a part
configure_machine(2, False)
assert int((tiny * 1.0).count_nonzero()) == 0
found = []
thread = threading.Thread(target=lambda: found.append(int((tiny * 1.0).count_nonzero())))
thread.start()
thread.join()
assert found == [0]
"""


@pytest.mark.slow
def test_numbers_that_are_not_normal_are_none_in_any_thread() -> None:
    """A CPU would take a hundred times as long for their products."""
    subprocess.run([sys.executable, "-c", _TINY], check=True, timeout=120)
