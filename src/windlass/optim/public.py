"""The schedule helpers that scripts call themselves; each returns a torch scheduler to be stepped once per update."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from windlass.core.errors import ConfigError, Problem
from windlass.optim.schedule import build_factor, build_metric_driven, peak_lr
from windlass.optim.schedules.greedy import GreedyLR
from windlass.optim.schedules.registry import METRIC_DRIVEN, SCHEDULE_NAMES, WITHOUT_WARMUP
from windlass.optim.schedules.simple import Span


def get_scheduler(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
) -> Any:
    """The schedule called `name` as a torch scheduler. Raises ConfigError for an unknown name or option, or a number of
    steps that this schedule needs and was not given.
    """
    # Scripts pass members of transformers' enumeration `SchedulerType` too.
    name = str(getattr(name, "value", name))
    options = scheduler_specific_kwargs or {}
    if name in METRIC_DRIVEN:
        return build_metric_driven(name, optimizer, options)
    # A name that is not known is refused below, with those that are.
    if num_warmup_steps is None and name not in WITHOUT_WARMUP and name in SCHEDULE_NAMES:
        raise ConfigError(
            Problem("num_warmup_steps", None, f"the {name} schedule needs it; 0 for no warm-up")
        )
    return _lambda(name, optimizer, num_warmup_steps or 0, num_training_steps, -1, **options)


def get_constant_schedule(optimizer: Optimizer, last_epoch: int = -1) -> LambdaLR:
    """The same learning rate throughout."""
    return _lambda("constant", optimizer, 0, None, last_epoch)


def get_constant_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1
) -> LambdaLR:
    """Linear warm-up, then the same learning rate throughout."""
    return _lambda("constant_with_warmup", optimizer, num_warmup_steps, None, last_epoch)


def get_linear_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
) -> LambdaLR:
    """Linear warm-up, then a straight line to 0."""
    return _lambda("linear", optimizer, num_warmup_steps, num_training_steps, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """Linear warm-up, then `num_cycles` cosine waves."""
    return _lambda(
        "cosine", optimizer, num_warmup_steps, num_training_steps, last_epoch, num_cycles=num_cycles
    )


def get_cosine_with_hard_restarts_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: int = 1,
    last_epoch: int = -1,
) -> LambdaLR:
    """Linear warm-up, then `num_cycles` cosine falls, each from the peak."""
    name = "cosine_with_restarts"
    return _lambda(name, optimizer, num_warmup_steps, num_training_steps, last_epoch, num_cycles=num_cycles)


def get_polynomial_decay_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    lr_end: float = 1e-7,
    power: float = 1.0,
    last_epoch: int = -1,
) -> LambdaLR:
    """Linear warm-up, then a polynomial fall to the learning rate `lr_end`."""
    return _lambda(
        "polynomial", optimizer, num_warmup_steps, num_training_steps, last_epoch, lr_end=lr_end, power=power
    )


def get_inverse_sqrt_schedule(
    optimizer: Optimizer, num_warmup_steps: int, timescale: int | None = None, last_epoch: int = -1
) -> LambdaLR:
    """Linear warm-up, then a fall with the inverse square root of the step."""
    return _lambda("inverse_sqrt", optimizer, num_warmup_steps, None, last_epoch, timescale=timescale)


def get_cosine_with_min_lr_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> LambdaLR:
    """Linear warm-up, then cosine waves down to a floor."""
    options = {"num_cycles": num_cycles, "min_lr": min_lr, "min_lr_rate": min_lr_rate}
    return _lambda(
        "cosine_with_min_lr", optimizer, num_warmup_steps, num_training_steps, last_epoch, **options
    )


def get_cosine_with_min_lr_schedule_with_warmup_lr_rate(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> LambdaLR:
    """A warm-up that starts above 0, then cosine waves down to a floor."""
    return _lambda(
        "cosine_warmup_with_min_lr",
        optimizer,
        num_warmup_steps,
        num_training_steps,
        last_epoch,
        num_cycles=num_cycles,
        min_lr=min_lr,
        min_lr_rate=min_lr_rate,
        warmup_lr_rate=warmup_lr_rate,
    )


def get_wsd_schedule(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_decay_steps: int,
    num_training_steps: int | None = None,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """Warm-up, a plateau, then a decay."""
    return _lambda(
        "warmup_stable_decay",
        optimizer,
        num_warmup_steps,
        num_training_steps,
        last_epoch,
        num_decay_steps=num_decay_steps,
        num_stable_steps=num_stable_steps,
        warmup_type=warmup_type,
        decay_type=decay_type,
        min_lr_ratio=min_lr_ratio,
        num_cycles=num_cycles,
    )


def get_reduce_on_plateau_schedule(optimizer: Optimizer, **kwargs: Any) -> ReduceLROnPlateau:
    """Lower the learning rate when a metric stops improving; options as torch's `ReduceLROnPlateau`."""
    return build_metric_driven("reduce_lr_on_plateau", optimizer, kwargs)  # type: ignore[no-any-return]


def get_greedy_schedule(optimizer: Optimizer, **kwargs: Any) -> GreedyLR:
    """Raise and lower the learning rate as a metric moves; options as `GreedyLR`."""
    return build_metric_driven("greedy", optimizer, kwargs)  # type: ignore[no-any-return]


def _lambda(
    name: str, optimizer: Optimizer, warmup: float, total: float | None, last_epoch: int, **options: Any
) -> LambdaLR:
    factor = build_factor(name, Span(warmup, total, peak_lr(optimizer)), options)
    return LambdaLR(optimizer, factor, last_epoch)
