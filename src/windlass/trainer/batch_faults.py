"""Explains why a model cannot compute a batch: by column, row and value, with the fix."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from windlass.core.errors import DataError, ModelError, WindlassError
from windlass.core.logs import get_job_logger
from windlass.core.tensors import dtype_name
from windlass.core.types import IGNORED
from windlass.trainer.losses import NoLossError
from windlass.trainer.wrappers import innermost
from windlass.transforms.model_limits import ModelLimits

logger = get_job_logger(__name__)

# Words in the errors of PyTorch: what is wrong shows in the batch that led to them.
_OUTSIDE = ("out of range", "out of bounds", "device-side assert")
_TOO_LONG = ("must match", *_OUTSIDE)
_PRECISIONS = ("same dtype", "expected scalar type", "should be the same", "Double")
_TYPES = ("target dtype", "expected scalar type Long", "nll_loss")
_SHAPES = ("target tensor expected", "multi-target", "Expected target size", "Expected input batch_size")
_ABOUT_SHAPES = ("shape", "size", "dimension", "type")


@dataclass(frozen=True, slots=True)
class Fed:
    """A batch that a model is given."""

    set: str  # "training" or "evaluation"
    batch: Any  # collated, in host memory
    ids: Sequence[int] = ()  # the positions of its samples in the dataset; empty: unknown

    @property
    def columns(self) -> Mapping[str, Any]:
        """The columns of the batch; none if it has no names."""
        return self.batch if isinstance(self.batch, Mapping) else {}

    def row(self, number: int, column: Tensor) -> str:
        """The name of a row of one of the columns: its place in the dataset, if that is known."""
        if len(self.ids) == len(column):
            return f"row {self.ids[number]} of the {self.set} set"
        return f"row {number} of a batch of the {self.set} set"


class BatchFaults:
    """Explains the errors of a model's forward by the batch that it was given.

    On the CPU an error comes at once, so a batch is looked at only after one. Accelerators report a wrong label or
    token late, by an assertion that names nothing, or compute with what they find in memory: for them every batch is
    checked in host memory before it is moved.

    Attributes:
        checks_ahead: every batch is to be checked before its forward.
    """

    def __init__(self, device: torch.device) -> None:
        self.checks_ahead = device.type != "cpu"
        self.begin(nn.Identity(), [], False, None)

    def begin(self, model: nn.Module, label_names: Sequence[str], own_loss: bool, training_set: Any) -> None:
        """Start with this model.

        Args:
            own_loss: a script computes the loss, so labels may be anything.
            training_set: the dataset as the script gave it.
        """
        self._model, self._label_names, self._own_loss = model, label_names, own_loss
        self._training_set, self._limits = training_set, ModelLimits.of(model)
        self._length_checked = False

    def check(self, fed: Fed) -> None:
        """Raise DataError for tokens and labels that the model does not have."""
        found = self._tokens(fed) or self._labels(fed)
        if found is not None:
            raise DataError(found)

    def warn_of_length(self, fed: Fed) -> None:
        """Warn once if the first batch has rows that are longer than those that the model was made for."""
        found = None if self._length_checked else self._lengths(fed)
        self._length_checked = True
        if found is not None:
            logger.warning("%s", found)

    def explain(self, error: Exception, fed: Fed) -> None:
        """Raise the error that names what is wrong in the batch, if that is found; else add a note on the batch."""
        if isinstance(error, NoLossError):
            self._explain_no_loss(error, fed)
        # Memory is the concern of `BatchFitter`; an error of Windlass names its cause already.
        if isinstance(error, (torch.OutOfMemoryError, WindlassError)):
            return
        text = str(error)
        for words, find in self._finders():
            found = find(fed) if any(word in text for word in words) else None
            if found is not None:
                raise DataError(found) from error
        if isinstance(error, TypeError):
            self._explain_arguments(error, fed)
        if any(word in text for word in _ABOUT_SHAPES):
            error.add_note(f"the batch of the {fed.set} set: {_described(fed.batch)}")

    def _finders(self) -> tuple[tuple[Sequence[str], Callable[[Fed], str | None]], ...]:
        """Words in an error, and what looks for its cause: the first that finds one explains it."""
        return (
            ([""], self._text),  # in every error: text in place of tokens fails in many ways
            (_OUTSIDE, self._tokens),
            (_OUTSIDE, self._labels),
            (_TOO_LONG, self._lengths),
            (_OUTSIDE, self._embeddings),
            (["is out of bounds."], self._undeclared_labels),  # "Target 7 is out of bounds."
            (_PRECISIONS, self._precision),
            (_TYPES, self._label_types),
            (_SHAPES, self._label_shapes),
        )

    # --- what is outside the model's limits -------------------------------------------------------------------------

    def _tokens(self, fed: Fed) -> str | None:
        name, limit = getattr(self._model, "main_input_name", "input_ids"), self._limits.tokens
        column = fed.columns.get(name)
        if limit is None or not _is_integers(column) or (wrong := _outside(column, limit)) is None:
            return None
        return outside_vocabulary(name, fed.row(wrong.row, column), wrong.value, limit)

    def _labels(self, fed: Fed) -> str | None:
        limit = self._limits.classes
        for name in self._label_names if limit is not None and not self._own_loss else ():
            column = fed.columns.get(name)
            if _is_integers(column) and (wrong := _outside(column, limit or 0, IGNORED)) is not None:
                return outside_classes(name, fed.row(wrong.row, column), wrong.value, self._limits)
        return None

    def _lengths(self, fed: Fed) -> str | None:
        name, limit = getattr(self._model, "main_input_name", "input_ids"), self._limits.positions
        column, mask = fed.columns.get(name), fed.columns.get("attention_mask")
        if limit is None or not isinstance(column, Tensor) or column.ndim != 2 or column.shape[1] <= limit:
            return None
        positions = fed.columns.get("position_ids")
        if isinstance(positions, Tensor) and positions.numel() and int(positions.max()) < limit:
            return None  # texts joined without padding, each of which counts from 0
        row, longest = 0, column.shape[1]
        if _is_integers(mask) and mask.shape == column.shape and not self._limits.positions_learned:
            lengths = mask.sum(1)  # padding has positions too, which only a table lacks
            row, longest = int(lengths.argmax()), int(lengths.max())
        if longest <= limit:
            return None
        return too_long(name, fed.row(row, column), longest, limit)

    def _embeddings(self, fed: Fed) -> str | None:
        """Integers that an embedding has no row for, in a model that does not declare which column goes where."""
        inputs = {name: values for name, values in fed.columns.items() if name not in self._label_names}
        found = []
        for module_name, module in self._model.named_modules():
            for name, column in inputs.items() if isinstance(module, nn.Embedding) else ():
                rows = module.num_embeddings
                if _is_integers(column) and (wrong := _outside(column, rows)) is not None:
                    found.append(
                        f"column {name!r}, {fed.row(wrong.row, column)}: {wrong.value}, and the embedding "
                        f"{module_name!r} has {rows} rows (0 to {rows - 1})"
                    )
        return (
            "; or ".join(found[:3]) + ". Make the embedding larger, or correct the values" if found else None
        )

    def _undeclared_labels(self, fed: Fed) -> str | None:
        """Labels of a model that does not declare its classes."""
        for name in self._label_names:
            column = fed.columns.get(name)
            if _is_integers(column):
                highest = int(column.max())
                row = fed.row(_first_row(column == highest), column)
                return (
                    f"column {name!r}: a label is outside the classes that the model's output has. The labels of the "
                    f"batch are {int(column.min())} to {highest} ({highest} in {row}); number the classes from 0, give "
                    f"the output layer {highest + 1} classes, or use {IGNORED} for what is not to be learned"
                )
        return None

    # --- types and shapes ---------------------------------------------------------------------------------------------

    def _precision(self, fed: Fed) -> str | None:
        weights = next((p.dtype for p in self._model.parameters() if p.is_floating_point()), torch.float32)
        for name, column in fed.columns.items():
            if isinstance(column, Tensor) and column.dtype == torch.float64 != weights:
                return (
                    f"column {name!r} of the {fed.set} set is float64, and the model's weights are "
                    f"{dtype_name(weights)}: convert it, with array.astype('float32') or tensor.float()"
                )
        return None

    def _label_types(self, fed: Fed) -> str | None:
        for name in self._label_names:
            column = fed.columns.get(name)
            if isinstance(column, Tensor) and column.is_floating_point():
                return (
                    f"column {name!r} of the {fed.set} set is {dtype_name(column.dtype)}, and classes are integers: "
                    "convert the labels with int(), or use a loss for numbers"
                )
        return None

    def _label_shapes(self, fed: Fed) -> str | None:
        for name in self._label_names:
            column = fed.columns.get(name)
            if isinstance(column, Tensor) and column.ndim > 1:
                return (
                    f"column {name!r} of the {fed.set} set has the shape {list(column.shape)} in a batch, and the loss "
                    f"takes one class for each row, [{len(column)}]: give a number in place of a list, or squeeze it"
                )
        return None

    # --- columns that are missing, left out or not accepted -----------------------------------------------------------

    def _text(self, fed: Fed) -> str | None:
        return None if "input_ids" in fed.columns else untokenized(self._model, self._given(fed), fed.set)

    def _explain_arguments(self, error: TypeError, fed: Fed) -> None:
        inner = innermost(self._model)
        parameters = inspect.signature(inner.forward).parameters.values()
        # Without these words a TypeError of a sequence was raised within the forward.
        counted = isinstance(fed.batch, list | tuple) and "positional argument" in str(error)
        if counted and len(fed.batch) > len(parameters):
            raise ModelError(
                f"the batch is a {type(fed.batch).__name__} of {len(fed.batch)} values, and each is an argument of the "
                f"forward of {type(inner).__name__}, which takes {len(parameters)}; let the data_collator return a dict"
            ) from error
        if any(p.kind is p.VAR_KEYWORD for p in parameters) or not fed.columns:
            return
        names = [p.name for p in parameters]
        needed = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL}
        extra = [name for name in fed.columns if name not in names]
        # The call was right, so the error comes from within the forward.
        if not extra and needed <= set(fed.columns):
            return
        fix = "rename the columns to these names, or let the data_collator make them"
        labels = [name for name in self._label_names if name in extra]
        if labels and not self._own_loss:
            fix = (
                f"it takes no {labels[0]}, so it computes no loss: pass compute_loss_func=..., or wrap the model in a "
                "module whose forward takes them and returns the loss"
            )
        takes = f"the forward of {type(inner).__name__} takes: {', '.join(names)}"
        held = ", ".join(map(str, self._given(fed) or fed.columns))
        raise ModelError(f"{takes}, and the {fed.set} set has the columns: {held}; {fix}") from error

    def _explain_no_loss(self, error: NoLossError, fed: Fed) -> None:
        first = self._given(fed)
        words = [name for name in self._label_names if isinstance(first.get(name), str)]
        if words:
            raise DataError(label_words(words[0], str(first[words[0]]), fed.set)) from error
        # Collators rename `label` and `label_ids` to `labels`: they were not left out.
        left = [name for name in first if name not in fed.columns and name not in ("label", "label_ids")]
        if left and not any(name in fed.columns for name in self._label_names):
            label = self._label_names[0] if self._label_names else "labels"
            error.add_note(
                f"the {fed.set} set has further columns, which were left out because the forward does not take them: "
                f"{', '.join(map(str, left))}; if one holds the labels, rename it to {label!r}"
            )

    def _given(self, fed: Fed) -> Mapping[str, Any]:
        """The first row of the set as the script gave it; empty if that is not known."""
        return first_row(self._training_set) if fed.set == "training" else {}


# --- sentences that are also said of whole columns --------------------------------------------------------------------


def outside_vocabulary(name: str, row: str, value: int, limit: int) -> str:
    """Describe a token that the model's embedding, of `limit` rows, does not have."""
    return (
        f"column {name!r}, {row}: the token {value} is outside the model's vocabulary, whose embedding has {limit} "
        "rows. Use the tokenizer of this model, or call model.resize_token_embeddings(len(tokenizer))"
    )


