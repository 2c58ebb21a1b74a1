"""Token ids as text on a terminal, with marks around those that are trained on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from windlass.core.output import STDOUT, shown
from windlass.core.terminal import can_redraw
from windlass.text.encoder import IGNORED

Marks = tuple[str, str]
_COLOURS = ("\x1b[32m", "\x1b[0m")
_BRACKETS = ("⟦", "⟧")


def terminal_marks() -> Marks:
    """Return a colour and its end, or brackets if the output has no colours."""
    return _COLOURS if can_redraw(STDOUT) and not os.environ.get("NO_COLOR") else _BRACKETS


def decoded(ids: Sequence[int], tokenizer: Any) -> str:
    """Return the text of token ids, special tokens included. Control characters are shown escaped."""
    return shown(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def marked(ids: Sequence[int], labels: Sequence[int], tokenizer: Any, marks: Marks) -> str:
    """Return the text of a row, with `marks` around what has a label."""
    pairs = zip(ids, labels, strict=True)
    pieces = []
    for trained, group in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        text = decoded([token for token, _ in group], tokenizer)
        pieces.append(f"{marks[0]}{text}{marks[1]}" if trained else text)
    return "".join(pieces)
