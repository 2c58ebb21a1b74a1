# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""When and how a model is evaluated."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.config.enums import IntervalStrategy
from windlass.config.sections.setting import STRIDE, at_least, setting


@dataclass(repr=False, eq=False)
class EvaluationSection:
    eval_strategy: IntervalStrategy | str = setting("no", "When to evaluate during training.")
    eval_steps: float | None = setting(
        None,
        "Updates between evaluations; below 1 a share of all updates; by default logging_steps.",
        bounds=STRIDE,
    )
    eval_delay: float = setting(0, "Epochs or updates before the first evaluation.", bounds=at_least(0))
    per_device_eval_batch_size: int = setting(
        8, "Samples per process and evaluation batch.", bounds=at_least(1)
    )
    prediction_loss_only: bool = setting(False, "Evaluate the loss only; keep no predictions.")
    eval_on_start: bool = setting(False, "Evaluate once before the first update.")
    eval_do_concat_batches: bool = setting(True, "Concatenate batches; otherwise keep a list of them.")
    eval_use_gather_object: bool = setting(
        False,
        "Gather nested Python objects from all processes.",
        mapped="is always so: tensors, arrays and numbers in nested tuples, lists and dicts are gathered; "
        "with eval_do_concat_batches=False batches stay apart",
    )
    eval_accumulation_steps: int | None = setting(
        None, "Batches after which predictions are moved to host memory.", bounds=at_least(1)
    )
    include_for_metrics: list[str] = setting(
        [], "Additional inputs of compute_metrics: inputs, loss.", words=("inputs", "loss")
    )
    batch_eval_metrics: bool = setting(False, "Call compute_metrics for each batch and keep no predictions.")
