"""Layers of which each rank of a tensor gang has some columns or rows of the weight, and computes with them.

A column-wise layer computes a part of its outputs; a row-wise one takes that part, and the results are summed. An
embedding has the rows of some tokens, and a head makes their logits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from windlass.dist.device_mesh import part_along
from windlass.dist.gang import Gang
from windlass.dist.sharded import is_sharded, whole
from windlass.transforms.tensor_experts import divide_experts
from windlass.transforms.tensor_plan import (
    ADAPTED,
    EXPERTS,
    HEAD_COUNTS,
    HEADS,
    HEADS_EMBEDDING,
    ROWS,
    SUMMED,
    is_transposed,
)
from windlass.transforms.tensor_sequence import SequenceParts, ShareOfGradient, share_gradient
from windlass.transforms.tensor_split import (
    Joined,
    Once,
    TensorSplit,
    copied,
    mine,
    reduced,
    scaled,
    summed,
)


def divide(layers: Mapping[str, tuple[nn.Module, str]], mesh: DeviceMesh, tensor_ranks: Gang) -> None:
    """Replace the weights of layers by this rank's parts of them. Tied ones stay tied.

    Args:
        layers: each with its style in the plan, by name.
        mesh: along its axis "tensor" ranks have different parts, along others the same.
    """
    parts: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    siblings: dict[str, list[Any]] = {}
    for path, (layer, style) in layers.items():
        found: Any = layer
        found.tensor_style = style
        kind: Any = type(layer)
        if style == SUMMED:
            for part in layer.modules():
                if not isinstance(part, ShareOfGradient):
                    share_gradient(part, tensor_ranks.size)
            continue
        if style == EXPERTS:
            divide_experts(layer, mesh, tensor_ranks)
            continue
        if style == HEADS:
            found.heads_index, found.undivided = tensor_ranks.rank, kind
            counts = tuple(name for name in HEAD_COUNTS if name in vars(layer))
            found.__class__ = _with_own_heads(kind, counts, tensor_ranks.size)
            continue
        takes_part, transposed = style in ROWS, is_transposed(layer)
        # `nn.Linear` has its outputs in rows, and `Conv1D` its inputs.
        dim = 1 if style == HEADS_EMBEDDING else int(takes_part != transposed)
        size = found.weight.shape[dim]
        split = TensorSplit(size, tensor_ranks.size, tensor_ranks.rank, tensor_ranks.device_group)
        for name in ("weight", "bias"):
            parameter = layer._parameters.get(name)
            # The bias of a row-wise layer stays whole: it is added once, to the sum over ranks.
            if parameter is None or (name == "bias" and takes_part):
                continue
            if id(parameter) not in parts:  # with the whole one, whose identity would be given to another
                parts[id(parameter)] = (
                    parameter,
                    part_along(parameter, mesh, dim if name == "weight" else 0, "tensor"),
                )
            layer.register_parameter(name, parts[id(parameter)][1])
        if not takes_part and not isinstance(layer, nn.Embedding):
            siblings.setdefault(path.removesuffix(ADAPTED).rpartition(".")[0], []).append(layer)
        found.split, found.undivided, found.__class__ = split, kind, _kind_of(kind, style)
        found.transposed = transposed
    # Layers of one module get the same input, as queries, keys and values do.
    for group in siblings.values():
        shared = Once(len(group))
        for layer in group:
            layer.shared_input = shared


class ColumnLinear(nn.Linear):
    """A linear layer with some of the rows of its weight, that is, some of its outputs.

    Attributes:
        shared_input: of the column-wise layers of one module, such as queries, keys and values: the gradients that each
            of them has for it are added up before they are summed over ranks, so that they are sent once.
    """

    split: TensorSplit
    shared_input: Once
    transposed: bool
    sequence_parts: SequenceParts | None = None
    begins_parts = False

    def forward(self, input: Tensor) -> Tensor:
        """Shape (..., this rank's outputs)."""
        positions, bias = _positions(self), None if self.bias is None else mine(self.bias)
        if positions is None:
            own = self.shared_input.of(input, lambda: copied(input, self.split))
            return nn.functional.linear(own, _matrix(self), bias)
        if self.begins_parts:
            return Joined(input, positions).linear(_matrix(self), bias)
        assert self.sequence_parts is not None, "it divides positions"
        known = self.sequence_parts.joined
        # What the layer around it has joined: its backward joins the positions again instead of keeping all of them.
        if known is not None and known.whole is input:
            return known.linear(_matrix(self), bias)
        return nn.functional.linear(input, _matrix(self), bias)


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
    transposed: bool
    sequence_parts: SequenceParts | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Shape (..., all outputs), from (..., this rank's inputs)."""
        product, positions = nn.functional.linear(input, _matrix(self)), _positions(self)
        total = summed(product, self.split) if positions is None else reduced(product, positions)
        if self.bias is None:
            return total
        return total + (self.bias if positions is None else scaled(self.bias, positions.ranks))


class RowOfWhole(RowLinear):
    """As `RowLinear`, but it gets all of the inputs."""

    def forward(self, input: Tensor) -> Tensor:
        """Shape (..., all outputs), from (..., all inputs)."""
        part = self.split.mine
        return super().forward(copied(input, self.split)[..., part.start : part.stop])


def _positions(layer: ColumnLinear | RowLinear) -> TensorSplit | None:
    """How positions are divided before and after the layer; None if each rank has all."""
    return None if layer.sequence_parts is None else layer.sequence_parts.now


def _matrix(layer: ColumnLinear | RowLinear) -> Tensor:
    """This rank's part of the weight of a layer: shape (outputs, inputs)."""
    part = mine(layer.weight)
    return part.T if layer.transposed else part


class VocabularyEmbedding(nn.Embedding):
    """An embedding with the rows of some of the tokens; those of the other tokens are added by the other ranks."""

    split: TensorSplit

    def forward(self, input: Tensor) -> Tensor:
        """Shape (..., size), on every rank."""
        here, places = self.split.located(input)
        # PyTorch leaves out the gradient of the padding token by its place, which one rank has.
        padding, tokens = self.padding_idx, self.split.mine
        found = nn.functional.embedding(
            places,
            mine(self.weight),
            padding - tokens.start if padding is not None and padding in tokens else None,
        )
        # Those of other ranks were looked up at place 0, which is another token's.
        own = found.masked_fill(~here[..., None], 0)
        return summed(own, self.split)


class HeadsEmbedding(nn.Embedding):
    """An embedding with the columns of this rank's heads."""

    split: TensorSplit

    def forward(self, input: Tensor) -> Tensor:
        """Shape (..., this rank's heads)."""
        return nn.functional.embedding(input, mine(self.weight))


class OwnHeads(nn.Module):
    """An attention with this rank's heads, mixed into its class, whose attributes with their number tell that of the
    rank.
    """

    heads_index: int
    ranks_of_heads: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the attention returns. A bias of all heads, shape (rows * heads, ...), is that of its own."""
        alibi = kwargs.get("alibi")
        if alibi is not None:
            heads = next(vars(self)[name] for name in HEAD_COUNTS if name in vars(self))
            by_row = alibi.unflatten(0, (-1, heads)).chunk(self.ranks_of_heads, 1)
            kwargs["alibi"] = by_row[self.heads_index].flatten(0, 1)
        return super().forward(*args, **kwargs)


@cache
def _with_own_heads(kind: Any, counts: tuple[str, ...], ranks: int) -> Any:
    def of_rank(name: str) -> property:
        return property(lambda attention: vars(attention)[name] // ranks)

    own = {"__module__": kind.__module__, "ranks_of_heads": ranks, **{name: of_rank(name) for name in counts}}
    return type(kind.__name__, (OwnHeads, kind), own)


_KINDS: dict[str, type[nn.Module]] = {
    "colwise": ColumnLinear, "rowwise": RowLinear, "rowwise_split_input": RowOfWhole, "colwise_gather_output": Head,
    "embedding_rowwise": VocabularyEmbedding, HEADS_EMBEDDING: HeadsEmbedding,
}  # fmt: skip


@cache
def _kind_of(kind: Any, style: str) -> type[nn.Module]:
    """The class of a divided layer. A subclass, as of embeddings that are scaled, calls the divided forward."""
    divided = _KINDS[style]
    if kind in (nn.Embedding, nn.Linear):
        return divided
    # Of a subclass its own forward calls that of the divided layer; a `Conv1D` is none, and has all of it.
    bases = (kind, divided) if issubclass(kind, nn.Embedding | nn.Linear) else (divided, kind)
    return type(kind.__name__, bases, {"__module__": kind.__module__})


def is_divided(module: nn.Module) -> bool:
    """Return True if layers of `module` are divided among the ranks of a tensor gang."""
    return any(hasattr(layer, "tensor_style") for layer in module.modules())


@contextlib.contextmanager
def undivided(module: nn.Module) -> Iterator[None]:
    """Context in which the layers of `module`, those of experts too, compute with whole weights, without communication.
    Collective.
    """
    kept: list[tuple[nn.Module, type[nn.Module], dict[str, nn.Parameter | None]]] = []
    gathered: dict[int, nn.Parameter] = {}
    divided: list[Any] = [layer for layer in module.modules() if "undivided" in vars(layer)]
    positions = {parts for layer in module.modules() if (parts := vars(layer).get("sequence_parts"))}
    try:
        for layer in divided:
            parts = dict(layer._parameters)
            kept.append((layer, type(layer), parts))
            for name, part in parts.items():
                if not is_sharded(part):
                    continue
                if id(part) not in gathered:  # the memory for it may not be there
                    gathered[id(part)] = nn.Parameter(whole(part), requires_grad=False)
                layer._parameters[name] = gathered[id(part)]
            layer.__class__ = layer.undivided
        for parts in positions:
            parts.off = True
        yield
    finally:
        for parts in positions:
            parts.off = False
        for layer, kind, parts in kept:
            layer.__class__ = kind
            layer._parameters.update(parts)
