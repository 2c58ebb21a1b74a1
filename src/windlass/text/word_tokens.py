"""Tokenize texts word by word, each word once: text repeats its words, and most of a preparation is the tokenizer.

A text is cut at its added tokens, and before each space that follows a character other than white space. The tokenizers
that `_State` accepts split every text at these places, and what they make of one side does not depend on the other. So
the tokens of a text are those of its words, one after the other.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

Spans = list[tuple[int, int]]
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _REST = r"[^\r\n\p{L}\p{N}]?", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of ByteLevel
# Patterns whose matches hold no space after another character, and look ahead of white space only. So they end before
# such a space, and match the same on either side of it if the other side is not there.
_CUTTING = frozenset(
    {
        # GPT-4, Llama 3
        rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_REST}",
        # Qwen
        rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_REST}",
        # GPT-4o, gpt-oss
        rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_REST}",
    }
)
_CLASSES = {
    _UPPER: "[A-Z]",
    _LOWER: "[a-z]",
    r"\p{L}\p{N}": "a-zA-Z0-9",
    r"\p{L}": "[a-zA-Z]",
    r"\p{N}": "[0-9]",
}
_PLAIN = re.compile(r"[\t\n\r -~]+").fullmatch  # in which `re` and the tokenizers find the same white space
# What `tokenizer(texts)` calls, and where transformers defines it; some tokenizers override it.
_CALLED = ("_encode_plus", "_batch_encode_plus", "_switch_to_input_mode", "set_truncation_and_padding")
_LIBRARY = frozenset(f"transformers.tokenization_utils_{name}" for name in ("base", "fast", "tokenizers"))
_JOINED_SPACE, _CUT, _SPACE_WITHIN = re.compile(r"\s "), re.compile(r"(?<=\S)(?= )"), re.compile(r"\S ")
# Characters of the words that are kept: some 100,000 words, in some 30 MB.
_MOST = 1 << 20
_first, _last = itemgetter(0), itemgetter(1)
_Check = Callable[[Any], bool]


class WordTokens:
    """The tokens of texts, from a fast tokenizer of `transformers`, which may be changed meanwhile."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._forget(None)

    def __reduce__(self) -> Any:
        return WordTokens, (self._tokenizer,)

    def ids(self, texts: Sequence[str], *, special: bool) -> list[list[int]] | None:
        """Return the tokens of each text; None if they are not known to be those of its words. `special`: with the
        tokens that the tokenizer puts around every text.
        """
        words = self._learned(texts)
        if words is None:
            return None
        before, after = self._around if special else ([], [])
        known = self._known
        return [[*before, *chain.from_iterable([known[word] for word in row]), *after] for row in words]

    def ids_and_ranges(
        self, texts: Sequence[str], spans: Sequence[Spans]
    ) -> tuple[list[list[int]], list[Spans]] | None:
        """Return the tokens of each text, and the (first, last + 1) tokens that have a character in each of its spans
        (start, end) of characters; empty ranges are left out. None if `ids` returns None.
        """
        words = self._learned(texts)
        if words is None:
            return None
        known = self._known
        tokens = [[known[word] for word in row] for row in words]
        ranges = [self._ranges(*row) for row in zip(words, tokens, spans, strict=True)]
        return [list(chain.from_iterable(row)) for row in tokens], ranges

    def _ranges(self, words: list[str], tokens: list[tuple[int, ...]], spans: Spans) -> Spans:
        if not words:
            return []
        ends = list(accumulate(map(len, words)))
        counts = [0, *accumulate(map(len, tokens))]
        found = []
        for start, end in spans:
            at = min(bisect_right(ends, start), len(words) - 1)
            last_at = min(bisect_left(ends, end), len(words) - 1)
            inside, begins = start - ends[at] + len(words[at]), end - ends[last_at] + len(words[last_at])
            first = counts[at] + bisect_right(self._offsets(words[at]), inside, key=_last)
            last = counts[last_at] + bisect_left(self._offsets(words[last_at]), begins, key=_first)
            if first < last:
                found.append((first, last))
        return found

    def _offsets(self, word: str) -> Spans:
        """The characters (start, end) of the tokens of a word."""
        found = self._borders.get(word)
        if found is None:
            found = self._tokenizer.backend_tokenizer.encode(word, add_special_tokens=False).offsets
            self._borders[word] = found
        return found

    def _learned(self, texts: Sequence[str]) -> list[list[str]] | None:
        """The words of each text, after the tokenizer has been asked for those that are not known."""
        state = _State.of(self._tokenizer)
        if state is None:
            return None
        if state != self._state:
            self._forget(state)
        words = [self._words(text) for text in texts]
        wanted = set(chain.from_iterable(words))
        missing = list(wanted.difference(self._known))
        if self._size > _MOST:
            self._forget(state)
            missing = list(wanted)
        self._learn(missing)
        return words

    def _learn(self, words: list[str]) -> None:
        pieces = [self._pieces(word) for word in words]
        missing = list(set(chain.from_iterable(pieces)).difference(self._known))
        encoded = self._tokenizer.backend_tokenizer.encode_batch_fast(missing, add_special_tokens=False)
        self._known.update(zip(missing, [tuple(encoding.ids) for encoding in encoded], strict=True))
        for word, parts in zip(words, pieces, strict=True):
            self._known[word] = tuple(chain.from_iterable([self._known[part] for part in parts]))
        self._size += sum(map(len, words))

    def _pieces(self, word: str) -> list[str]:
        """The parts of a word that the tokenizer's model gets one by one, if they are known: rare words have common
        parts.
        """
        if self._pattern is None or not _PLAIN(word) or (self._added and self._added.match(word)):
            return [word]
        return self._pattern.findall(word)

    def _forget(self, state: _State | None) -> None:
        """Start without words."""
        self._state, self._size = state, 0
        # tuples, in which the garbage collector need not look for cycles
        self._known: dict[str, tuple[int, ...]] = {}
        self._borders: dict[str, Spans] = {}
        added = sorted(() if state is None else state.added, key=len, reverse=True)  # the longest is found
        pattern = None if state is None else state.pattern
        self._pattern = None if pattern is None else re.compile(_of_ascii(pattern))
        self._added = re.compile(f"({'|'.join(map(re.escape, added))})") if added else None
        self._around = ([], []) if state is None else _added_around(json.loads(state.post))

    def _words(self, text: str) -> list[str]:
        if self._added is None:
            return _cut(text)
        return [word for part in self._added.split(text) if part for word in _cut(part)]


