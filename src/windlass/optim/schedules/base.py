"""What every schedule shape is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from windlass.core.errors import ConfigError, Problem

# Update index (0 is the first update) -> factor on the peak learning rate. Pure: the same step, the same factor.
Factor = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Span:
    """The run that a shape is stretched over.

    Attributes:
        warmup: updates over which the learning rate rises.
        total: updates of the whole run, warm-up included; None where the caller does not know.
        peak: the learning rate that factors multiply; for shapes whose floor is given as a learning rate.
    """

    warmup: float
    total: float | None
    peak: float

    def known_total(self, name: str) -> float:
        """`total`, for the shapes that cannot do without it.

        Raises:
            ConfigError: it is None.
        """
        if self.total is None:
            raise ConfigError(Problem("num_training_steps", None, f"the {name} schedule needs it"))
        return self.total


def rising(step: int, warmup: float) -> float:
    """The linear warm-up from 0: `step / warmup`."""
    return step / max(1, warmup)


def floor_rate(span: Span, min_lr: float | None, min_lr_rate: float | None) -> float:
    """The floor of a schedule as a share of the peak, from exactly one of its two spellings.

    Raises:
        ConfigError: none or both are given.
    """
    if (min_lr is None) == (min_lr_rate is None):
        fix = "give exactly one of min_lr (a learning rate) and min_lr_rate (a share of the peak)"
        value = {"min_lr": min_lr, "min_lr_rate": min_lr_rate}
        raise ConfigError(Problem("lr_scheduler_kwargs", value, fix))
    return min_lr / span.peak if min_lr is not None else min_lr_rate  # type: ignore[return-value]
