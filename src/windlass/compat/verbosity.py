"""The words for levels of logging, as `TrainingArguments(log_level=...)` takes them."""

from __future__ import annotations

from windlass.core.logs import log_levels

__all__ = ["log_levels", "trainer_log_levels"]

# "passive" leaves the level as it is.
trainer_log_levels = {**log_levels, "passive": -1}
