"""The resolved configuration, frozen. Modules below `assemble/` read nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from windlass.core.mesh import Mesh
from windlass.core.types import State


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Fully sharded data parallelism (FSDP2).

    Attributes:
        reshard: True frees gathered parameters after each forward (full_shard), False keeps them until the backward
            (shard_grad_op), an integer reshards to that many ranks.
        replicas: replicas of the model over all ranks; above 1 it is hybrid sharding, with `world / replicas` ranks per
            replica. `replicas == world` shards nothing (no_shard).
        wrap: which submodules are gathered separately: those of `layers` (class names; by default the model's
            `_no_split_modules`), those of at least `min_parameters`, or only the whole model.
        cpu_offload: parameters, gradients and optimizer state stay in host memory between uses.
        param_dtype, reduce_dtype, output_dtype: None keeps that of the parameters.
        forward_prefetch, backward_prefetch: how many layers ahead are gathered explicitly; 0 leaves it to PyTorch.
        recompute: recompute the activations of each layer in the backward.
        recompute_offload: keep the inputs of recomputed layers in host memory.
        state: format in checkpoints: one file of whole tensors, or the shards of each rank.
        ram_efficient: only the first rank of each machine loads the weights into host memory; the others start from the
            meta device.
        ignored: regular expression or names of modules that are not sharded.
    """

    reshard: bool | int = True
    replicas: int = 1
    wrap: Literal["none", "transformer", "size"] = "none"
    layers: tuple[str, ...] = ()
    min_parameters: int = 100_000_000
    cpu_offload: bool = False
    param_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    reduce_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    output_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    recompute: bool = False
    recompute_offload: bool = False
    state: Literal["full", "sharded"] = "sharded"
    ram_efficient: bool = False
    ignored: str | tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ZeroPlan:
    """DeepSpeed's ZeRO: each rank has a part of the optimizer state (stage 1), the gradients (2), the parameters (3).

    Attributes:
        config: of DeepSpeed's engine; in a loop of the user's own, as it was given, with "auto" and the sections of
            the optimizer and the schedule.
        origin: where it was given, for messages.
        max_norm: the global norm to which a loop clips that does not do so itself; None does not clip.
        any_optimizer: an optimizer may be used of which it is not known if its update of an element depends on that
            element alone.
        divides_new: models of transformers are divided while they are built.
    """

    config: dict[str, Any]
    origin: str = "deepspeed"
    divides_new: bool = False
    max_norm: float | None = None
    any_optimizer: bool = False


Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
# Schedules whose ranks have several stages each.
_SEVERAL = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """How the layers of a model are divided among ranks."""

    size: int  # the ranks of a pipeline
    # The order of forwards and backwards, by its name in `torch.distributed.pipelining`
    schedule: Schedule = "1F1B"
    stages_per_rank: int = 1  # stages that each rank computes
    # Names of the modules with which all stages but the first begin; empty: as even as possible
    split_points: tuple[str, ...] = ()

    @property
    def placement(self) -> list[int]:
        """For each stage the rank that computes it: in turn, or there and back (a V) for a schedule that needs it."""
        there = list(range(self.size))
        return there + there[::-1] if self.schedule == "ZBVZeroBubble" else there * self.stages_per_rank


def usual_stages(schedule: str) -> int:
    """The stages of each rank unless they are set."""
    return 2 if schedule in _SEVERAL else 1


def unfit_stages(schedule: str, stages: int) -> str:
    """Why a rank cannot have so many stages; empty if it can."""
    if schedule not in _SEVERAL:
        if stages != 1:
            return f"must be 1 with {schedule}: set pp_schedule to {', '.join(_SEVERAL[:2])} for more"
    elif schedule == "ZBVZeroBubble":
        if stages != 2:
            return "must be 2 with ZBVZeroBubble, whose stages go there and back"
    elif stages < 2:
        return f"must be at least 2 with {schedule}: set pp_schedule=1F1B for one"
    return ""


NonFinitePolicy = Literal["raise", "skip", "rollback"]


