"""The only file that imports DeepSpeed: its engine, and where it keeps what it divides among ranks."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from windlass.config.deepspeed import file_folders, has_param_files, precision_of
from windlass.core.errors import ConfigError, ModelError, Problem, refuse, unknown
from windlass.core.optional import require
from windlass.dist.device_mesh import export_local_rank, open_group_of_one
from windlass.dist.flat import FlatParts, divided
from windlass.dist.gang import Gang
from windlass.zero.gradient_order import GradientOrder
from windlass.zero.swap_files import ParamFiles, SwapFiles, check_buffers, lock_files

# The attributes of DeepSpeed's scaler that change in fp16.
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
# Its number of the micro-batch before the first one of an update.
_NO_BACKWARD = -1


def load_library() -> ModuleType:
    """DeepSpeed, with the settings of a run. To be called before it starts."""
    library = require("deepspeed", "train with ZeRO")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # it reports each step of its start
    # Sums in shared memory, for its inference on CPUs. It would compile them when it starts, under a lock that a killed
    # process leaves behind, and wait there, without an end, for ranks that are gone.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return library


@dataclass(frozen=True, slots=True)
class Place:
    """Where the engine keeps this rank's run of elements of a trained parameter."""

    buffer: Tensor  # the flat fp32 tensor that the optimizer updates; its state has entries of the same shape
    # `offset`, `length`: the run in it
    offset: int
    length: int
    shape: torch.Size  # of the whole parameter
    start: int  # index of the run in the flattened parameter
    pieces: Sequence[tuple[int, int, int]]  # of all ranks; see `FlatParts`
    # In which the engine keeps the buffer and its state between steps; None: in memory
    files: SwapFiles | None = None

    def kept(self, tensor: Tensor) -> Tensor:
        """The values of `buffer`, or of a tensor of its state, where they are between two steps."""
        return tensor if self.files is None else self.files.kept(self.buffer, tensor)

    def filling(self) -> contextlib.AbstractContextManager[None]:
        """Context in which `buffer` is in memory and its state is replaced."""
        return contextlib.nullcontext() if self.files is None else self.files.filling(self.buffer)

    def parts_of(self, tensor: Tensor) -> FlatParts:
        """This rank's slices of `tensor`, at the offset of the parameter in `buffer`."""
        mine = tensor.detach().narrow(0, self.offset, self.length)
        return FlatParts(self.shape, mine, self.start, self.pieces)


