"""Models behind HTTP: where the servers are and how patiently they are asked."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from opd.config.base import Config
from opd.errors import ConfigError


class ServerConfig(Config):
    """SGLang servers of one model (extra `sglang`)."""

    urls: list[str] = Field(min_length=1)
    """`http://HOST:PORT` of every server; requests go to the one with the fewest tokens in flight."""
    api_key_env: str | None = None
    """Environment variable that holds the servers' API key; the key itself is never written anywhere."""
    timeout: float = Field(default=300.0, gt=0)
    """Seconds one attempt at a request may take."""
    connect_timeout: float = Field(default=5.0, gt=0)
    """Seconds until a connection counts as failed."""
    patience: float = Field(default=180.0, ge=0)
    """Seconds without an answer from any server after which the run stops; a server that is killed and
    started again within them costs nothing but time."""
    attempts: int = Field(default=5, gt=0)
    """Bad answers to one request (a status of 5xx, incomplete, not finite) after which the run stops."""
    hedge_after: float | None = Field(default=None, gt=0)
    """Seconds after which a copy of a silent request goes to another server; `null` sends no copies."""
    max_in_flight_tokens: int = Field(default=65_536, gt=0)
    """Tokens of requests given to one server at once; the others wait here."""


class TorchEngineConfig(Config):
    """The student writes in the process that trains it."""

    type: Literal["torch"] = "torch"


class SGLangEngineConfig(ServerConfig):
    """The student writes on SGLang workers, which serve a model of its architecture and are given its weights
    at the beginning of a stage and after every optimiser step. One stage at a time can use them."""

    type: Literal["sglang"]
    sync: Literal["disk", "tensors"] = "disk"
    """How new weights get there. `disk`: through a folder that the workers read; `tensors`: broadcast in a
    process group with each worker, by gloo, or by NCCL where both sides have CUDA."""
    folder: str | None = None
    """Where `disk` writes them: on a file system that this process and every worker see under the same path;
    `null` is the stage's own folder."""
    host: str = "127.0.0.1"
    """Address of this machine, as the workers reach it, for `tensors`."""

    def urls_of(self, rank: int, ranks: int) -> list[str]:
        """Its own workers for each rank that writes. Raises `ConfigError` if there are fewer than ranks."""
        if len(self.urls) < ranks:
            raise ConfigError(
                f"rollout.engine has {len(self.urls)} workers for {ranks} ranks, each of which writes its"
                " share with workers of its own; give it more urls, or take fewer ranks."
            )
        return self.urls[rank::ranks]


EngineConfig = Annotated[TorchEngineConfig | SGLangEngineConfig, Field(discriminator="type")]
