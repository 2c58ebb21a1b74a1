"""Turn rows of any form into token ids and labels."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.logs import get_logger, warn_once
from windlass.core.types import IGNORED
from windlass.text.chat_template import ChatTemplate, Spans
from windlass.text.forms import Form, Row, RowError, is_conversational_row, standardised
from windlass.text.word_tokens import WordTokens

_logger = get_logger(__name__)
_NO_ASSISTANT = (
    "assistant_only_loss=True, and the chat template marks no token as written by the assistant. Check the roles of "
    "the row, and that the template has {% generation %} around the assistant's text."
)


@dataclass(slots=True)
class EncodedRows:
    """Rows as tokens; each row is a list of ids and a list of labels of the same length.

    Attributes:
        truncated: rows that were cut to the maximum length.
        dropped: numbers in the dataset of rows that were left out, because none of their tokens had a label.
        documents: of rows of several documents, the tokens of each.
        places: of rows with images, for each its number in the dataset and how many of its images it has, one after
            the other.
    """

    input_ids: list[list[int]] = field(default_factory=list)
    labels: list[list[int]] = field(default_factory=list)
    truncated: int = 0
    dropped: list[int] = field(default_factory=list)
    documents: list[list[int]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


def name_unread(example: Row) -> None:
    """Warn of a column `system`, which is read of conversations in the form of ShareGPT and of instructions alone."""
    if "system" in example:
        warn_once(
            _logger,
            "the column 'system' is not read beside messages or a prompt: put its text before them, as a message with "
            "the role system, or remove the column",
        )


class RowEncoder:
    """`encoder(rows, first)` -> `EncodedRows`. A pure function of the rows, in any process.

    Args:
        tokenizer: a `transformers` tokenizer.
        options: a `TextOptions`.
        form: of the dataset.
        example: its first row, which shows if it holds conversations.

    Raises:
        ConfigError: the options do not apply to this form.
        DataError: the first row is invalid, or has no chat template to be rendered with.
    """

    made: tuple[str, ...] = ("input_ids", "labels")  # what `columns` returns

    def __init__(self, tokenizer: Any, options: Any, form: Form, example: Row) -> None:
        self._tokenizer, self._form = tokenizer, form
        self._words, self._has_warned = WordTokens(tokenizer), False
        # the function has been applied, and one of a script cannot be sent to another process
        self._options = replace(options, formatting_func=None)
        first = self._standard(example, 0)
        if form in (Form.MESSAGES, Form.PROMPT_COMPLETION):
            name_unread(example)
        self._kind = "tokens" if form is Form.TOKENIZED else "pair" if "prompt" in first else "one"
        self._chats = is_conversational_row(first)
        self._completion_only = self._wants_completion(first)
        self._check_masks(first)
        self._columns_of_first = frozenset(first)
        self._template = self._chat_template(first) if self._chats else None
        is_plain = not self._chats and self._kind != "tokens"
        self._eos = self._end_token() if is_plain else ""
        self._bos, self._adds_eos = added_around(tokenizer, self._eos) if is_plain else ("", False)

    def _chat_template(self, first: Row) -> ChatTemplate:
        spans = self._options.assistant_only_loss
        if spans and not getattr(self._tokenizer, "is_fast", False):
            fix = "needs a fast tokenizer, which knows the characters of each token"
            raise ConfigError(Problem("assistant_only_loss", True, fix))
        template = ChatTemplate(self._tokenizer, self._options.chat_template)
        if spans and not template.trains_ends():
            warn_once(
                _logger,
                "the chat template has nothing that ends a turn of the assistant within its markers, so with "
                "assistant_only_loss=True the model does not learn to stop. Put the end of the turn between "
                "{% generation %} and {% endgeneration %}, or train on all tokens.",
            )
        if template.calls_date() and not first.get("chat_template_kwargs"):
            warn_once(
                _logger,
                "the chat template writes the date of today (strftime_now), so a run that is resumed on another day "
                "may read other tokens than an uninterrupted one. Set the date in a template (chat_template_path), or "
                "by a column chat_template_kwargs if the template takes it, as Llama's takes date_string.",
            )
        return template

    def _check_masks(self, first: Row) -> None:
        """Refuse masks that this form has not."""
        options, has_labels = self._options, "labels" in first
        if options.assistant_only_loss and self._kind != "tokens" and not self._chats:
            also = "; the completion alone is trained on then" if self._kind == "pair" else ""
            fix = f"needs conversations, and the dataset has the form {self._form.value!r}: set it to false{also}"
            raise ConfigError(Problem("assistant_only_loss", True, fix))
        wanted = {"assistant_masks": "assistant_only_loss", "completion_mask": "completion_only_loss"}
        for column, name in wanted.items():
            if self._kind == "tokens" and getattr(options, name) and column not in first and not has_labels:
                raise ConfigError(Problem(name, True, f"needs a column {column} or labels in tokenized rows"))

    def _wants_completion(self, first: Row) -> bool:
        wanted, has = self._options.completion_only_loss, self._kind == "pair"
        if wanted and not has and self._kind != "tokens":
            fix = (
                "needs rows with a prompt and a completion; to train on the assistant's messages, set "
                "assistant_only_loss=True"
            )
            raise ConfigError(Problem("completion_only_loss", True, fix))
        return has if wanted is None else bool(wanted)

    def _end_token(self) -> str:
        end = self._options.eos_token or self._tokenizer.eos_token
        if not end:
            fix = (
                "the tokenizer has no end token, so the model would not learn to stop; name one of its tokens"
            )
            raise ConfigError(Problem("eos_token", None, fix))
        return str(end)

    def __call__(self, rows: Sequence[Row], first: int) -> EncodedRows:
        """Encode `rows`; `first` is the number of the first of them in the dataset, for error messages. Raises RowError
        if a row is invalid.
        """
        standard = [self._standard(row, first + at) for at, row in enumerate(rows)]
        if self._kind == "tokens":
            pairs: Iterable[tuple[list[int], list[int]]] = [
                self._of_tokens(row, first + at) for at, row in enumerate(standard)
            ]
        else:
            pairs = self._labelled(*self._rendered(standard, first), first)
        return self._fitted(pairs, first)

    def _standard(self, row: Row, number: int) -> dict[str, Any]:
        options = self._options
        try:
            return standardised(
                row, self._form, options.dataset_text_field, bool(self._tokenizer.chat_template)
            )
        except DataError as error:
            raise RowError(number, str(error)) from None

    # -- rows that hold tokens already -------------------------------------------------------------------------------

    def _of_tokens(self, row: Row, number: int) -> tuple[list[int], list[int]]:
        ids = row["input_ids"]
        labels = row.get("labels")
        if labels is None:
            names = ["assistant_masks"]
            if self._options.completion_only_loss is not False:
                names.append("completion_mask")
            for name in ("labels", *names):
                if name in self._columns_of_first and name not in row:
                    fix = "without it all of its tokens would be trained on"
                    raise RowError(number, f"{name} is missing or null, and the first row has it: {fix}")
            masks = [row[name] for name in names if name in row]
            labels = [i if all(bits) else IGNORED for i, *bits in zip(ids, *masks, strict=True)]
            if "assistant_masks" in row and not any(row["assistant_masks"]):
                raise RowError(
                    number, "its assistant_masks mark no token: correct the mask, or remove the row"
                )
        # The collator pads again, and tokens of padding are none of the document.
        attended = row.get("attention_mask")
        if attended is not None and not all(attended):  # rows that were padded
            labels = [label for label, kept in zip(labels, attended, strict=True) if kept]
            ids = [token for token, kept in zip(ids, attended, strict=True) if kept]
        return ids, labels

    # -- rows that hold text -----------------------------------------------------------------------------------------

    def _labelled(
        self, texts: list[str], prompts: list[str], spans: list[Spans] | None, first: int
    ) -> list[tuple[list[int], list[int]]]:
        ids, ranges = self._tokens(texts, spans)
        starts = [0] * len(ids)
        if self._completion_only:
            alone = self._alone(prompts)
            starts = [self._start(prompt, whole) for prompt, whole in zip(alone, ids, strict=True)]
        found = []
        for at, row in enumerate(ids):
            start = starts[at]
            if ranges is None:
                labels = [*([IGNORED] * start), *row[start:]]
            else:
                if not ranges[at]:
                    raise RowError(first + at, _NO_ASSISTANT)
                labels = [IGNORED] * len(row)
                for begin, end in ranges[at]:
                    labels[max(begin, start) : end] = row[max(begin, start) : end]
            found.append((row, labels))
        return found

    def _rendered(self, rows: Sequence[Row], first: int) -> tuple[list[str], list[str], list[Spans] | None]:
        """The whole text of each row, its prompt if there is one, and the assistant's spans if they are needed."""
        texts, prompts = [], []
        spans: list[Spans] | None = [] if self._options.assistant_only_loss else None
        for at, row in enumerate(rows):
            if is_conversational_row(row) != self._chats:
                kinds = ("a conversation", "text")
                found, before = kinds if self._chats is False else kinds[::-1]
                raise RowError(first + at, f"holds {found}, and the first row holds {before}")
            if not self._chats:
                prompt, body = row.get("prompt", ""), row["text"] if "text" in row else row["completion"]
                # The tokenizer puts its own before the text: two beginnings are not what the model knows.
                texts.append((prompt + self._ended(body)).removeprefix(self._bos))
                prompts.append(prompt.removeprefix(self._bos))
                continue
            try:
                prompt, text, where = self._conversation(row)
            except DataError as error:
                raise RowError(first + at, str(error)) from None
            texts.append(text)
            prompts.append(prompt)
            if spans is not None:
                spans.append(where)
        return texts, prompts, spans

    def _ended(self, text: str) -> str:
        """The text with one end token, which the tokenizer may add itself."""
        # With both, the row would end in two end tokens, and a model would learn to go on after the first.
        if self._adds_eos:
            return text.removesuffix(self._eos)
        return text if text.endswith(self._eos) else text + self._eos

    def _conversation(self, row: Row) -> tuple[str, str, Spans]:
        assert self._template is not None
        options = {**(row.get("chat_template_kwargs") or {}), "tools": row.get("tools")}
        prompt = ""
        messages = row["messages"] if "messages" in row else [*row["prompt"], *row["completion"]]
        if self._completion_only:
            prompt = self._template.text(row["prompt"], add_generation_prompt=True, **options)
        if self._options.assistant_only_loss:
            return prompt, *self._template.text_and_spans(messages, **options)
        return prompt, self._template.text(messages, **options), []

    def _tokens(
        self, texts: list[str], spans: list[Spans] | None
    ) -> tuple[list[list[int]], list[Spans] | None]:
        if spans is None:
            ids = self._words.ids(texts, special=not self._chats)
            if ids is not None:
                return ids, None
        else:
            found = self._words.ids_and_ranges(texts, spans)
            if found is not None:
                return found
        # verbose=False: no warning of rows longer than the model's context, which are cut later
        encoded = self._tokenizer(
            texts,
            add_special_tokens=not self._chats,  # a chat template writes them itself
            return_attention_mask=False,
            return_offsets_mapping=spans is not None,
            verbose=False,
        )
        if spans is None:
            return encoded["input_ids"], None
        return encoded["input_ids"], [
            token_ranges(offsets, where)
            for offsets, where in zip(encoded["offset_mapping"], spans, strict=True)
        ]

    def _alone(self, prompts: list[str]) -> list[list[int]]:
        """The tokens of prompts without what follows them."""
        ids = self._tokens(prompts, None)[0]
        # A tokenizer that puts the end token after a text takes a prompt for a whole one.
        return [prompt[:-1] for prompt in ids] if self._adds_eos else ids

    def _start(self, prompt: list[int], whole: list[int]) -> int:
        """Where the completion begins: the length of the longest common prefix of the two sequences of ids."""
        length = common_length(prompt, whole)
        if length < len(prompt):
            self._warn_of_border(
                "the tokens of a prompt alone are not the first tokens of prompt and completion together, so the loss "
                "begins where they differ; at inference the prompt ends with %r. End prompts at a token border, or use "
                "a chat template that renders a prompt equally in both cases. (Further such rows have no message.)",
                prompt[length:],
            )
        return length

    def _warn_of_border(self, message: str, lost: list[int]) -> None:
        """Warn of a prompt whose last tokens, `lost`, are not in the whole text. Many rows may have such prompts, each
        with another end, so the message is not what is remembered.
        """
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(message, self._tokenizer.decode(lost))

    # -- length ------------------------------------------------------------------------------------------------------

    def _fitted(self, pairs: Iterable[tuple[list[int], list[int]]], first: int) -> EncodedRows:
        """Truncate by the policy, and drop the rows that have no label."""
        options, found = self._options, EncodedRows()
        most = options.max_length
        kept = slice(None, most) if options.truncation_mode == "keep_start" else slice(-(most or 0), None)
        for number, (ids, labels) in enumerate(pairs, first):
            if self._is_too_long(len(ids), number):
                ids, labels = ids[kept], labels[kept]
                found.truncated += 1
            self._add(found, number, ids, labels)
        return found

    def _is_too_long(self, tokens: int, number: int) -> bool:
        """Return True if a row of so many tokens is to be cut. Raises RowError if none may be."""
        most = self._options.max_length
        if most is None or tokens <= most:
            return False
        if self._options.truncation_mode == "error":
            raise RowError(
                number,
                f"has {tokens} tokens, more than max_length={most}, and truncation_mode is "
                '"error". Raise max_length, or set truncation_mode to "keep_start" or "keep_end".',
            )
        return True

    def columns(self, found: EncodedRows, rows: Sequence[Row], first: int) -> dict[str, Any]:
        """What a stream has of encoded rows. Of `rows`, the first has the number `first`, as in `__call__`."""
        return {"input_ids": found.input_ids, "labels": found.labels}

    @staticmethod
    def _add(found: EncodedRows, number: int, ids: list[int], labels: list[int], *place: int) -> None:
        """Add a row that has a label; note the number of one that has none."""
        if labels.count(IGNORED) == len(labels):
            found.dropped.append(number)
            return
        found.input_ids.append(ids)
        found.labels.append(labels)
        found.places += place


