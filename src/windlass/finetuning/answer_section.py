# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""The settings of generated answers in evaluations."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from windlass.config.sections.setting import at_least, setting
from windlass.metrics.answer_scores import SCORES


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
