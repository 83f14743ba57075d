"""The kinds of teachers: `teachers.NAME: {type: ...}`. The code of a kind is `teachers/TYPE_teacher.py`.

Those behind HTTP also have settings of their servers and of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, Field, PrivateAttr, field_validator, model_validator

from opd.config.base import Config, Located, Name, Place, is_url
from opd.config.servers import Argument
from opd.config.train import USUAL_TARGETS, LoRAConfig
from opd.errors import ConfigError


class ServerConfig(Config):
    """Servers of one model behind HTTP (extra `sglang`)."""

    program: ClassVar[str] = "sglang"
    """Program of the servers: the `type` that a group under `servers` must have."""
    kept: ClassVar[int] = 0
    """Tokens at the end of a server's context that no sequence may reach into."""

    urls: list[str] = []
    """`http://HOST:PORT` of every server; requests go to the one with the fewest tokens in flight."""
    urls_file: str | None = None
    """A file whose lines are URLs of more servers. It is read again every few seconds: those that come are
    checked as the first were, and then used."""
    servers: Name | None = None
    """In place of `urls`: the group of the recipe's `servers` that the run starts for it."""
    api_key_env: str | None = None
    """Environment variable that holds the API key of the servers at `urls`; the key itself is never written
    anywhere. Those that the run starts have one that the run has made."""
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
    """Tokens of requests given to one server at once; the others wait here. Ranks that write on one server
    share them."""
    _started: str | None = PrivateAttr(None)
    _key: str = PrivateAttr("")

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: list[str]) -> list[str]:
        wrong = next((index for index, url in enumerate(urls) if not is_url(url)), None)
        if wrong is not None:  # not shown: it may have a password
            raise ValueError(
                f"number {wrong + 1} is no URL of a server; write http://HOST:PORT or https://..."
            )
        return urls

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if bool(self.urls) == (self.servers is not None):
            raise ValueError("give either urls, or servers: the name of a group that the run starts")
        if self.urls_file is not None and not self.urls:
            raise ValueError("urls_file names servers that come later; give urls, those that are there, too")
        if self.api_key_env is not None and self.servers is not None:
            raise ValueError("servers have a key of the run; leave api_key_env out, which is for urls")
        return self

    @property
    def server_arguments(self) -> dict[str, Argument]:
        """Arguments for servers that the run starts, unless their group sets them."""
        return {}

    def server_environment(self, arguments: Mapping[str, Argument]) -> dict[str, str]:
        """Environment variables that servers need with these arguments, unless their group sets them."""
        return {}

    def with_servers(self, urls: list[str], key: str = "") -> Self:
        """Return the same settings with the URLs and key of its started servers."""
        config = self.model_copy(update={"urls": urls, "servers": None})
        config._started, config._key = self.servers, key
        return config

    @property
    def server_key(self) -> str:
        """The key of servers that the run has started; empty if they need none."""
        return self._key

    @property
    def started_group(self) -> str | None:
        """The group of servers that the run has started."""
        return self._started


class TorchEngineConfig(Config):
    """The student writes in the process that trains it."""

    type: Literal["torch"] = "torch"
    sharded: bool | None = None
    """`true`: several ranks share one copy of the student to write with (and of each model that is
    evaluated). FSDP2 gathers it layer by layer for every token. With `train.backend: torch` it is the copy
    that they train. `false`: each rank has a copy of its own, which is faster. `null` is `false` if a
    machine's memory holds one for each of its ranks (a GPU one), else `true`. Ranks share only with
    `rollout.schedule: in_turn`, and without CUDA graphs. One rank has all of it anyway."""
    lora: Literal["adapters", "merged"] | None = None
    """Form in which the engine has the adapters, if `model.lora` trains some. `adapters`: it applies them
    while it writes, on the trainer's own base, of which it has no copy. `merged`: it keeps another copy of
    the adapted layers, with the adapters merged in, and one more laid out for decode. That is faster. `null`
    takes `merged` if these layers take at most a sixteenth of the memory of the device. Ranks that share the
    trained model apply adapters."""


