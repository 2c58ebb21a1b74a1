"""`RewardConfig`: the settings of a reward model, under the names that scripts know from TRL."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.config.sections.setting import at_least, described, setting
from windlass.finetuning.tuning_config import TuningConfig


@described()
@dataclass(repr=False)
class RewardConfig(TuningConfig):
    """The settings of a `RewardTrainer`: those of `TrainingArguments`, and those of preferences.

    Four defaults differ from `TrainingArguments`: `learning_rate` 1e-4, `logging_steps` 10,
    `gradient_checkpointing` True, and `bf16` True unless `fp16` or `fp8` is set.

    Raises:
        ConfigError: as for `TrainingArguments`.
    """

    learning_rate: float = setting(1e-4, "Learning rate at the end of warm-up.", bounds=at_least(0))

    # --- model ---
    chat_template_path: str | None = setting(
        None, "A Jinja file, or a tokenizer whose chat template and special tokens are taken over."
    )
    disable_dropout: bool = setting(True, "Set all dropout of the model to 0.")

    # --- data ---
    eos_token: str | None = setting(None, "Token that ends a turn or a text; by default the tokenizer's.")
    max_length: int | None = setting(
        1024,
        "Rows with a longer answer, its prompt counted, are left out; None leaves none out.",
        bounds=at_least(1),
    )

    # --- loss ---
    center_rewards_coefficient: float | None = setting(
        None,
        "Weight of a term that keeps the sum of the two rewards near 0 (arXiv:2312.09244).",
        bounds=at_least(0),
    )
