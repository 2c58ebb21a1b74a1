"""Compression of the gradients that replicas exchange: PyTorch's communication hooks by name."""

from __future__ import annotations

import inspect
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from windlass.config.kinds import from_text
from windlass.config.plan import DistPlan
from windlass.config.values import type_fault
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.core.logs import get_logger

logger = get_logger(__name__)

_HOOKS: dict[str, Any] = {
    "no": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "power_sgd": powerSGD_hook,
}
_WRAPPERS: dict[str, Any] = {
    "fp16": default_hooks.fp16_compress_wrapper,
    "bf16": default_hooks.bf16_compress_wrapper,
}
# Options of PowerSGD whose defaults are whole numbers, and which need not be.
_FRACTIONS = ("min_compression_rate", "orthogonalization_epsilon")


class Compression:
    """The communication hook of one replicated model, and its state.

    PowerSGD (Vogels et al., arXiv:1905.13727) adds the error of each update to the next. This state is not part of a
    checkpoint: a resumed run begins without it.

    Args:
        wrapper: the model, before its first forward.
        plan: `comm_hook`, `comm_wrapper` and `comm_options`.

    Raises:
        ConfigError: unknown or invalid options of the hook.
    """

    def __init__(self, wrapper: DistributedDataParallel, plan: DistPlan) -> None:
        if plan.comm_hook not in _HOOKS:
            fix = "PyTorch's batched PowerSGD stops at an assertion of its own; use power_sgd"
            raise ConfigError(Problem("comm_hook", plan.comm_hook, fix))
        self._state = _low_rank_state(plan)
        if plan.comm_hook == "no" and plan.comm_wrapper == "no":
            return
        hook = _HOOKS[plan.comm_hook]
        if plan.comm_wrapper != "no":
            hook = _WRAPPERS[plan.comm_wrapper](hook)
        try:
            wrapper.register_comm_hook(self._state, hook)
        except TypeError as error:  # before PyTorch 2.14 bf16 travels over nccl and xccl alone
            fix = f"does not work here ({error}); use fp16 or power_sgd"
            raise ConfigError(
                Problem("comm_hook", f"{plan.comm_hook}, wrapped by {plan.comm_wrapper}", fix)
            ) from None

    def forget(self) -> None:
        """Reset the state after discarded backwards."""
        if self._state is not None:
            self._state.iter = 0
            for memory in (self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict):
                memory.clear()


def _low_rank_state(plan: DistPlan) -> Any:
    options = dict(plan.comm_options)
    if plan.comm_hook != "power_sgd":
        if options:
            fix = f"belong to power_sgd; comm_hook is {plan.comm_hook}"
            raise ConfigError(Problem("comm_state_option", options, fix))
        return None
    # The first one is the process group.
    known = {
        name: float if name in _FRACTIONS else type(one.default)
        for name, one in list(inspect.signature(PowerSGDState).parameters.items())[1:]
    }
    # Flags and variables give text.
    options = {name: from_text(value, (known.get(name, Any),)) for name, value in options.items()}
    unknown = f"is not an option of PowerSGD: {', '.join(known)}"
    faults = {n: type_fault(value, (known[n],)) if n in known else unknown for n, value in options.items()}
    refuse(Problem(f"comm_state_option.{n}", options[n], fault) for n, fault in faults.items() if fault)
    logger.info(
        "PowerSGD's memory of past errors is not part of checkpoints; a resumed run begins without it"
    )
    try:
        return PowerSGDState(None, **options)
    except ValueError as error:
        raise ConfigError(Problem("comm_state_option", options, str(error))) from None