ADAPTED = USUAL_TARGETS
"""Last names of the layers that servers can apply adapters to."""


class ServedEngineConfig(ServerConfig):
    """The student writes on workers, which serve a model of its architecture."""

    sleeps: ClassVar[bool] = False
    """Workers can free their memory while they do not generate."""
    goes_on: ClassVar[bool] = True
    """Workers can generate past an end token of the model's own configuration."""
    type: str
    lora: Literal["adapters", "merged"] | None = None
    """Form in which workers get new weights, if `model.lora` trains adapters. `adapters`: the base once, then
    adapters alone, megabytes in place of gigabytes a step. Workers apply them while they write, and groups of
    `servers` are started for it. `merged`: all weights, with which a worker writes a little faster. `null`
    takes `adapters`, or `merged` if the recipe or a worker at `urls` cannot apply them, and the log says why:
    with `sync: tensors`, with `runtime.offload.engine`, with a target that is none of `model.lora`'s own, and
    for workers that were not started for it. A group of `servers` whose program or model knows no adapters
    does not start for them: set `merged`."""
    sync: str | None = None
    folder: Annotated[str | None, Located()] = None
    """Folder of new weights for workers that read them, on a file system that this process and every worker
    see under the same path. Each run has a folder of its own in it. `null` is the stage's own folder. With
    `sync: delta` only adapters are written there."""

    def sync_of(self, launch: str) -> str:
        """Return how new weights get to workers with that kind of launch."""
        is_launched = launch == "ray" and self.servers is not None and self.folder is None
        return self.sync or ("delta" if is_launched else "folder")

    def merged_because(self, lora: LoRAConfig) -> str | None:
        """Return why adapters are not sent alone; `None` if nothing here prevents it."""
        if self.lora == "merged":
            return "rollout.engine.lora is merged"
        unknown = [target for target in lora.targets or () if target not in ADAPTED]
        if unknown:
            return f"model.lora.targets has {unknown[0]}, and servers apply adapters to {', '.join(ADAPTED)}"
        return None

    def lora_arguments(self, lora: LoRAConfig) -> dict[str, Argument]:
        """Return arguments of servers that get adapters only."""
        return {"enable-lora": True, "max-lora-rank": lora.rank}


class SGLangEngineConfig(ServedEngineConfig):
    """The student writes on SGLang workers, which serve a model of its architecture and are given its weights
    at the beginning of a stage and after every optimiser step. One stage at a time can use them."""

    kept: ClassVar[int] = 6  # a prompt that leaves no more is refused, and responses end two before
    sleeps: ClassVar[bool] = True
    goes_on: ClassVar[bool] = False

    type: Literal["sglang"]
    sync: Literal["disk", "tensors", "delta"] | None = None
    """Way of new weights to the workers. `disk`: a folder on a shared file system, which the workers read.
    `tensors`: broadcast in a process group with each worker, by gloo, or by NCCL where both sides have CUDA.
    `delta`: to servers that the run starts on Ray, through its object store into a folder on each server's
    own node, all weights once and then the changes. `null` is `delta` with `launch: ray`, `servers` and no
    `folder`, else `disk`."""
    host: str | None = None
    """Address of this machine, as the workers reach it, for `tensors`; `null` is the one by which it reaches
    them."""

    def merged_because(self, lora: LoRAConfig) -> str | None:
        """Adapters come through a folder, or pickled, which opd never writes."""
        if self.sync == "tensors" and self.lora != "merged":
            return "sync is tensors, and adapters alone need a folder"
        return super().merged_because(lora)

    def lora_arguments(self, lora: LoRAConfig) -> dict[str, Argument]:
        """One adapter generates at a time, beside one under test."""
        targets = sorted(lora.targets or USUAL_TARGETS)
        arguments: dict[str, Argument] = {
            "lora-target-modules": targets,
            "max-loras-per-batch": 2,
        }
        return super().lora_arguments(lora) | arguments


COLDEST = 0.01
"""Minimum temperature above 0; vLLM raises lower ones to it."""


RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum adapter ranks that a vLLM server can be started for."""
SPECULATES = "vLLM 0.32 tells log-probabilities of what is left after its drafts, not those it draws by"


class VLLMEngineConfig(ServedEngineConfig):
    """The student writes on vLLM workers, as on those of SGLang. They are started with VLLM_SERVER_DEV_MODE=1
    (on an address that only this run's machines reach), `--enable-scale-out` and `--logprobs-mode
    processed_logprobs`, or `raw_logprobs` where the recipe has a `top_p` or `top_k`; groups of `servers` are.
    Temperatures below 0.01, others than 1 in a recipe with a `top_p` or `top_k`, and speculative decoding are
    refused."""

    type: Literal["vllm"]
    sync: Literal["folder", "delta"] | None = None
    """Way of new weights to the workers. `folder`: one on a shared file system, which the workers read.
    `delta`: to servers that the run starts on Ray, through its object store into a folder on each server's
    own node, all weights once and then the changes. `null` is `delta` with `launch: ray`, `servers` and no
    `folder`, else `folder`."""

    program: ClassVar[str] = "vllm"

    @field_validator("sync", mode="before")
    @classmethod
    def _by_folder(cls, sync: Any) -> Any:
        if sync in ("tensors", "disk"):
            raise ValueError(
                f"vLLM workers read new weights from a folder, so sync cannot be {sync}; leave it out, or"
                " take type sglang"
            )
        return sync

    @property
    def server_arguments(self) -> dict[str, Argument]:
        """Token ids in and out, and no sampling defaults of the model's folder."""
        return {"enable-scale-out": True, "generation-config": "vllm"}

    def server_environment(self, arguments: Mapping[str, Argument]) -> dict[str, str]:
        """Set the developers' mode, without which a server takes no weights, and the variables of adapters if
        it has them. With it several API servers do not start.
        """
        loads = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if arguments.get("enable-lora") else {}
        return {"VLLM_SERVER_DEV_MODE": "1", **loads}

    def merged_because(self, lora: LoRAConfig) -> str | None:
        """vLLM supports ranks up to a limit."""
        if lora.rank > RANKS[-1] and self.lora != "merged":
            return f"model.lora.rank is {lora.rank}, and vLLM's adapters have {RANKS[-1]} at most"
        return super().merged_because(lora)

    def lora_arguments(self, lora: LoRAConfig) -> dict[str, Argument]:
        """Use the smallest supported rank that suffices."""
        return super().lora_arguments(lora) | {"max-lora-rank": least_rank(lora)}


def least_rank(lora: LoRAConfig) -> int:
    """Return the smallest rank of vLLM's servers that suffices for these adapters."""
    return next(rank for rank in RANKS if rank >= lora.rank)


EngineConfig = Annotated[
    TorchEngineConfig | SGLangEngineConfig | VLLMEngineConfig, Field(discriminator="type")
]


Reads = Literal["folder", "whole", "published", "adapted", "nothing"]
"""The source of a teacher's weights. `folder`: a Hugging Face folder; a published model is fetched for it.
`whole`: either, as it is. `published`: the output of `opd publish`; a folder is published for it. `adapted`:
the same, with a model's separate adapters published beside its base. `nothing`: it has none on disk."""


class TeacherPromptConfig(Config):
    """The prompt that teachers read in place of the student's: text with `{prompt}`, `{label}` and any other
    column of the domain's source in braces. `{sibling}`, `{attempt}` and `{feedback}` are of the step's
    answers, once they are rewarded. `{{` and `}}` are braces."""

    user: str = Field(default="{prompt}", min_length=1)
    """Replaces a prompt of text, or the content of the last message of the user, which is `{prompt}`."""
    system: str | None = Field(default=None, min_length=1)
    """System message: replaces that of the prompt, or comes first. Prompts of text have none."""
    fallback: list[str] = []
    """Texts for an answer that lacks something `user` names: the first of them that can be filled and fits.
    `{prompt}` is the student's own prompt. An answer for which none is left has no teacher in this step."""
    success_threshold: float = 1.0
    """Least reward, as its function gives it, of a right answer. Such an answer may be a `{sibling}`, and has
    no `{attempt}`."""

    @property
    def is_the_students(self) -> bool:
        """Return whether it is the student's own prompt."""
        return self.system is None and self.user == "{prompt}"

    @property
    def group_columns(self) -> set[str]:
        """Return which of `FROM_GROUP` its texts name. They are filled once the step has its rewards."""
        return set().union(*(_group_columns_in(text) for text in (self.user, *self.fallback)))

    def alternatives(self) -> list[TeacherPromptConfig]:
        """Return the prompts to try, in their order."""
        return [
            self.model_copy(update={"user": text, "fallback": []}) for text in (self.user, *self.fallback)
        ]

    @field_validator("fallback", mode="before")
    @classmethod
    def _expand_text(cls, value: object) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_braces(self) -> TeacherPromptConfig:
        texts = [self.user, *self.fallback]
        needy = [bool(_group_columns_in(text)) for text in texts]
        if early := _group_columns_in(self.system or ""):
            raise ValueError(f"system holds columns alone, and not {{{min(early)}}}; name it in user")
        if not needy[0] and (self.fallback or self.success_threshold != 1.0):
            raise ValueError(
                "fallback and success_threshold have no effect, because user names none of"
                f" {', '.join(f'{{{name}}}' for name in FROM_GROUP)}; leave them out"
            )
        if not all(needy[:-1]):
            raise ValueError(
                "fallback goes on after a text that can always be filled; leave out what follows"
            )
        if needy[0] and not all(("prompt" in (n for _, n in template_columns(text))) for text in texts):
            raise ValueError("user and fallback ask without the question; put {prompt} into each of them")
        return self


def as_user_text(value: object) -> Any:
    """Return the settings of a teacher's prompt that is given as text."""
    return {"user": value} if isinstance(value, str) else value


FROM_GROUP = ("sibling", "attempt", "feedback")
"""What a teacher's prompt may say of a step's answers: a right answer of the same group, the answer itself if
it is wrong, and what the reward function says of it."""


def _group_columns_in(template: str) -> set[str]:
    """Return which of `FROM_GROUP` the template names."""
    return {name for _, name in template_columns(template) if name in FROM_GROUP}


def template_columns(template: str) -> list[tuple[str, str | None]]:
    """Split `template` into pairs of text and the column that follows it, `None` at the end. Raises
    `ValueError` for braces that hold anything but a column's name.
    """
    parts = []
    for text, column, form, conversion in Formatter().parse(template):
        if column is not None and (form or conversion or not column.isidentifier()):
            raise ValueError(
                f"braces hold the name of a column, such as {{prompt}} or {{label}}, and not {column[:40]!r};"
                " write {{ for a brace"
            )
        parts.append((text, column))
    return parts


class TeacherSettings(Config):
    """What every kind of teacher has."""

    type: str

    elsewhere: ClassVar[bool] = False
    """It computes outside of this run's processes."""
    needs_architecture: ClassVar[bool] = True
    """opd's own model code computes it and has to support the architecture."""
    is_student: ClassVar[bool] = False
    """Its weights are those that the run trains, or their average. It has none in a file."""

    @property
    def weight_source(self) -> Reads:
        """The source of its weights."""
        return "published"

    @property
    def streams_weights(self) -> bool:
        """True if weights are streamed and hidden states cached on disk, instead of weights in memory."""
        return self.weight_source in ("published", "adapted")


class LocalTeacherConfig(TeacherSettings):
    """A Hugging Face model that stays in this process's memory: the fastest, where all of them fit."""

    type: Literal["local"] = "local"

    @property
    def weight_source(self) -> Reads:
        """A folder."""
        return "folder"


class StreamedTeacherConfig(TeacherSettings):
    """Layers are read from published shards as they are needed, so that any number of teachers takes the
    memory of one. Adapters on one base read it once."""

    type: Literal["streamed"] = "streamed"

    @property
    def weight_source(self) -> Reads:
        """Published weights."""
        return "adapted"


class MegatronTeacherConfig(TeacherSettings):
    """Megatron-Core in this process (extra `megatron`); teachers of one architecture take turns on one
    module."""

    needs_architecture: ClassVar[bool] = False
    type: Literal["megatron"] = "megatron"
    tensor_parallel: int = Field(default=1, gt=0, le=4096)
    """Ranks that share a teacher. Above 1 needs that many processes with a process group."""
    keep: bool = False
    """Keep its weights in host memory; without, its published shards are read whenever its turn comes."""

    @property
    def weight_source(self) -> Reads:
        """Published weights, or with `keep` also a folder."""
        return "whole" if self.keep else "published"


class OwnTokens(Config):
    """What a teacher in files or on servers may have."""

    tokenizer: Annotated[str | None, Located(model=True)] = Field(default=None, min_length=1)
    """Folder or Hub model with the teacher's own tokenizer, if it is another than the student's. The teacher
    reads prompts by its own chat template and responses in its own tokens, which are aligned with the
    student's by their bytes. `null`: the student's tokenizer."""


class TeacherEntry(OwnTokens):
    """What an entry of `teachers` has beside its kind."""

    path: Annotated[Place | None, Located(model=True)] = Field(default=None, min_length=1)
    """A Hugging Face folder, an adapter folder of peft's, a model on the Hub (`org/name@revision`), or the
    URL of a published teacher (`opd publish`). `null` is the specialist that this run trains on the domain of
    that name."""


class LocalTeacherEntry(LocalTeacherConfig, TeacherEntry):
    __doc__ = LocalTeacherConfig.__doc__


class StreamedTeacherEntry(StreamedTeacherConfig, TeacherEntry):
    __doc__ = StreamedTeacherConfig.__doc__


class MegatronTeacherEntry(MegatronTeacherConfig, TeacherEntry):
    __doc__ = MegatronTeacherConfig.__doc__


class StudentTeacherConfig(TeacherSettings):
    """The student itself, by the weights that a step begins with: on-policy self-distillation. Its scores are
    constants of the step. It takes no memory for weights of its own."""

    is_student: ClassVar[bool] = True
    path: ClassVar[None] = None
    tokenizer: ClassVar[None] = None
    type: Literal["student"] = "student"
    moving_average: float | None = Field(default=None, gt=0, lt=1)
    """In place of the weights themselves their exponential moving average, from the stage's start on. This is
    its decay for each optimiser step: `0.99` remembers about the last 100. It is a copy of the weights that
    learn, in their precision, and is in the checkpoints. `null`: the weights themselves. Then the teacher
    must read another prompt than the student (`domains.NAME.teacher_prompt`)."""
    sync_every: int | None = Field(default=None, ge=1)
    """Optimiser steps between two changes of the teacher. Without `moving_average` it is a copy of the
    weights at the stage's start, renewed so often. With it the average takes one step of its decay so often.
    `null`: after each step."""

    @property
    def decay(self) -> float | None:
        """Decay of the copy of the weights that it needs. `None`: it needs none."""
        return 0.0 if self.moving_average is None and (self.sync_every or 1) > 1 else self.moving_average

    @property
    def weight_source(self) -> Reads:
        """None: it is not read."""
        return "nothing"


class ServedTeacherConfig(OwnTokens, TeacherSettings, ServerConfig):
    """What teachers behind HTTP have beside their kind."""

    path: Annotated[Place | None, Located(model=True)] = Field(default=None, min_length=1)
    """A Hugging Face folder, `org/name@revision`, or the URL of a published teacher: what the servers must
    be, and their head. With `servers` also `null`: the specialist that this run trains on the domain of that
    name."""
    signal: Literal["hidden", "topk", "sampled"]
    checksum: str | None = None
    """The servers' own checksum over all weights, which `opd doctor` prints; `null` compares the model's
    outputs alone."""

    elsewhere: ClassVar[bool] = True
    needs_architecture: ClassVar[bool] = False

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if self.path is None and self.servers is None:
            raise ValueError("give path, the model that the servers at urls must be")
        return self


def check_temperature(name: str, config: ServedTeacherConfig, temperature: float) -> None:
    """Raise `ConfigError` if servers cannot give the signal at `temperature`, as they score at 1 silently."""
    if config.signal != "hidden" and temperature != 1.0:
        raise ConfigError(
            f"teacher {name}: servers give log-probabilities at temperature 1 only, but rollout.temperature"
            f" is {temperature:g}; set teachers.{name}.signal to hidden, or the temperature to 1."
        )


class SGLangTeacherConfig(ServedTeacherConfig):
    """SGLang servers that run the model at `path` (extra `sglang`)."""

    kept: ClassVar[int] = SGLangEngineConfig.kept + 1  # a sample is a prompt to them
    type: Literal["sglang"] = "sglang"
    signal: Literal["hidden", "topk", "sampled"] = "hidden"
    """Numbers that a server returns. `hidden`: last hidden states, from which the published head rebuilds the
    whole vocabulary here, at any temperature. `topk`: log-probabilities of the `distill.loss.k` most likely
    tokens. `sampled`: those of the student's own tokens alone. A server gives log-probabilities at
    temperature 1 only, so the last two need `rollout.temperature: 1`."""
    weight_version: str | None = None
    """The version the servers must report; `null` takes what they report first. Either way a change stops the
    run."""

    @property
    def server_arguments(self) -> dict[str, Argument]:
        """Servers return hidden states only if an argument at their start says so."""
        return {"enable-return-hidden-states": True} if self.signal == "hidden" else {}


class VLLMTeacherConfig(ServedTeacherConfig):
    """vLLM servers that run the model at `path` (extra `sglang`, which is what a client needs)."""

    type: Literal["vllm"] = "vllm"
    signal: Literal["hidden", "topk", "sampled"] = "hidden"
    """Numbers that a server returns. `hidden`: last hidden states, from which the published head rebuilds the
    whole vocabulary here, at any temperature. It needs servers that pool (`--runner pooling`) and do not
    write. `topk`: log-probabilities of the `distill.loss.k` most likely tokens, which the servers'
    `--max-logprobs` must allow. `sampled`: those of the student's own tokens alone. A server gives
    log-probabilities at temperature 1 only, so the last two need `rollout.temperature: 1`."""
    checksum: str | None = None
    """The servers' own checksum over all weights, which `opd doctor` prints and servers tell only with
    VLLM_SERVER_DEV_MODE=1; `null` compares the model's outputs alone."""

    program: ClassVar[str] = "vllm"
    kept: ClassVar[int] = 1  # they generate a token after a sample
    POOLING: ClassVar[dict[str, Argument]] = {
        "runner": "pooling",
        "convert": "embed",
        "pooler-config": '{"task": "token_embed", "use_activation": false}',
    }

    @property
    def server_arguments(self) -> dict[str, Argument]:
        """A server gives either hidden states or log-probabilities, at most 20 of these unless an argument at
        its start says otherwise; -1 is any number.
        """
        return dict(self.POOLING) if self.signal == "hidden" else {"max-logprobs": -1}

    def server_environment(self, arguments: Mapping[str, Argument]) -> dict[str, str]:
        """Set the developers' mode, in which a server reports its dtype."""
        return {"VLLM_SERVER_DEV_MODE": "1"}


def _expand_name(value: object) -> Any:
    """Expand `streamed` to `{type: streamed}`."""
    if value == "resident":
        raise ValueError("resident teachers are called local now; set distill.teachers to local")
    return {"type": value} if isinstance(value, str) else value


_Here = LocalTeacherConfig | StreamedTeacherConfig | MegatronTeacherConfig
KINDS_HERE: dict[str, type[TeacherSettings]] = {
    kind.model_fields["type"].default: kind for kind in get_args(_Here)
}
TeacherConfig = Annotated[
    LocalTeacherEntry
    | StreamedTeacherEntry
    | MegatronTeacherEntry
    | StudentTeacherConfig
    | SGLangTeacherConfig
    | VLLMTeacherConfig,
    Field(discriminator="type"),
]
"""An entry of `teachers`."""
TeachersConfig = Annotated[_Here, Field(discriminator="type"), BeforeValidator(_expand_name)]
"""The kind of teachers without `type`, and of the specialists that the run trains."""
