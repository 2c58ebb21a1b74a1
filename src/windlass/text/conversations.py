"""Functions on single examples and on preference datasets, with the names and results of `trl`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from windlass.core.errors import DataError
from windlass.text.chat_template import has_generation_markers, make_trainable

Example = dict[str, Any]
Tools = Sequence[dict[str, Any] | Callable[..., Any]]
_PARTS = ("prompt", "chosen", "rejected", "completion", "messages")
# The keys that an example may have, beside any that are not listed here.
_KINDS = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
    {"prompt", "completion", "label"},
)


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Return True if "prompt", "completion", "chosen", "rejected" or "messages" holds messages with a role."""
    return any(_is_list_with(example[name], "role") for name in _PARTS if name in example)


def is_conversational_from_value(example: Mapping[str, Any]) -> bool:
    """Return True if "conversations" holds messages with the keys "from" and "value" (ShareGPT)."""
    return _is_list_with(example.get("conversations"), "from", "value")


def _is_list_with(value: Any, *keys: str) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and all(key in first for key in keys)


def maybe_convert_to_chatml(example: Example) -> Example:
    """Return `example` with "from" and "value" of its messages renamed to "role" and "content".

    "conversations" becomes "messages", in place of any that are there. Names of roles are left as they are. Other
    examples are returned equal.
    """
    new = {"from": "role", "value": "content"}

    def renamed(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [
            {new.get(key, key): item for key, item in m.items()} if isinstance(m, dict) else m for m in value
        ]

    listed = (*_PARTS, "conversations")
    made = {name: renamed(value) if name in listed else value for name, value in example.items()}
    if "conversations" in made:
        made["messages"] = made.pop("conversations")
    return made


def apply_chat_template(
    example: Mapping[str, Any],
    tokenizer: Any = None,
    tools: Tools | None = None,
    *,
    processing_class: Any = None,
    **template_kwargs: Any,
) -> Example:
    """Render the conversations of an example: "messages" becomes "text", other parts keep their names.

    A prompt that ends with a user's or a tool's message gets the generation prompt, one that ends with an assistant's
    is continued. It is cut to what it has in common with prompt and answer together, so that the two join to the text
    of the whole conversation. "label" is kept.

    Args:
        tokenizer: a `transformers` tokenizer with a chat template; also under the name `processing_class`.
        tools: JSON schemas, or functions with type hints and docstrings.
        template_kwargs: arguments of the template; `example["chat_template_kwargs"]` are added to them.

    Raises:
        KeyError: the example has none of the known sets of keys.
        ValueError: the last message of the prompt has another role.
    """
    keys = {name for name in (*_PARTS, "label") if name in example}
    if keys not in _KINDS:
        raise KeyError(f"Invalid keys in the example: {keys}")
    tokenizer = processing_class if tokenizer is None else tokenizer
    options = {**template_kwargs, **(example.get("chat_template_kwargs") or {}), "tools": tools or None}

    def rendered(messages: Sequence[Any], **how: bool) -> str:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **how, **options))

    if "messages" in example:
        return {"text": rendered(example["messages"])}
    answers = [name for name in ("chosen", "rejected", "completion") if name in example]
    if "prompt" not in example:
        return {name: rendered(example[name]) for name in answers}
    whole = {name: rendered([*example["prompt"], *example[name]]) for name in answers}
    prompt = rendered(example["prompt"], **_ending(example["prompt"]))
    for text in whole.values():
        prompt = _common(prompt, text)
    parts = {"prompt": prompt, **{name: text[len(prompt) :] for name, text in whole.items()}}
    return parts | ({"label": example["label"]} if "label" in example else {})


