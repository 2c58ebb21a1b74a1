"""Forward and backward of a run's micro-batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from windlass.core.errors import ModelError
from windlass.core.types import LossTerms
from windlass.data.update_batch import UpdateBatch
from windlass.engine.executor import StepHooks
from windlass.trainer.batch_faults import Fed
from windlass.trainer.hooks import TrainHooks
from windlass.trainer.run_context import RunContext

_TOLERANCE = 1e-3  # of one division, in bf16 too; the least ratio looked for is 1/2


class MicroSteps(StepHooks):
    """Runs the script's `training_step` on micro-batches. It passes its loss to `accelerator.backward`, which calls the
    normaliser and the executor of the run.
    """

    def __init__(self, context: RunContext, hooks: TrainHooks) -> None:
        self._events, self._hooks, self._schedule = context.events, hooks, context.built.schedule
        self._accelerator, self._loss = context.services.accelerator, context.services.loss
        self._faults = context.services.faults
        self._accumulation, self._normaliser = self._accelerator.gradient_state, self._loss.normaliser
        self._executor, self._step = context.built.executor, hooks.training_step
        self._is_watched = self._needs_count = False
        self._check: DoubleNormalizationCheck | None = None

    def begin(self, batch: Any, accumulation: int) -> None:
        """Before the first update: measure the loss on its first batch, and warm up the model."""
        self._loss.measure(batch, self._hooks.loss, training=True)
        self._needs_count = self._loss.needs_count
        self._is_watched = self._loss.script.is_watched
        self.check_division(accumulation)
        with self._accelerator.discarding():
            self._executor.warm_up(lambda: self._discarded(batch))

    def check_division(self, accumulation: int) -> None:
        """Check the next step of a script's own for a division by the number of micro-batches, if there are several."""
        if accumulation > 1 and not self._loss.settings.default_step:
            self._check = self._check or DoubleNormalizationCheck(accumulation)

    def _discarded(self, batch: Any) -> Tensor:
        targets = self._hooks.loss.count_targets(batch)
        # With a weight, unlike a filler: the warm-up runs what an update runs.
        update = UpdateBatch(
            [batch], [[]], 0, 0, False,
            targets=[targets], samples=[1], denominator=max(targets, 1.0), total_samples=1.0
        )  # fmt: skip
        return self.micro_step(update, 0)

    def micro_step(self, update: UpdateBatch, index: int) -> Tensor:
        """Run micro-batch `index` of an update; return this rank's share of the update's loss, detached."""
        normaliser, batch, accumulation = self._normaliser, update.batches[index], self._accumulation
        normaliser.scope(update, index)
        self._executor.strategy.filling = normaliser.filler
        accumulation.micro_batches, accumulation.sync_gradients = len(update.batches), normaliser.last
        count = self._loss.count(normaliser.denominator) if self._needs_count else None
        try:
            if self._check is None and not self._is_watched:
                self._step(batch, count)
            else:
                self._observed_step(batch, count)
        except Exception as error:
            self._faults.explain(error, Fed("training", batch, update.ids[index]))
            raise
        if normaliser.share is None:
            raise ModelError(
                "the training step returned without calling `self.accelerator.backward(loss)`. A raw "
                "`loss.backward()` bypasses accumulation, loss scaling and the reduction over ranks: replace it, or "
                "call `super().training_step(...)`"
            )
        return normaliser.share

    def _observed_step(self, batch: Any, count: Tensor | None) -> None:
        with contextlib.ExitStack() as stack:
            if self._check is not None:
                stack.enter_context(self._checking(self._check))
            if self._is_watched:
                stack.enter_context(self._loss.script.watching())
            self._step(batch, count)

    @contextlib.contextmanager
    def _checking(self, check: DoubleNormalizationCheck) -> Iterator[None]:
        watchers = self._normaliser.watchers
        self._normaliser.watchers = (check.given, *watchers)
        try:
            with self._hooks.noting_loss(check.returned):
                yield
        finally:
            self._normaliser.watchers = watchers
        if check.is_decided():
            self._check = None

    def complete(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        normaliser = self._normaliser
        if normaliser.weight is None:
            if self._loss.is_unreported:
                self._loss.report_script_loss(self._hooks.loss)
            return None, normaliser.parts
        total = normaliser.total
        assert total is not None
        return normaliser.denominator / total, normaliser.parts

    def event(self, name: str) -> None:
        self._events.fire(name)

    def stepped(self, applied: bool) -> None:
        """Fire `on_optimizer_step`, and step a schedule that keeps its own count."""
        if "on_optimizer_step" in self._events.handler.heard:
            self._events.fire("on_optimizer_step")
        if applied and self._schedule.counts_steps:
            # The gradients exist still: a schedule of the script may read them.
            self._schedule.advance()


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
