"""Groups of inference servers that a run starts, watches and ends by itself: `servers: NAME: {...}`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from opd.config.base import Config

_SHARE = {"sglang": "mem-fraction-static", "vllm": "gpu-memory-utilization"}
"""What a server's share of a device's memory is called."""
SET_BY_US = ("model-path", "model", "host", "port", "tp", "tp-size", "tensor-parallel-size", "api-key")


def _is_share(value: bool | int | float | str) -> bool:
    try:
        return not isinstance(value, bool) and 0 < float(value) <= 1
    except ValueError:
        return False


class ServerGroupConfig(Config):
    """Servers of one model, on this machine, or with `launch: ray` on the nodes of the cluster. A teacher or
    `rollout.engine` names the group with `servers: NAME` in place of `urls`: its model is what they serve.
    They are started when it is first needed, started again where one ends, and are gone when the run is,
    however it ends."""

    type: Literal["sglang", "vllm"] = "sglang"
    """What they run: the `type` of the teacher or engine that names the group."""
    count: int = Field(default=1, gt=0, le=1024)
    """How many servers."""
    tensor_parallel: int = Field(default=1, gt=0, le=64)
    """GPUs of a server."""
    devices: list[Annotated[int, Field(ge=0)]] | None = None
    """CUDA devices of the group, numbered as this process sees them, `tensor_parallel` of them a server, in
    turn; `null` leaves each server all of them, which is right for one server, or on a CPU. Groups may share
    one if their arguments `mem-fraction-static` (vLLM: `gpu-memory-utilization`) are together at most 1; of
    teachers' that take turns (`runtime.offload.teachers`) the largest counts. On Ray `launch.server.gpus`
    says how many a server gets."""
    command: list[str] = Field(default=[], max_length=1000)
    """What starts a server, before the arguments; `[]` is this interpreter with `-m sglang.launch_server`, or
    with `-m vllm.entrypoints.openai.api_server`. For an SGLang in an environment of its own:
    `[/path/to/python, -m, sglang.launch_server]`."""
    arguments: dict[str, bool | int | float | str] = {}
    """Of the server, without the dashes: `{context-length: 4096, enable-return-hidden-states: true}`."""
    environment: dict[str, str] = {}
    """Variables of the servers' environment, beside those of this process."""
    start_seconds: float = Field(default=900.0, gt=0)
    """Until every server has to be ready."""
    silence_seconds: float = Field(default=300.0, gt=0)
    """After which a server is ended and started again that answers nothing at all, or whose scheduler does
    not: longer than it takes to load new weights, or one chunk of a prompt."""
    restarts: int = Field(default=5, ge=0)
    """How often servers of the group, on Ray each of them, may be started again before the run stops."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _arguments(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        for name, value in ((str(name), value) for name, value in given.items()):
            plain = name.lstrip("-").replace("_", "-")
            if name != plain or not name.replace("-", "").isalnum():
                wanted = plain if plain.replace("-", "").isalnum() else "dtype"
                raise ValueError(f"{name!r} is no argument here; write it without dashes in front: {wanted}")
            if name in SET_BY_US:
                raise ValueError(f"{name} is set by opd; leave it out")
            if not isinstance(value, bool | int | float | str):
                raise ValueError(f"{name} is {value!r}; give true, false, a number or a text")
            if name in _SHARE.values() and not _is_share(value):
                raise ValueError(f"{name} is {value!r}; give a number above 0, at most 1")
        return given

    @field_validator("environment")
    @classmethod
    def _variables(cls, given: dict[str, str]) -> dict[str, str]:
        for name in given:
            if not name or "=" in name:
                raise ValueError(f"{name!r} is no name of a variable; give one without =, such as HF_HOME")
        return given

    @field_validator("command")
    @classmethod
    def _program(cls, given: list[str]) -> list[str]:
        if given and not given[0].strip():
            raise ValueError("it begins with an empty text; give the program first, or [] for the default")
        return given

    @property
    def module(self) -> str:
        """What an interpreter runs to serve."""
        return {"sglang": "sglang.launch_server", "vllm": "vllm.entrypoints.openai.api_server"}[self.type]

    @property
    def words(self) -> list[str]:
        """`arguments` as a command line has them; a flag that is true stands alone, one that is false not."""
        found = []
        for name, value in self.arguments.items():
            if value is not False:
                found += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return found


def shared_devices(
    groups: Mapping[str, ServerGroupConfig], in_turn: Collection[str] = ()
) -> tuple[str, str, int] | None:
    """Two groups and a device of both, which have not said that they leave each other room there; of those
    that are awake `in_turn`, one at a time, only the largest needs any.
    """
    for group in groups.values():
        for device in group.devices or ():
            there = {n: other for n, other in groups.items() if device in (other.devices or ())}
            shares = {n: float(g.arguments.get(_SHARE[g.type], 1.0)) for n, g in there.items()}
            largest = max((share for n, share in shares.items() if n in in_turn), default=0.0)
            others = [n for n in there if n not in in_turn]
            if sum(shares[n] for n in others) + largest > 1.0 and len(there) > 1:
                return others[0], next(n for n in there if n != others[0]), device
    return None
