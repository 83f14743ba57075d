"""Bundles by layout, and tensors through the object store; no cluster is needed."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recipes import tiny_recipe

from opd.child import Child
from opd.config import RayLaunch
from opd.config.servers import ServerGroupConfig
from opd.errors import ConfigError
from opd.kernels.head import Head
from opd.pipelines.launch.ray.actors import ActorLostError, PackedHead, PackedTensor, no_memory
from opd.pipelines.launch.ray.cluster import (
    BundleLayout,
    actor_names,
    descendant_processes,
    end_left_over,
    needed_launch,
    number_of,
    options_of,
    require_gpus_asked,
    resources_of,
    role_of,
    server_names,
)
from opd.pipelines.launch.ray.teacher import Assignment, RayTeacher
from opd.pipelines.launch.started_server import GUARD
from opd.rollout.weight_sync import bucket_tensors

RESOURCES = {
    "trainer": {"cpus": 2, "gpus": 0.5},
    "engine": {"cpus": 1, "gpus": 0.25, "memory_mb": 100},
    "teacher": {"cpus": 0, "custom": {"big": 1}},
}


@given(
    engines=st.integers(1, 9),
    teachers=st.integers(0, 5),
    ranks=st.integers(1, 4),
    layout=st.sampled_from(["colocated", "disaggregated"]),
)
def test_bundles_hold_what_their_actors_ask_for(engines, teachers, ranks, layout):
    launch = RayLaunch.model_validate(
        {"engines": engines, "teachers": teachers, "layout": layout, **RESOURCES}
    )
    found = BundleLayout.from_launch(launch, ranks)
    assert list(found.places) == actor_names(launch, ranks)
    asked = [Counter() for _ in found.bundles]
    for name, place in found.places.items():
        asked[place].update(resources_of(getattr(launch, role_of(name))))
        if layout == "colocated":
            assert place == number_of(name) % ranks
    assert [dict(sums) for sums in asked] == found.bundles
    assert len(found.bundles) == (ranks if layout == "colocated" else ranks + engines + teachers)


@pytest.mark.parametrize("layout", ["colocated", "disaggregated"])
def test_each_server_has_a_bundle_with_gpus_for_all_its_ranks(layout):
    groups = {
        "math": ServerGroupConfig(count=2, tensor_parallel=4),
        "student": ServerGroupConfig(tensor_parallel=1),
    }
    launch = RayLaunch.model_validate({"layout": layout, **RESOURCES, "server": {"cpus": 3, "gpus": 1}})
    assert server_names(groups) == {"math": ["server-0", "server-1"], "student": ["server-2"]}
    found = BundleLayout.from_launch(launch, groups=groups)
    own = [found.places[f"server-{number}"] for number in range(3)]
    assert own == list(range(len(found.bundles)))[-3:]
    assert [found.bundles[place] for place in own] == [{"CPU": 3.0, "GPU": g} for g in (4.0, 4.0, 1.0)]
    assert [options_of(found.needs[f"server-{n}"])["num_gpus"] for n in range(3)] == [4.0, 4.0, 1.0]
    assert found.strategy == ("PACK" if layout == "colocated" else "SPREAD")


def test_nothing_is_reserved_for_what_is_served():
    url = ["http://127.0.0.1:1"]
    own = {"type": "sglang", "urls": url}
    teachers = {name: {**own, "path": "x"} for name in ("sort", "add3")}

    def roles(**changes):
        layout = BundleLayout.from_launch(needed_launch(tiny_recipe(launch="ray", **changes)))
        return list(layout.places), len(layout.bundles)

    assert roles() == (["trainer", "engine-0", "teacher-0"], 1)
    assert roles(rollout={"engine": own}) == (["trainer", "teacher-0"], 1)
    assert roles(teachers=teachers) == (["trainer", "engine-0"], 1)
    itself = {name: {"type": "student", "moving_average": 0.9} for name in ("sort", "add3")}
    assert roles(teachers=itself, baselines={"methods": []}) == (["trainer", "engine-0"], 1)
    assert roles(teachers={"sort": teachers["sort"]})[0] == ["trainer", "engine-0", "teacher-0"]
    assert roles(rollout={"engine": own}, teachers=teachers) == (["trainer"], 1)


def test_gpus_that_nobody_asks_for_are_no_reason_to_compute_on_a_cpu():
    def asked(device: str, there: float, **launch) -> None:
        model = tiny_recipe().model.model_dump(mode="json", exclude_none=True) | {"device": device}
        require_gpus_asked(tiny_recipe(launch={"type": "ray", **launch}, model=model), there)

    whole = {"gpus": 1}
    asked("auto", 0)
    asked("cpu", 8)
    asked("auto", 2, trainer=whole, engine={"gpus": 0.5}, teacher={"gpus": 0.5})
    asked("auto", 2, trainer=whole, engine=whole, teachers=0)
    for role, others in (("trainer", {}), ("engine", {"trainer": whole})):
        said = rf"launch\.{role}\.gpus is 0, so Ray hides the GPUs that are there \(2\) .* set it to 1"
        with pytest.raises(ConfigError, match=said):
            asked("auto", 2, **others)


def test_resources_become_options():
    launch = RayLaunch.model_validate(RESOURCES)
    assert options_of(launch.engine) == {"num_cpus": 1.0, "num_gpus": 0.25, "memory": 100 << 20}
    assert options_of(launch.teacher) == {"num_cpus": 0.0, "num_gpus": 0.0, "resources": {"big": 1.0}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_a_tensor_comes_out_as_it_went_in(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    packed = PackedTensor.from_tensor(tensor)
    packed.data.flags.writeable = False
    again = packed.to_tensor()
    assert again.dtype == dtype
    assert again.shape == shape
    assert torch.equal(again, tensor)
    if tensor.numel():
        assert again.data_ptr() == packed.data.ctypes.data, "it was copied"


def test_a_tensor_keeps_its_bytes_alive():
    packed = PackedTensor.from_tensor(torch.arange(1000, dtype=torch.float32))
    again = PackedTensor(np.array(packed.data), packed.dtype, packed.shape).to_tensor()
    del packed
    assert torch.equal(again, torch.arange(1000, dtype=torch.float32))


def test_a_head_comes_out_as_it_went_in():
    head = Head(torch.randn(7, 4), torch.randn(7), scale=2.0, softcap=5.0, vocab_size=6)
    again = PackedHead.from_head(head).to_head(torch.device("cpu"))
    hidden = torch.randn(3, 4)
    assert torch.equal(head.logits(hidden), again.logits(hidden))


def test_a_teacher_that_was_lost_is_given_time_to_load_again():
    """As at the first time; else one answer of each of the actor's teachers is waited for."""
    lost, told, packed = [False, False, True, False, False], [], PackedTensor.from_tensor(torch.zeros(1, 2))

    def get(reference, seconds):
        told.append(seconds)
        if lost[len(told) - 1]:
            raise ActorLostError("teacher-0 died")
        return packed

    limits = SimpleNamespace(step_timeout=1.0, start_timeout=10.0)
    remote = SimpleNamespace(name="teacher-0", limits=limits, get=get)
    remote.send, remote.await_return = lambda *asked: None, lambda: None
    teacher = RayTeacher("a", remote, Assignment("merge", ("a", "b"), 8), torch.device("cpu"))  # type: ignore[arg-type]
    for _ in range(4):
        teacher.score([])
    assert told == [12.0, 2.0, 2.0, 12.0, 2.0]


