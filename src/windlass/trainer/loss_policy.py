"""The divisor of a loss: measured on the first batch, and in the first real call of a script's own function."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from windlass.accelerator.accelerator import Accelerator
from windlass.core.errors import ModelError
from windlass.core.logs import get_job_logger, get_logger, warn_once
from windlass.core.types import LossTerms
from windlass.engine.count_watch import CountWatch, Use
from windlass.engine.normalise import Meaning, Normaliser
from windlass.engine.probe import Probe, rounding_of
from windlass.engine.splitting import Kind, Split
from windlass.metrics.tokens import TargetCounter
from windlass.trainer.losses import as_count, call_model, check_loss, loss_of, takes
from windlass.trainer.session import Session
from windlass.trainer.wrappers import accepts_count

logger = get_logger(__name__)

_TF32_ROUNDING = 2e-3  # accelerators may compute float32 in TF32
_RANKS = frozenset({"num_processes", "world_size", "get_world_size", "n_gpu", "WORLD_SIZE"})


@dataclass(frozen=True, slots=True)
class LossHooks:
    """The methods of a Trainer that compute and count a loss, bound for one call of `train()` or `evaluate()`.

    Attributes:
        model: the bare model.
        compute_loss, training_step, count_targets, prepare_inputs: its bound methods.
        autocast: returns the mixed-precision context of a forward.
        function: `compute_loss_func`.
        default_loss, default_step, default_count: `compute_loss`, `training_step`, `count_targets` are not overridden.
        smoothing: `label_smoothing_factor`.
        compiled: the model is compiled.
        declared: `loss_is_scaled_for_ga`.
    """

    model: nn.Module
    compute_loss: Callable[..., Any]
    training_step: Callable[..., Any]
    count_targets: Callable[[Any], float]
    prepare_inputs: Callable[[Any], Any]
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    function: Callable[..., Any] | None
    default_loss: bool
    default_step: bool
    default_count: bool
    smoothing: float
    compiled: bool
    declared: bool | None

    @property
    def of_model(self) -> bool:
        """True if the loss is the model's own, not one that a script or label smoothing computes."""
        return self.default_loss and self.function is None and not self.smoothing

    @property
    def counts_alone(self) -> bool:
        """True if nothing reads which labels are targets: the loss and the count are both overridden. A smoothed loss,
        which an override may call, reads it.
        """
        return not self.default_loss and not self.default_count and not self.smoothing


