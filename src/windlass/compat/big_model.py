"""Models that are larger than a device, or than the memory: spread over devices, the host and the disk to be run.

    with init_empty_weights():
        model = Model(config)
    model = load_checkpoint_and_dispatch(model, "checkpoint", device_map="auto", offload_folder="offload")
    model(inputs)

Each layer's weights come to its device for the time of its forward. This is for inference: offloaded weights get no
gradients.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from windlass.checkpoint.names import shorten
from windlass.compat.attach_hooks import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    extract_submodules_state_dict,
    shared_weights,
)
from windlass.compat.auto_device_map import infer_auto_device_map
from windlass.compat.checkpoint_loading import load_checkpoint_in_model
from windlass.compat.device_map import (
    STRATEGIES,
    DeviceMap,
    check_and_set_device_map,
    check_device_map,
    without_nesting,
)
from windlass.compat.device_memory import get_balanced_memory
from windlass.compat.moving import CpuOffload, UserCpuOffloadHook
from windlass.compat.offloaded import (
    INDEX_NAME,
    OffloadedWeightsLoader,
    offload_state_dict,
    read_offload_index,
)
from windlass.compat.ties import find_tied_parameters
from windlass.core.device import visible_devices
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.logs import get_logger
from windlass.transforms.model_hooks import GUARDED, add_hook_to_module
from windlass.transforms.module_tensors import Place
from windlass.transforms.offload import AlignDevicesHook, Weights

OFFLOADED = ("cpu", "disk")
_logger = get_logger(__name__)


def cpu_offload(
    model: nn.Module,
    execution_device: Place | None = None,
    offload_buffers: bool = False,
    state_dict: dict[str, Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all weights of a model on the host, and bring each layer's to the device for its forward.

    Args:
        execution_device: where the model runs; by default where its first parameter is.
        offload_buffers: offload persistent buffers as well.
        state_dict: the weights, if the model does not have them itself.
        preload_module_classes: classes whose modules are brought whole, for forwards that use the weights of their
            children without calling them.
    """
    weights = _on_host(model.state_dict()) if state_dict is None else state_dict
    return _offload_all(model, weights, execution_device, offload_buffers, preload_module_classes)


