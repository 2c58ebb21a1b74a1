# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""What a run tells, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from windlass.config.enums import IntervalStrategy
from windlass.config.sections.setting import OWN_OUTPUT, STRIDE, setting

LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")


@dataclass(repr=False, eq=False)
class LoggingSection:
    logging_strategy: IntervalStrategy | str = setting("steps", "When to log.")
    logging_steps: float = setting(
        500, "Updates between logs; below 1 it is a share of all updates.", bounds=STRIDE
    )
    logging_first_step: bool = setting(False, "Log the first update too.")
    log_on_each_node: bool = setting(
        True, "Let the first process of each machine log, not only of the first machine.", per_rank=OWN_OUTPUT
    )
    logging_nan_inf_filter: bool = setting(
        True,
        "Accepted for old scripts; non-finite losses are never hidden.",
        mapped="filters nothing: non-finite losses are logged as they are, and nonfinite_policy decides",
        noted_at=True,
    )
    include_num_input_tokens_seen: str | bool = setting(
        "no", "Count input tokens: all, non_padding or no.", words=("all", "non_padding", "no")
    )
    log_level: str = setting(
        "passive",
        "Log level of the main process ('passive' is info).",
        choices=LOG_LEVELS,
        per_rank=OWN_OUTPUT,
    )
    log_level_replica: str = setting(
        "warning",
        "Log level of the other processes ('passive' is warning).",
        choices=LOG_LEVELS,
        per_rank=OWN_OUTPUT,
    )
    disable_tqdm: bool | None = setting(
        None, "No progress bar; not said: none when logging is quieter than warnings.", per_rank=OWN_OUTPUT
    )


@dataclass(repr=False, eq=False)
class TrackingSection:
    report_to: str | list[str] | None = setting(
        "none", "Experiment trackers that receive the logs.", per_rank=OWN_OUTPUT
    )
    run_name: str | None = setting(None, "A name for the run.", per_rank=OWN_OUTPUT)
    project: str = setting("huggingface", "Project name for trackers.", per_rank=OWN_OUTPUT)
    trackio_space_id: str | None = setting(None, "Space that shows trackio logs.", per_rank=OWN_OUTPUT)
    trackio_bucket_id: str | None = setting(None, "Bucket that holds trackio logs.", per_rank=OWN_OUTPUT)
    trackio_static_space_id: str | Literal[False] | None = setting(
        None,
        "Static space of trackio logs.",
        per_rank=OWN_OUTPUT,
        refused="is not built; trackio.freeze(...) after training makes a static space",
    )
