"""AdamW of torchao, with averages in 8 bits (arXiv:2110.02861) or 4 bits (arXiv:2309.01507), on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from windlass.config.plan import OptimizerPlan
from windlass.core.errors import ConfigError, Problem
from windlass.core.optional import require
from windlass.dist.sharded import copies, is_even, is_sharded
from windlass.optim.optimizers.options import Recipe, read_options
from windlass.optim.per_parameter import refuse_complex

_OPTIONS: dict[str, type] = {"block_size": int, "bf16_stochastic_round": bool}
_DIVERGES = (
    "ranks that hold the same weights would round them differently, each with its own random numbers: use "
    "adamw_anyprecision with bf16_stochastic_round, or shard the model over all ranks"
)


def torchao_adamw(plan: OptimizerPlan) -> Recipe:
    options = read_options(plan.name, plan.options, _OPTIONS)
    library = require("torchao.optim", f"use optim={plan.name!r}")
    four = plan.name.endswith("4bit")
    # As transformers does for both; the library's own default is 128 for 4 bits.
    of_plan = {"lr": plan.learning_rate, "betas": plan.betas, "eps": plan.epsilon}
    kwargs = {**of_plan, "block_size": 256, **options}
    return _checked(library.AdamW4bit if four else library.AdamW8bit), kwargs


def _checked(base: Callable[..., Any]) -> type[torch.optim.Optimizer]:
    """The library's class, with what checkpoints need, and with its limits checked first."""

    class Checked(base):  # type: ignore[misc, valid-type]
        def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(params, *args, **kwargs)
            refuse_complex(self)
            self.keeps_small_updates = self.bf16_stochastic_round
            if self.bf16_stochastic_round and any(
                _has_copies(p) for group in self.param_groups for p in group["params"]
            ):
                raise ConfigError(Problem("optim_args.bf16_stochastic_round", True, _DIVERGES))

        def _new_buffer(self, parameter: Tensor, signed: bool) -> Tensor:
            """Quantised as the library does it; not if parts differ in size: a checkpoint could not join them."""
            if is_sharded(parameter) and not is_even(parameter):
                return torch.zeros_like(parameter)
            return super()._new_buffer(parameter, signed)  # type: ignore[no-any-return]

        def start_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
            """The state of a parameter before its first update."""
            return {
                # As in the library's own step: its code adds to a tensor on the host.
                "step": torch.tensor(0.0),
                "exp_avg": self._new_buffer(parameter, True),
                "exp_avg_sq": self._new_buffer(parameter, False),
            }

    # The library's name: `optim/resolution.py` finds the optimizer by it.
    Checked.__name__ = Checked.__qualname__ = str(getattr(base, "__name__", "AdamW"))
    return Checked


def _has_copies(parameter: Tensor) -> bool:
    """Whether several ranks update the same weights."""
    if is_sharded(parameter):
        return copies(parameter) > 1
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
