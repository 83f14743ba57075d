"""Settings of responses: the student's, and those that domains and evaluation sets may override."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from opd.config.base import GENERATE, Changes, Config, Own
from opd.config.teachers import EngineConfig, ServedEngineConfig, TorchEngineConfig

MOST_KEPT = 1024
"""Most tokens of a sampling mask (`rollout.replay_masks`)."""


class WritingConfig(Config):
    """How responses are written; a domain or an evaluation set may have settings of its own."""

    temperature: Annotated[float, Changes("drawn")] = Field(default=1.0, ge=0.001, le=1000)
    """Sampling temperature; student and teacher are scored at it too."""
    top_p: Annotated[float, Changes("drawn")] = Field(default=1.0, gt=0, le=1)
    """Sample from the fewest tokens with at least this probability together; 1 is all of them."""
    top_k: Annotated[int, Changes("drawn")] = Field(default=0, ge=0)
    """Sample from this many of the most likely tokens; 0 is all of them."""
    max_new_tokens: int = Field(default=16, gt=0, le=100_000_000)
    """Response tokens after which a response is cut; it then counts as truncated."""
    generate: Annotated[str | None, Own(GENERATE)] = None
    """Dotted path of `generate(engine, prompts, group_size, sampling, seed) -> groups`, for responses of
    several turns with an environment, tools or search (`opd.rollout.collect`)."""


class TokenLogConfig(Config):
    """The log of a stage's rollouts: an interrupted run continues in the middle of a response."""

    fsync: Literal["always", "interval", "os"] = "interval"
    """Moment at which tokens are on the disk and not only with the operating system. Whatever the policy, no
    death of a process loses any. `always`: before anyone sees them. `interval`: a power cut may take the
    newest `interval_seconds`. `os`: a power cut may take all since the last checkpoint."""
    interval_seconds: float = Field(default=0.2, gt=0)
    """Seconds between two flushes with `fsync: interval`."""
    segment_mb: int = Field(default=64, gt=0)
    """Size of the log's files (MiB)."""
    keep: int = Field(default=20, ge=0, le=100_000)
    """Episodes whose commands stay in `stages/STAGE/episodes.kept` once they were learnt from, the newest of
    each process that writes responses, for `opd trajectory` after the run."""


