"""What this machine can do, as far as a launch has to know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.config.launch_checks import Machine

if TYPE_CHECKING:
    import torch


def this_machine() -> Machine:
    """Its accelerators, and what precisions they have (imports torch)."""
    from windlass.core.device import choose_device, visible_devices

    device = choose_device()
    return Machine(visible_devices(), device.type, lambda precision, cpu: _lacks(precision, cpu, device))


def _lacks(precision: str, cpu: bool, device: torch.device) -> str | None:
    """Why `precision` cannot be had; None when it can."""
    import torch

    from windlass.config.plan import PrecisionPlan
    from windlass.core.errors import ConfigError
    from windlass.precision.check import check_precision

    if precision == "no":
        return None
    plan = PrecisionPlan("bf16" if precision == "bf16" else "fp16")
    try:
        check_precision(plan, torch.device("cpu") if cpu else device)
    except ConfigError as error:
        return "; ".join(problem.fix for problem in error.problems)
    return None
