"""Learning-rate schedules: the rate of each update is a function of its index, set before the update."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from types import NoneType
from typing import Any, get_args, get_origin

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from windlass.core.errors import CheckpointError, ConfigError, Problem, did_you_mean, refuse
from windlass.core.logs import get_job_logger, warn_once
from windlass.core.tensors import dtype_name
from windlass.core.types import State
from windlass.optim.schedules.registry import METRIC_DRIVEN, SCHEDULE_NAMES, SHAPES, WITHOUT_WARMUP
from windlass.optim.schedules.simple import Factor, Span

# The state of a script's scheduler as data that a checkpoint can hold, and back.
#
# Torch's schedulers return all their attributes. Those that are code (functions, methods, classes) are made again by
# the constructor and are not saved. Values that are data under another type (enumerations, dtypes, sets, paths,
# deques) are saved as plain data, and get the type that the scheduler of the resumed run has there.
# Beside them is the scheduler's class.
_KIND = "windlass.class"


def state_as_data(scheduler: Any) -> State:
    """The scheduler's state, with its class. What is neither data nor code stays in it, and cannot be saved."""
    return {**_data(scheduler.state_dict()), _KIND: _kind_of(scheduler)}


def load_data(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Load a result of `state_as_data`, or the scheduler's own state, into `scheduler`. Raises CheckpointError if
    it is that of another class.
    """
    own = dict(state)
    saved, live = own.pop(_KIND, None), _kind_of(scheduler)
    # Torch's would take the attributes of another class for its own, and use none of them.
    if saved not in (None, live):
        raise _other_kind(saved, live)
    scheduler.load_state_dict(_typed(scheduler.state_dict(), own))


def _kind_of(scheduler: Any) -> str:
    """The class of a scheduler, and of those in it."""
    inner = " and ".join(map(_kind_of, getattr(scheduler, "_schedulers", ())))
    return f"{type(scheduler).__name__}{f' of {inner}' if inner else ''}"


def _is_code(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, type | functools.partial)


def _data(value: Any) -> Any:
    if _is_code(value):
        return None
    if isinstance(value, Enum):
        return _data(value.value)
    if isinstance(value, dict):
        return {key: _data(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_data(item) for item in value)
    if isinstance(value, list | deque):
        return [_data(item) for item in value]
    if isinstance(value, set | frozenset):
        # Sorted, so that a run and its repetition write the same file.
        return sorted((_data(item) for item in value), key=repr)
    if isinstance(value, PurePath):
        return str(value)
    return dtype_name(value) if isinstance(value, torch.dtype) else value


def _typed(live: Any, value: Any) -> Any:
    """`value` in the types of `live`, the present value in its place."""
    if _is_code(live):
        return live
    if isinstance(live, dict) and isinstance(value, dict):
        restored = copy.copy(live)  # also a Counter, or a map with a default
        restored.clear()
        restored.update({key: _typed(live.get(key), item) for key, item in value.items()})
        return restored
    if isinstance(live, list | tuple) and isinstance(value, list | tuple) and len(live) == len(value):
        items = [_typed(*pair) for pair in zip(live, value, strict=True)]
        # A named tuple takes its items as arguments, a tuple takes one sequence.
        is_named = isinstance(live, tuple) and type(live) is not tuple
        return type(live)(*items) if is_named else type(live)(items)
    if isinstance(live, torch.dtype) and isinstance(value, str):
        return getattr(torch, value)
    # The bound of the deque is not in the data.
    if isinstance(live, deque) and not isinstance(value, deque):
        return deque(value, live.maxlen)
    if isinstance(live, Enum | set | frozenset | PurePath) and not isinstance(value, type(live)):
        return type(live)(value)
    return value


_log = get_job_logger(__name__)

# The state of a `FactorSchedule`.
_OWN_STATE = frozenset({"step", "rates", "bases"})

# What schedulers that follow a metric keep for each group.
_RATES_OF_GROUPS = frozenset({"base_lrs", "lrs", "_last_lr", "min_lrs", "max_lrs"})


class FactorSchedule(LRScheduler):
    """A schedule that is a pure function of the step: `group's first lr * factor(step)`.

    A subclass of torch's `LRScheduler` with its interface (`step`, `get_last_lr`, `last_epoch`, `base_lrs`) for scripts
    and callbacks. Torch's constructor is not called: it wraps `optimizer.step` to count calls, which costs time in each
    update and is not needed here.
    """

    follows_metric = counts_steps = False

    def __init__(self, optimizer: Optimizer, factor: Factor) -> None:
        self.optimizer = optimizer
        self._factor = factor
        self.base_lrs: list[float | torch.Tensor] = []
        self._first_lrs: list[float] = []  # `base_lrs` before a script changed them
        # Rates that those of the next update replaced, and of which update they are; None while one is under way.
        self._replaced: list[Any] | None = None
        self._replaced_step = self.last_epoch = 0
        self._tensor_lrs = False
        self._adopt_groups()
        # As the constructors of torch's schedulers do: the rate of the first update is in the optimizer from now
        # on.
        self.end_update(0)

    @property
    def exposed(self) -> FactorSchedule:
        return self

    @property
    def lr_lambdas(self) -> list[Factor]:
        """The function of the step for each group, as torch's `LambdaLR` has it."""
        return [self._factor for _ in self.base_lrs]

    def lrs(self, step: int) -> list[float]:
        """The learning rate of each group in update `step`."""
        factor = self._factor(step)
        return [base * factor for base in self.base_lrs]  # type: ignore[misc]

    def set(self, step: int) -> None:
        """Set the learning rates of update `step` in the optimizer, unless `end_update` has: callbacks may have changed
        them since.
        """
        known = len(self.base_lrs)
        if step != self.last_epoch:
            self.end_update(step)
        # A callback that unfreezes layers adds groups while the run goes on.
        elif len(self.optimizer.param_groups) != known:
            self.end_update(step, known)
        self._replaced = None

    def end_update(self, step: int, first: int = 0, changed: Mapping[str, float] | None = None) -> None:
        """Set the learning rates of update `step`, the next one. Those of the last one are reported until `set`.

        Args:
            first: the number of the first group that is written.
            changed: number of a group -> another rate than that of the schedule.
        """
        groups = self.optimizer.param_groups
        if len(groups) != len(self.base_lrs):
            self._adopt_groups()
        self._replaced, self._replaced_step, self.last_epoch = [], self.last_epoch, step
        factor = self._present_factor = self._factor(step)
        for index in range(first, len(groups)):
            group, lr = groups[index], self.base_lrs[index] * factor
            if changed is not None:
                lr = changed.get(str(index), lr)
            self._replaced.append(group["lr"])
            if self._tensor_lrs and isinstance(group["lr"], torch.Tensor):
                # In place: a CUDA graph or a compiled step reads this very tensor.
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def advance(self) -> None:
        """Nothing to do: `set` receives the step."""

    def observe(self, metric: float) -> None:
        """Nothing to do."""

    def last_lrs(self) -> list[float]:
        """The rates of the update that `set` began, under way or ended. A callback may have changed them."""
        if self._replaced is None:
            return self._present()
        return self.lrs(self._replaced_step) if self._tensor_lrs else self._replaced

    def _present(self) -> list[float]:
        if self._tensor_lrs:  # reading a tensor would wait for the device
            return self.lrs(self.last_epoch)
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> State:
        """The step, and what a script changed: other rates of a resumed run are those of its own arguments."""
        factor = self._present_factor
        rates = [
            (float(group["lr"]), _in_type_of(group["lr"], float(base) * factor))
            for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=False)
        ]
        bases = zip(map(float, self.base_lrs), self._first_lrs, strict=False)
        changed = {"rates": _changes(rates), "bases": _changes(bases)}
        return {"step": self.last_epoch, **{name: value for name, value in changed.items() if value}}

    def load_state_dict(self, state: State) -> None:
        if _KIND in state:
            raise _other_kind(state[_KIND], "a function of the update")
        self._adopt_groups()
        for index, base in state.get("bases", {}).items():
            self.base_lrs[int(index)] = base
        self.end_update(int(state["step"]), changed=state.get("rates"))

    # The interface of torch's LRScheduler.

    def step(self, epoch: int | None = None) -> None:
        """Continue with the next update, or with update `epoch`."""
        self.end_update(self.last_epoch + 1 if epoch is None else epoch)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        return list(self._present())

    get_lr = get_last_lr

    @property
    def _last_lr(self) -> list[float | torch.Tensor]:  # type: ignore[override]
        """The same, under the name that scripts read of torch's schedulers."""
        return self.get_last_lr()

    def _adopt_groups(self) -> None:
        """The factor multiplies the present learning rate of new groups."""
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            self._tensor_lrs |= isinstance(group["lr"], torch.Tensor)
            # The name under which torch's schedulers keep it. If it is there, "lr" may be the rate of some later
            # update already.
            first = group.setdefault("initial_lr", float(group["lr"]))
            self.base_lrs.append(float(first))
            self._first_lrs.append(float(first))


