"""The settings, device and layout of an accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from windlass.accelerator.loop_settings import LoopSettings
from windlass.accelerator.profiling import profile
from windlass.config.plan import DistPlan
from windlass.config.plugin_words import DistributedType, FP8BackendType, distributed_type_of
from windlass.config.plugins import AutocastKwargs, ParallelismConfig, ProfileKwargs
from windlass.core.errors import ConfigError, Problem
from windlass.dist.gang import Gang
from windlass.dist.mesh import data_mesh
from windlass.precision.autocast import COMPUTE_DTYPES
from windlass.precision.scaler import Scaler


class Setup:
    """The settings, device and layout of one accelerator.

    Args:
        dist: how models are spread over processes.
        scaler: the loss scaler of the loop's updates.

    Attributes:
        device: the device of this process.
    """

    def __init__(
        self,
        settings: LoopSettings,
        gang: Gang,
        device: torch.device,
        dist: Callable[[], DistPlan],
        scaler: Scaler,
    ) -> None:
        self.settings, self.device, self._gang, self._dist = settings, device, gang, dist
        self._scaler = scaler

    @property
    def dist(self) -> DistPlan:
        """How models are spread over processes."""
        return self._dist()

    @property
    def mixed_precision(self) -> str:
        """ "no", "bf16" or "fp16"."""
        compute = self.settings.precision.compute
        return "no" if compute == "fp32" else compute

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The mixed-precision context of this loop, for code outside a prepared model's forward.

        Args:
            autocast_handler: other options than those that the accelerator was made with.
        """
        options = autocast_handler or self.settings.handlers.autocast
        dtype = COMPUTE_DTYPES.get(self.settings.precision.compute)
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(
            self.device.type, dtype=dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
        )

    def profile(self, profile_handler: ProfileKwargs | None = None) -> Any:
        """Context: profile the body; see `windlass.accelerator.profiling.profile`."""
        return profile(profile_handler or self.settings.handlers.profile, self._gang.rank)

    @property
    def distributed_type(self) -> DistributedType:
        """NO for one process, else FSDP for sharded models, or the kind of replication by device."""
        if self.dist.strategy == "fsdp":
            return DistributedType.FSDP
        return distributed_type_of(self.device.type, self._gang.size)

    @property
    def multi_device(self) -> bool:
        """True if several processes have a device of their own, and models are not sharded."""
        return self._gang.size > 1 and self.device.type != "cpu" and not self.is_fsdp2

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded."""
        return self.dist.strategy == "fsdp"

    @property
    def fp8_backend(self) -> FP8BackendType:
        """None: eight-bit training is not built."""
        return FP8BackendType.NO

    @property
    def deepspeed_plugin(self) -> None:
        """None: DeepSpeed is not built."""
        return None

    @property
    def native_amp(self) -> bool:
        """True if forwards run in mixed precision."""
        return self.settings.precision.compute != "fp32"

    @property
    def scaler(self) -> Any:
        """The fp16 loss scaler, or None."""
        return self._scaler if self._scaler.active else None

    @property
    def rng_types(self) -> list[str]:
        """The generators that all processes share at the start of a pass."""
        return list(self.settings.rng_types)

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """True if prepared schedules advance with updates instead of at every call."""
        return self.settings.schedule_unit is not None

    # --- layout -------------------------------------------------------------------------------------------------------

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh of processes over which models are sharded; None if they are not."""
        shard = self.dist.shard
        return data_mesh(self.device, self._gang, shard.replicas) if self.is_fsdp2 and shard else None

    def _layout(self) -> ParallelismConfig:
        if self.settings.parallelism is None:
            fix = "is needed to ask for a rank in it: Accelerator(parallelism_config=ParallelismConfig(...))"
            raise ConfigError(Problem("parallelism_config", None, fix))
        return self.settings.parallelism

    @property
    def data_parallel_rank(self) -> int:
        """Index of the model replica that this process belongs to."""
        return (
            self._gang.rank // self._layout().size("dp_shard") if self._layout().dp_replicate_enabled else 0
        )

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this process's shard in its replica."""
        return self._gang.rank % self._layout().size("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """0: tensors are not split further."""
        return self._layout().size("tp") - 1

    @property
    def context_parallel_rank(self) -> int:
        """0: sequences are not split."""
        return self._layout().size("cp") - 1

    @property
    def pipeline_parallel_rank(self) -> int:
        """Refused: there is no pipeline."""
        raise ConfigError(Problem("pipeline_parallel_rank", None, "pipelines are not built"))
