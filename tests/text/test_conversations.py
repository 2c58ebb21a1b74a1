from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.text.tokenizers import TEMPLATES, byte_tokenizer

import windlass

trl = pytest.importorskip("trl")
data_utils = pytest.importorskip("trl.data_utils")

U, A = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}
B = {"role": "assistant", "content": "Those."}
EXAMPLES: list[dict[str, Any]] = [
    {"messages": [U, A]},
    {"prompt": [U]},
    {"prompt": [U, A]},
    {"prompt": [U], "completion": [A]},
    {"prompt": [U], "completion": [A], "label": True},
    {"prompt": [U], "chosen": [A], "rejected": [B], "more": 3},
    {"chosen": [U, A], "rejected": [U, B]},
    {"text": "a"},
    {"prompt": "a b", "completion": "c"},
    {"conversations": [{"from": "user", "value": "x"}, {"from": "assistant", "value": "y"}]},
    {"conversations": "x"},
    {"conversations": [{"from": "user", "value": "x"}], "messages": [U, A]},
    {"messages": [{"from": "user", "value": "x"}]},
    {"chosen": "The sky is blue", "rejected": "The sky is green"},
    {"chosen": "The sky", "rejected": "The sky is green"},
    {"chosen": [A], "rejected": [B], "prompt": [U]},
]
# A prompt that repeats the first message as text: trl's `is_conversational` looks at a random one of the columns.
MIXED = {"chosen": [U, A], "rejected": [U, B], "prompt": "What?"}
ON_EXAMPLES = (
    "is_conversational",
    "is_conversational_from_value",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
)


@pytest.mark.parametrize("name", ON_EXAMPLES)
def test_functions_on_examples_equal_those_of_trl(name: str) -> None:
    for example in EXAMPLES:
        given = copy.deepcopy(example)
        expected = getattr(data_utils, name)(copy.deepcopy(example))
        assert getattr(windlass, name)(given) == expected, example
        assert given == example, "the example itself is left as it was"


def test_a_prompt_is_extracted_like_trl() -> None:
    assert windlass.is_conversational(MIXED)
    assert windlass.maybe_extract_prompt(MIXED) == data_utils.maybe_extract_prompt(MIXED)
    for example in EXAMPLES:
        if "chosen" in example:
            assert windlass.extract_prompt(example) == data_utils.extract_prompt(example)


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_conversations_are_rendered_like_trl(template: str) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[template])
    for example in EXAMPLES:
        expected = data_utils.maybe_apply_chat_template(example, tokenizer)
        assert windlass.maybe_apply_chat_template(example, tokenizer) == expected, example


def test_invalid_examples_are_refused_like_trl() -> None:
    tokenizer = byte_tokenizer(TEMPLATES["chatml"])
    with pytest.raises(KeyError, match="Invalid keys"):
        windlass.apply_chat_template({"completion": [A]}, tokenizer)
    with pytest.raises(ValueError, match="Invalid role in the last message: system"):
        windlass.apply_chat_template({"prompt": [{"role": "system", "content": "x"}]}, tokenizer)


def test_preferences_are_unpaired_like_trl() -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f"], "more": [1, 2]}
    table = datasets.Dataset.from_dict(rows)
    expected = data_utils.unpair_preference_dataset(table)
    assert list(windlass.unpair_preference_dataset(table)) == list(expected)
    assert list(windlass.maybe_unpair_preference_dataset(table, num_proc=1)) == list(expected)
    assert list(windlass.unpair_preference_dataset(table.to_iterable_dataset())) == list(expected)
    both = windlass.unpair_preference_dataset(datasets.DatasetDict(x=table))
    assert list(both["x"]) == list(expected)
    plain = table.select_columns("prompt")
    assert windlass.maybe_unpair_preference_dataset(plain) is plain


def test_a_training_template_is_made_only_if_needed() -> None:
    tokenizer = byte_tokenizer(TEMPLATES["chatml"])
    template = windlass.get_training_chat_template(tokenizer)
    assert template is not None
    found = tokenizer.apply_chat_template(
        [U, A], chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    kept = [i for i, bit in zip(found["input_ids"], found["assistant_masks"], strict=True) if bit]
    assert tokenizer.decode(kept) == "That.<|im_end|>\n"
    tokenizer.chat_template = template
    assert windlass.get_training_chat_template(tokenizer=tokenizer) is None
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}?"
    with pytest.raises(ValueError, match="cannot be made trainable"):
        windlass.get_training_chat_template(tokenizer)


CALLS = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + ARGUMENTS }}"
    "{% endfor %}{{ m.role + m.content }}{% endfor %}"
)
KINDS_OF_CALLS = {
    "objects": CALLS.replace("ARGUMENTS", "call.function.arguments | tojson"),
    "texts": CALLS.replace("ARGUMENTS", "call.function.arguments"),  # adds a text, so it takes no object
    "names alone": CALLS.replace(" + ARGUMENTS", ""),
    "refused": "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}",
    "none": None,
}


@pytest.mark.parametrize("kind", [*KINDS_OF_CALLS, *sorted(TEMPLATES)])
def test_templates_that_render_calls_of_tools_are_those_of_trl(kind: str) -> None:
    chat_templates = pytest.importorskip("trl.chat_template_utils")
    tokenizer = byte_tokenizer({**TEMPLATES, **KINDS_OF_CALLS}[kind])
    expected = chat_templates.supports_tool_calling(tokenizer)
    assert windlass.supports_tool_calling(tokenizer) == expected == (kind in ("objects", "texts"))
