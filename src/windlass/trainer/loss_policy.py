"""What a loss is a mean over, and its weight in an update: measured on the first batch for the model's own loss."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from windlass.accelerator.accelerator import Accelerator
from windlass.config.arguments import TrainingArguments
from windlass.core.attributes import takes
from windlass.core.errors import ModelError
from windlass.core.logs import get_job_logger, get_logger, warn_once
from windlass.core.types import LossTerms, State
from windlass.core.watched_numbers import process_count
from windlass.engine.normalise import Meaning, UpdateNormaliser
from windlass.engine.probe import Probe, rounding_of
from windlass.engine.splitting import Kind, Split
from windlass.metrics.tokens import TargetCounter
from windlass.trainer.drawn_samples import OWN_COUNT_OF_SEVERAL, Draw
from windlass.trainer.losses import as_count, call_model, check_loss, loss_of, smoothed_loss
from windlass.trainer.script_loss import ScriptLoss
from windlass.trainer.session import Session
from windlass.trainer.without_logits import WithoutLogits
from windlass.trainer.wrappers import accepts_count
from windlass.transforms.model_limits import ignored_pixel

logger = get_logger(__name__)

_TF32_ROUNDING = 2e-3  # accelerators may compute float32 in TF32


@dataclass(frozen=True, slots=True)
class LossHooks:
    """The methods of a Trainer that compute and count a loss, bound for one call of `train()` or `evaluate()`. They are
    handed over and not kept: what lives as long as a Trainer does not refer to it.
    """

    compute_loss: Callable[..., Any]
    training_step: Callable[..., Any]
    count_targets: Callable[[Any], float]
    prepare_inputs: Callable[[Any], Any]
    # Returns the mixed-precision context of a forward
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    args: TrainingArguments  # those that the methods read
    draw: Draw | None = None  # the script's `get_batch_samples`, if it has one


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What a script and its arguments set for a loss, for one call of `train()` or `evaluate()`."""

    model: nn.Module  # the bare model
    own_items: bool  # `_prepare_input` is overridden, so it is called for each item of a batch
    function: Callable[..., Any] | None  # `compute_loss_func`
    # `default_loss`, `default_step`, `default_count`: `compute_loss`, `training_step`, `count_targets` are not
    # overridden
    default_loss: bool
    default_step: bool
    default_count: bool
    smoothing: float  # `label_smoothing_factor`
    lean: bool  # `lean_loss`
    compiled: bool  # the model is compiled
    declared: bool | None  # `loss_is_scaled_for_ga`
    # The loss exchanges values with the other processes, so all compute it equally often, in evaluations as well
    exchanges: bool

    @property
    def of_model(self) -> bool:
        """True if the loss is the model's own, not one that a script or label smoothing computes."""
        return self.default_loss and self.function is None and not self.smoothing

    @property
    def of_script(self) -> bool:
        """True if a script computes the loss."""
        return not self.default_loss or self.function is not None

    @property
    def watched(self) -> bool:
        """True if a script's code computes the loss, or passes it to backward."""
        return self.of_script or not self.default_step

    @property
    def counts_alone(self) -> bool:
        """True if nothing reads which labels are targets: the loss and the count are both overridden. A smoothed loss,
        which an override may call, reads it.
        """
        return not self.default_loss and not self.default_count and not self.smoothing


