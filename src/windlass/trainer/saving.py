"""Saving, resuming, and the best model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import nn

from windlass.assemble.batch import UpdateSize
from windlass.assemble.facts import Progress
from windlass.checkpoint.manager import Checkpoint, CheckpointManager
from windlass.checkpoint.optimizer_state import save_optimizer_state, split_optimizer_state
from windlass.checkpoint.sharded import parts_writer
from windlass.checkpoint.store import Store, is_checkpoint
from windlass.checkpoint.weights import load_weights, save_weights, weights_bytes
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.events import TrainerState
from windlass.core.logs import get_logger
from windlass.core.rng import load_rng_state, rng_state
from windlass.core.types import State
from windlass.engine.feed import GroupSource
from windlass.trainer.base import TrainerBase

logger = get_logger(__name__)

# Arguments in which a resumed run may differ from the checkpoint's without a word.
_FREE_TO_DIFFER = frozenset(
    {"output_dir", "resume_from_checkpoint", "disable_tqdm", "log_level", "log_level_replica"}
)


class SavingMixin(TrainerBase):
    """`save_model` and the checkpoints of a run."""

    _run: Any = None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model (weights, configuration, tokenizer) so that `from_pretrained` reads it; on the main
        process.

        Args:
            output_dir: where to; the run's output folder by default.
        """
        state = self._gathered_weights()
        try:
            if self.is_world_process_zero():
                self._save_gathered(str(output_dir or self.output_folder), state)
        finally:
            self._gang.barrier()

    def _gathered_weights(self) -> Mapping[str, Any] | None:
        """Whole tensors (on the main process) where ranks hold parts of them; None where the model has them itself.
        Collective.
        """
        return self._strategy.whole_state() if self._strategy.sharded else None

    def _save_gathered(self, folder: str, state: Mapping[str, Any] | None) -> None:
        # Overrides that know of no sharding take the folder alone.
        if state is None:
            self._save(folder)
        else:
            self._save(folder, state_dict=state)

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        """Write the model's files into a folder. Override it for files of your own; checkpoints call it too.

        Args:
            state_dict: the weights to write instead of the model's own; an empty one writes none.
        """
        folder = Path(output_dir or self.output_folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = self.model.state_dict() if state_dict is None else state_dict
        if weights:
            save_weights(folder, weights)
        parts: tuple[Any, ...] = tuple(
            getattr(self.model, name, None) for name in ("config", "generation_config")
        )
        for part in parts:
            if hasattr(part, "save_pretrained"):
                _declare_architecture(part, self.model)
                part.save_pretrained(str(folder))
        tokenizer: Any = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(str(folder))
        arguments = json.dumps(self.args.to_dict(), indent=2, sort_keys=True, default=str)
        (folder / "training_args.json").write_text(arguments + "\n", encoding="utf-8")

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Commit a checkpoint of the run as it stands. Every rank calls it."""
        step = self.state.global_step
        manager = self._checkpoint_manager()
        previous_best = self.state.best_model_checkpoint
        if self.state.best_global_step == step:
            self.state.best_model_checkpoint = str(manager.store.path_for(step))
        best = self.state.best_model_checkpoint
        # A part that cannot give its state must not leave other ranks waiting: in the vote at the end of this block,
        # nor in a gathering of tensors that it never came to, so what all ranks do together comes first.
        with manager.store.agreed(step):
            shared, parts = self._tensor_states()
            weights = {} if parts else self._gathered_weights()
            self.state.stateful_callbacks = self.callback_handler.state_dict()
            shared |= self._shared_state()
            per_rank = self._rank_state()
            model_bytes = sum(map(weights_bytes, parts.values()))
            model_bytes += weights_bytes(self.model.state_dict() if weights is None else weights)
        saved = manager.save(
            step,
            shared=shared,
            per_rank=per_rank,
            write_model=lambda folder: self._save_gathered(str(folder), weights),
            meta={
                "windlass": "checkpoint",
                "epoch": self.state.epoch,
                "update_size": self._update_size.to_dict(),
                "best_metric": _plain(self.state.best_metric),
            },
            best=Path(best) if best else None,
            model_bytes=model_bytes,
            write_parts=parts_writer(parts, self._gang.world) if parts else None,
        )
        if saved is None:
            self.state.best_model_checkpoint = previous_best  # the best of those that exist
            return
        self._newest_checkpoint, self._rollbacks = saved, 0
        self.control = self.callback_handler.fire("on_save", self.args, self.state, self.control)

    def _shared_state(self) -> dict[str, State]:
        shared: dict[str, State] = {"trainer_state": self.state.to_dict()}
        if self.args.save_only_model:
            return shared
        return {
            **shared,
            "schedule": self._run.schedule.state_dict(),
            "executor": self._run.executor.state_dict(),
            "loop": self._run.loop.state_dict(),
        }

    def _tensor_states(self) -> tuple[dict[str, State], dict[str, Mapping[str, Any]]]:
        """The optimizer's state for the main process to write, and the tensors of which every rank writes its part:
        none of these where whole tensors are saved. Collective.
        """
        in_parts = self._strategy.saves_parts
        parts: dict[str, Mapping[str, Any]] = (
            {"model": self.model.state_dict(keep_vars=True)} if in_parts else {}
        )
        if self.args.save_only_model:
            return {}, parts
        assert self.optimizer is not None, "a run that saves has an optimizer"
        if not in_parts:
            return {"optimizer": save_optimizer_state(self.optimizer, self.model)}, {}
        state, parts["optimizer"] = split_optimizer_state(self.optimizer, self.model)
        return {"optimizer": state}, parts

    def _rank_state(self) -> dict[str, State]:
        if self.args.save_only_model:
            return {}
        return {
            "rng": rng_state(self._device),
            "ledger": self._run.ledger.state_dict(),
            "position": self._run.loop.position,
            "buffers": self._strategy.own_buffers(),
        }

    def _checkpoint_manager(self) -> CheckpointManager:
        store = Store(
            self.output_folder,
            rank=self._gang.rank,
            world=self._gang.size,
            vote=self._gang.vote,
            barrier=self._gang.barrier,
        )
        return CheckpointManager(store, self.args.save_total_limit)

    # --- resuming ---------------------------------------------------------------------------------------------------

    def _resume_point(self, resume_from_checkpoint: str | bool | None) -> Checkpoint | None:
        """The verified checkpoint to continue from, None for a fresh run."""
        self._opened = None
        if resume_from_checkpoint is None or resume_from_checkpoint is False:
            return None
        if not isinstance(resume_from_checkpoint, (bool, str, os.PathLike)):
            fix = "give True (the newest checkpoint that verifies) or the path of a checkpoint"
            raise ConfigError(Problem("resume_from_checkpoint", resume_from_checkpoint, fix))
        self._opened = self._open_checkpoint(resume_from_checkpoint)
        return self._opened

    def _open_checkpoint(self, which: Literal[True] | str) -> Checkpoint:
        """Every rank calls it: the main process chooses and verifies for all, so nothing is hashed twice."""
        manager = self._checkpoint_manager()
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
    # What `nonfinite_policy="rollback"` goes back to, and how often it did since that was saved.
    _newest_checkpoint: Path | None = None
    _rollbacks = 0

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load a checkpoint's weights into the model. Override it to load them your own way."""
        target, opened = self.model if model is None else model, self._opened
        if opened is not None and Path(resume_from_checkpoint) == opened.folder:
            opened.load_weights(target)
        else:
            load_weights(Path(resume_from_checkpoint), target)

    def _resumed_progress(self, checkpoint: Checkpoint | None, source: GroupSource) -> Progress | None:
        """What was done before an update changed its size (batch, accumulation, ranks); None where it did not."""
        if checkpoint is None or not checkpoint.has("loop"):
            return None
        accumulation, loop = self._update_size.accumulation, checkpoint.shared("loop")
        per_epoch, position = source.groups_per_epoch(accumulation), loop["position"]
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
        if not checkpoint.has("optimizer"):
            raise CheckpointError(
                f"{checkpoint.folder} holds only the model (it was saved with save_only_model=True), so a run can't "
                "be continued from it. Start a new run from its weights: load them into the model and call train()"
            )
        assert self.optimizer is not None
        self._adopt_state(TrainerState.from_dict(checkpoint.shared("trainer_state")))
        self._find_best(checkpoint)
        self._warn_of_changes(checkpoint)
        checkpoint.load_optimizer(self.optimizer, self.model)
        self._run.schedule.load_state_dict(checkpoint.shared("schedule"))
        self._run.executor.load_state_dict(checkpoint.shared("executor"))
        self._run.loop.load_state_dict(self._loop_state(checkpoint))
        restore_args = bool(self.args.restore_callback_states_from_checkpoint)
        self.callback_handler.load_state_dict(self.state.stateful_callbacks, restore_args=restore_args)
        self._restore_rank(checkpoint)
        self._newest_checkpoint, self._rollbacks = checkpoint.folder, 0
        logger.info("continuing from %s at step %d", checkpoint.folder, checkpoint.step)

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
            saved = checkpoint.per_rank("buffers", rank)
            for name, buffer in self._strategy.own_buffers().items():
                if name in saved:
                    buffer.copy_(saved[name])
            load_rng_state(checkpoint.per_rank("rng", rank), self._device)
            return
        logger.warning(
            "%s was saved by %d process(es), this run has %d: the order of samples goes on unchanged, the bits of "
            "dropout and of sums over ranks do not", checkpoint.folder, checkpoint.world_size, self._gang.size
        )  # fmt: skip
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
        noted = self.state.best_model_checkpoint
        if noted is None:
            return
        name = Path(noted).name
        places = [Path(noted), self.output_folder / name, checkpoint.folder.parent / name]
        found = next((place for place in places if is_checkpoint(place)), None)
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
        old, new = json.loads(text), json.loads(json.dumps(self.args.to_dict(), default=str))
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

    # --- the best model ---------------------------------------------------------------------------------------------

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Note the metric if it is the best so far; gives whether it is.

        Raises:
            ConfigError: the evaluation did not return it.
        """
        if self.args.metric_for_best_model is None:
            return False
        value = find_metric(metrics, self.args.metric_for_best_model)
        best = self.state.best_metric
        better = math.isfinite(value) and (
            best is None or (value > best if self.args.greater_is_better else value < best)
        )
        if better:
            self.state.best_metric = value
            self.state.best_global_step = self.state.global_step
        return better

    def _load_best_model(self) -> None:
        """Put the best checkpoint's weights into the model, verified."""
        best = self.state.best_model_checkpoint
        if best is None:
            logger.warning("load_best_model_at_end: no evaluation gave a best model; the last weights stay")
            return
        checkpoint = self._open_checkpoint(best)
        checkpoint.load_weights(self.model)
        logger.info("loaded the best model, of step %d: %s", checkpoint.step, checkpoint.folder)


def find_metric(metrics: Mapping[str, float], name: str) -> float:
    """The metric of this name; its `eval_` prefix is optional.

    Raises:
        ConfigError: it is not among the metrics, which are listed.
    """
    key = name if name.startswith("eval_") else f"eval_{name}"
    if key not in metrics:
        fix = f"no evaluation returns {key!r}; it returns: {', '.join(sorted(metrics))}"
        raise ConfigError(Problem("metric_for_best_model", name, fix))
    return float(metrics[key])


def saved_update_size(checkpoint: Checkpoint) -> UpdateSize | None:
    """What the updates of a checkpoint's run were made of; None where it does not say."""
    saved = checkpoint.meta.get("update_size")
    return None if saved is None else UpdateSize(**saved)


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


def _declare_architecture(config: Any, model: nn.Module) -> None:
    """`AutoModel.from_pretrained` finds the class by the configuration's `architectures`."""
    if getattr(config, "architectures", False) is None:
        config.architectures = [type(model).__name__]


def _plain(value: float | None) -> float | None:
    return None if value is None else float(value)
