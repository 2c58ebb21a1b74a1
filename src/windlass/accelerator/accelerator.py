"""`Accelerator`: a training loop that the user owns, on the executors and strategies that the Trainer uses."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from typing import Any

import torch

from windlass.accelerator.base import meet
from windlass.accelerator.exchanging import Exchanging
from windlass.accelerator.memory import clear_device_cache
from windlass.accelerator.preparing import Preparing
from windlass.accelerator.profiling import profile
from windlass.accelerator.ranks import Ranks
from windlass.accelerator.rng import synchronize_rng_states
from windlass.accelerator.saving import Saving
from windlass.accelerator.settings import Handlers, Request, Settings, resolve_settings
from windlass.accelerator.state import AcceleratorState, remember
from windlass.accelerator.terms import TermsOfUpdate
from windlass.accelerator.tracking import TrackingMixin
from windlass.callbacks.tracker_registry import filter_trackers
from windlass.config.plan import DistPlan, PrecisionPlan
from windlass.config.plugins import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    KwargsHandler,
    ParallelismConfig,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    TorchTensorParallelPlugin,
)
from windlass.core.world import world_from_environment
from windlass.dist.gang import Gang, leave
from windlass.dist.operations import check_operations


class Accelerator(Ranks, Exchanging, Preparing, Saving, TrackingMixin):
    """Where a loop runs, and what makes it run there.

    The same script trains in one process, in many, and on sharded models: build everything as for one process, pass it
    through `prepare`, and replace `loss.backward()` by `accelerator.backward(loss)`. What the launcher or a
    configuration file says counts as if it were said here; contradictions are errors that name both.

    Args:
        device_placement: move models and batches to this process's device.
        split_batches: a loader's batch size is that of all processes together, instead of each one's.
        mixed_precision: "no", "fp16" or "bf16".
        gradient_accumulation_steps: micro-batches of one update (see `accumulate`).
        cpu: leave accelerators alone.
        dataloader_config: how loaders are dealt to processes.
        deepspeed_plugin, deepspeed_plugins, megatron_lm_plugin, torch_tp_plugin: refused; those engines are not built.
        fsdp_plugin: shard models over processes.
        rng_types: generators that all processes share at the beginning of a pass ("generator", "torch", "cuda").
        log_with: experiment trackers, by name or as objects.
        project_dir, project_config: where checkpoints and logs lie.
        gradient_accumulation_plugin: options of accumulation beside the number of steps.
        step_scheduler_with_optimizer: False: prepared schedules advance at every call of their `step`.
        kwargs_handlers: options of replication, of the fp16 scaler, of autocast, of the process group, of the profiler.
        dynamo_backend, dynamo_plugin: compile models.
        parallelism_config: sizes of the axes of the process mesh.
        scheduler_unit: what prepared schedules count: "loader_batch", batches of the loader before it was prepared, as
            scripts rely on; or "optimizer_step", updates that were applied, on any number of processes.

    Attributes:
        device: the device of this process.
        mixed_precision: "no", "bf16" or "fp16".
        gradient_state: where the loop stands in its loader and its update.
        log_with, trackers: what was asked for, and what `init_trackers` opened.
        logging_dir: the folder for trackers that write files.

    Raises:
        ConfigError: everything that is wrong or cannot be honoured, all at once.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        scheduler_unit: str = "loader_batch",
    ) -> None:
        request = Request(
            device_placement, split_batches, mixed_precision, gradient_accumulation_steps, cpu, dataloader_config,
            deepspeed_plugin, fsdp_plugin, torch_tp_plugin, megatron_lm_plugin, rng_types, project_dir, project_config,
            gradient_accumulation_plugin, step_scheduler_with_optimizer, kwargs_handlers, dynamo_backend,
            dynamo_plugin, deepspeed_plugins, parallelism_config, scheduler_unit,
        )  # fmt: skip
        world = world_from_environment()
        settings = resolve_settings(request, world)
        # Before the other processes are met: a tracker that cannot be had must not leave them waiting.
        trackers = filter_trackers(log_with, settings.project.logging_dir)
        gang, device = meet(settings, world)
        self._begin(gang, device, settings, of_run=False)
        self._init_loop()
        self.log_with = trackers
        check_operations(settings.debug)
        if shared := [kind for kind in settings.rng_types if kind != "generator"]:
            self.gradient_state.at_begin = functools.partial(synchronize_rng_states, shared)
        remember(
            gang,
            device,
            self.gradient_state,
            mixed_precision=self.mixed_precision,
            sharded=self.is_fsdp2,
            fsdp_plugin=fsdp_plugin,
            dynamo_plugin=dynamo_plugin,
            parallelism_config=parallelism_config,
        )

    @classmethod
    def of_run(
        cls, gang: Gang, device: torch.device, precision: PrecisionPlan, accumulation: int = 1
    ) -> Accelerator:
        """The accelerator of a Trainer's run, which has met its world and resolved its settings already."""
        settings = Settings(
            dist=DistPlan(),
            precision=precision,
            accumulation=GradientAccumulationPlugin(num_steps=accumulation),
            loader=DataLoaderConfiguration(use_stateful_dataloader=True),
            project=ProjectConfiguration(),
            handlers=Handlers(),
        )
        accelerator = cls.__new__(cls)
        accelerator._begin(gang, device, settings, of_run=True)
        accelerator._init_loop()
        return accelerator

    def _init_loop(self) -> None:
        self._terms = TermsOfUpdate(self._prepared, self._gang, self.device)
        self._guards, self._save_hooks, self._load_hooks = [], OrderedDict(), OrderedDict()
        self.log_with, self.trackers = [], []
        self.logging_dir = self._settings.project.logging_dir

    def __deepcopy__(self, memo: Any) -> Accelerator:
        # A copy of a script's configuration must not come with processes and models of its own.
        return self

    @property
    def state(self) -> AcceleratorState:
        """The state of this process, as scripts ask it."""
        return AcceleratorState()

    def profile(self, profile_handler: ProfileKwargs | None = None) -> Any:
        """Context: profile the body; see `windlass.accelerator.profiling.profile`."""
        return profile(profile_handler or self._settings.handlers.profile, self.process_index)

    # --- the end ------------------------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> Any:
        """Forget everything that was prepared, and hand memory back to the device.

        Returns:
            None in the place of each object: assign them, so that nothing else holds what they were.
        """
        if not self._of_run:
            for lift in self._guards:
                lift()
            self._guards = []
            self._prepared.let_go()
            self.gradient_state.reset()
        # A run of the Trainer asks for this between updates, where collecting garbage would cost more than it gives.
        clear_device_cache(garbage_collection=not self._of_run)
        return [None] * len(objects)

    def clear(self, *objects: Any) -> Any:
        """`free_memory`, under its other name."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """Close the trackers, and part from the other processes."""
        self.finish_trackers()
        leave()
