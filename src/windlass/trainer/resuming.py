"""Resuming: what a checkpoint holds goes back to where it came from."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from torch import nn

from windlass.assemble.batch import UpdateSize
from windlass.assemble.facts import Progress
from windlass.checkpoint import strict_json
from windlass.checkpoint.folders import load_folder
from windlass.checkpoint.foreign import ForeignCheckpoint, checked_state, is_foreign
from windlass.checkpoint.history import complete_state
from windlass.checkpoint.manager import Checkpoint, CheckpointManager
from windlass.checkpoint.meeting import choose_on_all
from windlass.checkpoint.opening import store_of_checkpoint
from windlass.core.errors import CheckpointError, ConfigError, Problem, WindlassError
from windlass.core.events import TrainerState
from windlass.core.locations import is_url
from windlass.core.logs import get_job_logger
from windlass.core.rng import load_rng_state
from windlass.core.threads import warn_of_other_threads
from windlass.core.types import State
from windlass.data.group import GroupSource
from windlass.engine.splitting import Kind
from windlass.trainer.continuing import ContinuingMixin
from windlass.transforms.strategy import load_own_state

logger = get_job_logger(__name__)

# Arguments in which a resumed run may differ from the checkpoint's without a word.
_FREE_TO_DIFFER = frozenset(
    {"output_dir", "resume_from_checkpoint", "disable_tqdm", "log_level", "log_level_replica"}
)


class ResumingMixin(ContinuingMixin):
    """Choosing a checkpoint, and going on from it."""

    def _resume_point(self, resume_from_checkpoint: str | bool | None) -> Checkpoint | None:
        """The verified checkpoint to continue from, None for a fresh run."""
        self._opened = self._fingerprint = None
        if resume_from_checkpoint is None or resume_from_checkpoint is False:
            return None
        if not isinstance(resume_from_checkpoint, (bool, str, os.PathLike)):
            fix = (
                "give True (the newest checkpoint that verifies), 'auto' (that, or a fresh start where there is "
                "none) or the path of a checkpoint"
            )
            raise ConfigError(Problem("resume_from_checkpoint", resume_from_checkpoint, fix))
        which: Literal[True] | str = True
        if not isinstance(resume_from_checkpoint, bool):
            which = os.fspath(resume_from_checkpoint)
            which = which if which == "auto" else self.args.resolve_path(which)
        if which == "auto":
            which = True
            if self._is_fresh():
                logger.info("resume_from_checkpoint='auto': %s holds no checkpoint", self.output_folder)
                return None
        self._opened = self._open_checkpoint(which)
        return self._opened

    def _is_fresh(self) -> bool:
        """Whether no process finds anything to resume from, not even something damaged: that is never passed over for
        a fresh start. Every rank calls it.
        """
        store, fresh, problem = self._checkpoint_manager().store, True, None
        try:
            fresh = not store.keeps or store.is_fresh()
        except CheckpointError as error:
            problem = str(error)
        told = self._gang.gather_objects([fresh, problem])
        problems = [why for _, why in told if why is not None]
        if problems:
            raise CheckpointError(problems[0])
        return all(alone for alone, _ in told)

    def _open_checkpoint(self, which: Literal[True] | str) -> Checkpoint:
        """Every rank calls it: the main process chooses and verifies for all, so nothing is hashed twice. Where there
        are several disks, one process of each does.
        """
        manager = self._checkpoint_manager()
        if which is not True and is_url(which):
            # It may be another run's: the folder that stands for that one is not this run's.
            store, which = store_of_checkpoint(which, self._gang, self._output_disks())
            manager = CheckpointManager(store)
        foreign = self._find_foreign(manager.store, which)
        if foreign is not None:
            return foreign
        if manager.store.disks.nodes > 1:
            return manager.receive(choose_on_all(manager.store, which))
        chosen, problem = None, None
        if self.is_world_process_zero():
            try:
                chosen = manager.choose(which)
            except (CheckpointError, OSError) as error:
                problem = str(error)
        chosen, problem = self._gang.broadcast_object([chosen, problem])
        if problem is not None:
            raise CheckpointError(problem)
        return manager.receive(chosen)

    _opened: Checkpoint | None = None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load a checkpoint's weights into the model. Override it to load them your own way."""
        target, opened = self.model if model is None else model, self._opened
        if opened is not None and Path(resume_from_checkpoint) == opened.folder:
            opened.load_weights(target)
        else:
            load_folder(Path(resume_from_checkpoint), target)

    def _resumed_progress(self, checkpoint: Checkpoint | None, source: GroupSource) -> Progress | None:
        """What was done before an update changed its size (batch, accumulation, ranks); None where it did not."""
        if isinstance(checkpoint, ForeignCheckpoint):
            return self._foreign_progress(checkpoint, source)
        if checkpoint is None or not checkpoint.has("loop"):
            return None
        accumulation, loop = self._update_size.accumulation, checkpoint.shared("loop")
        per_epoch = source.groups_per_epoch(accumulation)
        with _reading(checkpoint, "loop"):
            position = loop["position"]
            if per_epoch is None or per_epoch == loop["updates_per_epoch"]:
                return None
            left = source.groups_left(position, accumulation) if position else None
            if left is None:
                return Progress(checkpoint.step, loop["epoch"] * per_epoch)
            return Progress(checkpoint.step, (position["epoch"] + 1) * per_epoch - left)

    def _restore_run(self, checkpoint: Checkpoint) -> None:
        """Everything but the weights: optimizer, schedule, position in the data, ledger, callbacks, randomness.

        Raises:
            CheckpointError: a part is missing, or does not fit.
        """
        if isinstance(checkpoint, ForeignCheckpoint):
            self._adopt_state(TrainerState.from_dict(checkpoint.state))
            self._find_best(checkpoint)
            self._restore_foreign(checkpoint)
            self._restore_callbacks()
            return
        if not checkpoint.has("optimizer"):
            raise CheckpointError(
                f"{checkpoint.folder} holds only the model (it was saved with save_only_model=True), so a run can't "
                "be continued from it. Start a new run from its weights: load them into the model and call train()"
            )
        assert self.optimizer is not None
        self._adopt_state(saved_state(checkpoint))
        self._run.saver.history.resume(checkpoint, self.state.log_history)
        with _reading(checkpoint, "best"):
            self._find_best(checkpoint)
        self._warn_of_changes(checkpoint)
        warn_of_other_threads(checkpoint.meta, self._device.type, checkpoint.folder)
        self._saved_loss_kind = Kind.__members__.get(str(checkpoint.meta.get("loss_over")))
        checkpoint.load_optimizer(self.optimizer, self.model)
        with _reading(checkpoint, "schedule"):
            self._run.schedule.load_state_dict(checkpoint.shared("schedule"))
        with _reading(checkpoint, "executor"):
            self._run.executor.load_state_dict(checkpoint.shared("executor"))
        with _reading(checkpoint, "loop"):
            self._run.loop.load_state_dict(self._loop_state(checkpoint))
        self._run.unfinished = checkpoint.shared("unfinished") if checkpoint.has("unfinished") else {}
        self._restore_callbacks()
        with _reading(checkpoint, "rank-*"):
            self._restore_rank(checkpoint)
        self._newest_checkpoint, self._rollbacks = checkpoint.folder, 0
        logger.info("continuing from %s at step %d", checkpoint.folder, checkpoint.step)

    def _restore_callbacks(self) -> None:
        restore_args = bool(self.args.restore_callback_states_from_checkpoint)
        self.callback_handler.load_state_dict(self.state.stateful_callbacks, restore_args=restore_args)

    def _loop_state(self, checkpoint: Checkpoint) -> State:
        """Where the run stands; under as many ranks as before, each goes on where it stood itself."""
        state = checkpoint.shared("loop")
        if checkpoint.world_size != self._gang.size:
            return state
        return {**state, "position": checkpoint.per_rank("position", self._gang.rank)}

    def _restore_rank(self, checkpoint: Checkpoint) -> None:
        if checkpoint.world_size == self._gang.size:
            rank = self._gang.rank
            self._run.ledger.load_state_dict(checkpoint.per_rank("ledger", rank))
            load_own_state(self._strategy, checkpoint.per_rank("buffers", rank), same_world=True)
            load_rng_state(checkpoint.per_rank("rng", rank), self._device)
            return
        logger.warning(
            "%s was saved by %d process(es), this run has %d: the order of samples goes on unchanged, the bits of "
            "dropout and of sums over ranks do not", checkpoint.folder, checkpoint.world_size, self._gang.size
        )  # fmt: skip
        load_own_state(self._strategy, checkpoint.per_rank("buffers", 0), same_world=False)
        self._run.seed_step.start(checkpoint.step)
        ledgers = [checkpoint.per_rank("ledger", rank) for rank in range(checkpoint.world_size)]
        self._run.ledger.load_state_dict(merged_ledger(ledgers, mine=self._gang.rank == 0))

    def _adopt_state(self, saved: TrainerState) -> None:
        """Take the checkpoint's progress; what belongs to this process or to these arguments stays."""
        current = self.state
        for name in (
            "max_steps",
            "num_train_epochs",
            "logging_steps",
            "eval_steps",
            "save_steps",
            "train_batch_size",
        ):
            setattr(saved, name, getattr(current, name))
        for name in TrainerState.PER_PROCESS:
            setattr(saved, name, getattr(current, name))
        self.state = saved
        self._run.adopt_state(saved)

    def _find_best(self, checkpoint: Checkpoint) -> None:
        """Where the best checkpoint lies now: the folder may have been moved since its path was noted.

        Raises:
            CheckpointError: it is gone, and the run needs it at its end.
        """
        self._best_evaluations = checkpoint.shared("best")["evaluations"] if checkpoint.has("best") else []
        self._best_standing = list(self._best_evaluations)
        self._last_metric = checkpoint.step, checkpoint.meta.get("metric")
        noted, self._best_saved = self.state.best_model_checkpoint, (None, None)
        if noted is None:
            return
        self._best_saved = self.state.best_metric, self.state.best_global_step
        name = Path(noted).name
        places = [self.output_folder / name, checkpoint.folder.parent / name]
        # One that is noted as a relative path is not of this working directory.
        places.insert(0 if Path(noted).is_absolute() else 2, Path(noted))
        store = self._checkpoint_manager().store
        found = next((place for place in places if store.stands(place) or is_foreign(place)), None)
        if found is not None:
            self.state.best_model_checkpoint = str(found)
        elif self.args.load_best_model_at_end:
            raise CheckpointError(
                f"the best checkpoint so far ({noted}) is gone, and load_best_model_at_end=True needs it: put it into "
                f"{self.output_folder}, or resume with load_best_model_at_end=False"
            )

    def _warn_of_changes(self, checkpoint: Checkpoint) -> None:
        text = checkpoint.read("training_args.json") if self.is_world_process_zero() else None
        if text is None:
            return
        name = f"{checkpoint.folder / 'training_args.json'}"
        old = strict_json.parse(text, name, allow_nan=True)
        new = json.loads(json.dumps(self.args.to_dict(), default=str))
        changed = [
            f"{name}: {new[name]} (from args) != {old[name]} (from {checkpoint.folder.name})"
            for name in sorted(new.keys() & old.keys())
            if new[name] != old[name] and name not in _FREE_TO_DIFFER
        ]
        if changed:
            logger.warning(
                "these arguments differ from the checkpoint's, and the new ones hold:\n  %s",
                "\n  ".join(changed),
            )


