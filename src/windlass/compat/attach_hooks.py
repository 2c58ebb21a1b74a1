"""Where the hooks of `offload.py` go in a model: on every module that holds weights, or block by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from windlass.transforms.model_hooks import add_hook_to_module
from windlass.transforms.module_tensors import Place, SharedWeight, named_module_tensors
from windlass.transforms.offload import AlignDevicesHook, Weights

Ties = Mapping[str, SharedWeight]
Skip = str | list[str] | None


class PrefixedDataset(Mapping[str, Any]):
    """Those entries of a map whose keys begin with a prefix, under what follows it."""

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset, self.prefix = dataset, prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset  # reads no tensor, as the inherited one would

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self.prefix) for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _inside(names: Mapping[str, Any] | None, module_name: str) -> Mapping[str, Any] | None:
    return PrefixedDataset(names, f"{module_name}.") if names is not None and module_name else names


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _modules(module: nn.Module, preload: list[str] | None) -> Iterator[tuple[str, nn.Module]]:
    """`module` and all in it, each once, but nothing inside a module of a class in `preload`."""
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        name, part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield name, part
        if type(part).__name__ not in (preload or ()):
            waiting.extend((_join(name, child_name), child) for child_name, child in part.named_children())


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Place,
    skip_keys: Skip = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: Ties | None = None,
    module_name: str = "",
) -> None:
    """Have each module that holds tensors, and has no hook yet, bring its inputs to `execution_device`.

    Args:
        preload_module_classes: classes whose modules are left as they are inside.
        module_name: the name of `module` in the model, for `tied_params_map`.
    """
    for name, part in _modules(module, preload_module_classes):
        if hasattr(part, "_hf_hook") or next(named_module_tensors(part, recurse=True), None) is None:
            continue
        ties = _inside(tied_params_map, _join(module_name, name))
        add_hook_to_module(
            part, AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=ties)
        )


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Place | None = None,
    offload: bool = False,
    weights_map: Weights | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Skip = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: Ties | None = None,
) -> None:
    """Put an `AlignDevicesHook` on each module in `module` that holds tensors directly.

    Args:
        module_name: the name of `module` in the model, under which `weights_map` and `tied_params_map` know it.
        preload_module_classes: classes whose modules are brought whole, for forwards that use the weights of their
            children without calling them.
    """
    for name, part in list(_modules(module, preload_module_classes if offload else None)):
        whole = offload and type(part).__name__ in (preload_module_classes or ())
        if not whole and next(named_module_tensors(part), None) is None:
            continue
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=_inside(weights_map, _join(module_name, name)),
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=_inside(tied_params_map, _join(module_name, name)),
        )
        add_hook_to_module(part, hook, append=True)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Place | Mapping[str, Place] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Weights | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Skip = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: Ties | None = None,
) -> None:
    """Place the blocks of a model as two maps say: where each runs, and whether its weights are offloaded.

    Args:
        execution_device: one device for all, or by name of a block or tensor; `""` is where the model's own code runs.
        offload: likewise. Blocks do not lie inside one another, unless the outer is `""` in `execution_device` alone.
    """
    if not isinstance(execution_device, Mapping):
        names = offload if isinstance(offload, Mapping) else {module_name: offload}
        execution_device = {name: execution_device for name in names if execution_device is not None}
    if not isinstance(offload, Mapping):
        offload = dict.fromkeys(execution_device, offload)
    blocks = _Blocks(
        execution_device,
        offload,
        weights_map,
        offload_buffers,
        skip_keys,
        preload_module_classes,
        tied_params_map,
    )
    for name, part in list(module.named_modules()):
        blocks.attach(_join(module_name, name), part, is_root=not name)


class _Blocks:
    """The maps of `attach_align_device_hook_on_blocks`, applied to one module at a time."""

    def __init__(
        self,
        devices: Mapping[str, Place],
        offload: Mapping[str, bool],
        weights: Weights | None,
        offload_buffers: bool,
        skip_keys: Skip,
        preload: list[str] | None,
        ties: Ties | None,
    ) -> None:
        self._devices, self._offload, self._weights, self._ties = devices, offload, weights, ties
        self._offload_buffers, self._skip_keys, self._preload = offload_buffers, skip_keys, preload

    def attach(self, name: str, module: nn.Module, is_root: bool) -> None:
        if name not in self._offload:
            self._own_tensors(name, module, is_root)
        elif self._offload[name]:
            self._offloaded(name, module, is_root)
        else:
            self._resident(name, module, is_root)

    def _resident(self, name: str, module: nn.Module, is_root: bool) -> None:
        hook = self._hook(name, self._devices.get(name), io_same_device=is_root, place_submodules=True)
        add_hook_to_module(module, hook)
        self._inputs_follow(name, module)

    def _offloaded(self, name: str, module: nn.Module, is_root: bool) -> None:
        if is_root:  # before the others: it must see the inputs where the caller has them
            add_hook_to_module(module, AlignDevicesHook(io_same_device=True, skip_keys=self._skip_keys))
        attach_align_device_hook(
            module,
            execution_device=self._devices.get(name),
            offload=True,
            weights_map=self._weights,
            offload_buffers=self._offload_buffers,
            module_name=name,
            skip_keys=self._skip_keys,
            preload_module_classes=self._preload,
            tied_params_map=self._ties,
        )
        self._inputs_follow(name, module)

    def _own_tensors(self, name: str, module: nn.Module, is_root: bool) -> None:
        """A module whose parts are placed one by one: only what it holds directly is its own."""
        tensors = [_join(name, tensor) for tensor, _ in named_module_tensors(module)]
        named = [tensor for tensor in tensors if tensor in self._offload]
        if not named and not is_root:
            return
        device = self._devices.get(named[0] if named else name)
        away = any(self._offload[tensor] for tensor in named)
        add_hook_to_module(module, self._hook(name, device, io_same_device=is_root, offload=away))

    def _inputs_follow(self, name: str, module: nn.Module) -> None:
        if name in self._devices:
            attach_execution_device_hook(
                module, self._devices[name], self._skip_keys, self._preload, self._ties, module_name=name
            )

    def _hook(self, name: str, device: Place | None, **options: bool) -> AlignDevicesHook:
        return AlignDevicesHook(
            execution_device=device,
            weights_map=_inside(self._weights, name),
            offload_buffers=self._offload_buffers,
            skip_keys=self._skip_keys,
            tied_params_map=_inside(self._ties, name),
            **options,
        )


def shared_weights(tied: list[list[str]]) -> dict[str, SharedWeight]:
    """For each tied name (see `find_tied_parameters`) the record of copies that its group shares."""
    return {name: shared for group in tied for shared in [SharedWeight()] for name in group}


def extract_submodules_state_dict(
    state_dict: Mapping[str, Tensor], submodule_names: list[str]
) -> dict[str, Tensor]:
    """The entries of a state dict that are in the named modules, or are named themselves."""
    return {
        key: tensor
        for key, tensor in state_dict.items()
        if any(not name or key == name or key.startswith(f"{name}.") for name in submodule_names)
    }
