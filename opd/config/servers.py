"""Groups of inference servers that a run starts, watches and stops: `servers: NAME: {...}`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from opd.config.base import Config


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """Command-line form of a server program."""

    module: str
    """Module that an interpreter runs to serve."""
    model: str
    """Argument for the model's path."""
    ranks: str
    """Argument for the GPUs of a server."""
    share: str
    """Argument for a server's share of a device's memory."""
    room: str
    """Argument for the tokens of a request."""
    questions: Sequence[tuple[str, str, dict[str, Any] | None]]
    """Method, path and body of requests that the computing process has to answer itself. The first that a
    server knows is used."""
    repeats: bool = False
    """Its noise is the same at each start, unless it gets a seed."""
    key_file: bool = True
    """It reads its key from the file that `config` names; otherwise a middleware reads it from a variable."""


PROGRAMS = {
    "sglang": ServerProgram(
        "sglang.launch_server",
        "model-path",
        "tp-size",
        "mem-fraction-static",
        "context-length",
        [("GET", "/server_info", None)],
    ),
    # It reports its sleep in the developers' mode only, between two steps of any computation. Without that
    # mode it has to compute a token, or a token's states if it pools.
    "vllm": ServerProgram(
        "vllm.entrypoints.openai.api_server",
        "model",
        "tensor-parallel-size",
        "gpu-memory-utilization",
        "max-model-len",
        [
            ("GET", "/is_sleeping", None),
            ("POST", "/v1/completions", {"prompt": [0], "max_tokens": 1, "temperature": 0}),
            ("POST", "/pooling", {"input": [0]}),
        ],
        repeats=True,
        key_file=False,
    ),
}
"""By the `type` of a group of servers."""
_SHARES = [program.share for program in PROGRAMS.values()]
SET_BY_US = (
    "model-path",
    "model",
    "host",
    "port",
    "tp",
    "tp-size",
    "tensor-parallel-size",
    "api-key",
    "admin-api-key",
)
COMPUTED = (
    "dtype",
    "quantization",
    "quantization-param-path",
    "quantization-config",
    "modelopt-quant",
    "rl-quant-profile",
    "torchao-config",
    "kv-cache-dtype",
    "mamba-cache-dtype",
    "mamba-ssm-cache-dtype",
    "mamba-ssm-dtype",
    "lora-dtype",
    "enable-fp32-lm-head",
    "enable-tf32-matmul",
    "json-model-override-args",
    "hf-overrides",
    "hf-config-path",
    "logits-processors",
    "preferred-sampling-params",
    "config",
)
"""Arguments that make a server compute other numbers, or draw otherwise, on purpose, from verified weights.
`config` is a file that may hold any of them.
"""


_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)(e-?\d+)?")
"""The only texts with a leading dash that a server takes for a value."""
Argument = bool | int | float | str | list[str]
"""Values of a server's argument. A list is several words after one flag."""


def _is_share(value: Argument) -> bool:
    try:
        return not isinstance(value, bool | list) and 0 < float(value) <= 1
    except ValueError:
        return False


def _check_argument(name: str, value: Any) -> None:
    """Raise `ValueError` for an invalid argument, or one that opd sets, in any spelling. Servers take the
    beginning of a name for the whole, and a value with a leading dash for a name.
    """
    plain = name.lstrip("-").replace("_", "-")
    if not plain.replace("-", "").isalnum():
        raise ValueError(f"{name!r} is no name of an argument; write one as the server's --help does: dtype")
    if name != plain:
        how = "without dashes in front" if name.startswith("-") else "with dashes"
        raise ValueError(f"{name!r} is no argument here; write it {how}: {plain}")
    if name in SET_BY_US:
        raise ValueError(f"{name} is set by opd; leave it out")
    looked_at = (*SET_BY_US, *_SHARES, *COMPUTED)
    argument = next((known for known in looked_at if known.startswith(name)), name)
    if argument != name and name not in looked_at:
        mend = "is set by opd; leave it out" if argument in SET_BY_US else "is looked at here; write it out"
        raise ValueError(f"a server takes {name} for {argument}, which {mend}")
    texts = isinstance(value, list) and value and all(isinstance(word, str) for word in value)
    if not texts and not isinstance(value, bool | int | float | str):
        raise ValueError(f"{name} is {value!r}; give true, false, a number, a text, or several texts")
    words = [str(word) for word in (value if isinstance(value, list) else [value])]
    flag = next((word for word in words if word.startswith("-") and not _NUMBER.fullmatch(word)), None)
    if flag is not None:
        raise ValueError(f"{name} has {flag!r}, which a server takes for another argument; take it out there")
    if name in _SHARES and not _is_share(value):
        raise ValueError(f"{name} is {value!r}; give a number above 0, at most 1")


