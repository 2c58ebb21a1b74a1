"""Evaluation and prediction: exact for every batch size, last batch and number of ranks.

Ranks may have different numbers of batches, because they exchange results once, after the last one (except for batch
metrics, which get every batch of every rank). Memory grows with the data only if predictions are kept.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from windlass.config.plan import EvaluationPlan
from windlass.core.attributes import takes
from windlass.core.errors import DataError, ModelError, PeerError, Problem, RankMismatchError, refuse
from windlass.core.logs import get_job_logger, get_logger
from windlass.core.trees import Spec, batch_size_of, map_leaves, unflatten
from windlass.core.types import EvalLoopOutput, EvalPrediction, LossTerms
from windlass.dist.gang import Gang
from windlass.dist.lockstep import exchange_messages, telling_others
from windlass.metrics.evaluation import MeanLoss, checked_metrics, mean_of, named_metrics
from windlass.metrics.kept_rows import OrderLog, RowStore, pad_concat, take_apart
from windlass.transforms.strategy import Strategy

logger, job_logger = get_logger(__name__), get_job_logger(__name__)

HEAVY_BYTES = 4 * 2**30
"""A rank that keeps more warns once, with how to keep less."""

FIELDS = ("predictions", "label_ids", "inputs", "losses")
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation: the model, what is computed from its outputs, and the options."""

    strategy: Strategy  # how the model is spread over ranks
    # Batch -> (loss, logits, labels), each None if there is none, without gradients. The loss is a mean over targets,
    # or `LossTerms`.
    predict: Callable[[Any], tuple[Any, Any, Any]]
    # Number of targets in a batch, on the host: the weight of its mean loss
    count_targets: Callable[[Any], float]
    plan: EvaluationPlan = field(default_factory=EvaluationPlan)  # what the arguments say of every evaluation
    label_names: Sequence[str] = ()  # which entries of a batch are labels
    in_step: bool = False  # a forward of one rank waits for the others, so they need equal numbers of batches
    # `EvalPrediction -> dict`; with `plan.batch_metrics` it also takes `compute_result: bool`
    compute_metrics: Callable[..., Any] | None = None
    # `(logits, labels) -> logits`, on each batch on the device, before anything is kept
    preprocess_logits: Callable[[Any, Any], Any] | None = None
    prefix: str = "eval"  # first part of the name of every metric, before an underscore
    loss_only: bool = False  # compute only the loss; predictions are dropped at once
    # Predictions are the purpose: kept also under `batch_metrics`; without labels, metrics are omitted
    predicting: bool = False

    def __post_init__(self) -> None:
        problems, metrics = [], self.compute_metrics
        if self.loss_only and metrics:
            fix = "compute_metrics needs predictions: give only one of the two"
            problems.append(Problem("prediction_loss_only", True, fix))
        if self.plan.batch_metrics and metrics and not takes(metrics, "compute_result"):
            fix = "compute_metrics must take a `compute_result: bool` argument then"
            problems.append(Problem("batch_eval_metrics", True, fix))
        refuse(problems)


def evaluation_loop(
    batches: Iterable[tuple[list[int] | None, Any]],
    evaluation: Evaluation,
    *,
    data_ranks: Gang | None = None,
    reading_is_collective: bool = False,
    on_batch: Callable[[], None] = lambda: None,
) -> EvalLoopOutput:
    """Run the model over this rank's batches and join the results of all ranks. Collective.

    Args:
        batches: (dataset positions, batch) of this rank, any number, also none. Positions are empty if unknown, and
            None for a filler, in a model whose every forward needs all ranks: it counts nothing.
        evaluation: what runs on them. If it is `in_step`, a rank that fails reports nothing, because the others wait
            for it in a forward: their wait ends with its process.
        data_ranks: the ranks that evaluate different batches; this one alone by default.
        reading_is_collective: ranks exchange while they read `batches`. A rank that fails then reads on, without
            evaluating, to where the others can learn of it.
        on_batch: called after each batch of this rank.

    Returns:
        On every rank the same: predictions and labels as numpy arrays in the structure of the model's outputs, one row
        per sample in the order of dataset positions (in turn over ranks and batches if these are unknown), narrower
        batches padded with -100; metrics by prefixed name as Python numbers; the number of samples. Without any batch:
        None, no metrics and 0, with a warning.

    Raises:
        DataError: there are no labels for `compute_metrics`.
        ModelError: the model returns no predictions for `compute_metrics`, or batches cannot be joined.
        ConfigError: `compute_metrics` does not return a dict.
        PeerError: another rank failed.
    """
    ranks = data_ranks or Gang()
    run = _Results(evaluation, ranks)
    with contextlib.nullcontext() if evaluation.in_step else telling_others(ranks):
        # Closed before an error is reported: ranks may be answering each other between batches.
        with closing_if_possible(batches):
            run.evaluate(batches, on_batch, reads_on=reading_is_collective and not evaluation.in_step)
        batchwise = run.batch_metrics.finish()
        totals = run.totals()
    return run.conclude(totals, batchwise)


