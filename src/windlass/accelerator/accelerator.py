"""`Accelerator`: run a training loop of your own on the executors and strategies of the Trainer."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.engine import (
    LoopEngine,
    OwnLoop,
    TrainerEngine,
    clip_norm,
    clip_values,
    trigger_sync_in_backward,
)
from windlass.accelerator.exchange import gather_samples, share_rng_states
from windlass.accelerator.loop_saver import LoadHook, LoopSaver, SaveHook
from windlass.accelerator.offloaded_weights import (
    get_state_dict_offloaded_model,
    has_offloaded_params,
    load_offloaded_parameter,
)
from windlass.accelerator.optimizer import PreparedOptimizer
from windlass.accelerator.prepared import Prepared, PreparedModels
from windlass.accelerator.prepared_schedule import PreparedSchedule
from windlass.accelerator.preparing import Preparer, check_overrides, has_device_map
from windlass.accelerator.profiling import profile
from windlass.accelerator.ranks import PROCESS, LoopState, Ranks, publish, select_device
from windlass.accelerator.setup import Handlers, LoopSettings, Setup, resolve_settings
from windlass.accelerator.value_files import on_this_machine, save_values, warn_if_unsafe
from windlass.callbacks.tracker import GeneralTracker, end_reporting, reporting
from windlass.callbacks.tracker_registry import (
    TrackerOptions,
    build_tracker,
    check_tracker_names,
    filter_trackers,
)
from windlass.checkpoint.split import save_split
from windlass.config.enums import DistributedType, FP8BackendType
from windlass.config.kinds import convert_file_size_to_int
from windlass.config.loop_options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    Plugin,
    ProfileKwargs,
    ProjectConfiguration,
)
from windlass.config.plan import DistPlan, PrecisionPlan
from windlass.core.errors import ConfigError, ModelError, Problem, refuse
from windlass.core.logs import get_job_logger, warn_once
from windlass.core.mesh import Axis, Mesh
from windlass.core.metric_values import python_number
from windlass.core.module_state import bare, state_of
from windlass.core.outside import load_outside
from windlass.core.redact import redact_value, redacted_argv
from windlass.core.types import Stateful
from windlass.core.watched_numbers import micro_batch_count
from windlass.core.world import World, world_from_environment
from windlass.data.prepared_loader import PreparedLoader
from windlass.data.skip import skip_first_batches
from windlass.dist import operations
from windlass.dist.device_mesh import loss_device_mesh
from windlass.dist.gang import Gang, join, leave
from windlass.dist.operations import check_operations, operations_are_checked
from windlass.precision.check import apply_tf32, check_precision
from windlass.precision.scaler import LossScaler, Scaler, UnitScaler
from windlass.transforms.strategy import Strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = get_job_logger(__name__)


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
        megatron_lm_plugin: refused; it is not supported.
        torch_tp_plugin: refused; it is not supported.
        fsdp_plugin: shard models over processes.
        rng_types: generators to make equal on all processes at the start of a pass ("generator", "torch", "cuda").
        log_with: experiment trackers, by name or as objects.
        project_dir: folder of checkpoints and logs.
        project_config: further options of that folder.
        gradient_accumulation_plugin: further options of accumulation.
        step_scheduler_with_optimizer: False advances prepared schedules at every call of their `step`.
        kwargs_handlers: options of DDP, the fp16 scaler, autocast, the process group, float8 and the profiler.
        dynamo_backend: compile models with this backend of torch.compile.
        dynamo_plugin: compile models with these options.
        parallelism_config: sizes of the axes of the process mesh.
        scheduler_unit: the unit that prepared schedules count: "loader_batch" for batches of the unprepared loader, as
            in accelerate; or "optimizer_step" for updates that were applied, on any number of processes.

    Attributes:
        gradient_state: the accumulation state of the loop.
        flag_tensor: 1 if this process has set its trigger.
        log_with: the requested trackers.
        trackers: those that `init_trackers` opened.

    Raises:
        ConfigError: everything that is wrong or not supported, all at once.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Plugin | Mapping[str, Plugin] | None = None,
        fsdp_plugin: Plugin | None = None,
        torch_tp_plugin: Plugin | None = None,
        megatron_lm_plugin: object = None,
        rng_types: Sequence[str] | None = None,
        log_with: str | GeneralTracker | Sequence[str | GeneralTracker] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: Plugin | None = None,
        deepspeed_plugins: Mapping[str, Plugin] | None = None,
        parallelism_config: Plugin | None = None,
        *,
        scheduler_unit: str = "loader_batch",
    ) -> None:
        # Must come first: the local variables are the arguments.
        given = SimpleNamespace(**{name: value for name, value in locals().items() if name != "self"})
        world = world_from_environment()
        settings = resolve_settings(given, world)
        # Before joining the process group, so that other processes do not wait for one that lacks a tracker.
        trackers = filter_trackers(log_with, settings.project.logging_dir)
        all_ranks, device = meet(settings, world)
        self._assemble(all_ranks, device, settings, _scaler(settings, device))
        self.log_with: list[str | GeneralTracker] = trackers
        check_operations(settings.debug or operations_are_checked())
        if shared := [kind for kind in settings.rng_types if kind != "generator"]:
            self.gradient_state.at_begin = functools.partial(share_rng_states, shared, device)
        self._preparer.zero.divide_new_models()
        publish(self.state, self.gradient_state)

    @classmethod
    def of_run(
        cls,
        all_ranks: Gang,
        device: torch.device,
        precision: PrecisionPlan,
        accumulation: GradientAccumulationPlugin,
        loader: DataLoaderConfiguration,
        engine: TrainerEngine,
    ) -> Accelerator:
        """The accelerator of a Trainer, which has already joined the process group and resolved its settings.

        Args:
            all_ranks: the processes of the job.
            device: this process's.
            precision: the dtypes of the run; models that are prepared beside the Trainer's own have them too.
            accumulation: options for models that scripts accumulate beside the Trainer's own.
            loader: options of loaders that scripts prepare beside the Trainer's own.
            engine: what `backward` and `autocast` do for the trained model.
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
        accelerator._assemble(all_ranks, device, settings, UnitScaler(device), engine)
        publish(accelerator.state, accelerator.gradient_state)
        return accelerator

    @classmethod
    def _in_worker(cls, all_ranks: Gang, device: torch.device, settings: LoopSettings) -> Accelerator:
        """An accelerator with these settings and nothing prepared, for a process that does not train."""
        accelerator = cls.__new__(cls)
        # The scaler makes a tensor, and a forked worker cannot use the device of its parent.
        accelerator._assemble(all_ranks, device, settings, UnitScaler(torch.device("cpu")))
        if not PROCESS:  # a forked worker has those of its parent
            publish(accelerator.state, accelerator.gradient_state)
        return accelerator

    def __reduce__(self) -> Any:
        # A dataset may hold its accelerator: a data worker asks it for ranks, the device and settings.
        settings = replace(self._setup.settings, dist=self._setup.dist)
        return type(self)._in_worker, (self._all_ranks, self.device, settings)

    def _assemble(
        self,
        all_ranks: Gang,
        device: torch.device,
        settings: LoopSettings,
        scaler: Scaler,
        runs: TrainerEngine | None = None,
    ) -> None:
        """Make the parts. None of them refers to the accelerator, so that it is freed when a script drops it.

        Args:
            runs: the engine of a Trainer's runs; None: the script has a loop of its own.
        """
        data_ranks, loss_ranks = all_ranks.over("data"), all_ranks.over("loss")
        stride = 1 if settings.loader.split_batches else data_ranks.size
        accumulation = AccumulationState(settings.accumulation, stride)
        elsewhere = tuple if runs is None else lambda: runs.strategies
        prepared = Prepared(scaler, device, loss_ranks.size, elsewhere)
        engine: LoopEngine = runs or OwnLoop(settings.dist, data_ranks, accumulation, prepared)
        self._all_ranks, self.gradient_state, self._prepared = all_ranks, accumulation, prepared
        self._engine, self._setup = engine, Setup(settings, all_ranks, device, lambda: engine.dist)
        self.flag_tensor: Tensor | None = None
        self._preparer = Preparer(self._setup, accumulation, prepared, engine)
        self._saver = LoopSaver(self._setup, accumulation, prepared, engine)
        self.log_with = []
        self.trackers: list[GeneralTracker] = []

    def __deepcopy__(self, memo: Any) -> Accelerator:
        # A copy of a script's configuration must refer to the same processes and models.
        return self

    @property
    def state(self) -> LoopState:
        """The state of this process, and the settings of this accelerator."""
        return LoopState(self._setup)

    # --- setup --------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._setup.device

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of parallelism."""
        return self.state.distributed_type

    @property
    def multi_device(self) -> bool:
        """True if each of several processes has its own device, and models are not sharded."""
        return self._all_ranks.size > 1 and self.device.type != "cpu" and not self.is_fsdp2

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded."""
        return self._setup.is_fsdp2

    is_composable_parallelism_enabled = is_fsdp2

    @property
    def device_placement(self) -> bool:
        """True if models and batches are moved to `device`."""
        return self._setup.settings.device_placement

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """True if prepared schedules advance with updates instead of at every call."""
        return self._setup.settings.schedule_unit is not None

    @property
    def rng_types(self) -> list[str]:
        """The generators that are made equal on all processes at the start of a pass."""
        return self._setup.settings.rng_types

    @property
    def ddp_handler(self) -> KwargsHandler | None:
        """The given options of replication, or None."""
        return self._setup.settings.handlers.ddp

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """The given options of the process group, or None."""
        return self._setup.settings.handlers.init

    @property
    def profile_handler(self) -> ProfileKwargs:
        """The options of `profile`."""
        return self._setup.settings.handlers.profile

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Context: profile the body. With a `schedule_option`, the body calls the profiler's `step()` after each step.

        If `output_trace_dir` is set, each process writes a Chrome trace to `profile_<rank>.json` there; with a schedule
        that repeats, the trace of its last whole cycle.

        Args:
            profile_handler: replaces the options of the accelerator.

        Raises:
            ConfigError: an activity that this machine does not support, or unknown options of the schedule.
        """
        return profile(profile_handler or self.profile_handler, self._all_ranks.rank)

    # --- precision ----------------------------------------------------------------------------------------------------

    @property
    def mixed_precision(self) -> str:
        """ "no", "bf16", "fp16" or "fp8"."""
        return self._setup.settings.precision.word

    @property
    def native_amp(self) -> bool:
        """True if forwards run in mixed precision."""
        return self._setup.settings.precision.compute != "fp32"

    @property
    def scaler(self) -> Scaler | None:
        """The fp16 loss scaler, or None. It cannot be replaced."""
        scaler = self._prepared.scaler
        return scaler if scaler.active else None

    @scaler.setter
    def scaler(self, value: object) -> NoReturn:
        fix = (
            "losses and gradients of all optimizers have the scaler of this accelerator: use that one, and set its "
            "options with kwargs_handlers=[GradScalerKwargs(...)]"
        )
        raise ConfigError(Problem("accelerator.scaler", type(value).__name__, fix))

    @property
    def scaler_handler(self) -> GradScalerKwargs:
        """The options of the fp16 scaler."""
        return self._setup.settings.handlers.scaler

    @property
    def autocast_handler(self) -> AutocastKwargs:
        """The options of `autocast`."""
        return self._setup.settings.handlers.autocast

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The mixed-precision context of this loop, for code outside a prepared model's forward.

        Args:
            autocast_handler: replaces the options of the accelerator.
        """
        return self._setup.autocast(autocast_handler)

    @property
    def fp8_enabled(self) -> bool:
        """True if linear layers multiply in float8."""
        return self._setup.settings.precision.float8 is not None

    has_fp8_handler = fp8_enabled

    @property
    def fp8_backend(self) -> FP8BackendType:
        """AO (torchao) if linear layers multiply in float8, else NO."""
        return FP8BackendType.AO if self.fp8_enabled else FP8BackendType.NO

    @property
    def ao_recipe_handler(self) -> Any:
        """The options of float8; None without it."""
        if not self.fp8_enabled:
            return None
        return self._setup.settings.handlers.float8 or load_outside("options of float8").AORecipeKwargs()

    @property
    def te_recipe_handler(self) -> None:
        """None: torchao is the only backend of float8."""

    fp8_recipe_handler = msamp_recipe_handler = te_recipe_handler

    @property
    def delayed_fp8_autocast(self) -> bool:
        """False: layers are converted when their model is prepared."""
        return False

    # --- DeepSpeed ----------------------------------------------------------------------------------------------------

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected plugin, every field filled in, or None."""
        return self._setup.engines.plugin

    @property
    def deepspeed_engine_wrapped(self) -> None:
        """None: the engine is inside the model that `prepare` returns."""

    deepspeed_config = deepspeed_engine_wrapped

    # --- the mesh of processes ----------------------------------------------------------------------------------------

    @property
    def parallelism_config(self) -> Any:
        """The sizes of the axes, as given to this accelerator."""
        return self._setup.settings.parallelism

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The mesh of processes over which models are sharded; None if they are not, or if the script gave no
        `parallelism_config`: code that finds a mesh reads its axes there.
        """
        shard = self._setup.dist.shard if self.is_fsdp2 else None
        if shard is None or self.parallelism_config is None:
            return None
        return loss_device_mesh(self._all_ranks.mesh.with_replicas(shard.replicas), self.device)

    def _rank_in(self, axis: Axis) -> int:
        if self.parallelism_config is None:
            fix = "is needed to ask for a rank in it: Accelerator(parallelism_config=ParallelismConfig(...))"
            raise ConfigError(Problem("parallelism_config", None, fix))
        mesh: Mesh = self.parallelism_config.mesh
        return mesh.index(axis, self._all_ranks.world.rank)

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
        """Index of the part of each divided layer that this process computes."""
        return self._rank_in("tensor")

    @property
    def context_parallel_rank(self) -> int:
        """Index of the part of each sequence that this process computes."""
        inner = self._rank_in("sequence")
        return self._rank_in("context") * self._all_ranks.over("heads").size + inner

    @property
    def pipeline_parallel_rank(self) -> int:
        """Index of this process in its pipeline."""
        return self._rank_in("pipeline")

    # --- loaders and folders ------------------------------------------------------------------------------------------

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """The options of prepared loaders."""
        return self._setup.settings.loader

    @property
    def split_batches(self) -> bool:
        """True if the batch size of a loader is that of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """True if only the main process reads."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """The value in `dataloader_config`. It has no effect: every process gets the same number of batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """The value in `dataloader_config`."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """The value in `dataloader_config`."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """The value in `dataloader_config`."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """The folders of checkpoints and logs."""
        return self._setup.settings.project

    @property
    def project_dir(self) -> str | None:
        """The folder of the project."""
        return self.project_configuration.project_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next numbered checkpoint."""
        return self.project_configuration.iteration

    # --- preparing ----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Return the objects to use instead of `args`, in the same order. Collective.

        Args:
            args: models, optimizers, `DataLoader`s and learning-rate schedules, in any number and order; anything else
                is returned unchanged.
            device_placement: for each of them, True to move it to this process's device.

        Returns:
            The prepared object for a single argument, else a tuple of them.

        Raises:
            ConfigError, ModelError, DataError: an object does not support the settings.
            RankMismatchError: settings, models, optimizers or data differ between ranks.
        """
        check_overrides(self)
        return self._preparer.prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Return the model to call instead of `model`. Collective.

        Args:
            device_placement: True to move it to this process's device; None: the accelerator's setting.
            evaluation_mode: the model is not trained: every process has a whole copy, and nothing is reduced; unless
                DeepSpeed has divided it while it was built.

        Raises:
            ConfigError, ModelError: the model does not support the settings.
        """
        return self._preparer.prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Return an optimizer whose `step` and `zero_grad` act only in the last micro-batch of an update.

        Args:
            optimizer: the user's own. One that this accelerator prepared is returned as it is.
            device_placement: no effect: its state is always moved to the device of its parameters.
        """
        return self._preparer.prepare_optimizer(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> PreparedSchedule:
        """Return a schedule that advances with the updates of its optimizer, or of all if it was not prepared.

        Args:
            scheduler: built on the optimizer that was passed, or on the prepared one. A prepared schedule is returned
                as it is.
        """
        return self._preparer.prepare_scheduler(scheduler)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> PreparedLoader:
        """Return a loader of this process's part of the data. Collective.

        Args:
            data_loader: batches of the whole data, as without other processes.
            device_placement: True to move batches to this process's device; None: the accelerator's setting.
            slice_fn_for_dispatch: splits dispatched batches.

        Raises:
            ConfigError, DataError: the loader does not support the settings.
        """
        return self._preparer.prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> NoReturn:
        """Refuse DeepSpeed's adapter of a loader (`dl`) for a `model` whose sequences are split over processes.

        Raises:
            ConfigError: always.
        """
        fix = "DeepSpeed's sequence parallelism is not supported: prepare the loader instead"
        raise ConfigError(Problem("deepspeed_ulysses_dl_adapter", type(dl).__name__, fix))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return `dataloader` for one pass without its first `num_batches`, counted on this process. Map-style data is
        not read for it; a stream is, unless a state was loaded that was saved there.
        """
        return skip_first_batches(dataloader, num_batches)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own module.

        Args:
            keep_fp32_wrapper: False removes mixed precision from its forward.
            keep_torch_compile: False removes compilation, including wrappers made by `torch.compile(model)`.
        """
        return self._preparer.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return True if `model`, or a part of it, is spread over several devices by a `device_map`."""
        return has_device_map(model)

    @property
    def forwards_meet(self) -> bool:
        """True if forwards of a prepared model are collective, so all processes must make the same number of them."""
        return self._prepared.forwards_meet

    def discarding(self) -> AbstractContextManager[None]:
        """Context of forwards and backwards whose results are discarded: prepared models do not change."""
        return self._prepared.discarding()

    # Scripts of the old library read these lists and shorten them: what is not listed is neither saved nor loaded.

    @property
    def _models(self) -> PreparedModels:
        """The prepared models."""
        return self._prepared.models

    @_models.setter
    def _models(self, kept: Iterable[nn.Module]) -> None:
        self._prepared.models = kept

    @property
    def _optimizers(self) -> list[PreparedOptimizer]:
        """The prepared optimizers."""
        return self._prepared.optimizers

    @_optimizers.setter
    def _optimizers(self, kept: list[PreparedOptimizer]) -> None:
        self._prepared.optimizers = kept

    @property
    def _schedulers(self) -> list[PreparedSchedule]:
        """The prepared schedules."""
        return self._prepared.schedules

    @_schedulers.setter
    def _schedulers(self, kept: list[PreparedSchedule]) -> None:
        self._prepared.schedules = kept

    @property
    def _dataloaders(self) -> list[PreparedLoader]:
        """The prepared loaders."""
        return self._prepared.loaders

    @_dataloaders.setter
    def _dataloaders(self, kept: list[PreparedLoader]) -> None:
        self._prepared.loaders = kept

    @property
    def _custom_objects(self) -> list[Stateful]:
        """The objects registered for checkpointing."""
        return self._prepared.custom

    # --- a training step ----------------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """True if the current micro-batch is the last one of its update."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one update."""
        return micro_batch_count(self.gradient_state.num_steps)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.gradient_state.num_steps = value

    @property
    def step(self) -> int:
        """Micro-batches since the last loader ended."""
        return self.gradient_state.step

    @step.setter
    def step(self, value: int) -> None:
        self.gradient_state.step = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last update was skipped because fp16 gradients overflowed."""
        return self._engine.step_was_skipped

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Context of one micro-batch.

        Gradients of `models` are reduced, and optimizers step, only in the last one of each update. The end of a
        prepared loader ends an update too.
        """
        accumulation = self.gradient_state
        accumulation.advance()
        reduce = accumulation.sync_gradients or accumulation.plugin.sync_each_batch
        outer, accumulation.models = accumulation.models, models
        with contextlib.ExitStack() as stack:
            # The state of the process has the accumulation, and outlives the models of a loop.
            stack.callback(setattr, accumulation, "models", outer)
            for model in models:
                stack.enter_context(self._micro(model, reduce))
            yield

    def _strategy_of(self, model: nn.Module) -> Strategy | None:
        """The strategy of a prepared model, also within `torch.compile`; None if it was not prepared."""
        return self._prepared.strategy_of(model) or self._prepared.strategy_of(bare(model))

    def _micro(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        strategy = self._strategy_of(model)
        return nullcontext() if strategy is None else strategy.micro(last)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context of a forward and its backward: do not reduce gradients of `model` over processes."""
        return self._micro(model, False)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[None]:
        """Context of a backward of `model` whose forward ran under `no_sync`: reduce its gradients. Does nothing if the
        model is not replicated.
        """
        return trigger_sync_in_backward(model)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Context of a loop over unprepared data that may end earlier on some processes than on others.

        Prepared loaders end at the same time on all processes and do not need it.

        Args:
            joinables: replicated models (and optimizers) that take part.
            even_batches: False if the data may end unevenly. None: the value of the loader configuration.
        """
        even = self.even_batches if even_batches is None else even_batches
        if even or self._all_ranks.over("data").size == 1:
            yield
        elif any(strategy.sharded for strategy in self._prepared.all_strategies):
            warn_once(_log, "join_uneven_inputs has no effect on sharded models: their data must end evenly.")
            yield
        else:
            with Join(joinables, enable=True, throw_on_early_termination=False):
                yield

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

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """`backward(loss)` with this learning rate, for an optimizer that updates in the backward.

        Args:
            loss: as in `backward`.
            learning_rate: set in every group of that optimizer.

        Raises:
            ConfigError: no such optimizer was prepared.
        """
        self.backward(loss, learning_rate=learning_rate)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients by the fp16 loss scale, once per update. Clipping and stepping call it.

        Args:
            optimizer: one or several prepared optimizers; None: all of them.
        """
        chosen = self._prepared.optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, list | tuple) else [chosen]:
            found = next(
                (known for known in self._prepared.optimizers if one in (known, known.optimizer)), None
            )
            if found is None:
                raise ModelError(f"this {type(one).__name__} was not prepared by this accelerator")
            self._prepared.executors.executor_of(found).unscale()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale the gradients of `parameters` down to a global norm of `max_norm`. `norm_type` is its order: 2 is the
        Euclidean norm, infinity the largest value.

        Returns:
            The norm before clipping: a scalar tensor, the same on every process.
        """
        self.gradient_state.warn_of_partial_clip()
        return clip_norm(self._prepared, parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp the gradients of `parameters` to [`-clip_value`, `clip_value`]."""
        self.gradient_state.warn_of_partial_clip()
        clip_values(self._prepared, parameters, clip_value)

    def maybe_context_parallel(
        self, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
    ) -> AbstractContextManager[None]:
        """Do nothing: with `cp_size` above 1 the forward of a prepared model divides the sequences, and returns the
        loss and the logits of whole rows, so that `buffers` stay whole. `buffer_seq_dims` and `no_restore_buffers` have
        no effect either.
        """
        return nullcontext()

    # --- between processes --------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all processes along the first axis. Sizes along it may differ. Collective.

        Args:
            tensor: a tensor, or a nest of them; scalars become vectors of one.
        """
        return operations.gather(tensor, gang=self._all_ranks)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """`gather` with exactly one row for each sample of the current batch. Rows of a filler batch are dropped.

        If the last batch is short, a tensor with the rows of a full batch (a loss repeated for each sample) is cut to
        the samples of the batch.

        Args:
            input_data: a nest of tensors, or a list of plain values.
            use_gather_object: gather as objects even if all values are tensors.
        """
        loader = self.gradient_state.active_dataloader
        return gather_samples(input_data, loader, self._all_ranks.over("data"), use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce each tensor of a nest, `tensor`, over all processes, and multiply the result by `scale`. Collective.

        Args:
            reduction: "sum", "mean" or "max".
        """
        return operations.reduce(tensor, reduction, scale, gang=self._all_ranks)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad axis `dim` of each tensor to its largest size on any process. Collective.

        Args:
            tensor: a tensor, or a nest of them; those without this axis are unchanged.
            pad_index: the value of the new elements.
            pad_first: put them before the old ones.
        """
        return operations.pad_across_processes(tensor, dim, pad_index, pad_first, gang=self._all_ranks)

    def set_trigger(self) -> None:
        """Set this process's trigger."""
        self.flag_tensor = torch.tensor(1)

    def check_trigger(self) -> bool:
        """Return True if any process has set its trigger, and reset all triggers then. Collective."""
        # A copy: `sum` replaces the values of what it is given.
        own = torch.tensor(0) if self.flag_tensor is None else self.flag_tensor.clone()
        if int(self._all_ranks.sum(own)) == 0:
            return False
        self.flag_tensor = None
        return True

    def wait_for_everyone(self) -> None:
        """Wait for a save in the background and for all processes. Collective."""
        self._saver.finish()
        super().wait_for_everyone()

    # --- files --------------------------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save everything that was prepared or registered, and the random generators. Collective.

        The folder is committed atomically, and replaces an earlier one only then. Machines that do not share the
        folder each keep the files of their processes. If a model trains only a peft adapter, only the adapter is
        saved.

        Args:
            output_dir: the folder, or a URL. With `automatic_checkpoint_naming` it is ignored, and the folder is
                `checkpoints/checkpoint_N` of the project.
            safe_serialization: False is mapped to True with one warning: pickle is never written.
            save_model_func_kwargs: `background=True` returns as soon as a copy is in host memory, and a thread writes
                it. The next `save_state`, `load_state`, `wait_for_everyone` and `end_training` wait for it, and raise
                if it failed.

        Returns:
            The folder.

        Raises:
            ConfigError: no folder, or an unsupported option. CheckpointError: the numbered folder exists, or a state
                has values that cannot be saved. FolderInUse: another loop is saving there. OSError: writing failed.
        """
        return self._saver.save_state(output_dir, safe_serialization, **save_model_func_kwargs)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a checkpoint of `save_state` into the prepared objects, on any number of processes. Collective.

        Args:
            input_dir: the folder or URL; with `automatic_checkpoint_naming`, None means the newest valid one.
            load_kwargs: refused, except `map_location`, which has no effect: tensors are loaded to the devices of
                their parameters.
            **load_model_func_kwargs: refused.

        Raises:
            CheckpointError: it is not valid, or does not fit the prepared objects. ConfigError: no folder.
        """
        self._saver.load_state(input_dir, load_kwargs, **load_model_func_kwargs)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load `objects` with the loop. Those of the main process are saved.

        Args:
            objects: with `state_dict` and `load_state_dict`; states are nests of tensors, arrays and plain values.

        Raises:
            ConfigError: an object lacks one of these methods.
        """
        fix = "needs the methods state_dict and load_state_dict to be saved"
        refuse(
            Problem(f"objects[{index}]", type(item).__name__, fix)
            for index, item in enumerate(objects)
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))
        )
        self._prepared.custom += objects

    @property
    def registered_objects(self) -> tuple[Stateful, ...]:
        """The objects that were passed to `register_for_checkpointing`."""
        return tuple(self._prepared.custom)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, folder)` on every process in each `save_state`.

        The hook may write files to `folder` on the main process, which become part of the checkpoint, and remove state
        dicts from `weights` to save those models itself.
        """
        return _registered(self._saver.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, folder)` on every process in each `load_state`, before weights are loaded.

        The hook may remove models from `models` that it has loaded itself.
        """
        return _registered(self._saver.load_hooks, hook)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state dict with whole tensors. Collective.

        If the model is sharded, the main process gets the state dict in host memory and the others an empty one.
        Offloaded weights are read from their storage.

        Args:
            model: prepared by this accelerator, or any other one, whose own state dict is returned.
            unwrap: name tensors as in the user's module; False: as in a wrapper, if there is one.
        """
        if any(map(has_offloaded_params, model.modules())):
            return dict(get_state_dict_offloaded_model(model))
        strategy = self._strategy_of(model)
        if strategy is None or not (unwrap or strategy.sharded):
            return dict(model.state_dict())
        return strategy.whole_state()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's weights as safetensors files that `from_pretrained` reads, on the main process.

        Collective if the model is sharded; else the main process may call it alone, and others do not wait for it.

        Args:
            model: prepared or not; sharded and offloaded weights are written whole.
            save_directory: a folder, which is created.
            max_shard_size: maximum size of a file ("5GB", "200MB", or bytes); several files get an index.
            safe_serialization: False is mapped to True with one warning: pickle is never written.
        """
        warn_if_unsafe(safe_serialization)
        folder, limit = on_this_machine(save_directory), convert_file_size_to_int(max_shard_size)
        away = any(map(has_offloaded_params, model.modules()))
        read = functools.partial(load_offloaded_parameter, model) if away else None
        state = state_of(model) if away else self.get_state_dict(model)
        if self.is_main_process:
            save_split(folder, state, limit, offloaded=read)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write tensors and plain values, on the main process.

        Args:
            obj: for ".safetensors", a dict of tensors; else a nest of tensors and plain values.
            f: a file name. Values of one that ends in ".json" are JSON, and their tensors a safetensors file beside
                it; of another name they are a file that `torch.load(weights_only=True)` reads.
            safe_serialization: write a safetensors file under any name.

        Raises:
            CheckpointError: values that cannot be saved; they are named.
        """
        path = on_this_machine(f)
        if self.is_main_process:
            save_values(path, obj, safe_serialization)

    # --- trackers -----------------------------------------------------------------------------------------------------

    @property
    def logging_dir(self) -> str | None:
        """The folder for trackers that write files."""
        return self.project_configuration.logging_dir

    @logging_dir.setter
    def logging_dir(self, value: str | None) -> None:
        self.project_configuration.logging_dir = value

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: TrackerOptions | None = None,
    ) -> None:
        """Open a run with every tracker of `log_with`. Call it on all processes; only the main one logs. A further call
        closes the runs of the last one.

        Args:
            project_name: the project of the runs.
            config: hyperparameters to store with the run.
            init_kwargs: name of a tracker -> keywords for it, such as `{"wandb": {"tags": ["a"]}}`; those of trackers
                that are not in `log_with` are ignored.

        Raises:
            ConfigError: `init_kwargs` has the name of an unknown tracker.
        """
        options = init_kwargs or {}
        check_tracker_names("init_kwargs", options, self.log_with)
        built = [build_tracker(item, project_name, self.logging_dir, options) for item in self.log_with]
        earlier, self.trackers = self.trackers, []
        for tracker in earlier:
            if tracker not in built:  # a script's own object is opened again
                end_reporting(tracker)
        for tracker in built:
            # Trackers record the command line, which may hold a token.
            with redacted_argv(), reporting(tracker):
                tracker.start()
            self.trackers.append(tracker)  # at once: if the next one fails, `end_training` closes this one
        for tracker in built if config is not None else ():
            with reporting(tracker):
                tracker.store_init_configuration(redact_value("config", config))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker called `name`, or with `unwrap` the run of its package (None on other than the main process).

        Before `init_trackers` it is a blank tracker. Raises ConfigError if no tracker of this name was opened.
        """
        if not self.trackers:
            return GeneralTracker(_blank=True)
        check_tracker_names("name", [name], self.trackers, built_in=False)
        found: Any = next(tracker for tracker in self.trackers if tracker.name == name)
        return found.tracker if unwrap else found

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: TrackerOptions | None = None
    ) -> None:
        """Send values to every tracker.

        Args:
            values: name -> number, text, or tensor of one element.
            step: the update of these values.
            log_kwargs: name of a tracker -> keywords for its `log`.

        Raises:
            ConfigError: `log_kwargs` has the name of an unknown tracker, or `step` is not a number.
        """
        if isinstance(step, str):
            raise ConfigError(Problem("step", step, "give the number of the update"))
        options = log_kwargs or {}
        check_tracker_names("log_kwargs", options, self.trackers)
        plain = {name: python_number(value) for name, value in values.items()}
        for tracker in self.trackers:
            with reporting(tracker):
                tracker.log(plain, step=step, **options.get(tracker.name, {}))

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
        """Wait for a save in the background, close the trackers, and leave the process group. After an error in one of
        these the others are done too.
        """
        with contextlib.ExitStack() as last:  # the last that is put on it is called first
            last.callback(leave)
            for tracker in reversed(self.trackers):
                last.callback(end_reporting, tracker)
            self.trackers = []
            self._saver.finish()


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
    method, mesh = None if init is None else init.init_method, settings.dist.mesh(world.size)
    return join(world, device, timeout, backend, method, mesh), device


def _registered(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _scaler(settings: LoopSettings, device: torch.device) -> Scaler:
    options = settings.handlers.scaler
    by_engine = settings.dist.zero is not None  # its engine scales losses
    if settings.precision.compute != "fp16" or not options.enabled or by_engine:
        return UnitScaler(device)
    return LossScaler(
        device, options.init_scale, options.growth_factor, options.backoff_factor, options.growth_interval
    )
