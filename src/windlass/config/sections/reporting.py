# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""Logs and experiment trackers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from windlass.config.enums import IntervalStrategy
from windlass.config.sections.setting import OWN_OUTPUT, STRIDE, setting

# What this process prints or reports may differ between ranks.
_reported = partial(setting, per_rank=OWN_OUTPUT)
LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")


@dataclass(repr=False, eq=False)
class ReportingSection:
    # --- logs ---
    logging_strategy: IntervalStrategy | str = setting("steps", "When to log.")
    logging_steps: float = setting(500, "Updates between logs; below 1 a share of them all.", bounds=STRIDE)
    logging_first_step: bool = setting(False, "Log the first update too.")
    log_on_each_node: bool = _reported(
        True, "Log on the first process of each machine, instead of only on that of the job."
    )
    logging_nan_inf_filter: bool = setting(
        True,
        "Accepted for old scripts; non-finite losses are always logged.",
        mapped="filters nothing: non-finite losses are logged as they are, and nonfinite_policy decides",
        noted_at=True,
    )
    include_num_input_tokens_seen: str | bool = setting(
        "no", "Count input tokens: all, non_padding or no.", words=("all", "non_padding", "no")
    )
    log_level: str = _reported(
        "passive",
        "Log level of the main process ('passive' leaves it, by default at warning).",
        choices=LOG_LEVELS,
    )
    log_level_replica: str = _reported(
        "warning", "Log level of the other processes ('passive' is warning).", choices=LOG_LEVELS
    )
    disable_tqdm: bool | None = _reported(
        None, "Disable the progress bar; by default if only errors are logged."
    )

    # --- trackers ---
    report_to: list[str] | str | None = _reported(
        "none", "Trackers that receive the logs; 'report' writes report.html and training.png."
    )
    run_name: str | None = _reported(None, "A name for the run.")
    project: str = _reported("huggingface", "Project name for trackers.")
    trackio_space_id: str | None = _reported(None, "Space that shows trackio logs.")
    trackio_bucket_id: str | None = _reported(None, "Bucket that holds trackio logs.")
    trackio_static_space_id: Literal[False] | str | None = _reported(
        None,
        "Static space of trackio logs.",
        refused="is not built; trackio.freeze(...) after training makes a static space",
    )