def closing_if_possible(batches: Any) -> AbstractContextManager[Any]:
    """Close a generator at the end of the body; do nothing for other iterables."""
    return contextlib.closing(batches) if hasattr(batches, "close") else contextlib.nullcontext()


class _Results:
    """The counts and kept predictions of one evaluation on this rank."""

    def __init__(self, evaluation: Evaluation, data_ranks: Gang) -> None:
        self._evaluation, self._data_ranks = evaluation, data_ranks
        self._loss, self._samples, self._batches = MeanLoss(), 0, 0
        self._warned = False
        self._order = OrderLog()
        self._kept = {name: RowStore(name, evaluation.plan.concat) for name in _kept_fields(evaluation)}
        self.batch_metrics: BatchMetrics | NoBatchMetrics = NoBatchMetrics()
        if evaluation.plan.batch_metrics and evaluation.compute_metrics:
            is_measurable = functools.partial(_measurable, evaluation=evaluation)
            self.batch_metrics = BatchMetrics(evaluation.compute_metrics, is_measurable, data_ranks)

    def evaluate(
        self,
        batches: Iterable[tuple[list[int] | None, Any]],
        on_batch: Callable[[], None],
        *,
        reads_on: bool,
    ) -> None:
        """Evaluate the batches; with `reads_on`, an error is raised where the other ranks meet this one next."""
        failure: Exception | None = None
        metrics = self.batch_metrics
        # An error is kept while the other ranks still exchange as they read: they would wait for this one.
        for ids, batch in batches:
            if failure is not None and metrics.meets_at_batches:
                break
            if failure is not None:
                continue
            rounds = metrics.rounds
            try:
                if ids is None:
                    self._evaluation.predict(batch)
                    metrics.add(None)
                else:
                    self.step(ids, batch)
                    on_batch()
            except (PeerError, RankMismatchError):  # all ranks learn it at once: none waits for this one
                raise
            except Exception as error:
                if not reads_on or (metrics.meets_at_batches and metrics.rounds == rounds):
                    raise
                failure = error
        if failure is not None:
            raise failure

    def step(self, ids: list[int], batch: Any) -> None:
        evaluation = self._evaluation
        # The batch is read before the step: a loss may take labels out of it.
        weight = evaluation.count_targets(batch)
        samples = len(ids) or batch_size_of(batch) or 1
        inputs = self._inputs(batch)
        loss, logits, labels = evaluation.predict(batch)
        self._loss.add(loss, weight, samples)
        self._samples += samples
        self._batches += 1
        if evaluation.loss_only:
            return
        if logits is not None and evaluation.preprocess_logits is not None:
            logits = evaluation.preprocess_logits(logits, labels)
        losses = _repeated(loss, samples) if "loss" in evaluation.plan.include else None
        fields = dict(zip(FIELDS, (logits, labels, inputs, losses), strict=True))
        self.batch_metrics.add(fields)
        self._keep(fields, ids, samples)

    def _inputs(self, batch: Any) -> Any:
        evaluation = self._evaluation
        if evaluation.loss_only or "inputs" not in evaluation.plan.include:
            return None
        if evaluation.plan.batch_metrics and isinstance(batch, Mapping):
            return dict(batch)
        name = getattr(evaluation.strategy.module, "main_input_name", "input_ids")
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
        held = sum(store.nbytes for store in self._kept.values())
        if held >= HEAVY_BYTES and not self._warned:
            self._warned = True
            logger.warning(
                "evaluation keeps %.1f GiB after %d batches of this process: reduce predictions in "
                "preprocess_logits_for_metrics, or set batch_eval_metrics or prediction_loss_only",
                held / 2**30,
                self._batches,
            )
        every = self._evaluation.plan.accumulate_steps
        if every is not None and self._batches % every == 0:
            for store in self._kept.values():
                store.to_host()

    def totals(self) -> dict[str, Any]:
        """The counts of this rank. Waits for the device."""
        return {"loss": self._loss.totals(), "samples": self._samples, "batches": self._batches}

    def conclude(self, totals: dict[str, Any], batchwise: dict[str, Any] | None) -> EvalLoopOutput:
        """Join the results of all ranks: totals first, then what was kept. Collective."""
        messages = exchange_messages(self._data_ranks, totals)
        if not sum(message["batches"] for message in messages):
            prefix = self._evaluation.prefix
            job_logger.warning("the evaluation data is empty: no loss and no metrics %s_*", prefix)
            return EvalLoopOutput(None, None, {}, 0)
        loss = mean_of([message["loss"] for message in messages])
        fields = self._gathered()
        with telling_others(self._data_ranks):
            metrics = self._metrics(fields) if batchwise is None else batchwise
        exchange_messages(self._data_ranks, {})  # no rank continues if the metrics of another failed
        return EvalLoopOutput(
            predictions=fields["predictions"],
            label_ids=fields["label_ids"],
            metrics=named_metrics(self._evaluation.prefix, loss, metrics),
            num_samples=sum(message["samples"] for message in messages),
        )

    def _gathered(self) -> Fields:
        fields: Fields = dict.fromkeys(FIELDS)
        if self._kept:
            order = self._order.exchange(self._data_ranks)
            fields |= {name: store.gather(order, self._data_ranks) for name, store in self._kept.items()}
        return fields

    def _metrics(self, fields: Fields) -> dict[str, Any]:
        if not _measurable(fields, self._evaluation):
            return {}
        assert self._evaluation.compute_metrics is not None
        return checked_metrics(self._evaluation.compute_metrics(EvalPrediction(**fields)))


