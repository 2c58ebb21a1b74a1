"""The learning rate of every update: written into the optimizer before the update, a function of its index alone."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger, warn_once
from windlass.core.types import State
from windlass.optim.schedules.base import Factor, Span
from windlass.optim.schedules.registry import METRIC_DRIVEN, SCHEDULE_NAMES, SHAPES, WITHOUT_WARMUP

_log = get_logger(__name__)


class Schedule(Protocol):
    """What the engine needs of a schedule; the same calls whatever drives it.

    Before update `k` (counted from 0): `set(k)`. After it, where it was not skipped: `advance()`. After an
    evaluation, where `follows_metric`: `observe(metric)`. `exposed` is the object that callbacks and
    `trainer.lr_scheduler` show.
    """

    optimizer: Optimizer
    follows_metric: bool

    @property
    def exposed(self) -> Any: ...

    def set(self, step: int) -> None: ...

    def advance(self) -> None: ...

    def observe(self, metric: float) -> None: ...

    def last_lrs(self) -> list[float]:
        """The learning rates, one per group, that the last `set` gave to its update."""
        ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


class FactorSchedule(LRScheduler):
    """A schedule that is a pure function of the step: `group's first lr * factor(step)`.

    An `LRScheduler` by type and by face (`step`, `get_last_lr`, `last_epoch`, `base_lrs`), so that callbacks written
    for torch's find what they expect. Torch's constructor is left out on purpose: it wraps `optimizer.step` to count
    calls, which costs time in every update and is not needed by a schedule that is told its step.
    """

    follows_metric = False

    def __init__(self, optimizer: Optimizer, factor: Factor) -> None:
        self.optimizer = optimizer
        self._factor = factor
        self.base_lrs: list[float | torch.Tensor] = []
        self._tensor_lrs = False
        self._adopt_groups()
        self.set(0)

    @property
    def exposed(self) -> FactorSchedule:
        return self

    def lrs(self, step: int) -> list[float]:
        """The learning rate of each group in update `step`. Changes nothing."""
        factor = self._factor(step)
        return [base * factor for base in self.base_lrs]  # type: ignore[misc]

    def set(self, step: int) -> None:
        """Write the learning rates of update `step` into the optimizer's groups."""
        self.last_epoch = step
        groups = self.optimizer.param_groups
        if len(groups) != len(self.base_lrs):
            self._adopt_groups()
        if self._tensor_lrs:
            self._fill(step)
            return
        factor = self._factor(step)
        for group, base in zip(groups, self.base_lrs):  # noqa: B905 (lengths are equal here; this runs each step)
            group["lr"] = base * factor

    def advance(self) -> None:
        """Nothing to do: `set` names the step."""

    def observe(self, metric: float) -> None:
        """Nothing to do: no metric drives this schedule."""

    def last_lrs(self) -> list[float]:
        """As they stand in the optimizer: also what a callback wrote over the schedule's."""
        if self._tensor_lrs:  # reading a tensor would wait for the device
            return self.lrs(self.last_epoch)
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> State:
        """The step alone. The first learning rates are the configuration's: a resumed run obeys its own arguments."""
        return {"step": self.last_epoch}

    def load_state_dict(self, state: State) -> None:
        self.set(int(state["step"]))

    # The face of torch's LRScheduler, for loops and callbacks that the user owns.

    def step(self, epoch: int | None = None) -> None:
        """Move on by one update, or to update `epoch`."""
        self.set(self.last_epoch + 1 if epoch is None else epoch)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        return list(self.last_lrs())

    def get_lr(self) -> list[float | torch.Tensor]:
        return list(self.last_lrs())

    def _adopt_groups(self) -> None:
        """Take the present learning rate of groups not seen before as the one that the factor multiplies."""
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            self._tensor_lrs |= isinstance(group["lr"], torch.Tensor)
            first = group.setdefault("initial_lr", float(group["lr"]))
            self.base_lrs.append(float(first))

    def _fill(self, step: int) -> None:
        """As `set`, where an optimizer keeps its learning rate in a tensor (`capturable`, compiled steps)."""
        for group, lr in zip(self.optimizer.param_groups, self.lrs(step), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


class UserSchedule:
    """A scheduler object of torch's kind, which keeps its own count: the user's, or one that follows a metric.

    It is stepped once after each update that was applied; one whose `step` asks for a metric, after each evaluation.
    """

    def __init__(self, inner: Any, optimizer: Optimizer | None = None) -> None:
        self.inner = inner
        self.optimizer: Optimizer = inner.optimizer if optimizer is None else optimizer
        self.follows_metric = _asks_for_metric(inner)
        self._seen = self._read()

    @property
    def exposed(self) -> Any:
        return self.inner

    def set(self, step: int) -> None:
        """Note the learning rates that this update will use; the scheduler itself decided them."""
        self._seen = self._read()

    def advance(self) -> None:
        """An update was applied: let the scheduler take its step."""
        if not self.follows_metric:
            self.inner.step()

    def observe(self, metric: float) -> None:
        """An evaluation gave `metric`."""
        if self.follows_metric:
            self.inner.step(metric)

    def last_lrs(self) -> list[float]:
        """A rate that the optimizer keeps in a tensor is read from its device here."""
        return [float(lr) for lr in self._seen]

    def state_dict(self) -> State:
        """The scheduler's own state, with maps of special types (counters) as plain ones."""
        return {key: _plain(value) for key, value in self.inner.state_dict().items()}

    def load_state_dict(self, state: State) -> None:
        restored = {key: _as_before(getattr(self.inner, key, None), value) for key, value in state.items()}
        self.inner.load_state_dict(restored)
        self._seen = self._read()

    def _read(self) -> list[float | torch.Tensor]:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        # A tensor is written in place by the next step of its scheduler, so it is copied where it is.
        return [lr.clone() if isinstance(lr, torch.Tensor) else lr for lr in rates]


def as_schedule(scheduler: Any, optimizer: Optimizer) -> Schedule:
    """`scheduler` for the engine: ours as it is, anything else with torch's face wrapped."""
    if isinstance(scheduler, (FactorSchedule, UserSchedule)):
        return scheduler
    return UserSchedule(scheduler, optimizer)


def build_schedule(
    name: str,
    optimizer: Optimizer,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Schedule:
    """The schedule called `name` over a run of `total_steps` updates, `warmup_steps` of them warm-up.

    Raises:
        ConfigError: no such name, an option that it does not have, or an option's value that cannot be.
    """
    if name in METRIC_DRIVEN:
        _warn_of_warmup(name, warmup_steps)
        return UserSchedule(build_metric_driven(name, optimizer, options or {}), optimizer)
    _warn_of_warmup(name, warmup_steps)
    span = Span(warmup_steps, total_steps, peak_lr(optimizer))
    return FactorSchedule(optimizer, build_factor(name, span, options or {}))


def build_factor(name: str, span: Span, options: Mapping[str, Any]) -> Factor:
    """The pure function behind a schedule of the step."""
    if name not in SHAPES:
        raise ConfigError(_unknown_name(name))
    return _construct(name, SHAPES[name], span, options)  # type: ignore[no-any-return]


def build_metric_driven(name: str, optimizer: Optimizer, options: Mapping[str, Any]) -> Any:
    """The torch-like scheduler behind a schedule that follows a metric."""
    return _construct(name, METRIC_DRIVEN[name], optimizer, options)


def peak_lr(optimizer: Optimizer) -> float:
    """The optimizer's own learning rate, to which floors given as learning rates refer."""
    lr = optimizer.defaults.get("lr")
    return float(optimizer.param_groups[0]["lr"] if lr is None else lr)


def _construct(name: str, build: Callable[..., Any], subject: Any, options: Mapping[str, Any]) -> Any:
    _check_options(name, build, options)
    try:
        return build(subject, **options)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(Problem("lr_scheduler_kwargs", dict(options), f"{name}: {error}")) from error


def _check_options(name: str, build: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(build).parameters.values())[1:]
    known = [p.name for p in parameters]
    takes = f"{name} takes {', '.join(known)}" if known else f"{name} takes no options"
    problems = [
        Problem(f"lr_scheduler_kwargs.{key}", options[key], takes) for key in options if key not in known
    ]
    required = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    problems += [
        Problem(f"lr_scheduler_kwargs.{r}", None, f"{name} needs it") for r in required if r not in options
    ]
    if problems:
        raise ConfigError(problems)


def _unknown_name(name: str) -> Problem:
    near = difflib.get_close_matches(str(name), SCHEDULE_NAMES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return Problem("lr_scheduler_type", name, f"{hint}known schedules: {', '.join(SCHEDULE_NAMES)}")


def _warn_of_warmup(name: str, warmup_steps: int) -> None:
    if warmup_steps and name in WITHOUT_WARMUP:
        other = ' Use "constant_with_warmup" to have one.' if name == "constant" else ""
        warn_once(
            _log, f"warmup_steps={warmup_steps} has no effect: the {name} schedule has no warm-up.{other}"
        )


def _asks_for_metric(scheduler: Any) -> bool:
    first = next(iter(inspect.signature(scheduler.step).parameters.values()), None)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return first is not None and first.kind not in variadic and first.default is inspect.Parameter.empty


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _as_before(current: Any, value: Any) -> Any:
    """`value` in the mapping type that the scheduler holds now (a Counter of milestones, say)."""
    if isinstance(current, dict) and isinstance(value, dict) and type(current) is not dict:
        return type(current)(value)
    return value
