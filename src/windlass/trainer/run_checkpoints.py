"""Saving a run: what is in a checkpoint, when a failed save is tried again, and what follows a commit."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from windlass.accelerator.saved_parts import ModelState, SavedPart, saved_optimizer, states_of
from windlass.checkpoint.adapters import ADAPTER_WEIGHTS, BASE_STATE
from windlass.checkpoint.background import Saver
from windlass.checkpoint.content import Content
from windlass.checkpoint.history import HistoryKeeper
from windlass.checkpoint.host_memory import HostMemory
from windlass.checkpoint.manager import costs_one_save
from windlass.checkpoint.script_files import ScriptFiles
from windlass.checkpoint.sharded import parts_of_rank
from windlass.checkpoint.split import SPLIT_INDEX_NAME
from windlass.checkpoint.store import SaveDropped, Store
from windlass.checkpoint.weights import WEIGHTS_NAME, weights_bytes
from windlass.core.errors import CheckpointError
from windlass.core.events import TrainerState
from windlass.core.job_signals import handled_later
from windlass.core.logs import get_job_logger, showing_place
from windlass.core.run_clock import CALLBACKS, SAVE, run_clock
from windlass.core.threads import THREADS
from windlass.core.whole_file import write_whole
from windlass.dist.ending import leaves_others
from windlass.trainer.best_tracker import Best, BestTracker
from windlass.trainer.model_writer import ModelWriter, SavedByScript, WriteModel
from windlass.trainer.resuming import CheckpointSource
from windlass.trainer.run_context import RunContext

logger = get_job_logger(__name__)
# Seconds before a further attempt: doubled after each that fails. Most errors of network storage pass in this time.
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 600.0
# Seconds before each further attempt at the last save of a run, and of a run that was preempted.
LAST_PAUSES = (2.0, 5.0, 15.0, 30.0, 60.0)
LEAVING_PAUSES = (1.0, 3.0)
# Scripts write the state of the run, too. A checkpoint has it with what a resume needs, so that one stays.
_STATE = "trainer_state.json"
# The files with the weights, of which a checkpoint has one. Where a script's own way to save writes none, it is added:
# a resume needs the weights.
_WEIGHTS = {WEIGHTS_NAME, SPLIT_INDEX_NAME, ADAPTER_WEIGHTS}


class RunCheckpoints:
    """Saves a run.

    Attributes:
        saver: writes the checkpoints.
        best: the best evaluations, and their checkpoints.
        history: what of `log_history` is saved; on the writer rank of the folder.
        parts: the states besides weights, optimizer and history, in the order in which they are restored.
        update_size: the sizes of an update and its micro-batches, as the manifest has them.
        newest: the last complete checkpoint of this run, or the one it was resumed from until it has saved one.
        rollbacks: rollbacks since `newest` was saved.
        due_at: `time.monotonic()` at which the clock requests a checkpoint, an ephemeral one or one to replace a
            failed one; infinite if it requests none.
        tried_at: the step of the last save that was tried; None before the first.
        ephemeral: the clock requested the checkpoint that is being saved, in case the run is interrupted.

    Args:
        opener: of the run's folder.
    """

    def __init__(self, context: RunContext, opener: CheckpointSource) -> None:
        plan, device = context.plan.save, context.session.device
        self._context, self._all_ranks = context, context.all_ranks
        self._events, self._plan = context.events, plan
        self._folder = opener.folder
        memory = HostMemory(device, plan.host_memory)
        self.saver = Saver(opener.manager, context.all_ranks, memory, exchanges=True)
        self.best = BestTracker(plan, context.events, opener.manager.store.path_for)
        self.history = HistoryKeeper()
        self.parts: Sequence[SavedPart] = ()
        self.update_size = context.plan.batch.to_dict()
        self._retry = SaveRetry(plan.max_failures)
        self._saved_at = time.monotonic()
        self._set_clock()
        self.newest: Path | None = None
        self.rollbacks = 0
        self.ephemeral = False
        self.tried_at: int | None = None
        self._script_files: ScriptFiles | None = None

    # --- when to save -----------------------------------------------------------------------------------------------

    def _set_clock(self) -> None:
        every = self._plan.every
        self.due_at = math.inf if every is None else self._saved_at + every
        if self._retry.reason is not None:
            self.due_at = self._retry.retry_at

    def begin_attempt(self, planned: bool, due: bool) -> None:
        """Called before a save between two updates.

        Args:
            planned: not the clock alone requests it.
            due: the main process's clock reported that it is due.
        """
        self.ephemeral = not (planned or self._retry.owes_ordinary)
        self._retry.begin(self._events.state.global_step, due, ordinary=not self.ephemeral)

    # --- saving -----------------------------------------------------------------------------------------------------

    def save(self, described: Mapping[str, Any], script: SavedByScript) -> None:
        """Save the run. Training continues while the checkpoint is written; `on_save` is called once it is committed.
        Collective. `described` are further entries of the manifest.
        """
        self.finish()
        state, best = self._events.state, self.best
        step, previous_best = state.global_step, best.begin_save()
        self.tried_at = step
        content = self._content_on_all_ranks(step, script)
        # Training goes on until the commit, and `on_save` has to get the state of the saved step.
        as_saved = copy.copy(state)
        as_saved.log_history = list(state.log_history)
        ended = partial(self._ended, as_saved, previous_best, script.committed)
        if content is None:
            ended(None)
            return
        meta = {
            "windlass": "checkpoint",
            "epoch": state.epoch,
            "update_size": self.update_size,
            **described,
            "metric": best.metric_at(step),
            "best_metric": None if state.best_metric is None else float(state.best_metric),
            "ephemeral": self.ephemeral,
            THREADS: torch.get_num_threads(),
        }
        # From the beginning of the save: a slow disk does not make saves rarer.
        self._saved_at = time.monotonic()
        self._set_clock()
        # A script's own way to save reads the live model.
        may_wait = self._plan.background and self._all_ranks.vote(
            script.may_wait and content.write_model is None
        )
        self.saver.save(
            step, content, meta=meta, background=may_wait, ended=ended, protected=best.checkpoints()
        )

    def _content_on_all_ranks(self, step: int, script: SavedByScript) -> Content | None:
        """This rank's content of a checkpoint; None if a disk that it needs was full. Collective: if a rank has
        something that cannot be saved, all ranks raise CheckpointError.
        """
        manager = self.saver.manager
        content, error = None, None
        # A part that fails to return its state must not leave other ranks waiting in the exchange below.
        try:
            # Nor one that gets Ctrl-C between two exchanges of sharded weights.
            with handled_later() if self._all_ranks.size > 1 else contextlib.nullcontext():
                content = self._content(manager.store, script).encoded()
            if manager.store.is_writer:
                # Within training the folder must still be this run's; a save after it takes the lock again. Only now:
                # other ranks may have waited for this one in the exchanges of the lines above.
                self._folder.confirm()
        except BaseException as raised:
            error = raised
            if self._script_files is not None:
                self._script_files.clear()
            if leaves_others(raised):
                raise  # the others may be in an exchange of their content
        # Small files are first written into the system's temporary folder, which may be full.
        only_this_save = isinstance(error, Exception) and costs_one_save(error)
        failure = None if error is None else [only_this_save, f"{error}" or type(error).__name__]
        everywhere = self._all_ranks.gather_objects(failure)
        if error is not None and not only_this_save:
            raise error
        failed = [(rank, *its) for rank, its in enumerate(everywhere) if its is not None]
        for rank, costs_one, reason in failed:
            if not costs_one:
                raise CheckpointError(
                    f"checkpoint {step} was dropped: rank {rank} has nothing to save: {reason}"
                )
        if failed:
            manager.warn(step, error if isinstance(error, Exception) else SaveDropped(failed[0][2]))
            return None
        return content

    def _ended(
        self,
        as_saved: TrainerState,
        previous_best: Best,
        committed: Callable[[Path], None],
        folder: Path | None,
    ) -> None:
        """Called once a save commits, or with a folder of None once it fails."""
        if self._script_files is not None:
            self._script_files.clear()
        if folder is None:
            self.best.failed(as_saved.global_step, previous_best)
            self._retry.failed(as_saved.global_step, str(self.saver.manager.last_failure), self.newest)
            self._set_clock()
            return
        self.newest, self.rollbacks = folder, 0
        self.history.saved(folder)
        self._retry.succeeded()
        self._set_clock()
        self.best.committed()
        asked = self._events.control.should_save
        self._events.fire("on_save", as_saved)
        self._events.control.should_save |= asked  # a request made since then is for another save
        with run_clock().within(CALLBACKS):
            committed(folder)

    def finish(self) -> None:
        """Wait until the save under way, if there is one, is committed or has failed. Collective."""
        if self.saver.busy:
            with run_clock().within(SAVE):
                self.saver.finish()

    def finish_last(self, save_again: Callable[[], None], leaving: bool = False) -> None:
        """Wait for the save under way. If it failed, save again after pauses until a save is committed. The pauses are
        shorter if the process is `leaving` because it was preempted. Collective.
        """
        self.finish()
        for pause in LEAVING_PAUSES if leaving else LAST_PAUSES:
            if not self._retry.owes_ordinary:
                return
            logger.warning("the last save of the run failed; trying again in %g s", pause)
            with run_clock().within(SAVE):
                time.sleep(pause)
            self._retry.begin(self._events.state.global_step, due=False, ordinary=True)
            save_again()
            self.finish()

    def check_last(self) -> None:
        """Raise CheckpointError if the last save of the run failed."""
        if self._retry.owes_ordinary:
            newest = self.newest or "none of this run"
            raise CheckpointError(
                f"training ended at step {self._events.state.global_step}, but its last save failed: "
                f"{self._retry.reason}. Last whole checkpoint: {newest}. While this process lives, "
                "trainer.save_model(FOLDER) writes the model elsewhere; or repair the output folder and run again with "
                "resume_from_checkpoint=True"
            )

    def abandon(self) -> None:
        """Called if the run ends in an error. The save under way may still commit; if it fails, that is not raised."""
        with contextlib.suppress(Exception):
            if self._all_ranks.size == 1:
                self.finish()
            else:
                self.saver.leave()  # other ranks may be anywhere
        self.saver.memory.free()  # code that handles the error may keep the Trainer

    # --- what is saved ----------------------------------------------------------------------------------------------

    def _content(self, store: Store, script: SavedByScript) -> Content:
        """This rank's content of a checkpoint of the present step, with the live tensors; the writer rank of the folder
        has what is saved once. Collective.
        """
        files, disks = self._context.files, store.disks
        model = files.saved.content(disks, store.is_writer)
        shared: dict[str, Any] = {}
        spread: dict[str, Mapping[str, Any]] = {"model": model.state} if model.in_parts else {}
        if not self._plan.model_only:
            optimizer, in_parts = self._context.built.executor.optimizer, files.strategy.saves_parts
            shared["optimizer"], divided = saved_optimizer(
                optimizer, files.model, in_parts, [part.owner for part in self.parts]
            )
            spread |= {"optimizer": divided} if in_parts else {}
        state = self._events.saved_state()  # whose averages of sharded weights are gathered
        by_script = self._by_save_model(store, script)
        # Nothing below is collective: a part that fails to return its state must not leave other ranks waiting.
        of_run, of_rank = states_of(() if self._plan.model_only else self.parts)
        own = Content(
            per_rank=of_rank,
            parts=[parts_of_rank(*item, self._all_ranks, disks.members) for item in spread.items()],
        )
        if not store.is_writer:
            return own
        history = self.history.plan(state)
        shared |= of_run
        shared |= history.states
        if model.adapter is not None:
            shared[BASE_STATE] = model.adapter.base_state(model.fingerprint, model.state)
        own = replace(own, shared=shared, history=history)
        target = store.path_for(self._events.state.global_step)
        if by_script is None:
            return self._with_model(own, model, script, target)
        return self._with_script_files(own, by_script, model, script, target)

    def _by_save_model(self, store: Store, script: SavedByScript) -> ScriptFiles | None:
        """What a script's own `save_model` writes for a checkpoint of the present step; None if it has none."""
        if script.save_model is None:
            return None
        step = self._events.state.global_step
        save_model, self._script_files = script.save_model, ScriptFiles(store, step)

        def write(folder: Path) -> None:
            try:
                with showing_place("transformers", folder, store.path_for(step)):
                    save_model(folder)
            except CheckpointError as error:
                # On all ranks: the disk refused the model of one of them, which costs this save.
                raise SaveDropped(str(error)) from error

        self._script_files.write_by(write)
        self._script_files.leave_out(_STATE)
        return self._script_files

    def _with_script_files(
        self, own: Content, by_script: ScriptFiles, model: ModelState, script: SavedByScript, target: Path
    ) -> Content:
        """Add what the script's `save_model` wrote, and the weights if it wrote none."""
        names = by_script.names()
        if script.write_model is not None or names & _WEIGHTS:
            return replace(own, write_model=by_script.move_into)
        whole = self._with_model(own, model, script, target)
        by_model = whole.write_model

        def write(folder: Path) -> None:
            if by_model is not None:
                by_model(folder)
            by_script.move_into(folder)

        files = {name: data for name, data in whole.files.items() if name not in names}
        return replace(whole, files=files, write_model=write)

    def _with_model(self, own: Content, model: ModelState, script: SavedByScript, target: Path) -> Content:
        """Add the weights that are not saved in parts, and the small files of the model."""
        files, write = self._context.files, script.write_model
        weights = {} if model.in_parts else model.state
        if write is None and files.saves_own_way and not model.in_parts:
            write = partial(files.write, beside=script.beside)
        if write is not None:
            gathered = weights if model.in_parts or model.gathered else None
            write_model = partial(_write_for, write, target, gathered, files)
            return replace(own, write_model=write_model, other_bytes=weights_bytes(weights))
        name, tensors = files.named(weights)
        return replace(
            own,
            weights={name: tensors} if tensors else {},
            layout=files.layout,
            files=files.small_files(target, script.beside),
        )


