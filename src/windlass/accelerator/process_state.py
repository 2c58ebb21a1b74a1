"""The state of a process and of its loop, and the process-wide record of the newest `Accelerator`."""

from __future__ import annotations

from typing import Any

import torch

from windlass.accelerator.ranks import Ranks
from windlass.accelerator.setup import Setup
from windlass.config.enums import DistributedType, distributed_type_of
from windlass.core.device import backend_for, choose_device
from windlass.dist.gang import Gang, leave
from windlass.dist.operations import check_operations, operations_are_checked

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
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\nNum processes: {self.num_processes}\n"
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
