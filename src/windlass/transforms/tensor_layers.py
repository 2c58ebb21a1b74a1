"""Layers of which each rank of a tensor gang has some columns or rows of the weight, and computes with them.

A column-wise layer computes a part of its outputs; a row-wise one takes that part, and the results are summed. An
embedding has the rows of some tokens, and a head makes their logits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from windlass.dist.device_mesh import part_along_last
from windlass.dist.gang import Gang
from windlass.dist.sharded import whole
from windlass.transforms.tensor_plan import ADAPTED, SUMMED
from windlass.transforms.tensor_split import TensorSplit, mine, split_of


def divide(layers: Mapping[str, tuple[nn.Module, str]], mesh: DeviceMesh, tensor_ranks: Gang) -> None:
    """Replace the weights of layers by this rank's parts of them. Tied ones stay tied.

    Args:
        layers: each with its style in the plan, by name.
        mesh: its last axis is that of the tensor gang; along the others ranks have the same parts.
    """
    parts: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    siblings: dict[str, list[Any]] = {}
    for path, (layer, style) in layers.items():
        found: Any = layer
        found.tensor_style = style
        kind: Any = type(layer)
        if style == SUMMED:
            found.heads_split = TensorSplit(
                tensor_ranks.size, tensor_ranks.size, tensor_ranks.rank, tensor_ranks.device_group
            )
            found.__class__ = _kind_of(kind, style)
            continue
        dim = 1 if style == "rowwise" else 0
        size = found.weight.shape[dim]
        split = TensorSplit(size, tensor_ranks.size, tensor_ranks.rank, tensor_ranks.device_group)
        for name in ("weight", "bias"):
            parameter = layer._parameters.get(name)
            if parameter is None or (name == "bias" and dim == 1):
                continue
            if id(parameter) not in parts:  # with the whole one, whose identity would be given to another
                parts[id(parameter)] = parameter, part_along_last(parameter, mesh, dim)
            layer.register_parameter(name, parts[id(parameter)][1])
        if dim == 0 and isinstance(layer, nn.Linear):
            siblings.setdefault(path.removesuffix(ADAPTED).rpartition(".")[0], []).append(layer)
        found.split, found.undivided, found.__class__ = split, kind, _kind_of(kind, style)
    for group in siblings.values():
        shared = _SharedInput(len(group))
        for layer in group:
            layer.shared_input = shared


class _SharedInput:
    """The input of column-wise layers of one module, such as queries, keys and values: the gradients that each of them
    has for it are added up before they are summed over ranks, so that they are sent once.

    Args:
        layers: their number.
    """

    def __init__(self, layers: int) -> None:
        self._layers, self._left = layers, 0
        self._given: Tensor | None = None
        self._copied: Tensor | None = None

    def of(self, given: Tensor, split: TensorSplit) -> Tensor:
        """`given`, whose gradient is the sum over ranks."""
        if self._copied is None or self._given is not given:
            self._given, self._copied = given, _Copied.apply(given, split)  # type: ignore[no-untyped-call]
            self._left = self._layers
        copied, self._left = self._copied, self._left - 1
        if not self._left:  # it is not kept beyond the last of them
            self._given = self._copied = None
        assert copied is not None
        return copied


class ColumnLinear(nn.Linear):
    """A linear layer with some of the rows of its weight, that is, some of its outputs."""

    split: TensorSplit
    shared_input: _SharedInput

    def forward(self, input: Tensor) -> Tensor:
        """Shape (..., this rank's outputs)."""
        own = self.shared_input.of(input, self.split)
        return nn.functional.linear(own, mine(self.weight), None if self.bias is None else mine(self.bias))


class Head(ColumnLinear):
    """A column-wise layer whose outputs are whole on every rank, unless `in_parts` is set.

    Attributes:
        in_parts: what reads the outputs knows that they are this rank's.
    """

    in_parts = False

    def forward(self, input: Tensor) -> Tensor:
        """Shape (..., all outputs)."""
        logits = super().forward(input)
        return logits if self.in_parts else self.split.whole(logits)


class RowLinear(nn.Linear):
    """A linear layer with some of the columns of its weight: it gets some of the inputs, and results are summed."""

    split: TensorSplit

    def forward(self, input: Tensor) -> Tensor:
        """Shape (..., all outputs), from (..., this rank's inputs)."""
        product = nn.functional.linear(input, mine(self.weight))
        total: Tensor = _Summed.apply(product, self.split)  # type: ignore[no-untyped-call]
        return total if self.bias is None else total + self.bias


class VocabularyEmbedding(nn.Embedding):
    """An embedding with the rows of some of the tokens; those of the other tokens are added by the other ranks."""

    split: TensorSplit

    def forward(self, input: Tensor) -> Tensor:
        """Shape (..., size), on every rank."""
        here, places = self.split.located(input)
        padding, tokens = self.padding_idx, self.split.mine
        found = nn.functional.embedding(
            places,
            mine(self.weight),
            padding - tokens.start if padding is not None and padding in tokens else None,
        )
        own = found.masked_fill(~here[..., None], 0)
        total: Tensor = _Summed.apply(own, self.split)  # type: ignore[no-untyped-call]
        return total


class OfSomeHeads(nn.Module):
    """A whole layer that computes with this rank's heads, mixed into the class of the layer: its gradients are summed.

    Each backward sums what it adds, so that there may be several before an update.
    """

    heads_split: TensorSplit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns, with parameters whose gradients are sums over ranks."""
        kept = [(part, part._parameters) for part in self.modules()]
        for part, own in kept:
            vars(part)["_parameters"] = {
                name: None if p is None else _Copied.apply(p, self.heads_split)  # type: ignore[no-untyped-call]
                for name, p in own.items()
            }
        try:
            return super().forward(*args, **kwargs)
        finally:
            for part, own in kept:
                vars(part)["_parameters"] = own


_KINDS: dict[str, type[nn.Module]] = {
    "colwise": ColumnLinear, "rowwise": RowLinear, "colwise_gather_output": Head,
    "embedding_rowwise": VocabularyEmbedding,
}  # fmt: skip


@cache
def _kind_of(kind: Any, style: str) -> type[nn.Module]:
    """The class of a divided layer. A subclass, as of embeddings that are scaled, calls the divided forward."""
    if style == SUMMED:
        return type(kind.__name__, (OfSomeHeads, kind), {"__module__": kind.__module__})
    divided = _KINDS[style]
    plain = nn.Embedding if issubclass(kind, nn.Embedding) else nn.Linear
    return divided if kind is plain else type(kind.__name__, (kind, divided), {"__module__": kind.__module__})


def is_divided(module: nn.Module) -> bool:
    """Return True if layers of `module` are divided among the ranks of a tensor gang."""
    return any(hasattr(layer, "tensor_style") for layer in module.modules())


@contextlib.contextmanager
def undivided(module: nn.Module) -> Iterator[None]:
    """Context in which the layers of `module` compute with whole weights, without communication. Collective."""
    kept: list[tuple[nn.Module, type[nn.Module], dict[str, nn.Parameter | None]]] = []
    gathered: dict[int, nn.Parameter] = {}
    divided: list[Any] = [layer for layer in module.modules() if split_of(layer) is not None]
    for layer in divided:
        parts = dict(layer._parameters)
        kept.append((layer, type(layer), parts))
        for name, part in parts.items():
            if part is None or (name == "bias" and isinstance(layer, RowLinear)):
                continue
            if id(part) not in gathered:
                gathered[id(part)] = nn.Parameter(whole(part), requires_grad=False)
            layer._parameters[name] = gathered[id(part)]
        layer.__class__ = layer.undivided
    try:
        yield
    finally:
        for layer, kind, parts in kept:
            layer.__class__ = kind
            layer._parameters.update(parts)


class _Copied(torch.autograd.Function):
    """The input of all ranks, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, split: TensorSplit) -> Tensor:
        ctx.split = split
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.split.sum(gradient.clone(memory_format=torch.contiguous_format)), None


class _Summed(torch.autograd.Function):
    """The sum over ranks, whose gradient each of them gets."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, split: TensorSplit) -> Tensor:
        return split.sum(part.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
