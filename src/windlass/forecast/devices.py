"""What a device does otherwise than a CPU, on which tensors without memory are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from windlass.core.attributes import attributes_of
from windlass.forecast.meter import Meter
from windlass.precision.scaler import LossScaler
from windlass.transforms.linear_cross_entropy import ChunkLogits, chunk_rows


@contextlib.contextmanager
def few_chunks(meter: Meter, *, on_device: bool, every: bool) -> Iterator[None]:
    """Within the body, three chunks of a head's logits are run: those between the first and the last do the same, so
    that the second counts for all of them.

    Args:
        on_device: chunks are as large as on a device.
        every: run all of them.
    """

    def chunks(logits: ChunkLogits, targets: int) -> Iterator[slice]:
        found = list(chunk_rows(targets, logits.split.chunk, on_cpu=not on_device))
        if every or len(found) <= 3:
            yield from found
            return
        yield found[0]
        with meter.repeated(len(found) - 2):
            yield found[1]
        yield found[-1]

    with attributes_of(ChunkLogits, chunks=chunks):
        yield


def kernels_of_devices(on_device: bool) -> contextlib.AbstractContextManager[None]:
    """Within the body, PyTorch's optimizers update all parameters at once, as they do by default on a device: their
    temporary tensors are as large as all parameters together.
    """
    optimizer: Any = import_module("torch.optim.optimizer")  # the package has an attribute of no such name
    devices, types = optimizer._get_foreach_kernels_supported_devices, optimizer._foreach_supported_types
    if not on_device:
        return contextlib.nullcontext()
    return attributes_of(
        optimizer,
        _get_foreach_kernels_supported_devices=lambda: [*devices(), "cpu"],
        # PyTorch compares types exactly: a subclass is updated one tensor at a time.
        _foreach_supported_types=[*types, FakeTensor, nn.Parameter],
    )


def finite_gradients() -> contextlib.AbstractContextManager[None]:
    """Within the body, no scaled gradient of fp16 overflows."""
    return attributes_of(LossScaler, overflowed=lambda scaler, found_inf: False)


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """Within the body, what an optimizer compiles is run as it is written: a compiler does not follow modes."""
    return attributes_of(torch, compile=_as_written)


def _as_written(model: Any = None, **options: Any) -> Any:
    """What is given to `torch.compile`, which with options alone returns a decorator."""
    return model if model is not None else lambda function: function
