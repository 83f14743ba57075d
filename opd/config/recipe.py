"""The recipe: one YAML file (or several, merged) that describes a whole run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from opd.config.base import FILES, Changes, Config, Located, Name, Place
from opd.config.cross_field_checks import check_together
from opd.config.distill import DistillConfig, SharesConfig, WeightMerge
from opd.config.environments import NamedEnvironment
from opd.config.evaluation import EvaluationConfig
from opd.config.rewards import RewardConfig
from opd.config.rl import (
    FullVocabularyKL,
    SampledTokenK1,
    TeacherWeight,
    check_weights,
    is_scheduled,
    shared_out,
)
from opd.config.servers import ServerGroupConfig
from opd.config.sft import SFTConfig, WarmupConfig
from opd.config.specialist import SpecialistConfig
from opd.config.teachers import (
    KINDS_HERE,
    ServedEngineConfig,
    ServerConfig,
    SGLangTeacherConfig,
    StreamedTeacherConfig,
    StudentTeacherConfig,
    TeacherConfig,
    TeacherPromptConfig,
    TeacherSettings,
    as_user_text,
)
from opd.config.train import LaunchConfig, LocalLaunch, LoRAConfig, RuntimeConfig, TrainConfig
from opd.config.watch import DEFAULT_RULES, Rules
from opd.config.writing import RolloutConfig, WritingConfig
from opd.redact import hide_recipe_secrets


class StorageConfig(Config):
    """Place and memory of published teachers, of their hidden states and of a step's samples."""

    published: Annotated[Place | None, Located()] = Field(default=None, min_length=1)
    """URL below which the run publishes its teachers, each under its name: a folder, `file://` or `s3://`
    (extra `s3`); `null` is `published/` in the run folder."""
    shards: int = Field(default=1, gt=0, le=4096)
    """Files each published teacher is cut into: as many ranks read an equal part each."""
    prefetch_mb: int = Field(default=256, gt=0)
    """Memory for layers read ahead, shared by all teachers (MiB)."""
    cache_mb: int = Field(default=1024, ge=0)
    """Disk for teachers' hidden states, so that they need not wait in memory for their turn in the update
    (MiB); 0 keeps them in memory."""
    hidden_memory_mb: int | None = Field(default=None, ge=0)
    """Memory of the device for the teachers' hidden states of a step (MiB). Those of a teacher that do not
    fit go to the disk of `cache_mb`. Those of a killed step are computed again. `null` takes 64. On CUDA,
    after two steps, it takes half of the memory that their largest moment has left free, if that is more."""
    trajectories: Literal["memory", "disk"] = "memory"
    """Place of the samples of the merge and of GRPO between rollout and update. `disk`: in files, to which
    each response goes when it ends, with `rollout.over_sample` when a step takes its group. The step is
    planned from lengths alone. A micro-batch's tokens and hidden states are read at their turn and let go
    after it, to the same weights. Use it for long responses. Several ranks need a run folder that all of them
    see. A stage with `to_batch` keeps its samples in memory."""
    trajectory_mb: int = Field(default=1024, gt=0)
    """Memory for the heavy data of a micro-batch and of the next, with `trajectories: disk` (MiB):
    micro-batches are made smaller where theirs would take more."""