def _in_type_of(present: float | torch.Tensor, lr: float) -> float:
    """The rate as it is read back once it was written in place of `present`."""
    return float(torch.full_like(present, lr)) if isinstance(present, torch.Tensor) else lr


def _changes(pairs: Iterable[tuple[float, float]]) -> State:
    """What is and should be -> by its number, what is something else."""
    return {str(index): present for index, (present, due) in enumerate(pairs) if present != due}


class UserSchedule:
    """A torch scheduler, which counts its steps: the user's, or one that follows a metric.

    It is stepped after each applied update, or, if its `step` requires a metric, after each evaluation.
    """

    counts_steps = True

    def __init__(self, inner: Any, optimizer: Optimizer | None = None) -> None:
        self.inner = inner
        self.optimizer: Optimizer = inner.optimizer if optimizer is None else optimizer
        self.follows_metric = _asks_for_metric(inner)
        self._seen = self._read()

    @property
    def exposed(self) -> Any:
        return self.inner

    def set(self, step: int) -> None:
        """Record the learning rates of this update, which the scheduler has set."""
        # `advance` sets those of the next update before these are logged.
        self._seen = self._read()

    def advance(self) -> None:
        """Step the scheduler after an applied update."""
        if not self.follows_metric:
            self.inner.step()

    def end_update(self, step: int) -> None:
        """Nothing to do: `advance` has set the rates of the next update."""

    def observe(self, metric: float) -> None:
        """Step the scheduler with the metric of an evaluation."""
        if self.follows_metric:
            self.inner.step(metric)

    def last_lrs(self) -> list[float]:
        """The recorded rates; those in tensors are read from their device."""
        return [float(lr) for lr in self._seen]

    def state_dict(self) -> State:
        return state_as_data(self.inner)

    def load_state_dict(self, state: State) -> None:
        # A scheduler of torch would take the number in the place of its method `step`.
        if "step" in state and state.keys() <= _OWN_STATE and "step" not in self.inner.state_dict():
            raise _other_kind("a schedule that is a function of the update", type(self.inner).__name__)
        groups = len(self.optimizer.param_groups)
        load_data(
            self.inner,
            {
                key: _for_groups(value, groups) if key in _RATES_OF_GROUPS else value
                for key, value in state.items()
            },
        )
        self._seen = self._read()

    def _read(self) -> list[float | torch.Tensor]:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        # The next step of the scheduler writes tensors in place, so they are copied on their device.
        return [lr.clone() if isinstance(lr, torch.Tensor) else lr for lr in rates]


