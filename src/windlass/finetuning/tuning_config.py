# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""`TuningConfig`: the settings that all trainers of fine-tuning share, under the names that scripts know from TRL."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

from windlass.config.arguments import TrainingArguments
from windlass.config.sections.setting import INTERVAL, above, at_least, described, setting
from windlass.core.errors import ConfigError, Problem

# In names of the matrices of LoRA that begin as zeros, which LoRA+ trains faster. Not of embeddings: there A does.
LORA_B = r"\.lora_B\."


@described()
@dataclass(repr=False)
class TuningConfig(TrainingArguments):
    """The settings that the trainers of fine-tuning share: those of `TrainingArguments`, and those of model and data.

    Three defaults differ from `TrainingArguments`: `logging_steps` 10, `gradient_checkpointing` True, and `bf16` True
    unless `fp16` or `fp8` is set.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    # --- defaults that differ ---
    logging_steps: float = setting(
        10, "Updates between two reports; below 1 a share of all updates.", bounds=INTERVAL
    )
    gradient_checkpointing: bool | None = setting(
        True,
        "Recompute activations in the backward.",
        nargs="?",
        const=True,
        mapped="is the earlier name of activation_checkpointing; setting either sets both",
    )
    bf16: bool | None = setting(
        None, "Train in bfloat16 mixed precision; by default unless fp16 or fp8 is set."
    )  # type: ignore[assignment]

    # --- model ---
    model_init_kwargs: dict[str, Any] | str | None = setting(
        None, "Options of `from_pretrained`, for a model given by name: a dict or JSON.", document=True
    )
    trust_remote_code: bool = setting(False, "Run Python code that comes with a model or tokenizer.")

    loraplus_lr_ratio: float | None = setting(
        None,
        "LoRA+ (arXiv:2402.12354): train the matrices B of an adapter with learning_rate times this.",
        bounds=above(0),
    )

    # --- data ---
    dataset_num_proc: int | None = setting(
        None,
        "Processes that prepare data.",
        bounds=at_least(1),
        per_rank="how fast data is prepared; the result is the same",
    )
    pad_to_multiple_of: int | str | None = setting(
        "auto", "Pad batches to a multiple of this length; 'auto' and None do not."
    )

    # --- memory ---
    activation_offloading: bool = setting(False, "Keep activations for the backward in host memory.")

    # --- old ---
    pad_token: str | None = setting(
        None,
        "Token for padding.",
        mapped="is set on the tokenizer; set `tokenizer.pad_token` and pass the tokenizer instead",
    )

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = not (self.fp16 or self.fp8)
        self._read_padding()
        if self.pad_token is not None:
            self._warn_old("pad_token is deprecated: set `tokenizer.pad_token`, and pass the tokenizer")
        super().__post_init__()
        if not self.lean_loss:
            fix = "has no effect: trainers of fine-tuning never make the logits of their own losses; leave it out"
            raise ConfigError(Problem("lean_loss", False, fix))

    def _read_padding(self) -> None:
        value = self.pad_to_multiple_of
        if isinstance(value, str) and value.lower() in ("auto", "none", "null"):
            self.pad_to_multiple_of = None
        elif isinstance(value, str) and value.isdecimal():
            self.pad_to_multiple_of = int(value)
        step = self.pad_to_multiple_of
        if isinstance(step, str) or (isinstance(step, int) and step < 1):
            fix = "must be a whole number of at least 1, 'auto' or None"
            raise ConfigError(Problem("pad_to_multiple_of", value, fix))

    def group_options(self) -> dict[str, dict[str, Any]]:
        """As for `TrainingArguments`, with the group of `loraplus_lr_ratio`."""
        found = super().group_options()
        if self.loraplus_lr_ratio is not None:
            found[LORA_B] = {"lr": self.learning_rate * self.loraplus_lr_ratio}
        return found

    @property
    def padding_step(self) -> int | None:
        """The number of which lengths of batches are multiples; None: any length."""
        return self.pad_to_multiple_of if isinstance(self.pad_to_multiple_of, int) else None

    @staticmethod
    def _warn_old(message: str) -> None:
        warnings.warn(message, FutureWarning, stacklevel=6)
