"""Evaluation and prediction over a loader: modes, randomness and batch sizes around `engine.evaluate`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from windlass.config.plan import EvaluationPlan
from windlass.core.device import start_recorded
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger, warn_once
from windlass.core.rng import preserved_rng
from windlass.core.types import EvalLoopOutput, LossTerms
from windlass.data.dealt_loader import DealtLoader
from windlass.data.stream_loader import StreamLoader
from windlass.data.workers import Reader, read_batches
from windlass.engine.evaluate import EvalRequest, closing_if_possible, evaluation_loop
from windlass.engine.executor import Executor
from windlass.engine.uneven_batches import Placed, pad_uneven_batches
from windlass.trainer.batch_fitter import BatchFitter
from windlass.trainer.loss_policy import LossPolicy
from windlass.trainer.run_events import Events
from windlass.trainer.session import Session
from windlass.transforms.strategy import Strategy

logger = get_logger(__name__)

_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
Watch = Callable[[Iterable[Placed]], Generator[Placed, None, None]]


@dataclass(frozen=True, slots=True)
class EvalHooks:
    """Model and functions of one evaluation.

    Attributes:
        model, strategy: the bare model, and how it is spread over ranks.
        in_step: a forward of one rank waits for the others, so they need equal numbers of batches.
        predict: `prediction_step` on one batch: (batch, loss_only) -> (loss, logits, labels).
        count_targets: the weight of a batch's mean loss.
        label_names: which entries of a batch are labels.
        compute_metrics, preprocess_logits: as the Trainer was given them.
    """

    model: nn.Module
    strategy: Strategy
    in_step: bool
    predict: Callable[[Any, bool], tuple[Any, Any, Any]]
    count_targets: Callable[[Any], float]
    label_names: list[str]
    compute_metrics: Callable[..., Any] | None
    preprocess_logits: Callable[[Any, Any], Any] | None


class Evaluator:
    """Runs a model over loaders, within a run or outside."""

    def __init__(self, session: Session, events: Events, loss: LossPolicy, fitter: BatchFitter) -> None:
        self._session, self._events, self._loss, self._fitter = session, events, loss, fitter
        self._executor: Executor | None = None
        self._watch: Watch | None = None

    @contextlib.contextmanager
    def during(self, executor: Executor) -> Iterator[None]:
        """Within the body, a run trains the model on this executor, which sets its evaluation mode."""
        self._executor = executor
        try:
            yield
        finally:
            self._executor = None

    @contextlib.contextmanager
    def interruptible(self, watch: Watch) -> Iterator[None]:
        """Within the body, batches of evaluations pass through `watch`."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the model of a run has the weights that are evaluated: their average, if there is one."""
        return contextlib.nullcontext() if self._executor is None else self._executor.averaged()

    def own_randomness(self) -> contextlib.AbstractContextManager[None]:
        """A context in which an evaluation, overrides included, draws nothing from a run's random generators."""
        return contextlib.nullcontext() if self._executor is None else preserved_rng(self._session.device)

    def run(
        self, loader: Any, hooks: EvalHooks, plan: EvaluationPlan, *, loss_only: bool | None, prefix: str,
        predicting: bool,
    ) -> EvalLoopOutput:  # fmt: skip
        """Evaluate a loader's batches and join the results of all ranks. Collective. `loss_only` keeps nothing but the
        loss; None: as in the plan.
        """
        loss_only = plan.loss_only if loss_only is None else loss_only
        request = self._request(hooks, plan, loss_only, prefix, predicting)
        self._events.show(eval_dataloader=loader)
        logger.info("***** Running %s *****", "Prediction" if predicting else "Evaluation")
        try:
            return self._fitted(
                loader, hooks, plan, request, lambda: self._placed(loader, hooks, plan),
                functools.partial(self._events.fire, "on_prediction_step"),
            )  # fmt: skip
        finally:
            self._events.end_evaluation_displays()

    def rehearse(
        self, loaders: Mapping[str, Callable[[], Any]], hooks: EvalHooks, plan: EvaluationPlan, wanted: str
    ) -> dict[str, float]:
        """The metrics of the first batch of each evaluation set, unreported, for their names. Collective.

        Args:
            loaders: makes the loader of each set, by name; "" is the only one.
            wanted: the metric that counts as returned if `compute_metrics` fails on so few samples.
        """
        metrics: dict[str, float] = {}
        for name, make_loader in loaders.items():
            loader = make_loader()
            loss_only = hooks.compute_metrics is None or plan.loss_only
            request = self._request(hooks, plan, loss_only, f"eval_{name}" if name else "eval", False)
            if request.compute_metrics is not None:
                request = replace(request, compute_metrics=_lenient(request.compute_metrics, wanted))

            def first_batch(loader: Any = loader) -> Iterable[Placed]:
                return itertools.islice(self._placed(loader, hooks, plan), 1)

            output = self._fitted(loader, hooks, plan, request, first_batch, lambda: None)
            metrics.update(output.metrics)
        return metrics

    def _fitted(
        self, loader: Any, hooks: EvalHooks, plan: EvaluationPlan, request: EvalRequest,
        batches: Callable[[], Iterable[Placed]], on_batch: Callable[[], None],
    ) -> EvalLoopOutput:  # fmt: skip
        """Evaluate the batches of `loader`, which is resized if memory runs out."""
        return self._fitter.evaluate(
            loader, lambda: self._evaluate(loader, batches(), hooks, plan, request, on_batch),
            batch_metrics=plan.batch_metrics, sharded=hooks.strategy.sharded,
        )  # fmt: skip

    def _request(
        self, hooks: EvalHooks, plan: EvaluationPlan, loss_only: bool, prefix: str, predicting: bool
    ) -> EvalRequest:
        if loss_only and plan.loss_only and hooks.compute_metrics is not None:
            warn_once(
                logger, "prediction_loss_only=True keeps no predictions, so compute_metrics is not called"
            )
        return EvalRequest(
            prefix=prefix,
            loss_only=loss_only,
            compute_metrics=None if loss_only else hooks.compute_metrics,
            preprocess_logits=hooks.preprocess_logits,
            batch_metrics=plan.batch_metrics,
            include=plan.include,
            accumulate_steps=plan.accumulate_steps,
            concat=plan.concat,
            main_input=getattr(hooks.model, "main_input_name", "input_ids"),
            predicting=predicting,
        )

    def _evaluate(
        self,
        loader: Any,
        batches: Iterable[Placed],
        hooks: EvalHooks,
        plan: EvaluationPlan,
        request: EvalRequest,
        on_batch: Callable[[], None],
    ) -> EvalLoopOutput:
        def step(batch: Any) -> tuple[Any, Any, Any]:
            targets = self._loss.counter(batch) if self._loss.is_sum else 0.0
            loss, logits, labels = hooks.predict(batch, request.loss_only)
            if self._loss.is_sum and isinstance(loss, torch.Tensor):
                loss = LossTerms(loss, targets)
            return loss, logits, labels

        def after_batch() -> None:
            start_recorded(self._session.device)  # all batches would be one graph
            on_batch()

        with contextlib.ExitStack() as stack:
            self._enter_evaluation_mode(stack, hooks, plan)
            # With or without evaluations, a run has the same bits: they draw nothing from its random generators.
            stack.enter_context(preserved_rng(self._session.device))
            if self._watch is not None:
                batches = stack.enter_context(contextlib.closing(self._watch(batches)))
            return evaluation_loop(
                self._measured(batches, hooks), step, request, weigh=hooks.count_targets, gang=self._session.gang,
                in_step=hooks.in_step,
                reading_is_collective=isinstance(loader, DealtLoader) and loader.must_go_in_step,
                on_batch=after_batch,
            )  # fmt: skip

    def _placed(self, loader: Any, hooks: EvalHooks, plan: EvaluationPlan) -> Iterable[Placed]:
        """A loader's batches with the dataset positions of their samples; unknown for a script's own loaders.

        Equally many on each rank if every forward needs all ranks, or if reading does.
        """
        if isinstance(loader, StreamLoader):
            loader.agree(self._session.gang)
        if isinstance(loader, DealtLoader) and not loader.own_parts:
            in_step = hooks.in_step or loader.must_go_in_step
            return loader.batches_in_step() if in_step else loader.batches_with_ids()
        reader = Reader("evaluation", plan.start_timeout)
        unplaced: Iterable[Placed] = (([], batch) for batch in read_batches(loader, reader))
        return pad_uneven_batches(unplaced, self._session.gang) if hooks.in_step else unplaced

    def _measured(self, batches: Iterable[Placed], hooks: EvalHooks) -> Iterator[Placed]:
        """The batches; the first is used to measure which labels are targets, if training has not. Collective."""
        remaining = iter(batches)
        with closing_if_possible(remaining):
            first = next(remaining, None)
            if not self._loss.measured:
                labelled = first is not None and has_labels(first[1], hooks.label_names)
                self._loss.measure_labels(first[1] if first is not None and labelled else None)
            if first is not None:
                yield first
                yield from remaining

    def _enter_evaluation_mode(
        self, stack: contextlib.ExitStack, hooks: EvalHooks, plan: EvaluationPlan
    ) -> None:
        """Put the model into evaluation mode, in the plan's dtype.

        It stays in that mode until the next training step: callbacks and scripts sample from it.
        """
        if self._executor is not None:
            stack.enter_context(self._executor.evaluating())
        hooks.model.eval()
        self._cast(hooks.strategy, plan)

    def _cast(self, strategy: Strategy, plan: EvaluationPlan) -> None:
        """`bf16_full_eval`, `fp16_full_eval`: cast the weights themselves, which training could not undo."""
        if plan.cast is None:
            return
        if self._executor is not None:
            fix = (
                "it would cast the weights that are being trained; evaluate after training, or use bf16=True"
            )
            raise ConfigError(Problem(f"{plan.cast}_full_eval", True, fix))
        strategy.cast(_CASTS[plan.cast], self._session.device)


def has_labels(batch: Any, names: list[str]) -> bool:
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
