"""PyTorch/XLA, whose devices run the recorded work of an update as one compiled graph. The one file that imports it.

One process drives all devices of its machine (SPMD): a tensor has the shape of the whole batch, and the compiler
splits the work over the mesh by the marks on parameters and inputs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from windlass.core.errors import ConfigError, Problem, first_line
from windlass.core.optional import is_available

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

INSTALL = "pip install torch==2.9.0 torch_xla==2.9.0"
NEEDED = f"needs PyTorch/XLA, which is not installed or is switched off (USE_TORCH_XLA=0): {INSTALL}"
DATA = "fsdp"  # the axis of the mesh over which batches are split, and parameters if they are sharded
_STARTED_BY_LAUNCH = "PJRT_LOCAL_PROCESS_RANK"  # set in each worker of `torch_xla.launch`
_OFF = ("0", "FALSE", "NO", "OFF")


def is_selected() -> bool:
    """Return True if torch_xla is installed, and `USE_TORCH_XLA` does not switch it off."""
    return os.environ.get("USE_TORCH_XLA", "1").upper() not in _OFF and is_available("torch_xla")


@functools.cache
def device() -> torch.device:
    """The device of this process. With several on the machine it is all of them together. The first call starts the
    runtime. Raises ConfigError if the runtime finds no device, or devices of other processes.
    """
    if _STARTED_BY_LAUNCH in os.environ:
        fix = "one process drives all devices: start the script itself, instead of a function with torch_xla.launch"
        raise ConfigError(Problem("torch_xla.launch", f"worker {os.environ[_STARTED_BY_LAUNCH]}", fix))
    import torch_xla  # before torch, for which it is a plugin
    from torch_xla import runtime

    try:
        everywhere, here = runtime.global_runtime_device_count(), runtime.addressable_runtime_device_count()
    except (RuntimeError, OSError) as error:
        said = first_line(error)
        fix = f"PyTorch/XLA finds no such device ({said}); set it to CPU or TPU, or USE_TORCH_XLA=0"
        raise ConfigError(Problem("PJRT_DEVICE", os.environ.get("PJRT_DEVICE"), fix)) from error
    if everywhere != here:
        fix = (
            f"{everywhere} devices belong to several processes, and one process has to drive all of them: start the "
            "script itself instead of torch_xla.launch, on one machine"
        )
        raise ConfigError(Problem("torch_xla.launch", here, fix))
    if everywhere > 1:
        runtime.use_spmd()
    found: torch.device = torch_xla.device()
    _check_backward(found)
    _autocast_attention()
    return found


def _check_backward(device: torch.device) -> None:
    """Check that gradients can be computed: the first backward of a process fixes the devices that it knows."""
    import torch

    try:
        torch.ones((), device=device, requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        fix = (
            "a backward on another device ran before PyTorch/XLA was started: make the Trainer or the Accelerator, or "
            "call torch_xla.device(), before it"
        )
        raise ConfigError(Problem("device", str(device), fix)) from error


@functools.cache
def _autocast_attention() -> torch.library.Library:
    """Let autocast cast what attention gets, as on other devices: the library leaves it out, and queries in fp32 beside
    values in bf16, which rotary embeddings make, would be an error.
    """
    import torch

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        dtype = torch.get_autocast_dtype("xla")
        cast = [
            given.to(dtype) if isinstance(given, torch.Tensor) and given.is_floating_point() else given
            for given in (query, key, value, attn_mask)
        ]
        with torch.autocast("xla", enabled=False):
            return torch.nn.functional.scaled_dot_product_attention(*cast, *args, **kwargs)  # type: ignore[arg-type]

    registered = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    registered.impl("scaled_dot_product_attention", attention, "AutocastXLA")  # type: ignore[no-untyped-call]
    return registered


def device_count() -> int:
    """Devices that the process drives."""
    device()
    from torch_xla import runtime

    return int(runtime.global_runtime_device_count())


def kind() -> str:
    """The kind of its devices: "CPU", "TPU" or "CUDA"."""
    device()
    from torch_xla import runtime

    return str(runtime.device_type())


def sync() -> None:
    """Compile the recorded work, or take its graph from the cache, and start it. Does not wait for its end."""
    import torch_xla

    torch_xla.sync()


def tensor_id(tensor: Tensor) -> int:
    """A number that tensors with the same elements in memory share: on these devices there are no addresses."""
    import torch_xla

    return int(torch_xla._XLAC._xla_get_tensor_id(tensor))


@functools.cache
def _bit_cast(to: str) -> Callable[[Tensor], Tensor]:
    from torch_xla.core import xla_builder, xla_op_registry

    kind = getattr(xla_builder.Type, to)
    cast: Callable[[Tensor], Tensor] = xla_op_registry.register(
        f"windlass_{to}", lambda value: value.bitcast(kind)
    )
    return cast


def bits_of(numbers: Tensor) -> Tensor:
    """The int32 with the bits of each fp32 number. `Tensor.view` would compute it on the host."""
    return _bit_cast("S32")(numbers)


def numbers_of(bits: Tensor) -> Tensor:
    """The fp32 number with the bits of each int32."""
    return _bit_cast("F32")(bits)


class Generator:
    """The random generator of the device, with the methods of `torch.Generator`."""

    def manual_seed(self, seed: int) -> None:
        from torch_xla.core import xla_model

        xla_model.set_rng_state(seed, device())

    def get_state(self) -> Tensor:
        """Its 64 bits as bytes."""
        import torch
        from torch_xla.core import xla_model

        state = int(xla_model.get_rng_state(device()))
        return torch.tensor(list(state.to_bytes(8, "little")), dtype=torch.uint8)

    def set_state(self, state: Tensor) -> None:
        self.manual_seed(int.from_bytes(bytes(state.tolist()), "little"))


# --- SPMD -------------------------------------------------------------------------------------------------------------


@functools.cache
def _mesh() -> Any:
    import numpy as np
    from torch_xla.distributed import spmd

    count = device_count()
    return spmd.Mesh(np.arange(count), (count,), (DATA,))


def split(tensor: Tensor, dim: int = 0) -> None:
    """Mark axis `dim` of a tensor as split over the devices. The compiler pads what they do not divide evenly."""
    from torch_xla.distributed import spmd

    spmd.mark_sharding(tensor, _mesh(), tuple(DATA if axis == dim else None for axis in range(tensor.dim())))


def is_split(tensor: Tensor) -> bool:
    """Return True if the tensor was marked by `split`, or by the script."""
    import torch_xla

    return bool(torch_xla._XLAC._get_xla_sharding_spec(tensor))


def separate_backwards(module: nn.Module) -> None:
    """Keep the compiler from fusing the backward of `module` with that of others, which would gather all at once."""
    from torch_xla.distributed import spmd

    spmd.xla_sharding.apply_backward_optimization_barrier(module)


def recomputing(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its activations recomputed in the backward, in the way that the compiler does not undo.

    Tensors that require gradients must be arguments themselves, not items of one.
    """
    import torch
    from torch_xla.utils.checkpoint import checkpoint

    @functools.wraps(function)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        count, names = len(args), tuple(kwargs)
        given = [*args, *kwargs.values()]
        if not any(isinstance(item, torch.Tensor) and item.requires_grad for item in given):
            # Without an input that requires gradients, this kind of recomputation gives none to parameters either.
            given = [_requiring(item) for item in given]

        def run(*items: Any) -> Any:
            return function(*items[:count], **dict(zip(names, items[count:], strict=True)))

        return checkpoint(run, *given)

    return recomputed


def _requiring(item: Any) -> Any:
    import torch

    if isinstance(item, torch.Tensor) and item.is_floating_point():
        return item.detach().requires_grad_()
    return item