class DomainConfig(Config):
    """A source of prompts with a reward and a teacher, by name."""

    source: Annotated[str, Located(files=True)] = Field(min_length=1)
    """`procedural:NAME` (built in, or `procedural:package.module:Class`), `reasoning-gym:NAME` (extra), or a
    `.jsonl` / `.parquet` file. A file has the columns `prompt` (text or messages) and `label`, and may be of
    a data set on the Hub: `hf://datasets/org/name@revision/FILE`."""
    params: dict[str, Any] = {}
    """Arguments of the source; for a file, `domain` keeps the rows whose column `domain` says so."""
    reward: RewardConfig | None = None
    """Score of an answer: `package.module:function`, the name of a built-in reward (`math`), or a mapping
    with its `type` and settings. `null` takes the environment's rewards if there is one, else the source's
    own checker."""
    teacher: str | dict[str, TeacherWeight] | None = None
    """Name of a teacher, or weights over several, which are divided by their sum in each step. A weight may
    go by steps of the merge, as `[[0, 1.0], [50, 0.01]]`: linear between two points, constant before the
    first and after the last. `null` is the teacher of the domain's own name: the entry under `teachers`, or
    else the specialist that the run trains on it."""
    teacher_prompt: TeacherPromptConfig | None = None
    """Prompt that the domain's teachers read in place of the student's, such as one with the right answer:
    text (`"{prompt}\\n\\nThe right answer is {label}."`), or a mapping with `user` and `system`. The student
    learns to answer without it. A teacher may be the student's own start (`teachers.NAME.path` as
    `model.path`), or the student as it learns (`teachers.NAME.type: student`). `null`: the same prompt."""
    environment: NamedEnvironment | None = None
    """An agent's world, in which responses are episodes of several turns: `package.module:Class`, or a
    mapping with its `type` and settings."""
    weight: Annotated[float, Changes()] = Field(default=1.0, gt=0)
    """Share of the merge's loss, relative to the other domains, with `distill.normalise: teacher`."""
    held_out: float = Field(default=0.1, ge=0.0001, le=0.9999)
    """Share of the prompts kept for evaluation, chosen by a hash of the prompt."""
    long_prompts: Literal["drop", "truncate", "error"] = "drop"
    """Treatment of a prompt that leaves no room for `rollout.max_new_tokens` in `rollout.max_sequence` or in
    the model's positions. `drop`: it is left out, counted and named. `truncate`: it loses its beginning.
    `error`: it stops the run."""
    prompts: int = Field(default=20_000, gt=0, le=10_000_000)
    """Number of training prompts that a generated source makes."""
    sft: SFTConfig | None = None
    """Demonstrations that the domain's specialist learns from before GRPO, or in its place where
    `specialist.steps` is 0."""
    specialist: SpecialistConfig | None = None
    """Settings for this domain's specialist. They replace those of the recipe's `specialist`; fields that are
    not given here keep the recipe's values."""
    rollout: WritingConfig | None = None
    """Settings for this domain's responses, by its specialist, in the merge and when they are measured. They
    replace those of the recipe's `rollout`; fields that are not given here keep the recipe's values. If the
    temperature is another than the recipe's, the specialist also trains at it. The merge only writes with it
    and scores at the recipe's. The baseline `mixed_grpo` has one temperature, `top_p` and `top_k`, the
    recipe's."""
    distill: SharesConfig | None = None
    """Its share of the merge's steps, in place of the recipe's `distill`."""

    _weighs = field_validator("teacher")(check_weights)

    _expands = field_validator("teacher_prompt", mode="before")(as_user_text)

    @property
    def is_file(self) -> bool:
        """True if the source is a file, and not generated."""
        return self.source.endswith(FILES)


NOT_THE_TEMPLATES = (
    *("self", "conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message"),
    *("return_dict", "return_tensors", "padding", "truncation", "max_length", "chat_template"),
)
"""Arguments of `apply_chat_template` that opd sets."""


