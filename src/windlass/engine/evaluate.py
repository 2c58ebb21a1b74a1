"""Evaluation and prediction: exact for every batch size, last batch and number of ranks.

Ranks may hold different numbers of batches, for they meet only once, after the last one (batch metrics aside, which
see every batch of every rank). Unless predictions are asked for, memory does not grow with the data.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from windlass.core.errors import ConfigError, DataError, ModelError, Problem
from windlass.core.logs import get_logger
from windlass.core.trees import batch_size_of
from windlass.core.types import EvalLoopOutput, EvalPrediction, LossTerms
from windlass.dist.gang import Gang
from windlass.dist.lockstep import agree, telling_others
from windlass.engine.evaluate_batches import BatchMetrics, NoBatchMetrics
from windlass.metrics.evaluation import MeanLoss, checked_metrics, mean_of, named_metrics
from windlass.metrics.kept_rows import OrderLog, RowStore

logger = get_logger(__name__)

PredictStep = Callable[[Any], tuple[Any, Any, Any]]
"""batch -> (loss, logits, labels), each None if there is none. The loss is a mean over targets, or `LossTerms`."""

HEAVY_BYTES = 4 * 2**30
"""From here on a rank that keeps predictions says so, once, and how to keep less."""

FIELDS = ("predictions", "label_ids", "inputs", "losses")
Fields = dict[str, Any]


@dataclass(frozen=True)
class EvalRequest:
    """What one evaluation is asked for.

    Attributes:
        prefix: put before the name of every metric, with an underscore.
        loss_only: the loss is all that is wanted; predictions are dropped as they come.
        compute_metrics: `EvalPrediction -> dict`; with `batch_metrics` it also takes `compute_result: bool`.
        preprocess_logits: `(logits, labels) -> logits`, on each batch on the device, before anything is kept.
        batch_metrics: call `compute_metrics` for every batch, with `compute_result=True` for the last one.
        include: "inputs" and "loss" are handed to `compute_metrics` too.
        accumulate_steps: move what is kept to host memory every so many batches; None: at the end.
        concat: join batches into arrays; False: lists with one entry for each batch.
        main_input: the entry of a batch that `include=("inputs",)` means.
        predicting: predictions are the purpose: kept also under `batch_metrics`; without labels metrics are left out.
    """

    prefix: str = "eval"
    loss_only: bool = False
    compute_metrics: Callable[..., Any] | None = None
    preprocess_logits: Callable[[Any, Any], Any] | None = None
    batch_metrics: bool = False
    include: tuple[str, ...] = ()
    accumulate_steps: int | None = None
    concat: bool = True
    main_input: str = "input_ids"
    predicting: bool = False

    def __post_init__(self) -> None:
        problems = [problem for problem in (self._unmeasurable(), self._not_batchwise()) if problem]
        if problems:
            raise ConfigError(problems)

    def _unmeasurable(self) -> Problem | None:
        if not (self.loss_only and self.compute_metrics):
            return None
        fix = "compute_metrics needs predictions: give only one of the two"
        return Problem("prediction_loss_only", True, fix)

    def _not_batchwise(self) -> Problem | None:
        if not (
            self.batch_metrics and self.compute_metrics and not _takes(self.compute_metrics, "compute_result")
        ):
            return None
        fix = "compute_metrics must take a `compute_result: bool` argument then"
        return Problem("batch_eval_metrics", True, fix)


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some builtins have no signature: let the call speak
        return True
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def evaluation_loop(
    batches: Iterable[tuple[list[int] | None, Any]],
    predict_step: PredictStep,
    request: EvalRequest,
    *,
    weigh: Callable[[Any], float],
    gang: Gang | None = None,
    in_step: bool = False,
    on_batch: Callable[[], None] = lambda: None,
) -> EvalLoopOutput:
    """Run the model over this rank's batches and join the outcome of all ranks. Collective.

    Args:
        batches: (dataset positions, batch) of this rank; positions may be empty where unknown. Any number, also none.
            Positions of None mark a batch that only fills in, where every forward needs all ranks: it counts nothing.
        predict_step: what the model makes of a batch, without gradients.
        request: what is wanted of it.
        weigh: number of targets in a batch, on the host: the weight of its mean loss.
        gang: the ranks; a world of one by default.
        in_step: every forward needs all ranks. One that fails then tells nobody, for the others wait for it in a
            forward, where they hear nothing else: they are let go when its process ends.
        on_batch: called after each batch of this rank.

    Returns:
        On every rank the same: predictions and labels as numpy arrays in the structure that the model gave, one row
        per sample in the order of dataset positions (in turn over ranks and batches where these are unknown),
        narrower batches padded with -100; metrics by prefixed name as Python numbers; the number of samples.

    Raises:
        DataError: there is nothing to evaluate, or no labels for `compute_metrics`.
        ModelError: the model gives no predictions for `compute_metrics`, or batches cannot be joined.
        ConfigError: `compute_metrics` returns no dict.
        PeerError: another rank failed.
    """
    ranks = gang or Gang()
    run = _Evaluation(request, weigh, ranks)
    with contextlib.nullcontext() if in_step else telling_others(ranks):
        # Closed before anything is told: ranks may be answering each other between batches.
        with closing_if_possible(batches):
            for ids, batch in batches:
                if ids is None:
                    predict_step(batch)
                    run.batch_metrics.add(None)
                else:
                    run.step(predict_step, ids, batch)
                    on_batch()
        batchwise = run.batch_metrics.finish()
        totals = run.totals()
    return run.conclude(totals, batchwise)


def closing_if_possible(batches: Any) -> AbstractContextManager[Any]:
    """Closes a generator at the end of the body, however it ends; other iterables have nothing to close."""
    return contextlib.closing(batches) if hasattr(batches, "close") else contextlib.nullcontext()


class _Evaluation:
    """One evaluation on this rank: what it counts, and what it keeps."""

    def __init__(self, request: EvalRequest, weigh: Callable[[Any], float], gang: Gang) -> None:
        self._request = request
        self._weigh = weigh
        self._gang = gang
        self._loss = MeanLoss()
        self._samples = 0
        self._batches = 0
        self._said_heavy = False
        self._order = OrderLog()
        self._kept = {name: RowStore(name, request.concat) for name in _kept_fields(request)}
        self.batch_metrics = _batch_metrics(request, gang)

    def step(self, predict_step: PredictStep, ids: list[int], batch: Any) -> None:
        # All that is read of the batch is read before the step: a loss may take labels out of it.
        weight = self._weigh(batch)
        samples = len(ids) or batch_size_of(batch) or 1
        inputs = self._inputs(batch)
        loss, logits, labels = predict_step(batch)
        self._loss.add(loss, weight, samples)
        self._samples += samples
        self._batches += 1
        if self._request.loss_only:
            return
        if logits is not None and self._request.preprocess_logits is not None:
            logits = self._request.preprocess_logits(logits, labels)
        losses = _repeated(loss, samples) if "loss" in self._request.include else None
        fields = dict(zip(FIELDS, (logits, labels, inputs, losses), strict=True))
        self.batch_metrics.add(fields)
        self._keep(fields, ids, samples)

    def _inputs(self, batch: Any) -> Any:
        if self._request.loss_only or "inputs" not in self._request.include:
            return None
        if self._request.batch_metrics and isinstance(batch, Mapping):
            return dict(batch)
        name = self._request.main_input
        if not isinstance(batch, Mapping) or name not in batch:
            held = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
            raise DataError(
                f'include_for_metrics=["inputs"] needs {name!r} in every batch; this one holds {held}'
            )
        return batch[name]

    def _keep(self, fields: Fields, ids: list[int], samples: int) -> None:
        if not self._kept:
            return
        self._order.add(ids, samples)
        for name, store in self._kept.items():
            store.add(fields[name])
        self._say_if_heavy()
        every = self._request.accumulate_steps
        if every is not None and self._batches % every == 0:
            for store in self._kept.values():
                store.to_host()

    def _say_if_heavy(self) -> None:
        held = sum(store.nbytes for store in self._kept.values())
        if held < HEAVY_BYTES or self._said_heavy:
            return
        self._said_heavy = True
        logger.warning(
            "evaluation keeps %.1f GiB after %d batches of this process: reduce predictions in "
            "preprocess_logits_for_metrics, or set batch_eval_metrics or prediction_loss_only",
            held / 2**30,
            self._batches,
        )

    def totals(self) -> dict[str, Any]:
        """What this rank counted. Waits for the device."""
        return {"loss": self._loss.totals(), "samples": self._samples, "batches": self._batches}

    def conclude(self, totals: dict[str, Any], batchwise: dict[str, Any] | None) -> EvalLoopOutput:
        """Meet the other ranks: totals first, then whatever was kept."""
        messages = agree(self._gang, totals)
        if not sum(message["batches"] for message in messages):
            raise DataError("the evaluation data is empty: no batch came on any rank")
        loss = mean_of([message["loss"] for message in messages])
        fields = self._gathered()
        with telling_others(self._gang):
            metrics = self._metrics(fields) if batchwise is None else batchwise
        agree(self._gang, {})  # no rank continues while another has stopped with an error of its metrics
        return EvalLoopOutput(
            predictions=fields["predictions"],
            label_ids=fields["label_ids"],
            metrics=named_metrics(self._request.prefix, loss, metrics),
            num_samples=sum(message["samples"] for message in messages),
        )

    def _gathered(self) -> Fields:
        fields: Fields = dict.fromkeys(FIELDS)
        if self._kept:
            order = self._order.exchange(self._gang)
            fields |= {name: store.gather(order, self._gang) for name, store in self._kept.items()}
        return fields

    def _metrics(self, fields: Fields) -> dict[str, Any]:
        if not _measurable(fields, self._request):
            return {}
        assert self._request.compute_metrics is not None
        return checked_metrics(self._request.compute_metrics(EvalPrediction(**fields)))


def _measurable(fields: Fields, request: EvalRequest) -> bool:
    if request.compute_metrics is None:
        return False
    if fields["predictions"] is None:
        raise ModelError("compute_metrics needs predictions, but the model returned nothing beside the loss")
    if fields["label_ids"] is None and request.predicting:
        logger.info("compute_metrics is left out: this data has no labels")
        return False
    if fields["label_ids"] is None:
        raise DataError(
            "compute_metrics needs labels, but the evaluation batches hold none under label_names"
        )
    return True


def _batch_metrics(request: EvalRequest, gang: Gang) -> BatchMetrics | NoBatchMetrics:
    if not (request.batch_metrics and request.compute_metrics):
        return NoBatchMetrics()
    return BatchMetrics(request.compute_metrics, lambda fields: _measurable(fields, request), gang)


def _kept_fields(request: EvalRequest) -> list[str]:
    if request.loss_only or (request.batch_metrics and not request.predicting):
        return []
    extra = {"inputs": "inputs", "loss": "losses"}
    return ["predictions", "label_ids", *(extra[name] for name in request.include if name in extra)]


def _repeated(loss: Any, samples: int) -> torch.Tensor | None:
    """One entry per sample: the mean loss of the batch it was in."""
    if loss is None:
        return None
    mean = loss.sum / loss.weight if isinstance(loss, LossTerms) else torch.as_tensor(loss).mean()
    return mean.detach().reshape(1).expand(samples)