def _write_for(
    write: WriteModel, target: Path, gathered: Mapping[str, Any] | None, files: ModelWriter, folder: Path
) -> None:
    """Write a model into the folder that becomes `target`, which what transformers logs names."""
    own = folder / _STATE
    state = own.read_bytes()
    with showing_place("transformers", folder, target):
        write(folder, gathered)
    if not any((folder / name).is_file() for name in _WEIGHTS):
        files.write_weights(folder, gathered)
    if own.read_bytes() != state:
        write_whole(own, state)


class SaveRetry:
    """Counts failed saves. All ranks make the same calls, so they count alike; only the main process's clock decides
    that a pause is over, which the others learn with the counts of their batches.

    Args:
        limit: consecutive failures at which the run ends; None: never. Those within the pause after a failure do not
            count: a run that saves every second does not end because of a minute without its disk.

    Attributes:
        reason: why the last save failed; None if it did not.
        retry_at: `time.monotonic()` at which the pause after a failed save is over.
        owes_ordinary: a save of the run's plan failed and none has succeeded since: the next one replaces it.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.reason: str | None = None
        self.owes_ordinary = False
        self._failures, self._counted_at, self._counts = 0, -1, True
        self._since = self.retry_at = 0.0
        self._is_ordinary = True

    def begin(self, step: int, due: bool, ordinary: bool) -> None:
        """Called before an attempt.

        Args:
            due: the main process's clock reported that a pause is over.
            ordinary: the checkpoint is one of the run's plan.
        """
        # What was sent before the last failure was known may still report the end of its pause.
        self._counts = self.reason is None or (due and step > self._counted_at + 1)
        self._is_ordinary = ordinary

    def succeeded(self) -> None:
        if self.reason is not None:
            logger.warning("saving works again, after %d failed saves", self._failures)
        self.reason, self._failures, self.owes_ordinary = None, 0, False
        self._counts = self._is_ordinary = True

    def failed(self, step: int, reason: str, newest: object) -> None:
        """Called after an attempt that failed; raise CheckpointError, which names the newest checkpoint, if too many
        have.
        """
        now = time.monotonic()
        if self.reason is None:
            self._since = now
        self.reason = reason
        self.owes_ordinary |= self._is_ordinary
        self._is_ordinary = True  # saves that a script starts itself do not call `begin`
        if not self._counts:
            return
        self._failures, self._counted_at, self._counts = self._failures + 1, step, False
        if self._limit is not None and self._failures >= self._limit:
            raise CheckpointError(
                f"training ends at step {step}: saving failed {self._failures} times in a row "
                f"(max_save_failures={self._limit}) in {now - self._since:.0f} s, the last time because of: {reason}. "
                f"Last whole checkpoint: {newest or 'none of this run'}. Repair the output folder and resume from there"
            )
        pause = min(FIRST_PAUSE * 2.0 ** (self._failures - 1), LONGEST_PAUSE)
        self.retry_at = now + pause
        logger.warning("retrying the save in %.0f s, or earlier if a save is due by then", pause)
