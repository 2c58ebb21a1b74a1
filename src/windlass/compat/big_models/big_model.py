"""Models that are larger than a device or the host's memory: placed on devices, the host and the disk for inference.

    with init_empty_weights():
        model = Model(config)
    model = load_checkpoint_and_dispatch(model, "checkpoint", device_map="auto", offload_folder="offload")
    model(inputs)

The weights of each layer are loaded to its device for its forward. Offloaded weights get no gradients.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from windlass.checkpoint.names import shorten
from windlass.compat.big_models.attach_hooks import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    extract_submodules_state_dict,
    shared_weights,
)
from windlass.compat.big_models.auto_device_map import (
    DeviceMap,
    check_and_set_device_map,
    check_device_map,
    infer_auto_device_map,
    places_of,
    without_nesting,
)
from windlass.compat.big_models.checkpoint_loading import load_checkpoint_in_model
from windlass.compat.big_models.device_memory import Dtype, Limits, get_balanced_memory
from windlass.compat.big_models.model_hooks import GUARDED, add_hook_to_module
from windlass.compat.big_models.module_tensors import (
    META,
    CpuOffload,
    Place,
    UserCpuOffloadHook,
    find_tied_parameters,
    renewed,
)
from windlass.compat.big_models.offloaded import (
    INDEX_NAME,
    AlignDevicesHook,
    OffloadedWeightsLoader,
    Weights,
    offload_state_dict,
    read_offload_index,
)
from windlass.config.kinds import TRUE
from windlass.core.attributes import attributes_of
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.logs import get_logger
from windlass.core.tensors import address

# Models without data: parameters that are created on the meta device (or any other) while the constructor runs.
#
# A tensor on the meta device has a shape and a dtype but no data, so a model that is larger than the machine's memory
# can be built, measured, and filled one tensor at a time (`load_checkpoint_and_dispatch`).

INCLUDE_BUFFERS_VARIABLE = "ACCELERATE_INIT_INCLUDE_BUFFERS"


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Context: modules are built with all their parameters on the meta device.

    Weights that the constructor ties stay tied. Such a model cannot be moved with `.to(device)`: load its weights with
    `load_checkpoint_and_dispatch`.

    Args:
        include_buffers: create buffers on the meta device too. None: False, unless the environment variable
            ACCELERATE_INIT_INCLUDE_BUFFERS is true.
    """
    return init_on_device(META, include_buffers)


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Context: modules are built with all their parameters on `device`.

    Without buffers, each parameter is moved when it is registered, so at most one of them is in host memory at a time.
    With buffers, every tensor that the constructor creates is created on `device`. Raises ModelError for a lazy module,
    whose parameters have no shape yet.
    """
    device = torch.device(device)
    if include_buffers is None:
        include_buffers = os.environ.get(INCLUDE_BUFFERS_VARIABLE, "").lower() in TRUE
    if include_buffers:
        with device:
            yield
        return
    register = nn.Module.register_parameter
    # A parameter that is registered under two names must become one parameter on `device`.
    moved: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def register_on_device(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or param.device == device:
            return
        if is_lazy(param):
            raise ModelError(
                f"{type(module).__name__}.{name} is lazy: it has no shape before the first forward and cannot be "
                f"created on {device}; build the module with explicit sizes"
            )
        if param not in moved:
            new = renewed(param, param.detach().to(device))
            # Its own entry too: it may be registered again, and its device have another name ("cuda:0" of "cuda").
            moved[param] = moved[new] = new
        module._parameters[name] = moved[param]

    with attributes_of(nn.Module, register_parameter=register_on_device):
        yield


Folder = str | os.PathLike[str]
_logger = get_logger(__name__)


def cpu_offload(
    model: nn.Module,
    execution_device: Place | None = None,
    offload_buffers: bool = False,
    state_dict: dict[str, Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all weights of `model` on the host, and load those of each layer to the device for its forward.

    Args:
        execution_device: the device on which the model runs; by default that of its first parameter, which must not be
            the meta device.
        offload_buffers: offload persistent buffers too.
        state_dict: the weights, if the model is on the meta device.
        preload_module_classes: classes whose modules are loaded with their submodules, for forwards that use the
            weights of child modules without calling them.
    """
    weights = _on_host(model.state_dict()) if state_dict is None else state_dict
    return _offload_all(model, weights, execution_device, offload_buffers, preload_module_classes)


