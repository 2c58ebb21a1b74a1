"""Counts and reports of a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from windlass.config.plan import RunPlan
from windlass.core.clock import Moment
from windlass.core.events import TrainerState
from windlass.core.logs import get_logger
from windlass.core.threads import LoadWatch, processes_and_threads
from windlass.engine.feed import UpdateBatch
from windlass.metrics.ledger import Ledger
from windlass.metrics.speed import speed_metrics
from windlass.metrics.stage_memory import StageMemory
from windlass.metrics.tokens import InputCounter
from windlass.precision.dtypes import dtypes_of
from windlass.transforms.compile import CompileCounts

logger = get_logger(__name__)


class RunReports:
    """Counts samples, tokens and FLOPs, and reads the losses that are reported.

    Attributes:
        load_watch: warns if other programs use the cores.

    Args:
        parameters: number of parameters that every token is multiplied with.
        last_rates: returns the learning rates of the last update.
    """

    def __init__(
        self, plan: RunPlan, state: TrainerState, ledger: Ledger, memory: StageMemory, parameters: int,
        last_rates: Callable[[], list[float]],
    ) -> None:  # fmt: skip
        self._plan, self._state, self._ledger, self._memory = plan, state, ledger, memory
        self._flops_per_position, self._last_rates = 6 * parameters, last_rates
        self._samples, self._updates = 0.0, 0
        self._compiled = None if plan.transforms.compile is None else CompileCounts()
        self.load_watch = LoadWatch(processes_and_threads(plan.data.workers))

    def announce(self, samples: int | None, weights: str) -> None:
        """Log the size of the run and its dtypes.

        Args:
            samples: None for a stream.
            weights: the dtype of the trained weights.
        """
        batch, steps = self._plan.batch, self._plan.duration.steps
        logger.info("***** Running training *****")
        logger.info("  samples: %s, updates: %d", "a stream" if samples is None else samples, steps)
        logger.info("  samples in one update: %d = %d x %d micro-batches x %d processes",
                    batch.samples, batch.micro, batch.accumulation, batch.world)  # fmt: skip
        logger.info("  dtypes: %s", dtypes_of(self._plan.precision, self._plan.dist, weights))

    def counting_compilations(self) -> AbstractContextManager[None]:
        """Within the body, compilations are counted for `summary`, if the plan compiles."""
        return nullcontext() if self._compiled is None else self._compiled.counting()

    def update_applied(self, batch: UpdateBatch) -> None:
        """Called after an update from this data, applied or skipped."""
        self._samples += batch.total_samples
        self._updates += 1
        self._state.num_input_tokens_seen += int(batch.tokens)
        self._state.total_flos += float(self._flops_per_position * batch.positions)

    def progress(self) -> dict[str, Any]:
        """The losses since the last report; empty if there were no updates."""
        report = self._ledger.read()
        if not report:
            return {}
        self.load_watch.look(training=True)
        rates = self._last_rates()
        logs = {**report, "learning_rate": rates[0] if rates else 0.0}
        if self._ledger.skipped:
            logs["skipped_updates"] = self._ledger.skipped
        return logs

    def summary(self, started: Moment) -> dict[str, float]:
        """Speed, FLOPs, mean loss, memory and compilations of the whole run."""
        self._ledger.read()  # updates since the last report, so that the mean loss covers all
        metrics: dict[str, float] = speed_metrics(
            "train", started, num_samples=self._samples, num_steps=self._updates
        )
        metrics["total_flos"] = self._state.total_flos
        metrics["train_loss"] = self._ledger.mean_loss()
        if self._plan.reports.memory:
            metrics.update(self._memory.report("train", "train"))
        if self._compiled is not None:
            metrics["train_compiled_graphs"] = self._compiled.graphs
            metrics["train_recompilations"] = self._compiled.recompilations
        return metrics


def count_inputs(model: object, tokens: str, pad_token: int | None) -> tuple[Any, Any]:
    """Return two functions of a batch: its tokens for `num_input_tokens_seen`, and its positions with padding."""
    inputs = InputCounter(getattr(model, "main_input_name", "input_ids"), pad_token)
    return {"no": lambda _: 0, "all": inputs.positions, "non_padding": inputs.real}[tokens], inputs.positions
