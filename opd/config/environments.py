"""Environments of a domain (`domains.NAME.environment`), and the sandboxes of their tools."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from opd.config.base import Config

BUILT_IN = {
    "tools": "opd.environments.tools:Tools",
    "textworld": "opd.environments.textworld:TextWorld",
    "gymnasium": "opd.environments.gymnasium:Gymnasium",
    "openenv": "opd.environments.openenv:OpenEnv",
}
"""Name of a built-in environment -> dotted path of its class."""
PLAIN = ("textworld", "gymnasium")
"""Environments that compute in Python and keep no log, so another process may run them."""
AGENT = "agent"
"""Name of the environment that is a user's program requesting the model's turns."""
LIBRARIES = {"verifiers": "opd.environments.verifiers:play"}
"""Name of another library's agent -> dotted path of its function."""
ToolFormat = Literal["none", "hermes", "llama", "deepseek"]
ROLE = re.compile(r"[a-z_]{1,32}")
"""Pattern of a message's role. Templates write it as it is, and another text could begin a turn."""
_SUCCESS = re.compile(r"info\.\w{1,100}")


def _parse_success(value: object) -> Any:
    if isinstance(value, str) and not _SUCCESS.fullmatch(value):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{value[:100]!r} is no rule: give a number, or info.NAME") from None
    return value


Success = Annotated[float | str, BeforeValidator(_parse_success)]


class EnvironmentConfig(Config):
    """An agent's world: each response becomes an episode of several turns, in which the model acts and the
    environment answers. `rollout.max_new_tokens` bounds a whole episode, what the environment says included.
    `environment: package.module:Class` is short for its `type`."""

    type: str = Field(min_length=1)
    """Dotted path, `package.module:Class`, of a class with `reset(task)` and `step(action)`
    (`opd.environments.protocol`). `agent`: a program of your own that asks a server on loopback with OpenAI's
    API for the model's turns. Its `params.run` is `package.module:function`, called as
    `run(task, base_url, api_key)`. Built in: `tools`, `textworld`, `gymnasium`, `openenv`. `verifiers`: an
    environment of that library, whose task set is `params.id`."""
    params: dict[str, Any] = {}
    """Keyword arguments it is made with; an agent's `run` is called with all but `run`."""
    max_turns: int = Field(default=8, gt=0, le=10_000)
    """Turns of the model, at most; of an agent, in all its branches."""
    turn_tokens: int | None = Field(default=None, gt=0)
    """Tokens that the model may write in one turn; `null` is what is left of the episode's."""
    observation_characters: int = Field(default=20_000, gt=0, le=10_000_000)
    """Characters of one observation. A longer one loses its middle, and its text says so."""
    observation_role: str | None = None
    """Role of a message that an observation given as text becomes; `null` is `tool` after a turn with tool
    calls, else `user`."""
    tool_format: ToolFormat = "none"
    """Format of the model's tool calls. `hermes`: Hermes and Qwen. `llama`: Llama 3. `deepseek`: DeepSeek V3
    and R1. `none`: it writes none."""
    seconds: float = Field(default=60.0, gt=0)
    """Time limit of `reset` and of `step`. An environment that takes longer, or raises, is made anew and
    brought to where it was by the actions so far, up to `attempts` times. Then the run stops."""
    attempts: int = Field(default=3, gt=0, le=100)
    """Tries of a step, or of an agent, in all."""
    concurrent: int = Field(default=512, gt=0, le=100_000)
    """Episodes that are open together; more wait."""
    success: Success = 0.5
    """Condition under which an episode counts as right. A number: its reward is above it. `info.NAME`: the
    entry NAME of the environment's (or the agent's) `info` is true, such as `info.won`; of several steps the
    last that has it counts."""
    processes: int = Field(default=0, ge=0, le=1024)
    """Worker processes that run `textworld` and `gymnasium`, for each process that writes responses. 0 keeps
    them in threads of its own, where their computing holds up the decoder."""

    @field_validator("type")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        if kind not in (*BUILT_IN, *LIBRARIES, AGENT) and kind.count(":") != 1:
            names = "".join(f", {name}" for name in (*BUILT_IN, *LIBRARIES, AGENT))
            raise ValueError(f"{kind!r} is not an environment; give package.module:Class{names}")
        return kind

    @field_validator("observation_role")
    @classmethod
    def _is_not_the_models(cls, role: str | None) -> str | None:
        if role is not None and (role == "assistant" or not ROLE.fullmatch(role)):
            raise ValueError(
                f"{role[:100]!r} is no role of an environment: give one word of small letters, such as user"
                " or tool, but not assistant, whose turns are the model's"
            )
        return role

    @model_validator(mode="after")
    def _says_what_to_run(self) -> EnvironmentConfig:
        run = self.params.get("run")
        if self.type == AGENT and (not isinstance(run, str) or run.count(":") != 1):
            raise ValueError("type agent needs params.run, package.module:function of your agent")
        if self.type == "verifiers" and not (isinstance(self.params.get("id"), str) and self.params["id"]):
            raise ValueError("type verifiers needs params.id, the id of a task set")
        if self.processes and self.type not in PLAIN:
            raise ValueError(f"processes is for {' and '.join(PLAIN)}, not for {self.type}; leave it out")
        return self

    @property
    def agent_path(self) -> str | None:
        """Dotted path of the function that requests turns; `None` for an environment."""
        return str(self.params["run"]) if self.type == AGENT else LIBRARIES.get(self.type)

    @property
    def container_image(self) -> str | None:
        """Image of its tools' containers; `None` without containers."""
        sandbox = self.params.get("sandbox")
        if not isinstance(sandbox, dict) or sandbox.get("substrate") != "container":
            return None
        return str(sandbox.get("image"))

    @property
    def user_code(self) -> str | None:
        """Dotted path of the user's code in it."""
        if self.type == AGENT:
            return str(self.params["run"])
        return self.type if ":" in self.type else None


