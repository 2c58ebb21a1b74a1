"""Layers that compute tiles of tokens give the same gradients, and keep the states of one tile."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from windlass.core.errors import ConfigError, ModelError
from windlass.transforms.recompute import apply_recompute
from windlass.transforms.tiles import tile_layers


class Mixed(nn.Module):
    """Adds a token to the next one."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.sum(1, keepdim=True)


class Flattened(nn.Linear):
    """Views rows and tokens as one axis."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.view(-1, hidden.shape[-1])).view_as(hidden)


class Block(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.mlp = inside

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(hidden)


def net(inside: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    makes = inside or (lambda: nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 4)))
    return nn.Sequential(Block(makes()), Block(makes())).double()


def gradients(model: nn.Module, hidden: Tensor) -> list[Tensor]:
    hidden = hidden.clone().requires_grad_()
    (model(hidden) ** 2).sum().backward()
    found = [hidden.grad, *(parameter.grad for parameter in model.parameters())]
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("inside", [None, lambda: Flattened(4, 4)], ids=["plain", "flattened"])
def test_tiles_have_the_gradients_of_the_whole(recomputed: bool, inside: Any) -> None:
    plain = net(inside).eval()
    tiled = copy.deepcopy(plain)
    tile_layers(tiled, {"mlp": 5})
    if recomputed:
        apply_recompute(tiled.train(), {"tiles": {"mlp": 3}})
        for module in tiled.modules():
            module.training = not isinstance(module, nn.Dropout)
    hidden = torch.randn(2, 13, 4, dtype=torch.float64)
    for ours, theirs in zip(gradients(tiled, hidden), gradients(plain, hidden), strict=True):
        assert (ours - theirs).abs().max() < 1e-12
    with torch.no_grad():
        assert (tiled(hidden) - plain(hidden)).abs().max() < 1e-12
    assert tiled.state_dict().keys() == plain.state_dict().keys()


def test_a_layer_keeps_the_inner_states_of_no_tile_until_the_backward() -> None:
    hidden = torch.randn(1, 256, 4, dtype=torch.float64, requires_grad=True)
    kept = {}
    for tile in (256, 8):
        model = net()
        tile_layers(model, {"mlp": tile})
        saved: list[int] = []

        def note(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(hidden)
        kept[tile] = max(saved)
    assert kept[256] == 256 * 64
    assert kept[8] <= 256 * 4


def test_layers_with_attributes_and_copies_of_their_own_are_tiled() -> None:
    """A pickle names the class of the layer and what was mixed into it, in the order in which that was done."""
    model = net()
    for block in model:
        block.mlp.tile_size = 7  # type: ignore[union-attr]
        block.mlp[2].p = 0.0  # type: ignore[union-attr, index]
    hidden = torch.randn(1, 9, 4, dtype=torch.float64)
    whole = gradients(model, hidden)
    tile_layers(model, {"mlp": 5})
    apply_recompute(model)
    for found in (model, pickle.loads(pickle.dumps(model))):
        sizes: list[int] = []
        found[0].mlp[0].register_forward_hook(
            lambda layer, args, output, sizes=sizes: sizes.append(args[0].shape[1])
        )
        found.zero_grad()
        for one, other in zip(gradients(found, hidden), whole, strict=True):
            assert (one - other).abs().max() < 1e-12
        assert sizes[:2] == [5, 4]
        assert found[0].mlp.tile_size == 7


def test_what_cannot_be_tiled_is_refused() -> None:
    for tiles, said in (
        ({"ffn": 4}, "has no layers of that name"),
        ({"mlp": 0}, "whole number"),
        (4, "must name layers"),
    ):
        with pytest.raises(ConfigError, match=said):
            tile_layers(net(), tiles)  # type: ignore[arg-type]
    model = net(Mixed)
    tile_layers(model, {"mlp": 4})
    with pytest.raises(ModelError, match="does not return a state for each token"):
        model(torch.zeros(1, 9, 4, dtype=torch.float64))
    with pytest.raises(ModelError, match=r"not given states of shape \(rows, tokens, size\)"):
        model(torch.zeros(9, 4, dtype=torch.float64))
    routed = net()
    routed.config = SimpleNamespace(output_router_logits=True)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="output_router_logits=False"):
        tile_layers(routed, {"mlp": 4})
