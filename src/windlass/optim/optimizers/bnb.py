"""The optimizers of bitsandbytes: averages in 8 bits (Dettmers et al., arXiv:2110.02861), and in paged memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from windlass.config.plan import OptimizerPlan
from windlass.core.optional import require
from windlass.dist.sharded import check_takes_parts
from windlass.optim.optimizers.ademamix import ademamix_options
from windlass.optim.optimizers.options import Recipe, read_options
from windlass.optim.per_parameter import refuse_complex


def bnb_adamw(plan: OptimizerPlan) -> Recipe:
    read_options(plan.name, plan.options, {})
    return _recipe(plan, "AdamW", {"betas": plan.betas, "eps": plan.epsilon})


def bnb_lion(plan: OptimizerPlan) -> Recipe:
    read_options(plan.name, plan.options, {})
    return _recipe(plan, "Lion", {"betas": plan.betas})


def bnb_ademamix(plan: OptimizerPlan) -> Recipe:
    return _recipe(plan, "AdEMAMix", ademamix_options(plan))


def bitsandbytes_library(purpose: str) -> Any:
    """The package, with `optim` in it; `purpose` completes the sentence "... is needed to <purpose>"."""
    return require("bitsandbytes", purpose)


def bnb_rmsprop(plan: OptimizerPlan) -> Recipe:
    known = {"alpha": float, "eps": float}
    return _recipe(plan, "RMSprop", read_options(plan.name, plan.options, known), pages=False)


def _recipe(plan: OptimizerPlan, name: str, options: dict[str, Any], pages: bool = True) -> Recipe:
    library = bitsandbytes_library(f"use optim={plan.name!r}").optim
    kwargs = {"lr": plan.learning_rate, **options, "optim_bits": 8 if "8bit" in plan.name else 32}
    # RMSprop of bitsandbytes has no `is_paged`.
    if pages:
        kwargs["is_paged"] = "paged" in plan.name
    return _with_start_state(getattr(library, name), plan.name), kwargs


def _with_start_state(base: Callable[..., Any], name: str) -> type[torch.optim.Optimizer]:
    """The library's class, with what checkpoints need, and with its limits checked first."""

    class WithStartState(base):  # type: ignore[misc, valid-type]
        def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(params, *args, **kwargs)
            refuse_complex(self)
            check_takes_parts(self, "optim", name)

        def start_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
            """The state of a parameter before its first update, in the memory that the library chooses for it."""
            groups = self.param_groups
            number = next(i for i, other in enumerate(groups) if other is group)
            place = next(i for i, other in enumerate(group["params"]) if other is parameter)
            self.init_state(group, parameter, number, place)
            # The library puts it into `state`, where a checkpoint is installed only once all of it is checked.
            return dict(self.state.pop(parameter))

    WithStartState.__name__ = WithStartState.__qualname__ = str(getattr(base, "__name__", name))
    return WithStartState
