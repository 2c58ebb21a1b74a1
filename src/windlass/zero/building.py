"""Models of transformers that are divided among ranks while they are built (stage 3): no rank has a whole one."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

import torch

from windlass.config.arguments import TrainingArguments
from windlass.config.deepspeed import for_frozen
from windlass.config.parallel.keys import merge
from windlass.config.parallel.parallel_plan import dtype_plans, parallel_problems
from windlass.config.parallel.sources import from_arguments, from_environment
from windlass.config.plan import PrecisionPlan, ZeroPlan
from windlass.core.optional import is_available, is_imported, require
from windlass.core.world import world_from_environment
from windlass.dist.gang import Gang, join
from windlass.zero.library import load_library, ready_library
from windlass.zero.swap_files import lock_files

_INTEGRATION = "transformers.integrations.deepspeed"


class DividedBuilding:
    """What transformers asks whenever it builds a model. Stands in for its `HfDeepSpeedConfig`.

    transformers holds a weak reference to the newest: models are divided for as long as this object lives. If a newer
    one ends before it, transformers refers to this one again.

    Args:
        make_config: returns the configuration for one model, complete, without "auto".
        place: returns the device of this process, and the processes of the job, which it joins.
    """

    _paused = False  # transformers has one setting for a process, and so has this
    # All that live, in the order in which they were made
    _alive: ClassVar[weakref.WeakValueDictionary[int, DividedBuilding]] = weakref.WeakValueDictionary()

    def __init__(
        self, make_config: Callable[[], dict[str, Any]], place: Callable[[], tuple[torch.device, Gang]]
    ) -> None:
        self._make_config, self._place, self._is_ready = make_config, place, False
        self._locks = contextlib.ExitStack()
        DividedBuilding._alive[id(self)] = self
        _integration().set_hf_deepspeed_config(self)
        weakref.finalize(self, DividedBuilding._refer_to_newest).atexit = False

    @classmethod
    def _refer_to_newest(cls) -> None:
        """Called when one has ended. Of several arguments, as `repr(args)` makes some, it need not be the last."""
        alive, integration = list(cls._alive.values()), _integration()
        setting = integration._hf_deepspeed_config_weak_ref
        if alive and setting is not None and setting() is None:
            integration.set_hf_deepspeed_config(alive[-1])

    def is_zero3(self) -> bool:
        """True if models are divided. The first such call makes the process group that DeepSpeed needs."""
        if DividedBuilding._paused:
            return False
        # At the first model, and not with the arguments: scripts that only print them start no process group.
        if not self._is_ready:
            ready_library(*self._place())
            self._is_ready = True
        return True

    @property
    def config(self) -> dict[str, Any]:
        """The configuration for `deepspeed.zero.Init`. Files of the model have a folder of their own, which is locked
        for as long as this object lives.
        """
        config = self._make_config()
        self._locks.enter_context(lock_files(config, world_from_environment().rank))
        return config

    @classmethod
    @contextlib.contextmanager
    def paused(cls) -> Iterator[None]:
        """Context in which models are built whole: one that another run than that of the arguments trains."""
        before, cls._paused = cls._paused, True
        try:
            yield
        finally:
            cls._paused = before

    def __deepcopy__(self, memo: Any) -> DividedBuilding:
        # A copy of the arguments that hold it would be a second owner of the same setting of the process.
        return self

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    """What another process gets: it has a setting of its own."""


class HfDeepSpeedConfig:
    """As that of transformers, one of which it makes: models are divided while they are built, for as long as it lives.

    DeepSpeed then starts with the first model, which may be before any run: it gets the settings of a run here.

    Args:
        config_file_or_dict: a DeepSpeed configuration.
    """

    def __new__(cls, config_file_or_dict: Any) -> Any:
        load_library()
        return _integration().HfDeepSpeedConfig(config_file_or_dict)


def is_deepspeed_zero3_enabled() -> bool:
    """Return True if models of transformers are divided while they are built, at stage 3 of DeepSpeed."""
    return is_imported(_INTEGRATION) and bool(_integration().is_deepspeed_zero3_enabled())


def _integration() -> ModuleType:
    """The module of transformers that keeps the setting of the process."""
    return require(_INTEGRATION, "divide models while they are built")


def of_arguments(args: TrainingArguments) -> DividedBuilding | None:
    """What `TrainingArguments` and the launcher ask for; None if models are built whole. Problems are reported later,
    with all others.
    """
    settings = merge(from_arguments(args), from_environment(os.environ))
    world = world_from_environment()
    if parallel_problems(settings, world):
        return None

    # The arguments hold the result: a strong reference would keep both until the garbage collector runs, and with
    # them the setting of the process.
    alive = weakref.ref(args)

    def place() -> tuple[torch.device, Gang]:
        holder: Any = alive()
        return holder.device, join(world, holder.device, holder.ddp_timeout, holder.ddp_backend)

    precision, dist = dtype_plans(settings)
    return of_plan(precision, dist.zero, place)


def of_plan(
    precision: PrecisionPlan, zero: ZeroPlan | None, place: Callable[[], tuple[torch.device, Gang]]
) -> DividedBuilding | None:
    """As `of_arguments`, of a loop's plans."""
    if zero is None or not zero.divides_new or not is_available("transformers"):
        return None
    return DividedBuilding(functools.partial(for_frozen, zero.config, precision.compute), place)
