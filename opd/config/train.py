"""What every trained stage needs: back end and ranks, optimiser and schedule, batching, low-rank adapters;
where it runs: this machine, or actors of a cluster.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from opd.config.base import Changes, Config, Located

USUAL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Last names of the linear layers of most models: those that get an adapter if a recipe names none."""


class LoRAConfig(Config):
    """LoRA (arXiv 2106.09685): `W + alpha / rank * B A` with a frozen `W`, trained through `A` and `B`."""

    rank: int = Field(default=16, gt=0, le=16_384)
    """Columns of `B` and rows of `A`: what an adapter can express, and its size."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapters: `alpha / rank` times `B A` is added to the weight."""
    targets: list[str] | None = Field(default=None, min_length=1)
    """Last names of the linear layers, in the decoder's layers, that get an adapter. `null`: `q_proj`,
    `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj` and `down_proj`; of a model that lacks one of these,
    every linear layer there but those that route to experts."""

    @property
    def scaling(self) -> float:
        """Factor of `B A`."""
        return self.alpha / self.rank


class OptimConfig(Config):
    """AdamW with a warm-up and a decay of the learning rate."""

    lr: Annotated[float, Changes()] = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    schedule: Annotated[Literal["constant", "cosine", "linear"], Changes()] = "cosine"
    """Shape of the decay after the warm-up."""
    warmup_steps: Annotated[int, Changes()] = Field(default=0, ge=0)
    """Steps in which the learning rate rises from 0 to `lr`."""
    final_lr_fraction: Annotated[float, Changes()] = Field(default=0.1, ge=0, le=1)
    """Learning rate at the last step, as a fraction of `lr`."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's mean of gradients."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of AdamW's mean of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of that mean before the division."""
    weight_decay: Annotated[float, Changes()] = Field(default=0.0, ge=0)
    """AdamW's decoupled decay: the share of a weight, times the learning rate, that every step takes away."""
    max_grad_norm: Annotated[float, Changes()] = Field(default=1.0, gt=0)
    """The gradient is scaled down to this global L2 norm."""


class BatchConfig(Config):
    """Packing of samples for one forward and backward pass."""

    max_tokens: Annotated[Annotated[int, Field(gt=0)] | Literal["auto"], Changes()] = "auto"
    """Packed tokens per micro-batch (a longer single sample gets a micro-batch of its own). `auto` is 4096 on
    a CPU; on CUDA as many as fit into what is free when a stage first starts, 4096 to 32,768, and 16,384 in
    passes without a gradient. A stage that is resumed keeps its number for passes with one."""
    kl_chunk: int | None = Field(default=None, gt=0)
    """Tokens whose logits exist at the same time in the full-vocabulary KL. `null` is 1024 on a CPU; on a GPU
    4096, or fewer where two such chunks of logits would take more than a sixteenth of its memory."""
    recompute_layers: bool = False
    """Activation checkpointing: of each decoder layer only the input is kept for the backward pass, which
    computes the rest again. Less memory, a third more time."""
    sequence_chunk: int | None = Field(default=None, gt=0)
    """Micro-batches of more packed tokens than this go through the layers of student and teachers in pieces
    of so many, with attention block by block and layers computed again. One sequence of any length fits as
    long as its hidden states do. With `train.context_parallel` these are pieces of a rank's share. `null`
    runs every micro-batch as a whole."""


