"""Which samples an update was made of that came out not finite, and which of them it comes from, on each rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.core.trees import tensors_in
from windlass.data.group import Group
from windlass.dist.gang import Gang
from windlass.engine.executor import StepResult
from windlass.engine.loop import Suspect, nonfinite_at

_SHOWN = 16


class _RankFindings(NamedTuple):
    """What a rank knows of its own part of an update.

    Attributes:
        ids: its samples, by micro-batch.
        data: samples that hold NaN or an infinity as they come from the data.
        loss: samples of the micro-batches whose loss is not finite although their data are.
        unnamed: numbers of such micro-batches of which no sample is known.
    """

    ids: list[list[int]]
    data: list[int]
    loss: list[int]
    unnamed: list[int]


def find_nonfinite_samples(suspect: Suspect, gang: Gang) -> str:
    """What is known of the samples of an update, those of all ranks, in words. Collective."""
    ranks = [_RankFindings(*told) for told in gang.gather_objects(list(_look(suspect)))]
    what = nonfinite_at(suspect.step, [batch for found in ranks for batch in found.ids])
    details = [
        _told("not finite in the data themselves", "sample", ranks, lambda found: found.data),
        _told("not finite in the loss", "sample", ranks, lambda found: found.loss),
        _told("not finite in the loss", "micro-batch", ranks, lambda found: found.unnamed),
    ]
    known = [detail for detail in details if detail]
    return "; ".join([what, *(known or ["data and losses are finite on every rank, the gradient is not"])])


def overflow_alone(result: StepResult, gang: Gang) -> bool:
    """Whether fp16's gradients were too large for the loss scale, and nothing is wrong with the loss: an ordinary
    skip, after which the scale is lower. Collective.
    """
    if not result.overflowed:
        return False
    broken = (~torch.isfinite(result.loss)).to(torch.float32).cpu()
    return float(gang.sum(broken)) == 0


def _told(
    what: str, unit: str, ranks: list[_RankFindings], pick: Callable[[_RankFindings], list[int]]
) -> str:
    """The numbers that `pick` takes from each rank's findings; with the rank, where there are several."""
    parts = []
    for rank, found in enumerate(ranks):
        numbers = pick(found)
        if numbers:
            shown = ", ".join(map(str, numbers[:_SHOWN])) + (" and others" if len(numbers) > _SHOWN else "")
            name = unit if len(numbers) == 1 else f"{unit}{'es' if unit.endswith('ch') else 's'}"
            parts.append(f"{name} {shown}" + (f" of rank {rank}" if len(ranks) > 1 else ""))
    return f"{what}: {', '.join(parts)}" if parts else ""


def _look(suspect: Suspect) -> _RankFindings:
    group = suspect.group
    if group.filler:
        return _RankFindings([], [], [], [])
    data = _broken(group)
    loss: list[int] = []
    unnamed: list[int] = []
    for number, (ids, value) in enumerate(zip(group.ids, suspect.losses, strict=False)):
        if math.isfinite(float(value)) or not set(ids).isdisjoint(data):
            continue
        loss += ids
        unnamed += [] if ids else [number]
    return _RankFindings(group.ids, data, loss, unnamed)


def _broken(group: Group) -> list[int]:
    """The samples of this rank that hold NaN or an infinity as they come from the data."""
    found = []
    for ids, batch in zip(group.ids, group.batches, strict=True):
        columns = [c for c in tensors_in(batch) if c.is_floating_point() and c.ndim and len(c) == len(ids)]
        found += [
            index for row, index in enumerate(ids) if any(_is_broken(column[row]) for column in columns)
        ]
    return found


def _is_broken(values: Tensor) -> bool:
    return not bool(torch.isfinite(values).all())
