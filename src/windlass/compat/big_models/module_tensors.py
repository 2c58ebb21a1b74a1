"""The parameters and buffers of a module by name: list them, move one to a device, share copies of tied weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from windlass.accelerator.offloaded_weights import offload_hook
from windlass.compat.big_models.model_hooks import (
    Inputs,
    ModelHook,
    remove_hook_from_module,
    without_compiler,
)
from windlass.core.device import choose_device, copies_may_wait
from windlass.core.errors import ModelError
from windlass.core.trees import send_to_device

Place = torch.device | str | int
"""A torch device, its name, or the index of an accelerator."""

META = torch.device("meta")


SharedWeight = WeakValueDictionary[torch.device, Tensor]
"""The copies of one tied weight, by device: modules that need it on one device at the same time use one copy, which is
freed as soon as no module holds it.
"""


def device_of(place: Place) -> torch.device:
    """`place` as a torch device with an index: `cuda` is the current device, on which PyTorch puts what goes there."""
    device = torch.device(place)
    if device.index is not None or device.type in ("cpu", "meta", "mps"):
        return device
    # A build for CUDA names it also on a machine that has none.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = accelerator is not None and accelerator.type == device.type
    return torch.device(device.type, torch.accelerator.current_device_index() if here else 0)


def renewed(param: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter that holds `data`, with the class, the attributes and the `requires_grad` of `param`."""
    if type(param) is nn.Parameter:
        new = nn.Parameter(data, requires_grad=param.requires_grad)
        new.__dict__.update(param.__dict__)
        return new
    # Classes such as those of packed weights take their attributes in the constructor.
    return type(param)(data, requires_grad=param.requires_grad, **param.__dict__)


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, of `module` (with `recurse`, of its submodules too), each tensor once.

    Args:
        remove_non_persistent: leave out buffers that are not in the state dict.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
    yield from (item for item in module.named_buffers(recurse=recurse) if item[0] not in left_out)


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of the buffers that are not in the state dict.

    Args:
        recurse: those of submodules too.
        fqns: names from `module` on ("block.mask"); otherwise the names within the modules that hold them ("mask").
    """
    modules = module.named_modules() if recurse else [("", module)]
    return {
        f"{prefix}.{name}" if prefix and fqns else name
        for prefix, owner in modules
        for name in owner._non_persistent_buffers_set
    }


def owner_of(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """The submodule that holds the parameter or buffer `tensor_name`, and the tensor's name there."""
    path, _, name = tensor_name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        raise ModelError(f"{type(module).__name__} has no module {path!r} (for {tensor_name})") from None
    if name not in owner._parameters and name not in owner._buffers:
        raise ModelError(f"{type(module).__name__} has no parameter or buffer {tensor_name!r}")
    return owner, name


def get_tensor(module: nn.Module, tensor_name: str) -> Any:
    """The parameter or buffer `tensor_name`; None if it is registered as None."""
    return getattr(*owner_of(module, tensor_name))


def put_tensor(module: nn.Module, tensor_name: str, tensor: Tensor | None) -> None:
    """Make `tensor` the parameter or buffer of this name, without a copy."""
    owner, name = owner_of(module, tensor_name)
    tensors: Any = owner._parameters if name in owner._parameters else owner._buffers
    tensors[name] = tensor


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Place,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    tied_params_map: SharedWeight | None = None,
    non_blocking: bool = False,
) -> None:
    """Move a parameter or buffer of `module` to `device`. Raises ModelError for no such tensor, a value of another
    shape, or no value for a tensor without data.

    Args:
        tensor_name: name relative to `module`, such as `"encoder.0.weight"`.
        value: its new data, of the same shape; required to move a tensor from the meta device.
        dtype: the dtype to cast floating-point data to. By default, `value` is cast to the dtype of the tensor.
        tied_params_map: copies of this weight that other modules hold; one that is on `device` is used.
        non_blocking: copy asynchronously if possible.
    """
    old, target = get_tensor(module, tensor_name), device_of(device)
    if old is None:
        raise ModelError(f"{tensor_name} is None: it cannot be moved to {device}")
    if value is None and old.is_meta and target != META:
        raise ModelError(f"{tensor_name} is on the meta device: pass `value` to move it to {device}")
    if value is not None and value.shape != old.shape:
        raise ModelError(
            f"{tensor_name} has shape {tuple(old.shape)} in the model, and {tuple(value.shape)} was given"
        )
    new = tied_params_map.get(target) if tied_params_map is not None else None
    if new is None:
        new = _placed(old, value, target, torch_dtype(dtype), non_blocking)
        if tied_params_map is not None:
            tied_params_map[new.device] = new
    if new is not old:
        put_tensor(module, tensor_name, new)


