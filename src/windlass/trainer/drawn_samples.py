"""The micro-batches of an update as a script's `get_batch_samples` takes them, and its own count of their targets."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from windlass.core.errors import DataError
from windlass.data.update_batch import UpdateBatch

# Called with an update's micro-batches, and with what adds up over ranks the targets that the inherited method counts.
Draw = Callable[[list[Any], Callable[[Tensor], Tensor]], Any]

OWN_COUNT_OF_SEVERAL = (
    "`get_batch_samples` returned a count of {:.6g} on one of {} processes, whose updates have {:.6g} targets: it is "
    "not known if that is a count of one process or of all. Return the count of the inherited method, or None, and "
    "override `count_targets` to count others"
)


class DrawnSamples:
    """Has a script's `get_batch_samples` take the micro-batches of each update.

    Args:
        draw: calls the method.
        add: adds up over ranks what the inherited method counts.
    """

    def __init__(self, draw: Draw, add: Callable[[Tensor], Tensor]) -> None:
        self._draw, self._add = draw, add
        self._untaken: Any = None

    def __call__(self, group: UpdateBatch) -> None:
        """Replace the batches of `group`, and set its `given_count`. Collective if the method counts over ranks.

        Raises DataError if the method returns something else than these micro-batches and a count.
        """
        if group.filler and self._untaken is not None:  # it repeats a batch that was taken before
            group.batches = [self._untaken]
        # A script may change a batch in place.
        self._untaken = copy.copy(group.batches[0])
        whole, here = len(group.batches), float(not group.filler)
        found = self._draw(group.batches, lambda own: self._add(own * here))
        batches, count = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
        if not isinstance(batches, list) or len(batches) != whole:
            what = type(found).__name__ if batches is None else f"{type(batches).__name__} of {len(batches)}"
            raise DataError(
                f"`get_batch_samples` returned a {what} for an update of {whole} micro-batches. It must return "
                "(batches, count), with a list of all of them: leave samples out in the dataset instead, and set "
                "gradient_accumulation_steps to the number of micro-batches"
            )
        if count is not None and not 0 <= float(count) < math.inf:
            raise DataError(
                f"`get_batch_samples` returned a count of {float(count)}: it is a divisor of losses"
            )
        group.batches = batches
        group.given_count = None if count is None or group.filler else float(count)