def added_around(tokenizer: Any, end: str) -> tuple[str, bool]:
    """Return the token that a tokenizer puts before a text ("" = none), and if it puts the token `end` after it."""
    # Not of an empty text, for which some tokenizers add nothing, but of one that every vocabulary has.
    special = set(tokenizer.all_special_tokens)
    word = next((token for token in tokenizer.get_vocab() if token not in special), end)
    ids = tokenizer(word)["input_ids"]
    bos = str(tokenizer.bos_token or "")
    begins = bool(bos) and ids[:1] == [tokenizer.convert_tokens_to_ids(bos)]
    return bos if begins else "", bool(end) and ids[-1:] == [tokenizer.convert_tokens_to_ids(end)]


def common_length(first: list[int], second: list[int]) -> int:
    """Return how many tokens two sequences begin with alike."""
    if second[: len(first)] == first:  # nearly always, and one comparison in C
        return len(first)
    return next(
        (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), len(second)
    )


def token_ranges(offsets: Sequence[tuple[int, int]], spans: Spans) -> Spans:
    """Return the (first, last + 1) tokens that have a character in each span; empty ranges are left out.

    Args:
        offsets: (start, end) characters of each token, in order.
        spans: (start, end) characters.
    """
    found = []
    for start, end in spans:
        # A token across a border counts: one that joins a space before the answer with its first letters is what the
        # model has to write first.
        first = bisect_right(offsets, start, key=_last)
        last = bisect_left(offsets, end, lo=first, key=_first)
        if first < last:
            found.append((first, last))
    return found


_first, _last = itemgetter(0), itemgetter(1)
