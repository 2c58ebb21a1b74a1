"""Saving the model and the checkpoints of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.optimizer_state import save_optimizer_state, split_optimizer_state
from windlass.checkpoint.sharded import parts_writer
from windlass.checkpoint.store import Store
from windlass.checkpoint.weights import save_weights, weights_bytes
from windlass.core.rng import rng_state
from windlass.core.types import State
from windlass.trainer.base import TrainerBase


class SavingMixin(TrainerBase):
    """`save_model` and the checkpoints of a run."""

    _run: Any = None
    # What `nonfinite_policy="rollback"` goes back to, and how often it did since that was saved.
    _newest_checkpoint: Path | None = None
    _rollbacks = 0

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


def _declare_architecture(config: Any, model: nn.Module) -> None:
    """`AutoModel.from_pretrained` finds the class by the configuration's `architectures`."""
    if getattr(config, "architectures", False) is None:
        config.architectures = [type(model).__name__]


def _plain(value: float | None) -> float | None:
    return None if value is None else float(value)
