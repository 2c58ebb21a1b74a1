"""Loaders: the defaults of `get_*_dataloader`."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from windlass.config.accelerator_config import share_of_batch
from windlass.config.plan import BatchPlan, CallPlan
from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.types import State
from windlass.data.dealt_loader import DealtLoader
from windlass.data.foreign_loader import ForeignLoader
from windlass.data.loader import Loader
from windlass.data.order import Order, build_order, known_length
from windlass.data.prepare import build_eval_loader, build_train_loader, is_stream
from windlass.data.script_pass import ForScripts
from windlass.data.stream_loader import StreamLoader
from windlass.data.update_batch import GroupSource
from windlass.dist.gang import Gang

Collate = Callable[[list[Any]], Any]


def training_loader(
    plan: CallPlan, given: Any, dataset: Any, collate: Collate, make_sampler: Callable[..., Any] | None,
    batch_size: int
) -> Any:  # fmt: skip
    """The loader of a training dataset, in batches of `batch_size` samples.

    Args:
        given, dataset: the dataset of the script, and the same with only the columns that are used.
        make_sampler: as `Trainer._get_train_sampler`; None: the loader orders samples.
        batch_size: of each process; with `split_batches`, of all together.
    """
    _check_dataset(given, "train_dataset", "get_train_dataloader")
    batch = replace(plan.batches, micro=_own_share(plan.batches, batch_size))
    sampler = _sampler(make_sampler, dataset)
    return build_train_loader(
        dataset, plan=plan.data, batch=batch, collate=collate, sampler=sampler, measured=given
    )


def training_order(plan: CallPlan, dataset: Any) -> Order | None:
    """The order of a map-style dataset as the arguments ask for it; None for one without a length."""
    if dataset is None or is_stream(dataset) or known_length(dataset) is None:
        return None
    return build_order(dataset, plan.data, plan.batches)


class EvaluationLoaders:
    """Makes the loaders of evaluation sets. One with persistent workers is kept for the next evaluation of its set.

    Args:
        for_scripts: what a script's own loop over them needs.
    """

    def __init__(self, for_scripts: ForScripts) -> None:
        self._for_scripts = for_scripts
        # By name of the set: what the loader was made of, compared by identity; its settings, by value; the loader.
        self._kept: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], Loader]] = {}

    def loader(
        self, plan: CallPlan, given: tuple[Any, ...], used: tuple[Any, Collate],
        make_sampler: Callable[..., Any] | None, batch_size: int, largest: int | None, name: str | None
    ) -> Loader:  # fmt: skip
        """The loader of an evaluation or test dataset, in batches of `batch_size`, or of `largest` if that is known to
        be less.

        Args:
            given: what the script gave: the dataset, the collator, the names of columns.
            batch_size: of each process; with `split_batches`, of all together.
            used: the dataset and the collator with only the columns that are used.
            name: of the set; None if it has none, and the loader is not kept.
        """
        dataset, collate = used
        _check_dataset(dataset, "eval_dataset", "get_eval_dataloader")
        data, batch = plan.data, replace(plan.batches, eval=_own_share(plan.batches, batch_size))
        sampler = _sampler(make_sampler, dataset)
        settings = (data, batch, largest)
        kept = self._kept.pop(name, None) if name is not None and sampler is None else None
        if kept and kept[1] == settings and all(map(operator.is_, kept[0], given)):
            loader = kept[2]
        else:
            scripts = self._for_scripts
            loader = build_eval_loader(
                dataset, plan=data, batch=batch, collate=collate, sampler=sampler, for_scripts=scripts
            )
        if largest is not None and largest < loader.batch.micro:
            loader.resize(largest, 1)
        if name is not None and sampler is None and data.workers and data.persistent_workers:
            self._kept[name] = given, settings, loader
        return loader


def _own_share(plan: BatchPlan, batch_size: int) -> int:
    """Samples of this process's batches, of `batch_size` as the script gave it."""
    return share_of_batch("batch_size", batch_size, plan.ranks) if plan.split else batch_size


def _sampler(make: Callable[..., Any] | None, dataset: Any) -> Any:
    """A script's sampler of `dataset`; None if there is none. Methods of older scripts take no dataset.

    A stream has no positions to draw, so the script's method is not called for it.
    """
    if make is None or isinstance(dataset, IterableDataset):
        return None
    return make(dataset) if inspect.signature(make).parameters else make()


def _check_dataset(dataset: Any, field: str, method: str) -> None:
    if isinstance(dataset, DataLoader):
        fix = f"give its dataset, which is dealt to the processes; or override {method} to return this loader"
        raise ConfigError(Problem(field, "a DataLoader", fix))
    if isinstance(dataset, str):
        fix = "is a text: read the file first, such as datasets.load_dataset('json', data_files=..., split='train')"
        raise ConfigError(Problem(field, dataset, fix))
    if type(dataset).__name__ == "DataFrame":  # whose index is a column's name
        fix = "has columns, and a dataset rows: give datasets.Dataset.from_pandas(frame), or frame.to_dict('records')"
        raise ConfigError(Problem(field, "a DataFrame", fix))
    if isinstance(dataset, Mapping) and all(hasattr(part, "column_names") for part in dataset.values()):
        names = list(dataset)
        raise ConfigError(
            Problem(field, f"splits {names}", f"give one of them: dataset[{next(iter(names), '')!r}]")
        )


def named_dataset(chosen: Any, sets: Any) -> Any:
    """The evaluation dataset that `chosen` names. Raises DataError if there is none, or the name is unknown.

    Args:
        chosen: a dataset, the name of one of `sets`, or None for the Trainer's own.
        sets: the Trainer's evaluation data: a dataset, a dict of named ones, or None.
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


def group_source(plan: CallPlan, data_ranks: Gang, loader: Any, position: State | None = None) -> GroupSource:
    """The loader as a source of groups: one of Windlass as it is, a script's own in an adapter. Collective. `position`
    is where the run continues in it; None: at its beginning.
    """
    if isinstance(loader, StreamLoader):
        loader.agree(data_ranks, position)
    if isinstance(loader, DealtLoader):
        return loader
    lengths = data_ranks.gather_objects(known_length(loader))
    # Ranks with shorter loaders take part with fillers until the longest one ends.
    longest = None if None in lengths else max(lengths)
    data = plan.data
    return ForeignLoader(loader, plan.batches, data.seed, longest, start_timeout=data.start_timeout)
