"""`Accelerator`: run a training loop of your own on the executors and strategies of the Trainer."""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.engine import LoopEngine
from windlass.accelerator.exchange import Exchange
from windlass.accelerator.loop_saver import Saver
from windlass.accelerator.loop_settings import Handlers, LoopSettings, resolve_settings
from windlass.accelerator.loop_trackers import Trackers
from windlass.accelerator.model_files import ModelFiles
from windlass.accelerator.own_loop import OwnLoop
from windlass.accelerator.prepared import Prepared
from windlass.accelerator.preparing import Preparer
from windlass.accelerator.process_state import PROCESS, LoopState, publish
from windlass.accelerator.ranks import Ranks, select_device
from windlass.accelerator.setup import Setup
from windlass.accelerator.shared_rng import share_rng_states
from windlass.accelerator.stepping import Stepping, trigger_sync_in_backward
from windlass.callbacks.tracker_registry import filter_trackers
from windlass.config.plan import DistPlan, PrecisionPlan
from windlass.config.plugin_base import KwargsHandler
from windlass.config.plugin_fsdp import FullyShardedDataParallelPlugin
from windlass.config.plugin_parallelism import ParallelismConfig, TorchTensorParallelPlugin
from windlass.config.plugins import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from windlass.core.delegate import constant, method_of, property_of, value_of, variable_of
from windlass.core.world import World, world_from_environment
from windlass.dist.gang import Gang, join, leave
from windlass.dist.operations import check_operations, operations_are_checked
from windlass.precision.check import apply_tf32, check_precision
from windlass.precision.scaler import LossScaler, Scaler, UnitScaler