class ModelConfig(Config):
    """The student: a Hugging Face causal LM from a folder, or a new one from a configuration."""

    path: Annotated[str | None, Located(model=True)] = Field(default=None, min_length=1)
    """A Hugging Face folder, or a model on the Hub: `org/name`, or `org/name@revision` (a branch, tag or
    commit). A folder of that name wins. Which commit it was is kept with the run. Exactly one of `path` and
    `config` is given."""
    config: dict[str, Any] | None = None
    """`model_type` and the arguments of that Hugging Face configuration; the vocabulary size is filled in."""
    tokenizer: Annotated[str | None, Located(model=True)] = Field(default=None, min_length=1)
    """A Hugging Face folder, or `org/name`; `null` takes the model's own, or with `config` a character
    tokenizer over the domains' alphabets."""
    chat_template: Annotated[str | None, Located(model=True)] = None
    """A `.jinja` file, or a Hugging Face folder or `org/name` (a teacher's) whose template writes prompts
    that are messages; `null` takes the tokenizer's own. It stays with the models that come out."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, such as `{enable_thinking: false}`."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype in which student and teachers compute and models are written. `null` is the dtype of the weights
    at `path`, and float32 with `config`. Weights that learn are kept in float32 all the same
    (`train.precision`)."""
    quantize: Literal["fp8"] | None = None
    """Quantisation-aware training for FP8, in every trained stage. The matrices of layers hold the numbers
    that `opd publish --dtype fp8` makes of them: blocks of 128 x 128 with a scale each, a power of two. The
    optimiser moves float32 weights beside them, by their gradient. Engines get the same numbers, and trained
    models are written as FP8. Heads, embeddings and what chooses experts are not rounded. For the back end
    `torch`."""
    device: str = "auto"
    """`auto` takes CUDA where there is one."""
    lora: LoRAConfig | None = None
    """Train adapters on the base in place of its weights (extra `lora`): specialists, merge and trained
    baselines. The warm-up trains all weights. It works on every back end and any number of ranks. Engines of
    the run and on Ray receive only adapters and merge them. SGLang and vLLM workers receive only adapters and
    apply them, or receive merged weights (`rollout.engine.lora`)."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _the_templates_own(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for key in arguments:
            if key in NOT_THE_TEMPLATES:
                raise ValueError(f"{key} is set by opd; give only what the template itself reads")
        return arguments

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.path is None) == (self.config is None):
            raise ValueError(
                "give exactly one of model.path (a Hugging Face folder or org/name) and model.config"
            )
        return self

    @model_validator(mode="after")
    def _rounds_what_learns(self) -> ModelConfig:
        if self.quantize is not None and self.lora is not None:
            raise ValueError(
                f"model.quantize {self.quantize} rounds the weights that learn, and with model.lora adapters"
                " learn, whose sum with the base is no such number; leave one of the two out"
            )
        if self.quantize is not None and self.dtype == "float16":
            raise ValueError(
                f"float16 does not hold all numbers of model.quantize {self.quantize}; set model.dtype to"
                " bfloat16 or float32"
            )
        return self


BaselineName = WeightMerge | Literal["mixed_grpo", "off_policy"]
WEIGHT_MERGES = get_args(WeightMerge)
"""Baselines that do arithmetic on weights, and so need models of one configuration."""


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
    """Baselines to make; `[]` makes none."""
    scales: list[Annotated[float, Field(ge=0)]] = Field(
        default=[0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0], min_length=1
    )
    """Scaling coefficients tried for task arithmetic, TIES, DARE and DELLA, chosen on *training* prompts."""
    density: float = Field(default=0.5, gt=0, le=1)
    """Share of each task vector that TIES keeps and that DARE and DELLA do not drop, and of each tensor's
    positions that SCE selects."""
    tuning_prompts: int = Field(default=100, gt=0, le=1_000_000)
    """Training prompts per domain used to choose a coefficient."""
    mixed_grpo_all_tokens: bool = False
    """Also train mixed-domain GRPO for the tokens of all specialists plus the merge."""


OF_DOMAINS = {"specialist": SpecialistConfig, "rollout": WritingConfig}
"""Groups of settings that a domain may override, with their schema."""


def inherit_settings(data: object) -> Any:
    """Merge settings of each domain and evaluation set over the recipe's of the same name, in raw data."""
    if not isinstance(data, Mapping):
        return data
    filled = {}
    if isinstance(data.get("domains"), Mapping):
        filled["domains"] = _inherit_entries(data, data["domains"], OF_DOMAINS)
    evaluation = data.get("evaluation")
    if isinstance(evaluation, Mapping) and isinstance(evaluation.get("sets"), Mapping):
        sets = _inherit_entries(data, evaluation["sets"], {"rollout": WritingConfig})
        filled["evaluation"] = {**evaluation, "sets": sets}
    return {**data, **filled}


