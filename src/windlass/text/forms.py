"""The forms that a dataset for fine-tuning may have, and how a row of each becomes text or messages.

All forms are reduced to four kinds of rows: tokens, one text, a prompt with its completion, and messages.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain
from typing import Any

import numpy as np

from windlass.core.errors import DataError
from windlass.core.types import IGNORED
from windlass.core.whole_file import parse_json

Row = Mapping[str, Any]


class Form(Enum):
    """A form of rows; the value is the description that error messages print."""

    TOKENIZED = (
        "pre-tokenized: input_ids, with optional labels, completion_mask, assistant_masks, attention_mask"
    )
    PROMPT_COMPLETION = "prompt-completion: prompt, completion (both text, or both lists of messages)"
    MESSAGES = "conversational: messages (role, content), with optional tools and chat_template_kwargs"
    SHAREGPT = "ShareGPT: conversations (from, value)"
    TEXT = "text: a column of text, named by dataset_text_field"
    ALPACA = "Alpaca: instruction, output, with optional input"


# The first that fits is chosen: a rendered "text" beside its sources is what Alpaca's authors trained on, and a bare
# "prompt" beside "messages" is a copy of the first message.
_COLUMNS: dict[Form, tuple[str, ...]] = {
    Form.TOKENIZED: ("input_ids",),
    Form.PROMPT_COMPLETION: ("prompt", "completion"),
    Form.MESSAGES: ("messages",),
    Form.SHAREGPT: ("conversations",),
    Form.TEXT: (),
    Form.ALPACA: ("instruction", "output"),
}
# Beside the messages of a row.
EXTRAS = ("tools", "chat_template_kwargs")
_OF_TOKENS = ("input_ids", "labels", "completion_mask", "assistant_masks", "attention_mask")
_OF_PREFERENCES = ("chosen", "rejected", "margin", "label")
_OF_REFERENCES = ("ref_chosen_logps", "ref_rejected_logps", "ref_logps")
_OF_TURNS = ("input", "system", "history")
# All columns that some form reads, but for that of plain text.
COLUMNS = frozenset(chain(*_COLUMNS.values(), EXTRAS, _OF_TOKENS, _OF_PREFERENCES, _OF_REFERENCES, _OF_TURNS))
# Arguments of `apply_chat_template` that the preparation itself sets.
_SET_HERE = frozenset((
    "add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "return_tensors", "tools", "padding",
    "truncation", "max_length", "return_assistant_tokens_mask",
))  # fmt: skip
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
_RESULTS = frozenset({"tool", "function", "ipython"})
_NAMES_OF_MESSAGES = ("role", "content", "name")
_SHAREGPT_ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
# The two prompts of Stanford Alpaca (Taori et al. 2023), which models without a chat template were trained on.
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def recognise_form(columns: Iterable[str], text_field: str = "text") -> Form:
    """Return the form of a dataset with these columns. Raises DataError if no form fits; lists the forms and the
    columns found.

    Args:
        text_field: name of the column with plain text.
    """
    found = list(columns)
    for form, needed in _COLUMNS.items():
        if all(name in found for name in needed or (text_field,)):
            return form
    known = "".join(f"\n  - {form.value}" for form in _COLUMNS)
    raise DataError(
        f"the columns of the dataset fit no known form; found: {', '.join(found) or 'none'}. Known forms:{known}\n"
        f"Rename columns, set dataset_text_field (now {text_field!r}), or pass a formatting_func; in a recipe, "
        "data.prompt_column and data.completion_column name a pair."
    )


def has_form(columns: Iterable[str]) -> bool:
    """Return True if columns with these names have a form other than plain text."""
    found = set(columns)
    return any(found.issuperset(needed) for needed in _COLUMNS.values() if needed)


def is_conversational_row(row: Row) -> bool:
    """Return True if a standardised row holds messages rather than text."""
    return "messages" in row or isinstance(row.get("prompt"), list)


def standardised(
    row: Row, form: Form, text_field: str, has_template: bool, kinds: Collection[str] = ("text",)
) -> dict[str, Any]:
    """Return `row` with the columns of its kind only: tokens, "text", "prompt" and "completion", or "messages".

    Args:
        has_template: the tokenizer has a chat template, so that an instruction is rendered as a message.
        kinds: of the parts that a message may have.

    Raises:
        DataError: a value of the wrong type, an unknown role, a message without content or an empty conversation.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"must be a mapping of columns, not {type(row).__name__}")
    return _STANDARDISERS[form](row, text_field, has_template, kinds)


def _sharegpt(row: Row, _: str, __: bool, kinds: Collection[str]) -> dict[str, Any]:
    messages = row.get("conversations")
    if isinstance(messages, list):
        messages = [_from_value(message) for message in messages]
    extras = _extras(row)
    messages = [*_system(row), *checked_messages(messages, "conversations", kinds)]
    if [message["role"] for message in messages[:2]] == ["system", "system"]:
        if messages[0]["content"] != messages[1].get("content"):
            raise DataError(
                "column 'system' and the conversation begin with different system messages; keep one"
            )
        del messages[0]
    return {"messages": messages, **extras}