class LossPolicy:
    """The targets that the loss of a Trainer's model is a mean over, and its weight in an update.

    Attributes:
        counter: counts the targets of a batch, once it is known which labels are targets.
        normaliser: turns losses into shares of an update.
        settings: of the present call.
        script: how a loss of the script is normalised.
        gets_count: the model's forward is given `num_items_in_batch`.
        kind: how the model's own loss adds up, once it is measured.
        without_logits: the loss of a model whose logits are not read.
        takes_count, step_takes_count: `compute_loss` and `training_step` accept `num_items_in_batch`.
        measured: the first batch of this run was measured.
        is_unreported: `report_script_loss` is to be called after an update.
        asks_for_factor: an overridden `compute_loss` has its loss `multiplied`.
    """

    asks_for_factor = False

    def __init__(self, session: Session, accelerator: Accelerator) -> None:
        self._device, self._data_ranks, self._accelerator = session.device, session.data_ranks, accelerator
        self._model_ranks = session.all_ranks.over("model")
        self.script = ScriptLoss(self._data_ranks, accelerator.gradient_state)
        self.without_logits = WithoutLogits(self._device, self._data_ranks.sum)

    def take_model(self, model: nn.Module, label_names: list[str]) -> None:
        """Start with this model."""
        self._declared_count: bool | None = None
        self.gets_count, self.measured = accepts_count(model), False
        self.kind: Kind | None = None
        self.counter = self._unshifted = TargetCounter(tuple(label_names), ignored_pixel=ignored_pixel(model))
        self.normaliser = UpdateNormaliser(
            self._data_ranks.size, sum_on_device=self._data_ranks.sum_on_device
        )
        self.without_logits.used = False
        self._saved: State = {}
        self.is_unreported = False

    def adopt(self, settings: LossSettings, hooks: LossHooks) -> None:
        """Use these settings, and read the hooks' signatures, once for all steps. `compute_loss` may have only three
        arguments.
        """
        self.settings = settings
        self.takes_count = takes(hooks.compute_loss, "num_items_in_batch")
        self.step_takes_count = takes(hooks.training_step, "num_items_in_batch")
        # A run, whose losses are looked at, reads the code again with its first batch.
        if not self.normaliser.watchers:
            known = self.script.complete if self.measured else None
            self.script.begin(settings.declared, self._counting_functions(hooks), earlier=known)

    def declare_model(self, gets_count: bool) -> None:
        """Set what `accepts_count` finds by signature: whether the model is given the count."""
        self.gets_count = self._declared_count = gets_count

    def begin_run(self, saved: State | None = None) -> None:
        """Measure the first batch again, except what an earlier part of the run has `saved` as its `facts`."""
        self.normaliser.watchers = (self._look,) if self.settings.watched else ()
        self.measured, self._saved = False, saved or {}
        self.without_logits.used = False

    def end_run(self) -> None:
        """Look at no further losses: no script passes one to backward."""
        self.normaliser.watchers = ()

    def facts(self) -> State:
        """The measured properties of the loss, for a checkpoint: a resumed run must use the same ones."""
        if not self.measured:
            return self._saved
        return {
            "over": None if self.kind is None else self.kind.name,
            "shifted": self.counter.shifted,
            "gets_count": self.gets_count,
            "complete": self.script.complete,
            "without_logits": self.without_logits.used,
        }

    @property
    def is_sum(self) -> bool:
        """True if the model's own loss is a sum over its batch."""
        return self.kind is Kind.SUM

    @property
    def needs_count(self) -> bool:
        """True if a training step uses the target count."""
        if not self.takes_count or not self.step_takes_count:
            return False
        return not self.settings.of_model or not self.settings.default_step or self.gets_count

    # --- a micro-batch ----------------------------------------------------------------------------------------------

    def count(self, given: float | None) -> Tensor:
        """The count that the hooks get for the micro-batch that the normaliser's scope is. `given`: the script's own
        count of the update, by which a loss that is divided by this one is then divided.
        """
        of_update, own = self.normaliser.denominator, self.normaliser.targets
        if given and not math.isclose(given, of_update):
            if self._data_ranks.size > 1:
                raise ModelError(OWN_COUNT_OF_SEVERAL.format(given, self._data_ranks.size, of_update))
            of_update, own = given, own * given / of_update
        return self.script.count(of_update, own, self._device, note=self.is_unreported)

    @property
    def count_is_withheld(self) -> bool:
        """True if an evaluation passes no count, because the code of a script's loss names the number of processes,
        and no training has shown yet what it does with it.
        """
        several = self._data_ranks.size > 1
        return several and self.script.is_given_count and self.script.complete is None

    def in_evaluation(self, count_targets: Callable[[Any], float], batch: Any) -> dict[str, Any]:
        """What `compute_loss` gets beside a batch of an evaluation: for a script's loss the count of the batch's own
        targets, so that the loss is a mean over them. Nothing if the loss takes no count, or it is withheld.
        """
        complete, processes = self.script.complete, self._data_ranks.size
        if not self.script.is_given_count or self.count_is_withheld:
            return {}
        # A complete loss multiplies by the number of processes what it divided.
        count = (count_targets(batch) or 1.0) * (processes if complete else 1)
        return {"num_items_in_batch": as_count(count, self._device)}

    def _look(self, loss: Tensor | LossTerms) -> None:
        """Look at the loss that a script passes to backward, before it is normalised; see `ScriptLoss.look`."""
        self.script.look(loss)
        self.normaliser.divided_by = self.script.divisor(loss) or 1
        if self.script.complete:
            self._use_as_it_is()
        elif self.settings.of_script and not self.normaliser.targets and self.script.read_count:
            # Divided by a count of 1, it may still be a sum over positions that are not targets. A mean over the
            # targets is NaN, and adds nothing.
            self.normaliser.targets = 1.0

    def default_loss(
        self,
        model: nn.Module,
        inputs: Any,
        count: Tensor | int | None,
        function: Callable[..., Any] | None,
        needs_outputs: bool,
    ) -> tuple[Any, Any]:
        """The loss of the default `compute_loss`, and the outputs of the model, if they are needed.

        Args:
            count: `num_items_in_batch`; None outside training.
            function: `compute_loss_func`.
            needs_outputs: the caller reads the outputs.

        Raises:
            NoLossError: the model returned no loss.
        """
        settings, loss, outputs, labels = self.settings, None, None, None
        if self.without_logits.used and function is None and not needs_outputs:
            # As the model itself: without the count it returns a mean over its batch.
            divisor = count if self.gets_count or settings.smoothing else None
            loss = self.without_logits.loss(model, inputs, divisor, settings.smoothing)
        if loss is None:
            named = isinstance(inputs, Mapping)  # scripts' batches may also be sequences, or one tensor
            if (settings.smoothing or function is not None) and named and "labels" in inputs:
                inputs = dict(inputs)
                labels = inputs.pop("labels")
            elif settings.smoothing:
                warn_once(logger, "label_smoothing_factor has no effect on batches without 'labels'")
            if self.gets_count and count is not None and labels is None:
                inputs = {**inputs, "num_items_in_batch": count}
            outputs = call_model(model, inputs)
            if function is not None:
                loss = function(outputs, labels, num_items_in_batch=count)
            elif labels is not None:
                loss = smoothed_loss(outputs, labels, settings.smoothing, self.counter.shifted, count)
            else:
                loss = loss_of(outputs, inputs)
        # A function that is not declared multiplies by itself, and a model that does not read the count returns a mean.
        divides = (
            (self.gets_count or bool(settings.smoothing)) and function is None and self.script.read_count
        )
        if settings.declared or (divides and not (settings.default_loss and settings.default_step)):
            loss = self.multiplied(loss, count)
        return loss, outputs

    def multiplied(self, loss: Any, count: Tensor | int | None) -> Any:
        """A default loss that is divided by `count`, multiplied by the number of processes if it must be
        complete. It is the watched number: a script's loss that is computed from this one shows that it is complete.
        """
        if self.script.complete is False or count is None or isinstance(loss, LossTerms):
            return loss
        return loss * process_count(self._data_ranks.size)

    # --- measuring --------------------------------------------------------------------------------------------------

    def measure(self, batch: Any, hooks: LossHooks, training: bool) -> None:
        """Measure, on the first batch, what the loss is a mean over; see `engine.probe`. Collective."""
        if self.measured:
            return
        model = self.settings.model
        was_training = model.training
        model.train(training)
        try:
            self._measure(hooks.prepare_inputs(batch), hooks)
        finally:
            model.train(was_training)
        self.measured = True

    def measure_labels(self, batch: Any | None, hooks: LossHooks) -> None:
        """Measure, for an evaluation outside training, which labels are targets, and if the loss is a sum. A rank may
        have no batch. Collective.
        """
        probe = self._probe()
        prepared = None if batch is None else hooks.prepare_inputs(batch)
        self._measure_shift(probe, prepared, hooks)
        if self.settings.of_model:
            self._adopt_kind(self._saved_kind() or self._split(probe, prepared, hooks).kind)

    def _probe(self) -> Probe:
        return Probe(self.settings.model, self._device, self._data_ranks.sum)

    def _model_loss(self, hooks: LossHooks, inputs: Any) -> Any:
        """The bare model's own loss: the only one that is computed more often than training requires. It gets the count
        as in training; a model in a wrapper that does not accept it raises TypeError, and gets none from then on.
        """
        if self.gets_count and isinstance(inputs, Mapping) and not self.without_logits.used:
            count = as_count(self.counter(inputs) or 1.0, self._device)
            try:
                return self._mean_loss(hooks, {**inputs, "num_items_in_batch": count})
            except TypeError as error:
                if "num_items_in_batch" not in str(error):
                    raise
            self.gets_count = False
        return self._mean_loss(hooks, inputs)

    def _mean_loss(self, hooks: LossHooks, inputs: Any) -> Any:
        """The same without the count: the mean over no targets is NaN, whatever the model adds to it."""
        model = self.settings.model
        with hooks.autocast():
            loss = self.without_logits.loss(model, inputs, None, 0.0)
            if loss is not None:
                return loss
            return check_loss(loss_of(call_model(model, inputs), inputs))

    def _measure(self, prepared: Any, hooks: LossHooks) -> None:
        settings, probe = self.settings, self._probe()
        declared = settings.declared
        # A batch without names has no place for the count.
        may_get_count = self._may_get_count() and isinstance(prepared, Mapping)
        self.kind, self.gets_count = None, may_get_count and self._saved.get("gets_count", True)
        with hooks.autocast():
            self.without_logits.decide(settings.model, prepared, self._makes_logits())
        self._measure_shift(probe, prepared, hooks)
        self.normaliser.meaning = Meaning.MICRO_MEAN
        if settings.of_model and declared is None:
            self._measure_kind(probe, prepared, hooks)
        self.script.begin(
            declared,
            self._counting_functions(hooks),
            step=hooks.training_step if self.takes_count and self.step_takes_count else None,
            watched=settings.watched,
            compiled=settings.compiled or hasattr(settings.model, "_orig_mod"),
            earlier=self._saved.get("complete"),
        )
        if self.script.complete:
            self._use_as_it_is()
        # What was saved has been used: a further run of this Trainer measures its own first batch.
        self._saved, self.is_unreported = {}, settings.of_script and declared is None

    def _makes_logits(self) -> str | None:
        """Why this run makes logits, whatever its model is; None if it need not."""
        settings, saved = self.settings, self._saved
        if not settings.lean:
            return "lean_loss=False"
        if settings.of_script:
            return "compute_loss or compute_loss_func computes it"
        if saved and not saved.get("without_logits", False):
            return "the run that is resumed makes logits"
        return None

    def _use_as_it_is(self) -> None:
        """Raise ModelError if a script cannot know the number by which its loss is to be multiplied."""
        self.normaliser.meaning = Meaning.SCALED
        if self._model_ranks.size > 1 and self.settings.of_script and not self.asks_for_factor:
            raise ModelError(
                "the loss of the script is multiplied by the number of processes, of which "
                f"{self._model_ranks.size} compute the same samples together (cp_size, sp_size, tp_size, pp_size). "
                "Return the mean over this batch, or LossTerms(sum, weight)"
            )

    def _counting_functions(self, hooks: LossHooks) -> list[Callable[..., Any]]:
        """The functions of the script that compute its loss, if they get the count."""
        settings = self.settings
        if not (settings.of_script and self.takes_count and self.step_takes_count):
            return []
        return [hooks.compute_loss] if settings.function is None else [hooks.compute_loss, settings.function]

    def _may_get_count(self) -> bool:
        declared = self._declared_count
        return accepts_count(self.settings.model) if declared is None else declared

    def _measure_shift(self, probe: Probe, prepared: Any, hooks: LossHooks) -> None:
        """Measure which labels are targets, from a count of the script's, or with the model's own loss, if it has one,
        also for a script's loss.
        """
        if self.settings.counts_alone:
            return  # A forward with labels may need far more memory than the loss of the script.
        self.counter = unshifted = self._unshifted
        saved = self._saved.get("shifted", self.without_logits.shifts)
        if saved is not None:
            self.counter = replace(unshifted, shifted=saved)
            return
        if not self.settings.default_count and probe.counts_shifted(prepared, unshifted, hooks.count_targets):
            self.counter = replace(unshifted, shifted=True)
            return
        able = prepared is not None
        if able and (self.gets_count or not self.settings.of_model):
            # Which shows if the model accepts the count.
            value = probe.value(prepared, partial(self._model_loss, hooks))
            able = self.settings.of_model or math.isfinite(value)
        mean_loss = partial(self._mean_loss, hooks)
        shifted = probe.shifts_labels(prepared if able else None, unshifted, mean_loss)
        self.counter = replace(unshifted, shifted=shifted)

    # --- the model's own loss ---------------------------------------------------------------------------------------

    def _measure_kind(self, probe: Probe, prepared: Any, hooks: LossHooks) -> None:
        kind = self._saved_kind()
        if kind is None:
            split = self._split(probe, prepared, hooks)
            self._say_split(split)
            kind = split.kind
        self._adopt_kind(kind)
        if kind is Kind.SUM:
            self.normaliser.meaning = Meaning.SHARE

    def _saved_kind(self) -> Kind | None:
        return Kind.__members__.get(str(self._saved.get("over")))

    def _split(self, probe: Probe, prepared: Any, hooks: LossHooks) -> Split:
        loss, rounding = partial(self._model_loss, hooks), self._rounding(hooks)
        return probe.splits(prepared, loss, self.counter, rounding)

    def _adopt_kind(self, kind: Kind) -> None:
        self.kind = kind
        if kind is Kind.ROWS:
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
        if not split.exact and self._accelerator.gradient_accumulation_steps * self._data_ranks.size > 1:
            said.warning(
                "the loss of a batch does not follow from the losses of its halves: it differs by %.2g of its value "
                "from %s. Other splits into micro-batches or ranks train with slightly other gradients (contrastive "
                "losses, balancing of experts, batch normalization; see docs/losses.md)",
                split.deviation,
                split.kind.value,
            )

    def _rounding(self, hooks: LossHooks) -> float:
        """The largest difference between two ways to compute the model's loss, by the types of weights and autocast."""
        kind = self._device.type
        with hooks.autocast():
            if torch.is_autocast_enabled(kind):
                return rounding_of(torch.get_autocast_dtype(kind))
        weights = next(
            (p.dtype for p in self.settings.model.parameters() if p.is_floating_point()), torch.float32
        )
        computes_tf32 = weights is torch.float32 and kind != "cpu"
        return _TF32_ROUNDING if computes_tf32 else rounding_of(weights)

    # --- reports ----------------------------------------------------------------------------------------------------

    def report_script_loss(self, hooks: LossHooks) -> None:
        """Log once, after the first update, that a script's loss is a mean over its micro-batch. Only then is it known
        that it does not return `LossTerms`.
        """
        self.is_unreported = False
        is_mean = self.script.complete is False and self.normaliser.weight is None
        if not is_mean or self.script.shares == 1 or self._data_ranks.rank != 0:
            return
        asked = any("num_items_in_batch" in signature(f).parameters for f in self._counting_functions(hooks))
        if asked and not self.script.is_given_count:
            return  # a loss of Windlass's own trainers
        # Most scripts take the count because transformers passes it, and have a label for each row: then the weights
        # are those of a mean over rows, whatever the loss is.
        if asked and (self.script.read_count or self.normaliser.weighs_rows):
            logger.info(
                "the loss of each micro-batch is weighted by its share of the update's targets, and "
                "`num_items_in_batch` is the count of the micro-batch"
            )
            return
        unread = "does not read `num_items_in_batch`, and " if asked else ""
        warn_once(
            logger,
            f"the loss {unread}is taken as a plain mean over each micro-batch: weighting it by the micro-batch's "
            "target count, which is exact for an unweighted mean over labels that are not -100. For anything else, "
            "such as a sum, return LossTerms(sum, weight), or accept `num_items_in_batch` and divide by it",
        )