class TrainConfig(Config):
    """Back end that trains the student, and its processes. A run may be resumed with other settings."""

    backend: Literal["torch", "deepspeed", "megatron"] = "torch"
    """`torch`: this process alone, or FSDP2 with several ranks. `deepspeed`: ZeRO (extra `deepspeed`).
    `megatron`: Megatron-Core, which also cuts layers over ranks (extra `megatron`)."""
    ranks: int | None = Field(default=None, gt=0, le=4096)
    """Processes that `opd` starts on this machine for a run, or trainers on Ray. `null` is one, or as many as
    torchrun or Slurm has started."""
    zero_stage: Literal[1, 2, 3] = 3
    """Parts that `deepspeed` shards: optimiser state (1), gradients too (2), weights too (3)."""
    deepspeed: dict[str, Any] = {}
    """More of DeepSpeed's own settings, such as `{zero_optimization: {offload_optimizer: {device: cpu}}}`.
    What is said elsewhere in the recipe wins."""
    tensor_parallel: int = Field(default=1, gt=0, le=4096)
    """Ranks that share each layer and the vocabulary with `megatron`; the others share the batch."""
    pipeline_parallel: int = Field(default=1, gt=0, le=4096)
    """Stages into which the layers are cut with `megatron`, on ranks of their own; the last has the head and
    the loss. It is for models whose layers are too many for the ranks of `tensor_parallel`."""
    distributed_optimizer: bool | None = None
    """Let `megatron` cut the optimiser's state over the ranks that share the batch, with Megatron-Core's own
    optimiser for GPUs. `null`: if there is a GPU."""
    overlap: bool | None = None
    """Let `megatron` sum gradients over the ranks that share the batch while the last backward pass of a step
    still computes others. `null`: on CUDA, whose devices send while they compute."""
    context_parallel: Annotated[int, Field(gt=0, le=4096)] | Literal["auto"] = 1
    """Ranks that share each sequence with `torch` or `megatron`; groups of so many share the batch. Weights
    are shared as they are without it; it is for sequences that are too long for one rank. `auto` (`torch`)
    takes in each step the least divisor of the ranks with which a share of the longest sequence is at most
    `batch.max_tokens`: short batches are shared by sequence alone."""
    expert_parallel: Annotated[int, Field(gt=0, le=4096)] | Literal["auto"] = "auto"
    """Ranks that share the experts of a mixture's layers; 1 for none. Each has its part of the experts and
    never gathers others; tokens travel to them. With `torch` all ranks share them: by `auto` if they divide
    the experts of a layer and `batch.sequence_chunk` is not set; with 1 each rank gathers all experts of a
    layer. With `megatron` these are neighbours among the ranks that have the same slices of layers: by `auto`
    as many as divide the experts; with 1 each has all experts, cut by width with `tensor_parallel`."""
    precision: Literal["mixed", "pure"] = "mixed"
    """Dtype in which a bfloat16 or float16 model (`model.dtype`) learns. `mixed`: layers compute in that
    dtype, and weights and optimiser state are kept in float32. `pure`: trained weights have that dtype too,
    which saves memory and loses every update smaller than half a rounding of its weight: at lr 1e-5 most of
    them. For float32 models both are the same. No back end but `deepspeed` scales the loss for float16."""
    balance_rate: float = Field(default=0.0, ge=0, le=0.1)
    """How far each update moves the bias that routers like DeepSeek-V3's add to the scores that they choose
    by: up for experts with fewer tokens than the mean, down for those with more (loss-free balancing; 0.001
    in DeepSeek-V3). It changes no expert's weight and needs `rollout.replay_experts`, whose choices it
    counts. 0: the bias stays."""
    balance_loss: float = Field(default=0.0, ge=0, le=1)
    """Weight of a mixture's load-balancing loss, as transformers defines it (there `router_aux_loss_coef`).
    It pulls routers towards equal loads of the experts. It is taken of each micro-batch, whose share of the
    step's tokens is its weight. 0: none."""
    router_z_loss: float = Field(default=0.0, ge=0, le=1)
    """Weight of the routers' z-loss: the mean square of the log-sum-exp of a token's scores, over tokens and
    layers. It keeps scores small. 0: none."""
    compile: Literal["auto"] | bool = "auto"
    """Whether decoder layers run as compiled code with `torch`, all but their attention (`torch.compile`).
    It is tried on a few tokens against the layers' own code when a stage starts. `auto`: on CUDA if it passes
    there, and never on a CPU; a resumed stage goes on as it began. `true`: anywhere, or the run ends; a CPU
    needs a C++ compiler for it."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Seconds that a rank waits for another before the run ends. No rank's share of a batch of responses or
    rewards, step, checkpoint or model load may take longer. What the first rank alone does for all may, while
    it gives signs of life."""
    port: int | None = Field(default=None, gt=0, lt=65536)
    """Port at which the ranks that `opd` starts find each other; `null` takes a free one."""

    @model_validator(mode="after")
    def _refuse_settings_without_effect(self) -> TrainConfig:
        if self.context_parallel == "auto" and self.backend != "torch":
            raise ValueError(
                f"context_parallel auto is for backend torch, not {self.backend}; give it as a number"
            )
        shared = {"context_parallel": self.context_size, "expert_parallel": self.expert_parallel}
        for name, size in shared.items():
            if self.backend == "deepspeed" and size not in (1, "auto"):
                raise ValueError(
                    f"{name} has no effect with backend deepspeed; set backend to torch or megatron, or"
                    f" leave {name} at 1"
                )
        of_one = {
            "tensor_parallel": ("megatron", self.tensor_parallel > 1),
            "pipeline_parallel": ("megatron", self.pipeline_parallel > 1),
            "distributed_optimizer": ("megatron", self.distributed_optimizer is not None),
            "overlap": ("megatron", self.overlap is not None),
            "compile": ("torch", self.compile is True),
            "deepspeed": ("deepspeed", bool(self.deepspeed)),
            "zero_stage": ("deepspeed", self.zero_stage != 3),
        }
        for name, (backend, value) in of_one.items():
            if value and self.backend != backend:
                raise ValueError(
                    f"{name} has no effect with backend {self.backend}; set backend to {backend}, or leave"
                    f" {name} out"
                )
        if self.router_losses and self.backend == "deepspeed":
            raise ValueError(
                f"{self.router_losses[0]} has no effect with backend deepspeed; set backend to torch or"
                f" megatron, or leave {self.router_losses[0]} out"
            )
        if self.router_losses and self.pipeline_parallel > 1:
            raise ValueError(
                f"{self.router_losses[0]} is a loss of the routers of all layers, which stages of"
                " pipeline_parallel do not share; leave one of the two out"
            )
        if self.router_losses and self.context_parallel != 1:
            raise ValueError(
                f"{self.router_losses[0]} is a loss of whole micro-batches, whose tokens ranks share with"
                " context_parallel; leave one of the two out"
            )
        if self.router_losses and self.compile is True:
            raise ValueError(
                f"{self.router_losses[0]} reads the routers' scores, which compiled layers do not give; set"
                " compile to auto or false"
            )
        for name in sorted(self.deepspeed.keys() & type(self).model_fields.keys()):
            raise ValueError(f"deepspeed.{name} is none of DeepSpeed's settings; set train.{name}")
        if not isinstance(self.deepspeed.get("zero_optimization", {}), dict):
            raise ValueError(
                "deepspeed.zero_optimization holds settings by name, such as {overlap_comm: true}; give it"
                " so, or leave it out"
            )
        if self.ranks is not None and (misfit := self.rank_count_fault(self.ranks)):
            raise ValueError(misfit)
        return self

    @property
    def router_losses(self) -> list[str]:
        """Names of the losses of routers that have a weight."""
        return [name for name in ("balance_loss", "router_z_loss") if getattr(self, name)]

    def distributes_optimizer(self, on_cuda: bool) -> bool:
        """Return whether Megatron-Core's distributed optimiser is used: by itself only with CUDA."""
        return on_cuda if self.distributed_optimizer is None else self.distributed_optimizer

    @property
    def ranks_per_student(self) -> int:
        """Number of ranks that have the same samples: one student, shared."""
        return self.tensor_parallel * self.context_size * self.pipeline_parallel

    @property
    def context_size(self) -> int:
        """Context-parallel size; 1 for `auto`, which follows the lengths and divides any number of ranks."""
        return 1 if self.context_parallel == "auto" else self.context_parallel

    @property
    def offloads_itself(self) -> bool:
        """True if a DeepSpeed setting keeps something off the device."""
        settings = self.deepspeed.get("zero_optimization", {})
        parts = [settings.get(name) for name in ("offload_optimizer", "offload_param")]
        offloads = any(isinstance(part, dict) and part.get("device", "none") != "none" for part in parts)
        return self.backend == "deepspeed" and (offloads or settings.get("cpu_offload") is True)

    def rank_count_fault(self, size: int) -> str | None:
        """Return why `size` ranks cannot be divided as configured, with a fix; `None` if they can."""
        sizes = {
            "train.tensor_parallel": self.tensor_parallel,
            "train.context_parallel": self.context_size,
            "train.pipeline_parallel": self.pipeline_parallel,
        }
        widths = {name: size for name, size in sizes.items() if size > 1}
        ranks = "1 rank" if size == 1 else f"{size} ranks"
        if self.backend == "megatron":
            copies = size // (self.tensor_parallel * self.pipeline_parallel)
            if self.expert_parallel != "auto" and copies % self.expert_parallel:
                return (
                    f"train.expert_parallel is {self.expert_parallel}, and of {ranks} {copies} have the same"
                    " slices of layers, which groups of so many do not divide; set it to auto, or to a number"
                    f" that divides {copies}"
                )
        elif self.expert_parallel not in (1, "auto", size):
            return (
                f"train.expert_parallel is {self.expert_parallel} with {ranks}, all of which share experts or"
                f" none do; set it to auto, or start {self.expert_parallel} ranks"
            )
        if size % self.ranks_per_student == 0:
            return None
        if len(widths) > 1:
            product = " x ".join(f"{name} {width}" for name, width in widths.items())
            return (
                f"{ranks} cannot be divided into groups of {product} = {self.ranks_per_student}; start"
                f" {self.ranks_per_student} ranks or a multiple of that, or make the groups smaller"
            )
        [(name, width)] = widths.items()
        fitting = " or ".join(str(some) for some in range(1, size + 1) if size % some == 0)
        return (
            f"{ranks} cannot be divided into groups of {name} {width}; set it to {fitting},"
            f" or start {width} ranks or a multiple of that"
        )


