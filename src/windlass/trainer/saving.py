"""Saving the model and the checkpoints of a run."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from windlass.checkpoint.adapters import ADAPTER_WEIGHTS, BASE_STATE, Adapter, find_adapter
from windlass.checkpoint.content import Content
from windlass.checkpoint.manager import CheckpointManager, costs_one_save
from windlass.checkpoint.nodes import Disks, find_disks
from windlass.checkpoint.opening import open_store, upload_files
from windlass.checkpoint.optimizer_state import save_optimizer_state, split_optimizer_state
from windlass.checkpoint.retention import Retention
from windlass.checkpoint.sharded import parts_of_rank
from windlass.checkpoint.store import SaveDropped, Store
from windlass.checkpoint.weights import WEIGHTS_NAME, save_weights, weights_bytes
from windlass.config.plan import SavePlan
from windlass.core.errors import CheckpointError
from windlass.core.events import TrainerState
from windlass.core.locations import local_folder
from windlass.core.logs import get_job_logger, get_logger
from windlass.core.module_state import bare, state_of, with_copied_buffers
from windlass.core.rng import rng_state
from windlass.core.threads import thread_count
from windlass.core.types import State
from windlass.trainer.base import TrainerBase, overrides
from windlass.trainer.holding import FolderHold
from windlass.trainer.restorable import check_saved_model
from windlass.transforms.strategy import own_state

logger = get_logger(__name__)


class SavingMixin(TrainerBase):
    """`save_model` and the checkpoints of a run."""

    _run: Any = None
    # What `nonfinite_policy="rollback"` goes back to, and how often it did since that was saved.
    _newest_checkpoint: Path | None = None
    _rollbacks = 0
    # What is being saved is only for a run that is cut off: the clock asked for it, not the run's plan.
    _saves_ephemeral = False
    # As many of the best evaluations as `keep_best` asks for: [metric, step], best first.
    _best_evaluations: list[list[float]]
    # The same when the last checkpoint came to stand: what is gone back to where a save is given up.
    _best_standing: list[list[float]]
    # The last evaluation's step, and what it gave for the metric that the run goes by.
    _last_metric: tuple[int, float | None] = (-1, None)
    # Metric and step of the evaluation that `best_model_checkpoint` was saved at.
    _best_saved: tuple[float | None, int | None] = (None, None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model (weights, configuration, tokenizer) so that `from_pretrained` reads it; on the main
        process, and with `save_on_each_node` on one of each machine that has a disk of its own.

        Args:
            output_dir: where to, a folder or a URL; the run's output folder by default.
        """
        writes = self.is_world_process_zero()
        if self.args.save_on_each_node:
            writes = self._gang.rank == self._output_disks().keeper
        state, place = self._gathered_weights(), self.args.output_path
        if output_dir:
            place = self.args.resolve_path(str(output_dir))
        try:
            if writes:
                self._save_gathered(str(local_folder(place)), state)
            if self.is_world_process_zero():
                upload_files(place)
        finally:
            self._gang.barrier()

    def _upload_files(self) -> None:
        """Send what the run wrote beside its checkpoints to where a URL says; a failure is said, and the files stay."""
        if not self.is_world_process_zero():
            return
        try:
            upload_files(self.args.output_path)
        except OSError as error:
            logger.error("%s. The run's files are in %s", error.strerror or error, self.output_folder)

    def _gathered_weights(self) -> Mapping[str, Any] | None:
        """Whole tensors (on the main process) where ranks hold parts of them; None where the model has them itself.
        Collective.
        """
        if not self._strategy.sharded:
            return None
        adapter = self._trained_adapter()
        return self._strategy.whole_state() if adapter is None else adapter.gathered()

    def _check_saved_model(self, plan: SavePlan) -> None:
        """Before the first update. What a script saves its own way, and adapters, which peft names, are not looked at.
        Every rank calls it.

        Raises:
            ModelError: the model could not be resumed from its checkpoints.
        """
        own_way = overrides(self, SavingMixin, ("_save_checkpoint", "_save"))
        if not own_way and self._trained_adapter() is None:
            check_saved_model(self.model, plan, self._gang)

    def _trained_adapter(self) -> Adapter | None:
        """The adapter that is all this model trains; None where it trains other weights."""
        trained = self.model, [id(p) for p in self.model.parameters() if p.requires_grad]
        if self._adapter is None or self._adapter[0] != trained:
            # peft may look a configuration up over the network, so it is not asked at every save.
            self._adapter = trained, find_adapter(self.model)
        return self._adapter[1]

    _adapter: tuple[tuple[nn.Module, list[int]], Adapter | None] | None = None

    def _weights_to_save(self, state: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """The name of the file and what it holds, of a state dict: an adapter's tensors where it is all that is
        trained.
        """
        adapter = self._trained_adapter()
        if adapter is None or not adapter.names.keys() <= state.keys():
            return WEIGHTS_NAME, state
        return ADAPTER_WEIGHTS, adapter.weights(state)

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
        weights = dict(bare(self.model).state_dict()) if state_dict is None else state_dict
        if weights:
            name, tensors = self._weights_to_save(weights)
            save_weights(folder, tensors, name=name)
        self._save_companions(folder)
        if hasattr(self._savable_tokenizer, "save_pretrained"):
            self._savable_tokenizer.save_pretrained(str(folder))

    @property
    def _savable_tokenizer(self) -> Any:
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    def _save_companions(self, folder: Path) -> None:
        """What the weights need beside them: configurations, and the run's arguments for the reader."""
        adapter = self._trained_adapter()
        if adapter is not None:
            adapter.save_config(folder)
        parts: tuple[Any, ...] = tuple(
            getattr(self.model, name, None) for name in ("config", "generation_config")
        )
        for part in parts if adapter is None else ():  # the base has its configuration where it came from
            if hasattr(part, "save_pretrained"):
                _declare_architecture(part, self.model)
                part.save_pretrained(str(folder))
        arguments = json.dumps(self.args.to_dict(), indent=2, sort_keys=True, default=str)
        (folder / "training_args.json").write_text(arguments + "\n", encoding="utf-8")

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Save a checkpoint of the run as it stands: training goes on while it is written, and `on_save` follows when
        it stands (see `RunSaver`). Every rank calls it.
        """
        self._finish_saving()
        state, saver = self.state, self._run.saver
        step, store = state.global_step, saver.manager.store
        previous_best = state.best_model_checkpoint
        if state.best_global_step == step:
            state.best_model_checkpoint = str(store.path_for(step))
        try:
            content = self._agreed_content(step)
            as_saved = replace(state, log_history=list(state.log_history))
            if content is None:
                self._save_ended(None, as_saved, previous_best)
                return
            saver.save(
                step,
                content,
                meta=self._checkpoint_meta(),
                protected=self._best_checkpoints(store),
                ended=lambda folder: self._save_ended(folder, as_saved, previous_best),
            )
            if not self.is_in_train:
                self._finish_saving()  # nobody would, and the process may end
        finally:
            if not self.is_in_train:
                self._release_folder()

    def _agreed_content(self, step: int) -> Content | None:
        """All that this rank has for a checkpoint; None where a disk on the way there was full. Collective.

        Raises:
            CheckpointError: a rank has something that cannot be saved; on every rank, so that none waits for it.
        """
        manager = self._run.saver.manager
        content, error = None, None
        # A part that cannot give its state must not leave other ranks waiting: in the exchange below, nor in a
        # gathering of tensors that it never came to, so what all ranks do together comes first.
        try:
            if manager.store.keeps:
                self._folder_hold = self._folder_hold or FolderHold()
                self._folder_hold.confirm(self.output_folder)
            content = self._content(manager.store.keeps).encoded()
        except BaseException as raised:
            error = raised
        # The small files beside the weights are written into the system's temporary folder first: it may be full.
        only_this_save = isinstance(error, Exception) and costs_one_save(error)
        told = self._gang.gather_objects(None if error is None else [only_this_save, f"{error}"])
        if error is not None and not only_this_save:
            raise error
        failed = [(rank, *what) for rank, what in enumerate(told) if what is not None]
        for rank, costs_little, what in failed:
            if not costs_little:
                raise CheckpointError(
                    f"checkpoint {step} was given up: rank {rank} has nothing to save: {what}"
                )
        if failed:
            manager.warn(step, error if isinstance(error, Exception) else SaveDropped(failed[0][2]))
            return None
        return content

    def _best_checkpoints(self, store: Store) -> list[Path]:
        """Where the best model and the best evaluations that are kept lie, as far as they were saved."""
        noted = self.state.best_model_checkpoint
        kept = [store.path_for(int(step)) for _, step in self._best_evaluations]
        return kept if noted is None else [*kept, Path(noted)]

    def _checkpoint_meta(self) -> dict[str, Any]:
        return {
            "windlass": "checkpoint",
            "epoch": self.state.epoch,
            "update_size": self._update_size.to_dict(),
            "loss_over": None if self._loss_kind is None else self._loss_kind.name,
            "metric": _plain(self._metric_at(self.state.global_step)),
            "best_metric": _plain(self.state.best_metric),
            "ephemeral": self._saves_ephemeral,
            **thread_count(),
        }

    def _metric_at(self, step: int) -> float | None:
        """The metric that the last evaluation gave, where that was at this step."""
        noted_step, value = self._last_metric
        return value if noted_step == step else None

    def _save_ended(self, folder: Path | None, as_saved: TrainerState, previous_best: str | None) -> None:
        """A save that this run began stands now, or was given up."""
        if folder is None:
            self._forget_best(as_saved, previous_best)
            self._best_evaluations = list(self._best_standing)
        else:
            self._newest_checkpoint, self._rollbacks = folder, 0
        self._run.saver.note_end(as_saved.global_step, folder, self._newest_checkpoint)
        if folder is None:
            return
        self._best_standing = list(self._best_evaluations)
        if as_saved.best_global_step == as_saved.global_step:
            self._best_saved = as_saved.best_metric, as_saved.best_global_step
        asked = self.control.should_save
        self.control = self.callback_handler.fire("on_save", self.args, as_saved, self.control)
        self.control.should_save |= asked  # what is asked for by now is another save

    def _forget_best(self, as_saved: TrainerState, previous_best: str | None) -> None:
        """The best is one of those that exist, where every new best is saved."""
        state = self.state
        if state.best_model_checkpoint == as_saved.best_model_checkpoint:
            state.best_model_checkpoint = previous_best
        if self.args.load_best_model_at_end and state.best_global_step == as_saved.global_step:
            state.best_metric, state.best_global_step = self._best_saved

    def _finish_saving(self) -> None:
        """Wait until the save under way stands or is given up. Every rank calls it."""
        if self._run is not None:
            self._run.saver.finish()

    def _finish_last_save(self, pauses: Iterable[float]) -> None:
        """Wait for the save under way; if the last one failed, save again, after each of these pauses (seconds), until
        one stands. Every rank calls it.
        """
        self._finish_saving()
        retry = self._run.saver.retry
        for pause in pauses:
            if not retry.owes_ordinary:
                return
            get_job_logger(__name__).warning("the last save of the run failed; trying again in %g s", pause)
            time.sleep(pause)
            retry.begin(self.state.global_step, due=False, ordinary=True)
            self._save_checkpoint(self.model)
            self._finish_saving()

    def _check_last_save(self) -> None:
        """Raise if what the run ended with was not saved, though a save was due.

        Raises:
            CheckpointError: what went wrong, what stands on the disk, and what can be done.
        """
        retry = self._run.saver.retry
        if retry.owes_ordinary:
            newest = self._newest_checkpoint or "none of this run"
            raise CheckpointError(
                f"training ended at step {self.state.global_step}, but its last save failed: {retry.reason}. "
                f"Last whole checkpoint: {newest}. While this process lives, trainer.save_model(FOLDER) writes the "
                "model elsewhere; or mend the output folder and run again with resume_from_checkpoint=True"
            )

    def _leave_saving(self) -> None:
        """The run ends in an error: what is under way may still become whole, and no failure of it hides that error."""
        if self._run is not None:
            with contextlib.suppress(Exception):
                self._run.saver.leave()
            self._run.saver.release()  # whoever handles the error may keep the Trainer

    def _may_save_in_background(self) -> bool:
        """Whether no code of the script's own has a part in saving that needs the run as it was at that moment."""
        own_method = overrides(self, SavingMixin, ("_save_checkpoint", "_save", "save_model"))
        return not own_method and not self.callback_handler.listens_outside("on_save")

    def _content(self, keeps: bool) -> Content:
        """All that this rank has for a checkpoint, the tensors being the live ones. Collective."""
        shared, parts = self._tensor_states()
        gathered = {} if "model" in parts else self._gathered_weights()
        fingerprint = self._base_fingerprint(keeps)
        self.state.stateful_callbacks = self.callback_handler.state_dict()
        shared |= self._shared_state()
        world, members = self._gang.world, self._output_disks().members
        own = Content(
            per_rank=self._rank_state(),
            parts=[parts_of_rank(stem, tensors, world, members) for stem, tensors in parts.items()],
        )
        own_weights = self._weights_of_first_rank() if gathered is None else {}
        if not keeps:
            return own
        state = {item.name: getattr(self.state, item.name) for item in fields(self.state)}
        own = replace(own, history=(history := self._run.saver.history.plan(state)))
        shared |= history.states
        weights = own_weights if gathered is None else gathered
        adapter = self._trained_adapter()
        if adapter is not None:
            shared[BASE_STATE] = adapter.base_state(fingerprint, weights)
        if overrides(self, SavingMixin, ("_save",)):
            return replace(
                own,
                shared=shared,
                write_model=lambda folder: self._save_gathered(str(folder), gathered),
                other_bytes=weights_bytes(weights),
            )
        name, tensors = self._weights_to_save(weights)
        return replace(
            own,
            shared=shared,
            weights={name: tensors} if tensors else {},
            files=self._run.companions.files(self._save_companions, self._savable_tokenizer),
        )

    _fingerprint: dict[str, list[Any]] | None = None

    def _base_fingerprint(self, keeps: bool) -> dict[str, list[Any]]:
        """Of the weights that an adapter is trained on, taken once per run. Collective where ranks hold parts."""
        adapter = self._trained_adapter()
        if adapter is None or not (keeps or self._strategy.sharded):
            return {}
        if self._fingerprint is None:
            self._fingerprint = adapter.fingerprint()
        return self._fingerprint

    def _shared_state(self) -> dict[str, State]:
        if self.args.save_only_model:
            return {}
        return {
            "best": {"evaluations": self._best_evaluations},
            "schedule": self._run.schedule.state_dict(),
            "executor": self._run.executor.state_dict(),
            "loop": self._run.loop.state_dict(),
            "unfinished": self._run.unfinished,
        }

    def _weights_of_first_rank(self) -> Mapping[str, Any]:
        """The model's state dict, in which buffers (running statistics differ between ranks) are rank 0's on each rank
        that writes a copy. Collective where there are several.
        """
        if self._output_disks().nodes == 1:
            return state_of(self.model)
        with self._strategy.buffers_of_first_rank():
            return with_copied_buffers(self.model)

    def _tensor_states(self) -> tuple[dict[str, State], dict[str, Mapping[str, Any]]]:
        """The optimizer's state for the main process to write, and the tensors of which every rank writes its part:
        none of these where whole tensors are saved. Collective.
        """
        in_parts = self._strategy.saves_parts
        parts: dict[str, Mapping[str, Any]] = (
            {"model": self._weights_of_first_rank()} if in_parts and self._trained_adapter() is None else {}
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
            "buffers": own_state(self._strategy),
        }

    _disks: Disks | None = None

    _folder_hold: FolderHold | None = None

    def _hold_folder(self) -> None:
        """Keep other runs out of the output folder from here on. Collective.

        Raises:
            ConfigError: another run writes there, or it cannot be written.
        """
        self._disks, self._folder_hold = None, self._folder_hold or FolderHold()
        self._folder_hold.take(
            self._gang, self._output_disks(), self.output_folder, str(self.args.output_dir)
        )

    def _release_folder(self) -> None:
        if self._folder_hold is not None:
            self._folder_hold.release(None if self._run is None else self._run.saver)

    def _output_disks(self) -> Disks:
        """Which ranks share the disk of the output folder. Looked for once per run; that is collective."""
        if self._disks is None:
            self._disks = find_disks(self._gang, self.output_folder)
        return self._disks

    def _checkpoint_manager(self) -> CheckpointManager:
        """Every rank calls it."""
        store = open_store(self.args.output_path, self._gang, self._output_disks())
        store.stay_on_disk()
        return CheckpointManager(store, retention_of(self.args))


def retention_of(args: Any) -> Retention:
    """Which checkpoints of a run stay; the best of it are protected one by one."""
    if args.keep_best is not None and args.keep_last is None:
        return Retention(last=1)
    return Retention(limit=args.save_total_limit, last=args.keep_last)


def _declare_architecture(config: Any, model: nn.Module) -> None:
    """`AutoModel.from_pretrained` finds the class by the configuration's `architectures`."""
    if getattr(config, "architectures", False) is None:
        config.architectures = [type(model).__name__]


def _plain(value: float | None) -> float | None:
    return None if value is None else float(value)
