"""The small files that lie beside a checkpoint's weights, as bytes: they are taken before training goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from windlass.checkpoint.files import written_by


class AuxiliaryFiles:
    """Takes the files of a configuration at every save, and those of a tokenizer when it has changed.

    A tokenizer may take a second to write, and while it writes no other thread may use it: so it does not belong into
    the background.
    """

    def __init__(self) -> None:
        self._marks: Any = None
        self._of_tokenizer: dict[str, bytes] = {}

    def files(self, save_small: Callable[[Path], None], tokenizer: Any) -> dict[str, bytes]:
        """Contents by relative name.

        Args:
            save_small: writes configurations and arguments into a folder.
            tokenizer: whatever has `save_pretrained`; None where there is nothing.
        """
        taken = written_by(save_small)
        if not hasattr(tokenizer, "save_pretrained"):
            return taken
        marks = _marks_of(tokenizer)
        if marks is None or marks != self._marks:
            self._of_tokenizer = written_by(lambda folder: tokenizer.save_pretrained(str(folder)))
            self._marks = marks
        return {**taken, **self._of_tokenizer}


def _marks_of(tokenizer: Any) -> Any:
    """Equal while a tokenizer is the same; None for other things (image processors), which are small."""
    if not hasattr(tokenizer, "special_tokens_map"):
        return None
    names = ("chat_template", "padding_side", "truncation_side", "model_max_length", "init_kwargs")
    values = [str(getattr(tokenizer, name, None)) for name in names]
    return id(tokenizer), len(tokenizer), str(tokenizer.special_tokens_map), values
