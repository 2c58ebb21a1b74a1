"""The checkpoints of one run: saving, restoring and rolling back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint.adapters import BASE_STATE
from windlass.checkpoint.content import Content
from windlass.checkpoint.foreign import format_of
from windlass.checkpoint.manager import Checkpoint, costs_one_save
from windlass.checkpoint.optimizer_state import save_optimizer_state, split_optimizer_state
from windlass.checkpoint.sharded import parts_of_rank
from windlass.checkpoint.store import SaveDropped, is_checkpoint
from windlass.checkpoint.weights import weights_bytes
from windlass.config.plan import SavePlan
from windlass.core.errors import CheckpointError, NonFiniteError
from windlass.core.events import TrainerState
from windlass.core.logs import get_job_logger, showing_place
from windlass.core.threads import thread_count, warn_of_other_threads
from windlass.core.types import State
from windlass.trainer.best_tracker import BestTracker
from windlass.trainer.model_writer import ModelWriter
from windlass.trainer.resuming import CheckpointSource, saved_state
from windlass.trainer.run_events import Events
from windlass.trainer.run_folder import RunFolder
from windlass.trainer.run_saver import RunSaver
from windlass.trainer.saved_parts import SavedParts
from windlass.trainer.session import Session

logger = get_job_logger(__name__)
_MAX_ROLLBACKS = 3  # to the same checkpoint

WriteModel = Callable[[Path, Mapping[str, Any] | None], None]


class Checkpointer:
    """Saves a run, restores it and rolls it back, by one list of parts.

    Attributes:
        newest: the last complete checkpoint of this run, or the one it was resumed from until it has saved one.
        ephemeral: the clock requested the checkpoint that is being saved, in case the run is interrupted.

    Args:
        parts: returns what a checkpoint holds besides weights, optimizer and history.
        describe: returns entries of the manifest besides metrics.
        write_model: a script's own function to write the model into a folder, from gathered weights or None; None: the
            default, which needs nothing of the live model.
    """

    def __init__(
        self,
        session: Session,
        events: Events,
        plan: SavePlan,
        folder: RunFolder,
        source: CheckpointSource,
        files: ModelWriter,
        optimizer: torch.optim.Optimizer,
        best: BestTracker,
        parts: Callable[[], SavedParts],
        saver: RunSaver,
        describe: Callable[[], dict[str, Any]],
        write_model: WriteModel | None,
    ) -> None:
        self._session, self._gang, self._events, self._plan = session, session.gang, events, plan
        self._folder, self._source, self._files, self._optimizer = folder, source, files, optimizer
        self._best, self._parts, self._saver = best, parts, saver
        self._describe, self._write_model = describe, write_model
        self._fingerprint: dict[str, list[Any]] | None = None
        self.newest: Path | None = None
        self.ephemeral = False
        self._rollbacks = 0  # since `newest` was saved

    # --- saving -----------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save the run. Training continues while the checkpoint is written; `on_save` is called once it is committed
        (see `RunSaver`). Collective.
        """
        self.finish()
        state = self._events.state
        step, previous_best = state.global_step, self._best.begin_save()
        content = self._agreed_content(step)
        ended = partial(self._ended, replace(state, log_history=list(state.log_history)), previous_best)
        if content is None:
            ended(None)
            return
        meta = {
            "windlass": "checkpoint",
            "epoch": state.epoch,
            **self._describe(),
            "metric": self._best.metric_at(step),
            "best_metric": None if state.best_metric is None else float(state.best_metric),
            "ephemeral": self.ephemeral,
            **thread_count(),
        }
        self._saver.save(step, content, meta=meta, protected=self._best.checkpoints(), ended=ended)

    def _ended(self, as_saved: TrainerState, previous_best: str | None, folder: Path | None) -> None:
        """Called once a save commits, or with a folder of None once it fails."""
        if folder is None:
            self._best.failed(as_saved, previous_best)
        else:
            self.newest, self._rollbacks = folder, 0
        self._saver.note_end(as_saved.global_step, folder, self.newest)
        if folder is None:
            return
        self._best.committed(as_saved)
        asked = self._events.control.should_save
        self._events.fire("on_save", as_saved)
        self._events.control.should_save |= asked  # a request made since then is for another save

    def finish(self) -> None:
        """Wait until the save under way is committed or has failed. Collective."""
        self._saver.finish()

    def finish_last(self, pauses: Iterable[float], save_again: Callable[[], None]) -> None:
        """Wait for the save under way. If it failed, save again after each of these pauses (seconds) until a save is
        committed. Collective.
        """
        self.finish()
        retry = self._saver.retry
        for pause in pauses:
            if not retry.owes_ordinary:
                return
            logger.warning("the last save of the run failed; trying again in %g s", pause)
            time.sleep(pause)
            retry.begin(self._events.state.global_step, due=False, ordinary=True)
            save_again()
            self.finish()

    def check_last(self) -> None:
        """Raise CheckpointError if the last save of the run failed."""
        retry = self._saver.retry
        if retry.owes_ordinary:
            newest = self.newest or "none of this run"
            raise CheckpointError(
                f"training ended at step {self._events.state.global_step}, but its last save failed: {retry.reason}. "
                f"Last whole checkpoint: {newest}. While this process lives, trainer.save_model(FOLDER) writes the "
                "model elsewhere; or repair the output folder and run again with resume_from_checkpoint=True"
            )

    def abandon(self) -> None:
        """Called if the run ends in an error. The save under way may still commit; if it fails, that is not raised."""
        with contextlib.suppress(Exception):
            self._saver.leave()
        self._saver.release()  # code that handles the error may keep the Trainer

    # --- what is saved ----------------------------------------------------------------------------------------------

    def _agreed_content(self, step: int) -> Content | None:
        """This rank's content of a checkpoint; None if a disk that it needs was full. Collective: if a rank has
        something that cannot be saved, all ranks raise CheckpointError.
        """
        manager = self._saver.manager
        content, error = None, None
        # A part that fails to return its state must not leave other ranks waiting, neither in the exchange below nor in
        # a gathering of tensors: `_content` does what is collective first.
        try:
            if manager.store.is_writer:
                self._folder.confirm()
            content = self._content(manager.store.is_writer).encoded()
        except BaseException as raised:
            error = raised
        # Small files are first written into the system's temporary folder, which may be full.
        only_this_save = isinstance(error, Exception) and costs_one_save(error)
        everywhere = self._gang.gather_objects(None if error is None else [only_this_save, f"{error}"])
        if error is not None and not only_this_save:
            raise error
        failed = [(rank, *failure) for rank, failure in enumerate(everywhere) if failure is not None]
        for rank, costs_one, reason in failed:
            if not costs_one:
                raise CheckpointError(
                    f"checkpoint {step} was dropped: rank {rank} has nothing to save: {reason}"
                )
        if failed:
            manager.warn(step, error if isinstance(error, Exception) else SaveDropped(failed[0][2]))
            return None
        return content

    def _content(self, is_writer: bool) -> Content:
        """This rank's content of a checkpoint, with the live tensors; a writer has what is saved once. Collective."""
        files, whole = self._files, not self._plan.model_only
        shared, spread = self._tensor_states()
        gathered = {} if "model" in spread else files.gathered()
        fingerprint = self._base_fingerprint(is_writer)
        shared |= self._parts().shared() if whole else {}
        members = self._folder.disks.members
        own = Content(
            per_rank=self._parts().of_rank() if whole else {},
            parts=[
                parts_of_rank(stem, tensors, self._gang.world, members) for stem, tensors in spread.items()
            ],
        )
        weights = files.of_first_rank(self._folder.disks.nodes) if gathered is None else gathered
        state = self._events.saved_state()
        if not is_writer:
            return own
        history = self._saver.history.plan(state)
        shared |= history.states
        if files.adapter is not None:
            shared[BASE_STATE] = files.adapter.base_state(fingerprint, weights)
        own = replace(own, shared=shared, history=history)
        target = self._saver.manager.store.path_for(self._events.state.global_step)
        write = self._write_model
        if write is None and files.saves_own_way and "model" not in spread:
            write = files.write
        if write is not None:
            write_model = partial(_write_for, write, target, gathered)
            return replace(own, write_model=write_model, other_bytes=weights_bytes(weights))
        name, tensors = files.named(weights)
        return replace(
            own,
            weights={name: tensors} if tensors else {},
            layout=files.layout,
            files=files.small_files(target),
        )

    def _tensor_states(self) -> tuple[dict[str, Any], dict[str, Mapping[str, Any]]]:
        """Return the optimizer's state for the main process to write, and the tensors of which every rank writes its
        part (none if whole tensors are saved). Collective.
        """
        files = self._files
        in_parts = files.strategy.saves_parts
        spread: dict[str, Mapping[str, Any]] = {}
        if in_parts and files.adapter is None:
            spread["model"] = files.of_first_rank(self._folder.disks.nodes)
        if self._plan.model_only:
            return {}, spread
        if not in_parts:
            return {"optimizer": save_optimizer_state(self._optimizer, files.model)}, {}
        state, spread["optimizer"] = split_optimizer_state(self._optimizer, files.model)
        return {"optimizer": state}, spread

    def _base_fingerprint(self, is_writer: bool) -> dict[str, list[Any]]:
        """The fingerprint of the weights that an adapter is trained on, computed once per run. Collective if ranks hold
        parts.
        """
        adapter = self._files.adapter
        if adapter is None or not (is_writer or self._files.strategy.sharded):
            return {}
        if self._fingerprint is None:
            self._fingerprint = adapter.fingerprint()
        return self._fingerprint

    # --- going back -------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: Checkpoint, restore_callback_args: bool) -> None:
        """Continue from a checkpoint whose weights are in the model; raise CheckpointError if a part does not fit."""
        if not checkpoint.has("optimizer"):
            raise CheckpointError(
                f"{checkpoint.folder} holds only the model (it was saved with save_only_model=True), so a run can't "
                "continue from it. Start a new run from its weights: load them into the model and call train()"
            )
        self._restore(checkpoint, restore_callback_args, rolling_back=False)
        warn_of_other_threads(checkpoint.meta, self._session.device.type, checkpoint.folder)
        self.newest, self._rollbacks = checkpoint.folder, 0
        logger.info("continuing from %s at step %d", checkpoint.folder, checkpoint.step)

    def _restore(self, checkpoint: Checkpoint, restore_callback_args: bool, rolling_back: bool) -> None:
        if checkpoint.world_size != self._gang.size:
            logger.warning(
                "%s was saved by %d process(es), this run has %d: the order of samples is unchanged, but the bits of "
                "dropout and of sums over ranks differ", checkpoint.folder, checkpoint.world_size, self._gang.size
            )  # fmt: skip
        self._events.adopt(saved_state(checkpoint))
        self._saver.history.resume(checkpoint, self._events.state.log_history)
        self.find_best(checkpoint)
        checkpoint.load_optimizer(self._optimizer, self._files.model)
        self._events.restore_callbacks(restore_callback_args)
        self._parts().load(checkpoint, rolling_back=rolling_back)

    def find_best(self, checkpoint: Checkpoint) -> None:
        """Find the best checkpoint, whose folder may have been moved; raise CheckpointError if it is gone and the run
        needs it at its end.
        """
        self._best.resume(checkpoint.step, checkpoint.meta.get("metric"))
        noted = self._events.state.best_model_checkpoint
        if noted is None:
            return
        name = Path(noted).name
        places = [self._folder.path / name, checkpoint.folder.parent / name]
        # A relative path was relative to another working directory, maybe.
        places.insert(0 if Path(noted).is_absolute() else 2, Path(noted))
        store = self._saver.manager.store
        found = next((place for place in places if store.is_committed(place) or format_of(place)), None)
        if found is not None:
            self._best.moved(found)
        elif self._plan.load_best_at_end:
            raise CheckpointError(
                f"the best checkpoint so far ({noted}) is gone, and load_best_model_at_end=True needs it: put it into "
                f"{self._folder.path}, or resume with load_best_model_at_end=False"
            )

    def load_best_model(self) -> None:
        """Load the best checkpoint's weights into the model, verified."""
        best = self._events.state.best_model_checkpoint
        if best is None:
            logger.warning(
                "load_best_model_at_end: no evaluation found a best model; keeping the last weights"
            )
            return
        checkpoint = self._source.open(best)
        checkpoint.load_weights(self._files.model)
        logger.info("loaded the best model, of step %d: %s", checkpoint.step, checkpoint.folder)

    def roll_back(self, what: str, position: State) -> dict[str, Any]:
        """Restore everything but the position in the data from the run's newest checkpoint. Collective.

        The data between that checkpoint and the refused update, which led to the non-finite values, is skipped. Updates
        made from it are undone, with their logs.

        Args:
            what: a description of where the non-finite values appeared.
            position: the present position in the data.

        Returns:
            A row for the log.

        Raises:
            NonFiniteError: this run has no checkpoint yet, or rolling back to it several times has not helped.
        """
        self.finish()  # the save under way is newer than what is committed
        refused = self._events.state.global_step
        if self.newest is None:
            raise NonFiniteError(
                f"{what}, and this run has saved no checkpoint yet to roll back to; save more often"
            )
        if self._rollbacks >= _MAX_ROLLBACKS:
            raise NonFiniteError(
                f"{what}, again: rolling back to {self.newest.name} {_MAX_ROLLBACKS} times has not helped"
            )
        exists = self._gang.vote(is_checkpoint(self.newest))
        # A limit that keeps only the best may have removed the newest.
        checkpoint = self._source.open(str(self.newest) if exists else True)
        checkpoint.load_weights(self._files.model)
        self._restore(checkpoint, restore_callback_args=False, rolling_back=True)
        self._events.roll_back_metrics_log()
        self._rollbacks += 1
        event: dict[str, Any] = {
            "rolled_back_from": refused,
            "rolled_back_to": checkpoint.step,
            "updates_undone": refused - checkpoint.step - 1,
        }
        skipped = samples_between(checkpoint.shared("loop")["position"], position)
        if skipped is not None:
            event["samples_left_out"] = skipped
        logger.warning(
            "%s; rolled back to step %d, undid %d updates and skipped their data%s", what, checkpoint.step,
            event["updates_undone"], "" if skipped is None else f" ({skipped} samples)",
        )  # fmt: skip
        return {**event, "reason": what}


def _write_for(write: WriteModel, target: Path, gathered: Mapping[str, Any] | None, folder: Path) -> None:
    """Write a model into the folder that becomes `target`, which what transformers logs names."""
    with showing_place("transformers", folder, target):
        write(folder, gathered)


def samples_between(start: State, end: State) -> int | None:
    """Samples over all ranks between two positions of a loader; None if positions are not counted in samples."""
    if not {"epoch", "consumed"} <= start.keys() & end.keys() or start.get("unit", "samples") != "samples":
        return None
    passes = end["epoch"] - start["epoch"]
    if passes and start.get("length") is None:
        return None
    return int(end["consumed"] - start["consumed"] + passes * (start.get("length") or 0))
