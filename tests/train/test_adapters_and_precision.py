"""Ranks that train adapters alone, or compute in bfloat16: one launch of two, compared with one process."""

import contextlib
import copy
import functools
import json
import subprocess
import sys
from importlib.util import find_spec

import backend_ranks
import pytest
import torch
from backend_ranks import FILES, assert_same, on_two_ranks, read_state
from safetensors.torch import load_file

from opd.config import TrainConfig
from opd.models.adapters import BASE_DIGEST, AdaptedLM, MergingLM
from opd.models.causal_lm import CausalLM
from opd.ranks import Ranks
from opd.train.backend import TrainingSettings
from opd.train.backends import open_backend
from opd.train.torch_backend import TorchBackend

pytestmark = pytest.mark.slow

STEPS, HALF = 6, 3
SHARED = {"train": {"context_parallel": 2}, "batch": {"sequence_chunk": 8}}
TENSOR = {"train": {"backend": "megatron", "tensor_parallel": 2}}
ADAPTERS = {
    "adapters": {"train": {}},
    "adapters, shared sequences": SHARED,
    "adapters, megatron": TENSOR,
    "adapters, megatron stages": {"train": {"backend": "megatron", "pipeline_parallel": 2}},
}
DISTRIBUTED = {"train": {"backend": "megatron", "distributed_optimizer": True}}
MIXED = {
    "mixed": {"train": {}},
    "mixed, adapters": {"train": {}, "model": {"lora": True}},
    "mixed, shared sequences": {"train": {"context_parallel": 2}},
    "mixed, megatron": TENSOR,
    "mixed, adapters, megatron": TENSOR | {"model": {"lora": True}},
    "mixed, megatron distributed": DISTRIBUTED,
    "mixed, adapters, megatron distributed": DISTRIBUTED | {"model": {"lora": True}},
}
STAGES = {stage: {"train": {"backend": "deepspeed", "zero_stage": stage}} for stage in (1, 2, 3)}
ZERO_ADAPTERS = {f"adapters, zero-{stage}": settings for stage, settings in STAGES.items()}
ZERO = {f"mixed, zero-{stage}": settings for stage, settings in STAGES.items()} | {
    f"mixed, adapters, zero-{stage}": STAGES[stage] | {"model": {"lora": True}} for stage in (2, 3)
}
NO_DEEPSPEED = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs DeepSpeed: .venv/bin/python -m pip install 'opd[deepspeed]'"
)
LEARNING = [*ADAPTERS, *(pytest.param(name, marks=NO_DEEPSPEED) for name in ZERO_ADAPTERS)]
PRECISE = [*MIXED, *(pytest.param(name, marks=NO_DEEPSPEED) for name in ZERO)]
LOSSES = ("kl/mean", "loss/ce")


def one_process(first: int, last: int, state=None):
    """A back end that trains adapters in this process, after steps `first` to `last`, and their metrics."""
    backend = open_alone(backend_ranks.student(lora=True))
    if state is not None:
        backend.load_state(state)
    return backend, backend_ranks.train(backend, first, last)