# What the engine calls. Before update `k` (counted from 0): `set(k)`, after which `last_lrs()` are its learning rates,
# one for each group. After it, unless it was skipped: `advance()`; then `end_update(k + 1)`, before callbacks hear of
# its end, so that they find the rates of the next update and may change them. After an evaluation, if `follows_metric`:
# `observe(metric)`. `exposed` is the object for callbacks and `trainer.lr_scheduler`.
Schedule = FactorSchedule | UserSchedule


def as_schedule(scheduler: Any, optimizer: Optimizer) -> Schedule:
    """`scheduler` for the engine: torch's and others with its interface are wrapped."""
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
    """The schedule called `name` over a run of `total_steps` updates, `warmup_steps` of them warm-up. Raises
    ConfigError for an unknown name or option, or an invalid value of an option.
    """
    _warn_of_warmup(name, warmup_steps)
    if name in METRIC_DRIVEN:
        return UserSchedule(build_metric_driven(name, optimizer, options or {}), optimizer)
    span = Span(warmup_steps, total_steps, peak_lr(optimizer))
    return FactorSchedule(optimizer, build_factor(name, span, options or {}))


def warmup_of_schedule(name: str, warmup_steps: int, optimizer: Optimizer) -> int:
    """The updates of warm-up, of `warmup_steps`, that are left to the schedule: none if the optimizer has an option
    `warmup_steps` that is set, as both together would warm up twice. If the schedule has no warm-up, groups whose
    option was left at 0 get the number.
    """
    own = optimizer.defaults.get("warmup_steps")
    if own == 0 and name in WITHOUT_WARMUP:
        for group in optimizer.param_groups:
            group["warmup_steps"] = group["warmup_steps"] or warmup_steps
        return 0
    return 0 if own else warmup_steps


