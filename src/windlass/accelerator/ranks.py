"""The ranks of this process, its state and its device, and the process-wide record of the newest `Accelerator`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from windlass.accelerator.setup import Setup
from windlass.config.enums import DistributedType, distributed_type_of
from windlass.core.device import backend_for, choose_device, make_current
from windlass.core.errors import DataError
from windlass.core.output import STDOUT
from windlass.core.trees import mapping_like
from windlass.core.watched_numbers import process_count
from windlass.core.world import World
from windlass.data.dealt_rows import share
from windlass.dist.gang import Gang, leave
from windlass.dist.operations import check_operations, operations_are_checked

Function = Callable[..., Any]
# Scripts let one process wait in one of these calls, and the others in another.
_WAIT = "wait"


def select_device(use_cpu: bool, world: World) -> torch.device:
    """Choose this process's device, and make it the current one."""
    device = choose_device(use_cpu, world.local_rank)
    make_current(device)
    return device


class Ranks:
    """The rank of this process: the base of `Accelerator` and of the state singletons."""

    _all_ranks: Gang

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return self._all_ranks.rank

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its machine."""
        return self._all_ranks.world.local_rank

    @property
    def is_main_process(self) -> bool:
        """True on the first process of the job."""
        return self._all_ranks.world.is_main

    @property
    def is_local_main_process(self) -> bool:
        """True on the first process of each machine."""
        return self._all_ranks.world.is_local_main

    @property
    def should_save_model(self) -> bool:
        """True on the process that writes the files of `save_model`, which is collective."""
        return self.is_main_process

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return process_count(self._all_ranks.size)

    @property
    def is_last_process(self) -> bool:
        """True on the process of the highest rank."""
        return self._all_ranks.rank == self._all_ranks.size - 1

    @property
    def use_distributed(self) -> bool:
        """True if there is more than one process."""
        return self._all_ranks.size > 1

    def wait_for_everyone(self) -> None:
        """Return once every process has called this."""
        self._all_ranks.barrier(_WAIT)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Context: the main process runs the body before the other processes."""
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Context: the main process of each machine runs the body before the others on that machine."""
        return self._first(self.is_local_main_process)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's part of `inputs` (a list, tuple, tensor, or a dict of those), in order. `apply_padding`:
        repeat the last element so that all processes get the same number.
        """
        yield share_of(inputs, self._all_ranks, apply_padding)

    @contextlib.contextmanager
    def _first(self, mine: bool) -> Iterator[None]:
        if not mine:
            self._all_ranks.barrier(_WAIT)
        try:
            yield
        finally:  # the others wait for this process, whatever was raised
            if mine:
                self._all_ranks.barrier(_WAIT)

    # --- decorators ---------------------------------------------------------------------------------------------------

    def on_main_process(self, function: Function) -> Function:
        """Decorator: run `function` on the main process only; it returns None elsewhere."""
        return self._only(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Function) -> Function:
        """Decorator: run `function` on the main process of each machine only; it returns None elsewhere."""
        return self._only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Function) -> Function:
        """Decorator: run `function` on the last process only; it returns None elsewhere."""
        return self._only(lambda: self.is_last_process, function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """Decorator: run `function` on the process of rank `process_index` only (None: on no process); it returns None
        elsewhere. Without a function, return the decorator.
        """
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return self._only(lambda: self.process_index == process_index, function)

    def on_local_process(
        self, function: Function | None = None, local_process_index: int | None = None
    ) -> Function:
        """Decorator: run `function` on the process of rank `local_process_index` of each machine (None: on no process);
        it returns None elsewhere. Without a function, return the decorator.
        """
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return self._only(lambda: self.local_process_index == local_process_index, function)

    def _only(self, here: Callable[[], bool], function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if here() else None

        return run

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine."""
        if self.is_local_main_process:
            print(*args, **{"file": STDOUT, **kwargs})


def share_of(inputs: Any, all_ranks: Gang, apply_padding: bool = False) -> Any:
    """This process's part of `inputs`, which are consecutive items. The first processes may get one item more. Raises
    DataError for a dict with several lengths, or an unsupported type.

    Args:
        inputs: a list, a tuple, a tensor (along its first axis), a dataset with `select`, or a dict of those with equal
            lengths.
        apply_padding: repeat the last item so that all processes get the same number, e.g. to gather the results.
    """
    if all_ranks.size == 1:
        return inputs
    length = _length(inputs)
    places = range(*share(length, all_ranks.size, all_ranks.rank))
    missing = -(-length // all_ranks.size) - len(places) if apply_padding else 0
    return _take(inputs, places, missing)


def _length(inputs: Any) -> int:
    if not isinstance(inputs, Mapping):
        try:
            return len(inputs)
        except TypeError:
            raise _not_splittable(inputs) from None
    lengths = {key: _length(value) for key, value in inputs.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(
            f"the values of a dict must have one length to be split between processes; they have {lengths}"
        )
    return next(iter(lengths.values()))


def _take(inputs: Any, places: range, missing: int) -> Any:
    if isinstance(inputs, Mapping):
        return mapping_like(inputs, {key: _take(value, places, missing) for key, value in inputs.items()})
    if isinstance(inputs, Tensor):
        rows = inputs[places.start : places.stop]
        return torch.cat([rows, *[inputs[-1:]] * missing]) if missing else rows
    if isinstance(inputs, list | tuple):
        items: Any = inputs[places.start : places.stop]
        return items + type(items)([inputs[-1]]) * missing if missing else items
    if hasattr(inputs, "select"):
        return inputs.select([*places, *[len(inputs) - 1] * missing])
    raise _not_splittable(inputs)


def _not_splittable(inputs: Any) -> DataError:
    return DataError(
        f"a {type(inputs).__name__} cannot be split between processes; pass a list, a tuple, a tensor, a dataset or "
        "a dict of those"
    )


# The attributes of the newest `Accelerator`'s state, which the singletons of `windlass.state` share.
PROCESS: dict[str, Any] = {}
LOOP: dict[str, Any] = {}
GRADIENTS: dict[str, Any] = {}


class ProcessState(Ranks):
    """The rank and the device of this process.

    Attributes:
        device: the device of this process.
        distributed_type: the kind of parallelism.
        backend: backend of the process group; None with one process.
        debug: compare shapes over processes before each collective.
    """

    def __init__(
        self, all_ranks: Gang, device: torch.device, debug: bool = False, sharded: bool = False
    ) -> None:
        self._all_ranks, self.device, self.debug = all_ranks, device, debug
        self.backend = backend_for(device) if all_ranks.size > 1 else None
        self.distributed_type = (
            DistributedType.FSDP if sharded else distributed_type_of(device.type, all_ranks.size)
        )

    @property
    def default_device(self) -> torch.device:
        """The device that this process uses by default."""
        return choose_device(local_rank=self.local_process_index)

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the process group of the job, or destroy `group`."""
        if group is None:
            leave()
        else:
            torch.distributed.destroy_process_group(group)

    @classmethod
    def _reset_state(cls) -> None:
        """Clear the published state of the process; the next `PartialState` determines it again."""
        PROCESS.clear()
        check_operations(False)

    def __repr__(self) -> str:
        # The lines that scripts log at their start, as accelerate writes them.
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: DistributedType.{self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\nLocal process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


class LoopState(ProcessState):
    """`ProcessState`, and the settings of an `Accelerator`.

    Attributes:
        mixed_precision: "no", "bf16", "fp16" or "fp8".
        fsdp_plugin: how models are sharded, or None.
        dynamo_plugin, parallelism_config: as given to the `Accelerator`, or None.
        megatron_lm_plugin, torch_tp_plugin: None; they are not supported.
    """

    megatron_lm_plugin = torch_tp_plugin = None

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.all_ranks, setup.device, operations_are_checked(), setup.is_fsdp2)
        self._engines, settings = setup.engines, setup.settings
        if self._engines.plan is not None:
            self.distributed_type = DistributedType.DEEPSPEED
        self.mixed_precision, self.fsdp_plugin = settings.precision.word, setup.fsdp_plugin
        self.dynamo_plugin, self.parallelism_config = settings.dynamo, settings.parallelism

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected plugin, every field filled in; None without DeepSpeed."""
        return self._engines.plugin

    @property
    def deepspeed_plugins(self) -> dict[str, Any] | None:
        """All plugins by name; None if the script named none."""
        return self._engines.plugins

    def get_deepspeed_plugin(self, name: str) -> Any:
        """The plugin of this name. Raises ConfigError if there is none."""
        return self._engines.get(name)

    def select_deepspeed_plugin(self, name: str) -> None:
        """Use the plugin of this name in the next `prepare`. Raises ConfigError if there is none."""
        self._engines.select(name)

    @property
    def is_fsdp2(self) -> bool:
        """Return True if models are sharded. Windlass shards with FSDP2 only."""
        return self.distributed_type == DistributedType.FSDP

    def __repr__(self) -> str:
        engine = (
            "" if self.deepspeed_plugin is None else f"ds_config: {self.deepspeed_plugin.deepspeed_config}\n"
        )
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n{engine}"

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Clear the published settings; with `reset_partial_state`, the state of the process too."""
        LOOP.clear()
        if reset_partial_state:
            ProcessState._reset_state()


def publish(state: LoopState, accumulation: Any) -> None:
    """Make these the state and the `AccumulationState` that the singletons show."""
    PROCESS.update(vars(state))
    LOOP.update(vars(state))
    GRADIENTS["_accumulation"] = accumulation