class ActorResources(Config):
    """Resources that one actor of a role asks of its node."""

    cpus: float = Field(default=1.0, ge=0)
    """Processors that Ray sets aside for it."""
    gpus: float = Field(default=0.0, ge=0)
    """A fraction shares a GPU with other actors of its bundle."""
    memory_mb: int = Field(default=0, ge=0)
    """0 asks for none in particular."""
    custom: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Resources of your own by name, such as `{h200: 1}`."""


class LocalLaunch(Config):
    """Everything in the process that was started (and, with `runtime.workers`, its children)."""

    type: Literal["local"] = "local"


class RayLaunch(Config):
    """The trainer, its rollout engines and its teachers as actors of a Ray cluster (extra `ray`)."""

    type: Literal["ray"] = "ray"
    address: str | None = None
    """`HOST:PORT` of a running cluster, or `auto` for the one this process belongs to (`RAY_ADDRESS`, a job).
    `null` starts a cluster on this machine for this run alone, and ends it."""
    port: int | None = Field(default=None, gt=0, lt=65536)
    """Port of the cluster this run starts; `null` takes a free one."""
    working_dir: str | None = None
    """A folder that Ray copies to every node, where `opd` or your own modules are not installed there."""
    layout: Literal["colocated", "disaggregated"] = "colocated"
    """`colocated`: the engines and teachers share the bundle, and so the node and devices, of their trainer.
    `disaggregated`: every actor has a bundle of its own, on other nodes if there are some."""
    engines: int = Field(default=1, gt=0, le=4096)
    """Rollout engines, at least one for each of `train.ranks`. A batch is shared out among them; one that
    dies costs time alone. With a served `rollout.engine` none is started."""
    teachers: int = Field(default=1, ge=0, le=4096)
    """Teacher actors; the teachers are dealt out to them in turn. 0 keeps them in the trainer. Served ones
    (`type: sglang`) are elsewhere already: where all are, no actor is started."""
    trainer: ActorResources = ActorResources()
    engine: ActorResources = ActorResources()
    teacher: ActorResources = ActorResources()
    server: ActorResources = ActorResources()
    """Resources of each server under `servers`; `gpus` for each of its `tensor_parallel`. Every server has a
    bundle of its own, on any node."""
    placement_timeout: float = Field(default=120.0, gt=0)
    """Seconds to wait for the resources."""
    start_timeout: float = Field(default=300.0, gt=0)
    """Seconds an actor may take to start, or to come back after its death, with its model loaded."""
    step_timeout: float = Field(default=600.0, gt=0)
    """Seconds an engine may take for one call, and a teacher for one mini-batch, before it is taken for
    hanging and started anew."""
    trainer_timeout: float | None = Field(default=None, gt=0)
    """Seconds without a finished step after which the trainer is taken for hanging and started anew."""
    max_restarts: int = Field(default=3, ge=0)
    """Number of times that each actor of a stage may be started anew before the run gives up."""
    bucket_mb: int = Field(default=256, gt=0)
    """Weights travel to the engines, and to servers with `rollout.engine.sync: delta`, in pieces of about
    this size."""


def _expand_name(value: object) -> Any:
    """Expand `launch: ray` to `launch: {type: ray}`."""
    return {"type": value} if isinstance(value, str) else value


LaunchConfig = Annotated[LocalLaunch | RayLaunch, Field(discriminator="type"), BeforeValidator(_expand_name)]


class DecodeConfig(Config):
    """How an engine in the run's own processes decodes."""

    kv_cache_mb: int | None = Field(default=None, gt=0)
    """Most memory for keys and values (MiB). As many requests are decoded together as may grow to their
    limits within it, and the others wait. On CUDA, in 16 bits, requests take pages of 256 tokens as they
    grow. If the pages run out, the last requests wait and are computed again. `null` is half of the device's
    memory."""
    cuda_graphs: bool = True
    """Capture decode steps on CUDA as graphs, each of which is one launch. A step that cannot be captured is
    run as it is, with a line in the log."""


