"""Finds out whether an overridden `training_step` divides its loss by the accumulation, as some loops ask of it.

The engine normalises over the whole update, so such a step would train with gradients that are too small by that
factor, and nothing would show it but worse results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from windlass.core.errors import ModelError
from windlass.core.types import LossTerms
from windlass.trainer.losses import LossMixin

if TYPE_CHECKING:
    from windlass.trainer.parts import TrainerParts

_TOLERANCE = 1e-3  # of one division, in bf16 too; the least ratio looked for is 1/2


def may_divide(trainer: TrainerParts, accumulation: int) -> bool:
    """Whether there is anything to find out: several micro-batches an update, and a step of the user's own."""
    own_step = type(trainer).training_step is not LossMixin.training_step or "training_step" in vars(trainer)
    return accumulation > 1 and own_step


class DivisionWatch:
    """Compares what `compute_loss` returned with what was handed to backward, in the first training step that tells."""

    def __init__(self, trainer: TrainerParts, accumulation: int) -> None:
        self._trainer, self._accumulation = trainer, accumulation
        self._returned: Any = None
        self._given: Any = None

    def run(self, training_step: Callable[[], Any]) -> bool:
        """Run one training step under watch; gives whether it told (a loss of 0 or NaN does not).

        Raises:
            ModelError: the loss was divided by the accumulation.
        """
        trainer, attributes = self._trainer, vars(self._trainer)
        own = attributes.get("compute_loss")
        trainer.compute_loss = self._noting(trainer.compute_loss)  # type: ignore[method-assign]
        try:
            training_step()
        finally:
            del attributes["compute_loss"]
            if own is not None:
                attributes["compute_loss"] = own
        return self._judge()

    def _noting(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = compute_loss(*args, **kwargs)
            self._returned = result[0] if isinstance(result, tuple) else result
            return result

        return noted

    def given_to_backward(self, loss: Any) -> None:
        """Note what the training step handed to `accelerator.backward`."""
        self._given = loss

    def _judge(self) -> bool:
        if self._returned is None:
            # This step computes its loss without `compute_loss`: there is nothing to compare with.
            return True
        returned, given = _value(self._returned), _value(self._given)
        self._returned = self._given = None
        if not math.isfinite(returned) or returned == 0.0:
            return False
        if math.isclose(given * self._accumulation, returned, rel_tol=_TOLERANCE):
            raise ModelError(
                f"`training_step` divides the loss by gradient_accumulation_steps ({self._accumulation}) before "
                "`self.accelerator.backward(loss)`, which normalises over the whole update by itself: the gradients "
                "would be divided twice. Hand the loss to backward as `compute_loss` returned it (a factor that is "
                "meant belongs into `compute_loss`)"
            )
        return True


def _value(loss: Any) -> float:
    value = loss.sum if isinstance(loss, LossTerms) else loss
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
