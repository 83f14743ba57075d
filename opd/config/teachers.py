"""The kinds of teachers: `teachers.NAME: {type: ...}`. The code of a kind is `teachers/TYPE_teacher.py`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field

from opd.config.base import Config
from opd.config.served import ServerConfig

Reads = Literal["folder", "whole", "published", "adapted"]
"""What a teacher is read from. `folder`: a Hugging Face folder, a published model fetched for it; `whole`:
one or the other, as it is; `published`: what `opd publish` writes, a folder published for it; `adapted`: the
same, a model that has kept its adapters as those, beside its base."""


class TeacherSettings(Config):
    """What every kind of teacher has."""

    type: str
    path: str | None = Field(default=None, min_length=1)
    """A Hugging Face folder, or the URL of a published teacher (`opd publish`); `null` is the specialist that
    this run trains on the domain of that name."""

    elsewhere: ClassVar[bool] = False
    """Whether it computes outside of this run's processes."""

    @property
    def reads(self) -> Reads:
        """What its weights are read from."""
        return "published"

    @property
    def streams(self) -> bool:
        """Whether weights are read in passing and hidden states kept on disk, in place of weights in
        memory."""
        return self.reads in ("published", "adapted")


class LocalTeacherConfig(TeacherSettings):
    """A Hugging Face model that stays in this process's memory: the fastest, where all of them fit."""

    type: Literal["local"] = "local"

    @property
    def reads(self) -> Reads:
        """A folder."""
        return "folder"


class StreamedTeacherConfig(TeacherSettings):
    """Layers are read from published shards as they are needed, so that any number of teachers takes the
    memory of one. Adapters on one base read it once."""

    type: Literal["streamed"] = "streamed"

    @property
    def reads(self) -> Reads:
        """What is published."""
        return "adapted"


class MegatronTeacherConfig(TeacherSettings):
    """Megatron-Core in this process (extra `megatron`); teachers of one architecture take turns on one
    module."""

    type: Literal["megatron"] = "megatron"
    tensor_parallel: int = Field(default=1, gt=0, le=4096)
    """Ranks that share a teacher. Above 1 needs that many processes with a process group."""
    keep: bool = False
    """Keep its weights in host memory; without, its published shards are read whenever its turn comes."""

    @property
    def reads(self) -> Reads:
        """What is published, or with `keep` also a folder."""
        return "whole" if self.keep else "published"


class SGLangTeacherConfig(TeacherSettings, ServerConfig):
    """SGLang servers that run the model at `path` (extra `sglang`)."""

    type: Literal["sglang"] = "sglang"
    path: str = Field(min_length=1)
    """A Hugging Face folder, or the URL of a published teacher: what the servers must be, and their head."""
    signal: Literal["hidden", "topk", "sampled"] = "hidden"
    """What is asked for. `hidden`: last hidden states, from which the published head rebuilds the whole
    vocabulary here, at any temperature; `topk`: the `distill.loss.k` most likely tokens; `sampled`: the
    student's own tokens alone. A server gives log-probabilities at temperature 1 only, so the last two need
    `rollout.temperature: 1`."""
    weight_version: str | None = None
    """The version the servers must report; `null` takes what they report first. Either way a change stops the
    run."""
    checksum: str | None = None
    """The servers' own checksum over all weights, which `opd doctor` prints; `null` compares the model's
    outputs alone."""

    elsewhere: ClassVar[bool] = True


def _named(value: Any) -> Any:
    """`streamed` is short for `{type: streamed}`."""
    if value == "resident":
        raise ValueError("resident teachers are called local now; set distill.teachers to local")
    return {"type": value} if isinstance(value, str) else value


_Here = LocalTeacherConfig | StreamedTeacherConfig | MegatronTeacherConfig
KINDS_HERE: dict[str, type[TeacherSettings]] = {
    kind.model_fields["type"].default: kind for kind in get_args(_Here)
}
TeacherConfig = Annotated[_Here | SGLangTeacherConfig, Field(discriminator="type")]
"""An entry of `teachers`."""
TeachersConfig = Annotated[_Here, Field(discriminator="type"), BeforeValidator(_named)]
"""The kind of those that have no `type` of their own, and of the specialists that the run trains."""