def _on_host(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors on the host, tied ones once. Those without data are left out."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    host = {}
    for name, tensor in state_dict.items():
        if not tensor.is_meta:
            host[name] = copies.setdefault((tensor.data_ptr(), tensor.shape), tensor.to("cpu"))
    return host


def _offload_all(
    model: nn.Module,
    weights: Weights,
    execution_device: Place | None,
    offload_buffers: bool,
    preload_module_classes: list[str] | None,
) -> nn.Module:
    if execution_device is None:
        execution_device = next(iter(model.parameters())).device
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
    """Keep a model on the host until its forward, and from then on the device until the hook's `offload()`.

    For a pipeline of models of which one at a time fits on the device, each called many times in its turn.

    Args:
        execution_device: where the model runs; by default this process's accelerator, if it has one.
        prev_module_hook: the hook of the model before it in the pipeline, which is offloaded when this one is called.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Place | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all weights of a model on disk, and read each layer's for its forward.

    Args:
        offload_dir: where the weights go. Those that the model does not have itself (on the meta device) must be there
            already.

    Other arguments as in `cpu_offload`.

    Raises:
        ModelError: weights are neither in the model nor in the folder.
    """
    _write_weights(model.state_dict(), offload_dir)
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload_all(model, weights, execution_device, offload_buffers, preload_module_classes)


def _write_weights(state_dict: Mapping[str, Tensor], folder: str | os.PathLike[str]) -> None:
    """Write what has data. What has none must be in the folder's index, from an earlier load.

    A folder that holds other weights under these names is never read instead: it may be another model's.
    """
    real = {name: tensor for name, tensor in state_dict.items() if not tensor.is_meta}
    offload_state_dict(folder, real)
    if not os.path.exists(os.path.join(folder, INDEX_NAME)):
        raise ModelError(f"no weights to offload: the model has none, and {folder} has no {INDEX_NAME}")
    index = read_offload_index(folder)
    if missing := [name for name in state_dict if name not in index]:
        raise ModelError(f"no data for {shorten(missing)}: neither the model nor {folder} has them")


def dispatch_model(
    model: nn.Module,
    device_map: DeviceMap,
    main_device: Place | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Mapping[str, str]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Place a model as a device map says, so that it can be called as if it lay on one device.

    Args:
        main_device: where offloaded layers run; by default the first device of the map, or the host.
        state_dict: weights of the modules on the host, if the model does not have them itself.
        offload_dir: the folder of weights on disk; what the model has itself is written there.
        offload_index: where each weight on disk is, instead of the folder's own index.
        offload_buffers: persistent buffers of offloaded modules are offloaded as well.
        skip_keys: keyword arguments, and keys of outputs, that are not moved between devices.
        preload_module_classes: as in `cpu_offload`.
        force_hooks: put hooks on a model that lies on a single device too.

    Raises:
        ConfigError: a map that does not cover the model or names devices that are not here; no folder for the disk.
        ModelError: weights that are nowhere to be found.
    """
    check_device_map(model, device_map)
    _check_devices(device_map)
    places = set(device_map.values())
    if len(places) > 1 or "disk" in places or force_hooks:
        flat = without_nesting(model, device_map)
        weights = _Offloading(model, flat, main_device, offload_dir, offload_index)
        weights.attach(state_dict, offload_buffers, skip_keys, preload_module_classes)
        _guard_moves(model)
    else:
        model.to(next(iter(places)))
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _check_devices(device_map: DeviceMap) -> None:
    count = visible_devices()
    absent = sorted({place for place in device_map.values() if isinstance(place, int) and place >= count})
    if absent:
        fix = f"names devices {absent}; there are {count} accelerators here"
        raise ConfigError(Problem("device_map", dict(device_map), fix))


class _Offloading:
    """Which modules of a map are offloaded, where they run, and where their weights wait."""

    def __init__(
        self,
        model: nn.Module,
        device_map: Mapping[str, Place],
        main_device: Place | None,
        folder: str | os.PathLike[str] | None,
        index: Mapping[str, Mapping[str, str]] | None,
    ) -> None:
        self._model, self._map, self._folder, self._index = model, device_map, folder, index
        devices = [place for place in dict.fromkeys(device_map.values()) if str(place) not in OFFLOADED]
        self._main: Place = main_device if main_device is not None else devices[0] if devices else "cpu"
        # A host that runs layers itself has nothing to offload to its own memory; MPS shares it.
        self._away = ("disk",) if torch.device(self._main).type in ("cpu", "mps") else OFFLOADED
        self._disk = [name for name, place in device_map.items() if str(place) == "disk"]
        self._host = [
            name for name, place in device_map.items() if str(place) == "cpu" and "cpu" in self._away
        ]
        if self._disk and folder is None and index is None:
            fix = f"{', '.join(self._disk)} go to disk: name a folder for their weights"
            raise ConfigError(Problem("offload_dir", None, fix))

    def attach(
        self,
        state_dict: Mapping[str, Tensor] | None,
        offload_buffers: bool,
        skip_keys: str | list[str] | None,
        preload_module_classes: list[str] | None,
    ) -> None:
        """Put the hooks on. Offloaded weights leave the model one module at a time."""
        attach_align_device_hook_on_blocks(
            self._model,
            execution_device={"": self._main, **{name: self._runs_on(name) for name in self._map}},
            offload={name: str(place) in self._away for name, place in self._map.items()},
            weights_map=self._weights(state_dict),
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            tied_params_map=shared_weights(find_tied_parameters(self._model)),
        )
        if away := [name for name in self._map if name in (*self._disk, *self._host)]:
            _logger.info("offloaded: %s. Their weights get no gradients.", ", ".join(away))

    def _runs_on(self, name: str) -> Place:
        place = self._map[name]
        return self._main if str(place) in OFFLOADED else place

    def _weights(self, state_dict: Mapping[str, Tensor] | None) -> Weights | None:
        if state_dict is None and self._host:
            state_dict = _on_host(extract_submodules_state_dict(self._model.state_dict(), self._host))
        on_disk = extract_submodules_state_dict(self._model.state_dict(), self._disk)
        if not on_disk:
            return None if state_dict is None else OffloadedWeightsLoader(state_dict=state_dict)
        if self._index is None:
            assert self._folder is not None
            _write_weights(on_disk, self._folder)
        return OffloadedWeightsLoader(state_dict, save_folder=self._folder, index=self._index)


def _guard_moves(model: nn.Module) -> None:
    """Have `model.to(...)` and its like say that a dispatched model is not to be moved."""
    for name in GUARDED:
        if hasattr(model, name):
            setattr(model, name, _guarded(model, getattr(model, name)))


def _guarded(model: nn.Module, move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(move)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if any(param.is_meta for param in model.parameters()):
            raise ModelError(
                "this model is dispatched and some of its weights are offloaded: it cannot be moved or cast. Take the "
                "hooks off first (remove_hook_from_submodules), or dispatch it anew"
            )
        _logger.warning(
            "a dispatched model is being moved: its hooks still place each layer as the device map says"
        )
        return move(*args, **kwargs)

    return guarded


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | DeviceMap | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model, typically one without weights, and place it to be run.

    Args:
        checkpoint: see `load_checkpoint_in_model`, as for `offload_folder`, `dtype`, `strict` and the last two.
        device_map: a map, or how to find one: "auto" and "balanced" fill accelerators evenly, "balanced_low_0" leaves
            room on the first, "sequential" fills one after the other. None loads the weights and places nothing.
        max_memory: see `get_max_memory`.
        no_split_module_classes: classes whose modules must not be split over devices.

    Other arguments as in `dispatch_model`.
    """
    chosen = check_and_set_device_map(device_map)
    if isinstance(chosen, str):
        chosen = _inferred(
            model, chosen, max_memory, no_split_module_classes, dtype=dtype, offload_buffers=offload_buffers
        )
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


def _inferred(
    model: nn.Module,
    strategy: str,
    max_memory: Mapping[int | str, int | str] | None,
    no_split: Sequence[str] | str | None,
    *,
    dtype: str | torch.dtype | None,
    offload_buffers: bool,
) -> DeviceMap:
    assert strategy in STRATEGIES
    room: Mapping[int | str, int | str] | None = max_memory
    if strategy != "sequential":
        low_zero = strategy == "balanced_low_0"
        room = dict(get_balanced_memory(model, max_memory, no_split, dtype, low_zero=low_zero))
    return infer_auto_device_map(model, room, no_split, dtype, offload_buffers=offload_buffers)
