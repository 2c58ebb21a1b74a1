"""The tensors of a module by name: list them, put one on a device, share copies of one weight."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from windlass.core.errors import ModelError

Place = torch.device | str | int
"""Where a tensor may lie: a torch device, its name, or the number of an accelerator."""

META = torch.device("meta")


class SharedWeight:
    """The copies of one tied weight, by device, for as long as some module holds them.

    Modules that share a weight and need it on the same device at the same time take one copy. Nothing is kept alive
    here, so nothing has to be given back.
    """

    def __init__(self) -> None:
        self._copies: WeakValueDictionary[torch.device, Tensor] = WeakValueDictionary()

    def on(self, device: torch.device) -> Tensor | None:
        """The copy on `device`, or None when no module holds one now."""
        return self._copies.get(device)

    def remember(self, tensor: Tensor) -> None:
        """Offer `tensor` to the other modules that share this weight."""
        self._copies[tensor.device] = tensor


def device_of(place: Place) -> torch.device:
    """`place` as a torch device with its index, so that `cuda` and `cuda:0` are one device."""
    device = torch.device(place)
    if device.index is None and device.type not in ("cpu", "meta", "mps"):
        return torch.device(device.type, 0)
    return device


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two devices are the same one; a missing index means the first."""
    return device_of(first_device) == device_of(second_device)


def renewed(param: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter of the same class as `param`, with its attributes and its `requires_grad`, holding `data`."""
    if type(param) is nn.Parameter:
        new = nn.Parameter(data, requires_grad=param.requires_grad)
        new.__dict__.update(param.__dict__)
        return new
    return type(param)(data, requires_grad=param.requires_grad, **param.__dict__)


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, of `module` (and of all in it, with `recurse`), each tensor once.

    Args:
        remove_non_persistent: leave out buffers that are no part of the state dict.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
    yield from (
        (name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in left_out
    )


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of the buffers that are no part of the state dict.

    Args:
        fqns: names as seen from `module`; otherwise the last part of each alone.
    """
    modules = module.named_modules() if recurse else [("", module)]
    return {
        f"{prefix}.{name}" if fqns and prefix else name
        for prefix, owner in modules
        for name in owner._non_persistent_buffers_set
    }


def owner_of(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """The submodule that holds the parameter or buffer `tensor_name`, and its name there.

    Raises:
        ModelError: there is no such tensor.
    """
    path, _, name = tensor_name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        raise ModelError(f"{type(module).__name__} has no module {path!r} (for {tensor_name})") from None
    if name not in owner._parameters and name not in owner._buffers:
        raise ModelError(f"{type(module).__name__} has no parameter or buffer {tensor_name!r}")
    return owner, name


def put_tensor(module: nn.Module, tensor_name: str, tensor: Tensor | None) -> None:
    """Make `tensor` the parameter or buffer of this name, as it is."""
    owner, name = owner_of(module, tensor_name)
    if name in owner._parameters:
        owner._parameters[name] = tensor  # type: ignore[assignment]
    else:
        owner._buffers[name] = tensor


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Place,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    tied_params_map: SharedWeight | None = None,
    non_blocking: bool = False,
) -> None:
    """Put a parameter or buffer on `device`; `param.to(device)` alone would leave the module with the old one.

    Args:
        tensor_name: seen from `module`, e.g. `"encoder.0.weight"`.
        value: data for it, of the same shape; needed when it leaves the meta device.
        dtype: what floating-point data is cast to. Without it, `value` is cast to the dtype that is there.
        tied_params_map: the copies of this weight that other modules hold; one that lies on `device` is taken.
        non_blocking: copies do not wait for the device, where it can be done.

    Raises:
        ModelError: no such tensor, a value of another shape, or no value for a tensor without data.
    """
    owner, name = owner_of(module, tensor_name)
    old = getattr(owner, name)
    if old is None:
        raise ModelError(f"{tensor_name} is None: nothing to put on {device}")
    target = device_of(device)
    if value is None and old.is_meta and target != META:
        raise ModelError(
            f"{tensor_name} is on the meta device: without a value nothing can be put on {device}"
        )
    if value is not None and value.shape != old.shape:
        raise ModelError(
            f"{tensor_name} has shape {tuple(old.shape)} in the model, and {tuple(value.shape)} was given"
        )
    shared = tied_params_map.on(target) if tied_params_map is not None else None
    if shared is not None:
        put_tensor(owner, name, shared)
        return
    new = _placed(old, value, target, torch_dtype(dtype), non_blocking)
    if new is not old:
        put_tensor(owner, name, new)
    if tied_params_map is not None:
        tied_params_map.remember(new)


@torch.no_grad()
def _placed(
    old: Tensor, value: Tensor | None, device: torch.device, dtype: torch.dtype | None, non_blocking: bool
) -> Tensor:
    """`old` itself when nothing changes; else a tensor (a parameter, if `old` is one) on `device`."""
    source = old if value is None else value
    wanted = old.dtype if dtype is None or not source.is_floating_point() else dtype
    if dtype is not None and not source.is_floating_point():
        wanted = source.dtype
    if value is None and old.device == device and old.dtype == wanted:
        return old
    data = source.detach().to(device=device, dtype=wanted, non_blocking=non_blocking)
    return renewed(old, data) if isinstance(old, nn.Parameter) else data


def torch_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype from its name, with or without `torch.` in front.

    Raises:
        ModelError: torch has no such dtype.
    """
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"torch has no dtype {dtype!r}; give one such as 'float16', 'bfloat16' or 'float32'")
    return found