def open_alone(student: CausalLM) -> TorchBackend:
    return TorchBackend(student, backend_ranks.training())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The folder in which two ranks have left what every task gave."""
    half, _ = one_process(0, HALF)
    whole, first = {"first": 0, "last": STEPS}, {"first": 0, "last": HALF}
    later = {"load": "half", "first": HALF, "last": STEPS}
    tasks = [
        {"name": name + more, "model": {"lora": True}} | settings | steps
        for name, settings in (ADAPTERS | (ZERO_ADAPTERS if find_spec("deepspeed") else {})).items()
        for more, steps in {"": whole, "-half": first, "-resumed": later}.items()
    ]
    mixed = {"dtype": "bfloat16", "batches": "again"}
    run = MIXED | (ZERO if find_spec("deepspeed") else {})
    tasks += [{"name": name} | mixed | settings | whole for name, settings in run.items()]
    return on_two_ranks(tmp_path_factory.mktemp("ranks"), half.state(), tasks)


@pytest.fixture(scope="module")
def adapters_alone():
    pytest.importorskip("peft")
    return one_process(0, STEPS)


@pytest.mark.long
@pytest.mark.parametrize("name", LEARNING)
def test_adapters_learn_on_two_ranks_what_they_learn_on_one(ranks, adapters_alone, name):
    backend, metrics = adapters_alone
    result = json.loads((ranks / name / "result.json").read_text())
    assert_same(result["metrics"], metrics)
    assert metrics[-1]["kl/mean"] != metrics[0]["kl/mean"]
    weights, own = load_file(ranks / name / "weights.safetensors"), dict(backend.weights())
    assert weights.keys() == own.keys()
    assert BASE_DIGEST in weights
    assert all("lora_" in key for key in weights if key != BASE_DIGEST)  # what an engine is sent
    for key, tensor in own.items():
        torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=2e-5)
    engine = MergingLM(backend_ranks.student(), backend_ranks.LORA)
    engine.load_weights(weights.items())
    assert engine.digest() == result["digest"]
    assert_merged(engine, load_file(ranks / name / "plain.safetensors"))


def assert_merged(engine: MergingLM, plain: dict[str, torch.Tensor]) -> None:
    """What engines are sent that know of no adapters is what `engine` has made of them, bit for bit."""
    held = dict(CausalLM.weights(engine))
    assert plain.keys() == held.keys()
    assert all(torch.equal(plain[name], tensor) for name, tensor in held.items())


@pytest.mark.long
@pytest.mark.parametrize("name", LEARNING)
def test_adapters_go_on_with_another_number_of_ranks(ranks, adapters_alone, name):
    _, metrics = adapters_alone
    _, alone = one_process(HALF, STEPS, read_state(ranks / f"{name}-half"))
    assert_same(alone, metrics[HALF:])
    result = json.loads((ranks / f"{name}-resumed" / "result.json").read_text())
    assert_same(result["metrics"], metrics[HALF:])


@pytest.mark.long
@pytest.mark.parametrize("name", PRECISE)
def test_bfloat16_layers_learn_float32_weights(ranks, name):
    for file in FILES:
        kept = read_state(ranks / name)[file]
        assert {str(t.dtype) for key, t in kept.items() if key != BASE_DIGEST} == {"torch.float32"}
    sent = load_file(ranks / name / "weights.safetensors")
    assert {str(t.dtype) for key, t in sent.items() if key != BASE_DIGEST} == {"torch.bfloat16"}
    kept = read_state(ranks / name)["model"]
    assert kept.keys() == sent.keys()
    for key, tensor in sent.items():
        assert torch.equal(tensor, kept[key].to(tensor.dtype))
    # Updates smaller than a rounding of bfloat16 are in them.
    assert any(not torch.equal(kept[key], t.to(kept[key].dtype)) for key, t in sent.items())


@functools.cache
def exact(lora: bool) -> tuple[list[dict[str, float]], dict[str, float]]:
    """The same steps in float64; and how far a forward in bfloat16 is from each at most, by metric."""
    student = backend_ranks.student(lora=lora)
    student.module.double()
    backend, metrics, apart = open_alone(student), [], dict.fromkeys(LOSSES, 0.0)
    for step in range(STEPS):
        rounded = copy.deepcopy(student.module).bfloat16()
        there = open_alone(CausalLM(rounded)).forward_backward(backend_ranks.again(step))
        metrics += backend_ranks.train(backend, step, step + 1, backend_ranks.again)
        apart = {name: max(apart[name], abs(there[name] - metrics[-1][name])) for name in LOSSES}
    return metrics, apart


@pytest.mark.long
@pytest.mark.parametrize("name", PRECISE)
def test_bfloat16_layers_learn_as_float64_ones_within_the_rounding_of_a_forward(ranks, name):
    metrics, apart = exact("adapters" in name)
    found = json.loads((ranks / name / "result.json").read_text())["metrics"]
    for loss in LOSSES:
        fall = metrics[0][loss] - metrics[-1][loss]
        # Every step's gradient is rounded too, and so is where the next one begins.
        assert 8 * apart[loss] < fall
        for mine, theirs in zip(found, metrics, strict=True):
            assert abs(mine[loss] - theirs[loss]) <= 4 * apart[loss]


ALONE = {
    "torch": {},
    "torch, adapters": {"lora": True},
    "megatron": {"backend": "megatron"},
    "megatron, adapters": {"backend": "megatron", "lora": True},
}
ALONE_PRECISE = [*ALONE, pytest.param("deepspeed", marks=NO_DEEPSPEED)]


@contextlib.contextmanager
def alone(name: str, lr: float, dtype: str, precision: str = "mixed"):
    """The back end of a one-process run whose checkpoint is in bfloat16, computing in `dtype`."""
    settings = ALONE.get(name, {"backend": "deepspeed"})

    def load(wanted: str | None, *, empty: bool = False) -> CausalLM:
        model = backend_ranks.student()
        model.module.bfloat16()
        if "lora" not in settings:
            model.module.to(getattr(torch, wanted or dtype))
            return model
        model.module.to(getattr(torch, dtype))
        adapted = AdaptedLM(model, backend_ranks.LORA, "base")
        adapted.keep_adapters_in(getattr(torch, wanted or dtype))
        return adapted

    train = TrainConfig(backend=settings.get("backend", "torch"), precision=precision)
    optim = backend_ranks.OPTIM.model_copy(update={"lr": lr})
    batch = backend_ranks.BATCH.model_copy(update={"max_tokens": 200})
    training = TrainingSettings(optim, batch, backend_ranks.TEMPERATURE, backend_ranks.terms())
    with open_backend(load, train, training, Ranks(), dtype=dtype) as backend:
        yield backend


def steps(backend, first: int, last: int, lr: float) -> None:
    for step in range(first, last):
        backend.forward_backward(backend_ranks.batch(step))
        backend.step(lr)


def learnt(backend) -> torch.Tensor:
    """[P] float32: every weight as it is trained, in one order for all back ends."""
    weights = backend.state()["model"]
    return torch.cat([weights[n].float().reshape(-1) for n in sorted(weights) if n != BASE_DIGEST])


@functools.cache
def movement(name: str, lr: float, dtype: str, precision: str = "mixed") -> torch.Tensor:
    """[P] how far 20 steps took every weight."""
    with alone(name, lr, dtype, precision) as backend:
        first = learnt(backend).clone()
        steps(backend, 0, 20, lr)
        return learnt(backend) - first


@pytest.mark.parametrize("lr", [1e-6, *(pytest.param(lr, marks=pytest.mark.long) for lr in (1e-5, 1e-4))])
@pytest.mark.parametrize("name", ALONE_PRECISE)
def test_training_in_bfloat16_moves_the_weights_as_float32_does(name, lr):
    exactly = movement("torch, adapters" if "adapters" in name else "torch", lr, "float32")
    found = movement(name, lr, "bfloat16")
    assert torch.cosine_similarity(exactly, found, dim=0) >= 0.99
    assert 0.99 < found.norm() / exactly.norm() < 1.01


@pytest.mark.parametrize("name", ALONE_PRECISE)
def test_a_checkpoint_of_bfloat16_training_goes_on_bit_for_bit(name, tmp_path):
    with alone(name, 1e-5, "bfloat16") as backend:
        steps(backend, 0, 2, 1e-5)
        backend_ranks.save_state(tmp_path, backend.state())
        steps(backend, 2, 4, 1e-5)
        expected = learnt(backend).clone()
    with alone(name, 1e-5, "bfloat16") as backend:
        backend.load_state(read_state(tmp_path))
        steps(backend, 2, 4, 1e-5)
        assert torch.equal(learnt(backend), expected)
    assert not torch.equal(expected, expected.bfloat16().float())


FORKS = """
import gc, os, sys, threading
import backend_ranks
import torch
from opd.ranks import Ranks, process_group
from opd.train.fsdp_backend import FSDPBackend

