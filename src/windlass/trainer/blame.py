"""Which samples a non-finite update was made of, and which of them caused it, on each rank."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from windlass.core.trees import tensors_in
from windlass.data.update_batch import UpdateBatch
from windlass.dist.gang import Gang
from windlass.engine.executor import StepResult
from windlass.engine.loop import Suspect, nonfinite_at

_SHOWN = 16


class _RankFindings(NamedTuple):
    """A rank's own part of an update."""

    ids: list[list[int]]  # its samples, by micro-batch
    data: list[int]  # samples that hold NaN or an infinity in the data
    loss: list[int]  # samples of the micro-batches whose loss is not finite although their data are
    unnamed: list[int]  # numbers of such micro-batches of which no sample is known


def find_nonfinite_samples(suspect: Suspect, data_ranks: Gang) -> str:
    """Describe the samples of an update on all ranks, and which of them are not finite. Collective."""
    ranks = [_RankFindings(*found) for found in data_ranks.gather_objects(list(_look(suspect)))]
    what = nonfinite_at(suspect.step, [batch for found in ranks for batch in found.ids])
    details = [
        _describe("not finite in the data themselves", "sample", [found.data for found in ranks]),
        _describe("not finite in the loss", "sample", [found.loss for found in ranks]),
        _describe("not finite in the loss", "micro-batch", [found.unnamed for found in ranks]),
    ]
    known = [detail for detail in details if detail]
    return "; ".join([what, *(known or ["data and losses are finite on every rank, the gradient is not"])])


def overflow_alone(result: StepResult, data_ranks: Gang) -> bool:
    """Return True if fp16 gradients overflowed the loss scale and the loss is finite: an ordinary skip, after which the
    scale is lower. Collective.
    """
    if not result.overflowed:
        return False
    broken = (~torch.isfinite(result.loss)).to(torch.float32).cpu()
    return float(data_ranks.sum(broken)) == 0


def _describe(what: str, unit: str, by_rank: list[list[int]]) -> str:
    """The numbers that each rank found, with the rank if there are several; empty if there are no numbers."""
    parts = []
    for rank, numbers in enumerate(by_rank):
        if numbers:
            shown = ", ".join(map(str, numbers[:_SHOWN])) + (" and others" if len(numbers) > _SHOWN else "")
            name = unit if len(numbers) == 1 else f"{unit}{'es' if unit.endswith('ch') else 's'}"
            parts.append(f"{name} {shown}" + (f" of rank {rank}" if len(by_rank) > 1 else ""))
    return f"{what}: {', '.join(parts)}" if parts else ""


def _look(suspect: Suspect) -> _RankFindings:
    data = suspect.data
    if data.filler:  # it repeats other data, with a weight of 0
        return _RankFindings([], [], [], [])
    nonfinite = _nonfinite_data(data)
    loss: list[int] = []
    unnamed: list[int] = []
    for number, (ids, value) in enumerate(zip(data.ids, suspect.losses, strict=False)):
        if math.isfinite(float(value)) or not set(ids).isdisjoint(nonfinite):
            continue
        loss += ids
        unnamed += [] if ids else [number]
    return _RankFindings(data.ids, nonfinite, loss, unnamed)


def _nonfinite_data(data: UpdateBatch) -> list[int]:
    """The samples of this rank that hold NaN or an infinity in the data."""
    found = []
    for ids, batch in zip(data.ids, data.batches, strict=True):
        columns = [c for c in tensors_in(batch) if c.is_floating_point() and c.ndim and len(c) == len(ids)]
        finite = [
            all(bool(torch.isfinite(column[row]).all()) for column in columns) for row in range(len(ids))
        ]
        found += [index for index, whole in zip(ids, finite, strict=True) if not whole]
    return found
