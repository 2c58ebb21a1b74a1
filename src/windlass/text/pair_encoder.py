"""Turn rows of preferences into tokens: a prompt and its answers.

The prompt of a row is what the tokens of the prompt alone and of all its answers begin with. A row is stored as one
sequence of documents: the prompt, and each answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.core.logs import get_logger
from windlass.core.types import IGNORED
from windlass.data.order import Measured
from windlass.text.encoder import EncodedRows, RowEncoder, common_length, name_unread
from windlass.text.forms import EXTRAS, Form, Row, RowError
from windlass.text.summary import TextSummary
from windlass.text.text_options import TextOptions
from windlass.text.token_rows import LENGTHS, TokenRows

Values = NDArray[Any]
PROMPT = "prompt_ids"


class PairRows(Sequence[Any], Measured):
    """A map-style dataset of rows `{"prompt_ids": list[int], "chosen_ids": list[int], ...}`, with columns of numbers.

    Args:
        rows: whose documents are the prompt and the answers.
        answers: names of the answers, as "chosen".
        numbers: name of a column -> its value for each row of `rows`.
        kept: which rows of `rows` these are, in order; all by default.
    """

    def __init__(
        self,
        rows: TokenRows,
        answers: Sequence[str],
        numbers: Mapping[str, Values] | None = None,
        kept: Values | None = None,
    ) -> None:
        self.rows, self.answers, self.numbers = rows, tuple(answers), dict(numbers or {})
        self.kept = np.arange(len(rows)) if kept is None else kept

    @property
    def column_names(self) -> list[str]:
        """The columns of a row."""
        return [PROMPT, *(f"{name}_ids" for name in self.answers), *self.numbers]

    @property
    def lengths(self) -> Values:
        """Tokens of the prompt and of each answer: int64 [rows, 1 + answers]."""
        found: Values = self.rows.flat[LENGTHS].reshape(-1, 1 + len(self.answers)).astype(np.int64)
        return found[self.kept]

    def sample_lengths(self) -> Values:
        """Tokens of the prompt and the longest answer of each row."""
        lengths = self.lengths
        found: Values = lengths[:, 0] + lengths[:, 1:].max(axis=1)
        return found

    def select(self, places: Any) -> PairRows:
        return PairRows(self.rows, self.answers, self.numbers, self.kept[np.asarray(places, dtype=np.int64)])

    def with_numbers(self, name: str, values: Values) -> PairRows:
        """Return these rows with one more column: `values[i]` belongs to row i."""
        whole = np.zeros(len(self.rows), dtype=values.dtype)
        whole[self.kept] = values
        return PairRows(self.rows, self.answers, {**self.numbers, name: whole}, self.kept)

    def summary(self, options: PairOptions, dropped: int) -> TextSummary:
        """Count the sequences of a prompt and an answer, cut as `options` say."""
        prompts, answers, most = self.lengths[:, :1], self.lengths[:, 1:], options.max_length
        sequences = prompts + answers
        cut = sequences if most is None else np.minimum(sequences, most)
        keeps_end = options.truncation_mode == "keep_end"
        trained = np.minimum(answers, cut) if keeps_end else np.maximum(cut - prompts, 0)
        ids = self.rows.flat["input_ids"]
        return TextSummary(
            rows=len(self),
            tokens=int(cut.sum()),
            trained_tokens=int(trained.sum()),
            truncated=int((sequences > cut).any(axis=1).sum()),
            dropped=dropped,
            longest=int(cut.max()) if len(cut) else 0,
            largest_id=int(ids.max()) if len(ids) else 0,
            histogram=TextSummary.histogram_of(cut.ravel()),
        )

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int | slice | str) -> Any:
        if isinstance(index, str):
            return [row[index] for row in self]
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        at = int(index) + (len(self) if index < 0 else 0)
        if not 0 <= at < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._row(int(self.kept[at]))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._row(int(at)) for at in self.kept)

    def _row(self, at: int) -> dict[str, Any]:
        first, last = self.rows.borders("input_ids")[at : at + 2]
        ids = self.rows.flat["input_ids"][first:last]
        width = 1 + len(self.answers)
        ends = np.cumsum(self.rows.flat[LENGTHS][at * width : (at + 1) * width])[:-1]
        parts = [part.tolist() for part in np.split(ids, ends)]
        found: dict[str, Any] = dict(zip(self.column_names, parts, strict=False))
        found.update({name: values[at].item() for name, values in self.numbers.items()})
        return found


_logger = get_logger(__name__)
CHOSEN, REJECTED, COMPLETION = "chosen", "rejected", "completion"


@dataclass(frozen=True, slots=True)
class PairOptions(TextOptions):
    """How rows of preferences become tokens."""

    answers: tuple[str, ...] = (CHOSEN, REJECTED)  # columns of a row with its answers
    # The answers are tokenized with their prompt, which ends where they differ. Otherwise the prompt ends with the
    # generation prompt of the chat template.
    whole: bool = False


class PairEncoder(RowEncoder):
    """`encoder(rows, first)` -> `EncodedRows` whose documents are the prompt and the answers.

    Args:
        tokenizer: a `transformers` tokenizer.
        options: the columns, and the end token.
        example: the first row, which shows if the dataset holds conversations.

    Raises:
        ConfigError, DataError: as `RowEncoder`.
    """

    def __init__(self, tokenizer: Any, options: PairOptions, example: Row) -> None:
        self._columns, self._whole = options.answers, options.whole
        name_unread(example)
        self._has_prompts = "prompt" in example
        first = self._pieces(example, 0)[0]
        super().__init__(tokenizer, options, Form.PROMPT_COMPLETION, first)

    def __call__(self, rows: Sequence[Row], first: int) -> EncodedRows:
        pieces = [piece for at, row in enumerate(rows) for piece in self._pieces(row, first + at)]
        width = len(self._columns)
        standard = [
            self._answer(piece, first + at // width, self._columns[at % width])
            for at, piece in enumerate(pieces)
        ]
        texts, prompts = self._texts(standard, first)
        # As one text: a tokenizer may join the end of a prompt and the start of its answer.
        ids = self._tokens(texts, None)[0]
        alone = ids[::width] if self._whole else self._alone(prompts[::width])
        found = EncodedRows()
        for at in range(len(rows)):
            self._keep(found, alone[at], ids[at * width : (at + 1) * width], first + at)
        return found

    # -- a row ---------------------------------------------------------------------------------------------------------

    def _pieces(self, row: Row, number: int) -> list[dict[str, Any]]:
        """A prompt with a completion, for each answer of a row."""
        if not isinstance(row, Mapping):
            raise RowError(number, f"must be a mapping of columns, not {type(row).__name__}")
        for name in self._columns:
            if row.get(name) is None:
                raise RowError(
                    number,
                    f"column {name!r} is missing or null: each row needs {self._needed()}; found: {', '.join(row)}. "
                    f"Rename a column of another name: dataset.rename_column(NAME, {name!r})",
                )
        answers = [row[name] for name in self._columns]
        if len(answers) > 1 and answers[0] == answers[1]:
            raise RowError(
                number,
                f"{CHOSEN} and {REJECTED} are equal, so the row states no preference; remove such rows, as by "
                f"dataset.filter(lambda row: row[{CHOSEN!r}] != row[{REJECTED!r}])",
            )
        prompt, answers = split_prompt(row, answers, number, self._has_prompts)
        extras = {name: row[name] for name in EXTRAS if row.get(name)}
        return [{"prompt": prompt, "completion": answer, **extras} for answer in answers]

    def _needed(self) -> str:
        return (
            "a prompt and a completion"
            if self._columns == (COMPLETION,)
            else "a chosen and a rejected answer"
        )

    def _answer(self, piece: dict[str, Any], number: int, column: str) -> dict[str, Any]:
        try:
            return self._standard(piece, number)
        except RowError as error:
            raise RowError(number, error.problem.replace(COMPLETION, column)) from None

    def _texts(self, rows: list[dict[str, Any]], first: int) -> tuple[list[str], list[str]]:
        width = len(self._columns)
        try:
            texts, prompts, _ = self._rendered(rows, 0)
        except RowError as error:
            raise RowError(first + error.row // width, error.problem) from None
        return texts, prompts

    def _keep(self, found: EncodedRows, alone: list[int], answers: list[list[int]], number: int) -> None:
        # Up to where the prompt alone and every answer agree: all answers of a row get the same prompt.
        shared = min(common_length(alone, answer) for answer in answers)
        if self._whole:
            # of each answer something is left, so that no document of the row is empty
            shared = min(shared, *(len(answer) - 1 for answer in answers))
        elif shared < len(alone):
            self._warn_of_border(
                "the tokens of a prompt are not what the prompt with its answer begins with: the answer starts where "
                "they differ, and %r at the end of the prompt is left out. Use a chat template that renders a prompt "
                "alike in both cases, or end prompts where a token ends. (Further such rows have no message.)",
                alone[shared:],
            )
        if any(len(answer) <= shared for answer in answers):
            raise RowError(number, "an answer has no tokens after its prompt; remove the row")
        rest = [answer[shared:] for answer in answers]
        prompt = answers[0][:shared]
        found.input_ids.append([*prompt, *(token for answer in rest for token in answer)])
        found.labels.append([*([IGNORED] * shared), *(token for answer in rest for token in answer)])
        found.documents.append([shared, *map(len, rest)])


def split_prompt(
    row: Row, answers: list[Any], number: int, has_prompts: bool = False
) -> tuple[Any, list[Any]]:
    """The prompt of row `number`, and its answers without it. A text beside answers that are messages is a copy.
    `has_prompts`: other rows have a column of prompts.

    Raises:
        RowError: there is no prompt, and the answers do not begin with one.
    """
    prompt = row.get("prompt")
    # Any two texts begin with the same characters, if only with none: a prompt that was lost would not show.
    is_lost = prompt is None and (has_prompts or "prompt" in row)
    if is_lost and len(answers) > 1 and isinstance(answers[0], str):
        raise RowError(
            number,
            "column 'prompt' is missing or null: give each row a prompt, or remove the column if the answers begin "
            "with it",
        )
    if prompt is None or (isinstance(prompt, str) and isinstance(answers[0], list)):
        return _shared_prompt(answers, number)
    return prompt, answers


def _shared_prompt(answers: list[Any], number: int) -> tuple[Any, list[Any]]:
    """What the answers of a row begin with, and the rest of each: messages, or characters without a space before the
    answer.
    """
    if len(answers) == 1:
        raise RowError(number, "column 'prompt' is missing or null: each row needs a prompt and a completion")
    chosen, rejected = answers
    for name, answer in zip((CHOSEN, REJECTED), answers, strict=True):
        if not isinstance(answer, (str, list)) or type(answer) is not type(chosen):
            kind = type(answer).__name__
            raise RowError(
                number, f"{name} must be text or a list of messages, as the other answer, not {kind}"
            )
    most = min(len(chosen), len(rejected))
    shared = next((at for at in range(most) if chosen[at] != rejected[at]), max(most - 1, 0))
    if isinstance(chosen, str) and shared and chosen[shared - 1] == " ":
        shared -= 1
    if isinstance(chosen, list) and not shared:
        raise RowError(
            number,
            "chosen and rejected have no message in common, and there is no column 'prompt': add the prompt to both, "
            "or as a column",
        )
    return chosen[:shared], [answer[shared:] for answer in answers]
