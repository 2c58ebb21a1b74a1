"""Token ids as text on a terminal, with marks around those that are trained on."""

from __future__ import annotations

import os
from collections.abc import Iterable

from windlass.core.output import STDOUT
from windlass.core.terminal import can_redraw
from windlass.text.trained_pieces import Piece

Marks = tuple[str, str]
_COLOURS = ("\x1b[32m", "\x1b[0m")
BRACKETS = ("⟦", "⟧")


def terminal_marks() -> Marks:
    """Return a colour and its end, or brackets if the output has no colours."""
    return _COLOURS if can_redraw(STDOUT) and not os.environ.get("NO_COLOR") else BRACKETS


def marked(pieces: Iterable[Piece], marks: Marks) -> str:
    """Return the text of a row, with `marks` around what is trained on."""
    return "".join(f"{marks[0]}{text}{marks[1]}" if trained else text for text, trained in pieces)
