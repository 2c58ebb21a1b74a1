"""Tensor parallelism (Shoeybi et al., "Megatron-LM", arXiv:1909.08053): each rank has some columns or rows of the
weights that a plan names, and computes with them.

A column-wise layer computes a part of its outputs; a row-wise one takes that part, and the results are summed. All else
is whole on every rank, and computes the same.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.logs import get_job_logger
from windlass.core.module_state import state_of
from windlass.dist.device_mesh import tensor_device_mesh
from windlass.dist.gang import Gang
from windlass.dist.sharded import is_sharded, local, locals_of, whole, whole_on_first
from windlass.transforms.buffers import broadcast, buffers_of_first_rank, check_sparse, share_buffers
from windlass.transforms.first_rank import check_same_structure
from windlass.transforms.strategy import Strategy, squared_norm

_log = get_job_logger(__name__)
STYLES = ("colwise", "rowwise", "colwise_gather_output", "replicated_with_grad_allreduce")
# Styles of layers that have no weights to divide, or whose division only saves memory: whole here.
_WHOLE = ("replicate", "embedding_rowwise", "sequence_parallel")


class TensorParallel(Strategy):
    """A model whose layers are divided among the ranks of a tensor gang. They stay divided after a run, and a module
    that was divided before is not changed.

    Args:
        module: on its device already. All ranks get rank 0's weights and buffers. Collective.

    Raises:
        ConfigError: the plan of the model names nothing, or sizes cannot be divided.
    """

    sharded = True
    saves_parts = True

    def __init__(self, module: nn.Module, loss_ranks: Gang, device: torch.device) -> None:
        self._loss_ranks, self._tensor_ranks = loss_ranks, loss_ranks.over("tensor")
        self._all_ranks = loss_ranks.over("all")
        chosen = {} if is_divided(module) else chosen_layers(module, self._tensor_ranks.size)
        check_same_structure(module, self._all_ranks)
        check_sparse(module, self._all_ranks)
        broadcast(p.detach() for p in module.parameters() if not is_sharded(p))
        share_buffers(module)
        mesh = tensor_device_mesh(loss_ranks.mesh, device)
        for layer, style in chosen.values():
            _divide(layer, style, mesh, self._tensor_ranks.device_group)
        super().__init__(module)

    @contextlib.contextmanager
    def micro(self, last: bool) -> Iterator[None]:
        yield
        if last:
            self._reduce()

    def _reduce(self) -> None:
        """Average gradients: those of parts over the loss ranks, the others, which are equal in a tensor gang, over all
        ranks, so that rounding cannot make them differ.
        """
        trained = [p for p in self._module.parameters() if p.requires_grad]
        parts: list[Any] = [p for p in trained if is_sharded(p)]
        others: list[nn.Parameter] = [p for p in trained if not is_sharded(p)]
        if self._loss_ranks.size > 1:
            _average(parts, self._loss_ranks.sum_on_device, self._loss_ranks.size)
        _average(others, self._all_ranks.sum_on_device, self._all_ranks.size)

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Count every element once: whole gradients are divided by the number of ranks that have them."""
        square = torch.zeros((), dtype=torch.float64, device=self._device_of_norm())
        for gradient, part in zip(gradients, locals_of(gradients), strict=True):
            square += self._share(squared_norm(part).double(), gradient)
        return self.norm_of(square).to(gradients[0].dtype if gradients else square.dtype)

    def _device_of_norm(self) -> torch.device:
        return next(self._module.parameters()).device

    def _share(self, square: Tensor, gradient: Tensor) -> Tensor:
        return square if is_sharded(gradient) else square / self._tensor_ranks.size

    def square(self, gradient: Tensor) -> Tensor:
        [mine] = locals_of([gradient])
        return self._share(squared_norm(mine), gradient)

    def norm_of(self, square: Tensor) -> Tensor:
        return self._tensor_ranks.sum_on_device(square).sqrt()

    def local(self, gradients: list[Tensor]) -> list[Tensor]:
        return locals_of(gradients)

    def max_over_ranks(self, flag: Tensor) -> Tensor:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._all_ranks.device_group)
        return flag

    def share_buffers(self) -> None:
        share_buffers(self._module)

    def own_buffers(self) -> dict[str, Tensor]:
        """All of them: forwards do not share buffers between ranks."""
        return self._buffers.all()

    def buffers_of_first_rank(self) -> AbstractContextManager[Any]:
        return buffers_of_first_rank(self._module)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Forwards inside do not communicate. Changes to parameters are lost."""
        layers = [layer for layer in self._module.modules() if isinstance(layer, ColumnLinear | RowLinear)]
        kept = [(layer, type(layer), layer.weight, layer.bias) for layer in layers]
        for layer in layers:
            layer.weight = nn.Parameter(whole(layer.weight), requires_grad=False)
            if layer.bias is not None:
                layer.bias = nn.Parameter(whole(layer.bias), requires_grad=False)
            layer.__class__ = nn.Linear  # type: ignore[assignment]
        try:
            yield
        finally:
            for layer, kind, weight, bias in kept:
                layer.weight, layer.bias, layer.__class__ = weight, bias, kind

    def generating(self) -> AbstractContextManager[Any]:
        """Whole parameters: parts compute with nothing but their own."""
        return self.gathered()

    def whole_state(self) -> dict[str, Any]:
        """Gathered one tensor at a time, onto the host of rank 0. Empty on other ranks."""
        state: dict[str, Any] = {}
        for name, value in state_of(self._module).items():
            found = whole_on_first(value.detach()) if isinstance(value, Tensor) else value
            if self._all_ranks.world.is_main:
                state[name] = found
        return state


def is_divided(module: nn.Module) -> bool:
    """Return True if layers of `module` are divided by this strategy."""
    return any(isinstance(layer, ColumnLinear | RowLinear) for layer in module.modules())


# --- the plan ---------------------------------------------------------------------------------------------------------


def chosen_layers(module: nn.Module, ranks: int) -> dict[str, tuple[nn.Module, str]]:
    """The layers that the plan of `module` divides among `ranks`, with their style, by name.

    The plan is the attribute `tp_plan`, which models of transformers have: pattern of names, in which * is a number or
    a name -> style.
    """
    name = type(module).__name__
    plan = getattr(module, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        fix = "has no plan for tensor parallelism: set module.tp_plan = {'layers.*.up': 'colwise', ...}, or tp_size=1"
        raise ConfigError(Problem("model", name, fix))
    unknown = sorted({style for style in plan.values() if style not in (*STYLES, *_WHOLE)})
    if unknown:
        fix = (
            f"its plan has the style {unknown[0]!r}, and these are built: {', '.join(STYLES)}; set tp_size=1"
        )
        raise ConfigError(Problem("model", name, fix))
    _refuse_heads(module, ranks)
    patterns = {
        re.compile(re.escape(pattern).replace(r"\*", "[^.]+")): style for pattern, style in plan.items()
    }
    shared = _shared_parameters(module)
    found = {}
    for path, layer in module.named_modules():
        style = next((style for pattern, style in patterns.items() if pattern.fullmatch(path)), None)
        if style is None or style in _WHOLE:
            continue
        if style == "colwise_gather_output" and _stays_whole(layer, ranks, shared):
            continue
        _check_layer(path, layer, style, ranks)
        found[path] = layer, style
    if not found:
        raise ConfigError(Problem("model", name, "none of its layers has a name of its plan; set tp_size=1"))
    return found


def _refuse_heads(module: nn.Module, ranks: int) -> None:
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, field, None)
        if isinstance(heads, int) and heads % ranks:
            raise ConfigError(Problem("tp_size", ranks, f"must divide {field}, which is {heads}"))


def _shared_parameters(module: nn.Module) -> set[int]:
    seen: set[int] = set()
    shared: set[int] = set()
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _stays_whole(layer: nn.Module, ranks: int, shared: set[int]) -> bool:
    """Return True for a head that is tied to the embedding, or of a vocabulary that cannot be divided evenly."""
    weight: Any = getattr(layer, "weight", None)
    return id(weight) in shared or weight.shape[0] % ranks != 0


def _check_layer(path: str, layer: nn.Module, style: str, ranks: int) -> None:
    if style == "replicated_with_grad_allreduce":
        return
    if type(layer) is not nn.Linear:
        fix = f"is a {type(layer).__name__}, and only nn.Linear is divided; set tp_size=1"
        raise ConfigError(Problem(f"model.{path}", style, fix))
    size = layer.in_features if style == "rowwise" else layer.out_features
    if size % ranks:
        raise ConfigError(Problem("tp_size", ranks, f"must divide the size of {path}, which is {size}"))


# --- layers -----------------------------------------------------------------------------------------------------------


def _divide(layer: nn.Module, style: str, mesh: DeviceMesh, group: Any) -> None:
    if style == "replicated_with_grad_allreduce":
        # Each rank computes with some of the heads, so that gradients are sums over ranks.
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.register_hook(_summing(group))  # type: ignore[no-untyped-call]
        return
    dim = 1 if style == "rowwise" else 0
    _spread(layer, "weight", mesh, dim)
    if layer.bias is not None and dim == 0:
        _spread(layer, "bias", mesh, 0)
    layer.__class__ = _KINDS[style]
    layer.tensor_group = group


def _summing(group: Any) -> Callable[[Tensor], Tensor]:
    def total(gradient: Tensor) -> Tensor:
        summed = gradient.clone()
        dist.all_reduce(summed, group=group)
        return summed

    return total


def _spread(layer: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Replace a parameter by this rank's part of it, which all ranks with the same part hold."""
    parameter = layer.get_parameter(name)
    ranks, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    mine = parameter.detach().chunk(ranks, dim)[rank].clone(memory_format=torch.contiguous_format)
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(dim)]
    part = DTensor.from_local(
        mine, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    layer.register_parameter(name, nn.Parameter(part, parameter.requires_grad))


class ColumnLinear(nn.Linear):
    """A linear layer with some of the rows of its weight, that is, some of its outputs."""

    tensor_group: Any

    def forward(self, input: Tensor) -> Tensor:
        """Shape (..., this rank's outputs)."""
        own: Tensor = _Copied.apply(input, self.tensor_group)  # type: ignore[no-untyped-call]
        return nn.functional.linear(own, _mine(self.weight), None if self.bias is None else _mine(self.bias))


class GatheredLinear(ColumnLinear):
    """A column-wise layer whose outputs are whole on every rank."""

    def forward(self, input: Tensor) -> Tensor:
        """Shape (..., all outputs)."""
        gathered: Tensor = _Gathered.apply(super().forward(input), self.tensor_group)  # type: ignore[no-untyped-call]
        return gathered


class RowLinear(nn.Linear):
    """A linear layer with some of the columns of its weight: it gets some of the inputs, and results are summed."""

    tensor_group: Any

    def forward(self, input: Tensor) -> Tensor:
        """Shape (..., all outputs), from (..., this rank's inputs)."""
        product = nn.functional.linear(input, _mine(self.weight))
        total: Tensor = _Summed.apply(product, self.tensor_group)  # type: ignore[no-untyped-call]
        return total if self.bias is None else total + self.bias


_KINDS: dict[str, type[nn.Linear]] = {
    "colwise": ColumnLinear, "rowwise": RowLinear, "colwise_gather_output": GatheredLinear,
}  # fmt: skip


def _mine(parameter: Any) -> Tensor:
    part: Tensor = parameter.to_local()
    return part


class _Copied(torch.autograd.Function):
    """The input of all ranks, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Summed(torch.autograd.Function):
    """The sum over ranks, whose gradient each of them gets."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gathered(torch.autograd.Function):
    """The parts of all ranks along the last axis. All compute the same with them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.ranks, ctx.rank = dist.get_world_size(group), dist.get_rank(group)
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ctx.ranks)]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.ranks, -1)[ctx.rank].contiguous(), None


# --- gradients --------------------------------------------------------------------------------------------------------


def _average(parameters: list[nn.Parameter], total: Callable[[Tensor], Tensor], count: int) -> None:
    """Average the gradients of `parameters` over `count` ranks, in one exchange for each dtype. Those that no rank has
    stay None. `total` sums a tensor over the ranks, in place.
    """
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        members = [p for p in parameters if p.dtype == dtype]
        mine = [None if p.grad is None else local(p.grad) for p in members]
        empty = [torch.zeros_like(local(p.detach())) for p in members]
        parts = [zeros if grad is None else grad for grad, zeros in zip(mine, empty, strict=True)]
        present = torch.tensor([grad is not None for grad in mine], dtype=dtype, device=parts[0].device)
        flat = torch.cat([present, *(part.flatten() for part in parts)])
        total(flat)
        if any(grad is None for grad in mine) and flat[: len(members)][[grad is None for grad in mine]].any():
            raise ModelError(
                "the loss of some ranks depends on a parameter that that of others does not reach: use all trained "
                "parameters in the loss on every rank, or freeze it"
            )
        start = len(members)
        for grad, part in zip(mine, parts, strict=True):
            if grad is not None:
                grad.copy_(flat[start : start + part.numel()].view_as(part) / count)
            start += part.numel()
