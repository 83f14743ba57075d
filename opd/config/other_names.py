"""What other libraries' options are called here: slime's and TRL's flags, verl's keys.

One table. The command line answers such an option with its row; `table()` is that of the documentation
(`docs/reference/other_names.md`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from opd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Row:
    """Options of other libraries that ask for the same, and where it is here."""

    here: tuple[str, ...]
    """Dotted fields of a recipe; `NAME` stands for a name of your own."""
    note: str = ""
    slime: tuple[str, ...] = ()
    trl: tuple[str, ...] = ()
    verl: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """Every other name of it, without dashes in front."""
        return self.slime + self.trl + self.verl


_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_GRPO, _CLIP = "specialist", "specialist.policy_loss"

ROWS = (
    Row(
        (f"{_GRPO}.opd.teacher", "teachers.NAME.path", "teachers.NAME.type"),
        "within GRPO; in the job, or with `type: sglang` on servers; a merge distills anyhow",
        ("use-opd", "opd-type"),
    ),
    Row(("teachers.NAME.path",), "", ("opd-teacher-load",), ("teacher_model_name_or_path",)),
    Row(
        (f"{_GRPO}.opd.coef", "distill.loss.coef", "distill.rl_coef"),
        "within GRPO; in the merge `coef` with `distill.loss.type: k1`: the exact KL has weight 1 there and"
        " `rl_coef` is the reward's",
        ("opd-kl-coef",),
    ),
    Row(
        ("domains.NAME.source",),
        "columns `prompt`, `label`",
        ("prompt-data", "input-key", "label-key"),
        ("dataset_name",),
        ("data.train_files",),
    ),
    Row(
        ("domains.NAME.source",), "a `prompt` of messages goes through the template", ("apply-chat-template",)
    ),
    Row(
        ("domains.NAME.reward",),
        "`math`, `choice`, `f1`, `python`, ... or `(sample) -> float or dict`, `async` or TRL's form",
        ("custom-rm-path", "rm-type"),
        ("reward_funcs",),
        ("custom_reward_function.path",),
    ),
    Row(
        ("domains.NAME.reward",),
        "`{type: scorer, urls: [...], api: openrlhf}`; a language model: `{type: judge}`",
        ("rm-url",),
    ),
    Row(
        ("runtime.sinks",),
        "of `tensorboard`, `wandb`, `mlflow`, `trackio`; `metrics.jsonl` is always there",
        ("use-wandb", "use-tensorboard"),
        ("report_to",),
        ("trainer.logger",),
    ),
    Row(
        ("rollout.generate",),
        "`(engine, prompts, group_size, sampling, seed) -> groups`",
        ("rollout-function-path", "custom-generate-function-path"),
        ("rollout_func",),
    ),
    Row(
        (f"{_GRPO}.advantage", "distill.advantage"),
        "`{type: grpo}`, `dr_grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `gae`"
        " (specialists alone), or `{type: custom, path}`",
        ("advantage-estimator",),
        (),
        ("algorithm.adv_estimator",),
    ),
    Row(
        (f"{_GRPO}.advantage",),
        "`{type: dr_grpo}` divides by nothing",
        ("disable-grpo-std-normalization",),
        ("scale_rewards",),
        ("algorithm.norm_adv_by_std_in_grpo",),
    ),
    Row(
        (f"{_GRPO}.advantage.whiten",),
        "over all tokens of the step",
        ("normalize-advantages",),
    ),
    Row(
        (f"{_GRPO}.advantage.gamma", f"{_GRPO}.advantage.lam"),
        "with `advantage: {type: gae}`",
        ("gamma", "lambd"),
        ("lam",),
        ("algorithm.gamma", "algorithm.lam"),
    ),
    Row(
        (f"{_GRPO}.critic.optim.lr",),
        "the critic is the stage's own start with a value head",
        ("critic-lr",),
    ),
    Row(
        (f"{_GRPO}.critic.clip",),
        "`null`, the default, is no bound",
        ("value-clip",),
        ("cliprange_value",),
        ("critic.cliprange_value",),
    ),
    Row(
        (f"{_GRPO}.critic.warmup_steps",),
        "",
        ("num-critic-only-steps",),
        (),
        ("trainer.critic_warmup",),
    ),
    Row(
        (f"{_GRPO}.reference_kl.placement",),
        "`reward`, with `advantage: {type: gae}`",
        (),
        (),
        ("algorithm.use_kl_in_reward",),
    ),
    Row(
        (f"{_GRPO}.group_size", "distill.samples_per_prompt"),
        "",
        ("n-samples-per-prompt",),
        ("num_generations",),
        (f"{_ROLLOUT}.n",),
    ),
    Row(
        (f"{_GRPO}.prompts_per_step", "distill.prompts_per_domain"),
        "prompts, not responses",
        ("rollout-batch-size",),
        ("generation_batch_size",),
        ("data.train_batch_size",),
    ),
    Row(
        (f"{_GRPO}.minibatches",),
        "optimiser steps a rollout: prompts x responses / the batch size there",
        ("global-batch-size", "num-steps-per-rollout"),
        ("steps_per_generation",),
        (f"{_ACTOR}.ppo_mini_batch_size",),
    ),
    Row(
        (f"{_GRPO}.steps", "distill.steps"),
        "",
        ("num-rollout",),
        ("max_steps",),
        ("trainer.total_training_steps",),
    ),
    Row((f"{_GRPO}.epochs",), "", (), ("num_iterations", "num_ppo_epochs"), (f"{_ACTOR}.ppo_epochs",)),
    Row(
        (f"{_CLIP}.type",),
        "`clip`, `gspo`, `cispo`",
        (),
        ("importance_sampling_level",),
        (f"{_ACTOR}.policy_loss.loss_mode",),
    ),
    Row(
        (f"{_CLIP}.clip_low",),
        "",
        ("eps-clip",),
        ("epsilon", "cliprange"),
        (f"{_ACTOR}.clip_ratio_low",),
    ),
    Row((f"{_CLIP}.clip_high",), "", ("eps-clip-high",), ("epsilon_high",), (f"{_ACTOR}.clip_ratio_high",)),
    Row((f"{_CLIP}.dual_clip",), "", ("eps-clip-c",), ("delta",), (f"{_ACTOR}.clip_ratio_c",)),
    Row(
        (f"{_CLIP}.aggregation",),
        "`token` (`dapo`, `token-mean` there), `sequence` (`grpo`, `seq-mean-token-mean`), `constant`"
        " (`dr_grpo`, `seq-mean-token-sum-norm`) or `turn`; TRL's `cispo` is `policy_loss.type`",
        ("calculate-per-token-loss",),
        ("loss_type",),
        (f"{_ACTOR}.loss_agg_mode",),
    ),
    Row(
        (f"{_CLIP}.path", "distill.loss"),
        "`distill.loss: {type: custom, path}`",
        ("custom-loss-function-path",),
    ),
    Row(
        (f"{_CLIP}.correction",),
        "`{type: tis, upper: 2.0}`, `mis`, `icepop`, `seq_mask_tis`",
        ("use-tis", "tis-clip", "custom-tis-function-path"),
        ("vllm_importance_sampling_correction",),
    ),
    Row(
        (f"{_GRPO}.reference_kl.coef",),
        "",
        ("use-kl-loss", "kl-loss-coef", "kl-coef"),
        ("beta",),
        (f"{_ACTOR}.kl_loss_coef", "algorithm.kl_ctrl.kl_coef"),
    ),
    Row(
        (f"{_GRPO}.reference_kl.target",),
        "nats a token, not a response; `null` is the fixed coefficient",
        (),
        (),
        ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.type"),
    ),
    Row(
        (f"{_GRPO}.reference_kl.gain",),
        "the responses of a step, divided by the horizon, there",
        (),
        (),
        ("algorithm.kl_ctrl.horizon",),
    ),
    Row(
        (f"{_GRPO}.reference_kl.estimator",),
        "",
        ("kl-loss-type",),
        ("kl_estimator",),
        (f"{_ACTOR}.kl_loss_type", "algorithm.kl_penalty"),
    ),
    Row((f"{_GRPO}.entropy_coef",), "", ("entropy-coef",), (), (f"{_ACTOR}.entropy_coeff",)),
    Row(
        (f"{_GRPO}.group_filter", f"{_GRPO}.filter_zero_variance"),
        "",
        ("dynamic-sampling-filter-path",),
        (),
        ("algorithm.filter_groups.enable",),
    ),
    Row(
        (f"{_GRPO}.refill.limit",),
        "prompts that a step may take, in multiples of `prompts_per_step`; what carries signal by then is"
        " learned from",
        ("over-sampling-batch-size",),
        (),
        ("algorithm.filter_groups.max_num_gen_batches",),
    ),
    Row((f"{_GRPO}.shaping.weights",), "of a reward in parts", (), ("reward_weights",)),
    Row((f"{_GRPO}.shaping.mask_truncated",), "", (), ("mask_truncated_completions",)),
    Row(
        (f"{_GRPO}.shaping.truncated_reward",),
        "the most that a cut response is rewarded with, in place of a deduction",
        (),
        ("missing_eos_penalty",),
    ),
    Row(
        (f"{_GRPO}.shaping.overlong_buffer", f"{_GRPO}.shaping.overlong_penalty"),
        "",
        (),
        (),
        ("reward_model.overlong_buffer.len", "reward_model.overlong_buffer.penalty_factor"),
    ),
    Row((f"{_GRPO}.to_batch", "distill.to_batch"), "", ("custom-convert-samples-to-train-data-path",)),
    Row(
        ("rollout.max_new_tokens",),
        "",
        ("rollout-max-response-len",),
        ("max_completion_length",),
        ("data.max_response_length",),
    ),
    Row(("rollout.temperature",), "", ("rollout-temperature",), (), (f"{_ROLLOUT}.temperature",)),
    Row(
        ("rollout.log",),
        "an interrupted response always goes on after its logged tokens",
        ("partial-rollout",),
    ),
    Row(
        ("model.path",),
        "`org/name@revision` for one on the Hub; the reference policy is the model that a stage starts from",
        ("hf-checkpoint", "ref-load", "load"),
        ("model_name_or_path", "model_revision"),
        ("actor_rollout_ref.model.path",),
    ),
    Row(
        ("run_dir",),
        "or `--out`; `--resume` goes on",
        ("save",),
        ("output_dir",),
        ("trainer.default_local_dir",),
    ),
    Row(
        (f"{_GRPO}.checkpoint_every", "distill.checkpoint_every"),
        "",
        ("save-interval",),
        ("save_steps",),
        ("trainer.save_freq",),
    ),
    Row(("evaluation.every",), "", ("eval-interval",), ("eval_steps",), ("trainer.test_freq",)),
    Row((f"{_GRPO}.optim.lr", "distill.optim.lr"), "", (), ("learning_rate",), (f"{_ACTOR}.optim.lr",)),
    Row(
        (f"{_GRPO}.optim.max_grad_norm", "distill.optim.max_grad_norm"),
        "",
        ("clip-grad",),
        (),
        (f"{_ACTOR}.grad_clip",),
    ),
    Row(
        (f"{_GRPO}.batch.max_tokens", "distill.batch.max_tokens"),
        "",
        ("max-tokens-per-gpu",),
        (),
        (f"{_ACTOR}.ppo_max_token_len_per_gpu",),
    ),
    Row(
        (f"{_GRPO}.batch.recompute_layers", "distill.batch.recompute_layers"),
        "",
        ("recompute-granularity",),
        ("gradient_checkpointing",),
        ("actor_rollout_ref.model.enable_gradient_checkpointing",),
    ),
    Row(("sft.epochs", "domains.NAME.sft.epochs"), "", ("num-epoch",), ("num_train_epochs",)),
    Row(
        ("sft.source", "domains.NAME.sft.source"),
        "`messages`, or `prompt` and `completion`; only what the assistant writes counts, rows are packed",
        ("loss-mask-type",),
        ("assistant_only_loss", "completion_only_loss", "packing"),
    ),
    Row(("train.tensor_parallel",), "", ("tensor-model-parallel-size",)),
    Row(("train.pipeline_parallel",), "", ("pipeline-model-parallel-size",)),
    Row(("train.overlap",), "", ("overlap-grad-reduce",)),
    Row(
        ("train.context_parallel",),
        "",
        ("context-parallel-size",),
        (),
        (f"{_ACTOR}.ulysses_sequence_parallel_size",),
    ),
    Row(
        ("train.ranks", "launch.trainer"),
        "",
        ("actor-num-gpus-per-node", "actor-num-nodes"),
        (),
        ("trainer.n_gpus_per_node", "trainer.nnodes"),
    ),
    Row(
        ("rollout.engine", "launch.engines"),
        "SGLang or vLLM workers by URL, or engines on Ray",
        ("rollout-num-gpus", "rollout-num-gpus-per-engine"),
        ("use_vllm",),
        (f"{_ROLLOUT}.name",),
    ),
    Row(("launch.layout",), "with `launch: ray`", ("colocate",)),
    Row(
        ("model.lora",),
        "`{rank, alpha, targets}`",
        (),
        ("use_peft", "lora_r"),
        ("actor_rollout_ref.model.lora_rank",),
    ),
)

_BY_NAME = {
    name: (library, row)
    for row in ROWS
    for library, names in (("slime", row.slime), ("TRL", row.trl), ("verl", row.verl))
    for name in names
}


def refuse_other_name(option: str) -> None:
    """Raise `ConfigError` with the field to use if `option` (`--opd-kl-coef`) is another library's."""
    library, row = _BY_NAME.get(option.removeprefix("--"), ("", None))
    if row is None:
        return
    fields = " or ".join(f"--{field}" for field in row.here)
    note = f" ({row.note.replace('`', '')})" if row.note else ""
    raise ConfigError(f"{option} is {library}'s name; here it is {fields}{note}")


FORMER = {
    "teachers.*.server": "write the servers beside the path, `{type: sglang, path: ..., urls: [...]}`",
    "distill.backend": "set `distill.teachers` to `{type: megatron}`, or leave it out for torch",
    "distill.teachers.path": "it says of which kind teachers are; give each its own `teachers.NAME.path`",
    "distill.megatron": "set `distill.teachers` to `{type: megatron, tensor_parallel: ...}`",
}
"""What is no setting, or not any more, and what to write in its place."""


def former(path: Sequence[str | int]) -> str | None:
    """What to write in place of what stands at `path`, where that is known."""
    for pattern, now in FORMER.items():
        parts = pattern.split(".")
        if len(path) >= len(parts) and all(a in ("*", str(b)) for a, b in zip(parts, path, strict=False)):
            return now
    return None


def table() -> Iterator[str]:
    """The rows as lines of a Markdown table."""
    yield "| slime | TRL | verl | here |"
    yield "|---|---|---|---|"
    for row in ROWS:
        cells = [_cell(f"--{name}" for name in row.slime), _cell(row.trl), _cell(row.verl), _cell(row.here)]
        cells[-1] += f": {row.note}" if row.note else ""
        yield f"| {' | '.join(cells)} |"


def _cell(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