def _ending(prompt: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    role = prompt[-1]["role"]
    if role not in ("user", "tool", "assistant"):
        raise ValueError(f"Invalid role in the last message: {role}")
    is_open = role == "assistant"
    return {"add_generation_prompt": not is_open, "continue_final_message": is_open}


def _common(one: str, other: str) -> str:
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def maybe_apply_chat_template(
    example: Mapping[str, Any],
    tokenizer: Any = None,
    tools: Tools | None = None,
    *,
    processing_class: Any = None,
    **template_kwargs: Any,
) -> Any:
    """Return `apply_chat_template(...)` if `example` is conversational, else `example` as it is."""
    if not is_conversational(example):
        return example
    return apply_chat_template(
        example, tokenizer, tools, processing_class=processing_class, **template_kwargs
    )


def extract_prompt(example: Mapping[str, Sequence[Any]]) -> Example:
    """Return "prompt", "chosen" and "rejected": the prompt is what "chosen" and "rejected" begin with.

    A prompt of text does not end with a space. Both answers keep at least their last character or message.
    """
    chosen, rejected = example["chosen"], example["rejected"]
    most = min(len(chosen), len(rejected))
    end = next((at for at in range(most) if chosen[at] != rejected[at]), None)
    # One answer begins with the other: something of each must be left to compare.
    if end is None:
        end = max(most - 1, 0)
    elif end and chosen[end - 1] == " ":
        end -= 1
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def maybe_extract_prompt(example: Mapping[str, Any]) -> Any:
    """Return `extract_prompt(example)` for a preference example whose prompt is part of its answers.

    A "prompt" beside conversations that is itself plain text is a copy of the first message, and is replaced.
    """
    if "chosen" not in example or "rejected" not in example:
        return example
    if "prompt" in example:
        chats = is_conversational({"chosen": example["chosen"]})
        if chats == is_conversational({"prompt": example["prompt"]}):
            return example
    return extract_prompt(example)


def unpair_preference_dataset(dataset: Any, **map_kwargs: Any) -> Any:
    """Return a dataset with the columns "prompt", "completion" and "label".

    The chosen answers of a batch of `map` come first, with the label True, and then the rejected ones, with False.

    Args:
        dataset: a `Dataset`, `DatasetDict` or their streams, with the columns "chosen", "rejected" and maybe "prompt".
            Other columns are repeated.
        map_kwargs: arguments of `dataset.map`.
    """
    return dataset.map(_unpaired, batched=True, remove_columns=_column_names(dataset), **map_kwargs)


def maybe_unpair_preference_dataset(
    dataset: Any, num_proc: int | None = None, desc: str | None = None
) -> Any:
    """Return `unpair_preference_dataset(dataset)` if it has the columns "chosen" and "rejected", else the dataset."""
    if not {"chosen", "rejected"} <= set(_column_names(dataset)):
        return dataset
    given = {"num_proc": num_proc, "desc": desc}
    return unpair_preference_dataset(dataset, **{name: v for name, v in given.items() if v is not None})


def _unpaired(batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    count = len(batch["chosen"])
    paired = {name: values * 2 for name, values in batch.items() if name not in ("chosen", "rejected")}
    answers = [*batch["chosen"], *batch["rejected"]]
    return {**paired, "completion": answers, "label": [True] * count + [False] * count}


def _column_names(dataset: Any) -> list[str]:
    part = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
    return list(part.column_names or next(iter(part)))


def get_training_chat_template(processing_class: Any = None, tokenizer: Any = None) -> str | None:
    """Return the chat template of a tokenizer with generation markers around what the assistant writes.

    None if the template has markers. Works for any template: the markers are found from what the template renders, and
    the text of a conversation stays the same. The template refuses a conversation in which they cannot be proven.
    Raises ValueError if the markers cannot be proven on example conversations, or there is no template.
    `processing_class`: a `transformers` tokenizer; also under the name `tokenizer`.
    """
    found = tokenizer if processing_class is None else processing_class
    if found is None:
        raise TypeError("get_training_chat_template() needs a tokenizer")
    template = found.chat_template
    if isinstance(template, dict):
        template = template["default"]
    if not template:
        raise DataError("the tokenizer has no chat template")
    return None if has_generation_markers(template) else make_trainable(template, found)


def supports_tool_calling(processing_class: Any) -> bool:
    """Return True if the chat template renders calls of tools whole: a call's name and arguments, and what the tool
    returned. Some templates drop one of them, or refuse the role. `processing_class`: a `transformers` tokenizer, or a
    processor whose template takes plain text.
    """
    if processing_class.chat_template is None:
        return False
    name, key, value, result = (f"tool_{word}_a8f3e2b1" for word in ("name", "key", "value", "result"))
    for arguments in ({key: value}, f'{{"{key}": "{value}"}}'):  # some templates join them to a text
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": name, "content": result},
        ]
        try:
            rendered = processing_class.apply_chat_template(messages, tokenize=False)
        except TypeError:
            continue
        except Exception:  # of the template: jinja2 raises several types, as do its expressions
            return False
        return all(word in rendered for word in (name, key, value, result))
    return False
