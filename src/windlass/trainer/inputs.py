"""Loaders, and what happens to a dataset before it reaches one: the defaults of `get_*_dataloader`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from windlass.assemble.facts import Facts
from windlass.assemble.resolve import resolve_batch, resolve_data
from windlass.core.errors import DataError
from windlass.core.types import State
from windlass.core.world import World
from windlass.data.columns import ColumnCollator, select_columns
from windlass.data.dealt_loader import DealtLoader
from windlass.data.foreign_loader import ForeignLoader, loader_length
from windlass.data.group import GroupSource
from windlass.data.loader import Loader
from windlass.data.prepare import build_eval_loader, build_train_loader
from windlass.data.stream_loader import StreamLoader
from windlass.dist.gang import Gang

Collate = Callable[[list[Any]], Any]


def training_loader(
    args: Any,
    world: World,
    given: Any,
    dataset: Any,
    collate: Collate,
    make_sampler: Callable[..., Any] | None,
) -> Any:
    """The loader of the training dataset.

    Args:
        given, dataset: as the script gave it, and with the columns that are used.
        make_sampler: an overridden `_get_train_sampler`; None: the loader orders samples.
    """
    sampler = None
    if make_sampler is not None:
        older = not inspect.signature(make_sampler).parameters
        sampler = make_sampler() if older else make_sampler(dataset)
    return build_train_loader(
        dataset,
        plan=resolve_data(args),
        batch=resolve_batch(args, Facts(world, None)),
        collate=collate,
        sampler=sampler,
        measured=given,
    )


def evaluation_loader(
    args: Any, world: World, dataset: Any, collate: Collate, sampler: Any, largest: int | None
) -> Loader:
    """The loader of an evaluation or test dataset.

    Args:
        largest: samples of the largest batch that memory holds, if that was found out.
    """
    batch = resolve_batch(args, Facts(world, None))
    loader = build_eval_loader(
        dataset, plan=resolve_data(args), batch=batch, collate=collate, sampler=sampler
    )
    if largest is not None and largest < loader.batch.micro:
        loader.resize(largest, 1)
    return loader


def named_dataset(chosen: Any, sets: Any) -> Any:
    """The evaluation dataset that was asked for.

    Args:
        chosen: a dataset, the name of one of `sets`, or None for the Trainer's own.
        sets: the Trainer's evaluation data: a dataset, a dict of named ones, or None.

    Raises:
        DataError: there is none, or the name is unknown.
    """
    if isinstance(chosen, str):
        known = sets if isinstance(sets, Mapping) else {}
        if chosen not in known:
            names = ", ".join(known) or "none: `eval_dataset` is not a dict"
            raise DataError(f"there is no evaluation set named {chosen!r}; known: {names}")
        return known[chosen]
    dataset = sets if chosen is None else chosen
    if dataset is None:
        raise DataError(
            "evaluation needs an eval_dataset: pass `eval_dataset=` to the Trainer or to evaluate()"
        )
    return dataset


def group_source(
    args: Any, world: World, gang: Gang, loader: Any, position: State | None = None
) -> GroupSource:
    """A loader as the engine takes it: ours as it is, a user's own behind an adapter. Collective.

    Args:
        position: where the run goes on in it; None: at its beginning.
    """
    if isinstance(loader, StreamLoader):
        loader.agree(gang, position)
    if isinstance(loader, DealtLoader):
        return loader
    batch, data = resolve_batch(args, Facts(world, None)), resolve_data(args)
    lengths = gang.gather_objects(loader_length(loader))
    longest = None if None in lengths else max(lengths)
    return ForeignLoader(loader, batch, data.seed, longest, start_timeout=data.start_timeout)


def with_columns(dataset: Any, collate: Collate, columns: list[str], what: str) -> tuple[Any, Collate]:
    """The dataset and the collator, so that only these columns reach the model.

    Args:
        what: the data are for, for the log.
    """
    if getattr(dataset, "column_names", None) is not None and hasattr(dataset, "remove_columns"):
        return select_columns(dataset, columns, what), collate
    return dataset, ColumnCollator(collate, columns, what)
