"""The frozen outcome of resolving a configuration: what every floor below `assemble/` reads, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

NonFinitePolicy = Literal["raise", "skip", "rollback"]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Sizes in samples. `update = micro * accumulation * world` samples make one update."""

    micro: int
    accumulation: int
    world: int
    rank: int
    eval: int

    @property
    def update(self) -> int:
        return self.micro * self.accumulation * self.world


@dataclass(frozen=True, slots=True)
class DurationPlan:
    """`steps` updates in all, over at most `epochs` passes; `steps_per_epoch` is None for streams."""

    steps: int
    epochs: int
    steps_per_epoch: int | None


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """`name` is a key of the optimizer registry, `schedule` one of the schedule registry."""

    name: str = "adamw_torch"
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    options: dict[str, Any] = field(default_factory=dict)
    schedule: str = "linear"
    schedule_options: dict[str, Any] = field(default_factory=dict)
    warmup_steps: int = 0


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """`compute` is the autocast dtype; weights and optimizer state stay in the dtype the model came in."""

    compute: Literal["fp32", "bf16", "fp16"] = "fp32"
    full_eval: Literal["no", "bf16", "fp16"] = "no"
    tf32: bool | None = None


@dataclass(frozen=True, slots=True)
class TransformPlan:
    """What is done to the model before it trains, in the order of `transforms/apply.py`."""

    recompute: bool = False
    recompute_options: dict[str, Any] = field(default_factory=dict)
    compile: bool = False
    compile_backend: str | None = None
    compile_mode: str | None = None


@dataclass(frozen=True, slots=True)
class StabilityPlan:
    max_grad_norm: float | None = 1.0
    nonfinite: NonFinitePolicy = "raise"


@dataclass(frozen=True, slots=True)
class DataPlan:
    workers: int = 0
    pin_memory: bool = True
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    multiprocessing_context: str | None = None
    in_order: bool = True
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
    output_dir: str
    cadence: CadencePlan
    total_limit: int | None = None
    metric: str | None = None
    greater_is_better: bool = False
    load_best_at_end: bool = False


@dataclass(frozen=True, slots=True)
class DistPlan:
    """Options of data parallelism; without meaning in a world of one."""

    timeout_seconds: int = 1800
    find_unused_parameters: bool = False
    bucket_cap_mb: int | None = None
    broadcast_buffers: bool | None = None
    static_graph: bool = False


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything a run does, decided before it starts."""

    seed: int
    batch: BatchPlan
    duration: DurationPlan
    optimizer: OptimizerPlan
    precision: PrecisionPlan
    transforms: TransformPlan
    stability: StabilityPlan
    data: DataPlan
    logging: CadencePlan
    logging_first_step: bool
    evaluation: CadencePlan
    save: SavePlan
    dist: DistPlan