def _system(row: Row) -> list[dict[str, Any]]:
    """The system message in the column of that name, if it has one."""
    if row.get("system") in (None, ""):
        return []
    return [{"role": "system", "content": _string(row, "system")}]


def _from_value(message: Any) -> Any:
    if not isinstance(message, Mapping) or "from" not in message:
        return message
    kept = {name: value for name, value in message.items() if name not in ("from", "value")}
    role = message["from"]
    return {"role": _SHAREGPT_ROLES.get(role, role), "content": message.get("value"), **kept}


def _prompt_completion(row: Row, _: str, __: bool, kinds: Collection[str]) -> dict[str, Any]:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        found = {"prompt": prompt, "completion": completion}
        return {**{n: checked_messages(v, n, kinds) for n, v in found.items()}, **_extras(row)}
    if isinstance(prompt, list) or isinstance(completion, list):
        raise DataError("prompt and completion must both be text, or both be lists of messages")
    return {"prompt": _string(row, "prompt"), "completion": _string(row, "completion")}


def _alpaca(row: Row, _: str, has_template: bool, __: object) -> dict[str, Any]:
    instruction, output = _string(row, "instruction"), _string(row, "output")
    context = _string(row, "input") if row.get("input") is not None else ""
    system = _system(row)
    if row.get("history"):
        raise DataError(
            "column 'history' has earlier turns, which an instruction has no place for: make a column messages of them "
            "and of the instruction, or remove the column"
        )
    if has_template:
        content = f"{instruction}\n\n{context}" if context else instruction
        return {
            "prompt": [*system, {"role": "user", "content": content}],
            "completion": [{"role": "assistant", "content": output}],
        }
    if system:
        raise DataError(
            "column 'system' has a text, and Alpaca's prompt has no place for it: remove the column, or give the "
            "tokenizer a chat template"
        )
    template = ALPACA_WITH_INPUT if context else ALPACA
    return {"prompt": template.format(instruction=instruction, input=context), "completion": output}


def _tokenized(row: Row, *_: object) -> dict[str, Any]:
    if row.get("input_ids") is None:
        raise DataError("input_ids is missing or null")
    found: dict[str, Any] = {}
    for name in _OF_TOKENS:
        if row.get(name) is not None:
            found[name] = _integers(row[name], name)
            if len(found[name]) != len(found["input_ids"]):
                lengths = f"{len(found[name])} values, input_ids {len(found['input_ids'])}"
                raise DataError(f"{name} has {lengths}; they must have equal lengths")
    return found


# Of `TokenRows`, whose columns are int32.
_LAST_TOKEN = 2**31 - 1


def _integers(values: Any, name: str) -> list[int]:
    """One row of tokens or of what belongs to each; `values` may be a list, an array or a tensor."""
    array = np.empty(())
    with contextlib.suppress(ValueError):  # lists of several lengths
        array = np.asarray(values) if not isinstance(values, (str, bytes)) else array
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        what = "text" if isinstance(values, (str, bytes)) else f"{type(values).__name__} of other values"
        raise DataError(f"{name} must be a list of whole numbers, not {what}")
    below = array[array < 0] if name in ("input_ids", "labels") else array[:0]
    if name == "labels":
        below = below[below != IGNORED]
    if below.size:
        note = f", and {IGNORED} is a label that is not trained" if name == "labels" else ""
        raise DataError(f"{name} holds {below[0]}; tokens are numbered from 0{note}")
    above = array[array > _LAST_TOKEN]
    if above.size:
        raise DataError(f"{name} holds {above[0]}; prepared numbers have 32 bits, up to {_LAST_TOKEN}")
    numbers: Any = array.astype(np.int64).tolist()
    return list(numbers)


_STANDARDISERS: dict[Form, Callable[[Row, str, bool, Collection[str]], dict[str, Any]]] = {
    Form.TOKENIZED: _tokenized,
    Form.PROMPT_COMPLETION: _prompt_completion,
    Form.MESSAGES: lambda row, _, __, kinds: {
        "messages": checked_messages(row.get("messages"), "messages", kinds),
        **_extras(row),
    },
    Form.SHAREGPT: _sharegpt,
    Form.TEXT: lambda row, text_field, *_: {"text": _string(row, text_field)},
    Form.ALPACA: _alpaca,
}


