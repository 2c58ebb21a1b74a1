"""Forward and backward of a run's micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from windlass.core.errors import ModelError
from windlass.core.types import LossTerms
from windlass.data.update_batch import UpdateBatch
from windlass.engine.executor import StepHooks
from windlass.trainer.batch_faults import Fed
from windlass.trainer.hooks import TrainHooks
from windlass.trainer.run_context import RunContext
from windlass.trainer.script_loss import MICRO_BATCHES, names_in_code

_TOLERANCE = 4e-3  # bf16 rounds a quotient by 2^-9 of it; the least ratio looked for is 1/2


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
        self.clip = None if hooks.clips is None else hooks.clip
        self._asked = context.plan.batches.asked
        self._check: StepCheck | None = None

    def begin(self, batch: Any, accumulation: int, ids: Sequence[int] = ()) -> None:
        """Before the first update: measure the loss on its first batch, and warm up the model. `ids`: the positions of
        the samples in the dataset, if they are known.
        """
        try:
            self._loss.measure(batch, self._hooks.loss, training=True)
        except Exception as error:
            self._faults.explain(error, Fed("training", batch, ids))
            raise
        self._needs_count = self._loss.needs_count
        self._is_watched = self._loss.script.is_watched
        self.check_step(accumulation)
        with self._accelerator.discarding():
            self._executor.warm_up(lambda: self._discarded(batch))

    def check_step(self, accumulation: int) -> None:
        """Have a step of the script's own checked, if there are several micro-batches."""
        if accumulation > 1 and self._check is None and not self._loss.settings.default_step:
            names = names_in_code([self._hooks.loss.training_step]) & MICRO_BATCHES
            self._check = StepCheck(names, self._asked)
            self._normaliser.watchers = (self._given, *self._normaliser.watchers)

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
        # Experts are neither counted nor balanced by a batch without weight.
        self._executor.strategy.filling = normaliser.filler
        accumulation.micro_batches, accumulation.sync_gradients = len(update.batches), normaliser.last
        count = self._loss.count(update.given_count) if self._needs_count else None
        try:
            returned = self._watched_step(batch, count) if self._is_watched else self._step(batch, count)
        except Exception as error:
            self._faults.explain(error, Fed("training", batch, update.ids[index]))
            raise
        if normaliser.share is None:
            self._take_own_gradients(returned, len(update.batches))
        share = normaliser.share
        assert share is not None
        return share

    def _take_own_gradients(self, returned: Any, micro_batches: int) -> None:
        """Take the gradients that a step has computed by itself, with the loss that it returned."""
        if micro_batches > 1 or not self._executor.has_own_gradients():
            raise ModelError(
                "the training step returned without calling `self.accelerator.backward(loss)`, which scales, sums and "
                "reduces gradients. Those that a step computes by itself, as by a raw `loss.backward()`, are taken, if "
                "there are any, on one process only, for updates of one micro-batch, without fp16, DeepSpeed or "
                "updates in the backward. Call it, or `super().training_step(...)`"
            )
        if not isinstance(returned, Tensor) or returned.numel() != 1:
            raise ModelError(
                "a training step that does not call `self.accelerator.backward(loss)` must return its loss as a "
                f"tensor with one element, and it returned {type(returned).__name__}"
            )
        self._normaliser.note_loss(returned)

    def _watched_step(self, batch: Any, count: Tensor | None) -> Any:
        with self._loss.script.watching(self._hooks.loss.args):
            if self._check is None:
                return self._step(batch, count)
            with self._hooks.noting_loss(self._returned):
                return self._step(batch, count)

    def _returned(self, result: Any) -> None:
        check, loss = self._check, result[0] if isinstance(result, tuple) else result
        assert check is not None
        self._loss.script.returned(loss)
        if not check.passed:
            check.returned = loss

    def _given(self, loss: Any) -> None:
        """Check a loss that a step of the script's passes to backward."""
        check = self._check
        assert check is not None
        if self._loss.script.divisor(loss) is not None:
            check.passed = True
        elif not check.passed:
            check.check(loss, self._accumulation.micro_batches)

    def complete(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        normaliser = self._normaliser
        if self._loss.is_unreported:
            self._loss.report_script_loss(self._hooks.loss)
        if normaliser.weight is None:
            return None, normaliser.parts
        total = normaliser.total
        assert total is not None
        # The weight is known only now: backward divided by an estimate of it.
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


class StepCheck:
    """Checks that an overridden `training_step` passes on the loss that `compute_loss` returned, whole or divided by
    the number of micro-batches, as other trainers need it.

    The engine weighs micro-batches itself, so such a division is undone where it is seen (see `NumberUse`). The value
    of the first usable loss shows a division that was not seen.

    Args:
        names: those for the number of micro-batches in the code of the step.
        asked: the value of `gradient_accumulation_steps`.

    Attributes:
        returned: what `compute_loss` returned last.
        passed: the step needs no further check.
    """

    def __init__(self, names: frozenset[str], asked: int) -> None:
        self._names, self._asked = names, asked
        self.passed = False
        self.returned: Any = None

    def check(self, loss: Any, micro_batches: int) -> None:
        """Check a loss that is passed to backward without a division that was seen. Another one decides if this is 0 or
        NaN, or if there is one micro-batch of several that were asked for. Raises ModelError if code and loss do not
        show what the step divides by.
        """
        if self.returned is None:
            if self._names:
                raise ModelError(
                    f"`training_step` names {min(self._names)} and computes its loss without `compute_loss`, so it is "
                    "not known if it divides by that number, which would be undone: compute the loss in `compute_loss`"
                )
            self.passed = True
            return
        returned, given = _value(self.returned), _value(loss)
        self.returned = None
        if not math.isfinite(returned) or returned == 0.0 or micro_batches == 1 < self._asked:
            return
        numbers = {micro_batches, self._asked} - {1}
        found = [number for number in numbers if math.isclose(given * number, returned, rel_tol=_TOLERANCE)]
        if found:
            raise ModelError(
                f"`training_step` divides the loss by {found[0]} before `self.accelerator.backward(loss)`, in a way "
                "that is not seen. Divide it as a whole by self.current_gradient_accumulation_steps itself, which is "
                "undone because the whole update is normalised, or not at all (an intended factor belongs in "
                "`compute_loss`)"
            )
        if self._names and not math.isclose(given, returned, rel_tol=_TOLERANCE):
            raise ModelError(
                f"`training_step` names {min(self._names)} and passes {given:.4g} to `self.accelerator.backward` where "
                f"`compute_loss` returned {returned:.4g}: neither that loss nor a part of {max(numbers)} of it, so it "
                "is not known if the step divides by that number, which would be undone: compute all of it in "
                "`compute_loss`"
            )
        self.passed = True


def _value(loss: Any) -> float:
    value = loss.sum if isinstance(loss, LossTerms) else loss
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
