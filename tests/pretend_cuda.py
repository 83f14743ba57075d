"""A GPU that is not there: tensors that say they are on it, while the CPU computes what they hold.

    with pretend_cuda.gpu() as gpu:
        model = gpu.model(tiny.model())
        with gpu.counted() as seen:
            model.run(...)
        assert len(seen.waits) <= 3, seen

Every operation on such a tensor passes through `Gpu.run`, which holds it to what CUDA would: tensors of two
devices do not meet, a device without a number is the one that the *thread* works on (the first, until the
thread is told another), and the host waits where it reads a number, asks how many there are of something, or
copies memory that is not pinned and does not say `non_blocking`. Waits and launches are counted; the numbers
are the CPU's. A copy between pinned memory and the device that says `non_blocking` is done as late as CUDA
may do it: when its stream is waited for, by the host or by another stream, or has work behind it. Who reads
or writes such memory too early gets other numbers. What no such machine shows: times, memory, the order of
kernels on several streams, and what kernels CUDA has.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretend_graph import Recording
from torch import Tensor, nn
from torch.utils import _device, _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from opd.models import attention

ROOT = Path(__file__).resolve().parents[1]
READS = ("_local_scalar_dense", "equal", "is_nonzero")
"""Operations that return a number to the host."""
SIZED = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")
"""Operations whose result has a size that only the device knows."""
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
ALLOCATES = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
)
NAME = "a GPU that is not there"
WHOLE = ("rms_norm", "_fused_rms_norm", "_fused_rms_norm_backward")
"""One kernel on CUDA, put together from others elsewhere."""


@dataclass
class Counts:
    """What one thread asked of the device."""

    waits: list[str] = field(default_factory=list)
    """What the host waited for, and where."""
    launches: Counter[str] = field(default_factory=Counter)
    """Kernels by operation, each operation as one: views, memory and copies to and from the host are none."""
    copies: Counter[str] = field(default_factory=Counter)
    """To and from the device."""
    unpinned_bytes: int = 0
    """Copied from or to memory of the host that is not pinned."""
    stream_waits: int = 0
    """How often one stream was told to wait for another: the host does not."""

    def __str__(self) -> str:
        parts = [f"{len(self.waits)} waits", *self.waits, f"{self.launches.total()} launches {self.launches}"]
        return "\n".join([*parts, f"copies {self.copies}"])


class OnDevice(Tensor):
    """A tensor on the pretended device; `host` is what it holds.

    To Python it is CUDA's. To torch's C++ it is one of the meta device, which needs no library and whose
    backwards run in the thread that asks for them.
    """

    host: Tensor
    where: torch.device

    @staticmethod
    def __new__(cls, host: Tensor, where: torch.device) -> OnDevice:
        with torch.inference_mode(False):  # as views of tensors that were made outside of it must be
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                host.shape,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device="meta",
            )
        made.host, made.where = host, where
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return current().run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        return self.where

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_meta(self) -> bool:
        return False

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        options: dict[str, Any] = {"copy": kwargs.pop("copy", False)}
        device, dtype, options["non_blocking"], form = torch._C._nn._parse_to(*args, **kwargs)
        if form is not None:
            options["memory_format"] = form
        if device is None or device == self.where:
            return super().to(dtype or self.dtype, **options)
        return super().to(device, dtype or self.dtype, **options)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def __repr__(self) -> str:
        return f"OnDevice({self.host!r}, {self.device})"


class _Mode(TorchDispatchMode):
    """Hands what makes tensors to the device as well; one for each thread."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self._gpu.run(func, args, kwargs or {})


