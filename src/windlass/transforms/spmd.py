"""Data parallelism and sharding by the compiler of PyTorch/XLA (SPMD; arXiv:2105.04663): one process, many devices.

Batches are split over the devices. Sharded parameters are split along their largest axis, and the compiler gathers them
where a unit uses them, splits their gradients in the same way, and keeps the state of the optimizer with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from windlass.config.plan import ShardPlan
from windlass.core import xla
from windlass.core.errors import ConfigError, Problem
from windlass.core.trees import tensors_in
from windlass.transforms.strategy import Strategy
from windlass.transforms.wrapping import ignored_parameters, units_of


class SplitOverDevices(Strategy):
    """The module itself, whose inputs and perhaps parameters are split over the devices.

    A module that was sharded before is not changed.

    Args:
        module: on the device.
        shard: how parameters are sharded; None: each device has all of them.

    Raises:
        ConfigError: the module has no layers of the given classes.
    """

    def __init__(self, module: nn.Module, shard: ShardPlan | None) -> None:
        super().__init__(module)
        several = xla.device_count() > 1
        self._hook = module.register_forward_pre_hook(_split_inputs, with_kwargs=True) if several else None
        if shard is not None and getattr(module, "_sharded_by", None) is None:
            _shard(module, shard, several)
            module._sharded_by = shard  # type: ignore[assignment]
        elif getattr(module, "_sharded_by", shard) != shard:
            fix = "this model was sharded with other settings and stays so; build it again"
            raise ConfigError(Problem("fsdp", shard, fix))

    def _release(self) -> None:
        """Parameters stay split: the whole model may not fit into the memory of a device."""
        if self._hook is not None:
            self._hook.remove()


def start_evaluations(module: nn.Module) -> Callable[[], None]:
    """Start each forward without gradients at its end: no update follows it that would, and all batches of an
    evaluation would be one graph. Return the undo function.
    """

    def start(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled() and any(tensor.device.type == "xla" for tensor in tensors_in(output)):
            xla.sync()

    return module.register_forward_hook(start).remove


def _shard(module: nn.Module, plan: ShardPlan, several: bool) -> None:
    ignored = ignored_parameters(module, plan.ignored)
    units = units_of(module, plan, ignored)
    if plan.recompute:
        for unit in units:
            unit.forward = xla.recomputing(unit.forward)
    if not several:
        return
    for parameter in module.parameters():
        if parameter not in ignored and not xla.is_split(parameter):
            xla.split(parameter, dim=max(range(parameter.dim()), key=parameter.size))
    for unit in (*units, module):
        # Without a mark on what a unit returns, the compiler may split activations like the parameters.
        unit.register_forward_hook(_split_output)
    for unit in units:
        xla.separate_backwards(unit)


def _split_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    _split_all((args, kwargs))


def _split_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    _split_all(output)


def _split_all(values: Any) -> None:
    for tensor in tensors_in(values):
        if tensor.device.type == "xla" and tensor.dim() > 0 and not xla.is_split(tensor):
            xla.split(tensor)
