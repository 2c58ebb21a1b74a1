"""Evaluation and prediction over a loader: modes, randomness and batch sizes around `engine.evaluate`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from windlass.config.plan import EvaluationPlan
from windlass.core.attributes import attributes_of
from windlass.core.device import start_recorded
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger
from windlass.core.rng import preserved_rng
from windlass.core.types import EvalLoopOutput, LossTerms
from windlass.data.dealt_loader import DealtLoader
from windlass.data.stream_loader import StreamLoader
from windlass.data.workers import Reader, read_batches
from windlass.dist.beacon import marked_reads
from windlass.engine.evaluate import Evaluation, closing_if_possible, evaluation_loop
from windlass.engine.executor import Executor
from windlass.engine.uneven_batches import Placed, next_of, pad_uneven_batches
from windlass.trainer.batch_faults import BatchFaults, Fed
from windlass.trainer.batch_fitter import BatchFitter
from windlass.trainer.loss_policy import LossHooks, LossPolicy
from windlass.trainer.run_events import Events
from windlass.trainer.session import Session
from windlass.transforms.strategy import Strategy

logger = get_logger(__name__)

_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_WITHHELD = (
    "The loss got num_items_in_batch=None: its code names the number of processes, and before any training it is not "
    "known if it multiplies by it. Declare that with the attribute `loss_is_scaled_for_ga` (see docs/losses.md), or "
    "compute a mean if there is no count."
)
Watch = Callable[[Iterable[Placed], bool], Generator[Placed, None, None]]


class Evaluator:
    """Runs a model over loaders, within a run or outside.

    Attributes:
        filling: the batch being predicted only fills a round that other ranks need; nothing of it counts.
    """

    def __init__(
        self, session: Session, events: Events, loss: LossPolicy, faults: BatchFaults, fitter: BatchFitter
    ) -> None:
        self._session, self._events, self._loss, self._fitter = session, events, loss, fitter
        self._faults = faults
        self._executor: Executor | None = None
        self._watch: Watch | None = None
        self._cast_model: weakref.ref[nn.Module] | None = None
        self._cast_to = ""
        self.filling = False

    def during(self, executor: Executor) -> contextlib.AbstractContextManager[None]:
        """Within the body, a run trains the model on this executor, which sets its evaluation mode."""
        return attributes_of(self, _executor=executor)

    def interruptible(self, watch: Watch) -> contextlib.AbstractContextManager[None]:
        """Within the body, batches pass through `watch`, which also receives if ranks meet at each one."""
        return attributes_of(self, _watch=watch)

    def _meets_at_batches(self, evaluation: Evaluation) -> bool:
        """A metric of each batch gathers, while ranks exchange signals before each batch."""
        by_batch = evaluation.plan.batch_metrics and evaluation.compute_metrics is not None
        return by_batch and self._watch is not None

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the model of a run has the weights that are evaluated: their average, if there is one."""
        return contextlib.nullcontext() if self._executor is None else self._executor.averaged()

    def own_randomness(self) -> contextlib.AbstractContextManager[None]:
        """A context in which an evaluation, overrides included, draws nothing from a run's random generators."""
        return contextlib.nullcontext() if self._executor is None else preserved_rng(self._session.device)

    @contextlib.contextmanager
    def generating(self, strategy: Strategy) -> Iterator[None]:
        """Within the body, the model is in evaluation mode, with the weights that are evaluated, and parts of it can be
        called, as `generate` does. Random generators are restored at the end. Collective.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(preserved_rng(self._session.device))
            if self._executor is not None:
                stack.enter_context(self._executor.evaluating())
            strategy.module.eval()
            stack.enter_context(torch.no_grad())
            stack.enter_context(strategy.generating())
            yield

    def run(self, loader: Any, evaluation: Evaluation, hooks: LossHooks) -> EvalLoopOutput:
        """Evaluate a loader's batches and join the results of all ranks. Collective. The loss is measured with `hooks`
        if no run has.
        """
        self._events.show(eval_dataloader=loader)
        logger.info("***** Running %s *****", "Prediction" if evaluation.predicting else "Evaluation")

        def batches() -> Iterable[Placed]:
            return self._placed(loader, evaluation)

        try:
            return self._fitted(
                loader, evaluation, hooks, batches, functools.partial(self._events.fire, "on_prediction_step")
            )
        finally:
            self._events.end_evaluation_displays()

    def rehearse(
        self, loader: Any, evaluation: Evaluation, hooks: LossHooks, wanted: str
    ) -> dict[str, float]:
        """The metrics of the loader's first batch, unreported, for their names. Collective. `wanted` is the metric that
        counts as returned if `compute_metrics` fails on so few samples.
        """
        if evaluation.compute_metrics is not None:
            evaluation = replace(evaluation, compute_metrics=_lenient(evaluation.compute_metrics, wanted))

        def first_batch() -> Iterable[Placed]:
            return itertools.islice(self._placed(loader, evaluation), 1)

        return self._fitted(loader, evaluation, hooks, first_batch, lambda: None).metrics

    def _fitted(
        self,
        loader: Any,
        evaluation: Evaluation,
        hooks: LossHooks,
        batches: Callable[[], Iterable[Placed]],
        on_batch: Callable[[], None],
    ) -> EvalLoopOutput:
        """Evaluate the batches of `loader`, which is resized if memory runs out."""
        return self._fitter.evaluate(
            loader,
            lambda: self._evaluate(loader, batches(), evaluation, hooks, on_batch),
            batch_metrics=evaluation.plan.batch_metrics,
            sharded=evaluation.strategy.sharded,
        )

    def _evaluate(
        self,
        loader: Any,
        batches: Iterable[Placed],
        evaluation: Evaluation,
        hooks: LossHooks,
        on_batch: Callable[[], None],
    ) -> EvalLoopOutput:
        current = Fed("evaluation", None)

        def noted(batches: Iterable[Placed]) -> Iterator[Placed]:
            nonlocal current
            # A watch answers the other ranks when it is closed, which comes before an error is reported.
            with closing_if_possible(batches):
                for ids, batch in batches:
                    self.filling = evaluation.strategy.filling = ids is None
                    current = Fed("evaluation", batch, ids or ())
                    if self._faults.checks_ahead:
                        self._faults.check(current)
                    yield ids, batch

        def predict(batch: Any) -> tuple[Any, Any, Any]:
            # Before the step, which may take labels out of the batch.
            targets = self._loss.counter(batch) if self._loss.is_sum else 0.0
            try:
                loss, logits, labels = evaluation.predict(batch)
            except Exception as error:
                if self._loss.count_is_withheld:
                    error.add_note(_WITHHELD)
                self._faults.explain(error, current)
                raise
            if self._loss.is_sum and isinstance(loss, torch.Tensor):
                loss = LossTerms(loss, targets)
            return loss, logits, labels

        def after_batch() -> None:
            start_recorded(self._session.device)  # all batches would be one graph
            on_batch()

        with contextlib.ExitStack() as stack:
            # Also if a batch that only fills a round fails.
            for each in (self, evaluation.strategy):
                stack.callback(setattr, each, "filling", False)
            self._enter_evaluation_mode(stack, evaluation)
            # With or without evaluations, a run has the same bits: they draw nothing from its random generators.
            stack.enter_context(preserved_rng(self._session.device))
            meets = self._meets_at_batches(evaluation)
            shared = meets or (isinstance(loader, DealtLoader) and loader.must_go_in_step)
            batches = self._watched(batches, evaluation, hooks, meets=meets, shared=shared)
            return evaluation_loop(
                noted(batches),
                replace(evaluation, predict=predict),
                data_ranks=self._session.data_ranks,
                reading_is_collective=shared,
                on_batch=after_batch,
            )

    def _watched(
        self,
        batches: Iterable[Placed],
        evaluation: Evaluation,
        hooks: LossHooks,
        *,
        meets: bool,
        shared: bool,
    ) -> Iterable[Placed]:
        """The batches, the first of them measured, which pass the watch of a run.

        Args:
            meets: as of `_meets_at_batches`.
            shared: reading is collective.
        """
        alone = not (shared or evaluation.in_step)
        measured = functools.partial(
            self._measured, label_names=evaluation.label_names, hooks=hooks, reads_alone=alone
        )
        # A rank that reads alone may have no batch: it would exchange signals while the others measure.
        batches = measured(batches) if alone else batches
        if self._watch is not None:
            batches = self._watch(batches, meets)
        return batches if alone else measured(batches)

    def _placed(self, loader: Any, evaluation: Evaluation) -> Iterable[Placed]:
        """A loader's batches with the dataset positions of their samples; unknown for a script's own loaders.

        Equally many on each rank if every forward needs all ranks, or if reading or the metrics do.
        """
        if isinstance(loader, StreamLoader):
            loader.agree(self._session.data_ranks)
        # A rank without a batch would take part in the one exchange while the others are in the other.
        in_step = evaluation.in_step or self._meets_at_batches(evaluation)
        if isinstance(loader, DealtLoader) and not loader.own_parts:
            in_step = in_step or loader.must_go_in_step
            return loader.batches_in_step() if in_step else loader.batches_with_ids()
        # Positions in the parts of ranks are not those of one dataset.
        reader = Reader("evaluation", evaluation.plan.start_timeout)
        read = (
            (batch for _, batch in loader.batches_with_ids())
            if isinstance(loader, DealtLoader)
            else read_batches(loader, reader)
        )
        unplaced: Iterable[Placed] = (([], batch) for batch in read)
        return pad_uneven_batches(unplaced, self._session.all_ranks) if in_step else unplaced

    def _measured(
        self, batches: Iterable[Placed], label_names: Sequence[str], hooks: LossHooks, *, reads_alone: bool
    ) -> Iterator[Placed]:
        """The batches; the first is used to measure which labels are targets, if training has not. Collective. Unless
        a rank `reads_alone`, the others meet an error of reading where they read.
        """
        remaining = iter(batches)
        with closing_if_possible(remaining):
            waited_for = marked_reads(remaining)
            first, failure = next_of(waited_for)
            if failure is not None and not reads_alone:
                raise failure
            # Ranks without a batch, or with one that cannot be read, take part: the measurement is collective.
            if not self._loss.measured:
                labelled = first is not None and has_labels(first[1], label_names)
                try:
                    self._loss.measure_labels(first[1] if first is not None and labelled else None, hooks)
                except Exception as error:
                    if first is not None:
                        self._faults.explain(error, Fed("evaluation", first[1], first[0] or ()))
                    raise
            if failure is not None:
                raise failure
            if first is not None:
                yield first
                yield from waited_for

    def _enter_evaluation_mode(self, stack: contextlib.ExitStack, evaluation: Evaluation) -> None:
        """Put the model into evaluation mode, in the plan's dtype.

        It stays in that mode until the next training step: callbacks and scripts sample from it.
        """
        if self._executor is not None:
            stack.enter_context(self._executor.evaluating())
        evaluation.strategy.module.eval()
        self._cast(evaluation.strategy, evaluation.plan)

    def _cast(self, strategy: Strategy, plan: EvaluationPlan) -> None:
        """`bf16_full_eval`, `fp16_full_eval`: cast the weights themselves, which training could not undo."""
        if plan.cast is None:
            return
        if self._executor is not None:
            fix = (
                "it would cast the weights that are being trained; evaluate after training, or use bf16=True"
            )
            raise ConfigError(Problem(f"{plan.cast}_full_eval", True, fix))
        dtype, model = _CASTS[plan.cast], strategy.module
        if any(p.is_floating_point() and p.dtype != dtype for p in model.parameters()):
            self._cast_model, self._cast_to = weakref.ref(model), plan.cast
        strategy.cast(dtype, self._session.device)

    def check_trainable(self, model: nn.Module) -> None:
        """Raise ConfigError if an evaluation has cast the weights of `model`, which lose their last digits."""
        if self._cast_model is not None and self._cast_model() is model:
            fix = (
                f"an evaluation has cast the weights to {self._cast_to}, so they cannot be trained further: make the "
                "Trainer again with the model as it was saved before, or evaluate with bf16=True in place of it"
            )
            raise ConfigError(Problem(f"{self._cast_to}_full_eval", True, fix))


def has_labels(batch: Any, names: Sequence[str]) -> bool:
    """Return True if a batch has labels under all of these names."""
    if not isinstance(batch, Mapping):
        return True  # only the model knows the parts of a batch without names: it must return its loss
    return bool(names) and all(batch.get(name) is not None for name in names)


def asks_for_loss(inputs: Any, by_default: bool) -> bool:
    """Return True if a model returns a loss for inputs without labels."""
    asked = inputs.get("return_loss") if isinstance(inputs, Mapping) else None
    return bool(by_default if asked is None else asked)


def output_has_loss(outputs: Any, labels_were_given: bool) -> bool:
    """Return True if a model's output holds a loss: the first element of a tuple is one if the model got labels."""
    if isinstance(outputs, Mapping):
        return "loss" in outputs
    if not isinstance(outputs, (tuple, list, torch.Tensor)):
        return hasattr(outputs, "loss")
    return labels_were_given


def _lenient(compute_metrics: Callable[..., Any], wanted: str) -> Callable[..., Any]:
    """`compute_metrics`, which returns NaN under the name `wanted` instead of raising."""

    @functools.wraps(compute_metrics)
    def measure(*args: Any, **kwargs: Any) -> Any:
        try:
            return compute_metrics(*args, **kwargs)
        except Exception as error:
            logger.info(
                "compute_metrics failed on the first batch alone (%r): not checked before training", error
            )
            return {wanted: math.nan}

    return measure
