"""One call of `train()`: its parts, their states in checkpoints, and what its Trainer asks of it afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from windlass.accelerator.saved_parts import (
    Generators,
    RankPart,
    SavedPart,
    described_ranks,
    load_in_place,
)
from windlass.callbacks.run_record import RunRecord, status_of
from windlass.config.plan import UpdateSize
from windlass.core.events import TrainerState
from windlass.core.logs import get_logger
from windlass.core.rng import StepSeeder
from windlass.core.run_clock import UPLOAD, run_clock
from windlass.core.types import State, Stateful
from windlass.data.update_batch import GroupSource
from windlass.dist.ending import note_failure
from windlass.dist.gang import Gang
from windlass.engine.feed import Feed
from windlass.engine.loop import Loop, LoopOptions
from windlass.metrics.ledger import Ledger
from windlass.trainer.batch_fitter import UpdateFitter
from windlass.trainer.blame import find_nonfinite_samples
from windlass.trainer.defaults import retention_of
from windlass.trainer.interruption import Interruptible
from windlass.trainer.model_writer import SavedByScript
from windlass.trainer.publishing import end_waits
from windlass.trainer.resuming import CheckpointSource, merged_ledger
from windlass.trainer.run_checkpoints import RunCheckpoints
from windlass.trainer.run_context import RunContext
from windlass.trainer.run_reports import RunReports
from windlass.trainer.run_restorer import RunRestorer

logger = get_logger(__name__)


class Run(Interruptible):
    """The parts of one call of `train()`, whose states make up a checkpoint. `RunTraining` moves them.

    A Trainer keeps its last run, which a script may save again. So no part refers to the Trainer, and none to what
    refers to it: otherwise a model would stay in memory after its Trainer is dropped.

    Attributes:
        executor, schedule, loop, ledger, seed_step: the run's parts.
        checkpoints, restorer: saving and restoring it.
        reports: its counts.
        pending: its evaluation, if that is not complete.
        fitter: the sizes of its updates.
        samples: in the training data; None for a stream.
        first_tokens: `num_input_tokens_seen` when this call began.

    Args:
        source: its data.
        opener: opens the checkpoints of the run's folder.
        record: of what the run is and how it ends.
    """

    def __init__(
        self, context: RunContext, source: GroupSource, opener: CheckpointSource, record: RunRecord
    ) -> None:
        plan, services, session = context.plan, context.services, context.session
        self.context, self.opener, self._events = context, opener, context.events
        self.executor, self.schedule = context.built.executor, context.built.schedule
        self.samples: int | None = getattr(source, "num_samples", None)
        self.fitter = UpdateFitter(
            services.fitter, session, context.files.model, source, self.executor, plan.batch
        )
        # Of the ranks with the same samples, the first has their losses.
        counts = session.all_ranks.over("model").rank == 0
        all_ranks = session.all_ranks
        self.ledger = Ledger(session.device, all_ranks.sum, counts, all_ranks.gather_objects)
        self.seed_step = StepSeeder(plan.seed, session.data_ranks.rank, session.device)
        # For a run without a state to restore; the generators of a checkpoint replace this.
        self.seed_step.start(0)
        self._events.use_plan(plan)
        self.use_size(plan.batch)
        opener.manager.retention = retention_of(plan.save)
        self.checkpoints = RunCheckpoints(context, opener)
        self.restorer = RunRestorer(context, opener, self.checkpoints)
        self.loop = self._new_loop(source)
        self.reports = RunReports(context, self.ledger, record)
        self.pending = PendingEvaluation()
        self.checkpoints.parts = self._list_parts()
        self.first_tokens, self._ranks = 0, described_ranks(context.all_ranks)

    def _new_loop(self, source: GroupSource) -> Loop:
        plan, context = self.context.plan, self.context
        # A loss of the script's may communicate unseen, as contrastive losses do: ranks make equally many of them.
        watched = context.services.loss.settings.watched
        in_step = context.forwards_meet or plan.dist.reduce_each or watched
        feed = Feed(source, self.fitter.size.accumulation, context.all_ranks, in_step)
        options = LoopOptions(
            epochs=plan.duration.epochs,
            max_grad_norm=plan.stability.max_grad_norm,
            guard=plan.stability.nonfinite != "raise",
            restart_epoch=plan.data.restart_epoch,
            explain=partial(find_nonfinite_samples, data_ranks=context.session.data_ranks),
        )
        return Loop(self.executor, feed, context.events, self.ledger, self.seed_step, options)

    def use_size(self, size: UpdateSize) -> None:
        """Show the sizes of an update and its micro-batches to callbacks and to the accelerator."""
        accelerator = self.context.services.accelerator
        processes = size.ranks if accelerator.split_batches else 1
        self._events.state.train_batch_size = size.micro * processes
        accelerator.gradient_accumulation_steps = size.accumulation

    def _list_parts(self) -> list[SavedPart]:
        """The parts of a checkpoint, in the order in which they are restored: random generators last."""
        own, context = self.executor.strategy.own, self.context
        all_ranks, state = context.all_ranks, self._events.state
        return [
            SavedPart("best", self.checkpoints.best, optional=True),
            SavedPart("schedule", self.schedule),
            SavedPart("executor", self.executor),
            RankPart("position", Position(self.loop), rolls_back=False),  # before "loop", which takes it over
            SavedPart("loop", self.loop, rolls_back=False),
            SavedPart("due_work", self.pending, rolls_back=False, optional=True, earlier="unfinished"),
            RankPart("ledger", self.ledger, adopt=partial(_merge_ledgers, self.ledger, all_ranks)),
            *self.reports.parts(),
            RankPart("buffers", own, adopt=own.adopt),
            *(
                RankPart(
                    f"registered-{number}",
                    owner,
                    optional=True,
                    adopt=partial(_take_over, owner, all_ranks),
                    fits=getattr(owner, "is_divided_as", None),
                )
                for number, owner in enumerate(context.services.accelerator.registered_objects)
            ),
            RankPart("rng", Generators(context.session.device), adopt=partial(_reseed, self.seed_step, state)),
        ]  # fmt: skip

    # --- what a signal asks of it -----------------------------------------------------------------------------------

    @property
    def waits_for_data(self) -> bool:
        return self.loop.waits_for_data or self.pending.waits_for_data

    @property
    def newest_checkpoint(self) -> Path | None:
        return self.checkpoints.newest

    @property
    def was_interrupted(self) -> bool:
        """True if the user ended the run before its last update."""
        return self.context.interruption.epoch_goes_on

    def end_waits(self) -> None:
        with run_clock().within(UPLOAD):
            end_waits(self._events.handler)

    def stop(self) -> None:
        """End the run with this update, and save."""
        self._events.control.should_training_stop = True
        self.context.interruption.stop()

    # --- saving and ending ------------------------------------------------------------------------------------------

    def trained(self) -> dict[str, float]:
        """Seconds and samples of all calls of `train()` up to now, since the step `from_step`."""
        counts = self.reports.counts
        return {**counts, "seconds": counts["seconds"] + time.monotonic() - self.reports.began}

    def save_checkpoint(self, script: SavedByScript, wait: bool) -> None:
        """Save the run; the default of `_save_checkpoint`. After training, wait until the checkpoint is committed, and
        unlock the folder. Collective.
        """
        try:
            with self.executor.averaged():
                loss = self.context.services.loss.facts()
                self.checkpoints.save({"loss": loss, "trained": self.trained(), **self._ranks}, script)
            if wait:
                self.checkpoints.finish()  # no later update does, and the process may end
        finally:
            if wait:
                self.opener.folder.release(None)

    def broke_off(self, error: BaseException) -> None:
        """Give up the save under way, unless Ctrl-C ended the run, and record how it ended."""
        if isinstance(error, Exception):
            note_failure()
        # After Ctrl-C the user waits for nothing: the thread of the save goes on beside what the script does next.
        if isinstance(error, Exception | SystemExit):
            self.checkpoints.abandon()
        self.reports.end(status_of(error), self.trained(), error)
        self._events.write_reports()

    def release(self) -> None:
        """Release the executor after the run. If it did not come to its end, its process does not wait for uploads."""
        self.end_waits()
        self.executor.release()
        self.reports.close()


class PendingEvaluation:
    """The evaluation of a run. Its state is a part of checkpoints: if a run was ended in an evaluation, the resumed run
    evaluates first.

    Attributes:
        waits_for_data: it waits for its next batch.
        left: it was abandoned.
        save_left: a save was due after it.
    """

    waits_for_data = left = save_left = False

    def state_dict(self) -> State:
        return {"save": self.save_left} if self.left else {}

    def load_state_dict(self, state: State) -> None:
        self.left, self.save_left = bool(state), bool(state.get("save"))


class Position:
    """The position of this rank in its data; ranks with loaders of their own are at different positions."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def state_dict(self) -> State:
        return self._loop.position

    def load_state_dict(self, state: State) -> None:
        self._loop.continue_from(state)


# How parts of a checkpoint take the states of other ranks, of which there may have been more or fewer.


def _merge_ledgers(ledger: Ledger, all_ranks: Gang, states: list[State]) -> None:
    ledger.load_state_dict(merged_ledger(states, mine=all_ranks.rank == 0))


def _take_over(owner: Stateful, all_ranks: Gang, states: list[State]) -> None:
    adopt: Callable[[list[State]], None] | None = getattr(owner, "adopt", None)
    if adopt is not None:
        adopt(states)
        return
    logger.warning(
        "%d process(es) saved a state of a registered object, this run has %d, or another layout of them: each takes "
        "that of its rank, further ones that of rank 0", len(states), all_ranks.size
    )  # fmt: skip
    load_in_place(owner, states[all_ranks.rank if all_ranks.rank < len(states) else 0])


def _reseed(seed_step: StepSeeder, state: TrainerState, states: list[State]) -> None:
    seed_step.start(state.global_step)
