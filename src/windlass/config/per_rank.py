"""Which arguments may differ between the ranks of a job; all others must be the same on every rank."""

from __future__ import annotations

from typing import Any

from windlass.config.arguments import TrainingArguments
from windlass.config.sections.setting import rules_of


def shared_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The arguments that every rank must have alike. Fields that a script's subclass adds are the script's own."""
    values = args.to_dict()
    rules = rules_of(TrainingArguments).items()
    return {name: values[name] for name, rule in rules if not rule.per_rank and name in values}
