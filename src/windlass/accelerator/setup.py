"""The settings, device and layout of an accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from windlass.accelerator.engine_choice import EngineChoice
from windlass.accelerator.loop_settings import LoopSettings
from windlass.accelerator.profiling import profile
from windlass.config.plan import DistPlan, ZeroPlan
from windlass.config.plugin_fsdp import FullyShardedDataParallelPlugin, fsdp_plugin_of
from windlass.config.plugin_parallelism import ParallelismConfig
from windlass.config.plugin_words import FP8BackendType
from windlass.config.plugins import AORecipeKwargs, AutocastKwargs, ProfileKwargs
from windlass.core.errors import ConfigError, Problem
from windlass.dist.gang import Gang
from windlass.dist.mesh import data_mesh
from windlass.precision.autocast import COMPUTE_DTYPES
from windlass.precision.scaler import Scaler


class Setup:
    """The settings, device and layout of one accelerator.

    Args:
        dist: returns how models are spread over processes.
        scaler: the loss scaler of the loop's updates.

    Attributes:
        engines: the configurations of DeepSpeed.
    """

    def __init__(
        self,
        settings: LoopSettings,
        gang: Gang,
        device: torch.device,
        dist: Callable[[], DistPlan],
        scaler: Scaler,
    ) -> None:
        self.settings, self.device, self.gang, self._dist = settings, device, gang, dist
        self._scaler = scaler
        self.engines = EngineChoice(self._zero_plans, settings.precision.compute)

    def _zero_plans(self) -> dict[str, ZeroPlan]:
        only = self.dist.zero
        return self.settings.engines or ({} if only is None else {"": only})

    @property
    def dist(self) -> DistPlan:
        """How models are spread over processes."""
        return self._dist()

    @property
    def mixed_precision(self) -> str:
        """ "no", "bf16", "fp16" or "fp8"."""
        return self.settings.precision.word

    @property
    def fp8_enabled(self) -> bool:
        """True if linear layers multiply in float8."""
        return self.settings.precision.float8 is not None

    @property
    def fp8_backend(self) -> FP8BackendType:
        """AO (torchao) if linear layers multiply in float8, else NO."""
        return FP8BackendType.AO if self.fp8_enabled else FP8BackendType.NO

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """The options of float8; None without it."""
        return (self.settings.handlers.float8 or AORecipeKwargs()) if self.fp8_enabled else None

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The mixed-precision context of this loop, for code outside a prepared model's forward.

        Args:
            autocast_handler: replaces the options of the accelerator.
        """
        options = autocast_handler or self.settings.handlers.autocast
        dtype = COMPUTE_DTYPES.get(self.settings.precision.compute)
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(
            self.device.type, dtype=dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
        )

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Context: profile the body. With a `schedule_option`, the body calls the profiler's `step()` after each step.

        If `output_trace_dir` is set, each process writes a Chrome trace to `profile_<rank>.json` there; with a schedule
        that repeats, the trace of its last whole cycle. Raises ConfigError for an activity that this machine does not
        support, or unknown options of the schedule.
        """
        return profile(profile_handler or self.settings.handlers.profile, self.gang.rank)

    @property
    def multi_device(self) -> bool:
        """True if several processes have a device of their own, and models are not sharded."""
        return self.gang.size > 1 and self.device.type != "cpu" and not self.is_fsdp2

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded."""
        return self.dist.strategy == "fsdp"

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """How models are sharded: the plugin of the script, or one that says the same; None if they are not."""
        shard = self.dist.shard if self.is_fsdp2 else None
        return self.settings.fsdp or (fsdp_plugin_of(shard) if shard else None)

    @property
    def native_amp(self) -> bool:
        """True if forwards run in mixed precision."""
        return self.settings.precision.compute != "fp32"

    @property
    def scaler(self) -> Any:
        """The fp16 loss scaler, or None."""
        return self._scaler if self._scaler.active else None

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """True if prepared schedules advance with updates instead of at every call."""
        return self.settings.schedule_unit is not None

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh of processes over which models are sharded; None if they are not."""
        shard = self.dist.shard
        return data_mesh(self.device, self.gang, shard.replicas) if self.is_fsdp2 and shard else None

    def _layout(self) -> ParallelismConfig:
        if self.settings.parallelism is None:
            fix = "is needed to ask for a rank in it: Accelerator(parallelism_config=ParallelismConfig(...))"
            raise ConfigError(Problem("parallelism_config", None, fix))
        return self.settings.parallelism

    @property
    def data_parallel_rank(self) -> int:
        """Index of the model replica that this process belongs to."""
        layout = self._layout()
        return self.gang.rank // layout.size("dp_shard") if layout.dp_replicate_enabled else 0

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this process's shard in its replica."""
        return self.gang.rank % self._layout().size("dp_shard")

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
