"""Create, call, monitor and restart the actors of a run, and pass tensors through Ray's object store.

A tensor is written once, and every process of the node reads it in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.config import RayLaunch, Recipe
from opd.errors import LaunchError
from opd.kernels.head import Head
from opd.models.causal_lm import raw_bytes
from opd.output import LogForwarder, guard_streams
from opd.pipelines.launch.ray.cluster import BundleLayout, import_ray, one_line, options_of, role_of
from opd.pipelines.records.run_folder import RunFolder
from opd.rollout.preemption import Preemption

PING_SECONDS = 15.0
"""An idle actor that does not answer for so long counts as hanging."""
LOOK = 0.2
CONTROL = "control"
"""Concurrency group of methods that answer while a stage runs."""


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """The settings of an actor, for its start and every restart."""

    name: str
    recipe_json: str
    folder: str
    """The run folder. Every node sees it under this path."""
    working_dir: str
    """The directory where the run was started. Relative paths of the recipe begin there."""

    def start_process(self, module: str) -> Recipe:
        """Configure the actor's process: its folder, its log, its threads. Returns the recipe. It imports
        `module`, which takes seconds, while the other actors do the same.
        """
        with contextlib.suppress(OSError):  # on another node it may be missing: then Ray's own stays
            os.chdir(self.working_dir)
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        # This process's output goes into a log in the run folder, so that it outlives the cluster.
        log = RunFolder.attach(self.folder).actor_log(self.name)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        guard_streams()
        # As long as the process lives.
        LogForwarder(lambda record: print(record.getMessage(), flush=True)).__enter__()
        print(f"{time.strftime('%F %T')} {self.name} is process {os.getpid()}", flush=True)
        importlib.import_module(module)
        from opd.pipelines.launch.machine import configure_machine

        recipe = Recipe.model_validate_json(self.recipe_json)
        configure_machine(RunFolder.attach(self.folder).thread_count(recipe), recipe.runtime.tf32)
        return recipe


class ActorLostError(RuntimeError):
    """An actor died, or it did not answer in time and was ended."""

    def __init__(self, text: str, actor: str | None = None) -> None:
        """`actor`: its name, if that process is certainly gone."""
        super().__init__(text)
        self.actor = actor


class RemoteActor:
    """One actor as another process sees it. Calls of one caller run in their order.

    Picklable: a trainer gets the engines that its supervisor made.
    """

    def __init__(self, name: str, handle: Any, limits: RayLaunch) -> None:
        self.name, self.handle, self.limits = name, handle, limits

    def send(self, verb: str, *arguments: Any, control: bool = False) -> Any:
        """Call `verb`, and return the reference of its result."""
        method = getattr(self.handle, verb)
        return (method.options(concurrency_group=CONTROL) if control else method).remote(*arguments)

    def get(self, reference: Any, seconds: float, kill: bool = True) -> Any:
        """Return the result behind `reference`. Raises the method's own error here.

        Raises `ActorLostError` if the actor died, or gave no result for `seconds`. Then it hangs, and is
        ended first if `kill`.
        """
        ray = import_ray()
        try:
            return ray.get(reference, timeout=seconds)
        except ray.exceptions.GetTimeoutError:
            if kill:
                self.kill()
            gone = self.name if kill else None
            raise ActorLostError(f"{self.name} gave no answer for {seconds:g} s", gone) from None
        except ray.exceptions.RayTaskError as error:
            from opd.pipelines.launch.machine import out_of_memory

            cause = getattr(error, "cause", None)
            if not isinstance(cause, Exception):
                raise
            reason = out_of_memory(cause)
            raise (cause if reason is None else LaunchError(no_memory(self.name, reason))) from None
        except ray.exceptions.RayError as error:
            reason = type(error).__name__
            if "Actor" not in reason:  # else Ray's message says no more
                reason = f"{reason}: {one_line(error)}"
            raise ActorLostError(f"{self.name} died ({reason})", self.name) from None

    def call(self, verb: str, *arguments: Any, seconds: float | None = None) -> Any:
        return self.get(self.send(verb, *arguments), seconds or self.limits.step_timeout)

    def kill(self) -> None:
        """End its process. Ray restarts it as often as the recipe allows."""
        ray = import_ray()
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self.handle, no_restart=False)

    def await_return(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Return once the actor answers. Raises `ActorLostError` if it does not in time, or never will."""
        ray = import_ray()
        deadline = time.monotonic() + self.limits.start_timeout
        while not give_up():
            try:
                ray.get(self.send("ping"), timeout=PING_SECONDS)
                return
            except ray.exceptions.ActorUnavailableError:
                time.sleep(LOOK)
            except ray.exceptions.GetTimeoutError:
                # A process that is still importing its code answers late. An older one hangs.
                pass
            except ray.exceptions.RayError as error:
                raise ActorLostError(f"{self.name} died and is not started anew: {one_line(error)}") from None
            if time.monotonic() > deadline:
                self.kill()
                raise ActorLostError(f"{self.name} did not come back in {self.limits.start_timeout:g} s")
        raise ActorLostError(f"{self.name} is not needed any more")


