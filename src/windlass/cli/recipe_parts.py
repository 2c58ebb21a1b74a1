"""What a recipe is trained with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from windlass.cli.schema import Recipe


@dataclass(frozen=True, slots=True)
class RecipeParts:
    """Tokenizer and data of a recipe.

    Attributes:
        tokenizer: None for images.
        train, evaluation, test: sequences of samples; the last two are None without any.
        labels: names of the classes, in the order of their ids; empty without classes.
        takes_turns: samples are conversations, in the tokenizer's chat template.
    """

    recipe: Recipe
    tokenizer: Any
    train: Any
    evaluation: Any
    labels: Sequence[str] = ()
    test: Any = None
    takes_turns: bool = False