over, forked = threading.Event(), []

def fork():
    child = os.fork()
    if child == 0:
        os._exit(0)
    forked.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

def once(width):
    with process_group():
        student = backend_ranks.student(intermediate_size=width)
        backend = FSDPBackend(student, backend_ranks.training(), Ranks(), torch.bfloat16)
        backend_ranks.train(backend, 0, 1)
        del backend

for width in (48, 80):  # another form of model each time: of a known one the first group is what was learnt
    once(width)
    gc.collect()
    for _ in range(30):  # the stacks of a few dead threads would be kept
        threading.Thread(target=over.wait, daemon=True).start()
thread = threading.Thread(target=fork)
thread.start()
thread.join()
print(*forked)
"""


def test_a_process_that_another_thread_forks_later_ends_well():
    """As a reward's does that uses multiprocessing: it drops what this one has learnt of a process group that
    is gone, and has none of gloo's threads.
    """
    said = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=300)
    assert said.stdout.split() == ["0"], said.stderr


def test_weights_without_masters_are_asked_for_by_name():
    pure = movement("torch", 1e-5, "bfloat16", "pure")
    assert (pure == 0).float().mean() > 0.5
    assert torch.cosine_similarity(movement("torch", 1e-5, "float32"), pure, dim=0) < 0.9
    assert TrainConfig().precision == "mixed"


@NO_DEEPSPEED
def test_zero_3_keeps_nothing_that_it_gathers_for_the_way_back():
    """torch's own product saves a view of the weight: the whole model, if each layer's is gathered."""
    with alone("deepspeed", 1e-3, "float32") as backend:
        linear = [part for part in backend.model.decoder.modules() if isinstance(part, torch.nn.Linear)]
        kept = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            gathered = {part.weight.untyped_storage().data_ptr() for part in linear if part.weight.numel()}
            if tensor.untyped_storage().data_ptr() in gathered and not isinstance(tensor, torch.nn.Parameter):
                kept.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            backend.forward_backward(backend_ranks.batch(0))
        assert len(linear) > 2
        assert kept == []