def _inherit_entries(
    data: Mapping[str, Any], entries: Mapping[str, Any], groups: Mapping[str, type[Config]]
) -> dict[str, Any]:
    """Merge the settings of `entries` in `groups` over those of `data`."""
    filled = {}
    for name, config in entries.items():
        settings = {}
        for key, schema in groups.items() if isinstance(config, Mapping) else ():
            if isinstance(config.get(key), Mapping):
                general = data.get(key)
                general = general.model_dump() if isinstance(general, Config) else general
                if isinstance(general, Mapping):
                    general = {
                        field: value for field, value in general.items() if field in schema.model_fields
                    }
                settings[key] = _merge_over(general, config[key])
        filled[name] = {**config, **settings} if settings else config
    return filled


def _merge_over(general: Any, specific: Any) -> Any:
    """Merge `specific` over `general`, key by key. Another `type` replaces it."""
    general = general.model_dump() if isinstance(general, Config) else general
    if not (isinstance(general, Mapping) and isinstance(specific, Mapping)):
        return specific
    if "type" in specific and specific["type"] != general.get("type", specific["type"]):
        return specific
    return {**general, **{key: _merge_over(general.get(key), value) for key, value in specific.items()}}


class Recipe(Config):
    """Everything a run needs."""

    name: str = Field(min_length=1, max_length=150)
    """Names the run: its folder below `runs/`, and the report."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Every random draw is a function of it: the same seed on the same machine gives the same weights."""
    run_dir: Annotated[str | None, Located()] = Field(default=None, min_length=1)
    """Run folder; `null` is `runs/NAME`."""
    model: ModelConfig
    domains: dict[Name, DomainConfig] = Field(min_length=1)
    teachers: dict[Name, TeacherConfig] = {}
    """Teachers that exist already, by `path`. One without `type` is of the kind of `distill.teachers`;
    specialists that the run trains need no entry."""
    base: WarmupConfig | None = None
    sft: SFTConfig | None = None
    """Demonstrations that the base learns from before anything else is trained: a cold start. Trains all
    weights."""
    servers: dict[Name, ServerGroupConfig] = {}
    """Groups of inference servers that the run starts and ends itself, by name; each is named by a teacher of
    `type: sglang` or `vllm`, or by `rollout.engine`."""
    rollout: RolloutConfig = RolloutConfig()
    specialist: SpecialistConfig = SpecialistConfig()
    distill: DistillConfig = DistillConfig()
    rounds: Annotated[int, Changes("aside")] = Field(default=1, gt=0, le=100)
    """Times that specialists are trained and merged. From the second round on they start from the merged
    student of the round before, and so does the student that they teach. It may grow while a run goes on."""
    min_round_gain: Annotated[float | None, Changes("aside")] = Field(default=None, ge=-1, le=1)
    """Least gain of a round: mean held-out accuracy of its student minus that of the model it started from,
    in [-1, 1]. A round with less is the last one. `null` runs all `rounds`, and measures at the end alone."""
    baselines: BaselinesConfig = BaselinesConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    watch: Rules = {**DEFAULT_RULES}
    """Rules over the metrics of every trained stage, by name: the default set and your own. An entry of a
    default rule changes the keys it gives, and `null` switches the rule off. `null` in place of all watches
    nothing. They may change between attempts."""
    storage: StorageConfig = StorageConfig()
    train: TrainConfig = TrainConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    launch: LaunchConfig = LocalLaunch()
    """`local`, `ray`, or a mapping with that `type` and its settings."""

    def teacher_weights(self, domain: str) -> dict[str, float]:
        """Return teachers of `domain` and their weights in the first step, which sum to 1. Empty if only its
        reward counts.
        """
        config = self.domains[domain]
        coef = None if config.distill is None else config.distill.kl_coef
        return shared_out(config.teacher or domain) if coef is None or coef > 0 else {}

    def teacher_plan(self, domain: str) -> dict[str, Any]:
        """Return `teacher_weights`, but as they were given if one of them goes by steps."""
        weights, given = self.teacher_weights(domain), self.domains[domain].teacher
        return dict(given) if weights and isinstance(given, dict) and is_scheduled(given) else weights

    def teacher_settings(self, name: str) -> TeacherSettings:
        """Return kind and settings of a teacher."""
        return self.teachers.get(name, self.distill.teachers)

    def teacher_tokenizer(self, name: str) -> str | None:
        """Return the folder of a teacher's own tokenizer, `None` if it has the student's."""
        entry = self.teachers.get(name)
        return None if entry is None else entry.tokenizer

    def domain_tokenizer(self, domain: str) -> str | None:
        """Return the folder of the tokenizer that the domain's teachers share, `None` for the student's."""
        names = self.teacher_weights(domain)
        return next((self.teacher_tokenizer(name) for name in names), None)

    def given_teachers(self) -> dict[str, str]:
        """Return folder or URL of each teacher that this run does not train."""
        return {name: entry.path for name, entry in self.teachers.items() if entry.path is not None}

    def student_teachers(self) -> dict[str, StudentTeacherConfig]:
        """Return the teachers that are the student itself."""
        return {name: one for name, one in self.teachers.items() if isinstance(one, StudentTeacherConfig)}

    @property
    def kept_by_servers(self) -> int:
        """Number of a model's positions that sequences leave free for servers."""
        users = (self.rollout.engine, *self.teachers.values())
        return max((one.kept for one in users if isinstance(one, ServerConfig)), default=0)

    @property
    def merged_because(self) -> str | None:
        """Why the student's servers get adapters merged into all weights. `None` if nothing in the recipe
        prevents sending adapters only.
        """
        engine, lora = self.rollout.engine, self.model.lora
        if lora is None or not isinstance(engine, ServedEngineConfig):
            return None
        if self.runtime.offload.engine and engine.lora != "merged":
            return "runtime.offload.engine has servers give back their base, too"
        return engine.merged_because(lora)

    @property
    def servers_in_turn(self) -> list[str]:
        """Groups of `servers` of which one at a time is awake (`runtime.offload.teachers`)."""
        if not self.runtime.offload.teachers:
            return []
        served = [entry for entry in self.teachers.values() if isinstance(entry, SGLangTeacherConfig)]
        return [group for entry in served if (group := entry.servers or entry.started_group) is not None]

    def teacher_domains(self) -> dict[str, list[str]]:
        """Map a teacher to its domains, in the order of the domains."""
        domains: dict[str, list[str]] = {}
        for domain in self.domains:
            for name in self.teacher_weights(domain):
                domains.setdefault(name, []).append(domain)
        return domains

    def following_teachers(self, trained: Collection[str]) -> Recipe:
        """Return the recipe for a GRPO stage on the domains `trained` whose `specialist.opd` names teachers.
        They become every domain's teachers, with its prompt in those, and `distill` gets its settings.
        """
        opd = self.specialist.opd
        if opd is None:  # nobody reads what is made of a step's answers
            late = {
                name: c
                for name, c in self.domains.items()
                if c.teacher_prompt and c.teacher_prompt.group_columns
            }
            plain = {name: c.model_copy(update={"teacher_prompt": None}) for name, c in late.items()}
            return self.model_copy(update={"domains": {**self.domains, **plain}}) if plain else self
        loss = opd.loss
        if isinstance(loss, SampledTokenK1):
            loss = loss.model_copy(update={"coef": opd.coef})
        settings = {"loss": loss, "mixture": opd.mixture, "kl_coef": 1.0, "batch": self.specialist.batch}
        distill = self.distill.model_copy(update=settings)
        of_domain = {"teacher": opd.teacher, "distill": None}
        domains = {name: config.model_copy(update=of_domain) for name, config in self.domains.items()}
        for name in trained if opd.teacher_prompt is not None else ():
            domains[name] = domains[name].model_copy(update={"teacher_prompt": opd.teacher_prompt})
        return self.model_copy(update={"distill": distill, "domains": domains})

    def opd_recipes(self) -> dict[str, Recipe]:
        """Map a domain to the recipe of its specialist's GRPO stage, if that follows teachers. The key `` has
        the recipe of the baseline over all domains, if that does.
        """
        recipes = {domain: self.for_domain(domain) for domain in self.grpo_domains()}
        if "mixed_grpo" in self.baselines.methods or self.baselines.mixed_grpo_all_tokens:
            recipes[""] = self
        return {
            domain: recipe.following_teachers([domain] if domain else self.domains)
            for domain, recipe in recipes.items()
            if recipe.specialist.opd is not None
        }

    def opd_teachers(self) -> dict[str, list[str]]:
        """Map a teacher to the domains on which a GRPO stage follows it, in the order of the domains."""
        by_teacher: dict[str, set[str]] = {}
        for domain, recipe in self.opd_recipes().items():
            for name in recipe.teacher_domains():
                by_teacher.setdefault(name, set()).update([domain] if domain else self.domains)
        return {
            name: [domain for domain in self.domains if domain in domains]
            for name, domains in by_teacher.items()
        }

    def used_teachers(self) -> list[str]:
        """Return every teacher of the merge, then those of GRPO stages only, in the recipe's order."""
        return list(dict.fromkeys([*self.teacher_domains(), *self.opd_teachers()]))

    def specialist_domains(self) -> list[str]:
        """Domains whose specialist this run trains: some domain names it as teacher and it has no path."""
        names = {name for domain in self.domains for name in self.teacher_weights(domain)}
        others = {*self.given_teachers(), *self.student_teachers()}
        return [domain for domain in self.domains if domain in names and domain not in others]

    @property
    def weight_merges(self) -> list[str]:
        """Merges of weights that the run makes, with the one that the student starts from."""
        methods: list[str] = [name for name in self.baselines.methods if name in WEIGHT_MERGES]
        start = self.distill.start
        return methods if start == "base" or start in methods else [start, *methods]

    @property
    def baseline_methods(self) -> list[str]:
        """Return the baselines, with the student's start and the all-token mixed run if set."""
        methods: list[str] = list(self.baselines.methods)
        methods = [name for name in self.weight_merges if name not in methods] + methods
        return [*methods, "mixed_grpo_all"] if self.baselines.mixed_grpo_all_tokens else methods

    @property
    def trains_base(self) -> bool:
        """True if the base is trained before specialists and merge start from it."""
        return self.base is not None or self.sft is not None

    def for_domain(self, domain: str) -> Recipe:
        """Return the recipe for training on `domain` alone, with its own settings in place."""
        config = self.domains[domain]
        sections: dict[str, Config] = {}
        if config.specialist is not None:
            sections["specialist"] = config.specialist
        if config.rollout is not None:
            sections["rollout"] = self.rollout.model_copy(update=dict(config.rollout))
        if config.distill is not None:
            distill = {key: value for key, value in config.distill if value is not None}
            sections["distill"] = self.distill.model_copy(update=distill)
        return self.model_copy(update=sections) if sections else self

    def with_rounds(self, number: int) -> Recipe:
        return self.model_copy(update={"rounds": number})

    def rollout_settings(self) -> dict[str, RolloutConfig]:
        """Map the key of each domain's and evaluation set's rollout settings to them; the run's own first."""
        settings = {"rollout": self.rollout}
        for where, recipe in (("domains", self), ("evaluation.sets", self.of_sets())):
            for name, config in recipe.domains.items():
                if config.rollout is not None:
                    settings[f"{where}.{name}.rollout"] = recipe.for_domain(name).rollout
        return settings

    @property
    def cuts_tokens(self) -> bool:
        """True if any response is drawn with a `top_p` or `top_k`."""
        return any(rollout.top_p < 1 or rollout.top_k > 0 for rollout in self.rollout_settings().values())

    @property
    def unmasked_because(self) -> str | None:
        """Why specialists cannot learn over the engine's sampling masks, or `None`."""
        opd = self.specialist.opd
        if self.rollout.engine.type != "torch":
            return f"{self.rollout.engine.type}'s streams do not tell them; take rollout.engine torch"
        if opd is not None and not isinstance(opd.loss, FullVocabularyKL):
            return (
                f"specialist.opd.loss {opd.loss.type} compares sampled tokens with a teacher's whole"
                " vocabulary; set it to full"
            )
        return None

    @property
    def replays_masks(self) -> bool:
        """True if specialists learn over the sampling masks of tokens that are drawn with a cut."""
        asked = self.rollout.replay_masks
        keeps = self.rollout.generate is None or asked is True  # a function of the user's own may drop them
        return asked is not False and keeps and self.unmasked_because is None

    def drawn_alike(self) -> Recipe:
        """Return the recipe with one temperature, `top_p` and `top_k` in all domains, for a policy that
        trains on all of them at one temperature."""
        drawn = {key: getattr(self.rollout, key) for key in ("temperature", "top_p", "top_k")}
        domains = {
            name: config
            if config.rollout is None
            else config.model_copy(update={"rollout": config.rollout.model_copy(update=drawn)})
            for name, config in self.domains.items()
        }
        return self.model_copy(update={"domains": domains})

    def of_sets(self) -> Recipe:
        """Return the recipe with its evaluation sets as its domains.

        All of a file is held out. Of generated data the share is held out that no generated domain trains on.
        """
        generated = [config.held_out for config in self.domains.values() if not config.is_file]
        least = min([DomainConfig.model_fields["held_out"].default, *generated])
        domains = {}
        keys = ("source", "params", "reward", "long_prompts", "rollout", "environment")
        for name, evaluation_set in self.evaluation.sets.items():
            config = DomainConfig(**{key: getattr(evaluation_set, key) for key in keys})
            domains[name] = config.model_copy(
                update={"held_out": 1.0 if config.is_file else least, "prompts": 0}
            )
        return self.model_copy(update={"domains": domains})

    def longest_response(self) -> int:
        """Return the maximum response tokens of any domain."""
        return max(self.for_domain(name).rollout.max_new_tokens for name in self.domains)

    def grpo_domains(self) -> list[str]:
        """Return domains whose specialist is trained with GRPO, after demonstrations or without any."""
        return [name for name in self.specialist_domains() if self.for_domain(name).specialist.steps]

    def is_started(self, domain: str) -> bool:
        """Return True if a stage before GRPO trains the specialist of `domain` on demonstrations."""
        return self.domains[domain].sft is not None and domain in self.grpo_domains()

    def demonstration_settings(self) -> dict[str, SFTConfig]:
        """Map a domain to its specialist's demonstrations; the key `` has the base's."""
        settings = {"": self.sft} if self.sft is not None else {}
        by_domain = {name: self.domains[name].sft for name in self.specialist_domains()}
        return settings | {name: sft for name, sft in by_domain.items() if sft is not None}

    def model_post_init(self, context: Any, /) -> None:
        """Hide the recipe's secrets in every process that loads it."""
        hide_recipe_secrets(self.model_dump(mode="json"))

    @model_validator(mode="before")
    @classmethod
    def _settings_of_domains(cls, data: object) -> Any:
        return inherit_settings(data)

    @model_validator(mode="before")
    @classmethod
    def _kinds_of_teachers(cls, data: Any) -> Any:
        """Give an entry without `type` the type and settings of `distill.teachers`."""
        entries = data.get("teachers") if isinstance(data, Mapping) else None
        if not isinstance(entries, Mapping):
            return data
        distill = data.get("distill", {})
        if isinstance(distill, DistillConfig):
            distill = distill.model_dump()
        chosen = distill.get("teachers") if isinstance(distill, Mapping) else None
        chosen = {"type": chosen} if isinstance(chosen, str) else chosen
        chosen = chosen if isinstance(chosen, Mapping) else {}
        # Errors in `distill.teachers` are reported there only.
        kind = KINDS_HERE.get(str(chosen.get("type")), StreamedTeacherConfig)
        settings = {key: chosen[key] for key in kind.model_fields if key in chosen}
        settings["type"] = kind.model_fields["type"].default
        typed = {
            name: {**settings, **entry} if isinstance(entry, Mapping) and "type" not in entry else entry
            for name, entry in entries.items()
        }
        return {**data, "teachers": typed}

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Recipe:
        check_together(self)
        return self