class OffloadConfig(Config):
    """What leaves the device's memory while others use it: rollout, teachers and training own it in turn. The
    weights that a run ends with stay the same, bit for bit. Needs `rollout.schedule: in_turn`.
    """

    engine: bool = False
    """The engine gives everything back (weights, the copies that decode makes of them, keys and values, CUDA
    graphs) after a batch is written. The next push of weights wakes it. Of a base with adapters it gives back
    the merged layers alone, because nobody pushes the base. For engines of the run's processes, on Ray, and
    SGLang servers that the run starts (`servers`), which are told `enable-memory-saver`."""
    trainer: bool = False
    """Weights, AdamW's moments and buffers of gradients leave until they are used, on every back end and each
    rank its own. They go from a GPU to pinned memory of the host, and from a CPU to a file in the run folder.
    The file takes 12 bytes a parameter in float32 and is compared with its digest when it is read. Weights
    that an engine shares with the trainer (`rollout.engine.sharded`) stay."""
    teachers: bool = False
    """SGLang servers that the run starts for teachers (`servers`) take turns. Those of the teacher that
    scores are awake and have proved their weights. All others have given their devices' memory back, and keep
    their weights in the host's. Of groups that share `devices` only the largest of them counts then. None
    scores while the student writes."""

    def check(self, schedule: str, train: TrainConfig, *, ends: bool) -> None:
        """Raise `ValueError` if nothing can take over the device. `ends`: engines end with the run."""
        for name in ("engine", "trainer", "teachers"):
            if getattr(self, name) and schedule != "in_turn":
                raise ValueError(
                    f"runtime.offload.{name} needs rollout.schedule in_turn: with {schedule} the student"
                    " writes while it learns; leave one of the two out"
                )
        if self.engine and not ends:
            raise ValueError(
                "runtime.offload.engine puts engines to sleep that this run can wake, and servers of"
                " rollout.engine.urls would still sleep after it; name servers that the run starts"
                " (rollout.engine.servers), or leave it out"
            )
        if self.trainer and train.offloads_itself:
            raise ValueError(
                "runtime.offload.trainer puts away what train.deepspeed lets DeepSpeed keep in the host's"
                " memory (zero_optimization.offload_*); leave one of the two out"
            )


