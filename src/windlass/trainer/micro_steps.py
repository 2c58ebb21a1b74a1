"""Forward and backward of a run's micro-batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from windlass.core.errors import ModelError
from windlass.core.types import LossTerms
from windlass.data.update_batch import UpdateBatch
from windlass.engine.executor import StepHooks
from windlass.trainer.batch_faults import Fed
from windlass.trainer.hooks import TrainHooks
from windlass.trainer.run_context import RunContext
from windlass.trainer.script_loss import CURRENT, MICRO_BATCHES, names_in_code

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
        self._division: StepDivision | None = None

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
        self.check_division(accumulation)
        with self._accelerator.discarding():
            self._executor.warm_up(lambda: self._discarded(batch))

    def check_division(self, accumulation: int) -> None:
        """Find out if a step of the script's own divides by the number of micro-batches, if there are several."""
        if accumulation > 1 and self._division is None and not self._loss.settings.default_step:
            names = names_in_code([self._hooks.loss.training_step]) & MICRO_BATCHES
            self._division = StepDivision(names, self._asked)

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
        division = self._division
        normaliser.scope(update, index, 1 if division is None else division.by(len(update.batches)))
        # Experts are neither counted nor balanced by a batch without weight.
        self._executor.strategy.filling = normaliser.filler
        accumulation.micro_batches, accumulation.sync_gradients = len(update.batches), normaliser.last
        count = self._loss.count(normaliser.denominator) if self._needs_count else None
        try:
            looked_at = division is not None and not division.is_decided(len(update.batches))
            if looked_at or self._is_watched:
                returned = self._observed_step(batch, count, division if looked_at else None)
            else:
                returned = self._step(batch, count)
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

    def _observed_step(self, batch: Any, count: Tensor | None, division: StepDivision | None) -> Any:
        with contextlib.ExitStack() as stack:
            if division is not None:
                stack.enter_context(self._deciding(division))
            if self._is_watched:
                stack.enter_context(self._loss.script.watching(self._hooks.loss.args))
            return self._step(batch, count)

    @contextlib.contextmanager
    def _deciding(self, division: StepDivision) -> Iterator[None]:
        normaliser, watchers = self._normaliser, self._normaliser.watchers

        def given(loss: Any) -> None:
            micro_batches = self._accumulation.micro_batches
            division.decide(loss, micro_batches)
            normaliser.divided_by = division.by(micro_batches)

        normaliser.watchers = (given, *watchers)
        try:
            with self._hooks.noting_loss(division.returned):
                yield
        finally:
            normaliser.watchers = watchers

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


class StepDivision:
    """Whether an overridden `training_step` divides its loss by the number of micro-batches, as other trainers need.

    The engine weighs micro-batches itself, so such a division is undone. The code of the step shows by which number it
    may divide; the first usable loss shows whether it does: the result of `compute_loss` is compared with what is
    passed to backward.

    A step may name both numbers, as that of transformers does, which needs one of them for another engine alone. They
    are the same but in a shorter last update, whose loss shows which of them it is.

    Args:
        names: those for the number of micro-batches in the code of the step.
        asked: the value of `gradient_accumulation_steps`.
    """

    def __init__(self, names: frozenset[str], asked: int) -> None:
        self._names, self._asked = names, asked
        self._divides = self._was_seen = False
        self._returned: Any = None

    def is_decided(self, micro_batches: int) -> bool:
        """True if no loss needs to be looked at in an update of so many micro-batches."""
        return self._was_seen and not (self._divides and len(self._numbers(micro_batches)) > 1)

    def by(self, micro_batches: int) -> int:
        """The number by which the step divides in an update of so many micro-batches, once that is decided."""
        return max(self._numbers(micro_batches)) if self._divides else 1

    def _numbers(self, micro_batches: int) -> set[int]:
        """The numbers that the code names. The argument is the same number in a shorter last update."""
        return {micro_batches if name == CURRENT else self._asked for name in self._names} or {micro_batches}

    def returned(self, result: Any) -> None:
        """Record the value that `compute_loss` returned."""
        self._returned = result[0] if isinstance(result, tuple) else result

    def decide(self, loss: Any, micro_batches: int) -> None:
        """Decide by a loss that is passed to backward, unless it is 0 or NaN. Raises ModelError if code and loss do not
        show what the step divides by.
        """
        if self._returned is None:
            if self._names:
                raise ModelError(
                    f"`training_step` names {min(self._names)} and computes its loss without `compute_loss`, so it is "
                    "not known if it divides by that number, which would be undone: compute the loss in `compute_loss`"
                )
            self._was_seen = True
            return
        returned, given = _value(self._returned), _value(loss)
        self._returned = None
        if not math.isfinite(returned) or returned == 0.0:
            return  # a division does not show in it: another loss decides
        numbers = self._numbers(micro_batches)
        visible = {number for number in numbers if number > 1 or self._divides}
        found = [number for number in visible if math.isclose(given * number, returned, rel_tol=_TOLERANCE)]
        if not found and visible != numbers and self._asked != 1:
            return  # nor does one by 1, in the single micro-batch of a shorter update
        if len(found) > 1 or (found and not self._names):
            raise ModelError(
                f"`training_step` divides the loss by {found[0]} before `self.accelerator.backward(loss)`, and its "
                f"code {'names two numbers of' if self._names else 'does not name the number of'} micro-batches. "
                "Divide by self.current_gradient_accumulation_steps alone, which is undone because the whole update is "
                "normalised, or not at all (an intended factor belongs in `compute_loss`)"
            )
        is_whole = not self._divides and math.isclose(given, returned, rel_tol=_TOLERANCE)
        if self._names and visible and not found and not is_whole:
            raise ModelError(
                f"`training_step` names {min(self._names)} and passes {given:.4g} to `self.accelerator.backward` where "
                f"`compute_loss` returned {returned:.4g}: neither that loss nor a part of {max(numbers)} of it, so it "
                "is not known if the step divides by that number, which would be undone: compute all of it in "
                "`compute_loss`"
            )
        self._divides, self._was_seen = bool(found), True
        if found and len(numbers) > 1:
            self._names = frozenset({CURRENT}) if found == [micro_batches] else self._names - {CURRENT}


def _value(loss: Any) -> float:
    value = loss.sum if isinstance(loss, LossTerms) else loss
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
