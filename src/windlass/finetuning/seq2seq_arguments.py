"""`Seq2SeqTrainingArguments`: the arguments of a run whose evaluations generate text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windlass.config.arguments import TrainingArguments
from windlass.config.sections.generation import GenerationSection
from windlass.core.errors import ConfigError, Problem

_BY_LENGTH = "group_by_length"


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

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "sortish_sampler" and value is True and "_derived" in self.__dict__:
            self._group_by_length()

    def _group_by_length(self) -> None:
        chosen = str(self.train_sampling_strategy)
        if chosen not in ("random", _BY_LENGTH):
            fix = f"groups samples by length, which contradicts train_sampling_strategy={chosen!r}; set only one"
            raise ConfigError(Problem("sortish_sampler", True, fix))
        self.train_sampling_strategy = _BY_LENGTH