@given(sizes=st.lists(st.integers(0, 40), max_size=12), limit=st.integers(1, 200))
def test_pieces_are_all_weights_in_order(sizes, limit):
    weights = [(f"w{i}", torch.full((size,), float(i))) for i, size in enumerate(sizes)]
    pieces = list(bucket_tensors(weights, limit))
    assert [name for piece in pieces for name, _ in piece] == [name for name, _ in weights]
    for piece in pieces:
        assert len(piece) == 1 or sum(tensor.nbytes for _, tensor in piece) <= limit


def test_processes_left_over_are_ended_and_no_other():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        while len(found := descendant_processes(process.pid)) < 1:
            pass
        everyone = descendant_processes(os.getpid())  # among them what earlier tests have started
        assert {process.pid, *found} <= set(everyone)
        family = {pid: everyone[pid] for pid in (process.pid, *found)}
        end_left_over(dict.fromkeys(family, -1), patience=0.0)  # other processes of these ids
        assert process.poll() is None
        end_left_over(family, patience=0.0)
        assert process.wait(120) == -9
    finally:
        process.kill()
        process.communicate()


HOLDS_ON = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, flush=True)
time.sleep(1000)
"""


def test_a_guard_among_them_ends_its_server_first_and_what_that_has_started():
    command = [sys.executable, "-I", str(GUARD), "1.0", sys.executable, "-c", HOLDS_ON]
    read, write = os.pipe()
    guard = Child(command, log=write)
    os.close(write)
    with open(read) as said:
        child = int(said.readline())
    family = {pid: start for pid, start in descendant_processes(guard.pid).items() if pid != child}
    guard.channel.close()
    end_left_over(family, patience=0.0)
    left = Path(f"/proc/{child}").exists()
    if left:
        os.kill(child, signal.SIGKILL)
    assert guard.wait(60) == 0
    assert not left


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("server-0", "give it a larger node"),
        ("engine-1", "lower runtime.decode.kv_cache_mb, or give it a larger node"),
        ("trainer", "lower batch.max_tokens, or give it a larger node"),
    ],
)
def test_an_actor_without_memory_names_a_setting_of_its_own(name, mend):
    said = no_memory(name, "no more is free")
    assert said == f"{name} ran out of memory (no more is free); {mend}, then continue with --resume."
