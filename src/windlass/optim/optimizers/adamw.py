"""AdamW (Loshchilov & Hutter, arXiv:1711.05101), torch's implementations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from windlass.config.plan import OptimizerPlan
from windlass.core.tensors import is_fake
from windlass.dist.sharded import is_sharded, locals_of
from windlass.optim.optimizers.options import Recipe, recipe_of

# Without the wrappers, which run hooks: those of the step below run them already.
_torch_step: Callable[..., Any] = inspect.unwrap(torch.optim.Adam.step)
_DENSE = frozenset((nn.Parameter, Tensor))


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, whose fused step takes less time on the host; the same kernel, so the same bits.

    In every step torch sorts the tensors of each group by device and dtype, and dispatches the kernels of sharded
    parameters through `DTensor`. Where one call of the kernel for each group is all that comes of it, it is made
    here, on the parts of this rank. Otherwise torch's own step runs.

    Attributes:
        elementwise: the update of an element depends on that element alone.
    """

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        calls = self._calls() if closure is None else None
        if calls is None:
            return _torch_step(self, closure)
        # Counted before the kernels, which correct the bias by the number of this update. torch refuses empty
        # lists.
        if counts := [count for _, tensors in calls for count in tensors[-1]]:
            torch._foreach_add_(counts, 1)
        for group, (params, gradients, averages, squares, counts) in calls:
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(
                params,
                gradients,
                averages,
                squares,
                [],
                counts,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=None,
                found_inf=None,
            )
        return None

    def _calls(self) -> list[tuple[dict[str, Any], list[list[Tensor]]]] | None:
        """For each group with gradients: parameters, gradients, both moments, and counts of updates. None if torch
        would do something else than to call the kernel once for each.
        """
        if getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None:
            return None  # torch's `GradScaler` has the kernel divide the gradients
        found: list[tuple[dict[str, Any], list[list[Tensor]]]] = []
        for group in self.param_groups:
            if not group["fused"] or isinstance(group["lr"], Tensor):
                return None
            if group["amsgrad"] or group["maximize"] or group["capturable"] or group["differentiable"]:
                return None
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            states = [self.state[p] for p in params]
            if not all(states):  # in the first update
                # Torch makes the state, so that it has the form that torch's own step expects. The six lists,
                # which it fills for that step, are not used.
                self._init_group(group, *([] for _ in range(6)))  # type: ignore[no-untyped-call]
            tensors = [
                params,
                [p.grad for p in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
            ]
            kinds = {(p.device, p.dtype, p.grad.layout) for p in params}
            # While a CUDA graph is recorded, torch refuses a step that is not `capturable`.
            if len(kinds) > 1 or (params[0].is_cuda and torch.cuda.is_current_stream_capturing()):
                return None
            # Beside sharded parameters there may be whole ones, such as those without elements: of both in one list
            # `DTensor` makes an error.
            if not _DENSE.issuperset(map(type, params)):
                if not _are_divided_alike(tensors):
                    return None
                tensors = [locals_of(each) for each in tensors]
            found.append((group, [*tensors, [state["step"] for state in states]]))
        return found


def _are_divided_alike(tensors: list[list[Tensor]]) -> bool:
    """Return True if the tensors of each parameter are divided among ranks as it is, or whole as it is."""
    return all(
        all(
            (is_sharded(tensor) and tensor.placements == of_one[0].placements)
            if is_sharded(of_one[0])
            else (type(of_one[0]) in _DENSE or is_fake(of_one[0])) and not is_sharded(tensor)
            for tensor in of_one
        )
        for of_one in zip(*tensors, strict=True)
    )


# The default loop over tensors (`foreach` on accelerators).
adamw = recipe_of(torch.optim.AdamW, "amsgrad")


def adamw_fused(plan: OptimizerPlan) -> Recipe:
    """One kernel for all tensors, on every device that has it."""
    _, kwargs = adamw(plan)
    return AdamW, {**kwargs, "fused": True}
