"""The state of this process as singletons: `PartialState`, `AcceleratorState`, `GradientState`.

All instances of one class share their attributes. The first `PartialState()` joins the process group if that was not
done before; the other two show the settings and the loop of the newest `Accelerator`.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, ClassVar

import torch

from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.ranks import GRADIENTS, LOOP, PROCESS, LoopState, ProcessState, select_device
from windlass.config.loop_options import GradientAccumulationPlugin
from windlass.config.parallel.sources import from_environment
from windlass.core.errors import ConfigError, ModelError, Problem, refuse
from windlass.core.world import world_from_environment
from windlass.dist.gang import Gang, join
from windlass.dist.operations import check_operations, operations_are_checked

_GROUP_OPTIONS = ("backend", "init_method", "timeout")
_ATTRIBUTES = (
    "device", "distributed_type", "backend", "mixed_precision", "fsdp_plugin", "dynamo_plugin", "parallelism_config",
    "deepspeed_plugin", "deepspeed_plugins",
)  # fmt: skip
_NO_LOOP = AccumulationState(GradientAccumulationPlugin())


class PartialState(ProcessState):
    """The rank and the device of this process; see `ProcessState` for its attributes.

    Args:
        cpu: use the CPU even if there is an accelerator.
        options: `backend`, `init_method` and `timeout` of the process group, as returned by
            `InitProcessGroupKwargs.to_kwargs`.
    """

    _shared_state: ClassVar[dict[str, Any]] = PROCESS

    def __init__(self, cpu: bool = False, **options: Any) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            super().__init__(*_join(cpu, options))

    def __setstate__(self, facts: dict[str, Any]) -> None:
        # In a data worker, which has joined no group, these are the facts of the process that started it.
        _share(facts, PROCESS, self._shared_state)
        self.__dict__ = self._shared_state

    @property
    def initialized(self) -> bool:
        """Return True if there is a state."""
        return bool(self._shared_state)

    @property
    def debug(self) -> bool:
        """True if shapes are compared over processes before each collective. Scripts may set it."""
        return operations_are_checked()

    @debug.setter
    def debug(self, value: bool) -> None:
        check_operations(value)

    def __getattr__(self, name: str) -> Any:
        if name not in _ATTRIBUTES and name != "_all_ranks":
            raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")
        raise AttributeError(
            f"{type(self).__name__}.{name} is not set: the state was reset; create an Accelerator or a PartialState"
        )


class AcceleratorState(PartialState, LoopState):
    """`PartialState`, and the settings of the newest `Accelerator`; see `LoopState` for its attributes.

    Raises:
        ModelError: no `Accelerator` was created. ConfigError: an argument differs from that of the `Accelerator`.
    """

    _shared_state: ClassVar[dict[str, Any]] = LOOP

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            raise ModelError("AcceleratorState needs an Accelerator; create one first")
        fix = "cannot change after an Accelerator was created; pass it to the first Accelerator(...)"
        problems = []
        if mixed_precision is not None and str(mixed_precision) != self.mixed_precision:
            problems.append(Problem("mixed_precision", str(mixed_precision), fix))
        if cpu and self.device.type != "cpu":
            problems.append(Problem("cpu", True, fix))
        refuse(problems)


def is_initialized() -> bool:
    """Return True once there is an `Accelerator`, so that `AcceleratorState()` is known."""
    return GradientState().initialized


class GradientState:
    """The accumulation state of the newest `Accelerator`, or that of a loop without accumulation.

    Its attributes are those of `windlass.accelerator.accumulation.AccumulationState`.
    """

    _shared_state: ClassVar[dict[str, Any]] = GRADIENTS

    def __init__(self) -> None:
        self.__dict__ = self._shared_state

    def __setstate__(self, facts: dict[str, Any]) -> None:
        # As for `PartialState`: a data worker has no loop of its own.
        _share(facts, GRADIENTS)
        self.__dict__ = self._shared_state

    @property
    def initialized(self) -> bool:
        """Return True if an `Accelerator` was created."""
        return bool(self._shared_state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared_state.get("_accumulation") or _NO_LOOP, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Kept here it would hide the loop's own value for good.
        if name == "__dict__":
            super().__setattr__(name, value)
            return
        loop = self._shared_state.get("_accumulation")
        if loop is None:
            raise ModelError(
                f"GradientState.{name} is of a loop, and there is none; create an Accelerator first"
            )
        setattr(loop, name, value)

    def _add_dataloader(self, dataloader: Any) -> None:
        self.begin(dataloader)

    def _remove_dataloader(self, dataloader: Any) -> None:
        self.end(dataloader)

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    @classmethod
    def _reset_state(cls) -> None:
        """Clear the state."""
        cls._shared_state.clear()


def _share(facts: dict[str, Any], *shared: dict[str, Any]) -> None:
    """Make the attributes of a copy those of all instances, if there are none yet."""
    for state in shared:
        if not state:
            state.update(facts)


def _join(cpu: bool, options: dict[str, Any]) -> tuple[Gang, torch.device, bool]:
    """Join the process group with the options of this call and of the launcher."""
    if unknown := [name for name in options if name not in _GROUP_OPTIONS]:
        fix = f"is not an option of a process group: {', '.join(_GROUP_OPTIONS)}"
        raise ConfigError([Problem(f"PartialState.{name}", options[name], fix) for name in unknown])
    settings = from_environment(os.environ)
    if settings.problems:
        raise ConfigError(settings.problems)
    debug = "debug" in settings and bool(settings["debug"].value)
    world = world_from_environment()
    device = select_device(cpu or ("cpu" in settings and bool(settings["cpu"].value)), world)
    timeout = options.get("timeout") or timedelta(minutes=30)
    gang = join(world, device, timeout.total_seconds(), options.get("backend"), options.get("init_method"))
    return gang, device, debug