def _cut(text: str) -> list[str]:
    """Cut a text before each space that follows a character other than white space."""
    if _JOINED_SPACE.search(text) or "\0" in text:
        return _CUT.split(text)
    return text.replace(" ", "\0 ").split("\0")


@dataclass(frozen=True, slots=True)
class _State:
    """What of a tokenizer decides where it splits texts."""

    added: tuple[str, ...]  # its added tokens
    size: int  # of its vocabulary
    post: str  # its post-processor, as JSON
    # By which alone it splits words into the pieces that its model gets; None = it does more
    pattern: str | None

    @classmethod
    def of(cls, tokenizer: Any) -> _State | None:
        """The state of a tokenizer; None if its tokens are not those of its words."""
        inner = _inner(tokenizer)
        if inner is None or inner.truncation is not None or inner.padding is not None:
            return None
        if inner.encode_special_tokens or getattr(tokenizer, "split_special_tokens", False):
            return None
        model, normalizer = inner.model, _described(inner.normalizer)
        if type(model).__name__ != "BPE" or model.dropout or (normalizer and normalizer["type"] != "NFC"):
            return None
        before, post = _described(inner.pre_tokenizer), _described(inner.post_processor)
        added = list(inner.get_added_tokens_decoder().values())
        if not _cuts(before) or not _adds_alike(post):
            return None
        if any(t.lstrip or t.rstrip or t.single_word or _SPACE_WITHIN.search(t.content) for t in added):
            return None
        if len({t.normalized for t in added}) > 1 or (normalizer and any(t.normalized for t in added)):
            return None  # some are looked for before others
        return cls(
            tuple(t.content for t in added), inner.get_vocab_size(), json.dumps(post), _pattern(before)
        )


def _inner(tokenizer: Any) -> Any:
    """The tokenizer of the package `tokenizers` whose result `tokenizer(texts)` returns; None if it changes it."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    methods = [type(tokenizer).__call__, *(getattr(tokenizer, name, None) for name in _CALLED)]
    is_plain = all(method is None or method.__module__ in _LIBRARY for method in methods)
    return tokenizer.backend_tokenizer if is_plain else None


def _described(part: Any) -> Any:
    """A part of a tokenizer as JSON; {"type": None} if it is written in Python."""
    if part is None:
        return None
    try:
        return json.loads(part.__getstate__())
    except Exception:  # the package has no type of its own for it
        return {"type": None}


def _members(part: Any) -> list[Any]:
    """The parts that are applied one after the other."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return list(part.get("pretokenizers") or part.get("processors") or [{"type": None}])


def _cuts(part: Any) -> bool:
    """Return True if a pre-tokenizer splits a text at every cut, and each side of it without the other."""
    members = _members(part)
    return all(p["type"] in _KEEPS and _KEEPS[p["type"]](p) for p in members) and any(
        p["type"] != "Digits" and (p["type"] == "Split" or p["use_regex"]) for p in members
    )


def _pattern(part: Any) -> str | None:
    """The one pattern of a pre-tokenizer that splits at every cut; None if it has several."""
    patterns = [
        _GPT2 if p["type"] == "ByteLevel" else p["pattern"]["Regex"] if p["type"] == "Split" else None
        for p in _members(part)
        if p["type"] != "ByteLevel" or p["use_regex"]
    ]
    return patterns[0] if len(patterns) == 1 else None


def _of_ascii(pattern: str) -> str:
    """The same pattern for texts of ASCII, without the classes that `re` does not know."""
    for unicode, ascii in _CLASSES.items():
        pattern = pattern.replace(unicode, ascii)
    return pattern


def _adds_alike(post: Any) -> bool:
    """Return True if a post-processor adds the same tokens to every text, and leaves the offsets as they are."""
    parts = _members(post)
    templates = [p for p in parts if p["type"] == "TemplateProcessing"]
    others = all(p["type"] == "ByteLevel" and not p["trim_offsets"] for p in parts if p not in templates)
    texts = [sum("Sequence" in piece for piece in p["single"]) for p in templates]
    return others and texts in ([], [1])


def _added_around(post: Any) -> tuple[list[int], list[int]]:
    """The tokens that a post-processor puts before and after every text."""
    around: tuple[list[int], list[int]] = ([], [])
    for template in (p for p in _members(post) if p["type"] == "TemplateProcessing"):
        is_after = 0
        for piece in template["single"]:
            if "Sequence" in piece:
                is_after = 1
            else:
                around[is_after].extend(template["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
    return around


_KEEPS: dict[Any, _Check] = {
    "ByteLevel": lambda p: not p["add_prefix_space"],
    "Digits": lambda _: True,
    "Split": lambda p: (
        p["pattern"].get("Regex") in _CUTTING and p["behavior"] == "Isolated" and not p["invert"]
    ),
}