def _measurable(fields: Fields, evaluation: Evaluation) -> bool:
    if evaluation.compute_metrics is None:
        return False
    if fields["predictions"] is None:
        raise ModelError("compute_metrics needs predictions, but the model returned nothing beside the loss")
    if fields["label_ids"] is None and evaluation.predicting:
        logger.info("compute_metrics is not called: this data has no labels")
        return False
    if fields["label_ids"] is None:
        raise DataError(
            "compute_metrics needs labels, but the evaluation batches hold none under label_names"
        )
    return True


def _kept_fields(evaluation: Evaluation) -> list[str]:
    if evaluation.loss_only or (evaluation.plan.batch_metrics and not evaluation.predicting):
        return []
    extra = {"inputs": "inputs", "loss": "losses"}
    return ["predictions", "label_ids", *(extra[name] for name in evaluation.plan.include if name in extra)]


def _repeated(loss: Any, samples: int) -> Tensor | None:
    """The mean loss of a batch, once for each of its samples."""
    if loss is None:
        return None
    mean = loss.sum / loss.weight if isinstance(loss, LossTerms) else torch.as_tensor(loss).mean()
    return mean.detach().reshape(1).expand(samples)


# --- metrics that are computed batch by batch, so that all predictions are never held at once -------------------------


class NoBatchMetrics:
    """Replaces `BatchMetrics` if metrics are computed at the end, or not at all."""

    meets_at_batches, rounds = False, 0

    def add(self, fields: Fields | None) -> None:
        pass

    def finish(self) -> None:
        return None


class BatchMetrics:
    """Calls `compute_metrics(EvalPrediction, compute_result=...)` once for each round of batches.

    A round is the n-th batch of every rank, joined in rank order (ranks without more data add nothing), so the metric
    of every rank gets all data and has the same result. This is the only collective that evaluation needs for each
    batch. Predictions are torch tensors, on the device of this rank's outputs.

    A batch waits until the next one comes, because only then it is known not to be the last. The call for the last one
    has `compute_result=True` and returns the metrics. The ranks meet at the first one as well, where nothing waits: so
    all learn at every batch if one of them failed.

    Args:
        measurable: returns True if a round's fields can be measured; raises if they should be and cannot.

    Attributes:
        rounds: how often the ranks have met.
    """

    meets_at_batches = True

    def __init__(
        self, compute_metrics: Callable[..., Any], measurable: Callable[[Fields], bool], data_ranks: Gang
    ) -> None:
        self._compute, self._measurable, self._data_ranks = compute_metrics, measurable, data_ranks
        self._waiting: Fields | None = None
        self.rounds = 0
        self._device = torch.device("cpu")
        self._result: dict[str, Any] = {}

    def add(self, fields: Fields | None) -> None:
        """Add this rank's next batch, or None for a filler: the other ranks take part in a round with it."""
        self._round(more=True)
        if fields is not None:
            # Copies, which the next forward cannot overwrite.
            self._waiting = map_leaves(lambda tensor: tensor.detach().clone(), fields)

    def finish(self) -> dict[str, Any]:
        """Take part in rounds until no rank has more data; return the metrics of the last round."""
        while self._round(more=False):
            pass
        return self._result

    def _round(self, *, more: bool) -> bool:
        """One round over all ranks. Return True if any rank has a further batch."""
        fields, self._waiting = self._waiting, None
        spec, leaves = take_apart(fields)
        messages = exchange_messages(self._data_ranks, {"spec": spec, "more": more})
        self.rounds += 1
        others_more = any(message["more"] for message in messages)
        joined = self._joined([message["spec"] for message in messages], leaves)
        if joined is not None and self._measurable(joined):
            result = self._compute(EvalPrediction(**joined), compute_result=not others_more)
            if not others_more:
                self._result = checked_metrics(result)
        return others_more

    def _joined(self, specs: list[Spec], leaves: list[Tensor]) -> Fields | None:
        """The round's fields over all ranks; None if no rank had a batch."""
        seen = [spec for spec in specs if spec is not None]
        if not seen:
            return None
        if any(spec != seen[0] for spec in seen):
            raise ModelError(
                "batch_eval_metrics: the ranks' batches differ in structure and cannot be joined"
            )
        if leaves:
            self._device = leaves[0].device
        parts = collections.defaultdict[int, list[Tensor]](list)
        for _, index, tensor in self._data_ranks.stream(leaves):
            parts[index].append(tensor.to(self._device))
        tree = unflatten(seen[0], [pad_concat(parts[index]) for index in sorted(parts)])
        assert isinstance(tree, dict)
        return tree
