"""Loss scaling for fp16 (Micikevicius et al., arXiv:1710.03740), with one host sync per update."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from windlass.config.plan import PrecisionPlan
from windlass.core.errors import NonFiniteError
from windlass.core.types import State

# 65536 halved 64 times is 3e-15: a gradient that overflows there is not finite at any scale.
MAX_SKIPS_IN_A_ROW = 64


class UnitScaler:
    """No scaling, for fp32 and bf16. No host sync."""

    active = False
    skipped = 0

    def __init__(self, device: torch.device) -> None:
        self._none = torch.zeros(1, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale_(self, gradients: Iterable[Tensor]) -> Tensor:
        return self._none

    def overflowed(self, found_inf: Tensor) -> bool:
        return False

    def update(self, found_inf: Tensor) -> None:
        """Nothing to do."""

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        """Nothing to do: the checkpoint of an fp16 run may be continued without a scaler."""


class LossScaler:
    """Multiplies the loss so that small fp16 gradients do not underflow, and divides the gradients before their use.

    After an overflow the scale is multiplied by `backoff_factor` and the update must be skipped; after
    `growth_interval` updates without one it is multiplied by `growth_factor`. The scale lives on the device and is
    changed there.

    Under data parallelism gradients are summed over ranks before they are unscaled, so an overflow on one rank is one
    on all of them, and all ranks decide alike.

    Args:
        device: of the loss and the gradients.

    Attributes:
        skipped: updates that overflowed since the run began.
    """

    active = True

    def __init__(
        self,
        device: torch.device,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval = growth_interval
        self._scale = torch.full((), init_scale, dtype=torch.float32, device=device)
        self._streak = torch.zeros((), dtype=torch.int32, device=device)
        self.skipped = 0
        self._skips_in_a_row = 0

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the scale; scalar tensor, connected to the graph."""
        return loss * self._scale

    def unscale_(self, gradients: Iterable[Tensor]) -> Tensor:
        """Divide `gradients` by the scale, in place. Raises ValueError if a gradient is fp16, and would underflow
        again.

        Returns:
            Scalar fp32 tensor on the device: 1 if any gradient is infinite or NaN, else 0.
        """
        # The reciprocal in fp64: in fp32 it would not be the exact inverse of the scale.
        exact = torch.float32 if self._scale.device.type == "mps" else torch.float64
        inverse = self._scale.to(exact).reciprocal().float()
        # A new tensor for each call: several optimizers may share a scaler.
        found = torch.zeros_like(self._scale)
        for grads in _alike(gradients):
            # A model that is kept on the host, or on several devices, has gradients elsewhere than the scale.
            there = grads[0].device
            flag = found.to(there)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inverse.to(there))
            found = flag.to(found.device)
        return found

    def overflowed(self, found_inf: Tensor) -> bool:
        """Return True if this update must be skipped. The one host sync of an update. Raises NonFiniteError if so many
        updates in a row overflowed that the scale cannot be the cause.
        """
        # On the CPU the value is read through NumPy, without a dispatch.
        flag = found_inf.numpy() if found_inf.device.type == "cpu" else found_inf.item()
        if not flag:
            self._skips_in_a_row = 0
            return False
        self.skipped += 1
        self._skips_in_a_row += 1
        if self._skips_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise NonFiniteError(
                f"the last {self._skips_in_a_row} updates were skipped: their fp16 gradients were not finite, at "
                "ever smaller loss scales; look for NaN in the data or the weights, or use bf16"
            )
        return True

    def update(self, found_inf: Tensor) -> None:
        """Adjust the scale after an update, skipped or not, on the device."""
        factors = self.growth_factor, self.backoff_factor, self.growth_interval
        torch._amp_update_scale_(self._scale, self._streak, found_inf, *factors)

    def get_scale(self) -> float:
        """The current scale. Waits for the device."""
        return float(self._scale)

    def state_dict(self) -> State:
        return {
            "scale": self._scale.detach().cpu().clone(),
            "growth_streak": self._streak.detach().cpu().clone(),
            "skipped": self.skipped,
            "skips_in_a_row": self._skips_in_a_row,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore a state; that of a run without scaler, or with one of DeepSpeed's, is ignored."""
        if "scale" not in state:
            return
        self._scale.copy_(state["scale"])
        self._streak.copy_(state["growth_streak"])
        self.skipped, self._skips_in_a_row = state["skipped"], state["skips_in_a_row"]


# Called by an executor in this order: `scale`, `unscale_`, `overflowed`, `update`.
Scaler = UnitScaler | LossScaler


def build_scaler(plan: PrecisionPlan, device: torch.device) -> Scaler:
    """The loss scaler for fp16, the unit scaler otherwise."""
    return LossScaler(device) if plan.compute == "fp16" else UnitScaler(device)


def _alike(gradients: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Gradients in lists of one dtype and device, complex ones as pairs of real numbers, as the kernel requires."""
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in gradients:
        if grad.dtype is torch.float16:
            raise ValueError(
                "fp16 gradients cannot be unscaled; keep trainable weights in float32 (dtype=torch.float32)"
            )
        values = grad._values() if grad.is_sparse else grad
        values = torch.view_as_real(values) if values.is_complex() else values
        lists.setdefault((values.device, values.dtype), []).append(values)
    return lists.values()
