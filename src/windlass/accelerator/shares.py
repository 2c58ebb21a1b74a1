"""Split inputs between processes, for inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from windlass.core.errors import DataError
from windlass.dist.gang import Gang


def share_of(inputs: Any, gang: Gang, apply_padding: bool = False) -> Any:
    """This process's part of `inputs`, which are consecutive items. The first processes may get one item more.

    Args:
        inputs: a list, a tuple, a tensor (along its first axis), a dataset with `select`, or a dict of those with equal
            lengths.
        apply_padding: repeat the last item so that all processes get the same number, e.g. to gather the results.

    Raises:
        DataError: a dict with several lengths, or an unsupported type.
    """
    if gang.size == 1:
        return inputs
    length = _length(inputs)
    each, extra = divmod(length, gang.size)
    start = gang.rank * each + min(gang.rank, extra)
    stop = start + each + (gang.rank < extra)
    missing = each + (extra > 0) - (stop - start) if apply_padding and length else 0
    return _take(inputs, range(start, stop), missing)


def _length(inputs: Any) -> int:
    if not isinstance(inputs, Mapping):
        return len(inputs)
    lengths = {key: _length(value) for key, value in inputs.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(
            f"the values of a dict must have one length to be split between processes; they have {lengths}"
        )
    return next(iter(lengths.values()))


def _take(inputs: Any, places: range, missing: int) -> Any:
    if isinstance(inputs, Mapping):
        return type(inputs)({key: _take(value, places, missing) for key, value in inputs.items()})  # type: ignore[call-arg]
    if isinstance(inputs, Tensor):
        rows = inputs[places.start : places.stop]
        return torch.cat([rows, *[inputs[-1:]] * missing]) if missing else rows
    if isinstance(inputs, list | tuple):
        items: Any = inputs[places.start : places.stop]
        return items + type(items)([inputs[-1]]) * missing if missing else items
    if hasattr(inputs, "select"):
        return inputs.select([*places, *[len(inputs) - 1] * missing])
    raise DataError(
        f"a {type(inputs).__name__} cannot be split between processes; pass a list, a tuple, a tensor, a dataset or "
        "a dict of those"
    )
