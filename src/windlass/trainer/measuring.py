"""What the loss means: measured on the first batch, and from the first real call of a script's own function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from windlass.core.errors import ModelError
from windlass.core.logs import get_job_logger, get_logger, warn_once
from windlass.core.types import LossTerms
from windlass.engine.count_watch import CountWatch, Use
from windlass.engine.normalise import Meaning
from windlass.engine.probe import Probe, rounding_of
from windlass.engine.splitting import Kind, Split
from windlass.metrics.tokens import TargetCounter
from windlass.trainer.losses import LossMixin, as_count, call_model, check_loss, loss_of
from windlass.trainer.wrappers import accepts_count

logger = get_logger(__name__)

_TF32_ROUNDING = 2e-3  # what accelerators may compute float32 in
_RANKS = frozenset({"num_processes", "world_size", "get_world_size", "n_gpu", "WORLD_SIZE"})


class MeasuringMixin(LossMixin):
    """Finds out what the loss is a mean over."""

    _plain_mean_unsaid = False
    _loss_is_sum = False
    _count_watch: CountWatch | None = None
    _own_sum: tuple[float, float] = (0.0, 0.0)

    def _probe_loss(self, batch: Any, training: bool) -> None:
        """Find out, on the first batch, what the loss is a mean over; see `engine.probe`. Collective."""
        if self._loss_probed:
            return
        was_training = self.model.training
        self.model.train(training)
        try:
            self._measure_loss(self._prepare_inputs(batch), self.count_targets(batch))
        finally:
            self.model.train(was_training)
        self._loss_probed = True

    def _probe_shift(self, batch: Any | None) -> None:
        """For an evaluation outside training: which labels are targets, and whether the loss is a sum.

        Collective; a rank may have no batch.
        """
        probe = Probe(self.model, self._device, self._gang.sum)
        prepared = None if batch is None else self._prepare_inputs(batch)
        self._measure_shift(probe, prepared)
        if self._computes_model_loss:
            self._adopt(probe.splits(prepared, self._model_loss, self._counter, self._rounding))

    @property
    def _computes_model_loss(self) -> bool:
        """Whether the loss is the model's own, not one that a script or label smoothing computes."""
        return self._own_loss and self.compute_loss_func is None and not self.args.label_smoothing_factor

    def _model_loss(self, inputs: Any, denominator: float | None) -> Any:
        """The bare model's own loss: the only one that is computed more often than training asks for."""
        if denominator is not None:
            inputs = {**inputs, "num_items_in_batch": denominator}
        with self.autocast_smart_context_manager():
            return check_loss(loss_of(call_model(self.model, inputs), inputs))

    def _measure_loss(self, prepared: Any, targets: float) -> None:
        probe = Probe(self.model, self._device, self._gang.sum)
        self._measure_shift(probe, prepared)
        self._count_watch, self._loss_is_sum, self._loss_kind = None, False, None
        self._model_divides = accepts_count(self.model)
        if self._computes_model_loss:
            self._normaliser.meaning = self._meaning_of_model(probe, prepared, targets)
        else:
            self._normaliser.meaning = self._meaning_of_hook(probe, prepared, targets)
        if self.loss_is_scaled_for_ga is not None:
            self._default_loss_scales = bool(self.loss_is_scaled_for_ga)
            self._normaliser.meaning = Meaning.SCALED if self.loss_is_scaled_for_ga else Meaning.MICRO_MEAN
            self._count_watch = None
        self._normaliser.judge = None if self._count_watch is None else self._judge
        self._note_plain_mean()

    def _measure_shift(self, probe: Probe, prepared: Any) -> None:
        """Which labels are targets. Where a script computes the loss, the model's own loss tells, if it has one."""
        names = tuple(self.label_names)
        able = prepared is not None
        if able and not self._computes_model_loss:
            able = math.isfinite(probe.value(prepared, self._model_loss))
        shifted = probe.shifts_labels(prepared if able else None, TargetCounter(names), self._model_loss)
        self._counter = TargetCounter(names, shifted)

    # --- the model's own loss ---------------------------------------------------------------------------------------

    def _meaning_of_model(self, probe: Probe, prepared: Any, targets: float) -> Meaning:
        self._model_divides = (
            self._model_divides and isinstance(prepared, Mapping) and self._divides(probe, prepared, targets)
        )
        if self._model_divides and self._compute_loss_takes_denominator:
            return Meaning.SHARE
        split = probe.splits(prepared, self._model_loss, self._counter, self._rounding)
        if (
            self._saved_loss_kind in split.fitting
        ):  # what the run was resumed with, though this batch may not tell
            split = replace(split, kind=self._saved_loss_kind)
        self._saved_loss_kind = None
        self._adopt(split)
        self._say_split(split)
        return Meaning.SHARE if split.kind is Kind.SUM else Meaning.MICRO_MEAN

    def _divides(self, probe: Probe, prepared: Any, targets: float) -> bool:
        """Whether the model divides by the count.

        If a model behind a wrapper does not take it, this raises TypeError, and the model is not given it.
        """
        try:
            return probe.divides(prepared, self._model_loss, 2.0 * max(targets, 1.0)) is True
        except TypeError as error:
            if "num_items_in_batch" not in str(error):
                raise
            return False

    def _adopt(self, split: Split) -> None:
        self._loss_kind = split.kind
        self._loss_is_sum = split.kind is Kind.SUM
        if split.kind is Kind.ROWS:
            self._counter = TargetCounter(())

    def _say_split(self, split: Split) -> None:
        if split.deviation is None:
            logger.info(
                "the first batch cannot be split to measure its loss: it is taken for a mean over its targets (see "
                "docs/losses.md)"
            )
            return
        said = get_job_logger(__name__)
        if split.kind is Kind.SUM:
            said.info("the model's loss is a sum over its batch: micro-batches and ranks are added up")
        if not split.exact and self.accelerator.gradient_accumulation_steps * self._gang.size > 1:
            said.warning(
                "the loss of a batch does not follow from the losses of its halves: it differs by %.2g of its value "
                "from %s. Other splits into micro-batches or ranks train with slightly other gradients (contrastive "
                "losses, balancing of experts, batch normalization; see docs/losses.md)",
                split.deviation,
                split.kind.value,
            )

    @property
    def _rounding(self) -> float:
        """How far apart two ways to compute the model's loss may be, by the types of its weights and of autocast."""
        kind = self._device.type
        with self.autocast_smart_context_manager():
            if torch.is_autocast_enabled(kind):
                return rounding_of(torch.get_autocast_dtype(kind))
        weights = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        computes_tf32 = weights is torch.float32 and kind != "cpu"
        return _TF32_ROUNDING if computes_tf32 else rounding_of(weights)

    # --- a loss of the script's -------------------------------------------------------------------------------------

    def _meaning_of_hook(self, probe: Probe, prepared: Any, targets: float) -> Meaning:
        smooths = self._own_loss and self.compute_loss_func is None
        if smooths:  # computed here, and divided by the count where there is one
            return Meaning.SHARE if self._compute_loss_takes_denominator else Meaning.MICRO_MEAN
        if not self._compute_loss_takes_denominator:
            return Meaning.MICRO_MEAN
        own = probe.value(prepared, self._model_loss)
        able = self._gang.vote(math.isfinite(own))
        self._own_sum = (own * targets, 1.0) if able else (0.0, 0.0)
        if able and self._model_divides:
            self._model_divides = self._divides(probe, prepared, targets)
        if self.args.torch_compile or hasattr(self.model, "_orig_mod"):
            return self._assumed("the model is compiled, and a count that is watched cannot be")
        self._count_watch = CountWatch(self._gang.sum)
        return Meaning.MICRO_MEAN  # until the first loss tells

    def _denominator(self, value: float, device: torch.device) -> Tensor:
        """The count that hooks are given; until it is known what they do with it, one that is watched."""
        plain = as_count(value, device)
        return plain if self._count_watch is None else self._count_watch.count(value, plain)

    def _judge(self, loss: Tensor | LossTerms) -> None:
        """Learn from the first loss that a hook returned what it did with the count. Collective."""
        assert self._count_watch is not None
        found = self._count_watch.judge(loss)
        if found is None:
            return
        use, scaled = found
        self._count_watch = self._normaliser.judge = None
        if isinstance(loss, LossTerms) or use is Use.IGNORES:
            meaning = Meaning.MICRO_MEAN
        elif use is Use.DIVIDES:
            meaning = self._share_or_scaled(scaled)
        elif use is Use.UNKNOWN:
            meaning = self._assumed("the loss reads `num_items_in_batch` as a number")
        else:
            raise ModelError(
                "`compute_loss` mixes terms that are divided by `num_items_in_batch` with terms that are not, so no "
                "factor makes it exact under accumulation. Return `LossTerms(sum, weight, aux={...})`, or declare what "
                "it is with `loss_is_scaled_for_ga = True` (already normalised over the update and the ranks) or "
                "`False` (a plain mean)"
            )
        self._normaliser.meaning = meaning
        self._note_plain_mean()

    def _share_or_scaled(self, scaled: float) -> Meaning:
        """For a loss that is divided by the count: whether it is multiplied by the number of ranks too.

        Compared with the model's own loss. If that has nothing to do with it, a function that does not mention the
        number of ranks does not multiply by it.
        """
        world = self._gang.size
        own, able = self._gang.sum(torch.tensor(self._own_sum, dtype=torch.float64)).tolist()
        if world == 1:
            return Meaning.SHARE
        ratio = scaled / own if able == world and own else 0.0
        for factor, meaning in ((1, Meaning.SHARE), (world, Meaning.SCALED)):
            if 0.75 * factor < ratio < 1.33 * factor:
                return meaning
        if not any(map(_mentions_ranks, (self.compute_loss, self.compute_loss_func))):
            return Meaning.SHARE
        raise ModelError(
            "`compute_loss` divides by `num_items_in_batch` and mentions the number of ranks, but its value does not "
            f"tell whether it is multiplied by {world}. Declare `loss_is_scaled_for_ga = True` if it is already "
            "normalised over the update and the ranks, or return `LossTerms(sum, weight)`"
        )

    def _assumed(self, why: str) -> Meaning:
        """What transformers assumes of a loss by signatures, with one warning."""
        normalised = self.compute_loss_func is not None or accepts_count(self.model)
        share = Meaning.SHARE if self._own_loss else Meaning.SCALED
        meaning = share if normalised else Meaning.MICRO_MEAN
        if self._gang.rank == 0:
            warn_once(
                logger,
                f"{why}, so it cannot be measured whether the loss is divided by it. As in transformers, the loss is "
                f"taken for {meaning.value}. Declare it with `loss_is_scaled_for_ga`, or return LossTerms(sum, weight)",
            )
        return meaning

    def _note_plain_mean(self) -> None:
        self._plain_mean_unsaid = (
            not self._computes_model_loss
            and self.loss_is_scaled_for_ga is None
            and self._normaliser.meaning is Meaning.MICRO_MEAN
            and self._count_watch is None
            and self.accelerator.gradient_accumulation_steps * self._gang.size > 1
        )

    def _say_plain_mean(self) -> None:
        """Once, after the first update: whether a hook returns `LossTerms`, only what it returned tells."""
        self._plain_mean_unsaid = False
        if self._gang.rank != 0:
            return
        warn_once(
            logger,
            "the loss is a plain mean over each micro-batch: it is weighed by the micro-batch's target count, which "
            "is exact for an unweighted mean over labels that are not -100. For anything else return "
            "LossTerms(sum, weight), or take `num_items_in_batch` and divide by it",
        )


def _mentions_ranks(function: Callable[..., Any] | None) -> bool:
    """Whether the code of a function, or of a function in it, names the number of ranks."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    pending = [] if code is None else [code]
    while pending:
        code = pending.pop()
        names = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
        if names & _RANKS:
            return True
        pending += [c for c in code.co_consts if hasattr(c, "co_names")]
    return False
