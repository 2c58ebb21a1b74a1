"""Removes the columns that the model's forward does not take, and logs their names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import get_worker_info

from windlass.core.errors import DataError
from windlass.core.logs import get_logger
from windlass.core.module_state import without_adapters
from windlass.core.types import Collator

logger = get_logger(__name__)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def signature_columns(model: Any, label_names: Iterable[str] | None = None) -> list[str]:
    """Names of the columns that `model.forward` takes, and of labels (collators make `labels` of `label`, `label_ids`).

    Returns:
        the names, without repeats; an empty list if forward takes `**kwargs` only.
    """
    # The forward of a peft model takes `*args, **kwargs`.
    parameters = inspect.signature(without_adapters(model).forward).parameters.values()
    names = [p.name for p in parameters if p.kind in _NAMED]
    if not names and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return []
    return list(dict.fromkeys([*names, "label", "label_ids", *(label_names or ())]))


def select_columns(dataset: Any, columns: list[str], what: str) -> Any:
    """`dataset` with only those of `columns`, if it has named columns (Hugging Face sets); else itself. Raises
    DataError if no column is left.

    Args:
        dataset: any dataset.
        columns: from `signature_columns`; empty: keep all.
        what: "training", "evaluation", ...: for the message.
    """
    present = getattr(dataset, "column_names", None)
    # A `DatasetDict` has its columns by split.
    if not columns or not present or isinstance(present, Mapping) or not hasattr(dataset, "remove_columns"):
        return dataset
    unused = _unused(present, columns, what)
    return dataset.remove_columns(unused) if unused else dataset


class ColumnCollator:
    """Removes the columns that are not in `columns` from dict samples before `collate`.

    Samples that are not mappings are unchanged.

    Args:
        what: which set it is, for messages.
        log: the logger that names the removed columns, once.

    Attributes:
        message_logged: whether it has.

    Raises:
        DataError: no column of a batch is left.
    """

    def __init__(
        self, collate: Collator, columns: list[str], what: str = "training", log: Any = logger
    ) -> None:
        self.collate, self.columns, self.what, self.logger = collate, columns, what, log
        self.message_logged = False
        self._keep = frozenset(columns)

    def __call__(self, samples: list[Any]) -> Any:
        if self._keep and isinstance(samples[0], Mapping):
            # Every set contains an empty sample's columns: `_kept` refuses it.
            samples = [s if s and self._keep.issuperset(s) else self._kept(s) for s in samples]
        return self.collate(samples)

    def _kept(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        if not self.message_logged:
            self.message_logged = bool(_unused(sample, self.columns, self.what, self.logger))
        return {name: value for name, value in sample.items() if name in self._keep}


def _unused(present: Iterable[str], columns: list[str], what: str, log: Any = logger) -> list[str]:
    present = list(present)
    unused = [name for name in present if name not in columns]
    if len(unused) == len(present):
        raise DataError(
            f"no column of the {what} set fits the model. Columns: {', '.join(map(str, present))}. "
            f"The model's forward takes: {', '.join(columns)}. "
            "Rename the columns, tokenize the texts first, or set remove_unused_columns=False and let the "
            "collator make the inputs."
        )
    # Every worker has a collator of its own: the first one's message is enough.
    worker = get_worker_info()
    if unused and (worker is None or worker.id == 0):
        log.info(
            f"columns of the {what} set that the model's forward does not take, left out: "
            f"{', '.join(map(str, unused))} (keep them with remove_unused_columns=False)"
        )
    return unused
