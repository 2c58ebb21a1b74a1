# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""`Seq2SeqTrainingArguments`: the arguments of a run whose evaluations generate text."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.config.arguments import TrainingArguments
from windlass.config.sections.setting import at_least, described, setting
from windlass.core.errors import ConfigError, Problem

_BY_LENGTH = "group_by_length"


def _configuration(value: Any) -> Any:
    """Return `value` if it can name or be a GenerationConfig; raise ValueError otherwise."""
    if isinstance(value, str | os.PathLike | dict) or hasattr(value, "to_dict"):
        return value
    raise ValueError(
        f"must be a GenerationConfig, a dict of its values, or the name or path of one, and is {type(value).__name__}"
    )


@dataclass(repr=False, eq=False)
class GenerationSection:
    """How a model generates text in evaluations."""

    sortish_sampler: bool = setting(
        False,
        "Batch samples of similar length together, in training at random, in evaluations longest first.",
        mapped="sets train_sampling_strategy='group_by_length', and reads evaluation data longest first; the order of "
        "predictions is that of the data",
    )
    predict_with_generate: bool = setting(
        False, "Generate predictions in evaluations, instead of keeping logits."
    )
    generation_max_length: int | None = setting(
        None,
        "Largest number of generated tokens; by default that of the model's generation_config.",
        bounds=at_least(1),
    )
    generation_num_beams: int | None = setting(
        None, "Number of beams; by default that of the model's generation_config.", bounds=at_least(1)
    )
    generation_config: Any = setting(
        None,
        "A GenerationConfig for the model, a dict of its values, or the name or path of one.",
        read=_configuration,
    )


@described()
@dataclass(repr=False)
class Seq2SeqTrainingArguments(GenerationSection, TrainingArguments):
    """`TrainingArguments`, and how `Seq2SeqTrainer` generates text in evaluations.

    Raises:
        ConfigError: as `TrainingArguments`; or `sortish_sampler` contradicts `train_sampling_strategy`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sortish_sampler:
            self._group_by_length()

    def _assign(self, name: str, value: Any) -> None:
        super()._assign(name, value)
        if name == "sortish_sampler" and value is True and "_derived" in self.__dict__:
            self._group_by_length()

    if not TYPE_CHECKING:  # as in the base class
        __setattr__ = _assign

    def _group_by_length(self) -> None:
        chosen = str(self.train_sampling_strategy)
        if chosen not in ("random", _BY_LENGTH):
            fix = f"groups samples by length, which contradicts train_sampling_strategy={chosen!r}; set only one"
            raise ConfigError(Problem("sortish_sampler", True, fix))
        self.train_sampling_strategy = _BY_LENGTH
