"""Builds the loader of a dataset, and refuses what cannot be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from windlass.config.plan import BatchPlan, DataPlan
from windlass.core.errors import DataError
from windlass.core.types import Collator
from windlass.data.collate_pad import auto_collate
from windlass.data.loader import Loader, MapLoader
from windlass.data.order import SequentialOrder, as_order, build_order, refuse_order_of_stream
from windlass.data.script_pass import ForScripts
from windlass.data.stream_loader import StreamLoader


def build_train_loader(
    dataset: Any,
    *,
    plan: DataPlan,
    batch: BatchPlan,
    collate: Collator | None,
    sampler: Any = None,
    measured: Any = None,
) -> Loader:
    """The loader of a training set.

    Args:
        dataset: anything with `__getitem__` and `__len__` (lists of dicts, Hugging Face sets), or an iterable
            that can be iterated again.
        plan: order, seed, workers.
        batch: sizes; this rank's place.
        collate: list of samples -> batch; None: `auto_collate`.
        sampler: a user's own order over a map-style dataset; replaces `plan.order`.
        measured: the dataset before columns were removed, for orders by length.

    Raises:
        DataError: the dataset is empty, or of no kind that can be read.
        ConfigError: the plan asks for an order that a stream cannot have.
    """
    collate = collate or auto_collate
    if is_stream(dataset):
        refuse_order_of_stream(plan)
        _refuse_sampler_of_stream(sampler)
        return StreamLoader(dataset, batch, plan, collate)
    _refuse_unreadable(dataset, needs_length=sampler is None)
    order = build_order(dataset, plan, batch, measured) if sampler is None else as_order(sampler, plan.seed)
    return MapLoader(dataset, order, batch, plan, collate)


def build_eval_loader(
    dataset: Any,
    *,
    plan: DataPlan,
    batch: BatchPlan,
    collate: Collator | None,
    sampler: Any = None,
    for_scripts: ForScripts | None = None,
) -> Loader:
    """The loader of an evaluation set: in order, every sample exactly once over all ranks, in batches of `batch.eval`.

    Nothing is padded or dropped (`plan.drop_last` is for training), so ranks may have different numbers of batches;
    `batches_with_ids` has the samples' positions. Every pass is the same, random transforms included. Errors as above.

    Args:
        for_scripts: how plain iteration, which is for a script's own loop, hands out batches.
    """
    collate = collate or auto_collate
    plan = dataclasses.replace(plan, drop_last=False, purpose="evaluation")
    batch = dataclasses.replace(batch, micro=batch.eval, accumulation=1)
    if is_stream(dataset):
        _refuse_sampler_of_stream(sampler)
        return StreamLoader(dataset, batch, plan, collate, for_scripts=for_scripts)
    _refuse_unreadable(dataset, needs_length=sampler is None)
    order = SequentialOrder(len(dataset), plan.seed) if sampler is None else as_order(sampler, plan.seed)
    return MapLoader(dataset, order, batch, plan, collate, for_scripts=for_scripts)


def is_stream(dataset: Any) -> bool:
    """Return True if `dataset` can only be read from its beginning."""
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def _refuse_unreadable(dataset: Any, needs_length: bool) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, Mapping) or type(dataset).__name__ == "BatchEncoding":
        raise DataError(
            f"the dataset is one mapping of whole columns ({name}), not a sequence of samples. "
            "Make it a list of dicts, or `datasets.Dataset.from_dict(...)`."
        )
    if not hasattr(dataset, "__getitem__"):
        raise DataError(f"{name} is not a dataset: it has neither __getitem__ nor __iter__.")
    if needs_length and not hasattr(dataset, "__len__"):
        raise DataError(
            f"{name} has __getitem__ but no __len__. Give it one, return a sampler, or make it an IterableDataset."
        )


def _refuse_sampler_of_stream(sampler: Any) -> None:
    if sampler is not None:
        raise DataError(
            f"a sampler ({type(sampler).__name__}) cannot order an iterable dataset; it comes in its own order."
        )