class LossPolicy:
    """The targets that the loss of a Trainer's model is a mean over, and its divisor.

    Attributes:
        counter: counts the targets of a batch, once it is known which labels are targets.
        normaliser: turns losses into shares of an update.
        divides: the model's own loss divides by `num_items_in_batch`: by signature until it is measured.
        kind: how the model's own loss adds up, once it is measured.
        scales: the default loss is multiplied by the number of ranks, as the script declared.
        takes_count, step_takes_count: `compute_loss` and `training_step` accept `num_items_in_batch`.
        measured: the first batch of this run was measured.
    """

    def __init__(self, session: Session, accelerator: Accelerator) -> None:
        self._device, self._gang, self._accelerator = session.device, session.gang, accelerator

    def take_model(self, model: nn.Module, label_names: list[str]) -> None:
        """Start with this model."""
        self._label_names = tuple(label_names)
        self._declared_divides: bool | None = None
        self.divides, self.measured, self.scales = accepts_count(model), False, False
        self.kind: Kind | None = None
        self.counter = TargetCounter(self._label_names)
        self.normaliser = Normaliser(self._gang.size, sum_on_device=self._gang.sum_on_device)
        self._resumed_kind: Kind | None = None
        self._is_plain_mean = False
        self._count_watch: CountWatch | None = None
        self._own_sum = (0.0, 0.0)

    def adopt(self, hooks: LossHooks) -> None:
        """Read the hooks' signatures, once for all steps. `compute_loss` may have only three arguments."""
        self.hooks = hooks
        self.takes_count = takes(hooks.compute_loss, "num_items_in_batch")
        self.step_takes_count = takes(hooks.training_step, "num_items_in_batch")

    def declare_model(self, divides: bool) -> None:
        """Set what `accepts_count` finds by signature: whether the model's own loss may be given the count."""
        self.divides = self._declared_divides = divides

    def _may_divide(self) -> bool:
        declared = self._declared_divides
        return accepts_count(self.hooks.model) if declared is None else declared

    def begin_run(self, resumed_kind: Kind | None = None) -> None:
        """Measure the first batch again; if it cannot decide, keep the kind of an earlier part of the run."""
        self.measured, self._resumed_kind = False, resumed_kind

    @property
    def is_sum(self) -> bool:
        """True if the model's own loss is a sum over its batch."""
        return self.kind is Kind.SUM

    @property
    def needs_count(self) -> bool:
        """True if a training step uses the update's target count."""
        if not self.takes_count or not self.step_takes_count:
            return False
        hooks = self.hooks
        own = hooks.default_loss and hooks.default_step
        return not own or bool(hooks.smoothing) or hooks.function is not None or self.divides

    def count(self, value: float, device: torch.device) -> Tensor:
        """The count that hooks get; a watched one until it is known what they do with it."""
        plain = as_count(value, device)
        return plain if self._count_watch is None else self._count_watch.count(value, plain)

    # --- measuring --------------------------------------------------------------------------------------------------

    def measure(self, batch: Any, training: bool) -> None:
        """Measure, on the first batch, what the loss is a mean over; see `engine.probe`. Collective."""
        if self.measured:
            return
        was_training = self.hooks.model.training
        self.hooks.model.train(training)
        try:
            self._measure(self.hooks.prepare_inputs(batch), self.hooks.count_targets(batch))
        finally:
            self.hooks.model.train(was_training)
        self.measured = True

    def measure_labels(self, batch: Any | None) -> None:
        """Measure, for an evaluation outside training, which labels are targets, and if the loss is a sum. A rank may
        have no batch. Collective.
        """
        probe = self._probe()
        prepared = None if batch is None else self.hooks.prepare_inputs(batch)
        self._measure_shift(probe, prepared)
        if self.hooks.of_model:
            self._adopt_split(probe.splits(prepared, self._model_loss, self.counter, self._rounding))

    def _probe(self) -> Probe:
        return Probe(self.hooks.model, self._device, self._gang.sum)

    def _model_loss(self, inputs: Any, denominator: float | None) -> Any:
        """The bare model's own loss: the only one that is computed more often than training requires."""
        if denominator is not None:
            inputs = {**inputs, "num_items_in_batch": denominator}
        with self.hooks.autocast():
            return check_loss(loss_of(call_model(self.hooks.model, inputs), inputs))

    def _measure(self, prepared: Any, targets: float) -> None:
        probe, declared = self._probe(), self.hooks.declared
        self._measure_shift(probe, prepared)
        self._count_watch, self.kind = None, None
        self.divides = self._may_divide()
        find = self._meaning_of_model if self.hooks.of_model else self._meaning_of_hook
        if declared is None or self.hooks.default_loss:
            self.normaliser.meaning = find(probe, prepared, targets)
        if declared is not None:
            self.scales = declared
            self.normaliser.meaning = Meaning.SCALED if declared else Meaning.MICRO_MEAN
            self._count_watch = None
        self.normaliser.judge = None if self._count_watch is None else self._judge
        self._note_plain_mean()

    def _measure_shift(self, probe: Probe, prepared: Any) -> None:
        """Measure which labels are targets, from a count of the script's, or with the model's own loss, if it has one,
        also for a script's loss.
        """
        if (
            self.hooks.counts_alone
        ):  # a forward with labels may need far more memory than the loss of the hook
            return
        unshifted = TargetCounter(self._label_names)
        if not self.hooks.default_count and probe.counts_shifted(
            prepared, unshifted, self.hooks.count_targets
        ):
            self.counter = TargetCounter(self._label_names, shifted=True)
            return
        able = prepared is not None
        if able and not self.hooks.of_model:
            able = math.isfinite(probe.value(prepared, self._model_loss))
        shifted = probe.shifts_labels(prepared if able else None, unshifted, self._model_loss)
        self.counter = TargetCounter(self._label_names, shifted)

    # --- the model's own loss ---------------------------------------------------------------------------------------

    def _meaning_of_model(self, probe: Probe, prepared: Any, targets: float) -> Meaning:
        self.divides = (
            self.divides and isinstance(prepared, Mapping) and self._divides(probe, prepared, targets)
        )
        if self.divides and self.takes_count:
            return Meaning.SHARE
        split = probe.splits(prepared, self._model_loss, self.counter, self._rounding)
        if (
            self._resumed_kind in split.fitting
        ):  # the kind of the resumed run, which this batch may not be able to decide
            split = replace(split, kind=self._resumed_kind)
        self._resumed_kind = None
        self._adopt_split(split)
        self._say_split(split)
        return Meaning.SHARE if split.kind is Kind.SUM else Meaning.MICRO_MEAN

    def _divides(self, probe: Probe, prepared: Any, targets: float) -> bool:
        """Return True if the model divides by the count. A model in a wrapper that does not accept it raises TypeError,
        and does not get it.
        """
        try:
            return probe.divides(prepared, self._model_loss, 2.0 * max(targets, 1.0)) is True
        except TypeError as error:
            if "num_items_in_batch" not in str(error):
                raise
            return False

    def _adopt_split(self, split: Split) -> None:
        self.kind = split.kind
        if split.kind is Kind.ROWS:
            self.counter = TargetCounter(())

    def _say_split(self, split: Split) -> None:
        if split.deviation is None:
            logger.info(
                "the first batch cannot be split to measure its loss; assuming a mean over its targets (see "
                "docs/losses.md)"
            )
            return
        said = get_job_logger(__name__)
        if split.kind is Kind.SUM:
            said.info("the model's loss is a sum over its batch: adding up micro-batches and ranks")
        if not split.exact and self._accelerator.gradient_accumulation_steps * self._gang.size > 1:
            said.warning(
                "the loss of a batch does not follow from the losses of its halves: it differs by %.2g of its value "
                "from %s. Other splits into micro-batches or ranks train with slightly other gradients (contrastive "
                "losses, balancing of experts, batch normalization; see docs/losses.md)",
                split.deviation,
                split.kind.value,
            )

    @property
    def _rounding(self) -> float:
        """The largest difference between two ways to compute the model's loss, by the types of weights and autocast."""
        kind = self._device.type
        with self.hooks.autocast():
            if torch.is_autocast_enabled(kind):
                return rounding_of(torch.get_autocast_dtype(kind))
        weights = next(
            (p.dtype for p in self.hooks.model.parameters() if p.is_floating_point()), torch.float32
        )
        computes_tf32 = weights is torch.float32 and kind != "cpu"
        return _TF32_ROUNDING if computes_tf32 else rounding_of(weights)

    # --- a loss of the script's -------------------------------------------------------------------------------------

    def _meaning_of_hook(self, probe: Probe, prepared: Any, targets: float) -> Meaning:
        smooths = self.hooks.default_loss and self.hooks.function is None
        if smooths:  # computed here, and divided by the count if there is one
            return Meaning.SHARE if self.takes_count else Meaning.MICRO_MEAN
        if not self.takes_count:
            return Meaning.MICRO_MEAN
        own = probe.value(prepared, self._model_loss)
        able = self._gang.vote(math.isfinite(own))
        self._own_sum = (own * targets, 1.0) if able else (0.0, 0.0)
        if able and self.divides:
            self.divides = self._divides(probe, prepared, targets)
        if self.hooks.compiled or hasattr(self.hooks.model, "_orig_mod"):
            return self._assumed("the model is compiled, and a watched count cannot be compiled")
        self._count_watch = CountWatch(self._gang.sum)
        return Meaning.MICRO_MEAN  # until the first loss is judged

    def _judge(self, loss: Tensor | LossTerms) -> None:
        """Judge by the first loss of a hook what the hook does with the count. Collective."""
        assert self._count_watch is not None
        found = self._count_watch.judge(loss)
        if found is None:
            return
        use, scaled = found
        self._count_watch = self.normaliser.judge = None
        if isinstance(loss, LossTerms) or use is Use.IGNORES:
            meaning = Meaning.MICRO_MEAN
        elif use is Use.DIVIDES:
            meaning = self._share_or_scaled(scaled)
        elif use is Use.UNKNOWN:
            meaning = self._assumed("the loss reads `num_items_in_batch` as a number")
        else:
            raise ModelError(
                "`compute_loss` mixes terms that are divided by `num_items_in_batch` with terms that are not, so no "
                "factor makes it exact under accumulation. Return `LossTerms(sum, weight, aux={...})`, or declare it "
                "with `loss_is_scaled_for_ga = True` (already normalised over the update and the ranks) or `False` (a "
                "plain mean)"
            )
        self.normaliser.meaning = meaning
        self._note_plain_mean()

    def _share_or_scaled(self, scaled: float) -> Meaning:
        """Decide if a loss that is divided by the count is also multiplied by the number of ranks.

        It is compared with the model's own loss. If the two are unrelated, a function that does not mention the number
        of ranks is assumed not to multiply by it.
        """
        world = self._gang.size
        own, able = self._gang.sum(torch.tensor(self._own_sum, dtype=torch.float64)).tolist()
        if world == 1:
            return Meaning.SHARE
        ratio = scaled / own if able == world and own else 0.0
        for factor, meaning in ((1, Meaning.SHARE), (world, Meaning.SCALED)):
            if 0.75 * factor < ratio < 1.33 * factor:
                return meaning
        if not any(map(_mentions_ranks, (self.hooks.compute_loss, self.hooks.function))):
            return Meaning.SHARE
        raise ModelError(
            "`compute_loss` divides by `num_items_in_batch` and mentions the number of ranks, but its value does not "
            f"show if it is multiplied by {world}. Declare `loss_is_scaled_for_ga = True` if it is already "
            "normalised over the update and the ranks, or return `LossTerms(sum, weight)`"
        )

    def _assumed(self, why: str) -> Meaning:
        """What transformers assumes of a loss by signatures, with one warning."""
        normalised = self.hooks.function is not None or self._may_divide()
        share = Meaning.SHARE if self.hooks.default_loss else Meaning.SCALED
        meaning = share if normalised else Meaning.MICRO_MEAN
        if self._gang.rank == 0:
            warn_once(
                logger,
                f"{why}, so the divisor of the loss cannot be measured. As in transformers, the loss is assumed to be "
                f"{meaning.value}. Declare it with `loss_is_scaled_for_ga`, or return LossTerms(sum, weight)",
            )
        return meaning

    def _note_plain_mean(self) -> None:
        self._is_plain_mean = (
            not self.hooks.of_model
            and self.hooks.declared is None
            and self.normaliser.meaning is Meaning.MICRO_MEAN
            and self._count_watch is None
            and self._accelerator.gradient_accumulation_steps * self._gang.size > 1
        )

    def report_plain_mean(self) -> None:
        """Log once, after the first update, that a hook's loss is assumed to be a plain mean. Only then is it known
        that it does not return `LossTerms`.
        """
        if not self._is_plain_mean:
            return
        self._is_plain_mean = False
        if self._gang.rank != 0:
            return
        warn_once(
            logger,
            "the loss is a plain mean over each micro-batch: weighting it by the micro-batch's target count, which is "
            "exact for an unweighted mean over labels that are not -100. For anything else return "
            "LossTerms(sum, weight), or accept `num_items_in_batch` and divide by it",
        )


def _mentions_ranks(function: Callable[..., Any] | None) -> bool:
    """Return True if the code of a function, or of a function in it, names the number of ranks."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    pending = [] if code is None else [code]
    while pending:
        code = pending.pop()
        names = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
        if names & _RANKS:
            return True
        pending += [c for c in code.co_consts if hasattr(c, "co_names")]
    return False
