"""Tokens made word by word equal those of the tokenizer; only tokenizers for which that is known are asked so."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import tokenizers as tk
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tests.text.tokenizers import byte_tokenizer, word_tokenizer

from windlass.text import word_tokens
from windlass.text.encoder import token_ranges
from windlass.text.word_tokens import WordTokens

GPT4, QWEN, GPT4O = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
BYTES = tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(pattern: str) -> Any:
    return tk.pre_tokenizers.Sequence([tk.pre_tokenizers.Split(tk.Regex(pattern), "isolated"), BYTES])


PRE_TOKENIZERS = {
    "gpt2": tk.pre_tokenizers.ByteLevel(add_prefix_space=False),
    "gpt4": split(GPT4),
    "qwen": split(QWEN),
    "gpt4o": split(GPT4O),
    "digits": tk.pre_tokenizers.Sequence(
        [
            tk.pre_tokenizers.Digits(individual_digits=True),
            tk.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
}
SENTENCES = [
    "a    b \n\n   c \n \t\t  d    a",
    "the thing's there, in 1234 things;  they'LL sing \n\n of it",
    "In the 'then' and the  there.\r\n 12 34",
]


def tokenizer_with(before: Any, normalizer: Any = None, post: Any = None) -> Any:
    """A tokenizer with merges across letters, digits, spaces and signs, if its pre-tokenizer leaves them joined."""
    inner = tk.Tokenizer(tk.models.BPE())
    inner.pre_tokenizer = before
    if normalizer is not None:
        inner.normalizer = normalizer
    letters = tk.pre_tokenizers.ByteLevel.alphabet()
    trainer = tk.trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=letters,
        show_progress=False,
        special_tokens=["<eos>", "<|end|>", "<|end"],
    )
    inner.train_from_iterator(SENTENCES * 3, trainer)
    if post is not None:
        inner.post_processor = post
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


def expected(tokenizer: Any, texts: list[str], special: bool) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []


# What splits text in unlike ways: white space of all kinds, contractions, accents that join, digits, signs, tokens.
PARTS = st.sampled_from([
    " ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1c", "\x85", "\u00a0", "\u2003", "\u3000", "\0",
    "a", "the", "The", "THE", "'s", "'LL", "’", "e\u0301", "\u0301", "\u0338", "é", "ſ", "ß", "中", "thing",
    "12", "1234", "٣", "²", ",", "...", "/", "//", "<",
    "<eos>", "<|end|>", "<|end", "<|", "|>", "\U0001f600", "\u200d", "\ufeff",
])  # fmt: skip
TEXTS = st.lists(
    st.lists(PARTS | st.characters(exclude_categories=["Cs"]), max_size=14).map("".join), max_size=4
)


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
@given(texts=TEXTS, data=st.data())
def test_tokens_and_ranges_equal_those_of_the_tokenizer(kind: str, texts: list[str], data: Any) -> None:
    tokenizer = MADE.setdefault(kind, tokenizer_with(PRE_TOKENIZERS[kind]))
    check(tokenizer, texts, data)


@given(texts=TEXTS, data=st.data())
def test_tokens_are_equal_after_normalisation_and_with_tokens_around(texts: list[str], data: Any) -> None:
    check(MADE["normalised"], texts, data)


def check(tokenizer: Any, texts: list[str], data: Any) -> None:
    words = WordTokens(tokenizer)
    for _ in range(2):  # words that are known are not tokenized again
        assert words.ids(texts, special=False) == expected(tokenizer, texts, False)
        assert words.ids(texts, special=True) == expected(tokenizer, texts, True)
    spans = [
        sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=4, max_size=4))) if text else []
        for text in texts
    ]
    pairs = [list(zip(row[::2], row[1::2], strict=True)) for row in spans]
    found = words.ids_and_ranges(texts, pairs)
    assert found is not None
    if texts:
        whole = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        ranges = [token_ranges(*row) for row in zip(whole["offset_mapping"], pairs, strict=True)]
        assert found == (whole["input_ids"], ranges)


MADE: dict[str, Any] = {
    "normalised": tokenizer_with(
        split(QWEN),
        tk.normalizers.NFC(),
        tk.processors.Sequence(
            [
                tk.processors.ByteLevel(trim_offsets=False),
                tk.processors.TemplateProcessing(
                    "<|end|> $A <eos>", special_tokens=[("<|end|>", 1), ("<eos>", 0)]
                ),
            ]
        ),
    ),
}


def test_words_are_forgotten_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_tokens, "_MOST", 40)
    tokenizer, texts = word_tokenizer(), [f"the {n} things in {n * 7}" for n in range(30)]
    words = WordTokens(tokenizer)
    found = [ids for text in texts for ids in words.ids([text], special=True) or []]
    assert found == expected(tokenizer, texts, True)


def test_tokens_that_are_added_meanwhile_are_found() -> None:
    tokenizer = word_tokenizer()
    words = WordTokens(tokenizer)
    before = words.ids(["some thing"], special=False)
    tokenizer.add_tokens([tk.AddedToken("thing", normalized=False)])
    assert words.ids(["some thing"], special=False) == expected(tokenizer, ["some thing"], False) != before


def test_a_sent_object_has_its_tokenizer_and_no_words() -> None:
    words = WordTokens(byte_tokenizer())
    words.ids(["some words"], special=False)
    again = pickle.loads(pickle.dumps(words))
    assert len(pickle.dumps(words)) == len(pickle.dumps(WordTokens(byte_tokenizer())))
    assert again.ids(["a b"], special=False) == words.ids(["a b"], special=False)


class OwnCall(transformers.PreTrainedTokenizerFast):
    """Changes what the tokenizer of the package `tokenizers` returns."""

    def _encode_plus(self, *args: Any, **kwargs: Any) -> Any:
        return super()._encode_plus(*args, **kwargs)


def own_call() -> Any:
    return OwnCall(tokenizer_object=byte_tokenizer().backend_tokenizer)


def changed(change: Any) -> Any:
    tokenizer = byte_tokenizer()
    change(tokenizer)
    return tokenizer


def set_post(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.post_processor = tk.processors.ByteLevel(trim_offsets=True)


REFUSED = {
    "its own call": own_call,
    "a space before": lambda: tokenizer_with(tk.pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "an unknown pattern": lambda: tokenizer_with(split(r"\s+|\S+ \S+")),
    "no pattern": lambda: tokenizer_with(BYTES),
    "a normalizer of spaces": lambda: tokenizer_with(split(QWEN), tk.normalizers.Replace(" ", "_")),
    "a token that takes spaces": lambda: changed(lambda t: t.add_tokens([tk.AddedToken("x", rstrip=True)])),
    "a token with a space": lambda: changed(lambda t: t.add_tokens([tk.AddedToken("x y")])),
    "a token of whole words": lambda: changed(lambda t: t.add_tokens([tk.AddedToken("x", single_word=True)])),
    "tokens of two kinds": lambda: changed(lambda t: t.add_tokens([tk.AddedToken("x", normalized=True)])),
    "truncation": lambda: changed(lambda t: t.backend_tokenizer.enable_truncation(3)),
    "padding": lambda: changed(lambda t: t.backend_tokenizer.enable_padding()),
    "special tokens as text": lambda: changed(lambda t: setattr(t, "split_special_tokens", True)),
    "trimmed offsets": lambda: changed(set_post),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_tokenizers_are_not_asked_by_words(kind: str) -> None:
    assert WordTokens(REFUSED[kind]()).ids(["a b"], special=False) is None


def test_dropout_is_not_kept() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.model.dropout = 0.5
    assert WordTokens(tokenizer).ids(["a b"], special=False) is None
