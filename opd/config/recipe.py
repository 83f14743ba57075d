"""The recipe: one YAML file (or several, merged) that describes a whole run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from opd.config.base import Config, Name
from opd.config.data import DomainConfig, RolloutConfig
from opd.config.distill import DistillConfig
from opd.config.launch import LaunchConfig, LocalLaunch
from opd.config.rl import SpecialistConfig
from opd.config.storage import StorageConfig
from opd.config.teachers import KINDS_HERE, StreamedTeacherConfig, TeacherConfig, TeacherSettings
from opd.config.train import BatchConfig, LoRAConfig, OptimConfig, TrainConfig
from opd.redact import learn


class ModelConfig(Config):
    """The student: a Hugging Face causal LM from a folder, or a new one from a configuration."""

    path: str | None = Field(default=None, min_length=1)
    """A Hugging Face folder. Exactly one of `path` and `config` is given."""
    config: dict[str, Any] | None = None
    """`model_type` and the arguments of that Hugging Face configuration; the vocabulary size is filled in."""
    tokenizer: str | None = Field(default=None, min_length=1)
    """A Hugging Face folder; `None` takes the model's own, or with `config` a character tokenizer over the
    domains' alphabets."""
    chat_template: str | None = None
    """A `.jinja` file, or a Hugging Face folder (a teacher's) whose template writes prompts that are
    messages; `None` takes the tokenizer's own. It stays with the models that come out."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, such as `{enable_thinking: false}`."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """What student and teachers compute in and models are written in; `null` is the dtype of the weights at
    `path`, and float32 with `config`. What learns is kept in float32 all the same (`train.precision`)."""
    device: str = "auto"
    """`auto` takes CUDA where there is one."""
    lora: LoRAConfig | None = None
    """Train adapters on the base in place of its weights (extra `lora`): specialists, merge and trained
    baselines; the warm-up trains all weights. Needs the torch back end in one process and its engine."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _the_templates_own(cls, given: dict[str, Any]) -> dict[str, Any]:
        ours = ("conversation", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict")
        for key in given:
            if key in (*ours, "return_tensors", "padding", "truncation", "max_length", "chat_template"):
                raise ValueError(f"{key} is set by opd; give only what the template itself reads")
        return given

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.path is None) == (self.config is None):
            raise ValueError("give exactly one of model.path (a Hugging Face folder) and model.config")
        return self


class WarmupConfig(Config):
    """Supervised warm-up of the base on demonstrations of mixed quality (for models made from scratch)."""

    steps: int = Field(default=480, gt=0, le=10_000_000)
    """Optimiser steps of a round; one round, unless `min_accuracy` asks for more."""
    batch_size: int = Field(default=192, gt=0, le=1_000_000)
    """Demonstrations per step, spread evenly over the domains."""
    right: float = Field(default=0.30, ge=0, le=1)
    """Share of demonstrations that are right."""
    wrong_rule: float = Field(default=0.45, ge=0, le=1)
    """Share that follows one consistent wrong rule; the rest is corrupted at random."""
    optim: OptimConfig = OptimConfig(lr=3e-3, schedule="cosine", final_lr_fraction=0.0, warmup_steps=20)
    batch: BatchConfig = BatchConfig()
    checkpoint_every: int = Field(default=100, gt=0)
    """Steps between checkpoints; a killed run repeats at most this many."""
    min_accuracy: float = Field(default=0.0, ge=0, le=1)
    """Warm up for another round if the base samples fewer right answers than this in any domain."""
    rounds: int = Field(default=4, gt=0, le=1000)
    """How many rounds of `steps`, each with its own learning-rate schedule, before that is an error."""


BaselineName = Literal["average", "task_arithmetic", "ties", "dare", "mixed_grpo", "off_policy"]
WEIGHT_MERGES = ("average", "task_arithmetic", "ties", "dare")
"""The baselines that do arithmetic on weights, and so need models of one configuration."""