class RolloutConfig(WritingConfig):
    """Settings for the student's responses."""

    engine: EngineConfig = TorchEngineConfig()
    """Engine that writes the responses: `{type: torch}`, `{type: sglang, urls: [...]}` or `{type: vllm, urls:
    [...]}`."""
    stop_ids: list[Annotated[int, Field(ge=0)]] = []
    """Token ids that end a response, beside those of `model_stop_ids`."""
    model_stop_ids: bool = True
    """`true`: a response also ends at the model's own end tokens: its tokenizer's end-of-sequence token and
    every `eos_token_id` of its `generation_config.json` and `config.json`. `false`: it ends at `stop_ids`
    alone."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that end a response, however they are cut into tokens; they stay in the response."""
    max_running: int = Field(default=512, gt=0, le=1_000_000)
    """Requests decoded together; more wait in the queue."""
    max_sequence: int = Field(default=4096, gt=1, le=100_000_000)
    """Prompt plus response tokens a request may take."""
    log: TokenLogConfig | None = TokenLogConfig()
    """`null` writes no log: a resumed stage then repeats the rollouts since its last checkpoint."""
    schedule: Literal["in_turn", "ahead", "async"] = "in_turn"
    """`in_turn`: the student writes a batch, learns from it, writes the next. `ahead`: it writes the next one
    while it learns, with weights one version older. `async`: the same up to `max_ahead` batches early, those
    in flight together, and new weights reach responses in the middle (each token keeps its version). For both
    consider a correction (`specialist.policy_loss`, `distill.policy_loss`)."""
    max_ahead: Annotated[int, Changes()] = Field(default=1, gt=0, le=1000)
    """Batches that may be begun before their turn with `schedule: async`; no token is older than that many
    versions when it is learnt from. With `over_sample` this is the bound on age alone: one batch is begun
    before its turn, and the groups over it."""
    max_staleness: Annotated[int | None, Changes()] = Field(default=None, ge=0)
    """Tokens older than this many versions leave the loss. They occur beyond `max_ahead` only where a resumed
    stage finishes responses of an earlier attempt. With `over_sample` a step waits for a group that would be
    older in the next one."""
    over_sample: float = Field(default=1.0, ge=1.0, le=2.0)
    """Groups in flight over those that a step takes. Above 1 a step begins once enough groups have ended, of
    each domain as many as it asks for. The others keep their tokens and go on in a later step (partial
    rollout), each token with its version. None is dropped, so no length is favoured. For it, too, consider a
    correction."""
    replay_experts: Literal["auto"] | bool = "auto"
    """Whether a mixture of experts learns with the experts to which the engine sent each token (routing
    replay, R3), in recomputed log-probabilities and in training. The weights of the experts are still the
    trainer's. The engine records the choices, a byte each. `auto`: with the embedded engine, if the model's
    choices can be replayed. `true`: so, and with SGLang's servers, or the run ends. `false`: the trainer
    chooses again, and rounding may choose otherwise. Teachers' answers have no choices to replay. Layers with
    replayed choices are not compiled."""
    replay_masks: Literal["auto"] | bool = "auto"
    """Whether a specialist whose responses are drawn with a `top_p` or `top_k` learns over the tokens from
    which each was drawn (keep sampling mask, DeepSeek-V3.2): ratios, the entropy, the reference KL and the
    gradient are then of the policy that wrote. The engine records the tokens, 4 bytes each, of cuts to at
    most 1024; others count as the whole vocabulary. `auto`: with the embedded engine, unless a teacher's
    loss needs log-probabilities of sampled tokens (all but `full`), or a `generate` writes. `true`: so, or
    the recipe is refused; a `generate` has to set `sampling_masks`. `false`: log-probabilities are of the
    whole vocabulary. The merge's are always."""
    reward_timeout: Annotated[float, Changes("aside")] = Field(default=60.0, gt=0)
    """Seconds a reward function may take for one batch."""

    @property
    def most_kept(self) -> int:
        """Most tokens of a sampling mask, and 0 if responses are not cut."""
        return min(self.top_k or MOST_KEPT, MOST_KEPT) if self.top_p < 1 or self.top_k else 0

    @property
    def least_age(self) -> int:
        """Versions between the weights that begin a batch and those that learn from it."""
        return 0 if self.schedule == "in_turn" else 1

    @property
    def most_carried(self) -> int | None:
        """Steps for which a group may go on. `None`: any number."""
        bounds = [self.max_staleness, self.max_ahead if self.schedule == "async" else None]
        given = [bound for bound in bounds if bound is not None]
        return min(given) - self.least_age if given else None

    def early_prompts(self, count: int) -> int:
        """Return how many of a step's next `count` prompts begin in it, by `over_sample`."""
        return math.ceil(round((self.over_sample - 1) * count, 6))

    @model_validator(mode="after")
    def _groups_can_go_on(self) -> RolloutConfig:
        if self.over_sample == 1:
            return self
        least = self.least_age + 1
        for needs, met, why in (
            ("a log", self.log is not None, "a resumed stage would write its unfinished responses again"),
            (
                f"max_staleness {least} or more",
                self.max_staleness is None or self.max_staleness >= least,
                "a group that goes on is older in the next step",
            ),
            (
                "max_ahead 2 or more with schedule async",
                self.schedule != "async" or self.max_ahead > 1,
                "it bounds their age",
            ),
            ("no generate", self.generate is None, "only single answers go on from their tokens"),
        ):
            if not met:
                raise ValueError(
                    f"over_sample needs {needs}, since {why}; change that, or leave over_sample out"
                )
        return self

    @model_validator(mode="after")
    def _ranks_write_in_turn(self) -> RolloutConfig:
        if isinstance(self.engine, TorchEngineConfig) and self.engine.sharded and self.schedule != "in_turn":
            raise ValueError(
                f"engine.sharded writes with the weights that are trained, so schedule {self.schedule} cannot"
                " write while they change; set schedule to in_turn, or leave sharded out"
            )
        return self

    @model_validator(mode="after")
    def _responses_end(self) -> RolloutConfig:
        if self.model_stop_ids:
            return self
        if isinstance(self.engine, ServedEngineConfig) and not self.engine.goes_on:
            raise ValueError(
                f"model_stop_ids false needs engine torch: {self.engine.type} workers always stop where their"
                " model says; leave it out"
            )
        if not self.stop_ids and not self.stop:
            raise ValueError(
                "with model_stop_ids false no response ends before max_new_tokens; give stop_ids or stop"
            )
        return self
