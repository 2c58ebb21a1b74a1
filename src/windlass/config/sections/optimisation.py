# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""How long to train, and how the weights are updated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windlass.config.enums import OptimizerNames, SchedulerType
from windlass.config.quantities import options_from
from windlass.config.sections.setting import FINITE, OWN_DISK, STRIDE, Range, at_least, between, setting


@dataclass(repr=False, eq=False)
class DurationSection:
    output_dir: str | None = setting(
        None,
        "Folder of this run's checkpoints, logs and report ('trainer_output' if not given).",
        per_rank=OWN_DISK,
    )
    per_device_train_batch_size: int = setting(
        8, "Samples per process in one forward and backward.", bounds=at_least(1)
    )
    num_train_epochs: float = setting(3.0, "Passes over the training data.", bounds=FINITE)
    max_steps: int = setting(
        -1,
        "Updates in all; a positive number overrides num_train_epochs.",
        bounds=at_least(-1, "; -1 leaves the length to num_train_epochs"),
    )


@dataclass(repr=False, eq=False)
class ScheduleSection:
    learning_rate: float = setting(5e-5, "Learning rate at the end of warm-up.", bounds=at_least(0))
    lr_scheduler_type: SchedulerType | str = setting("linear", "The learning rate's course after warm-up.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = setting(
        None, "Options of the schedule: a dict, JSON, or a JSON file.", document=True
    )
    warmup_steps: float = setting(
        0, "Updates of linear warm-up from 0; below 1 it is a share of all updates.", bounds=STRIDE
    )


@dataclass(repr=False, eq=False)
class OptimizerSection:
    optim: OptimizerNames | str = setting("adamw_torch_fused", "The optimizer.")
    optim_args: str | None = setting(
        None, "Options of the optimizer, as 'name=value, name=value'.", read=options_from
    )
    weight_decay: float = setting(
        0.0, "Decoupled weight decay; norms and biases are left out.", bounds=at_least(0)
    )
    adam_beta1: float = setting(
        0.9, "Decay of the first moment in Adam-like optimizers.", bounds=between(0, 1)
    )
    adam_beta2: float = setting(
        0.999, "Decay of the second moment in Adam-like optimizers.", bounds=between(0, 1)
    )
    adam_epsilon: float = setting(
        1e-8, "Added to the denominator of Adam-like optimizers.", bounds=at_least(0)
    )
    optim_target_modules: str | list[str] | None = setting(
        None,
        "Modules that a projecting optimizer (GaLore, APOLLO) projects.",
        refused="needs a projecting optimizer (GaLore, APOLLO), none of which is built yet",
    )


@dataclass(repr=False, eq=False)
class StabilitySection:
    gradient_accumulation_steps: int = setting(1, "Micro-batches per update and process.", bounds=at_least(1))
    average_tokens_across_devices: bool = setting(
        True,
        "Normalise by the targets of all processes (always so).",
        mapped="is always so; False is refused",
    )
    max_grad_norm: float = setting(
        1.0,
        "Clip the global gradient norm to this; 0 switches clipping off.",
        bounds=Range(lambda v: v >= 0, "must be at least 0; 0 switches clipping off"),
    )
    label_smoothing_factor: float = setting(
        0.0, "Share of probability spread evenly over all classes, in [0, 1).", bounds=between(0, 1)
    )
