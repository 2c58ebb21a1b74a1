"""Which samples an update was made of that came out not finite, and which of them hold such values themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.data.group import Group
from windlass.data.nested import tensors_of
from windlass.dist.gang import Gang
from windlass.engine.loop import nonfinite_at

_SHOWN = 16


def who_is_to_blame(group: Group, step: int, gang: Gang) -> str:
    """What is known of the samples of an update, those of all ranks, in words. Collective."""
    told = gang.gather_objects([[] if group.filler else group.ids, _broken(group)])
    ids = [batch for own, _ in told for batch in own]
    broken = [index for _, found in told for index in found]
    what = nonfinite_at(step, ids)
    if not broken:
        return what
    shown = ", ".join(map(str, broken[:_SHOWN])) + (" and others" if len(broken) > _SHOWN else "")
    return f"{what}; not finite in the data themselves: sample{'s' if len(broken) > 1 else ''} {shown}"


def _broken(group: Group) -> list[int]:
    """The samples of this rank that hold NaN or an infinity as they come from the data."""
    found = []
    for ids, batch in zip(group.ids, group.batches, strict=True):
        columns = [c for c in tensors_of(batch) if c.is_floating_point() and c.ndim and len(c) == len(ids)]
        found += [
            index for row, index in enumerate(ids) if any(_is_broken(column[row]) for column in columns)
        ]
    return found


def _is_broken(values: Tensor) -> bool:
    return not bool(torch.isfinite(values).all())
