"""Reward models: `RewardTrainer` on rows with a chosen and a rejected answer."""

from __future__ import annotations

from typing import Any

from windlass.cli.recipe_parts import RecipeParts
from windlass.cli.tasks.preference_tuning import PreferenceTuning
from windlass.config.arguments import TrainingArguments
from windlass.finetuning.reward_config import RewardConfig


class RewardModelling(PreferenceTuning):
    """A named model, or a small base that is trained on the chosen answers first, learns to score answers."""

    name = "reward"
    own_keys = ("data.rename", "base", "adapter", "quantization")
    arguments = RewardConfig

    def build_trainer(self, parts: RecipeParts, args: TrainingArguments) -> Any:
        from windlass.cli.preference_rows import build_preference_trainer
        from windlass.finetuning.reward_trainer import RewardTrainer

        return build_preference_trainer(RewardTrainer, parts, args, adapter_task="SEQ_CLS")
