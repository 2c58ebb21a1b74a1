"""Evaluation and prediction: the facade over `engine.evaluate`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from windlass.core.clock import Moment
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger, warn_once
from windlass.core.rng import preserved_rng
from windlass.core.trees import detach
from windlass.core.types import EvalLoopOutput, LossTerms, PredictionOutput
from windlass.data.dealt_loader import DealtLoader
from windlass.data.stream_loader import StreamLoader
from windlass.data.workers import Reader, read_batches
from windlass.engine.evaluate import EvalRequest, closing_if_possible, evaluation_loop
from windlass.engine.uneven_batches import Placed, pad_uneven_batches
from windlass.metrics.evaluation import ignored_keys, labels_of, split_outputs
from windlass.metrics.speed import speed_metrics
from windlass.trainer.alike import AlikeMixin
from windlass.trainer.inputs import InputsMixin
from windlass.trainer.losses import call_model
from windlass.trainer.measuring import MeasuringMixin
from windlass.trainer.memory import MemoryMixin
from windlass.trainer.reports import ReportsMixin

logger = get_logger(__name__)


class EvaluationMixin(AlikeMixin, MeasuringMixin, InputsMixin, MemoryMixin, ReportsMixin):
    """`evaluate`, `predict` and the loop and step under them; each may be overridden."""

    _run: Any

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics over the evaluation data, exact for every batch size and number of ranks.

        Args:
            eval_dataset: another dataset than the Trainer's, the name of one of its sets, or a dict of datasets;
                each set of a dict is evaluated under its own name (`eval_name_loss`).
            ignore_keys: keys of the model's output that are no predictions.
            metric_key_prefix: what the metrics' names begin with.

        Returns:
            `{prefix}_loss`, what `compute_metrics` gave, runtime and throughput, and the epoch.
        """
        self._read_memory_note()
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, Mapping):
            metrics: dict[str, float] = {}
            for name, dataset in chosen.items():
                one = self.evaluate(
                    name if eval_dataset is None else dataset, ignore_keys, f"{metric_key_prefix}_{name}"
                )
                metrics.update(one)
            return metrics
        self._check_evaluation_alike(f"evaluate() of {metric_key_prefix!r}")
        self._watch_memory()
        started = Moment()
        loss_only = True if self.compute_metrics is None else None
        with self._own_randomness():
            loader = self.get_eval_dataloader(eval_dataset)
            output = self.evaluation_loop(loader, "Evaluation", loss_only, ignore_keys, metric_key_prefix)
        output.metrics.update(self._speed(metric_key_prefix, started, output.num_samples))
        self.log(output.metrics)
        self.control = self.callback_handler.fire(
            "on_evaluate", self.args, self.state, self.control, metrics=output.metrics
        )
        return output.metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions for every sample, in the dataset's order, with metrics where the data has labels.

        Returns:
            Arrays of one row per sample (tuples of them for several outputs or label columns). Rows of different
            widths are padded with -100.
        """
        self._check_evaluation_alike(f"predict() of {metric_key_prefix!r}")
        self._read_memory_note()
        self._watch_memory()
        started = Moment()
        with self._own_randomness():
            loader = self.get_test_dataloader(test_dataset)
            output = self.evaluation_loop(loader, "Prediction", None, ignore_keys, metric_key_prefix)
        output.metrics.update(self._speed(metric_key_prefix, started, output.num_samples))
        self.control = self.callback_handler.fire(
            "on_predict", self.args, self.state, self.control, metrics=output.metrics
        )
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the model over a loader and join what all ranks found.

        Args:
            description: "Evaluation" or "Prediction", for the log.
            prediction_loss_only: keep nothing but the loss; None: as the arguments say.
        """
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        request = self._eval_request(loss_only, metric_key_prefix, predicting=description == "Prediction")
        self.callback_handler.eval_dataloader = dataloader
        logger.info("***** Running %s *****", description)
        return self._in_batches_that_fit(
            dataloader,
            lambda: self._evaluate_batches(
                self._with_ids(dataloader), request, ignore_keys, self._prediction_step_event
            ),
        )

    def _evaluate_batches(
        self,
        batches: Iterable[Placed],
        request: EvalRequest,
        ignore_keys: list[str] | None,
        on_batch: Callable[[], None],
    ) -> EvalLoopOutput:
        def step(batch: Any) -> tuple[Any, Any, Any]:
            targets = self._counter(batch) if self._loss_is_sum else 0.0
            loss, logits, labels = self.prediction_step(
                self.model, batch, request.loss_only, ignore_keys=ignore_keys
            )
            if self._loss_is_sum and isinstance(loss, torch.Tensor):
                loss = LossTerms(loss, targets)
            return loss, logits, labels

        # Evaluation draws nothing from the training's streams of randomness: with or without it, a run has the same
        # bits.
        with self._evaluation_mode(), preserved_rng(self._device), self._watched(batches) as watched:
            return evaluation_loop(
                self._probed(watched),
                step,
                request,
                weigh=self.count_targets,
                gang=self._gang,
                in_step=self._strategy.sharded,
                on_batch=on_batch,
            )

    @contextlib.contextmanager
    def _watched(self, batches: Iterable[Placed]) -> Iterator[Iterable[Placed]]:
        """In the course of training, batches between which the run hears of what goes on."""
        if not self._evaluates_for_run:
            yield batches
            return
        with contextlib.closing(self._run.watch_evaluation(batches)) as watched:
            yield watched

    def _rehearse_evaluation(self, wanted: str) -> dict[str, float]:
        """The metrics of each evaluation set's first batch, which nobody is told of: only their names matter.

        Where `compute_metrics` cannot make anything of so few samples, `wanted` counts as returned.
        """
        sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {"": None}
        metrics: dict[str, float] = {}
        for name in sets:
            loader = self.get_eval_dataloader(name or None)
            prefix = f"eval_{name}" if name else "eval"
            loss_only = self.compute_metrics is None or self.args.prediction_loss_only
            request = self._eval_request(loss_only, prefix, predicting=False)
            if request.compute_metrics is not None:
                request = replace(request, compute_metrics=_lenient(request.compute_metrics, wanted))
            output = self._in_batches_that_fit(loader, functools.partial(self._first_batch, loader, request))
            metrics.update(output.metrics)
        return metrics

    def _first_batch(self, loader: Any, request: EvalRequest) -> EvalLoopOutput:
        return self._evaluate_batches(
            itertools.islice(self._with_ids(loader), 1), request, None, lambda: None
        )

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Loss, predictions and labels of one batch, None where there is none. Override it for a step of your own."""
        has_labels = self._has_loss(inputs)
        inputs = self._prepare_inputs(inputs)
        keys = ignored_keys(self.model) if ignore_keys is None else ignore_keys
        labels = (
            detach(labels_of(inputs, self.label_names))
            if isinstance(inputs, Mapping) and has_labels
            else None
        )
        with torch.no_grad(), self.compute_loss_context_manager():
            if has_labels or self._loss_without_labels(inputs):
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
                loss = loss if isinstance(loss, LossTerms) else loss.detach()
                _, logits = split_outputs(outputs, has_loss=self._output_has_loss(outputs), ignore_keys=keys)
            else:
                loss, outputs = None, call_model(model, inputs)
                _, logits = split_outputs(outputs, has_loss=False, ignore_keys=keys)
        return (loss, None, None) if prediction_loss_only else (loss, detach(logits), labels)

    def _own_randomness(self) -> contextlib.AbstractContextManager[None]:
        """In the course of training, an evaluation draws nothing from the run's generators, overrides included."""
        return preserved_rng(self._device) if self.is_in_train else contextlib.nullcontext()

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _loss_without_labels(self, inputs: Any) -> bool:
        asked = inputs.get("return_loss") if isinstance(inputs, Mapping) else None
        return bool(self.can_return_loss if asked is None else asked)

    def _output_has_loss(self, outputs: Any) -> bool:
        """Whether a tuple's first element is the loss: it is, unless labels were kept from the model."""
        if isinstance(outputs, Mapping):
            return "loss" in outputs
        if not isinstance(outputs, (tuple, list, torch.Tensor)):
            return hasattr(outputs, "loss")
        return not (self.args.label_smoothing_factor or self.compute_loss_func is not None)

    def _eval_request(self, loss_only: bool, prefix: str, predicting: bool) -> EvalRequest:
        args = self.args
        if loss_only and args.prediction_loss_only and self.compute_metrics is not None:
            warn_once(
                logger, "prediction_loss_only=True keeps no predictions, so compute_metrics is not called"
            )
        return EvalRequest(
            prefix=prefix,
            loss_only=loss_only,
            compute_metrics=None if loss_only else self.compute_metrics,
            preprocess_logits=self.preprocess_logits_for_metrics,
            batch_metrics=args.batch_eval_metrics,
            include=tuple(args.include_for_metrics),
            accumulate_steps=args.eval_accumulation_steps,
            concat=args.eval_do_concat_batches,
            main_input=getattr(self.model, "main_input_name", "input_ids"),
            predicting=predicting,
        )

    def _with_ids(self, loader: Any) -> Iterable[Placed]:
        """A loader's batches with the dataset positions of their samples; unknown for loaders that are not ours.

        Equally many on each rank if every forward needs all of them, or if reading does.
        """
        if isinstance(loader, StreamLoader):
            loader.agree(self._gang)
        if isinstance(loader, DealtLoader) and not loader.own_parts:
            in_step = self._strategy.sharded or loader.must_go_in_step
            return loader.batches_in_step() if in_step else loader.batches_with_ids()
        reader = Reader("evaluation", self.args.dataloader_start_timeout)
        unplaced: Iterable[Placed] = (([], batch) for batch in read_batches(loader, reader))
        return pad_uneven_batches(unplaced, self._gang) if self._strategy.sharded else unplaced

    def _speed(self, prefix: str, started: float, samples: int) -> dict[str, float]:
        batches = math.ceil(samples / (self.args.per_device_eval_batch_size * self._world.size))
        speed = speed_metrics(prefix, started, num_samples=samples, num_steps=batches)
        return {**speed, **self._memory_metrics(prefix)}

    def _prediction_step_event(self) -> None:
        self.control = self.callback_handler.fire("on_prediction_step", self.args, self.state, self.control)

    def _probed(self, batches: Iterable[Placed]) -> Iterator[Placed]:
        """The batches; the first shows which labels are targets, where training has not done so. Collective."""
        remaining = iter(batches)
        with closing_if_possible(remaining):
            first = next(remaining, None)
            if not self._loss_probed:
                self._probe_shift(first[1] if first is not None and self._has_loss(first[1]) else None)
            if first is not None:
                yield first
                yield from remaining

    def _has_loss(self, batch: Any) -> bool:
        if not isinstance(batch, Mapping):
            return True  # what a batch without names holds, only the model knows: it must return its loss
        return bool(self.label_names) and all(batch.get(name) is not None for name in self.label_names)

    @contextlib.contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """The model (and an optimizer that keeps averaged weights) in evaluation mode, in the dtype asked for."""
        executor = self._executor
        with contextlib.ExitStack() as stack:
            if executor is not None and self.is_in_train:
                stack.enter_context(executor.evaluating())
            was_training = self.model.training
            self.model.eval()
            stack.callback(self.model.train, was_training)
            self._cast_for_full_eval()
            yield

    def _cast_for_full_eval(self) -> None:
        """`bf16_full_eval`, `fp16_full_eval`: cast the weights themselves, which training could not undo."""
        dtype = (
            torch.bfloat16
            if self.args.bf16_full_eval
            else torch.float16
            if self.args.fp16_full_eval
            else None
        )
        if dtype is None:
            return
        if self.is_in_train:
            name = "bf16_full_eval" if self.args.bf16_full_eval else "fp16_full_eval"
            fix = (
                "it would cast the weights that are being trained; evaluate after training, or use bf16=True"
            )
            raise ConfigError(Problem(name, True, fix))
        self.model.to(dtype=dtype, device=self._device)

    _executor: Any = None


def _lenient(compute_metrics: Callable[..., Any], wanted: str) -> Callable[..., Any]:
    """`compute_metrics`, but its errors give a NaN under the name `wanted`."""

    @functools.wraps(compute_metrics)
    def measure(*args: Any, **kwargs: Any) -> Any:
        try:
            return compute_metrics(*args, **kwargs)
        except Exception as error:
            logger.info(
                "compute_metrics was tried on the first batch and failed (%r): tried no further", error
            )
            return {wanted: math.nan}

    return measure
