"""The fields that a configuration of fine-tuning adds to `TrainingArguments`, or declares again."""

from __future__ import annotations

import dataclasses

from windlass.config.arguments import TrainingArguments


def own_fields(config: type) -> list[str]:
    """Names of the fields that are declared below `TrainingArguments`."""
    added = [cls for cls in config.__mro__ if cls not in TrainingArguments.__mro__]
    declared = {name for cls in added for name in vars(cls).get("__annotations__", {})}
    return [field.name for field in dataclasses.fields(config) if field.name in declared]