class ServerGroupConfig(Config):
    """Servers of one model, on this machine, or with `launch: ray` on the nodes of the cluster. A teacher or
    `rollout.engine` names the group with `servers: NAME` in place of `urls`: its model is what they serve.
    They are started when it is first needed, started again where one ends, and are gone when the run is,
    however it ends."""

    type: Literal["sglang", "vllm"] = "sglang"
    """Program of the servers: the `type` of the teacher or engine that names the group."""
    count: int = Field(default=1, gt=0, le=1024)
    """Number of servers."""
    tensor_parallel: int = Field(default=1, gt=0, le=64)
    """GPUs of a server."""
    devices: list[Annotated[int, Field(ge=0)]] | None = None
    """CUDA devices of the group, numbered as this process sees them, `tensor_parallel` of them a server, in
    turn; `null` leaves each server all of them, which is right for one server, or on a CPU. Groups may share
    one if their arguments `mem-fraction-static` (vLLM: `gpu-memory-utilization`) are together at most 1; of
    teachers' that take turns (`runtime.offload.teachers`) the largest counts. On Ray `launch.server.gpus`
    says how many a server gets."""
    command: list[str] = Field(default=[], max_length=1000)
    """Command that starts a server, without its arguments. `[]` is this interpreter with `-m
    sglang.launch_server`, or with `-m vllm.entrypoints.openai.api_server`. For an SGLang in an environment of
    its own: `[/path/to/python, -m, sglang.launch_server]`."""
    arguments: dict[str, Argument] = {}
    """Arguments of the server, without the dashes: `{context-length: 4096, enable-return-hidden-states:
    true}`. A list is several words: `{lora-target-modules: [q_proj, v_proj]}`."""
    environment: dict[str, str] = {}
    """Variables of the servers' environment, beside those of this process."""
    key: bool = True
    """Each run makes an API key for its servers, readable for its user alone, and asks with it. Set `false`
    if the program of `command` sees neither this machine's files nor the environment it is given, as in a
    container. Then whoever reaches a server may ask it anything, and give it weights."""
    start_seconds: float = Field(default=900.0, gt=0)
    """Seconds until every server has to be ready."""
    silence_seconds: float = Field(default=300.0, gt=0)
    """Seconds of silence after which a server is ended and started again: it answers nothing at all, or its
    scheduler does not. Give more than it takes to load new weights, or to compute one chunk of a prompt."""
    restarts: int = Field(default=5, ge=0)
    """Number of times that servers of the group (on Ray: each of them) may be started again before the run
    stops."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _check_arguments(cls, arguments: object) -> Any:
        if not isinstance(arguments, Mapping):
            return arguments
        for name, value in arguments.items():
            _check_argument(str(name), value)
        return arguments

    @field_validator("environment")
    @classmethod
    def _check_variables(cls, variables: dict[str, str]) -> dict[str, str]:
        for name in variables:
            if not name or "=" in name:
                raise ValueError(f"{name!r} is no name of a variable; give one without =, such as HF_HOME")
        return variables

    @field_validator("command")
    @classmethod
    def _check_command(cls, command: list[str]) -> list[str]:
        if command and not command[0].strip():
            raise ValueError("it begins with an empty text; give the program first, or [] for the default")
        return command

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        in_file = self.server_program.key_file
        if in_file and self.key and "config" in self.arguments:
            raise ValueError(
                "arguments has config, by which opd gives a server its key; write what is in that file here,"
                " or set key to false"
            )
        options = {"--api-key", "--admin-api-key"} | ({"--config"} if in_file else set())
        word = next((word for word in self.command if word.partition("=")[0] in options), None)
        if self.key and word is not None:
            raise ValueError(
                f"command has {word.partition('=')[0]}, and opd gives a server its key; take it out, or set"
                " key to false"
            )
        return self

    @property
    def requires_key(self) -> bool:
        """True if its servers require a key. SGLang's cannot if several processes take their requests."""
        workers = self.arguments.get("tokenizer-worker-num", 1)
        return self.key and (not self.server_program.key_file or workers in (1, "1"))

    @property
    def server_program(self) -> ServerProgram:
        """How its servers are started."""
        return PROGRAMS[self.type]

    @property
    def command_line(self) -> list[str]:
        """`arguments` as command-line words. A true flag stands alone, a false one is left out."""
        line = []
        for name, value in self.arguments.items():
            if value is not False:
                words = value if isinstance(value, list) else [] if value is True else [str(value)]
                line += [f"--{name}", *words]
        return line


def shared_devices(
    groups: Mapping[str, ServerGroupConfig], in_turn: Collection[str] = ()
) -> tuple[str, str, int] | None:
    """Return two groups and a shared device on which they need more than its memory, or `None`. Of groups
    awake `in_turn`, one at a time, only the largest counts.
    """
    for group in groups.values():
        for device in group.devices or ():
            on_device = {n: other for n, other in groups.items() if device in (other.devices or ())}
            shares: dict[str, float] = {}  # of the device's memory, that each server of the group takes
            for name, other in on_device.items():
                share = other.arguments.get(other.server_program.share, 1.0)
                shares[name] = 1.0 if isinstance(share, list) else float(share)
            largest = max((share for n, share in shares.items() if n in in_turn), default=0.0)
            others = [n for n in on_device if n not in in_turn]
            if sum(shares[n] for n in others) + largest > 1.0 and len(on_device) > 1:
                return others[0], next(n for n in on_device if n != others[0]), device
    return None