def too_long(name: str, row: str, count: int, limit: int) -> str:
    """Describe a row with more tokens than the model has positions."""
    return (
        f"column {name!r}, {row}: {count} tokens, and the model has {limit} positions (max_position_embeddings). "
        f"Tokenize with truncation=True, max_length={limit}, or split the texts"
    )


def outside_classes(name: str, row: str, value: int, limits: ModelLimits) -> str:
    """Describe a label that is not a class, or not a token, of the model."""
    if not limits.is_classifier:
        return (
            f"column {name!r}, {row}: the label {value} is outside the model's vocabulary of {limits.classes} tokens. "
            f"Use the tokenizer of this model; {IGNORED} marks what is not a target"
        )
    last = (limits.classes or 1) - 1
    fix = f"build the model with num_labels={value + 1}" if value >= 0 else "leave the row out"
    return (
        f"column {name!r}, {row}: the label {value} is not a class of the model, which has {last + 1} (0 to {last}). "
        f"Number the classes from 0, or {fix}; {IGNORED} marks what is not to be learned"
    )


def label_words(name: str, value: str, set_name: str) -> str:
    """Describe a label that is a word."""
    return (
        f"column {name!r} of the {set_name} set holds words (the first is {value!r}), and labels are numbers from 0: "
        f"map them, as with dataset.class_encode_column({name!r}), and build the model with as many classes"
    )


