"""Tokens and labels equal those of TRL's own preparation, in every form, with every mask and truncation."""

from __future__ import annotations

import logging
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from tests.text.tokenizers import TEMPLATES, byte_tokenizer, word_tokenizer

from windlass.core.errors import DataError
from windlass.text.chat_template import ChatTemplate
from windlass.text.encoder import token_ranges
from windlass.text.pair_encoder import PairOptions
from windlass.text.prepare_pairs import prepare_pairs
from windlass.text.prepare_text import prepare_text
from windlass.text.text_options import TextOptions

datasets = pytest.importorskip("datasets")
sft_trainer = pytest.importorskip("trl.trainer.sft_trainer")


def chat(*contents: str) -> list[dict[str, str]]:
    """A conversation that alternates between user and assistant."""
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]


TURNS = [chat("Hi 😀", " Yes.\n"), chat("a", "b", "c", "Well, well.", "e", "f"), chat("x" * 30, "The end.")]
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "Once"}, {"text": "upon a time.<eos>"}, {"text": "a longer text, which is cut"}],
    "prompt-completion": [
        {"prompt": "2 + 2 = ", "completion": "4"},
        {"prompt": "A prompt that is much longer than what is kept of it:", "completion": " ok<eos>"},
        {"prompt": "Say", "completion": "ing" * 9},
    ],
    "messages": [{"messages": turns} for turns in TURNS],
    "chat completion": [{"prompt": turns[:-1], "completion": turns[-1:]} for turns in TURNS],
    "sharegpt": [
        {"conversations": [{"from": m["role"], "value": m["content"]} for m in turns]} for turns in TURNS
    ],
    "labelled tokens": [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4], "labels": [4]}],
    "masked tokens": [{"input_ids": [1, 2, 3], "assistant_masks": [0, 1, 1]}],
    "tokens": [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}],
}
CHATS = ("messages", "chat completion", "sharegpt")


def of_trl(
    rows: list[dict[str, Any]], tokenizer: Any, template: str | None, **options: Any
) -> list[dict[str, Any]]:
    """What `SFTTrainer` of trl would train on, from its method, called on what it reads of a trainer."""
    from trl import SFTConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of options that they replace in their next version
        args = SFTConfig(use_cpu=True, bf16=False, report_to="none", **options)
    completion = args.completion_only_loss
    if completion is None:
        completion = "prompt" in rows[0] and "completion" in rows[0]
    own = SimpleNamespace(_tokenizer=tokenizer, chat_template=template, completion_only_loss=completion)
    prepare = sft_trainer.SFTTrainer._prepare_dataset
    table = prepare(own, datasets.Dataset.from_list(rows), tokenizer, args, False, None, "train")
    return [{name: row[name] for name in ("input_ids", "labels")} for row in table]


def compared(form: str, tokenizer: Any, **options: Any) -> None:
    import windlass

    template = None
    if options.get("assistant_only_loss") and form in CHATS:
        template = windlass.get_training_chat_template(tokenizer)
    expected = of_trl(ROWS[form], tokenizer, template, **options)
    found = prepare_text(ROWS[form], tokenizer, TextOptions(**options))
    assert list(found.dataset) == expected
    assert any(label != -100 for row in expected for label in row["labels"])


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """No progress bars of trl's preparation, nor its messages."""
    datasets.disable_progress_bars()
    logging.getLogger("trl").setLevel(logging.ERROR)
    yield
    datasets.enable_progress_bars()


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("form", sorted(ROWS))
def test_forms_and_truncation(form: str, mode: str) -> None:
    length = 90 if form in CHATS else 24
    compared(form, word_tokenizer(TEMPLATES["chatml"]), max_length=length, truncation_mode=mode)


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_templates_and_masks(template: str) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[template])
    for form in ("messages", "chat completion"):
        compared(form, tokenizer, max_length=None)
        compared(form, tokenizer, assistant_only_loss=True)
    compared("chat completion", tokenizer, completion_only_loss=False)


@pytest.mark.parametrize("template", ["chatml", "gptoss", "llama3", "mistral", "phi3", "qwen3"])
def test_a_conversation_may_begin_with_the_assistant(template: str) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[template])
    turns = [{"role": "assistant", "content": "Hello."}, *chat("a", "b")]
    row = prepare_text([{"messages": turns}], tokenizer, TextOptions(assistant_only_loss=True)).dataset[0]
    trained = "".join("\0" if i == -100 else tokenizer.decode([i]) for i in row["labels"]).split("\0")
    first, second = [part for part in trained if part]
    assert first.startswith("Hello.")
    assert "b" in second
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    assert tokenizer.decode(row["input_ids"]) == whole


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        (
            "gptoss",
            ["a<|end|>", "<|channel|>final<|message|>b<|end|>", "<|channel|>final<|message|>d<|return|>"],
        ),
        ("phi3", ["a<|end|>\n", "b<|end|>\n", "d<|end|>\n<eos>"]),
    ],
)
def test_first_turns_end_as_former_ones_do(template: str, turns: list[str]) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[template])
    says = zip(["assistant", "assistant", "user", "assistant"], "abcd", strict=True)
    messages = [{"role": role, "content": text} for role, text in says]
    text, spans = ChatTemplate(tokenizer).text_and_spans(messages)
    assert text == tokenizer.apply_chat_template(messages, tokenize=False)
    assert [text[slice(*span)] for span in spans] == turns


