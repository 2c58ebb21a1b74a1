"""Checks of whole columns before a run: text and words where the model takes numbers, and labels outside the classes.

Only datasets whose rows lie in memory or in a table are looked at, because reading rows may cost time or have effects.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from windlass.core.errors import DataError
from windlass.core.types import IGNORED
from windlass.trainer.batch_faults import (
    first_row,
    label_words,
    outside_classes,
    outside_vocabulary,
    too_long,
    untokenized,
)
from windlass.trainer.wrappers import innermost
from windlass.transforms.model_limits import ModelLimits

_ROWS = 50_000
"""Rows of a table whose tokens are looked at: 0.1 s for 500 tokens in each, and 1.5 s in a shuffled table."""


def given_datasets(training: Any, evaluation: Any, overridden: Collection[str]) -> dict[str, Any]:
    """The datasets of a script by the name of their set, but for those that a loader of its own may read otherwise."""
    sets: dict[str, Any] = {}
    if not {"get_train_dataloader", "_get_dataloader"} & set(overridden):
        sets["training"] = training
    if not {"get_eval_dataloader", "_get_dataloader", "evaluate", "evaluation_loop"} & set(overridden):
        named = evaluation if isinstance(evaluation, Mapping) else {"": evaluation}
        sets |= {f"{name} evaluation".strip(): dataset for name, dataset in named.items()}
    return sets


def check_columns(
    sets: Mapping[str, Any], collator: Any, model: nn.Module, label_names: Sequence[str]
) -> None:
    """Raise DataError for rows of these sets that the model cannot compute. `collator`: if it is a script's own it may
    make anything of the columns, and nothing is checked.
    """
    home = getattr(collator, "__module__", "").partition(".")[0]
    if home not in ("windlass", "transformers"):
        return
    limits, takes = ModelLimits.of(model), inspect.signature(innermost(model).forward).parameters
    for name, dataset in sets.items():
        if not _is_readable(dataset):
            continue
        first = first_row(dataset)
        problem = untokenized(model, first, name) or _wrong_tokens(dataset, model, limits, name)
        if problem is not None:
            raise DataError(problem)
        # Words under a name that the forward does not take are left out of a batch, and do no harm.
        for column in ["label", *(known for known in label_names if known in takes)]:
            problem = _wrong_labels(dataset, column, first.get(column), limits, name)
            if problem is not None:
                raise DataError(problem)


def _is_readable(dataset: Any) -> bool:
    if isinstance(dataset, list | tuple):
        return bool(dataset)
    # A table of the package `datasets`: its streams have the method too, but no length. After `set_transform` its
    # format is "custom", and reading a row calls a function of the script.
    table = hasattr(dataset, "select_columns") and hasattr(dataset, "__len__") and len(dataset) > 0
    return table and getattr(dataset, "format", {}).get("type") != "custom"


def _wrong_tokens(dataset: Any, model: nn.Module, limits: ModelLimits, name: str) -> str | None:
    """The first token of a table that is outside the vocabulary, or the first row that is too long for a table of
    positions.
    """
    tokens, longest = limits.tokens, limits.positions if limits.positions_learned else None
    column = str(getattr(model, "main_input_name", None))
    if tokens is None or column not in getattr(dataset, "column_names", ()):
        return None
    kind = dataset.features.arrow_schema.field(column).type
    # Other lists are arrays of other classes; their tokens are left to the check of batches.
    if not (str(kind).startswith("list<") and str(kind.value_type).startswith(("int", "uint"))):
        return None
    begun, looked_at = 0, dataset.select_columns([column]).take(min(_ROWS, len(dataset)))
    for table in looked_at.with_format("arrow").iter(10_000):
        for rows in table.column(0).chunks:
            lengths = rows.value_lengths().fill_null(0).to_numpy()
            if longest is not None and lengths.max() > longest:
                row = int((lengths > longest).argmax())
                return too_long(column, f"row {begun + row} of the {name} set", int(lengths[row]), longest)
            # Not `rows.values`, which ignores where a slice begins and ends.
            values = rows.flatten().fill_null(0).to_numpy()
            if len(values) and (values.min() < 0 or values.max() >= tokens):
                place = int(((values < 0) | (values >= tokens)).argmax())
                # The first row that ends after the place; "right" passes over empty rows, which end where the one
                # before does.
                row = int(np.searchsorted(lengths.cumsum(), place, side="right"))
                return outside_vocabulary(
                    column, f"row {begun + row} of the {name} set", int(values[place]), tokens
                )
            begun += len(rows)
    return None


def _wrong_labels(dataset: Any, column: str, first: Any, limits: ModelLimits, name: str) -> str | None:
    if isinstance(first, str):
        return label_words(column, first, name)
    if limits.classes is None or not _is_class(first):
        return None
    labels = _column(dataset, column)
    wrong = ((labels < 0) | (labels >= limits.classes)) & (labels != IGNORED)
    if not wrong.any():
        return None
    row = int(wrong.argmax())
    return outside_classes(column, f"row {row} of the {name} set", int(labels[row]), limits)


def _column(dataset: Any, column: str) -> np.ndarray[Any, Any]:
    """A column of class numbers; -100 where a row has none."""
    if isinstance(dataset, list | tuple):
        labels: Iterator[Any] = (row.get(column) if isinstance(row, Mapping) else None for row in dataset)
        return np.array([int(label) if _is_class(label) else IGNORED for label in labels])
    return np.asarray(dataset.select_columns([column]).with_format("numpy")[:][column])


def _is_class(label: Any) -> bool:
    if isinstance(label, torch.Tensor):
        return label.ndim == 0 and label.is_cpu and not label.is_floating_point()
    return isinstance(label, int | np.integer) and not isinstance(label, bool)
