"""Check that all ranks prepare the same objects with the same settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from windlass.accelerator.loop_settings import LoopSettings
from windlass.accelerator.optimizer import PreparedOptimizer
from windlass.config.plan import DistPlan
from windlass.dist.alike import check_alike, model_facts, optimizer_facts
from windlass.dist.gang import Gang

_OF_ACCUMULATION = ("sync_with_dataloader", "sync_each_batch", "adjust_scheduler")
_OF_LOADER = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "data_seed")


def check_prepared_alike(
    objects: Sequence[Any], settings: LoopSettings, dist: DistPlan, all_ranks: Gang
) -> None:
    """Raise `RankMismatchError` on all ranks if settings or prepared objects differ. Collective: exchanges one hash."""
    if all_ranks.size > 1:
        check_alike({**_settings(settings, dist), **dict(_described(objects, settings))}, all_ranks)


def _settings(settings: LoopSettings, plan: DistPlan) -> dict[str, Any]:
    accumulation, loader = settings.accumulation, settings.loader
    dist = dataclasses.asdict(plan)
    del dist["timeout_seconds"]  # may differ
    return {
        "gradient_accumulation_steps": accumulation.num_steps,
        **{name: getattr(accumulation, name) for name in _OF_ACCUMULATION},
        **{name: getattr(loader, name) for name in _OF_LOADER},
        "mixed_precision": settings.precision.word,
        "scheduler_unit": settings.schedule_unit,
        "compile": None if settings.compile is None else dataclasses.asdict(settings.compile),
        "parallelism": dist,
    }


def _described(objects: Sequence[Any], settings: LoopSettings) -> Iterator[tuple[str, Any]]:
    for number, item in enumerate(objects):
        name = f"prepare() argument {number}"
        if isinstance(item, nn.Module):
            yield f"{name}, model", model_facts(item)
        elif isinstance(item, torch.optim.Optimizer | PreparedOptimizer):
            plain = item.optimizer if isinstance(item, PreparedOptimizer) else item
            yield f"{name}, optimizer", optimizer_facts(plain)
        elif isinstance(item, DataLoader):
            # If only the main process reads, the other ranks need not have the data.
            yield f"{name}, loader", {} if settings.loader.dispatch_batches else _loader(item)
        else:
            yield name, "a schedule" if hasattr(item, "step") else "another object"


def _loader(loader: DataLoader[Any]) -> dict[str, Any]:
    facts = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if not isinstance(loader.dataset, IterableDataset) and hasattr(loader.dataset, "__len__"):
        facts["samples"] = len(loader.dataset)
    return facts