@contextlib.contextmanager
def _reading(checkpoint: Checkpoint, part: str) -> Iterator[None]:
    """A part is handed to whom it belongs; where it holds something else than a run saves there, its file is named."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, WindlassError):
            raise
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{checkpoint.folder / part}.json does not hold what a run saves there ({what})"
        ) from error


def saved_state(checkpoint: Checkpoint) -> TrainerState:
    """The state of a run as it was saved, with its whole history.

    Raises:
        CheckpointError: it is damaged, or of another step.
    """
    saved = checked_state(checkpoint.folder / "trainer_state.json", complete_state(checkpoint))
    with _reading(checkpoint, "trainer_state"):
        state = TrainerState.from_dict(saved)
        if state.global_step != checkpoint.step:
            raise ValueError(f"it is of step {state.global_step}")
    return state


def saved_update_size(checkpoint: Checkpoint) -> UpdateSize | None:
    """What the updates of a checkpoint's run were made of; None where it does not say.

    Raises:
        CheckpointError: it says something else.
    """
    saved = checkpoint.meta.get("update_size")
    if saved is None:
        return None
    with _reading(checkpoint, "manifest"):
        size = UpdateSize(**saved)
        if any(type(n) is not int or n < 1 for n in (size.micro, size.accumulation, size.world, size.asked)):
            raise ValueError(f"an update is made of {saved}")
    return size


def saved_position(checkpoint: Checkpoint | None) -> State | None:
    """Where a checkpoint's run stood in its data; None for a fresh run, or one that another program began."""
    if checkpoint is None or isinstance(checkpoint, ForeignCheckpoint) or not checkpoint.has("loop"):
        return None
    with _reading(checkpoint, "loop"):
        position: State = checkpoint.shared("loop")["position"]
        return position or None


def merged_ledger(ledgers: list[State], mine: bool) -> State:
    """One rank's ledger made of several: sums go to the first rank, counts to all."""
    first = dict(ledgers[0])
    for name in ("loss", "skipped_loss"):
        first[name] = sum(ledger[name] for ledger in ledgers) * float(mine)
    names = {name for ledger in ledgers for name in ledger["parts"]}
    first["parts"] = {
        name: sum(ledger["parts"][name] for ledger in ledgers if name in ledger["parts"]) * float(mine)
        for name in names
    }
    return first
