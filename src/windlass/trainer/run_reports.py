"""Counts and reports of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from windlass.accelerator.saved_parts import RankPart, SavedPart
from windlass.callbacks.run_record import RunRecord, Trained, has_counts
from windlass.core.logs import get_logger
from windlass.core.run_clock import Moment, run_clock
from windlass.core.threads import LoadWatch, processes_and_threads
from windlass.core.types import State
from windlass.data.update_batch import UpdateBatch
from windlass.metrics.ledger import Ledger
from windlass.metrics.speed import speed_metrics
from windlass.precision.dtypes import dtypes_of, weights_of
from windlass.trainer.expert_load import ExpertLoad
from windlass.trainer.predicted_peak import PredictedPeak
from windlass.trainer.reports import flops_per_position
from windlass.trainer.run_context import RunContext
from windlass.trainer.run_rates import RunRates
from windlass.transforms.compile import CompileCounts

logger = get_logger(__name__)


class RunReports:
    """Counts samples, tokens and FLOPs, and reads the losses that are reported.

    Attributes:
        load_watch: warns if other programs use the cores.
        counts: since the step `from_step`: the samples of all calls of `train()`, and the seconds of the earlier ones.
        began: `time.monotonic()` when this call began.
        experts: the load of the experts of a mixture.
        own_rate: the learning rate of the last update as a script's own method returned it; None: it has none.
    """

    own_rate: float | None = None

    def __init__(self, context: RunContext, ledger: Ledger, record: RunRecord) -> None:
        self._plan, self._events, self._ledger = context.plan, context.events, ledger
        self._state = context.events.state
        self._model, self._schedule = context.files.model, context.built.schedule
        self._flops_per_position = flops_per_position(self._model)
        self._rates, self._predicted = RunRates(context), PredictedPeak(context)
        self._record, self._updates = record, 0
        # The samples, tokens and positions of this call, over all ranks.
        self._counted = (0.0, 0.0, 0.0)
        self.counts, self.began = {"from_step": 0, "seconds": 0.0, "samples": 0.0}, time.monotonic()
        plan = context.plan
        self._compiled = None if plan.transforms.compile is None else CompileCounts()
        self.load_watch = LoadWatch(processes_and_threads(plan.data.workers))
        self._is_first = context.all_ranks.rank == 0
        all_ranks, device = context.all_ranks, context.session.device
        # Of ranks whose experts get the same tokens one counts.
        counts = all_ranks.over("tensor").rank == 0
        strategy = context.built.executor.strategy
        self.experts = ExpertLoad(self._model, device, all_ranks.sum, counts, lambda: bool(strategy.filling))

    def parts(self) -> list[SavedPart]:
        """What checkpoints have of it."""
        if not self.experts.layers:
            return []
        first = self._is_first

        def adopt(states: list[State]) -> None:
            self.experts.adopt(states if first else [])

        return [RankPart("expert_load", self.experts, optional=True, adopt=adopt)]

    def announce(self, samples: int | None) -> None:
        """Log the size of the run and its dtypes. `samples` is None for a stream."""
        batch, steps = self._plan.batch, self._plan.duration.steps
        logger.info("***** Running training *****")
        logger.info("  samples: %s, updates: %d", "a stream" if samples is None else samples, steps)
        logger.info("  samples in one update: %d = %d x %d micro-batches x %d processes",
                    batch.samples, batch.micro, batch.accumulation, batch.ranks)  # fmt: skip
        logger.info("  dtypes: %s", dtypes_of(self._plan.precision, self._plan.dist, weights_of(self._model)))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within the body, compilations are counted, if the plan compiles, and the tokens of experts."""
        with nullcontext() if self._compiled is None else self._compiled.counting(), self.experts.counting():
            yield

    def count(self, batch: UpdateBatch) -> None:
        """Count the data of an update, applied or skipped."""
        samples, tokens, positions = self._counted
        self._counted = samples + batch.total_samples, tokens + batch.tokens, positions + batch.positions
        self.counts["samples"] += batch.total_samples
        self._updates += 1
        if self.experts.layers:
            self.experts.end_update()
        self._state.num_input_tokens_seen += int(batch.tokens)
        own = batch.flops
        self._state.total_flos += float(self._flops_per_position * batch.positions if own is None else own)

    @property
    def _rate(self) -> float:
        """The learning rate of the last update."""
        rates = self._schedule.last_lrs()
        return (rates[0] if rates else 0.0) if self.own_rate is None else self.own_rate

    def interval(self) -> tuple[Tensor, Tensor | None, float]:
        """Of the updates since the last report: the sum of their losses, whose mean over ranks is that of the run; the
        last gradient norm, None before the first update; and the last learning rate. No host sync.
        """
        losses = self._ledger.loss_of_interval() * self._plan.batch.ranks
        return losses.float(), self._ledger.last_norm, self._rate

    def progress(self) -> dict[str, Any]:
        """The losses since the last report; empty if there were no updates."""
        if not self._ledger.pending:
            return {}
        report = self._ledger.read(self._rates.end_interval())
        run_clock().row = self._rates.take(self._ledger.shared, self._counted)
        self.load_watch.look(training=True)
        self._events.count_samples(self._counted[0])
        logs = {**report, "learning_rate": self._rate, **self.experts.read()}
        if self._ledger.skipped:
            logs["skipped_updates"] = self._ledger.skipped
        return logs

    def begin(self, saved: Any, data: Callable[[], Mapping[str, Any]]) -> None:
        """Continue the counts `saved` of a checkpoint; without them, count from the present step on. `data` returns
        what the record shows of the data.
        """
        step = self._state.global_step
        self.counts = dict(saved) if has_counts(saved) else {**self.counts, "from_step": step}
        self.began = time.monotonic()
        self._record.begin(step, self._state.max_steps, self.counts, data)

    def loss_decided(self, facts: Mapping[str, Any]) -> None:
        """Record how the loss is computed, which was measured by forwards that are not counted."""
        self.experts.start_over()
        self._record.add_loss(facts)

    def first_batch(self, batch: Any) -> None:
        """Look for what was predicted of a run that begins with this micro-batch."""
        self._predicted.begin(batch)

    def end(self, status: str, trained: Trained, error: BaseException | None = None) -> None:
        """Record how this call of `train()` ended."""
        if error is None and (memory := self._predicted.measured(self._updates)) is not None:
            self._record.add_memory(memory)
        self._record.end(status, self._state.global_step, trained, error)

    def close(self) -> None:
        """Record the time of this call of `train()` up to now: nothing follows."""
        self._record.close()

    def summary(self, started: Moment) -> dict[str, float]:
        """Speed, FLOPs, mean loss, memory and compilations of the whole run."""
        self._ledger.read()  # updates since the last report, so that the mean loss covers all
        metrics: dict[str, float] = speed_metrics(
            "train", started, num_samples=self._counted[0], num_steps=self._updates
        )
        metrics["total_flos"] = self._state.total_flos
        metrics["train_loss"] = self._ledger.mean_loss()
        if self._plan.reports.memory:
            metrics.update(self._predicted.memory.report("train", "train"))
        if self._compiled is not None:
            metrics["train_compiled_graphs"] = self._compiled.graphs
            metrics["train_recompilations"] = self._compiled.recompilations
        return metrics