def _expand_name(value: object) -> Any:
    return {"type": value} if isinstance(value, str) else value


NamedEnvironment = Annotated[EnvironmentConfig, BeforeValidator(_expand_name)]


IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}")
_LEAST_MB = 16
"""Minimum memory of a container. No engine starts one with less."""


class SandboxConfig(Config):
    """Where the tools of an agent run."""

    substrate: Literal["auto", "bubblewrap", "process", "container"] = "auto"
    """Sandbox that keeps commands apart. `auto` is bubblewrap if it works here, else a process within
    limits."""
    image: str | None = None
    """Image of the containers, by podman or docker: one that this machine has, by name, digest or id. It has
    a `/bin/sh`, and the programs that the tools need. It has to be the same when the run goes on as when it
    began."""
    seconds: float = Field(default=10.0, gt=0, le=3600)
    """Seconds that a command may take by the clock."""
    cpu_seconds: int = Field(default=10, gt=0, le=3600)
    """Seconds of processor time for each process."""
    memory_mb: int = Field(default=512, gt=0, le=1 << 20)
    """Memory of each process, and of all together (MiB)."""
    processes: int = Field(default=32, gt=0, le=1 << 15)
    """Processes and threads at a time."""
    disk_mb: int = Field(default=64, gt=0, le=1 << 20)
    """Disk for files (MiB); more ends the episode."""
    output: int = Field(default=8192, gt=0, le=1 << 24)
    """Bytes of a command's output that are kept."""
    reads: list[str] = []
    """Files and folders that commands can read, beside the system's and Python's library."""
    repeat: bool | None = None
    """`true`: a command that a kill interrupted runs again, from the files as they were before it. `false`:
    the model is told instead. `null`: it runs again if it can change nothing but those files."""
    deterministic: list[str] = []
    """Tools that always do the same with the same files. After a kill their commands run again, and a state
    is kept only after those that a quota or a signal ended."""

    @field_validator("image")
    @classmethod
    def _is_a_name(cls, image: str | None) -> str | None:
        if image is not None and not IMAGE_NAME.fullmatch(image):
            raise ValueError(
                f"{image[:100]!r} names no image: give a name, name:tag, name@sha256:digest or an id"
            )
        return image

    @model_validator(mode="after")
    def _check_container(self) -> SandboxConfig:
        contained = self.substrate == "container"
        if contained != (self.image is not None):
            raise ValueError("substrate: container and image go together; give both, or neither")
        odd = [path for path in self.reads if set(path) & set(',"\n\r')]
        if contained and odd:
            raise ValueError(
                f"reads has {odd[0][:100]!r}, and a container is given no path with a comma, quote or new"
                " line; rename it"
            )
        if contained and self.memory_mb < _LEAST_MB:
            raise ValueError(f"memory_mb of a container is {_LEAST_MB} at least; raise it")
        return self