def untokenized(model: nn.Module, first: Mapping[str, Any], set_name: str) -> str | None:
    """Describe rows that hold text where the model takes tokens; None if they hold no text, or it takes none."""
    texts = [name for name, value in first.items() if isinstance(value, str)]
    takes_tokens = getattr(model, "main_input_name", None) == "input_ids"
    if not texts or not takes_tokens or {"input_ids", "inputs_embeds"} & set(first):
        return None
    return (
        f"column {texts[0]!r} of the {set_name} set holds text, and the model takes 'input_ids': tokenize it first, as "
        f"with dataset.map(lambda row: tokenizer(row[{texts[0]!r}], truncation=True))"
    )


def first_row(dataset: Any) -> Mapping[str, Any]:
    """The first row of a dataset with named columns; empty if it has none, or cannot be read."""
    try:
        row = dataset[0]
    except Exception:  # a stream, or a dataset of its own kind: an explanation must not fail
        return {}
    return row if isinstance(row, Mapping) else {}


# --- values -----------------------------------------------------------------------------------------------------------


class _Value(NamedTuple):
    """A value of a column, and the number of its row in the batch."""

    row: int
    value: int


def _outside(column: Tensor, limit: int, allowed: int = 0) -> _Value | None:
    """The first value that is neither `allowed` nor from 0 to below `limit`; None if there is none."""
    values = column.numpy()  # NumPy counts in the same memory, several times faster
    # With an accelerator each batch is checked, and nearly all are right: two counts and a maximum need no mask. If
    # there are as many negative values as allowed ones, no other value is negative.
    left = np.count_nonzero(values == allowed) if allowed < 0 else 0
    if values.max() < limit and np.count_nonzero(values < 0) == left:
        return None
    wrong = ((column < 0) | (column >= limit)) & (column != allowed)
    return _Value(_first_row(wrong), int(column[wrong][0]))


def _is_integers(column: Any) -> TypeGuard[Tensor]:
    """Return True for integers in host memory: those of a device whose context failed cannot be read."""
    return (
        isinstance(column, Tensor)
        and column.is_cpu
        and column.ndim > 0
        and column.numel() > 0
        and column.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    )


def _first_row(where: Tensor) -> int:
    return int(where.reshape(len(where), -1).any(1).nonzero()[0])


def _described(batch: Any) -> str:
    """The columns of a batch with their types and shapes."""
    if isinstance(batch, Mapping):
        return ", ".join(f"{name} {_described(value)}" for name, value in batch.items())
    if isinstance(batch, Tensor):
        return f"{dtype_name(batch.dtype)} {list(batch.shape)}"
    if isinstance(batch, (list, tuple)) and len(batch) <= 8:
        return f"[{', '.join(map(_described, batch))}]"
    return type(batch).__name__
