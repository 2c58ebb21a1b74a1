"""Layers that are computed for some tokens at a time (Bekman et al., "Arctic Long Sequence Training",
arXiv:2506.13996).

A feed-forward layer computes each token alone, and needs several times the memory of its input: in tiles, that of one
tile at a time, which is computed again in the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from windlass.core.attributes import text_config
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.transforms.mixing import mix

_FIELD = "activation_checkpointing_kwargs.tiles"


def tile_layers(model: nn.Module, tiles: Mapping[str, int]) -> None:
    """Have layers compute tiles of tokens, in place.

    Args:
        tiles: the last part of the name of layers, such as "mlp" -> tokens of a tile. A layer gets hidden states of
            shape (rows, tokens, size) first, and returns such; each token must depend on itself alone.

    Raises:
        ConfigError: there are no layers of a name, a size is not a whole number, or the model returns what its routers
            choose, which are asked once for each tile then.
    """
    if not isinstance(tiles, Mapping):
        raise ConfigError(Problem(_FIELD, tiles, 'must name layers and tokens, such as {"mlp": 4096}'))
    if getattr(text_config(model), "output_router_logits", False):
        fix = (
            "routers of tiles are asked once for each, and the balancing loss takes one answer of a layer: set "
            "output_router_logits=False in the model's configuration, or leave tiles out"
        )
        raise ConfigError(Problem(_FIELD, dict(tiles), fix))
    for name, size in tiles.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(Problem(f"{_FIELD}.{name}", size, "must be a whole number of tokens from 1 on"))
        found: list[Any] = [m for path, m in model.named_modules() if path.rpartition(".")[2] == name]
        if not found:
            fix = f"{type(model).__name__} has no layers of that name; give the last part of theirs"
            raise ConfigError(Problem(f"{_FIELD}.{name}", size, fix))
        for layer in found:
            if not isinstance(layer, _Tiled):  # a second `train()` has a prepared model
                mix(_Tiled, layer)
            layer.tokens_of_tile = size


class _Tiled(nn.Module):
    """A layer that computes tiles, mixed into its class."""

    tokens_of_tile: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not args or not isinstance(args[0], Tensor) or args[0].dim() != 3:
            raise ModelError(
                f"{type(self).__name__} is not given states of shape (rows, tokens, size) first: leave it out of "
                f"{_FIELD}"
            )
        hidden, *others = args
        if hidden.shape[1] <= self.tokens_of_tile:
            return super().forward(*args, **kwargs)
        compute = super().forward

        def run(tile: Tensor) -> Tensor:
            made = compute(tile, *others, **kwargs)
            if not isinstance(made, Tensor) or made.shape[:2] != tile.shape[:2]:
                raise ModelError(
                    f"{type(self).__name__} does not return a state for each token: leave it out of {_FIELD}"
                )
            return made

        # Layers may view rows and tokens as one axis.
        tiles = [tile.contiguous() for tile in torch.split(hidden, self.tokens_of_tile, 1)]
        # Without gradients there is nothing to compute again.
        if not torch.is_grad_enabled():
            return torch.cat([run(tile) for tile in tiles], 1)
        return torch.cat([checkpoint(run, tile, use_reentrant=False) for tile in tiles], 1)
