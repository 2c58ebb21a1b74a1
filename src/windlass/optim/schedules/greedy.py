"""A learning rate that rises while a metric improves and falls while it does not (GreedyLR, arXiv:2512.14527)."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from windlass.core.logs import get_logger
from windlass.core.types import State

_log = get_logger(__name__)

# The state; all else is options of the configuration.
_COUNTERS = (
    "best",
    "num_bad_epochs",
    "num_good_epochs",
    "cooldown_counter",
    "warmup_counter",
    "reset_start",
    "last_epoch",
)


class GreedyLR:
    """Called as `step(metric)` after each evaluation, like torch's `ReduceLROnPlateau`.

    Args:
        optimizer: whose `lr` it changes.
        mode: "min" or "max": which way the metric gets better.
        factor: below 1; the learning rate is multiplied by it to fall and divided by it to rise.
        patience: number of evaluations of one kind in a row without a change; the next one changes the learning rate.
        threshold: the least change that counts as better.
        threshold_mode: whether `threshold` is an absolute amount ("abs") or a share of the best ("rel").
        cooldown: evaluations that are ignored after a fall.
        warmup: evaluations that are ignored after a rise.
        min_lr: lower bound, one for all groups or one per group.
        max_lr: upper bound, one for all groups or one per group.
        eps: smaller changes are ignored.
        verbose: log each change as a warning instead of at INFO.
        smooth: judge the mean of the last `window_size` metrics instead of the last one.
        window_size: number of metrics in that mean.
        reset_start: after this many falls at the lower bound, start again from the first learning rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        threshold_mode: str = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: float | Sequence[float] = 1e-3,
        max_lr: float | Sequence[float] = 1.0,
        eps: float = 1e-8,
        verbose: bool = False,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ) -> None:
        _check(mode, factor, threshold_mode, window_size)
        self.optimizer = optimizer
        self.mode, self.factor, self.patience, self.eps = mode, factor, patience, eps
        self.threshold, self.threshold_mode = threshold, threshold_mode
        self.cooldown, self.warmup, self.reset_after = cooldown, warmup, reset_start
        self.verbose, self.smooth, self.window_size = verbose, smooth, window_size
        self._bounds = min_lr, max_lr
        self.base_lrs: list[float] = []
        self._adopt_groups()
        self.last_epoch = 0
        self.best: float
        self._window: deque[float]
        self._window_sum: float
        self._start_over()
        self._last_lr = list(self.base_lrs)

    def step(self, metrics: float, epoch: int | None = None) -> None:
        """Compare `metrics` (a number on the host) with the best, and change the learning rate if it is due. `epoch`
        sets `last_epoch`, which logs name; None adds 1.
        """
        self._adopt_groups()
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        current = self._smoothed(float(metrics)) if self.smooth else float(metrics)
        if self.cooldown_counter > 0 or self.warmup_counter > 0:
            self._wait()
        else:
            self._judge(current)
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group after the last `step`."""
        return list(self._last_lr)

    def is_better(self, current: float, best: float) -> bool:
        """Return True if `current` is better than `best` by more than the threshold."""
        relative = self.threshold_mode == "rel"
        if self.mode == "min":
            return current < (best * (1.0 - self.threshold) if relative else best - self.threshold)
        return current > (best * (1.0 + self.threshold) if relative else best + self.threshold)

    def state_dict(self) -> State:
        """The counters, the metrics in the window, and the rates, as plain data."""
        state: State = {name: getattr(self, name) for name in _COUNTERS}
        state.update(window=list(self._window), window_sum=self._window_sum)
        state.update(lrs=list(self._last_lr), base_lrs=list(self.base_lrs))
        return state

    def load_state_dict(self, state: State) -> None:
        """Restore a `state`, and write its rates into the optimizer."""
        for name in _COUNTERS:
            setattr(self, name, state[name])
        # The sum is restored and not added up again: additions and subtractions in another order round
        # differently, and a resumed run would differ from one that was not interrupted.
        self._window, self._window_sum = deque(state["window"]), state["window_sum"]
        self._last_lr, self.base_lrs = list(state["lrs"]), list(state["base_lrs"])
        self._write(self._last_lr)

    def _adopt_groups(self) -> None:
        """Take groups that were added, such as those of layers that a callback unfroze: with the bounds of all."""
        groups = self.optimizer.param_groups
        # Not otherwise: scripts may have changed the bounds.
        if len(groups) == len(self.base_lrs):
            return
        self.base_lrs += [float(group["lr"]) for group in groups[len(self.base_lrs) :]]
        lowest, highest = self._bounds
        self.min_lrs = _per_group("min_lr", lowest, len(groups))
        self.max_lrs = _per_group("max_lr", highest, len(groups))

    def _smoothed(self, value: float) -> float:
        self._window.append(value)
        self._window_sum += value
        if len(self._window) > self.window_size:
            self._window_sum -= self._window.popleft()
        if not math.isfinite(self._window_sum):
            # A metric that is not finite would stay in the sum after it has left the window.
            self._window_sum = sum(self._window)
        return self._window_sum / len(self._window)

    def _wait(self) -> None:
        """Skip one evaluation; the pause after a fall comes before the one after a rise."""
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
        else:
            self.warmup_counter -= 1
        self.num_bad_epochs = self.num_good_epochs = 0

    def _judge(self, current: float) -> None:
        if self.is_better(current, self.best):
            self.best = current
            self.num_bad_epochs, self.num_good_epochs = 0, self.num_good_epochs + 1
        else:
            self.num_bad_epochs, self.num_good_epochs = self.num_bad_epochs + 1, 0
        if self.num_good_epochs > self.patience:
            self._increase()
        elif self.num_bad_epochs > self.patience:
            self._reduce()

    def _increase(self) -> None:
        for group, highest in zip(self.optimizer.param_groups, self.max_lrs, strict=True):
            new = min(group["lr"] / self.factor, highest)
            if new - group["lr"] > self.eps:
                group["lr"] = new
        self._tell("raised")
        self.reset_start = self.reset_after
        self.warmup_counter, self.num_good_epochs = self.warmup, 0

    def _reduce(self) -> None:
        at_floor = True
        for group, lowest in zip(self.optimizer.param_groups, self.min_lrs, strict=True):
            new = max(group["lr"] * self.factor, lowest)
            if group["lr"] - new > self.eps:
                group["lr"] = new
            at_floor = at_floor and group["lr"] <= lowest
        self._tell("lowered")
        if at_floor:
            self.reset_start -= 1
            if self.reset_start <= 0:
                self._write(self.base_lrs)
                self._start_over()
                self._tell("started over")
        self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0

    def _start_over(self) -> None:
        self.best = float("inf") if self.mode == "min" else float("-inf")
        self.num_bad_epochs = self.num_good_epochs = 0
        self.cooldown_counter = self.warmup_counter = 0
        self.reset_start = self.reset_after
        self._window, self._window_sum = deque(), 0.0

    def _tell(self, what: str) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        # At a bound, or by less than `eps`, nothing has changed.
        if rates != self._last_lr:
            level = logging.WARNING if self.verbose else logging.INFO
            _log.log(level, "greedy: evaluation %d %s the learning rates: %s", self.last_epoch, what, rates)

    def _write(self, lrs: Sequence[float]) -> None:
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr


def _check(mode: str, factor: float, threshold_mode: str, window_size: int) -> None:
    if not 0 < factor < 1.0:
        raise ValueError(f"factor must be above 0 and below 1, not {factor}")
    if window_size < 1:
        raise ValueError(f"window_size must be at least 1, not {window_size}")
    if mode not in ("min", "max"):
        raise ValueError(f"mode must be 'min' or 'max', not {mode!r}")
    if threshold_mode not in ("rel", "abs"):
        raise ValueError(f"threshold_mode must be 'rel' or 'abs', not {threshold_mode!r}")


def _per_group(name: str, value: Any, groups: int) -> list[float]:
    if not isinstance(value, (list, tuple)):
        return [value] * groups
    if len(value) != groups:
        raise ValueError(f"{name} has {len(value)} values for {groups} parameter groups")
    return list(value)