class Gpu:
    """The device `cuda:number` of a machine with several."""

    def __init__(self, number: int) -> None:
        self.device = torch.device("cuda", number)
        self._thread = threading.local()
        self.by_thread: dict[str, Counts] = {}
        self.default = _Stream(self.device)
        self._pinned: list[Tensor] = []
        self.pools: list[object] = []
        self.lock = threading.RLock()
        """Of what all streams have still to do."""

    @property
    def stream(self) -> _Stream:
        """The one that this thread's work goes to."""
        return getattr(self._thread, "stream", self.default)

    @contextmanager
    def on_stream(self, stream: _Stream | None) -> Iterator[None]:
        """`torch.cuda.stream`."""
        before = self.stream
        self._thread.stream = stream or before
        try:
            yield
        finally:
            self._thread.stream = before

    def pinned(self, value: Tensor) -> bool:
        """Whether `value`, of the CPU, lies in pinned memory."""
        place = value.untyped_storage().data_ptr()
        return any(place == known.untyped_storage().data_ptr() for known in self._pinned)

    @property
    def current(self) -> int:
        """The device that this thread works on."""
        return getattr(self._thread, "number", 0)

    def new_pool(self) -> object:
        """`torch.cuda.graph_pool_handle`."""
        self.pools.append(object())
        return self.pools[-1]

    def choose(self, device: Any) -> None:
        """`torch.cuda.set_device`."""
        found = device if isinstance(device, int) else torch.device(device).index
        self._thread.number = self.current if found is None else found

    @contextmanager
    def chosen(self, device: Any) -> Iterator[None]:
        """`torch.cuda.device`, `torch.cuda.device_of`."""
        before = self.current
        self.choose(device.device if isinstance(device, Tensor) else device)
        try:
            yield
        finally:
            self.choose(before)

    @property
    def counts(self) -> Counts:
        """Of this thread."""
        return self.by_thread.setdefault(threading.current_thread().name, Counts())

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """What this thread asks of the device while the block runs."""
        name = threading.current_thread().name
        before, own = self.by_thread.get(name), Counts()
        self.by_thread[name] = own
        try:
            yield own
        finally:
            self.by_thread[name] = before or Counts()

    def wait(self, reason: str) -> None:
        """The host waits for the device."""
        if self.recording is not None:
            self.recording.refuse(reason)
        here = [
            f"{Path(f.filename).relative_to(ROOT)}:{f.lineno}" for f in traceback.extract_stack() if _ours(f)
        ]
        self.counts.waits.append(f"{reason} at {' < '.join(reversed(here[-3:]))}")

    def put(self, value: Tensor) -> Tensor:
        """`value` of the CPU on the device, uncounted."""
        with no_modes():
            return OnDevice(value.detach().clone(), self.device)

    def get(self, value: Tensor) -> Tensor:
        """What `value` holds for this thread's stream, uncounted."""
        self.stream.finish()
        return value.host if isinstance(value, OnDevice) else value.detach()

    def model(self, model: Any) -> Any:
        """`model`, a `CausalLM` of the CPU, with its weights on the device; tied ones stay tied."""
        moved: dict[int, nn.Parameter] = {}
        for part in model.module.modules():
            for name, old in part._parameters.items():
                if old is not None:
                    new = nn.Parameter(self.put(old), requires_grad=old.requires_grad)
                    part._parameters[name] = moved.setdefault(id(old), new)
            for name, old in part._buffers.items():
                if old is not None:
                    part._buffers[name] = self.put(old)
        return model

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`func` as the device would do it."""
        name = func._schema.name.removeprefix("aten::")
        if _is_composite(func) and name not in WHOLE:
            with _Mode(self):
                return func.decompose(*args, **kwargs)
        mine = [x for x in tree_leaves((args, kwargs)) if isinstance(x, OnDevice)]
        asked = kwargs.get("device")
        if asked is not None and asked.type == "meta":
            if mine:
                asked = None  # like the tensor that was given
            elif not any(isinstance(x, Tensor) for x in tree_leaves((args, kwargs))) and not _meta_is_meant():
                asked = self.device  # torch's own code, like a tensor that it was given
        if not mine and (asked is None or asked.type != "cuda"):
            return self._on_host(func, args, kwargs)
        if name in ("_to_copy", "copy_"):
            return self._copy(func, name, asked, args, kwargs)
        where = self._place(asked, mine)
        if asked is None:
            _check(name, args, kwargs, mine)
        self._count(func, name, args, kwargs)
        if name not in ALLOCATES and not func.is_view:
            self.stream.finish()
        return _back(self._do(func, name, *_hosts(args, kwargs)), mine, where)

    @property
    def recording(self) -> Recording | None:
        """What this thread captures."""
        return getattr(self._thread, "recording", None)

    @recording.setter
    def recording(self, value: Recording | None) -> None:
        self._thread.recording = value

    def _do(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Compute, and record what is captured."""
        run = partial(_compute, func, name)
        if self.recording is None:
            return run(args, kwargs)
        return self.recording.do(
            lambda *args, **kwargs: run(args, kwargs), args, kwargs, allocates=name in ALLOCATES
        )

    def _launch(self, name: str) -> None:
        if self.recording is None:
            self.counts.launches[name] += 1

    def _place(self, asked: torch.device | None, mine: list[OnDevice]) -> torch.device:
        """Where results go."""
        if asked is None:
            return mine[0].device
        if asked.type == "cuda" and asked.index is None:
            return torch.device("cuda", self.current)
        return asked

    def _on_host(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func._schema.name in ("aten::_pin_memory", "aten::pin_memory"):
            self._pinned.append(args[0].clone())
            return self._pinned[-1]
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        self._pinned.append(func(*args, **kwargs | {"pin_memory": False}))
        return self._pinned[-1]

    def _copy(
        self, func: Any, name: str, asked: torch.device | None, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Between host and device, or from one type to another on the device."""
        if name == "copy_":
            target, source = args[:2]
            waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            where = target.device
        else:
            source, waits = args[0], not kwargs.get("non_blocking")
            where = self._place(asked, [source])
        if where.type == "cuda" and isinstance(source, OnDevice):
            if where != source.device:
                raise RuntimeError(f"a tensor is copied from {source.device} to {where}")
            self._launch(name)
        else:
            way = "to the device" if where.type == "cuda" else "to the host"
            self.counts.copies[way] += 1
            if self.recording is not None:
                self.recording.refuse(f"copy {way}")
            if waits or (way == "to the host" and name == "_to_copy"):
                self.wait(f"copy {way}")
        on_host, options = _hosts(args, kwargs)
        near = [x for x in args[:2] if isinstance(x, Tensor) and not isinstance(x, OnDevice)]
        if not waits and name == "copy_" and near and self.pinned(near[0]):
            self.stream.later(lambda: func(*on_host, **options))
            return args[0]
        self.counts.unpinned_bytes += sum(x.nbytes for x in near if not self.pinned(x))
        self.stream.finish()
        out = self._do(func, name, on_host, options)
        if name == "copy_":
            return args[0]
        return OnDevice(out, where) if where.type == "cuda" else out

    def _count(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        if name in READS:
            self.wait("read a number")
        elif name in SIZED or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.wait(f"the size of {name}")
        elif name in INDEXED:
            for index in args[1]:
                if index is not None and not isinstance(index, OnDevice):
                    self.wait("an index of the host")
                elif index is not None and index.dtype in (torch.bool, torch.uint8):
                    self.wait("the size of a mask")
        if name not in (*ALLOCATES, *READS) and not func.is_view:
            self._launch(name)


def _check(name: str, args: tuple, kwargs: dict[str, Any], mine: list[OnDevice]) -> None:
    """Raise what CUDA raises for tensors of several devices; numbers and indices alone may be the host's."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    strangers = [x for x in given if not isinstance(x, OnDevice) and x.dim() > 0]
    if name in INDEXED:
        strangers = [x for x in strangers if x.dtype.is_floating_point]
    if strangers or len({x.device for x in mine}) > 1:
        raise RuntimeError(f"aten::{name} was given tensors of {sorted({str(x.device) for x in given})}")


def _meta_is_meant() -> bool:
    found = _device.CURRENT_DEVICE
    return found is not None and found.type == "meta"


def _ours(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    return path.is_relative_to(ROOT) and ".venv" not in path.parts and path != Path(__file__)


def _is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _hosts(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The same arguments of the CPU."""

    def host(value: Any) -> Any:
        return value.host if isinstance(value, OnDevice) else value

    own = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    if "device" in kwargs:
        own["device"] = None if kwargs["device"] is None else torch.device("cpu")
    return tree_map(host, args), tree_map(host, own)


def _compute(func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """`func` on the CPU; products that only CUDA has, of 16-bit factors into float32, are put together."""
    if name == "mm":
        args = tuple(_without_gaps(x) if isinstance(x, Tensor) else x for x in args)
    if name == "histc" and not args[0].is_floating_point():  # which only CUDA counts
        return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    if name not in ("mm", "bmm", "addmm", "baddbmm") or func._overloadname not in ("dtype", "dtype_out"):
        return func(*args, **kwargs)
    bound = dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | kwargs
    wide = bound["out_dtype"]
    if name in ("mm", "bmm"):
        found = torch.matmul(bound["self"].to(wide), bound["mat2"].to(wide))
    else:
        product = torch.matmul(bound["mat1"].to(wide), bound["mat2"].to(wide))
        found = bound.get("beta", 1) * bound["self"].to(wide) + bound.get("alpha", 1) * product
        if bound.get("beta", 1) == 0:
            found = bound.get("alpha", 1) * product
    out = bound.get("out")
    if out is None:
        return found
    assert out.shape == found.shape
    assert out.dtype == wide
    return out.copy_(found)


def _without_gaps(factor: Tensor) -> Tensor:
    """On CPUs with AMX a product of bfloat16 reads what lies between its rows, which no GPU does."""
    rows = factor if factor.stride(1) == 1 else factor.t()
    if factor.dtype != torch.bfloat16 or rows.stride(1) != 1 or rows.stride(0) == rows.shape[1]:
        return factor
    return rows.contiguous() if rows is factor else rows.contiguous().t()


def _back(out: Any, mine: list[OnDevice], where: torch.device) -> Any:
    """Results as tensors of the device; what was written in place is the tensor it was."""
    known = {id(x.host): x for x in mine}

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor) or where.type != "cuda":
            return value
        if id(value) in known:
            assert known[id(value)].shape == value.shape, "a tensor has changed its shape in place"
            return known[id(value)]
        return OnDevice(value, where)

    return tree_map(back, out)


@contextmanager
def no_modes() -> Iterator[None]:
    """What is done in the block is neither counted nor checked."""
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        yield


_now: Gpu | None = None


def current() -> Gpu:
    """The device that is pretended."""
    assert _now is not None, "a tensor has outlived its device"
    return _now


class _Stream:
    """`torch.cuda.Stream`: kernels are done at once, copies of pinned memory when somebody waits for them."""

    def __init__(self, device: Any = None) -> None:
        assert device is None or torch.device(device).index is not None, (
            "a stream on a device without a number"
        )
        self._waiting: list[Callable[[], object]] = []
        self._done = 0

    @property
    def left(self) -> int:
        """How much of it is not done."""
        return len(self._waiting)

    @property
    def given(self) -> int:
        """How much it was given to do so far."""
        return self._done + len(self._waiting)

    def later(self, call: Callable[[], object]) -> None:
        """Give it `call` to do."""
        with current().lock:
            self._waiting.append(call)

    def finish(self, given: int | None = None) -> None:
        """Do what it was given first, or all, in its order."""
        with current().lock, no_modes():
            while self._waiting and (given is None or self._done < given):
                call = self._waiting.pop(0)
                self._done += 1
                call()

    def synchronize(self) -> None:
        current().wait("a stream")
        self.finish()

    def wait_stream(self, other: _Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: _Event) -> None:
        current().counts.stream_waits += 1
        self.later(event.finish)

    def record_event(self, event: _Event | None = None) -> _Event:
        made = event or _Event()
        made.record(self)
        return made


class _Graph:
    """`torch.cuda.CUDAGraph`; see `pretend_graph`."""

    def __init__(self) -> None:
        self._recording: Recording | None = None

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        gpu = current()
        assert pool in gpu.pools, "a pool of another device"
        assert gpu.recording is None, "a capture in a capture"
        assert capture_error_mode == "thread_local", "other threads would break the capture, or it them"
        if gpu.stream is gpu.default or gpu.current != gpu.device.index:
            raise RuntimeError("CUDA graphs must be captured on a stream of their own, on their device")
        gpu.recording = Recording()

    def capture_end(self) -> None:
        gpu = current()
        recording, gpu.recording = gpu.recording, None
        assert recording is not None
        with no_modes():
            recording.end()
        if recording.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self._recording = recording

    def replay(self) -> None:
        gpu = current()
        assert self._recording is not None, "a graph that holds nothing"
        gpu._launch("graph")
        gpu.stream.finish()
        with no_modes():
            self._recording.replay()


class _Event:
    """`torch.cuda.Event`."""

    def __init__(self, **_: Any) -> None:
        self._point: tuple[_Stream, int] | None = None

    def record(self, stream: _Stream | None = None) -> None:
        at = stream or current().stream
        self._point = at, at.given

    def finish(self) -> None:
        """Do all that its stream was given before it."""
        if self._point is not None:
            stream, given = self._point
            stream.finish(given)

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or current().stream).wait_event(self)

    def query(self) -> bool:
        self.finish()
        return True

    def synchronize(self) -> None:
        current().wait("an event")
        self.finish()


@contextmanager
def gpu(number: int = 1) -> Iterator[Gpu]:
    """A machine with two GPUs and more, whose `number` is the one that this thread works on."""
    global _now
    made = Gpu(number)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        _pretend(patch, made)
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=)` copies what it has made
        stack.callback(torch._C._set_only_lift_cpu_tensors, before)
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(
            True
        )  # `Module.to` keeps its parameters, tied ones too
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        stack.enter_context(_Mode(made))
        made.choose(number)
        _now = made
        try:
            yield made
        finally:
            _now = None


def _pretend(patch: pytest.MonkeyPatch, made: Gpu) -> None:
    """Let `torch.cuda` speak of the device, and new threads know it."""
    import pretend_kernels  # which needs what is here

    run = threading.Thread.run

    def run_on(thread: threading.Thread) -> None:
        with _Mode(made):
            run(thread)

    patch.setattr(threading.Thread, "run", run_on)
    patch.setattr(attention, "scaled_dot_product_attention", pretend_kernels.one_kernel)
    patch.setattr(_foreach_utils, "_foreach_supported_types", [Tensor, OnDevice])
    patch.setattr(_foreach_utils, "_get_foreach_kernels_supported_devices", lambda: ["cuda", "meta"])
    for name, value in {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: made.device.index + 1,
        "current_device": lambda: made.current,
        "set_device": made.choose,
        "device": made.chosen,
        "device_of": made.chosen,
        "Stream": _Stream,
        "Event": _Event,
        "stream": made.on_stream,
        "CUDAGraph": _Graph,
        "graph_pool_handle": made.new_pool,
        "current_stream": lambda _=None: made.stream,
        "default_stream": lambda _=None: made.default,
        "synchronize": lambda _=None: (made.wait("the device"), made.stream.finish()),
        "empty_cache": lambda: None,
        "get_device_capability": lambda _=None: (9, 0),
        "get_device_name": lambda _=None: NAME,
        "get_device_properties": lambda _=None: SimpleNamespace(name=NAME, total_memory=1 << 33),
        "mem_get_info": lambda _=None: (1 << 33, 1 << 33),
        "memory_reserved": lambda _=None: 0,
        "max_memory_allocated": lambda _=None: 0,
    }.items():
        patch.setattr(torch.cuda, name, value)


@contextmanager
def on(device: str) -> Iterator[Gpu | None]:
    """`gpu` for a name of one, nothing for `cpu`; the thread works on the first device, as every one does."""
    if device == "cpu":
        yield None
        return
    with gpu(torch.device(device).index or 0) as made:
        made.choose(0)
        yield made


class RealGpu:
    """The device that is there, with what `Gpu` offers; launches are not counted on it."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """What the host waits for while the block runs, as far as torch can tell."""
        made, before = Counts(), torch.cuda.get_sync_debug_mode()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                yield made
        finally:
            torch.cuda.set_sync_debug_mode(before)
        waits = [one for one in said if "synchroniz" in str(one.message)]
        made.waits += [f"{one.message} at {one.filename}:{one.lineno}" for one in waits]

    def put(self, value: Tensor) -> Tensor:
        """A copy of `value` on the device."""
        return value.detach().to(self.device, copy=True)

    def get(self, value: Tensor) -> Tensor:
        """What `value` holds."""
        return value.detach().cpu()

    def model(self, model: Any) -> Any:
        """`model` on the device."""
        model.module.to(self.device)
        return model