@dataclass(frozen=True, slots=True)
class UpdateSize:
    """The batches of an update.

    Attributes:
        micro, accumulation: samples of a micro-batch, micro-batches of an update.
        ranks: how many ranks have different samples.
        asked: `gradient_accumulation_steps` of the arguments, from which `accumulation` may have been derived.
        asked_micro: `per_device_train_batch_size` of the arguments, if only smaller micro-batches fit in memory.
    """

    micro: int
    accumulation: int
    ranks: int
    asked: int
    asked_micro: int | None = None

    @property
    def samples(self) -> int:
        return self.micro * self.accumulation * self.ranks

    def within(self, limit: int) -> UpdateSize:
        """The same update, in micro-batches of at most `limit` samples."""
        if limit >= self.micro:
            return self
        # Of a size that divides them, all micro-batches are equally long, and no sample moves to another update.
        samples = self.micro * self.accumulation
        micro = max(size for size in range(1, limit + 1) if samples % size == 0)
        asked = self.asked_micro or self.micro
        return replace(self, micro=micro, accumulation=samples // micro, asked_micro=asked)

    def to_dict(self) -> State:
        """For a checkpoint, which has `ranks` under its first name, "world"."""
        return {"world" if name == "ranks" else name: value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, saved: State) -> UpdateSize:
        """Return what `to_dict` saved. Raises TypeError or KeyError if that is something else."""
        return cls(ranks=saved["world"], **{name: value for name, value in saved.items() if name != "world"})


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The batches that the arguments ask for; sizes in samples of one process.

    Attributes:
        ranks, rank: how many ranks have different samples, and which of them this is.
        micro, eval: samples of a micro-batch, and of a batch of an evaluation.
        accumulation: micro-batches of an update, of which `asked` are those of the arguments.
        fixed: `global_batch_size` decides the samples of an update, also of one that is resumed.
        finds: the largest micro-batch that fits in memory is found, and kept by a run that is resumed.
        split: the sizes of the arguments are those of all processes together.
    """

    micro: int
    accumulation: int
    ranks: int
    rank: int
    eval: int
    asked: int = 1
    fixed: bool = False
    finds: bool = False
    split: bool = False

    @property
    def update(self) -> int:
        return self.size.samples

    @property
    def size(self) -> UpdateSize:
        return UpdateSize(self.micro, self.accumulation, self.ranks, self.asked)


@dataclass(frozen=True, slots=True)
class DurationPlan:
    """`steps` updates in all, over at most `epochs` passes; `steps_per_epoch` is None for streams.

    Attributes:
        warmup: the first updates, in which the learning rate rises linearly.
    """

    steps: int
    warmup: int
    epochs: int
    steps_per_epoch: int | None


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """`name` is a key of the registry of optimizers. Nothing in it depends on the number of updates."""

    name: str = "adamw_torch"
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    options: dict[str, Any] = field(default_factory=dict)
    # Pattern that is searched for in names of parameters -> the options of their group
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    # The modules whose gradients an optimizer projects, as `optim_target_modules` names them
    targets: str | list[str] | None = None
    layer_decay: float = 1.0  # the learning rate of a layer is that of the layer above times this
    in_backward: bool = False  # it updates each parameter in the backward


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """The schedule, which is planned before the number of updates is known."""

    # `name`, `options`: a key of the registry of schedules, and the options of that schedule
    name: str = "linear"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Float8Plan:
    """How linear layers multiply in 8-bit floats."""

    recipe: str = "tensorwise"  # a name of torchao's recipes
    emulate: bool = False  # round to float8, and multiply in the dtype before
    pad: bool = True  # pad the number of tokens to a multiple of 16
    config: Any = None  # a script's `Float8LinearConfig` of torchao, which replaces the recipe and `pad`
    # A script's function (module, its name) -> whether the layer multiplies in float8
    selects: Callable[[Any, str], bool] | None = None


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """The dtypes in which a step computes."""

    # The autocast dtype; weights and optimizer state stay in the dtype the model came in
    compute: Literal["fp32", "bf16", "fp16"] = "fp32"
    tf32: bool | None = None
    float8: Float8Plan | None = None  # for linear layers; None if they compute in `compute` too

    @property
    def word(self) -> str:
        """The value of `mixed_precision`: "no", "bf16", "fp16" or "fp8"."""
        if self.float8 is not None:
            return "fp8"
        return "no" if self.compute == "fp32" else self.compute


@dataclass(frozen=True, slots=True)
class CompilePlan:
    """How a model is compiled."""

    backend: str = "inductor"  # a name of torch's registry
    mode: str | None = None  # one of inductor's modes; None for its default
    blocks: bool = False  # compile the repeated blocks, one graph for all, and not the whole model
    # Share of the activations that the compiler keeps for the backward, in [0, 1]; it recomputes the others. None
    # keeps what is fastest.
    memory_budget: float | None = None
    fullgraph: bool = False  # what does not fit into one graph is an error
    # The first graph is for any size; otherwise the compiler decides when a second size comes
    dynamic: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # of the backend, in place of a mode


@dataclass(frozen=True, slots=True)
class TransformPlan:
    """Transforms of the model, in the order of `apply_transforms` (`assemble/build.py`)."""

    # Parts of the model -> use Liger's kernel; None replaces none, {} those of its default
    liger: dict[str, bool] | None = None
    qat: str | None = None  # what linear layers round weights and inputs to (`QAT_SCHEMES`)
    recompute: bool = False
    recompute_options: dict[str, Any] = field(default_factory=dict)
    compile: CompilePlan | None = None
    neftune_alpha: float | None = None  # the scale of noise on the input embeddings while the run lasts


@dataclass(frozen=True, slots=True)
class StabilityPlan:
    """What keeps a run stable."""

    max_grad_norm: float | None = 1.0  # the norm to which gradients are clipped; None does not clip
    nonfinite: NonFinitePolicy = "raise"  # what happens if a loss or a norm is not finite
    watch_forwards: bool = False  # stop in the forward of the module in which a value becomes non-finite


@dataclass(frozen=True, slots=True)
class DataPlan:
    """How data is read."""

    workers: int = 0
    pin_memory: bool = True
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    multiprocessing_context: Any = None
    in_order: bool = True
    worker_init: Any = None  # called in each worker with its number
    # Seconds without a batch after which a worker is an error; 0 waits without a limit
    worker_timeout: float = 0
    start_timeout: float = 30.0  # seconds after which a forked worker that has not started is replaced
    purpose: Literal["training", "evaluation", "a prepared loader"] = "training"
    dispatch: bool = False  # the main process alone reads streams, and sends the other ranks their batches
    restart_epoch: bool = False  # a resumed run begins its epoch again, instead of continuing at its position
    drop_last: bool = False
    order: Literal["random", "sequential", "group_by_length", "batch_rebalance"] = "random"
    length_column: str = "length"
    seed: int = 42


@dataclass(frozen=True, slots=True)
class CadencePlan:
    """When something happens. `steps` is an absolute stride in updates (ratios are resolved before)."""

    strategy: Literal["no", "steps", "epoch", "best"] = "no"
    steps: int = 500


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What is saved, and when."""

    cadence: CadencePlan
    total_limit: int | None = None
    metric: str | None = None
    greater_is_better: bool = False
    load_best_at_end: bool = False
    # Seconds between ephemeral checkpoints, beside those of the cadence; None: none are made
    every: float | None = None
    background: bool = True  # checkpoints are written while training goes on
    host_memory: int | None = None  # limit in bytes on the copies for it; None: the memory of the host
    max_failures: int | None = None  # failed saves in a row at which the run ends; None: never
    # How many of the newest checkpoints are kept; None: all, up to `total_limit`
    keep_last: int | None = None
    # How many checkpoints of the best evaluations are kept; None: that of `load_best_at_end` alone
    keep_best: int | None = None
    model_only: bool = False  # checkpoints contain only the model, so a run cannot be resumed
    on_each_node: bool = False  # the final model is written on every disk


@dataclass(frozen=True, slots=True)
class PreemptionPlan:
    """How a run exits at the request of a scheduler."""

    signals: tuple[str, ...] = ()  # names of the signals that request it
    # Seconds after the first of them at which the process exits, even if it has not saved; None: no limit
    deadline: float | None = None
    deadline_text: str = ""  # `deadline` as the user wrote it


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """How evaluations run, whenever they do."""

    loss_only: bool = False  # keep no predictions
    batch_metrics: bool = False  # `compute_metrics` sees each batch
    include: tuple[str, ...] = ()  # what else `compute_metrics` is given: "inputs", "loss"
    # Batches after which kept predictions move to the host; None: at the end
    accumulate_steps: int | None = None
    concat: bool = True  # join batches into one array
    cast: Literal["bf16", "fp16"] | None = None  # the dtype to which weights are cast; None keeps theirs
    start_timeout: float = 30.0  # seconds for a data worker to start


@dataclass(frozen=True, slots=True)
class ReportPlan:
    """What a run counts for its reports."""

    tokens: Literal["no", "all", "non_padding"] = "no"  # which tokens `num_input_tokens_seen` counts
    memory: bool = False  # report peak memory
    empty_cache_every: int | None = None  # updates between two releases of cached device memory; None: never
    restore_callback_args: bool = False  # a resumed run builds callbacks with the checkpoint's arguments
    evaluate_first: bool = False  # evaluate before the first update


@dataclass(frozen=True, slots=True)
class DistPlan:
    """How the model is distributed over ranks. With one rank only `shard` has an effect.

    Attributes:
        find_unused_parameters: None: DDP searches unless blocks are recomputed re-entrantly; FSDP does not.
        strategy: a key of `transforms/strategies.py`; "ddp" is the plain one.
        comm_hook: how DDP compresses gradients during communication.
        reduce_each: gradients are reduced after each micro-batch, which needs less memory of a sharded model.
        context: how many ranks divide the sequences of a batch, among which keys and values travel.
        sequence: how many ranks divide each such part once more, and exchange heads.
        tensor, expert: how many ranks divide the layers, and with different samples the experts, of one model.
        tensor_positions: ranks that divide the layers divide the positions of hidden states between them.
        pipeline: how the layers are divided among further ranks; None: they are not.
    """

    timeout_seconds: int = 1800
    find_unused_parameters: bool | None = False
    bucket_cap_mb: int | None = None
    broadcast_buffers: bool | None = None
    static_graph: bool = False
    strategy: Literal["ddp", "fsdp", "deepspeed"] = "ddp"
    shard: ShardPlan | None = None
    zero: ZeroPlan | None = None
    comm_hook: Literal["no", "fp16", "bf16", "power_sgd", "batched_power_sgd"] = "no"
    comm_wrapper: Literal["no", "fp16", "bf16"] = "no"
    comm_options: dict[str, Any] = field(default_factory=dict)
    reduce_each: bool = False
    context: int = 1
    sequence: int = 1
    tensor: int = 1
    tensor_positions: bool = False
    expert: int = 1
    pipeline: PipelinePlan | None = None

    def mesh(self, ranks: int) -> Mesh:
        """The axes of a job of `ranks` ranks. Raises ConfigError if they do not divide into the replicas."""
        axes = {name: getattr(self, name) for name in ("expert", "context", "sequence", "tensor")}
        axes["pipeline"] = 1 if self.pipeline is None else self.pipeline.size
        whole = Mesh(replicate=ranks // math.prod(axes.values()), **axes)
        return whole if self.shard is None else whole.with_replicas(self.shard.replicas)


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The configuration of one call of a Trainer, as far as it does not depend on the length of the data. Loaders,
    optimizer, schedule, evaluations and preemption are made from its sections.
    """

    seed: int
    batches: BatchPlan
    optimizer: OptimizerPlan
    schedule: SchedulePlan
    precision: PrecisionPlan
    transforms: TransformPlan
    stability: StabilityPlan
    data: DataPlan
    evaluations: EvaluationPlan  # how each evaluation runs
    preemption: PreemptionPlan
    dist: DistPlan
    reports: ReportPlan


@dataclass(frozen=True, slots=True)
class RunPlan(CallPlan):
    """The complete configuration of a run: the plan of its call, and what depends on the length of the data."""

    batch: UpdateSize  # the size of updates
    duration: DurationPlan
    # `logging`, `evaluation`: when they happen
    logging: CadencePlan
    evaluation: CadencePlan
    save: SavePlan
