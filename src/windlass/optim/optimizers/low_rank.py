"""Gradients projected to a low rank: GaLore (Zhao et al., arXiv:2403.03507).

A gradient G of shape (m, n) is replaced by its projection to rank r in a basis that is found from G itself in every
`update_proj_gap`-th update of the parameter. An inner optimizer keeps its state for the projection, and what it
returns is projected back and multiplied by `scale`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from windlass.core.errors import NonFiniteError, Problem, refuse
from windlass.core.logs import get_logger
from windlass.dist.sharded import whole
from windlass.optim.per_parameter import PerParameterOptimizer, move

_log = get_logger(__name__)
ProjType = Literal["std", "reverse_std", "right", "left", "full"]


class LowRankOptimizer(PerParameterOptimizer):
    """The base of GaLore optimizers: `displacement` is the inner optimizer.

    Arguments that the constructors share:
        params: parameters or groups. A group with `projected=True`, or with a `rank` of its own, is projected: its
            parameters are matrices. All others are updated by the inner optimizer as they are.
        rank: r; the smaller side of a matrix where that is less, which is its full rank.
        update_proj_gap: updates of a parameter between two new bases; the first update finds one.
        scale: factor of what is projected back (alpha in the paper).
        proj_type: "std" projects the smaller side of a matrix, "reverse_std" the larger one, "left" the rows, "right"
            the columns, "full" both, which leaves a matrix of (r, r).
    """

    projects = True
    elementwise = False

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, "projected": False})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. `param_group` is a dict as in the constructor; options that it lacks are the optimizer's.
        Raises ConfigError if it is projected, and an option is out of range or a parameter is not a matrix.
        """
        param_group.setdefault("projected", "rank" in param_group)
        super().add_param_group(param_group)
        # Read back, not `param_group`: its options are complete only now.
        group = self.param_groups[-1]
        if group["projected"]:
            check_projection(group)
            _tell_full_ranks(group)

    def has_whole_state(self, group: dict[str, Any]) -> bool:
        return bool(group["projected"])

    def apply(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        decay = group["weight_decay"] * group["lr"]
        if not group["projected"]:
            move(parameter, self.displacement(grad, state, group), decay)
            return
        grad = whole(grad)  # its singular vectors are not those of its parts
        if (state["step"] - 1) % group["update_proj_gap"] == 0:
            state.update(bases(grad, group["rank"], group["proj_type"]))
        inner = self.displacement(down(grad, state), state, group)
        move(parameter, up(inner, state).mul_(group["scale"]), decay)

    def displacement(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """The inner optimizer's update of `grad`, times the learning rate, to be subtracted; without weight decay.
        `grad` is the projected gradient of a projected parameter, else the gradient; `state` and `group` as in `apply`.
        """
        raise NotImplementedError


def check_projection(group: dict[str, Any]) -> None:
    """Check the options of a projected group, and that its parameters are matrices. Raises ConfigError with every
    problem.
    """
    problems = [
        Problem(f"optim_args.{name}", group[name], "must be at least 1")
        for name in ("rank", "update_proj_gap")
        if group[name] < 1
    ]
    if not group["scale"] > 0:
        problems.append(Problem("optim_args.scale", group["scale"], "must be above 0"))
    kinds = get_args(ProjType)
    if group["proj_type"] not in kinds:
        problems.append(Problem("optim_args.proj_type", group["proj_type"], f"use one of {', '.join(kinds)}"))
    shapes = {tuple(p.shape) for p in group["params"]}
    for shape in sorted(shapes):
        if len(shape) != 2:
            fix = f"only matrices can be projected, and one of the parameters has the shape {list(shape)}"
            problems.append(Problem("optim_target_modules", "a projected group", fix))
    refuse(problems)


def rank_of(shape: Sequence[int], rank: int) -> int:
    """The rank to which a matrix of this shape is projected: at most its full rank."""
    return min(rank, *shape)


def _tell_full_ranks(group: dict[str, Any]) -> None:
    small = [p.shape for p in group["params"] if rank_of(p.shape, group["rank"]) < group["rank"]]
    if small:
        _log.info(
            "rank=%d is above the smaller side of %d of the %d projected weights (the smallest is %d x %d): their full "
            "rank is used",
            group["rank"],
            len(small),
            len(group["params"]),
            *min(small, key=min),
        )


def projected_sides(shape: Sequence[int], proj_type: str) -> tuple[str, ...]:
    """The sides of a matrix that `proj_type` projects: "left" its rows, "right" its columns."""
    tall = shape[0] >= shape[1]
    sides: dict[str, tuple[str, ...]] = {
        "std": ("right",) if tall else ("left",),
        "reverse_std": ("left",) if tall else ("right",),
        "full": ("left", "right"),
    }
    return sides.get(proj_type, (proj_type,))


def bases(grad: Tensor, rank: int, proj_type: str) -> dict[str, Tensor]:
    """The leading singular vectors of `grad` on the sides that are projected, by their key in the state: "left" of
    shape (m, r) with orthonormal columns, "right" of shape (r, n) with orthonormal rows. Raises NonFiniteError if
    `grad` has none because it is not finite.
    """
    rank = rank_of(grad.shape, rank)
    try:
        left, _, right = torch.linalg.svd(grad, full_matrices=False)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        # A run checks an update once the next one is under way, which this error would not let it come to.
        if grad.isfinite().all():
            raise
        raise NonFiniteError(
            f"the gradient of a projected weight of shape {list(grad.shape)} is not finite: correct the samples of "
            "this update, lower the learning rate, or set nonfinite_policy to 'skip' or 'rollback'"
        ) from error
    vectors = {"left": left[:, :rank], "right": right[:rank]}
    # A slice would keep all singular vectors in memory as long as the basis is used.
    return {side: vectors[side].contiguous() for side in projected_sides(grad.shape, proj_type)}


def down(grad: Tensor, state: dict[str, Any]) -> Tensor:
    """Project a gradient of shape (m, n) to (r, n), (m, r) or (r, r)."""
    low = state["left"].T @ grad if "left" in state else grad
    return low @ state["right"].T if "right" in state else low


def up(low: Tensor, state: dict[str, Any]) -> Tensor:
    """Project back to the shape (m, n)."""
    high = state["left"] @ low if "left" in state else low
    return high @ state["right"] if "right" in state else high