class ZeroEngine:
    """DeepSpeed's engine for one model and its optimizer.

    Args:
        module: on the device; DeepSpeed changes it in place.
        optimizer: its groups hold the engine's flat tensors afterwards. None: the model is not trained, and its
            parameters are divided (stage 3).
        config: complete, without "auto".

    Raises:
        ConfigError: DeepSpeed uses another device than this process, or this one does not compute in fp16.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: dict[str, Any],
        device: torch.device,
        loss_ranks: Gang,
    ) -> None:
        library = ready_library(device, loss_ranks)
        _check_fp16(library, config)
        _check_files(library, config)
        self.stage: int = config["zero_optimization"]["stage"]
        self._trains, self._factor = optimizer is not None, 1.0
        self._has_gradients = self._complete = self._has_kept_graph = False
        self._module, self._loss_ranks, self._zero = module, loss_ranks, library.zero
        if has_param_files(config):
            check_buffers(module, config, loss_ranks.size)
        with lock_files(config, loss_ranks.world.rank) as locks:  # closed if the model cannot be divided
            self._divide(library, optimizer, config, device)
            self._lock = locks.pop_all()

    def _divide(
        self,
        library: ModuleType,
        optimizer: torch.optim.Optimizer | None,
        config: dict[str, Any],
        device: torch.device,
    ) -> None:
        module = self._module
        for parameter in module.parameters():
            # DeepSpeed sends parameters as bytes, and refuses those that do not lie in the order of their axes, or
            # whose last axis, of size 1, has another stride, which `contiguous` would leave.
            if parameter.dim() and not (parameter.is_contiguous() and parameter.stride(-1) == 1):
                parameter.data = parameter.data.reshape(-1).view(parameter.shape)
        if has_param_files(config) and precision_of(config) is None and not is_divided(module):
            # `initialize` gives `Init` a dtype, and `Init._set_dtype` (deepspeed.runtime.zero.partition_parameters)
            # replaces it by bf16 on a device without fp16, so files would have rounded values. Of a configuration it
            # reads the dtype.
            library.zero.Init(module=module, config_dict_or_path=config)
        self._engine, self._optimizer, _, _ = library.initialize(
            model=module, optimizer=optimizer, config=config, dist_init_required=False
        )
        if self._trains and config.get("activation_checkpointing"):
            # For models that call `deepspeed.checkpointing.checkpoint`; the engine reads this section for nothing.
            library.checkpointing.configure(None, deepspeed_config=_recomputing(config, device))
        if self._trains:
            self._engine.zero_grad = self.zero_grad  # its own leaves what it has reduced
        self._order = GradientOrder(module, self._loss_ranks)
        swapper = getattr(self._optimizer, "optimizer_swapper", None)
        self._files = None if swapper is None else SwapFiles(swapper)
        self._param_files = ParamFiles(module)
        self._watch = (
            module.register_forward_hook(self._forget_lone_forward)
            if self.stage == 3 and self._trains
            else None
        )

    @property
    def model(self) -> nn.Module:
        """The wrapper that forwards run through."""
        engine: nn.Module = self._engine
        return engine

    def _forget_lone_forward(self, *_: Any) -> None:
        """Keep the order of a forward without gradients from becoming that of the training step.

        The engine records in which order layers run. Of a forward alone it finds that no layer is used again, so it
        frees parameters after their forward, and keeps to that in every later step: each would be gathered twice.
        """
        order = self._optimizer.parameter_offload.get_param_coordinator()
        if order.is_record_trace() and not torch.is_grad_enabled():
            order._invalidate_trace()

    # --- one update -------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, retain_graph: bool) -> None:
        """Add the gradients of `loss`, averaged over ranks."""
        if self._complete:
            raise ModelError(
                "clip_grad_norm_ completes the gradients of an update under DeepSpeed, and this backward would add to "
                "them: call backward before it, or step() after it"
            )
        self._has_gradients = True
        if self.stage == 3:
            # The engine counts a backward at the next forward: a second one would replace the gradients of the first.
            self._optimizer.clear_backward_seen_flag()
        try:
            self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)
        except RuntimeError as error:
            if self.stage == 3 and self._has_kept_graph and type(error) is RuntimeError:
                raise ModelError(
                    "stage 3 of DeepSpeed frees the parameters of a forward in its first backward, so a second one "
                    "through the graph that retain_graph kept finds none: add the losses, and call backward once"
                ) from error
            raise
        self._has_kept_graph = retain_graph

    def multiply(self, factor: float) -> None:
        """Multiply the gradients by `factor` in the next step."""
        self._factor = factor

    def norm(self) -> Tensor:
        """The norm of the gradients that the next `step` takes, infinite if one of them is not finite. Collective.

        The engine completes gradients and measures them within its step, too late for a loop that clips before.
        So they are completed here, and not once more in the step; no backward may come between.
        """
        if not self._has_gradients:
            return torch.zeros(())
        zero = self._optimizer
        if not self._complete:
            self._complete_gradients()
        if self.stage < 3:
            zero._wait_for_offload_copies()
            norm = torch.as_tensor(zero.scaled_global_norm(), dtype=torch.float32)
        else:
            groups = [torch.as_tensor(group, dtype=torch.float32) for group in zero._get_norm_groups()]
            norm = torch.linalg.vector_norm(torch.stack(groups))
            norm = torch.where(torch.stack(groups).min() < 0, -1.0, norm)
        # The engine writes -1 for a norm that is not finite.
        return torch.where(norm < 0, torch.inf, norm * (self._factor / self.loss_scale))

    def _complete_gradients(self) -> None:
        """What the engine's step does first; `_once` keeps it from doing so again."""
        self._order.check()
        self._complete = True
        if self.stage > 1:
            self._optimizer.finalize_gradient_accumulation_boundary()
        else:
            self._optimizer.set_gradient_accumulation_boundary(True)
            self._optimizer.reduce_gradients()

    @contextlib.contextmanager
    def _once(self) -> Iterator[None]:
        """Context of a step: gradients that are complete are not completed again."""
        engine, zero, complete = self._engine, self._optimizer, self._complete
        self._complete = False
        if not complete:
            self._order.check()
            yield
            return
        reduces, engine.enable_backward_allreduce = engine.enable_backward_allreduce, False
        zero.finalize_gradient_accumulation_boundary = lambda: zero.set_gradient_accumulation_boundary(True)
        try:
            yield
        finally:
            engine.enable_backward_allreduce = reduces
            del zero.finalize_gradient_accumulation_boundary  # its class's again

    def step(self, max_norm: float | None) -> tuple[Tensor, bool]:
        """Clip the gradients, and update. Without gradients nothing changes, as with any optimizer.

        Returns:
            The norm before clipping, and False if the engine skipped the update, because the norm
            was not finite. In fp16 it has lowered the loss scale then.
        """
        factor, self._factor = self._factor, 1.0
        if not self._has_gradients:
            return torch.zeros(()), True
        self._has_gradients = False
        self._optimizer.clip_grad = max_norm or 0.0
        # By this it divides gradients and norm, also if it changes the scale of fp16 in this step.
        self._optimizer.override_loss_scale(self.loss_scale / factor)
        try:
            with self._once():
                self._engine.step()
        finally:
            self._optimizer.custom_loss_scaler = False
        norm = torch.as_tensor(self._engine.get_global_grad_norm(), dtype=torch.float32)
        return norm, bool(self._engine.was_step_applied())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of every backward since the last step, which frees its own."""
        zero, self._has_gradients, self._complete = self._optimizer, False, False
        self._order.begin_again()
        zero.zero_grad()  # at stage 3 the next backward overwrites then
        if self.stage < 3:
            # As its step does if it skips an update, and before one.
            zero.averaged_gradients.clear()
            zero.all_grad_tensors.clear()
            zero.micro_step_id = _NO_BACKWARD
        if self.stage < 3 and zero.cpu_offload:
            zero.reset_cpu_buffers()
            zero._offload_accumulated_param_ids.clear()

    # --- the loss scale of fp16 ---------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The factor of losses in fp16; 1 in other precisions."""
        return float(self._optimizer.loss_scaler.cur_scale)

    def scaler_state(self) -> dict[str, float | int]:
        """The state of the loss scale; empty if it never changes."""
        scaler = self._optimizer.loss_scaler
        return {name: getattr(scaler, name) for name in _SCALER if hasattr(scaler, name)}

    def load_scaler_state(self, state: Mapping[str, float | int]) -> None:
        """Restore a result of `scaler_state`; another precision's has nothing for this one."""
        scaler = self._optimizer.loss_scaler
        for name in _SCALER:
            if name in state and hasattr(scaler, name):
                setattr(scaler, name, state[name])

    # --- what it keeps ----------------------------------------------------------------------------------------------

    def places(self) -> dict[nn.Parameter, Place]:
        """Where each trained parameter lies on this rank."""
        if not self._trains:
            return {}
        return self._places_of_whole() if self.stage < 3 else self._places_of_parts()

    def _places_of_whole(self) -> dict[nn.Parameter, Place]:
        """Stages 1 and 2: the parameters of a group, one behind another, are divided into as many runs as ranks."""
        zero, rank, found = self._optimizer, self._loss_ranks.rank, {}
        for group, parameters in enumerate(zero.round_robin_bit16_groups):
            length, buffer = int(zero.partition_size[group]), zero.single_partition_of_fp32_groups[group]
            for parameter, before in zip(parameters, zero.round_robin_bit16_offsets[group], strict=True):
                pieces = divided(parameter.numel(), length, self._loss_ranks.size, before)
                start, count = _of_rank(pieces, rank)
                offset = max(before - rank * length, 0) if count else 0
                found[parameter] = Place(buffer, offset, count, parameter.shape, start, pieces)
        return found

    def _places_of_parts(self) -> dict[nn.Parameter, Place]:
        """Stage 3: every parameter is divided into as many runs as ranks."""
        zero, found = self._optimizer, {}
        for parameters in zero.fp16_groups:
            for parameter in parameters:
                group, offset, length = zero.grad_position[zero.get_param_id(parameter)]
                pieces = divided(parameter.ds_numel, length, self._loss_ranks.size)
                start, count = _of_rank(pieces, self._loss_ranks.rank)
                buffer = zero.fp32_partitioned_groups_flat[group]
                found[parameter] = Place(
                    buffer, offset, count, parameter.ds_shape, start, pieces, self._files
                )
        return found

    def frozen(self) -> dict[nn.Parameter, FlatParts]:
        """The parameters that are divided and not trained."""
        divided_here = [p for p in self._module.parameters() if hasattr(p, "ds_tensor")]
        parameters = [p for p in divided_here if not (self._trains and p.requires_grad)]
        found = {}
        for parameter in parameters:
            kept = self._param_files.kept(parameter)
            numel, shape = parameter.ds_numel, parameter.ds_shape  # type: ignore[attr-defined]
            pieces = divided(numel, kept.numel(), self._loss_ranks.size)
            start, count = _of_rank(pieces, self._loss_ranks.rank)
            found[parameter] = FlatParts(shape, kept.detach()[:count], start, pieces)
        return found

    def use_places(self, places: dict[nn.Parameter, Place]) -> None:
        """Compute with the values in `places`, which were changed. Collective."""
        with torch.no_grad():
            if self.stage < 3:
                self._optimizer.update_lp_params()
                return
            if self._files is not None:
                self._optimizer.reset_swap_buffers()
            else:
                for parameter, place in places.items():
                    self._param_files.take(parameter, place.buffer.detach(), place.offset, place.length)
            # Small ones are whole on every rank, and not gathered before forwards.
            kept_whole = self._optimizer.persistent_parameters
            if kept_whole:
                kept_whole[0].partition(kept_whole, has_been_updated=False)
                kept_whole[0].all_gather(kept_whole)

    def gathered(self, parameters: Iterable[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
        """Context in which all ranks have these parameters whole. Collective."""
        if self.stage < 3:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self._zero.GatheredParameters(list(parameters))
        return context

    def release(self) -> None:
        """Remove the engine's hooks; a model of stage 3 stays divided, and keeps those of its forwards until
        `let_go`.
        """
        if self.stage < 3:
            self.let_go()

    def let_go(self) -> None:
        """Remove all hooks. A model of stage 3 cannot be called until another engine takes it."""
        if self._watch is not None:
            self._watch.remove()
        self._order.remove()
        self._engine.destroy()
        if self._files is not None:
            self._files.remove()
        self._lock.close()


def make_schedule(optimizer: torch.optim.Optimizer, section: Mapping[str, Any]) -> Any:
    """A schedule of DeepSpeed by its name and its options: `{"type": "WarmupLR", "params": {...}}`. Raises ConfigError
    for an option that it does not have, and for one that it needs and that is not there.
    """
    load_library()
    schedules = require("deepspeed.runtime.lr_schedules", "use its schedules")
    kind, given = getattr(schedules, section["type"]), section.get("params", {})
    _, *options = inspect.signature(kind).parameters.values()  # the first one is the optimizer
    place, name = "deepspeed.scheduler.params.{}".format, kind.__name__
    refuse(
        [
            *unknown(given, [option.name for option in options], place, f"{name} has no such option"),
            *(
                Problem(place(option.name), None, f"must be set: {name} needs it")
                for option in options
                if option.default is option.empty and option.name not in given
            ),
        ]
    )
    return kind(optimizer, **given)


def is_divided(module: nn.Module) -> bool:
    """Return True if DeepSpeed has divided parameters of a model among ranks."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def ready_library(device: torch.device, loss_ranks: Gang) -> ModuleType:
    """DeepSpeed, in a process that has the process group and the variables that it reads. Raises ConfigError if
    DeepSpeed uses another device.
    """
    library = load_library()
    _check_accelerator(library, device)
    if loss_ranks.size == 1 and not torch.distributed.is_initialized():
        open_group_of_one(device)
    export_local_rank(loss_ranks.world.local_rank)
    return library


def _check_files(library: ModuleType, config: Mapping[str, Any]) -> None:
    """Check, before anything is divided, that DeepSpeed can read and write files of tensors on this machine."""
    folders = file_folders(config)
    if not folders:
        return
    builder = library.accelerator.get_accelerator().create_op_builder("AsyncIOBuilder")
    if builder is None or not builder.is_compatible(verbose=False):
        fix = (
            "DeepSpeed compiles its access to files, for which libaio, its headers or a C++ compiler is missing: "
            "apt-get install libaio-dev g++ (Red Hat: dnf install libaio-devel gcc-c++) and pip install ninja; set "
            "CPATH and LIBRARY_PATH if libaio lies elsewhere"
        )
        raise ConfigError(Problem(f"deepspeed.{folders[0][0].replace('nvme_path', 'device')}", "nvme", fix))


def _recomputing(config: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The configuration for recomputation. Its "cpu_checkpointing" means nothing on a CPU, on which DeepSpeed would
    empty the activations, because it takes them for copies.
    """
    if device.type != "cpu":
        return config
    section = {**config["activation_checkpointing"], "cpu_checkpointing": False}
    return {**config, "activation_checkpointing": section}


def _of_rank(pieces: Iterable[tuple[int, int, int]], rank: int) -> tuple[int, int]:
    """First index and number of elements of a rank's piece; (0, 0) if it has none."""
    return next(((start, count) for owner, start, count in pieces if owner == rank), (0, 0))


def _check_accelerator(library: ModuleType, device: torch.device) -> None:
    name = library.accelerator.get_accelerator().device_name()
    if name != device.type:
        fix = f"DeepSpeed chose {name}, and this process trains on {device.type}: set DS_ACCELERATOR={device.type}"
        raise ConfigError(Problem("deepspeed", name, fix))


def _check_fp16(library: ModuleType, config: Mapping[str, Any]) -> None:
    accelerator = library.accelerator.get_accelerator()
    if config.get("fp16", {}).get("enabled") and not accelerator.is_fp16_supported():
        fix = f"DeepSpeed does not compute in fp16 on this device ({accelerator.device_name()}); use bf16 or fp32"
        raise ConfigError(Problem("fp16", True, fix))
