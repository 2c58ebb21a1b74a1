"""The images of handwritten digits that scikit-learn brings, with their classes, and with questions and answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.core.optional import require

WHITE = 16.0
_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def load_digits() -> tuple[NDArray[Any], NDArray[Any]]:
    """Return 1,797 images of 8 x 8, with whole numbers from 0 to `WHITE`, and the digit on each."""
    found = require("sklearn.datasets", "read its images of digits").load_digits()
    return found.images, found.target


def digit_questions() -> Iterator[dict[str, Any]]:
    """Yield a conversation of one question and one answer for each image; each third one is on two images."""
    images, digits = load_digits()
    shown = np.round(images * (255 / WHITE)).astype(np.uint8)
    for at, digit in enumerate(digits):
        pictures = [shown[at]]
        if at % 3 == 0:
            question, answer = "Which digit is it?", f"It is {_NAMES[digit]}."
        elif at % 3 == 1:
            question, answer = "Is it even or odd?", f"It is {'odd' if digit % 2 else 'even'}."
        else:
            pictures.append(shown[at - 1])
            question, answer = (
                "Which digits are they?",
                f"They are {_NAMES[digit]} and {_NAMES[digits[at - 1]]}.",
            )
        turns = (("user", question), ("assistant", answer))
        yield {"images": pictures, "messages": [{"role": role, "content": text} for role, text in turns]}
