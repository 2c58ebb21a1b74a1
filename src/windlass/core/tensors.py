"""The bits of tensors, and what of their memory may be written."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from windlass.core import xla
from windlass.core.optional import check_release

check_release(torch)  # what trains imports this file, and with an older torch would fail somewhere within


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return True if two plain dense tensors have the same dtype, shape and bits, on any devices."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(bits_of(one.cpu()), bits_of(other.cpu()))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def address(tensor: Tensor) -> int:
    """The address of a tensor's first element; on XLA devices, which have none, a number of the whole tensor. A tensor
    that is made of others has the address of the first of them: all such tensors claim address 0 themselves.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        return address(getattr(tensor, tensor.__tensor_flatten__()[0][0]))
    return xla.tensor_id(tensor) if tensor.device.type == "xla" else tensor.data_ptr()


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of a plain dense tensor in the order of its elements (uint8, flat): a view where it is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor of one element may have any stride, which a view of another width refuses.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def distinct(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The elements of `tensor` without those that `expand` repeats in `like` (by default in itself): what can be
    written in place.
    """
    shown = tensor if like is None else like
    if shown.layout != torch.strided:
        return tensor
    for dim, stride in enumerate(shown.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements of `tensor` fill a piece of memory, in any order of its axes."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def laid_out_as(value: Tensor, like: Tensor) -> Tensor:
    """`value`, or a copy of it in the order of the memory of `like`, a plain tensor of its shape.

    Fused kernels of optimizers read a parameter, its gradient and its state side by side, whatever their strides: on
    a CPU other ones mix up elements without an error.
    """
    if value.stride() == like.stride():
        return value
    return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)


def count_elements(parameters: Iterable[Any]) -> int:
    """The number of elements of parameters, on all ranks together."""
    return sum(map(elements_of, parameters))


def elements_of(parameter: Any) -> int:
    """The number of elements that a parameter represents: DeepSpeed leaves an empty tensor of one that it divides, and
    bitsandbytes packs two elements into a byte.
    """
    if hasattr(parameter, "ds_numel"):
        return int(parameter.ds_numel)
    packed: Any = getattr(parameter, "quant_state", None)
    return int(parameter.numel() if packed is None else math.prod(packed.shape))


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype to which autocast converts a factor of a product; None if it leaves it, as in double precision."""
    kind = tensor.device.type
    if tensor.dtype is torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def is_fake(tensor: Tensor) -> bool:
    """Return True for a tensor that has no memory, of PyTorch's `FakeTensorMode`: what a forecast computes with."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)


def makes_fakes() -> bool:
    """Return True where new tensors have no memory: within PyTorch's `FakeTensorMode`."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
