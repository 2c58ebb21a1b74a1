"""Preferences: `DPOTrainer` and `RewardTrainer` on rows with a chosen and a rejected answer, `KTOTrainer` also on rows
with a completion and a label.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from windlass.assemble.resolve import resolve_parallel
from windlass.config.arguments import TrainingArguments
from windlass.core.errors import refuse
from windlass.core.world import world_from_environment
from windlass.finetuning.dpo_config import DPOConfig
from windlass.finetuning.kto_config import KTOConfig
from windlass.finetuning.reference_config import ReferenceConfig
from windlass.finetuning.reward_config import RewardConfig
from windlass.recipes.built_in_recipes import PREFERENCES
from windlass.recipes.schema import Recipe, RecipeParts
from windlass.recipes.task import Conflict, Task, tuning_conflicts


class PreferenceTuning(Task):
    """A named model, or a small base that is trained on the chosen answers first, learns preferences."""

    name = "dpo"
    own_keys: ClassVar[tuple[str, ...]] = ("data.rename", "base", "adapter", "quantization", "sample")
    arguments: ClassVar[type[TrainingArguments]] = DPOConfig
    trainer = "windlass.finetuning.dpo_trainer:DPOTrainer"
    new_model = "base"
    rows_at_hand: ClassVar[Mapping[str, str]] = {"train": str(PREFERENCES)}
    adapter_task: ClassVar[str] = "CAUSAL_LM"  # what peft calls the task of the model

    def file_problem(self, kind: str) -> str | None:
        if kind in ("jsonl", "json", "parquet", "hub"):
            return None
        return f"a {kind} file has no pairs of answers; {self.name} reads jsonl, json, parquet or hub"

    def conflicts(self, recipe: Recipe) -> Iterator[Conflict]:
        yield from tuning_conflicts(recipe)

    def build_parts(
        self, recipe: Recipe, args: TrainingArguments, saved_tokenizer: Path | None = None
    ) -> RecipeParts:
        from windlass.recipes.fine_tuning import build_adapter, load_preferences

        # Their errors come before the data is read and a base is trained.
        build_adapter(recipe)
        parallel = resolve_parallel(args, world_from_environment())
        if isinstance(args, ReferenceConfig) and parallel.dist.pipeline is not None:
            refuse(args.stage_problems())
        return load_preferences(recipe, args.seed, saved_tokenizer)

    def build_trainer(self, parts: RecipeParts, args: TrainingArguments) -> Any:
        from windlass.recipes.fine_tuning import build_preference_trainer

        return build_preference_trainer(self.trainer_class(), parts, args, adapter_task=self.adapter_task)


class RewardModelling(PreferenceTuning):
    """A named model, or a small base that is trained on the chosen answers first, learns to score answers."""

    name = "reward"
    own_keys = ("data.rename", "base", "adapter", "quantization")
    arguments = RewardConfig
    trainer = "windlass.finetuning.reward_trainer:RewardTrainer"
    adapter_task = "SEQ_CLS"


class AnswerJudging(PreferenceTuning):
    """A named model, or a small base that is trained on the answers first, learns which are desirable."""

    name = "kto"
    arguments = KTOConfig
    trainer = "windlass.finetuning.kto_trainer:KTOTrainer"
