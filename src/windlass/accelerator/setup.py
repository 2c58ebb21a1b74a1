"""The settings, device and layout of an accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from windlass.accelerator.engine_choice import EngineChoice
from windlass.accelerator.loop_settings import LoopSettings
from windlass.config.loop_options import AutocastKwargs
from windlass.config.plan import DistPlan, ZeroPlan
from windlass.core.errors import ConfigError, Problem
from windlass.core.mesh import Axis, Mesh
from windlass.core.outside import find_outside
from windlass.dist.device_mesh import loss_device_mesh
from windlass.dist.gang import Gang
from windlass.precision.autocast import COMPUTE_DTYPES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Setup:
    """The settings, device and layout of one accelerator.

    Args:
        dist: returns how models are spread over processes.

    Attributes:
        engines: the configurations of DeepSpeed.
    """

    def __init__(
        self,
        settings: LoopSettings,
        all_ranks: Gang,
        device: torch.device,
        dist: Callable[[], DistPlan],
    ) -> None:
        self.settings, self.device, self.all_ranks, self._dist = settings, device, all_ranks, dist
        self.engines = EngineChoice(self._zero_plans, settings.precision.compute)

    def _zero_plans(self) -> dict[str, ZeroPlan]:
        only = self.dist.zero
        return self.settings.engines or ({} if only is None else {"": only})

    @property
    def dist(self) -> DistPlan:
        """How models are spread over processes."""
        return self._dist()

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The mixed-precision context of this loop; see `Accelerator.autocast`."""
        options = autocast_handler or self.settings.handlers.autocast
        dtype = COMPUTE_DTYPES.get(self.settings.precision.compute)
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(
            self.device.type, dtype=dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
        )

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded."""
        return self.dist.strategy == "fsdp"

    @property
    def fsdp_plugin(self) -> Any:
        """How models are sharded: the plugin of the script, or one with the same settings; None if not sharded."""
        shard = self.dist.shard if self.is_fsdp2 else None
        if self.settings.fsdp is not None or shard is None:
            return self.settings.fsdp
        known = find_outside("plugins of FSDP")
        return None if known is None else known.fsdp_plugin_of(shard)

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The mesh of processes over which models are sharded; None if they are not."""
        shard = self.dist.shard if self.is_fsdp2 else None
        if shard is None:
            return None
        return loss_device_mesh(self.all_ranks.mesh.with_replicas(shard.replicas), self.device)

    def _rank_in(self, axis: Axis) -> int:
        if self.settings.parallelism is None:
            fix = "is needed to ask for a rank in it: Accelerator(parallelism_config=ParallelismConfig(...))"
            raise ConfigError(Problem("parallelism_config", None, fix))
        mesh: Mesh = self.settings.parallelism.mesh
        return mesh.index(axis, self.all_ranks.world.rank)

    @property
    def data_parallel_rank(self) -> int:
        """Index of the model replica that this process belongs to."""
        return self._rank_in("replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this process's shard in its replica."""
        return self._rank_in("shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """0: tensors are not split further."""
        return self._rank_in("tensor")

    @property
    def context_parallel_rank(self) -> int:
        """Index of the part of each sequence that this process computes."""
        return self._rank_in("context")
