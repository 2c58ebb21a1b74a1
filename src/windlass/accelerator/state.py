"""The state of this process as singletons: `PartialState`, `AcceleratorState`, `GradientState`.

All instances of one class share their attributes. The first `PartialState()` joins the process group unless that was
done before; the other two show the settings and the loop of the newest `Accelerator`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar

import torch

from windlass.accelerator.ranks import Ranks
from windlass.accelerator.shares import share_of
from windlass.config.parallel.from_launcher import from_environment
from windlass.config.plugin_words import DistributedType, distributed_type_of
from windlass.core.device import backend_for, choose_device
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.world import world_from_environment
from windlass.dist.gang import Gang, join, leave
from windlass.dist.operations import check_operations

_GROUP_OPTIONS = ("backend", "init_method", "timeout")


class PartialState(Ranks):
    """This process's place among the others, and its device.

    Args:
        cpu: use the CPU even if there is an accelerator.
        options: `backend`, `init_method` and `timeout` of the process group, which
            `InitProcessGroupKwargs.to_kwargs` gives.

    Attributes:
        device: the device of this process.
        distributed_type: the kind of parallelism.
        backend: backend of the process group; None with one process.
        debug: compare shapes over processes before each collective.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    device: torch.device
    distributed_type: DistributedType
    backend: str | None
    debug: bool

    def __init__(self, cpu: bool = False, **options: Any) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            gang, device, debug = _meet(cpu, options)
            self.take_place(gang, device, debug)

    def take_place(self, gang: Gang, device: torch.device, debug: bool) -> None:
        """Show this process as one of `gang`, on `device`."""
        self._gang, self.device, self.debug = gang, device, debug
        self.backend = backend_for(device) if gang.size > 1 else None
        self.distributed_type = distributed_type_of(device.type, gang.size)

    @property
    def initialized(self) -> bool:
        """Whether it is known who we are."""
        return bool(self._shared_state)

    @property
    def default_device(self) -> torch.device:
        """The device this process would choose by itself."""
        return choose_device(local_rank=self.local_process_index)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's part of `inputs`, as `windlass.accelerator.shares.share_of` gives it."""
        yield share_of(inputs, self._gang, apply_padding)

    def destroy_process_group(self, group: Any = None) -> None:
        """Part from the other processes; with `group`, give up that group alone."""
        if group is None:
            leave()
        else:
            torch.distributed.destroy_process_group(group)

    @classmethod
    def _reset_state(cls) -> None:
        """Forget everything; the next instance finds out again."""
        cls._shared_state.clear()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in _known(type(self)):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")
        raise AttributeError(
            f"{type(self).__name__}.{name} is not known: the state was reset; make a new Accelerator or PartialState"
        )

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\nNum processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\nLocal process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


class AcceleratorState(PartialState):
    """`PartialState`, and what the newest `Accelerator` was made with.

    Attributes:
        mixed_precision: "no", "bf16" or "fp16".
        fsdp_plugin, dynamo_plugin, parallelism_config: as they were given; None where they were not.
        deepspeed_plugin: None; that engine is not built.

    Raises:
        ModelError: there was no `Accelerator` yet.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    mixed_precision: str
    fsdp_plugin: Any
    dynamo_plugin: Any
    parallelism_config: Any
    deepspeed_plugin: Any

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            raise ModelError("AcceleratorState is known once there is an Accelerator; make one first")
        self._refuse_changes(mixed_precision, cpu)

    def _refuse_changes(self, mixed_precision: str | None, cpu: bool) -> None:
        fix = "cannot change once there is an Accelerator; give it to the first Accelerator(...)"
        problems = []
        if mixed_precision is not None and str(mixed_precision) != self.mixed_precision:
            problems.append(Problem("mixed_precision", str(mixed_precision), fix))
        if cpu and self.device.type != "cpu":
            problems.append(Problem("cpu", True, fix))
        if problems:
            raise ConfigError(problems)

    @property
    def is_fsdp2(self) -> bool:
        """Whether the model is sharded; Windlass shards with the second version only."""
        return self.distributed_type == DistributedType.FSDP

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Forget the `Accelerator`; with `reset_partial_state`, also who we are."""
        cls._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()


class GradientState:
    """The accumulation state of the newest `Accelerator`.

    Its attributes are those of `windlass.accelerator.accumulation.AccumulationState`; before there is an
    `Accelerator`, those of a loop without accumulation.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.__dict__ = self._shared_state

    @property
    def initialized(self) -> bool:
        """Whether there is a loop to tell of."""
        return bool(self._shared_state)

    def __getattr__(self, name: str) -> Any:
        accumulation = self._shared_state.get("_accumulation")
        if accumulation is not None:
            return getattr(accumulation, name)
        if name in _AT_REST:
            return _AT_REST[name]
        raise AttributeError(f"'GradientState' object has no attribute {name!r}")

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    @classmethod
    def _reset_state(cls) -> None:
        """Forget the loop."""
        cls._shared_state.clear()


_AT_REST: dict[str, Any] = {
    "sync_gradients": True,
    "num_steps": 1,
    "adjust_scheduler": False,
    "sync_with_dataloader": True,
    "end_of_dataloader": False,
    "in_dataloader": False,
    "active_dataloader": None,
    "remainder": -1,
    "plugin_kwargs": {},
}


def remember(
    gang: Gang,
    device: torch.device,
    accumulation: Any,
    *,
    mixed_precision: str = "no",
    sharded: bool = False,
    fsdp_plugin: Any = None,
    dynamo_plugin: Any = None,
    parallelism_config: Any = None,
) -> None:
    """Let the singletons show an `Accelerator` that was just made.

    Args:
        accumulation: the loop's `AccumulationState`.
        sharded: the model is spread over processes instead of replicated.
    """
    partial = PartialState.__new__(PartialState)
    partial.__dict__ = PartialState._shared_state
    partial.take_place(gang, device, PartialState._shared_state.get("debug", False))
    if sharded:
        partial.distributed_type = DistributedType.FSDP
    AcceleratorState._shared_state.update(
        PartialState._shared_state,
        mixed_precision=mixed_precision,
        fsdp_plugin=fsdp_plugin,
        dynamo_plugin=dynamo_plugin,
        parallelism_config=parallelism_config,
        deepspeed_plugin=None,
    )
    GradientState._shared_state["_accumulation"] = accumulation


def _known(kind: type) -> set[str]:
    return {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}


def _meet(cpu: bool, options: dict[str, Any]) -> tuple[Gang, torch.device, bool]:
    """Meet the others, as this call and the launcher say."""
    if unknown := [name for name in options if name not in _GROUP_OPTIONS]:
        fix = f"is no option of a process group: {', '.join(_GROUP_OPTIONS)}"
        raise ConfigError([Problem(f"PartialState.{name}", options[name], fix) for name in unknown])
    said = from_environment(os.environ)
    if said.problems:
        raise ConfigError(said.problems)
    use_cpu = cpu or ("cpu" in said and bool(said["cpu"].value))
    debug = "debug" in said and bool(said["debug"].value)
    check_operations(debug)
    world = world_from_environment()
    device = choose_device(use_cpu, world.local_rank)
    if device.type not in ("cpu", "mps"):
        torch.accelerator.set_device_index(device.index or 0)
    timeout = options.get("timeout") or timedelta(minutes=30)
    gang = join(world, device, timeout.total_seconds(), options.get("backend"), options.get("init_method"))
    return gang, device, debug
