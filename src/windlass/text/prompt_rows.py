"""Prompts that a model answers, with the reference of each, from the rows of an evaluation set or from a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from windlass.core.errors import DataError
from windlass.core.types import IGNORED
from windlass.text.chat_template import ChatTemplate
from windlass.text.encoder import added_around
from windlass.text.forms import Form, RowError, checked_messages, recognise_form, standardised

_NO_PROMPT = (
    "has no prompt: an answer needs rows with prompt and completion, or a conversation whose last message is the "
    "assistant's"
)


@dataclass(frozen=True, slots=True)
class PromptRow:
    number: int  # of the row in its set, from 0
    prompt: str  # the text that the model reads
    ids: list[int]  # its tokens
    reference: str | None  # the expected answer; None if there is none


class PromptReader:
    """Renders and encodes prompts as training does.

    Args:
        tokenizer: a `transformers` tokenizer.
        text_field: name of the column with plain text.
    """

    def __init__(self, tokenizer: Any, text_field: str) -> None:
        self._tokenizer, self._text_field = tokenizer, text_field
        self._template: ChatTemplate | None = None

    @cached_property
    def _around(self) -> tuple[str, bool]:
        return added_around(self._tokenizer, str(self._tokenizer.eos_token or ""))

    def of_row(self, row: Any, number: int) -> PromptRow:
        """The prompt and the reference of a row of an evaluation set. Raises RowError if it has none."""
        try:
            return self._of_row(row, number)
        except RowError:
            raise
        except DataError as error:
            raise RowError(number, str(error)) from None

    def of_prompt(self, prompt: Any, number: int) -> PromptRow:
        """A text, a list of messages, or a mapping with `prompt` and maybe `reference`, or a row of an evaluation set.

        Raises RowError if it is something else.
        """
        try:
            if isinstance(prompt, str):
                return self._of_text(number, prompt, None)
            if isinstance(prompt, list):
                return self._of_messages(number, checked_messages(prompt, "the prompt"), {}, answered=False)
            if isinstance(prompt, Mapping) and "prompt" in prompt and "completion" not in prompt:
                return self._of_pair(number, prompt)
        except DataError as error:
            raise RowError(number, str(error)) from None
        if isinstance(prompt, Mapping):
            return self.of_row(prompt, number)
        raise RowError(
            number, f"must be a text, a list of messages or a mapping, not {type(prompt).__name__}"
        )

    def _of_pair(self, number: int, row: Mapping[str, Any]) -> PromptRow:
        prompt, reference = row["prompt"], row.get("reference")
        if reference is not None and not isinstance(reference, str):
            raise DataError(f"the reference must be text, not {type(reference).__name__}")
        if isinstance(prompt, str):
            return self._of_text(number, prompt, reference)
        messages = checked_messages(prompt, "prompt")
        if reference is not None:
            messages = [*messages, {"role": "assistant", "content": reference}]
        return self._of_messages(number, messages, {}, answered=False)

    def _of_row(self, row: Any, number: int) -> PromptRow:
        form = recognise_form(row, self._text_field)
        if form is Form.TEXT:
            raise DataError(f"{_NO_PROMPT}; it has the form {form.value!r}")
        if form is Form.TOKENIZED:
            return self._of_tokens(number, standardised(row, form, self._text_field, False))
        found = standardised(row, form, self._text_field, bool(self._tokenizer.chat_template))
        if isinstance(found.get("prompt"), str):
            return self._of_text(number, found["prompt"], found["completion"])
        messages = found["messages"] if "messages" in found else [*found["prompt"], *found["completion"]]
        options = {**(found.get("chat_template_kwargs") or {}), "tools": found.get("tools")}
        return self._of_messages(number, messages, options, answered=True)

    def _of_messages(
        self, number: int, messages: Sequence[Mapping[str, Any]], options: dict[str, Any], *, answered: bool
    ) -> PromptRow:
        """`answered`: the last message must be the assistant's, as in evaluation sets."""
        reference, asked = None, list(messages)
        if asked[-1]["role"] == "assistant":
            reference = _text_of(asked.pop())
        elif answered:
            raise DataError(f"{_NO_PROMPT}; the last message is of the role {asked[-1]['role']!r}")
        if not asked:
            raise DataError("has no message before the answer")
        self._template = self._template or ChatTemplate(self._tokenizer)
        text = self._template.text(asked, add_generation_prompt=True, **options)
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return self._checked(PromptRow(number, text, list(ids), reference))

    def _of_tokens(self, number: int, row: Mapping[str, list[int]]) -> PromptRow:
        """The last trained piece of the row is the reference, and what precedes it the prompt."""
        ids, kept = row["input_ids"], row.get("attention_mask") or [1] * len(row["input_ids"])
        masks = [row[name] for name in ("assistant_masks", "completion_mask") if name in row]
        trained = [all(bits) for bits in zip(*masks, strict=True)] if masks else [False] * len(ids)
        if "labels" in row:
            trained = [label != IGNORED for label in row["labels"]]
        held = [(token, bool(learnt)) for token, learnt, here in zip(ids, trained, kept, strict=True) if here]
        end = max((at + 1 for at, (_, learnt) in enumerate(held) if learnt), default=0)
        start = max((at + 1 for at, (_, learnt) in enumerate(held[:end]) if not learnt), default=0)
        if not 0 < start < end:
            raise DataError(f"{_NO_PROMPT}; of its tokens none or all are trained on")
        before, answer = ([token for token, _ in part] for part in (held[:start], held[start:end]))
        reference = self._tokenizer.decode(answer, skip_special_tokens=True).strip()
        return PromptRow(number, self._tokenizer.decode(before), before, reference)

    def _of_text(self, number: int, prompt: str, reference: str | None) -> PromptRow:
        """Special tokens are added as in training, but for the end token."""
        begin, adds_end = self._around
        ids = list(self._tokenizer(prompt.removeprefix(begin), verbose=False)["input_ids"])
        ids = ids[:-1] if adds_end else ids
        return self._checked(PromptRow(number, prompt, ids, None if reference is None else reference.strip()))

    @staticmethod
    def _checked(row: PromptRow) -> PromptRow:
        if not row.ids:
            raise DataError("the prompt is empty")
        return row


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    if not isinstance(content, str):
        raise DataError("the last message has no text to compare an answer with")
    return content.strip()