class BaselinesConfig(Config):
    """Other ways to merge, measured beside the merge at its number of student tokens."""

    methods: list[BaselineName] = [
        "average",
        "task_arithmetic",
        "ties",
        "dare",
        "mixed_grpo",
        "off_policy",
    ]
    """Which of them to make; `[]` makes none."""
    scales: list[float] = Field(default=[0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0], min_length=1)
    """Scaling coefficients tried for task arithmetic, TIES and DARE, chosen on *training* prompts."""
    density: float = Field(default=0.5, gt=0, le=1)
    """Share of each task vector that TIES keeps and DARE does not drop."""
    tuning_prompts: int = Field(default=100, gt=0, le=1_000_000)
    """Training prompts per domain used to choose a coefficient."""
    mixed_grpo_all_tokens: bool = False
    """Also train mixed-domain GRPO for the tokens of all specialists plus the merge."""


class EvaluationConfig(Config):
    """Held-out accuracy, greedy and sampled at the rollout temperature."""

    prompts_per_domain: int = Field(default=500, gt=0, le=1_000_000)
    """Held-out prompts that every model answers."""
    samples_per_prompt: int = Field(default=1, gt=0, le=10_000)
    """Above 1 the intervals are too narrow: they take samples of one prompt as independent."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Of the intervals in results and report."""
    every: int = Field(default=0, ge=0)
    """Steps between evaluations inside the merge (0: only at the end), on `curve_prompts` prompts."""
    curve_prompts: int = Field(default=100, gt=0, le=1_000_000)
    """Held-out prompts a domain for the learning curve, where `every` is above 0."""


class RuntimeConfig(Config):
    """The machine."""

    threads: int | None = Field(default=None, gt=0, le=4096)
    """CPU threads per stage. Results are bit-identical only at the same number: `null` is settled when the
    run is created, and kept by `--resume`. With `model.path` the cores are shared among `workers` and this
    machine's ranks (with `launch: ray` it is what the trainer asks for); one of `model.config` takes one."""
    tf32: bool = False
    """Let GPUs round the factors of float32 products to 10 bits: faster, and nothing is exact any more."""
    workers: int = Field(default=1, gt=0, le=4096)
    """Stages that may run side by side."""
    tensorboard: bool = False
    """Write TensorBoard event files beside the JSON lines."""
    keep_checkpoints: int = Field(default=2, gt=0)
    """Newest checkpoints that a running stage keeps; the older ones are deleted."""
    grace_seconds: float = Field(default=30.0, gt=0)
    """How long a run that is told to stop (SIGTERM) may take to put away what it holds."""


