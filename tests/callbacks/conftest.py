"""What the tests of callbacks share: arguments, and the package's log lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def make_args() -> Any:
    """Builds arguments as the callbacks read them, with the defaults of `TrainingArguments`."""

    def build(**changes: Any) -> SimpleNamespace:
        defaults: dict[str, Any] = {
            "logging_strategy": "steps",
            "eval_strategy": "no",
            "save_strategy": "steps",
            "logging_first_step": False,
            "eval_delay": 0,
            "load_best_model_at_end": True,
            "metric_for_best_model": "loss",
            "greater_is_better": False,
        }
        return SimpleNamespace(**{**defaults, **changes})

    return build


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """`caplog` for the `windlass` loggers, which do not propagate to the root."""
    logger = logging.getLogger("windlass")
    logger.addHandler(caplog.handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield caplog
    logger.setLevel(level)
    logger.removeHandler(caplog.handler)