class Accelerator(Ranks):
    """Prepare and run a training loop on one device or many.

    The same script trains in one process, in several, and on sharded models: build everything as for one process, pass
    it through `prepare`, and replace `loss.backward()` by `accelerator.backward(loss)`. Settings of the launcher or of
    a configuration file have the same effect as arguments; contradictions are errors that name both.

    Args:
        device_placement: move models and batches to this process's device.
        split_batches: the batch size of a loader is that of all processes together instead of each process.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        gradient_accumulation_steps: micro-batches of one update (see `accumulate`).
        cpu: train on the CPU even if there is an accelerator.
        dataloader_config: options of prepared loaders.
        deepspeed_plugin: divide models among processes by DeepSpeed's ZeRO.
        deepspeed_plugins: several such plugins by name; `state.select_deepspeed_plugin(name)` chooses the one that the
            next `prepare` uses, the first one being chosen. One of the models is trained.
        megatron_lm_plugin, torch_tp_plugin: refused; they are not supported.
        fsdp_plugin: shard models over processes.
        rng_types: generators to make equal on all processes at the start of a pass ("generator", "torch", "cuda").
        log_with: experiment trackers, by name or as objects.
        project_dir, project_config: folders of checkpoints and logs.
        gradient_accumulation_plugin: further options of accumulation.
        step_scheduler_with_optimizer: False advances prepared schedules at every call of their `step`.
        kwargs_handlers: options of replication, of the fp16 scaler, of autocast, of the process group, of the profiler.
        dynamo_backend, dynamo_plugin: compile models.
        parallelism_config: sizes of the axes of the process mesh.
        scheduler_unit: the unit that prepared schedules count: "loader_batch" for batches of the unprepared loader, as
            in accelerate; or "optimizer_step" for updates that were applied, on any number of processes.

    Attributes:
        device: the device of this process.
        mixed_precision: "no", "bf16", "fp16" or "fp8".
        gradient_state: the accumulation state of the loop.
        log_with, trackers: the requested trackers, and those that `init_trackers` opened.
        logging_dir: the folder for trackers that write files.

    Raises:
        ConfigError: everything that is wrong or not supported, all at once.
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
        # Must come first: the local variables are the arguments.
        given = SimpleNamespace(**{name: value for name, value in locals().items() if name != "self"})
        world = world_from_environment()
        settings = resolve_settings(given, world)
        # Before joining the process group, so that other processes do not wait for one that lacks a tracker.
        trackers = filter_trackers(log_with, settings.project.logging_dir)
        gang, device = meet(settings, world)
        self._assemble(
            gang, device, settings, _scaler(settings, device), functools.partial(OwnLoop, settings.dist, gang)
        )
        self._trackers = Trackers(trackers, settings.project.logging_dir)
        check_operations(settings.debug or operations_are_checked())
        if shared := [kind for kind in settings.rng_types if kind != "generator"]:
            self.gradient_state.at_begin = functools.partial(share_rng_states, shared, device)
        self._preparer.divide_new_models()
        publish(self.state, self.gradient_state)

    @classmethod
    def of_run(
        cls,
        gang: Gang,
        device: torch.device,
        precision: PrecisionPlan,
        accumulation: GradientAccumulationPlugin,
        loader: DataLoaderConfiguration,
        engine: LoopEngine,
    ) -> Accelerator:
        """The accelerator of a Trainer, which has already joined the process group and resolved its settings.

        Args:
            accumulation, loader: of what scripts prepare, or accumulate, beside the Trainer's own model and data.
        """
        settings = LoopSettings(
            dist=DistPlan(),
            precision=precision,
            accumulation=accumulation,
            loader=loader,
            project=ProjectConfiguration(),
            handlers=Handlers(),
        )
        accelerator = cls.__new__(cls)
        # Losses of other models than the trained one are not scaled by the run.
        accelerator._assemble(gang, device, settings, UnitScaler(device), lambda *_: engine)
        accelerator._trackers = Trackers([], None)
        publish(accelerator.state, accelerator.gradient_state)
        return accelerator

    @classmethod
    def _in_worker(cls, gang: Gang, device: torch.device, settings: LoopSettings) -> Accelerator:
        """An accelerator with these settings and nothing prepared, for a process that does not train."""
        accelerator = cls.__new__(cls)
        accelerator._assemble(
            gang,
            device,
            settings,
            UnitScaler(torch.device("cpu")),
            functools.partial(OwnLoop, settings.dist, gang),
        )
        accelerator._trackers = Trackers([], None)
        if not PROCESS:
            publish(accelerator.state, accelerator.gradient_state)
        return accelerator

    def __reduce__(self) -> Any:
        # A dataset may hold its accelerator: a data worker asks it for ranks, the device and settings.
        settings = replace(self._setup.settings, dist=self._setup.dist)
        return type(self)._in_worker, (self._gang, self.device, settings)

    def _assemble(
        self,
        gang: Gang,
        device: torch.device,
        settings: LoopSettings,
        scaler: Scaler,
        engine: Callable[[AccumulationState, Prepared], LoopEngine],
    ) -> None:
        stride = 1 if settings.loader.split_batches else gang.size
        accumulation = AccumulationState(settings.accumulation, stride)
        prepared = Prepared(scaler, device, gang.size, lambda: self._engine.strategies)
        self._gang, self.gradient_state, self._prepared = gang, accumulation, prepared
        self._engine = engine(accumulation, prepared)
        self._setup = Setup(settings, gang, device, lambda: self._engine.dist, scaler)
        self._exchange = Exchange(gang, accumulation)
        self._stepping = Stepping(gang, accumulation, prepared, self._engine, settings.loader)
        self._preparer = Preparer(self._setup, accumulation, prepared, self._engine)
        self._saver = Saver(self._setup, accumulation, prepared, self._engine)
        self._files = ModelFiles(gang, prepared)

    def __deepcopy__(self, memo: Any) -> Accelerator:
        # A copy of a script's configuration must refer to the same processes and models.
        return self

    @property
    def state(self) -> LoopState:
        """The state of this process, and the settings of this accelerator."""
        settings = self._setup.settings
        return LoopState(
            self._gang,
            self.device,
            operations_are_checked(),
            self.is_fsdp2,
            self.mixed_precision,
            self._setup.fsdp_plugin,
            settings.dynamo,
            settings.parallelism,
            self._setup.engines,
        )

    # The ignores below: mypy assumes that a method with free keywords may be called with `self=`.

    # --- setup --------------------------------------------------------------------------------------------------------

    device = value_of("_setup.device", "The device of this process.")
    mixed_precision = property_of("_setup", Setup.mixed_precision)
    distributed_type = value_of("state.distributed_type", "The kind of parallelism.")
    multi_device = property_of("_setup", Setup.multi_device)
    is_fsdp2 = property_of("_setup", Setup.is_fsdp2)
    is_composable_parallelism_enabled = property_of("_setup", Setup.is_fsdp2)
    fp8_backend = property_of("_setup", Setup.fp8_backend)
    fp8_enabled = has_fp8_handler = property_of("_setup", Setup.fp8_enabled)
    ao_recipe_handler = property_of("_setup", Setup.ao_recipe_handler)
    delayed_fp8_autocast = constant(False, "False: layers are converted when their model is prepared.")
    fp8_recipe_handler = te_recipe_handler = constant(None, "None: torchao is the only backend.")
    msamp_recipe_handler = constant(None, "None: torchao is the only backend.")
    ddp_handler = value_of(
        "_setup.settings.handlers.ddp", "The given `DistributedDataParallelKwargs`, or None."
    )
    scaler_handler = value_of("_setup.settings.handlers.scaler", "Options of the fp16 scaler.")
    init_handler = value_of("_setup.settings.handlers.init", "The given `InitProcessGroupKwargs`, or None.")
    autocast_handler = value_of("_setup.settings.handlers.autocast", "Options of `autocast`.")
    profile_handler = value_of("_setup.settings.handlers.profile", "Options of `profile`.")
    deepspeed_engine_wrapped = deepspeed_config = constant(
        None, "None: the engine is inside the model that `prepare` returns."
    )
    deepspeed_plugin = value_of(
        "_setup.engines.plugin", "The selected plugin, every field filled in, or None."
    )
    native_amp = property_of("_setup", Setup.native_amp)
    scaler = property_of("_setup", Setup.scaler)
    device_placement = value_of(
        "_setup.settings.device_placement", "True if models and batches are moved to `device`."
    )
    step_scheduler_with_optimizer = property_of("_setup", Setup.step_scheduler_with_optimizer)
    rng_types = value_of(
        "_setup.settings.rng_types", "Generators that are made equal on all processes at the start of a pass."
    )

    dataloader_config = value_of("_setup.settings.loader")
    split_batches = value_of(
        "_setup.settings.loader.split_batches", "True if a batch is that of all processes together."
    )
    dispatch_batches = value_of(
        "_setup.settings.loader.dispatch_batches", "True if only the main process reads."
    )
    # Has no effect: every process gets the same number of batches.
    even_batches = variable_of(
        "_setup.settings.loader.even_batches", "The value in the loader configuration."
    )
    use_seedable_sampler = value_of("_setup.settings.loader.use_seedable_sampler")
    non_blocking = value_of("_setup.settings.loader.non_blocking")
    use_stateful_dataloader = value_of("_setup.settings.loader.use_stateful_dataloader")

    project_configuration = value_of("_setup.settings.project")
    project_dir = value_of("_setup.settings.project.project_dir")
    save_iteration = value_of(
        "_setup.settings.project.iteration", "The number of the next numbered checkpoint."
    )

    parallelism_config = value_of("_setup.settings.parallelism")
    torch_device_mesh = property_of("_setup", Setup.torch_device_mesh)
    data_parallel_rank = property_of("_setup", Setup.data_parallel_rank)
    data_parallel_shard_rank = property_of("_setup", Setup.data_parallel_shard_rank)
    tensor_parallel_rank = property_of("_setup", Setup.tensor_parallel_rank)
    context_parallel_rank = property_of("_setup", Setup.context_parallel_rank)
    pipeline_parallel_rank = property_of("_setup", Setup.pipeline_parallel_rank)
    autocast = method_of("_setup", Setup.autocast)
    profile = method_of("_setup", Setup.profile)

    # --- preparing ----------------------------------------------------------------------------------------------------

    prepare = method_of("_preparer", Preparer.prepare)
    prepare_model = method_of("_preparer", Preparer.prepare_model)
    prepare_optimizer = method_of("_preparer", Preparer.prepare_optimizer)
    prepare_scheduler = method_of("_preparer", Preparer.prepare_scheduler)
    prepare_data_loader = method_of("_preparer", Preparer.prepare_data_loader)
    discarding = method_of("_prepared", Prepared.discarding)
    forwards_meet = property_of("_prepared", Prepared.forwards_meet)
    unwrap_model = method_of("_preparer", Preparer.unwrap_model)
    verify_device_map = method_of("_preparer", Preparer.verify_device_map)
    skip_first_batches = method_of("_preparer", Preparer.skip_first_batches)
    deepspeed_ulysses_dl_adapter = method_of("_preparer", Preparer.deepspeed_ulysses_dl_adapter)

    # What scripts of the old library read and shorten: what is not listed is neither saved nor loaded.
    _models = variable_of("_prepared.models", "The prepared models.")
    _optimizers = variable_of("_prepared.optimizers", "The prepared optimizers.")
    _schedulers = variable_of("_prepared.schedules", "The prepared schedules.")
    _dataloaders = variable_of("_prepared.loaders", "The prepared loaders.")
    _custom_objects = value_of("_prepared.custom", "The objects registered for checkpointing.")

    # --- a training step ----------------------------------------------------------------------------------------------

    sync_gradients = variable_of(
        "gradient_state.sync_gradients", "True if the current micro-batch is the last one of its update."
    )
    gradient_accumulation_steps = variable_of("gradient_state.num_steps", "Micro-batches of one update.")
    step = variable_of("gradient_state.step", "Micro-batches since the last loader ended.")
    optimizer_step_was_skipped = value_of(
        "_engine.step_was_skipped", "True if the last update was skipped because fp16 gradients overflowed."
    )

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Compute the gradients of a micro-batch's loss.

        A tensor is the mean over the batch's samples. It is divided by the number of micro-batches of an update, and
        weighted by this process's share of the samples if the shares differ. `LossTerms(sum, weight)` are divided by
        the weight of the whole update over its micro-batches and processes. In a run of the Trainer, the rules of
        docs/losses.md apply.

        Args:
            loss: a scalar tensor, or `LossTerms`.
            kwargs: passed to `Tensor.backward`; a `learning_rate` is that of an optimizer that updates in the backward.

        Raises:
            ModelError: called outside a training step of the Trainer, or unsupported terms.
        """
        rate = kwargs.pop("learning_rate", None)
        if rate is not None:
            self._engine.use_learning_rate(rate)
        self._engine.backward(loss, **kwargs)

    accumulate = method_of("_stepping", Stepping.accumulate)
    no_sync = method_of("_stepping", Stepping.no_sync)
    trigger_sync_in_backward = staticmethod(trigger_sync_in_backward)
    join_uneven_inputs = method_of("_stepping", Stepping.join_uneven_inputs)
    lomo_backward = method_of("_stepping", Stepping.lomo_backward)
    unscale_gradients = method_of("_stepping", Stepping.unscale_gradients)
    clip_grad_norm_ = method_of("_stepping", Stepping.clip_grad_norm_)
    clip_grad_value_ = method_of("_stepping", Stepping.clip_grad_value_)
    maybe_context_parallel = method_of("_stepping", Stepping.maybe_context_parallel)

    # --- between processes --------------------------------------------------------------------------------------------

    gather = method_of("_exchange", Exchange.gather)
    gather_for_metrics = method_of("_exchange", Exchange.gather_for_metrics)
    reduce = method_of("_exchange", Exchange.reduce)
    pad_across_processes = method_of("_exchange", Exchange.pad_across_processes)
    flag_tensor = value_of("_exchange.flag", "1 if this process has set its trigger.")
    set_trigger = method_of("_exchange", Exchange.set_trigger)
    check_trigger = method_of("_exchange", Exchange.check_trigger)

    # --- files --------------------------------------------------------------------------------------------------------

    save_state = method_of("_saver", Saver.save_state)  # type: ignore[arg-type]
    load_state = method_of("_saver", Saver.load_state)  # type: ignore[arg-type]
    register_for_checkpointing = method_of("_saver", Saver.register_for_checkpointing)
    registered_objects = property_of("_saver", Saver.registered_objects)
    register_save_state_pre_hook = method_of("_saver", Saver.register_save_state_pre_hook)
    register_load_state_pre_hook = method_of("_saver", Saver.register_load_state_pre_hook)
    get_state_dict = method_of("_files", ModelFiles.get_state_dict)
    save_model = method_of("_files", ModelFiles.save_model)
    save = method_of("_files", ModelFiles.save)

    # --- trackers -----------------------------------------------------------------------------------------------------

    log_with = variable_of("_trackers.log_with")
    trackers = variable_of("_trackers.trackers")
    logging_dir = variable_of("_trackers.logging_dir")
    init_trackers = method_of("_trackers", Trackers.init_trackers)
    get_tracker = method_of("_trackers", Trackers.get_tracker)
    log = method_of("_trackers", Trackers.log)

    def wait_for_everyone(self) -> None:
        """Wait for a save in the background and for all processes. Collective."""
        self._saver.finish()
        super().wait_for_everyone()

    # --- the end ------------------------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> Any:
        """Release all prepared objects, and free cached device memory.

        Returns:
            None for each of `objects`: assign them to the names that held the objects, so that these can be freed.
        """
        self._saver.release_memory()
        self._engine.free_memory()
        return [None] * len(objects)

    def clear(self, *objects: Any) -> Any:
        """Same as `free_memory`."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """Wait for a save in the background, close the trackers, and leave the process group."""
        self._saver.finish()
        self._trackers.finish()
        leave()


def meet(settings: LoopSettings, world: World) -> tuple[Gang, torch.device]:
    """Select this process's device, and join the process group."""
    device = select_device(settings.cpu, world)
    check_precision(settings.precision, device)
    apply_tf32(settings.precision)
    init = settings.handlers.init
    timeout = settings.dist.timeout_seconds
    if init is not None and isinstance(init.timeout, datetime.timedelta):
        timeout = int(init.timeout.total_seconds())
    # "nccl" is the default of the handler, and means the default backend of the device.
    backend = None if init is None or init.backend == "nccl" else init.backend
    return join(world, device, timeout, backend, None if init is None else init.init_method), device


def _scaler(settings: LoopSettings, device: torch.device) -> Scaler:
    options = settings.handlers.scaler
    by_engine = settings.dist.zero is not None  # DeepSpeed's scales losses itself
    if settings.precision.compute != "fp16" or not options.enabled or by_engine:
        return UnitScaler(device)
    return LossScaler(
        device, options.init_scale, options.growth_factor, options.backoff_factor, options.growth_interval
    )