class Recipe(Config):
    """Everything a run needs."""

    name: str = Field(min_length=1, max_length=150)
    """Names the run: its folder below `runs/`, and the report."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Every random draw is a function of it: the same seed on the same machine gives the same weights."""
    run_dir: str | None = Field(default=None, min_length=1)
    """Run folder; `None` is `runs/NAME`."""
    model: ModelConfig
    domains: dict[Name, DomainConfig] = Field(min_length=1)
    teachers: dict[Name, TeacherConfig] = {}
    """Teachers that exist already, by `path`. One without `type` is of the kind of `distill.teachers`;
    specialists that the run trains need no entry."""
    base: WarmupConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    specialist: SpecialistConfig = SpecialistConfig()
    distill: DistillConfig = DistillConfig()
    baselines: BaselinesConfig = BaselinesConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    storage: StorageConfig = StorageConfig()
    train: TrainConfig = TrainConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    launch: LaunchConfig = LocalLaunch()
    """`local`, `ray`, or a mapping with that `type` and its settings."""

    def teacher_weights(self, domain: str) -> dict[str, float]:
        """Teachers of `domain` and their weights, which sum to 1."""
        teacher = self.domains[domain].teacher or domain
        weights = {teacher: 1.0} if isinstance(teacher, str) else dict(teacher)
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    def teacher(self, name: str) -> TeacherSettings:
        """Kind and settings of a teacher."""
        return self.teachers.get(name, self.distill.teachers)

    def given_teachers(self) -> dict[str, str]:
        """Folder or URL of each teacher that this run does not train."""
        return {name: entry.path for name, entry in self.teachers.items() if entry.path is not None}

    def taught(self) -> dict[str, list[str]]:
        """Teacher -> the domains it teaches, in the order of the domains."""
        found: dict[str, list[str]] = {}
        for domain in self.domains:
            for name in self.teacher_weights(domain):
                found.setdefault(name, []).append(domain)
        return found

    def specialist_domains(self) -> list[str]:
        """Domains whose specialist this run trains: those some domain names as teacher without a path."""
        named = {name for domain in self.domains for name in self.teacher_weights(domain)}
        given = self.given_teachers()
        return [domain for domain in self.domains if domain in named and domain not in given]

    def model_post_init(self, context: Any, /) -> None:
        """Whoever has the recipe, in whatever process, writes its secrets nowhere."""
        learn(self.model_dump(mode="json"))

    @model_validator(mode="before")
    @classmethod
    def _kinds_of_teachers(cls, data: Any) -> Any:
        """An entry without `type` takes it, and the settings beside it, from `distill.teachers`."""
        entries = data.get("teachers") if isinstance(data, Mapping) else None
        if not isinstance(entries, Mapping):
            return data
        distill = data.get("distill", {})
        if isinstance(distill, DistillConfig):
            distill = distill.model_dump()
        chosen = distill.get("teachers") if isinstance(distill, Mapping) else None
        chosen = {"type": chosen} if isinstance(chosen, str) else chosen
        chosen = chosen if isinstance(chosen, Mapping) else {}
        # Whatever is wrong with `distill.teachers` is said of it alone.
        kind = KINDS_HERE.get(str(chosen.get("type")), StreamedTeacherConfig)
        own = {key: chosen[key] for key in kind.model_fields if key in chosen and key != "path"}
        own["type"] = kind.model_fields["type"].default
        typed = {
            name: {**own, **entry} if isinstance(entry, Mapping) and "type" not in entry else entry
            for name, entry in entries.items()
        }
        return {**data, "teachers": typed}

    @model_validator(mode="after")
    def _responses_end(self) -> Recipe:
        rollout = self.rollout
        if rollout.model_stop_ids:
            return self
        if rollout.engine.type == "sglang":
            raise ValueError(
                "rollout.model_stop_ids false needs rollout.engine torch: an SGLang worker always stops where"
                " its model says; leave it out"
            )
        if not rollout.stop_ids and not rollout.stop:
            raise ValueError(
                "with rollout.model_stop_ids false no response ends before rollout.max_new_tokens; give"
                " rollout.stop_ids or rollout.stop"
            )
        return self

    @model_validator(mode="after")
    def _one_stage_for_the_workers(self) -> Recipe:
        if self.rollout.engine.type == "sglang" and self.runtime.workers > 1:
            raise ValueError(
                "rollout.engine sglang gives its workers one student's weights, so stages cannot run side by"
                " side; set runtime.workers to 1"
            )
        return self

    @model_validator(mode="after")
    def _what_adapters_need(self) -> Recipe:
        if self.model.lora is None:
            return self
        needed = {
            "rollout.engine": (self.rollout.engine.type, "torch"),
            "train.backend": (self.train.backend, "torch"),
            "launch": (self.launch.type, "local"),
        }
        for key, (given, wanted) in needed.items():
            if given != wanted:
                raise ValueError(
                    f"model.lora needs {key} {wanted}, not {given}; change it or leave model.lora out"
                )
        return self

    @model_validator(mode="after")
    def _teachers_exist(self) -> Recipe:
        for name, entry in self.teachers.items():
            if entry.path is None and name not in self.domains:
                raise ValueError(
                    f"teachers.{name} has no path, and this recipe has no domain of that name to train it on;"
                    f" add teachers.{name}.path"
                )
        for domain, config in self.domains.items():
            if isinstance(config.teacher, dict) and (not config.teacher or min(config.teacher.values()) <= 0):
                raise ValueError(f"domains.{domain}.teacher: give teachers with positive weights")
            for name in self.teacher_weights(domain):
                if name not in self.teachers and name not in self.domains:
                    raise ValueError(
                        f"domains.{domain}.teacher names {name!r}, which is neither under `teachers` nor a"
                        f" domain of this recipe; add teachers.{name}.path"
                    )
        return self