class RuntimeConfig(Config):
    """Threads, decoding, offload, trackers and checkpoints on this machine."""

    threads: int | None = Field(default=None, gt=0, le=4096)
    """CPU threads per stage. Results are bit-identical only at the same number. `null` is settled when the
    run is created, and kept by `--resume`. A model of `model.config` takes one thread. With `model.path` this
    machine's ranks and `workers` share the cores. Merge and evaluation, beside which nothing trains, do not
    share with `workers`. With `launch: ray` it is the number that the trainer asks for."""
    tf32: bool = False
    """Let GPUs round the factors of float32 products to 10 bits: faster, and nothing is exact any more."""
    workers: int = Field(default=1, gt=0, le=4096)
    """Stages that may run side by side."""
    decode: DecodeConfig = DecodeConfig()
    """Memory and CUDA graphs of the embedded engine, which writes responses in the run's own process."""
    offload: OffloadConfig = OffloadConfig()
    """Parts that leave the device's memory while other parts use it."""
    tensorboard: bool = False
    """Write TensorBoard event files beside the JSON lines: short for `tensorboard` among `sinks`."""
    sinks: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    """Trackers that get the metrics too, each with the extra of its name (`trackio`: `pip install trackio`).
    They write on this machine alone, unless their own environment variables say otherwise. One that fails is
    a warning."""
    keep_checkpoints: int = Field(default=2, gt=0)
    """Newest checkpoints that a running stage keeps; the older ones are deleted."""
    weights_cache_mb: int | None = Field(default=None, ge=0)
    """Disk of each node for weights of teachers in an object store, which is then read once in a run and not
    at every step (MiB). `null` is as much as they take, 0 none. Teachers in folders need none."""
    weights_cache: Annotated[str | None, Located()] = Field(default=None, min_length=1)
    """Folder for them on each node's own disk, which keeps them for other runs; `null` is in the run folder,
    until the run has ended. Name one where the run folder is on a network file system."""
    grace_seconds: float = Field(default=30.0, gt=0)
    """Seconds that a run may take to put away what it holds when it is told to stop (SIGTERM)."""