def test_text_of_the_user_is_never_a_part_of_a_turn() -> None:
    """Some templates write the system message into the last message of the user: that of a turn's past is another one
    than that of the conversation.
    """
    template = (
        "{% set brief = messages[0].content if messages[0].role == 'system' %}{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'user' %}[INST] {{ brief if brief and loop.last }}{{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    made = ChatTemplate(byte_tokenizer(template))
    turns = chat("a", "b", "c", "d")
    text, spans = made.text_and_spans(turns)
    assert [text[slice(*span)] for span in spans] == [" b<eos>", " d<eos>"]
    with pytest.raises(DataError, match="in message 2 has no provable borders: put"):
        made.text_and_spans([{"role": "system", "content": "Be brief."}, *turns])


def test_turns_of_a_long_conversation_are_found() -> None:
    """A template counts to 100,000 at most, and here the borders of the first turn have to be searched for."""
    made = ChatTemplate(byte_tokenizer(TEMPLATES["qwen3"]))
    text, spans = made.text_and_spans(chat("a " * 60_000, "b", "c", "d"))
    assert [text[slice(*span)] for span in spans] == ["b<|im_end|>\n", "<think>\n\n</think>\n\nd<|im_end|>\n"]


def test_a_template_may_end_with_a_line_break_and_ask_for_keys() -> None:
    """Jinja leaves out such a line break, and a key without a value is not there."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if 'name' in m %}{{ m.name }}: {% endif %}{{ m.content }}<|end|>"
        "{% endfor %}{{ '<|assistant|>' if add_generation_prompt else '' }}\n"
    )
    asked, answered = chat("a", "b")
    text, spans = ChatTemplate(byte_tokenizer(template)).text_and_spans([{**asked, "name": None}, answered])
    assert text == "<|user|>a<|end|><|assistant|>b<|end|>"
    assert [text[slice(*span)] for span in spans] == ["b<|end|>"]


@pytest.mark.parametrize("end", ["inside", "outside"])
def test_a_template_that_does_not_train_the_end_of_a_turn_is_warned_of(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    inside, outside = ("<|end|>", "") if end == "inside" else ("", "<|end|>")
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        f"{inside}{{% endgeneration %}}{outside}{{% else %}}{{{{ m.content }}}}<|end|>{{% endif %}}{{% endfor %}}"
    )
    rows = [{"messages": chat("a", "b")}]
    prepare_text(rows, byte_tokenizer(template), TextOptions(assistant_only_loss=True))
    assert ("does not learn to stop" in caplog.text) == (end == "outside")


def test_a_template_that_writes_the_date_of_today_is_warned_of(said: list[str]) -> None:
    """Unless each row sets the date: a run that is resumed on another day would read other tokens."""
    date = "{{ date_string if date_string is defined else strftime_now('%d %B') }}"
    tokenizer = byte_tokenizer(date + TEMPLATES["chatml"])
    fixed = [{"messages": chat("a", "b"), "chat_template_kwargs": {"date_string": "1 May"}}]
    prepare_text(fixed, tokenizer)
    prepare_text([{"messages": chat("a", "b")}], byte_tokenizer(TEMPLATES["chatml"]))
    assert "the date of today" not in str(said)
    prepare_text([{"messages": chat("a", "b")}], tokenizer)
    assert "the date of today" in str(said)


def test_prompts_that_end_within_a_token_are_warned_of_once(said: list[str]) -> None:
    """Each ends in another way, and a dataset may have a million of them."""
    pairs = [("a t", "he"), ("a i", "ng"), ("a th", "e")]
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    prepare_text(rows, word_tokenizer())
    preferences = [{"prompt": prompt, "chosen": end, "rejected": end + "s"} for prompt, end in pairs]
    prepare_pairs(preferences, word_tokenizer(), PairOptions())
    assert str(said).count("not the first tokens of prompt and completion") == 1
    assert str(said).count("is left out") == 1


def test_completions_may_be_trained_with_their_prompts() -> None:
    compared("prompt-completion", word_tokenizer(), completion_only_loss=False)


@pytest.mark.parametrize(
    "name", ["llama3", "qwen3_instruct_2507", "qwen3_vl", "gemma", "gemma3", "cohere", "lfm2"]
)
def test_spans_equal_those_of_the_templates_that_trl_marked_by_hand(name: str) -> None:
    from importlib.resources import files

    from windlass.text.chat_template import make_trainable, render

    folder = files("trl") / "chat_templates"
    original, marked = ((folder / f"{name}{end}.jinja").read_text("utf-8") for end in ("", "_training"))
    tokenizer = byte_tokenizer()
    made = make_trainable(original, tokenizer)
    for turns in TURNS:
        assert render(tokenizer, made, turns) == render(tokenizer, marked, turns)
        assert render(tokenizer, made, turns)[0] == render(tokenizer, original, turns)[0]


def test_tokens_that_touch_a_span_are_in_its_range() -> None:
    offsets = [(0, 0), (0, 2), (2, 5), (5, 5), (5, 6), (6, 8), (6, 8), (8, 9)]
    assert token_ranges(offsets, []) == []
    assert token_ranges(offsets, [(2, 3), (6, 8)]) == [(2, 3), (5, 7)]
    assert token_ranges(offsets, [(1, 5)]) == [(1, 3)]
    assert token_ranges(offsets, [(0, 9)]) == [(1, 8)]
    assert token_ranges(offsets, [(9, 9)]) == []