@torch.no_grad()
def _placed(
    old: Tensor, value: Tensor | None, device: torch.device, dtype: torch.dtype | None, non_blocking: bool
) -> Tensor:
    """`old` itself if nothing changes; else a tensor on `device`, which is a parameter if `old` is one."""
    source = old if value is None else value
    wanted = old.dtype
    if dtype is not None:
        # Integers are positions, packed weights or masks, which mean something else in another type.
        wanted = dtype if source.is_floating_point() else source.dtype
    if value is None and old.device == device and old.dtype == wanted:
        return old
    ahead = non_blocking and copies_may_wait(device)
    data = source.detach().to(device=device, dtype=wanted, non_blocking=ahead)
    return renewed(old, data) if isinstance(old, nn.Parameter) else data


def torch_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of a name, with or without the prefix `torch.`; a dtype or None is returned as it is."""
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"torch has no dtype {dtype!r}; use one such as 'float16', 'bfloat16' or 'float32'")
    return found


def find_tied_parameters(model: nn.Module, **_: Any) -> list[list[str]]:
    """Groups of names of one parameter, each sorted, such as `[["embedding.weight", "head.weight"]]`.

    Parameters are tied if they are the same object, so this works on the meta device too.
    """
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Tie each group of names (see `find_tied_parameters`) again, to the first parameter that has data."""
    for group in tied_params:
        kept = next((param for name in group if not (param := get_tensor(model, name)).is_meta), None)
        if kept is not None:
            for name in group:
                put_tensor(model, name, kept)


class CpuOffload(ModelHook):
    """Keeps a model on the host until its forward, and then on the device until `UserCpuOffloadHook.offload`.

    Args:
        execution_device: the device on which the model runs; by default this process's accelerator, if it has one.
        prev_module_hook: the hook of a model that is offloaded before this one is moved to the device.
    """

    def __init__(
        self, execution_device: Place | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.execution_device = device_of(choose_device() if execution_device is None else execution_device)
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the host."""
        return module.to("cpu")

    @without_compiler
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Inputs:
        """Move the model and its inputs to the device."""
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """Returned by `cpu_offload_with_hook`: offloads a model."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Move the model to the host until its next forward."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook; the model is not moved."""
        remove_hook_from_module(self.model)


@contextmanager
def align_module_device(module: nn.Module, execution_device: Place | None = None) -> Iterator[None]:
    """Context: the direct parameters of `module` are on `execution_device`, by default where the module runs.

    Offloaded weights are loaded for the context, and changes to them are lost.
    """
    hook = offload_hook(module)
    if hook is None:
        with _moved(module, execution_device):
            yield
        return
    before = hook.execution_device
    if execution_device is not None:
        hook.execution_device = execution_device
    try:
        hook.pre_forward(module)
        yield
    finally:
        hook.post_forward(module, None)
        hook.execution_device = before


@contextmanager
def _moved(module: nn.Module, device: Place | None) -> Iterator[None]:
    """Direct parameters are on `device`; changes to them are kept."""
    if device is None:
        yield
        return
    originals = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    # Names of one tensor share its copy.
    copies: dict[Tensor, SharedWeight] = defaultdict(WeakValueDictionary)
    try:
        for name, original in originals.items():
            set_module_tensor_to_device(module, name, device, tied_params_map=copies[original])
        yield
    finally:
        for name, original in originals.items():
            moved = get_tensor(module, name)
            if moved is not original and not moved.is_meta:  # the body may have changed it in place
                original.data.copy_(moved.data)
            put_tensor(module, name, original)
