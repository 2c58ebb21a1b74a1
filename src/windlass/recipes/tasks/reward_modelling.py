"""Reward models: `RewardTrainer` on rows with a chosen and a rejected answer."""

from __future__ import annotations

from typing import Any

from windlass.finetuning.reward_config import RewardConfig
from windlass.recipes.tasks.preference_tuning import PreferenceTuning


class RewardModelling(PreferenceTuning):
    """A named model, or a small base that is trained on the chosen answers first, learns to score answers."""

    name = "reward"
    own_keys = ("data.rename", "base", "adapter", "quantization")
    arguments = RewardConfig
    adapter_task = "SEQ_CLS"

    def trainer_class(self) -> Any:
        from windlass.finetuning.reward_trainer import RewardTrainer

        return RewardTrainer
