"""What a user may set of the preparation of text; the names are those of `SFTConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from windlass.core.errors import Problem, refuse

# Here and not beside the code that packs, which needs torch: worker processes read these options, and start faster.
STRATEGIES = ("bfd", "bfd_split", "wrapped")
TRUNCATION_MODES = ("keep_start", "keep_end", "error")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How rows become tokens and labels.

    Attributes:
        dataset_text_field: column with plain text.
        max_length: most tokens of a row; None = rows of any length.
        truncation_mode: what is kept of a longer row: its first tokens, its last ones, or "error" = refuse it.
        completion_only_loss: train on completions, not on prompts; None = if the rows have a prompt and a completion.
        assistant_only_loss: train on what the assistant wrote; conversations only.
        chat_template: Jinja text used instead of the tokenizer's template.
        formatting_func: row -> text, used instead of recognising the form.
        eos_token: appended to plain texts and completions that do not end with it; None = the tokenizer's.
        packing: strategy by which rows are packed into rows of `max_length` tokens; see `pack_dataset`. None = rows are
            not packed.
        shuffle_seed: rows are shuffled before they are packed; None = they are packed in their order.
        num_proc: worker processes; None or 1 = this process.
    """

    dataset_text_field: str = "text"
    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    chat_template: str | None = None
    formatting_func: Callable[[Mapping[str, Any]], str] | None = None
    eos_token: str | None = None
    packing: str | None = None
    shuffle_seed: int | None = None
    num_proc: int | None = None

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> list[Problem]:
        found = []
        if self.truncation_mode not in TRUNCATION_MODES:
            fix = f"must be one of {', '.join(TRUNCATION_MODES)}"
            found.append(Problem("truncation_mode", self.truncation_mode, fix))
        if self.max_length is not None and self.max_length < 1:
            found.append(Problem("max_length", self.max_length, "must be 1 or more, or None for any length"))
        if self.num_proc is not None and self.num_proc < 1:
            found.append(Problem("num_proc", self.num_proc, "must be 1 or more, or None"))
        if self.formatting_func is not None and self.completion_only_loss:
            fix = "formatting_func returns one text, which has no completion; leave one of the two out"
            found.append(Problem("completion_only_loss", True, fix))
        if self.packing is not None and self.packing not in STRATEGIES:
            found.append(Problem("packing", self.packing, f"must be one of {', '.join(STRATEGIES)}, or None"))
        if self.packing is not None and self.max_length is None:
            found.append(Problem("max_length", None, "packing needs the length of a packed row"))
        return found

    def of_tokens(self) -> TextOptions:
        """The options of the rows that are packed: those that packing splits are not truncated before."""
        most = self.max_length if self.packing in (None, "bfd") else None
        return replace(self, packing=None, shuffle_seed=None, max_length=most)
