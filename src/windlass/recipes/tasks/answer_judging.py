"""Single judged answers: `KTOTrainer` on rows with a completion and a label, or on pairs."""

from __future__ import annotations

from typing import Any

from windlass.finetuning.kto_config import KTOConfig
from windlass.recipes.tasks.preference_tuning import PreferenceTuning


class AnswerJudging(PreferenceTuning):
    """A named model, or a small base that is trained on the answers first, learns which are desirable."""

    name = "kto"
    arguments = KTOConfig

    def trainer_class(self) -> Any:
        from windlass.finetuning.kto_trainer import KTOTrainer

        return KTOTrainer
