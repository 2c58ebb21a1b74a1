"""APOLLO (Zhu et al., arXiv:2412.05270): SGD scaled by what AdamW would do in a random space of low rank.

A gradient G of shape (m, n), m <= n, is projected by a random matrix to R of shape (r, n). AdamW of R shows by how much
each column (or the whole) would be scaled, and G itself is scaled so. The growth of its norm is limited.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from windlass.core.errors import Problem, refuse
from windlass.core.rng import new_generator
from windlass.dist.sharded import whole
from windlass.optim.optimizers.galore_adamw import adam_direction
from windlass.optim.optimizers.low_rank import LowRankOptimizer, bases, down, projected_sides, rank_of
from windlass.optim.optimizers.options import arguments, recipe_of
from windlass.optim.per_parameter import move

# The norm-growth limiter of Fira (arXiv:2410.01623), with the limit that APOLLO uses.
_GROWTH = 1.01  # the norm of an update is at most this times that of the one before
_TINY = 1e-8


class ApolloAdamW(LowRankOptimizer):
    """APOLLO for the groups with `projected`, AdamW for all others.

    Args:
        rank: r; 1 with `scale_type="tensor"` is APOLLO-Mini.
        update_proj_gap: updates of a parameter between two random matrices.
        scale: updates are multiplied by its root (128 for APOLLO-Mini).
        proj: "random", or "svd" for the leading singular vectors as in GaLore.
        proj_type: as in `LowRankOptimizer`; "full" is not possible.
        scale_type: "channel" scales each column (row) of the gradient, "tensor" all of it.

    A random matrix is drawn from its number and shape alone: it is the same on every rank and after a restart, and not
    part of the state. Parameters of one shape share it.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        proj: str = "random",
        proj_type: str = "std",
        scale_type: str = "channel",
        in_backward: bool = False,
    ) -> None:
        options = arguments(locals())
        words = (
            ("proj", proj, ("random", "svd")),
            ("scale_type", scale_type, ("channel", "tensor")),
            ("proj_type", proj_type, ("std", "reverse_std", "left", "right")),
        )
        refuse(
            Problem(f"optim_args.{name}", value, f"use one of {', '.join(known)}")
            for name, value, known in words
            if value not in known
        )
        super().__init__(params, options)

    def apply(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not group["projected"]:
            super().apply(parameter, grad, state, group)
            return
        grad = whole(grad)
        basis = self._basis(grad, state, group)
        low = down(grad, basis)
        normal = adam_direction(low, state, group)
        # Of each column if rows were projected, of each row if columns were.
        dim = None if group["scale_type"] == "tensor" else 0 if "left" in basis else 1
        factor = _norm(normal, dim) / (_norm(low, dim) + _TINY)
        update = _limited(grad * factor, state).mul_(group["lr"] * group["scale"] ** 0.5)
        move(parameter, update, group["weight_decay"] * group["lr"])

    def _basis(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> dict[str, Tensor]:
        # `step` counts this update already. `number` is the seed, so each gap has its own matrix.
        number, since = divmod(state["step"] - 1, group["update_proj_gap"])
        if group["proj"] == "svd":
            if since == 0:
                state.update(bases(grad, group["rank"], group["proj_type"]))
            return {side: state[side] for side in ("left", "right") if side in state}
        [side] = projected_sides(grad.shape, group["proj_type"])
        rank, generator = rank_of(grad.shape, group["rank"]), new_generator(grad.device, number)
        shape = (grad.shape[0], rank) if side == "left" else (rank, grad.shape[1])
        drawn = torch.randn(shape, generator=generator, dtype=grad.dtype, device=generator.device)
        # Entries of variance 1/r: a projection keeps the norm of a column in expectation.
        return {side: drawn.to(grad.device) / rank**0.5}

    def displacement(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return adam_direction(grad, state, group).mul_(group["lr"])


def _norm(values: Tensor, dim: int | None) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dim=dim, keepdim=dim is not None)
    return norm


def _limited(update: Tensor, state: dict[str, Any]) -> Tensor:
    """Scale `update` down if its norm has grown by more than `_GROWTH` since the last one. No host sync."""
    norm = _norm(update, None)
    if "norm" in state:
        limit = state["norm"] * _GROWTH
        update = update * (limit / (norm + _TINY)).clamp(max=1.0)
        norm = torch.minimum(norm, limit)
    state["norm"] = norm
    return update


apollo_adamw = recipe_of(ApolloAdamW)
