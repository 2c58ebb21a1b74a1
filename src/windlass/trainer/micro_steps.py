"""Forward and backward of a run's micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from windlass.accelerator.accelerator import Accelerator
from windlass.core.errors import ModelError
from windlass.core.types import LossTerms
from windlass.engine.executor import Executor, StepRequest
from windlass.trainer.loss_policy import LossPolicy

_TOLERANCE = 1e-3  # of one division, in bf16 too; the least ratio looked for is 1/2

TrainingStep = Callable[[Any, Tensor | None], None]
NotingLoss = Callable[[Callable[[Any], None]], AbstractContextManager[None]]


class MicroSteps:
    """Implements `engine.executor.StepHooks`.

    Runs the script's `training_step` on micro-batches, and normalises the loss that it passes to backward.

    Args:
        event: fires an event of callbacks.
        advance_schedule: the step of a schedule that keeps its own count.
        step: `training_step` on one micro-batch, with the target count that it gets or None.
        noting_loss: context in which `compute_loss` reports what it returns; see `DoubleNormalizationCheck`.
    """

    def __init__(
        self, loss: LossPolicy, executor: Executor, accelerator: Accelerator, device: torch.device,
        event: Callable[[str], None], advance_schedule: Callable[[], None], step: TrainingStep,
        noting_loss: NotingLoss,
    ) -> None:  # fmt: skip
        self._loss, self._executor, self._accelerator = loss, executor, accelerator
        self._accumulation, self._normaliser = accelerator.gradient_state, loss.normaliser
        self._device, self._step, self._noting_loss = device, step, noting_loss
        self.event, self.advance_schedule = event, advance_schedule
        self._needs_count = False
        self._check: DoubleNormalizationCheck | None = None

    def begin(self, batch: Any, accumulation: int) -> None:
        """Before the first update: measure the loss on its first batch, and warm up the model."""
        self._loss.measure(batch, training=True)
        self._needs_count = self._loss.needs_count
        self.check_division(accumulation)
        with self._accelerator.discarding():
            self._executor.warm_up(lambda: self._discarded(batch))

    def check_division(self, accumulation: int) -> None:
        """Check the next step of a script's own for a division by the number of micro-batches, if there are several."""
        if accumulation > 1 and not self._loss.hooks.default_step:
            self._check = self._check or DoubleNormalizationCheck(accumulation)

    def _discarded(self, batch: Any) -> Tensor:
        targets = self._loss.hooks.count_targets(batch)
        self._normaliser.begin(targets, filler=False)
        return self.micro_step(batch, 0, StepRequest(max(targets, 1.0), [targets], [1], 1.0, None, False))

    def micro_step(self, batch: Any, index: int, request: StepRequest) -> Tensor:
        """Run micro-batch `index` of an update; return this rank's share of the update's loss, detached."""
        normaliser = self._normaliser
        filler = request.total_samples > 0 and request.samples[index] == 0
        if index == 0:
            normaliser.begin(request.denominator, filler)
            self._accumulation.micro_batches = len(request.targets)
        last = index == len(request.targets) - 1
        share = request.samples[index] / max(request.total_samples, 1.0)
        normaliser.scope(request.targets[index], share, last, filler)
        self._accumulation.sync_gradients = last
        count = self._loss.count(request.denominator) if self._needs_count else None
        with self._loss.script.watching():
            if self._check is None:
                self._step(batch, count)
            else:
                with self._noting_loss(self._check.returned):
                    self._step(batch, count)
                if self._check.is_decided():
                    self._check = None
        return normaliser.take()

    def backward(self, loss: Any, **options: Any) -> None:
        """The implementation of `accelerator.backward` in a run; `options` of `Tensor.backward`."""
        normaliser = self._normaliser
        if self._check is not None:
            self._check.given(loss)
        self._loss.look(loss)
        scaled = normaliser.apply(loss)
        if normaliser.parts:
            # Auxiliary terms of all micro-batches but the last have a backward of their own; see `Normaliser`.
            aux = normaliser.take_aux()
            if aux is not None:
                self._executor.backward_aux(aux)
            elif normaliser.last:
                self._executor.add_aux(normaliser.correction)
        self._executor.backward(scaled, **options)

    def rescale(self, request: StepRequest) -> Tensor | None:
        """The factor that corrects an update's gradients once its true weight is known; None if it was known before."""
        total = self._normaliser.total
        if total is not None:
            return self._normaliser.denominator / total
        self._loss.report_script_loss()
        return None

    def parts(self) -> dict[str, Tensor]:
        """Named auxiliary losses of the update, this rank's share."""
        return self._normaliser.parts


class DoubleNormalizationCheck:
    """Checks if an overridden `training_step` divides its loss by the accumulation, as some loops require.

    The engine normalises over the whole update, so such a step would train with gradients that are too small by that
    factor, without an error. Compares, in the first training step with a usable loss, the value that `compute_loss`
    returned with the one that was passed to backward.
    """

    def __init__(self, accumulation: int) -> None:
        self._accumulation = accumulation
        self._returned: Any = None
        self._given: Any = None

    def returned(self, result: Any) -> None:
        """Record the value that `compute_loss` returned."""
        self._returned = result[0] if isinstance(result, tuple) else result

    def given(self, loss: Any) -> None:
        """Record the value that was passed to backward."""
        self._given = loss

    def is_decided(self) -> bool:
        """Raise ModelError if the loss was divided; return False if this step cannot decide (its loss is 0 or NaN)."""
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
                "would be divided twice. Pass the loss to backward as `compute_loss` returned it (an intended factor "
                "belongs in `compute_loss`)"
            )
        return True


def _value(loss: Any) -> float:
    value = loss.sum if isinstance(loss, LossTerms) else loss
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
