# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""The length of a run, the schedule and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windlass.config.enums import OptimizerNames, SchedulerType
from windlass.config.parallel.keys import setting_of
from windlass.config.parallel.rows_training import ACCUMULATION
from windlass.config.quantities import options_from
from windlass.config.sections.setting import (
    FINITE,
    OWN_DISK,
    STRIDE,
    Range,
    at_least,
    between,
    setting,
)


@dataclass(repr=False, eq=False)
class OptimisationSection:
    # --- length of the run ---
    output_dir: str | None = setting(
        None,
        "Folder of checkpoints, logs and the report of this run; by default 'trainer_output'.",
        per_rank=OWN_DISK,
    )
    per_device_train_batch_size: int = setting(8, "Samples per process and forward.", bounds=at_least(1))
    num_train_epochs: float = setting(3.0, "Passes over the training data.", bounds=FINITE)
    max_steps: int = setting(
        -1,
        "Number of updates; a positive number overrides num_train_epochs.",
        bounds=at_least(-1, "; -1 uses num_train_epochs"),
    )

    # --- schedule ---
    learning_rate: float = setting(5e-5, "Learning rate at the end of warm-up.", bounds=at_least(0))
    lr_scheduler_type: SchedulerType | str = setting("linear", "Schedule of the learning rate after warm-up.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = setting(
        None, "Options of the schedule: a dict, JSON, or a JSON file.", document=True
    )
    warmup_steps: float = setting(
        0, "Updates of linear warm-up; below 1 a share of all updates.", bounds=STRIDE
    )

    # --- optimizer ---
    optim: OptimizerNames | str = setting("adamw_torch_fused", "The optimizer.")
    optim_args: str | None = setting(
        None, "Options of the optimizer: 'name=value, name=value'.", read=options_from
    )
    weight_decay: float = setting(0.0, "Decoupled weight decay; not of norms and biases.", bounds=at_least(0))
    adam_beta1: float = setting(0.9, "Decay of the first moment in Adam optimizers.", bounds=between(0, 1))
    adam_beta2: float = setting(0.999, "Decay of the second moment in Adam optimizers.", bounds=between(0, 1))
    adam_epsilon: float = setting(1e-8, "Added to the denominator in Adam optimizers.", bounds=at_least(0))
    optim_target_modules: list[str] | str | None = setting(
        None,
        "Linear layers whose gradients GaLore and APOLLO project: parts of module names, a regular expression, or "
        "'all-linear'.",
    )

    # --- update ---
    gradient_accumulation_steps: int = setting_of(ACCUMULATION, 1, bounds=at_least(1))
    average_tokens_across_devices: bool = setting(
        True,
        "Normalise the loss by the targets of all processes.",
        mapped="is always on; False is refused",
    )
    max_grad_norm: float = setting(
        1.0,
        "Clip the global gradient norm to this value; 0 disables clipping.",
        bounds=Range(lambda v: v >= 0, "must be at least 0; 0 disables clipping"),
    )
    label_smoothing_factor: float = setting(
        0.0,
        "Share of probability that is distributed evenly over all classes, in [0, 1).",
        bounds=between(0, 1),
    )