def _on_host(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that have data, on the host; tied ones are copied once."""
    copies: dict[Any, Tensor] = {}
    host = {}
    for name, tensor in state_dict.items():
        if not tensor.is_meta:
            # Another view of the same memory, as a transposed one, has other values.
            seen = address(tensor), tensor.dtype, tensor.shape, tensor.stride()
            host[name] = copies.setdefault(seen, tensor.to("cpu"))
    return host


def _offload_all(
    model: nn.Module,
    weights: Weights,
    execution_device: Place | None,
    offload_buffers: bool,
    preload_module_classes: list[str] | None,
) -> nn.Module:
    if execution_device is None:
        execution_device = next((param.device for param in model.parameters()), None)
        if execution_device == META:
            fix = (
                "the model is on the meta device, where nothing is computed: name the device on which it runs"
            )
            raise ConfigError(Problem("execution_device", None, fix))
    ties = shared_weights(find_tied_parameters(model))
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=execution_device,
        offload=True,
        offload_buffers=offload_buffers,
        weights_map=weights,
        preload_module_classes=preload_module_classes,
        tied_params_map=ties,
    )
    return model


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Place | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep `model` on the host until its forward, and then on the device until the hook's `offload()`.

    For a pipeline of models of which one at a time fits on the device, and which are called many times each in turn.

    Args:
        execution_device: the device on which the model runs; by default this process's accelerator, if it has one.
        prev_module_hook: the hook of the previous model of the pipeline, which is offloaded when this one is called.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def disk_offload(
    model: nn.Module,
    offload_dir: Folder,
    execution_device: Place | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all weights of `model` on disk, and read those of each layer for its forward. Raises ModelError if neither
    the model nor the folder has the data of a weight.

    Args:
        offload_dir: the folder to write the weights to. Weights that are on the meta device must be there already.
            Another model that is offloaded there replaces weights of the same names, which this one cannot read then.

    Other arguments as in `cpu_offload`.
    """
    _write_weights(model.state_dict(), offload_dir)
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload_all(model, weights, execution_device, offload_buffers, preload_module_classes)


def _write_weights(state_dict: Mapping[str, Tensor], folder: Folder) -> None:
    """Write the tensors that have data. The others must be in the folder's index, from an earlier load.

    Weights of the same names that are in the folder are replaced, because they may be those of another model.
    """
    offload_state_dict(folder, {name: tensor for name, tensor in state_dict.items() if not tensor.is_meta})
    if not os.path.exists(os.path.join(folder, INDEX_NAME)):
        raise ModelError(f"no weights to offload: the model has no data, and {folder} has no {INDEX_NAME}")
    index = read_offload_index(folder)
    if missing := [name for name in state_dict if name not in index]:
        raise ModelError(f"no data for {shorten(missing)}, neither in the model nor in {folder}")


def dispatch_model(
    model: nn.Module,
    device_map: DeviceMap,
    main_device: Place | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: Folder | None = None,
    offload_index: Mapping[str, Mapping[str, str]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Place `model` by a device map, so that it can be called as if it were on one device.

    Args:
        main_device: the device on which offloaded layers run; by default the first device of the map, or the host.
        state_dict: weights of the modules on the host, if the model is on the meta device.
        offload_dir: the folder of weights on disk; weights of the model are written there.
        offload_index: the file of each weight on disk, instead of the folder's own index.
        offload_buffers: offload persistent buffers of offloaded modules too.
        skip_keys: keyword arguments, and keys of outputs, that are not moved between devices.
        preload_module_classes: as in `cpu_offload`.
        force_hooks: attach hooks even if the model is on a single device.

    Raises:
        ConfigError: a map that does not cover the model or names devices that do not exist; no folder for the disk.
        ModelError: the data of a weight is missing.
    """
    check_device_map(model, device_map)
    places = places_of(device_map)
    if len(places) == 1 and "disk" not in places and not force_hooks:
        if places[0] not in ("meta", META):
            _refuse_without_data(model)
        model.to(places[0])
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        return model
    devices = [place for place in places if str(place) not in ("cpu", "disk")]
    main = main_device if main_device is not None else devices[0] if devices else "cpu"
    # If the host runs layers itself, there is nothing to offload to its memory; MPS shares this memory.
    away = ("disk",) if torch.device(main).type in ("cpu", "mps") else ("cpu", "disk")
    flat = without_nesting(model, device_map)
    offloaded = {name: str(place) for name, place in flat.items() if str(place) in away}
    runs_on = {name: place if place in devices else main for name, place in flat.items()}
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"": main, **runs_on},
        offload={name: name in offloaded for name in flat},
        weights_map=_offloaded_weights(model, offloaded, state_dict, offload_dir, offload_index),
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        tied_params_map=shared_weights(find_tied_parameters(model)),
    )
    if offloaded:
        _logger.info("offloaded: %s. Their weights get no gradients.", ", ".join(offloaded))
    _guard_moves(model)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _refuse_without_data(model: nn.Module) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if absent := [name for name, tensor in tensors if tensor.is_meta]:
        raise ModelError(
            f"no data for {shorten(absent)}: load a checkpoint that has them. Buffers that no checkpoint has get "
            "their data where the model is built, unless include_buffers is set"
        )


def _offloaded_weights(
    model: nn.Module,
    offloaded: Mapping[str, str],
    state_dict: Mapping[str, Tensor] | None,
    folder: Folder | None,
    index: Mapping[str, Mapping[str, str]] | None,
) -> Weights | None:
    """The data of the modules in `offloaded`, by name; the values are "cpu" or "disk"."""
    host, disk = ([name for name, place in offloaded.items() if place == kind] for kind in ("cpu", "disk"))
    if disk and folder is None and index is None:
        fix = f"{', '.join(disk)} go to disk: name a folder for their weights"
        raise ConfigError(Problem("offload_dir", None, fix))
    if state_dict is None and host:
        state_dict = _on_host(extract_submodules_state_dict(model.state_dict(), host))
    on_disk = extract_submodules_state_dict(model.state_dict(), disk)
    if not on_disk:
        return None if state_dict is None else OffloadedWeightsLoader(state_dict=state_dict)
    if index is None and folder is not None:
        _write_weights(on_disk, folder)
    return OffloadedWeightsLoader(state_dict, save_folder=folder, index=index)


def _guard_moves(model: nn.Module) -> None:
    """Let `model.to(...)` and similar methods warn, or raise if weights are offloaded."""
    for name in GUARDED:
        if hasattr(model, name):
            move = getattr(model, name)
            # Not a closure, which a copy of the model would share: its `to` would move the original.
            setattr(model, name, functools.update_wrapper(functools.partial(_guarded, model, move), move))


def _guarded(model: nn.Module, move: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if any(param.is_meta for param in model.parameters()):
        raise ModelError(
            "this model is dispatched and some of its weights are offloaded: it cannot be moved or cast. Remove "
            "its hooks first (remove_hook_from_submodules), or dispatch it again"
        )
    _logger.warning("a dispatched model is being moved: its hooks still place each layer by the device map")
    return move(*args, **kwargs)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: Folder,
    device_map: str | DeviceMap | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    offload_folder: Folder | None = None,
    offload_buffers: bool = False,
    dtype: Dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint into `model`, which may be on the meta device, and place it for inference.

    Args:
        checkpoint: see `load_checkpoint_in_model`, as for `offload_folder`, `dtype`, `strict` and the last two.
        device_map: a map, or a strategy: "auto" and "balanced" fill accelerators evenly, "balanced_low_0" leaves room
            on the first one, "sequential" fills one after the other. None loads the weights and places nothing.
        max_memory: see `get_max_memory`.
        no_split_module_classes: classes whose modules are not split over devices.

    Other arguments as in `dispatch_model`.
    """
    chosen = check_and_set_device_map(device_map)
    if isinstance(chosen, str):
        room = _room(model, chosen, max_memory, no_split_module_classes, dtype)
        chosen = infer_auto_device_map(
            model, room, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
    if chosen is not None:
        # Before a weight is loaded.
        check_device_map(model, chosen)
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=chosen,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_state_dict=bool(offload_state_dict),
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if chosen is None:
        return model
    return dispatch_model(
        model,
        device_map=chosen,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def _room(
    model: nn.Module,
    strategy: str,
    max_memory: Limits | None,
    no_split: Sequence[str] | str | None,
    dtype: Dtype | None,
) -> Limits | None:
    """The limits with which `infer_auto_device_map` fills devices as `strategy` requires."""
    if strategy == "sequential":
        return max_memory
    low_zero = strategy == "balanced_low_0"
    return {**get_balanced_memory(model, max_memory, no_split, dtype, low_zero=low_zero)}
