# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""What a run tells, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from windlass.config.enums import IntervalStrategy
from windlass.config.sections.setting import setting

LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")


@dataclass(repr=False, eq=False)
class LoggingSection:
    logging_strategy: IntervalStrategy | str = setting("steps", "When to log.")
    logging_steps: float = setting(500, "Updates between logs; below 1 it is a share of all updates.")
    logging_first_step: bool = setting(False, "Log the first update too.")
    log_on_each_node: bool = setting(
        True, "Let the first process of each machine log, not only of the first machine."
    )
    logging_nan_inf_filter: bool = setting(
        True, "Accepted for old scripts; non-finite losses are never hidden."
    )
    include_num_input_tokens_seen: str | bool = setting("no", "Count input tokens: all, non_padding or no.")
    log_level: str = setting(
        "passive", "Log level of the main process ('passive' is info).", choices=LOG_LEVELS
    )
    log_level_replica: str = setting(
        "warning", "Log level of the other processes ('passive' is warning).", choices=LOG_LEVELS
    )
    disable_tqdm: bool | None = setting(
        None, "No progress bar; not said: none when logging is quieter than warnings."
    )


@dataclass(repr=False, eq=False)
class TrackingSection:
    report_to: str | list[str] | None = setting("none", "Experiment trackers that receive the logs.")
    run_name: str | None = setting(None, "A name for the run.")
    project: str = setting("huggingface", "Project name for trackers.")
    trackio_space_id: str | None = setting(None, "Space that shows trackio logs.")
    trackio_bucket_id: str | None = setting(None, "Bucket that holds trackio logs.")
    trackio_static_space_id: str | Literal[False] | None = setting(None, "Static space of trackio logs.")
