# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""How a model generates text in evaluations: the arguments of `Seq2SeqTrainer` beside those of `Trainer`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from windlass.config.sections.setting import at_least, setting


def _configuration(value: Any) -> Any:
    """Return `value` if it can name or be a GenerationConfig; raise ValueError otherwise."""
    if isinstance(value, str | os.PathLike | dict) or hasattr(value, "to_dict"):
        return value
    raise ValueError(
        f"must be a GenerationConfig, a dict of its values, or the name or path of one, and is {type(value).__name__}"
    )


@dataclass(repr=False, eq=False)
class GenerationSection:
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