def no_memory(name: str, reason: str) -> str:
    """Return the error sentence for an actor that ran out of memory."""
    wanted = {"engine": "lower runtime.decode.kv_cache_mb, or ", "server": ""}
    lower = wanted.get(role_of(name), "lower batch.max_tokens, or ")
    return f"{name} ran out of memory ({reason}); {lower}give it a larger node, then continue with --resume."


def start_actors(
    launch: RayLaunch,
    layout: BundleLayout,
    placement: Any,
    spec: Mapping[str, ActorSpec],
    preemption: Preemption,
) -> dict[str, RemoteActor]:
    """Start every actor of `layout` in its bundle, and return once all of them answer.

    Raises `LaunchError` if one does not in time, `PreemptedError` if the run is to stop meanwhile.
    """
    ray = import_ray()
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from opd.pipelines.launch.ray.engine import EngineActor
    from opd.pipelines.launch.ray.server import ServerActor
    from opd.pipelines.launch.ray.teacher import TeacherActor
    from opd.pipelines.launch.ray.trainer import TrainerActor

    classes = {"trainer": TrainerActor, "engine": EngineActor, "teacher": TeacherActor, "server": ServerActor}
    actors: dict[str, RemoteActor] = {}
    for name, bundle in layout.places.items():
        where = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle)
        remote = ray.remote(concurrency_groups={CONTROL: 2})(classes[role_of(name)])
        options = options_of(layout.needs[name])
        handle = remote.options(
            scheduling_strategy=where, max_restarts=launch.max_restarts, max_task_retries=0, **options
        ).remote(spec[name])
        actors[name] = RemoteActor(name, handle, launch)
    waiting = {remote.send("ping"): remote for remote in actors.values()}
    until = time.monotonic() + launch.start_timeout
    try:
        while waiting:
            preemption.check()
            ready, others = ray.wait(list(waiting), timeout=LOOK)
            for reference in ready:
                waiting.pop(reference).get(reference, PING_SECONDS)
            if not ready and time.monotonic() > until:
                late = waiting[others[0]]
                late.kill()
                raise ActorLostError(f"{late.name} gave no answer for {launch.start_timeout:g} s", late.name)
    except ActorLostError as error:
        raise LaunchError(f"{error} while it was started; see logs/ in the run folder.") from None
    return actors


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor as bytes, which travel outside the message and are not copied on the node."""

    data: np.ndarray
    """[bytes] uint8."""
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> PackedTensor:
        """Pack a tensor. A contiguous one on the CPU shares its memory."""
        name = str(tensor.dtype).removeprefix("torch.")
        return cls(raw_bytes(tensor.cpu()).numpy(), name, tuple(tensor.shape))

    def to_tensor(self) -> Tensor:
        """Return the tensor on the CPU, without a copy. It keeps the store's object alive. It is read-only if
        the store holds the bytes. Writing to it then ends the process.
        """
        dtype = getattr(torch, self.dtype)
        if not self.data.nbytes:
            return torch.zeros(self.shape, dtype=dtype)
        memory = (ctypes.c_uint8 * self.data.nbytes).from_address(self.data.ctypes.data)
        memory.owner = self.data  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class PackedHead:
    """An `opd.kernels.head.Head` in transport."""

    weight: PackedTensor
    bias: PackedTensor | None
    scale: float
    softcap: float | None
    vocab_size: int | None
    allow_bf16_logits: bool

    @classmethod
    def from_head(cls, head: Head) -> PackedHead:
        bias = None if head.bias is None else PackedTensor.from_tensor(head.bias)
        weight = PackedTensor.from_tensor(head.weight)
        return cls(weight, bias, head.scale, head.softcap, head.vocab_size, head.allow_bf16_logits)

    def to_head(self, device: torch.device) -> Head:
        """Return the head on `device`. On the CPU its weight stays in the store."""
        weight = self.weight.to_tensor().to(device)
        bias = None if self.bias is None else self.bias.to_tensor().to(device)
        return Head(weight, bias, self.scale, self.softcap, self.vocab_size, self.allow_bf16_logits)
