"""Hold out a part of the data for evaluation, the same in every run with the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from windlass.core.errors import DataError
from windlass.core.rng import STREAM_ORDER, derive_seed
from windlass.recipes.readers import Record, column, read_records, texts
from windlass.recipes.schema import DataSpec

# Fewer texts are too unequal to be split as a whole: the tail of every text is held out instead.
ENOUGH_DOCUMENTS = 200


def load_records(data: DataSpec, seed: int, *, cut_texts: bool) -> tuple[list[Record], list[Record]]:
    """Return the (train, evaluation) records of a recipe; the second is empty without evaluation. `cut_texts`: of a few
    texts, the end of each is held out.
    """
    train = read_records(data.train, data, data.split)
    if data.eval is not None or data.eval_split is not None:
        return train, read_records(data.eval or data.train, data, data.eval_split or data.split)
    if data.eval_fraction == 0:
        return train, []
    is_text = data.completion_column is None and all(data.text_column in values for _, values in train)
    if cut_texts and is_text and len(train) < ENOUGH_DOCUMENTS:
        heads, tails = _hold_out_tails(train, data.text_column, data.eval_fraction)
        if tails:  # else the texts have one line each
            return heads, tails
    return hold_out(train, f"{data.train}: {len(train)} records", data.eval_fraction, seed)


def hold_out(rows: list[Any], amount: str, fraction: float, seed: int) -> tuple[list[Any], list[Any]]:
    """Return the rows to train on, and those of the evaluation, a random part. Raises DataError, which names the
    `amount` of rows, if one of the two would be empty.
    """
    count = round(len(rows) * fraction)
    if count == 0 or count == len(rows):
        raise DataError(
            f"{amount} cannot give data.eval_fraction={fraction} for evaluation; name data.eval, raise the fraction, "
            "or set it to 0"
        )
    # At random, because files are often sorted by class or by source.
    held = set(random.Random(derive_seed(STREAM_ORDER, seed)).sample(range(len(rows)), count))
    return [row for index, row in enumerate(rows) if index not in held], [rows[i] for i in sorted(held)]


def _hold_out_tails(records: list[Record], name: str, fraction: float) -> tuple[list[Record], list[Record]]:
    """Hold out the last `fraction` of every text, cut at the end of a line; nothing of those that have one line."""
    train, held = [], []
    for (where, values), text in zip(records, texts(records, name), strict=True):
        cut = text.rfind("\n", 0, int(len(text) * (1 - fraction))) + 1
        if cut > 0:
            train.append((where, {**values, name: text[:cut]}))
        if text[cut:].strip() and cut > 0:
            held.append((where, {**values, name: text[cut:]}))
        elif cut == 0:
            train.append((where, values))
    return train, held


def _labels(records: list[Record], name: str) -> list[str]:
    """The class of each record. Raises DataError for one without, as an empty cell would be a class of its own, and for
    one with several.
    """
    values = column(records, name)
    for (where, _), value in zip(records, values, strict=True):
        if isinstance(value, list | tuple | dict):
            kind = type(value).__name__
            raise DataError(
                f"{where}: column {name!r} must hold one class, a word or a number, and holds a {kind}"
            )
        if not str(value).strip() or value != value:  # NaN, as tables of numbers have it
            raise DataError(f"{where}: column {name!r} is empty: give the row a class, or leave it out")
    return [str(value) for value in values]


def label_names(train: list[Record], name: str) -> list[str]:
    """Return the two or more classes of the training data: numbers ordered by value, words alphabetically."""
    # Sorted as text first: "1" and "01" are one number, and processes order the members of a set differently.
    names = sorted(set(_labels(train, name)))
    if all(label.removeprefix("-").isdecimal() for label in names):
        names.sort(key=int)
    if len(names) < 2:
        raise DataError(
            f"column {name!r} of the training data has one class only ({names[0]}); two are needed"
        )
    return names


def label_ids(records: list[Record], name: str, names: Sequence[str]) -> list[int]:
    """Return the class of each record as its index in `names`. Raises DataError for an unknown class."""
    ids = {label: index for index, label in enumerate(names)}
    found = []
    for (where, _), label in zip(records, _labels(records, name), strict=True):
        if label not in ids:
            shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            raise DataError(f"{where}: class {label!r} never occurs in the training data (known: {shown})")
        found.append(ids[label])
    return found