def build_factor(name: str, span: Span, options: Mapping[str, Any]) -> Factor:
    """The function of the step for the schedule called `name`."""
    if name not in SHAPES:
        known = f"known schedules: {', '.join(SCHEDULE_NAMES)}{did_you_mean(name, SCHEDULE_NAMES)}"
        raise ConfigError(Problem("lr_scheduler_type", name, known))
    return _construct(name, SHAPES[name], span, options)  # type: ignore[no-any-return]


def build_metric_driven(name: str, optimizer: Optimizer, options: Mapping[str, Any]) -> Any:
    """The scheduler called `name`, which follows a metric."""
    return _construct(name, METRIC_DRIVEN[name], optimizer, options)


def peak_lr(optimizer: Optimizer) -> float:
    """The learning rate of the optimizer, to which floors that are learning rates refer."""
    # Not a group's: `optim_groups` and the decay by layers give groups rates of their own.
    lr = optimizer.defaults.get("lr")
    return float(optimizer.param_groups[0]["lr"] if lr is None else lr)


def _construct(name: str, build: Callable[..., Any], subject: Any, options: Mapping[str, Any]) -> Any:
    _check_options(name, build, options)
    try:
        return build(subject, **options)
    # A ConfigError is a ValueError, and would be wrapped in another one below.
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(Problem("lr_scheduler_kwargs", dict(options), f"{name}: {error}")) from error


def _check_options(name: str, build: Callable[..., Any], options: Mapping[str, Any]) -> None:
    # Without the first, which is the span or the optimizer.
    parameters = list(inspect.signature(build, eval_str=True).parameters.values())[1:]
    known = [p.name for p in parameters]
    takes = f"{name} takes {', '.join(known)}" if known else f"{name} takes no options"
    problems = [
        Problem(f"lr_scheduler_kwargs.{key}", options[key], takes) for key in options if key not in known
    ]
    required = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    problems += [
        Problem(f"lr_scheduler_kwargs.{r}", None, f"{name} needs it") for r in required if r not in options
    ]
    problems += [
        Problem(f"lr_scheduler_kwargs.{p.name}", options[p.name], fix)
        for p in parameters
        if p.name in options and (fix := _why_not(options[p.name], p.annotation, name in SHAPES))
    ]
    refuse(problems)


def _why_not(value: Any, declared: Any, is_shape: bool) -> str:
    """What is wrong with the value of an option; empty if nothing is. A factor is computed long after this, such as
    once a warm-up has ended.
    """
    kinds = set(get_args(declared) or (declared,))
    if bool in kinds:
        return "" if value in (True, False) else "must be true or false"
    if kinds.isdisjoint((int, float)) or (value is None and NoneType in kinds):
        return ""  # a word, which the schedule compares with those that it knows
    several = isinstance(value, list | tuple) and any(get_origin(kind) for kind in kinds)
    try:
        numbers = [
            math.nan if isinstance(item, str) else float(item) for item in (value if several else [value])
        ]
    except (TypeError, ValueError):
        return "must be a number"
    if any(map(math.isnan, numbers)):
        return "must be a number"
    # A negative factor would be a step up the gradient.
    return "must be at least 0" if is_shape and min(numbers) < 0 else ""


def _warn_of_warmup(name: str, warmup_steps: int) -> None:
    if warmup_steps and name in WITHOUT_WARMUP:
        other = ' Use "constant_with_warmup" to have one.' if name == "constant" else ""
        warn_once(
            _log, f"warmup_steps={warmup_steps} has no effect: the {name} schedule has no warm-up.{other}"
        )


def _asks_for_metric(scheduler: Any) -> bool:
    # `ReduceLROnPlateau.step(metrics)` requires it; `step(epoch=None)` of others does not.
    first = next(iter(inspect.signature(scheduler.step).parameters.values()), None)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return first is not None and first.kind not in variadic and first.default is inspect.Parameter.empty


def _other_kind(saved: str, live: str) -> CheckpointError:
    return CheckpointError(
        f"lr_scheduler_type: the schedule of this run is {live}, and the checkpoint's is {saved}: continue with the "
        "schedule that it was saved with (this argument, or the scheduler that the script passes), or start a new run "
        "from the checkpoint's weights"
    )


def _for_groups(value: Any, groups: int) -> Any:
    """The rates of one group for several: earlier versions had one group without weight decay."""
    return value * groups if isinstance(value, list) and len(value) == 1 else value
