# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""`SFTConfig`: the settings of supervised fine-tuning, under the names that scripts know from TRL."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from windlass.config.sections.setting import at_least, described, setting
from windlass.finetuning.tuning_config import TuningConfig
from windlass.metrics.answer_scores import SCORES
from windlass.text.text_options import TRUNCATION_MODES


def _prompts(value: Any) -> Any:
    """Return `value` if it is a list of prompts or a path; raise ValueError otherwise."""
    if isinstance(value, (list, tuple)) and value:
        return list(value)
    if isinstance(value, (str, os.PathLike)) and os.fspath(value).endswith(".jsonl"):
        return os.fspath(value)
    raise ValueError(
        "must be a list of prompts (texts, lists of messages, or mappings with prompt and maybe reference), or the "
        f"path of a .jsonl file of them, and is {value!r}"
    )


@dataclass(repr=False, eq=False)
class AnswerSection:
    """What a causal model answers in evaluations, and how that is scored."""

    predict_with_generate: bool = setting(
        False, "Generate answers to the prompts of evaluation sets; compute_metrics gets their texts."
    )
    eval_prompts: list[Any] | str | None = setting(
        None, "Prompts that are answered in each evaluation: a list, or a .jsonl file.", read=_prompts
    )
    eval_prompts_limit: int | None = setting(
        None, "Answer only so many prompts of each set, the first ones; by default all.", bounds=at_least(1)
    )
    eval_metrics: list[str] = setting(
        [], "Scores of answers: exact_match, token_f1, rouge, bleu, gsm8k.", words=tuple(SCORES)
    )
    generation_max_length: int | None = setting(
        None, "Largest number of tokens of a prompt and its answer.", bounds=at_least(2)
    )
    generation_max_new_tokens: int | None = setting(
        None, "Largest number of tokens of an answer; by default 128.", bounds=at_least(1)
    )
    generation_num_beams: int | None = setting(None, "Number of beams; by default 1.", bounds=at_least(1))
    generation_do_sample: bool = setting(
        False, "Sample answers, with the temperature and limits of the model's generation_config."
    )


PACKING_STRATEGIES = ("bfd", "bfd_split", "wrapped")
LOSS_TYPES = ("nll", "dft")
# Words of earlier versions of TRL, and what replaced them.
_OLD_WORDS = {
    "loss_type": {"chunked_nll": "nll"},
    "packing_strategy": {"bfd-requeue": "bfd_split", "ffd": "bfd"},
}


@described()
@dataclass(repr=False)
class SFTConfig(AnswerSection, TuningConfig):
    """The settings of an `SFTTrainer`: those of `TrainingArguments`, and those of fine-tuning.

    Four defaults differ from `TrainingArguments`: `learning_rate` 2e-5, `logging_steps` 10,
    `gradient_checkpointing` True, and `bf16` True unless `fp16` or `fp8` is set.

    Raises:
        ConfigError: as for `TrainingArguments`.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TuningConfig._VALID_DICT_FIELDS, "dataset_kwargs"]

    EARLIER_NAMES: ClassVar[dict[str, str]] = {"max_seq_length": "max_length"}

    # --- defaults that differ ---
    learning_rate: float = setting(2e-5, "Learning rate at the end of warm-up.", bounds=at_least(0))

    # --- model ---
    router_aux_loss_coef: float | None = setting(
        None,
        "Weight of the load-balancing loss of experts; by default the model's; 0 turns it off.",
        bounds=at_least(0),
    )
    chat_template_path: str | None = setting(
        None, "A Jinja file, or a tokenizer whose chat template and special tokens are taken over."
    )

    # --- data ---
    dataset_text_field: str = setting("text", "Column with the text of plain-text datasets.")
    dataset_kwargs: dict[str, Any] | str | None = setting(
        None, "Options of data preparation: skip_prepare_dataset, allow_image_urls.", document=True
    )
    eos_token: str | None = setting(None, "Token that ends a turn or a text; by default the tokenizer's.")
    max_length: int | None = setting(
        1024, "Tokens of a sample, or of a packed row; None does not truncate.", bounds=at_least(1)
    )
    truncation_mode: str = setting(
        "keep_start",
        "Which end of a long sample is kept; error: such a sample is refused.",
        choices=TRUNCATION_MODES,
    )
    shuffle_dataset: bool = setting(False, "Shuffle the prepared dataset once, before training.")
    packing: bool = setting(False, "Put several samples into rows of max_length tokens.")
    packing_strategy: str = setting(
        "bfd",
        "bfd: best-fit decreasing, long samples cut; bfd_split: long samples split; wrapped: cut anywhere.",
        choices=PACKING_STRATEGIES,
    )
    padding_free: bool = setting(False, "Join the samples of a batch into one row without padding.")
    eval_packing: bool | None = setting(None, "Pack evaluation data; by default as `packing`.")

    # --- loss ---
    completion_only_loss: bool | None = setting(
        None, "Train on completions alone; by default if the data has prompts and completions."
    )
    assistant_only_loss: bool = setting(False, "Train on the assistant's turns of conversations alone.")
    loss_type: str = setting(
        "nll",
        "nll: negative log-likelihood; dft: dynamic fine-tuning (arXiv:2508.05629).",
        choices=LOSS_TYPES,
    )

    def __post_init__(self) -> None:
        self._translate_words()
        super().__post_init__()

    def _translate_words(self) -> None:
        for name, words in _OLD_WORDS.items():
            value = getattr(self, name)
            if isinstance(value, str) and value in words:
                self._warn_old(f"{name}={value!r} is now {words[value]!r}")
                setattr(self, name, words[value])
        if self.truncation_mode == "keep_end":
            self._warn_old(
                "truncation_mode='keep_end' is deprecated: the end of a sample may lack its context"
            )

    @property
    def packs_evaluation(self) -> bool:
        """True if evaluation data is packed."""
        return self.packing if self.eval_packing is None else self.eval_packing

    @property
    def skips_preparation(self) -> bool:
        """True if datasets are used as they are (`dataset_kwargs={"skip_prepare_dataset": True}`)."""
        options = self.dataset_kwargs
        return isinstance(options, dict) and bool(options.get("skip_prepare_dataset"))

    @property
    def joins_rows(self) -> bool:
        """True if batches are one row of documents, without padding: those of training too if evaluation data alone is
        packed, because both are collated in one way.
        """
        packs = self.packing or self.packs_evaluation
        return self.padding_free or (packs and self.packing_strategy != "wrapped")