def _string(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        kind = "is missing or null" if value is None else f"must hold text, not {type(value).__name__}"
        raise DataError(f"column {name!r} {kind}")
    return _unicode(value, f"column {name!r}")


def _unicode(text: str, where: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        fix = "half of a surrogate pair, which text cut inside a character has; remove it"
        raise DataError(f"{where} holds {text[error.start]!r} at character {error.start}, {fix}") from None
    return text


def checked_messages(messages: Any, name: str, kinds: Collection[str] = ("text",)) -> list[dict[str, Any]]:
    """Return `messages` if it is a conversation: a list of mappings with a known role. Raises DataError if it is not
    one, is empty, or has a part of another kind than `kinds`.
    """
    if not isinstance(messages, list):
        raise DataError(f"{name} must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise DataError(f"{name} is an empty conversation; remove the row, or add messages")
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{name}[{at}] must be a mapping with a role and a content")
        if message["role"] not in ROLES:
            known = ", ".join(sorted(ROLES))
            raise DataError(f"{name}[{at}] has the unknown role {message['role']!r}; known roles: {known}")
        _check_content(message, f"{name}[{at}]", kinds)
        if message.get("weight") == 0:
            raise DataError(
                f"{name}[{at}] has the weight 0, and no message is left out of the loss by a weight: give rows of "
                "prompt and completion, of which completion_only_loss trains the completion alone, or remove the weight"
            )
    return messages


def _check_content(message: Mapping[str, Any], where: str, kinds: Collection[str]) -> None:
    """Raise DataError for a content that a template would leave out, or print as Python's notation of it."""
    content, role = message.get("content"), message["role"]
    if isinstance(content, str):
        _unicode(content, f"the content of {where}")
    elif content is None:
        # a call of tools, or reasoning, under names that templates do not agree on
        if not any(value for name, value in message.items() if name not in _NAMES_OF_MESSAGES):
            raise DataError(f"{where} ({role}) has no content; add a text, or remove the message")
    elif role in _RESULTS and isinstance(content, (Mapping, list)):
        pass  # what a tool returned
    elif isinstance(content, list):
        _check_parts(content, f"{where} ({role})", kinds)
    else:
        raise DataError(f"the content of {where} ({role}) must be text, not {type(content).__name__}")


def _check_parts(parts: list[Any], where: str, kinds: Collection[str]) -> None:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind == "image" and kind not in kinds:
            raise DataError(
                f"the content of {where} has a part of type 'image', and images need a processor: pass "
                "processing_class=AutoProcessor.from_pretrained(...) of a model that sees images"
            )
        if kind not in kinds or (kind == "text" and not isinstance(part.get("text"), str)):
            known = " or ".join(f'{{"type": "{name}", ...}}' for name in kinds)
            raise DataError(
                f"the content of {where} has a part of type {kind!r}, and only {' and '.join(kinds)} "
                f"{'is' if len(kinds) == 1 else 'are'} trained on: give a text, or a list of {known}"
            )
        if kind == "text":
            _unicode(part["text"], f"the content of {where}")


def _extras(row: Row) -> dict[str, Any]:
    """The tools and template arguments of a row, without empty ones."""
    found = {name: row[name] for name in EXTRAS if row.get(name)}
    if isinstance(found.get("tools"), str):
        try:
            found["tools"] = parse_json(found["tools"]) or None
        except json.JSONDecodeError as error:
            raise DataError(f"column 'tools' is not valid JSON: {error}") from None
    if not isinstance(found.get("tools") or [], list):
        raise DataError(f"column 'tools' must hold a list, or its JSON, not {type(found['tools']).__name__}")
    options = found.get("chat_template_kwargs", {})
    if not isinstance(options, Mapping):
        raise DataError(f"column 'chat_template_kwargs' must hold a mapping, not {type(options).__name__}")
    refused = sorted(set(options) & _SET_HERE)
    if refused:
        raise DataError(f"chat_template_kwargs has {refused[0]!r}, which is set for each form; leave it out")
    return found


# --- where rows come from ---------------------------------------------------------------------------------------------

SHOWN = 8
"""Rows that a message names."""


class RowError(DataError):
    """A row that cannot be prepared.

    Attributes:
        row: its number in the dataset, from 0.
        problem: the message without the row.
    """

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(f"row {row}: {problem}")
        self.row, self.problem = row, problem

    def located(self, dataset: Any) -> DataError:
        """The error with the origin of the row, if the dataset knows it."""
        if not isinstance(dataset, LocatedRows):
            return self
        return DataError(f"{dataset.places[self.row]}: {self.problem}")


@contextlib.contextmanager
def naming_dataset(name: str) -> Iterator[None]:
    """Within the body, a DataError gets the name of the dataset."""
    try:
        yield
    except DataError as error:
        raise DataError(f"the {name} dataset: {error}") from None


class LocatedRows(list[Mapping[str, Any]]):
    """A list of rows. `places` has the origin of each, such as a file and a line."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], places: Iterable[str]) -> None:
        super().__init__(rows)
        self.places = list(places)


def place_of(dataset: Any, row: int) -> str:
    """Where a row of a dataset came from; its number, if the dataset does not know."""
    return dataset.places[row] if isinstance(dataset, LocatedRows) else f"row {row}"


def shown_places(dataset: Any, rows: Sequence[int], total: int) -> str:
    """The places of the first rows, and how many more there are of `total`."""
    shown = ", ".join(place_of(dataset, int(row)) for row in rows[:SHOWN])
    more = total - min(len(rows), SHOWN)
    return f"{shown} and {more} more" if more and shown else shown
