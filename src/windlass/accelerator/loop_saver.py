"""Save and load the checkpoints of a user's own loop."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from windlass.accelerator import loop_content
from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.engine import LoopEngine
from windlass.accelerator.loop_content import LoopContent, ModelContent
from windlass.accelerator.loop_places import SaveLock, StatePlaces
from windlass.accelerator.model_files import warn_if_unsafe
from windlass.accelerator.prepared import Prepared
from windlass.accelerator.setup import Setup
from windlass.checkpoint.background import BackgroundSaver
from windlass.checkpoint.content import Content
from windlass.checkpoint.host_memory import HostMemory, room_on_machine
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.store import Store
from windlass.config.refusal import refuse
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.logs import get_logger
from windlass.core.threads import thread_count, warn_of_other_threads

_log = get_logger(__name__)

SaveHook = Callable[[list[nn.Module], list[dict[str, Tensor]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A save in the background."""

    saver: BackgroundSaver
    manager: CheckpointManager
    lock: SaveLock
    shown: str


class Saver:
    """Saves and loads everything that was prepared or registered."""

    def __init__(
        self, setup: Setup, accumulation: AccumulationState, prepared: Prepared, engine: LoopEngine
    ) -> None:
        self._gang, self._device, self._project = setup.gang, setup.device, setup.settings.project
        self._accumulation, self._prepared, self._engine = accumulation, prepared, engine
        self._places = StatePlaces(self._gang, self._project)
        self._content = LoopContent(self._gang, setup.device, accumulation, prepared, engine)
        self._memory = HostMemory(setup.device)
        self._under_way: _UnderWay | None = None
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save everything that was prepared or registered, and the random generators. Collective.

        The folder is committed atomically, and replaces an earlier one only then. Machines that do not share the
        folder each keep the files of their processes. If a model trains only a peft adapter, only the adapter is
        saved.

        Args:
            output_dir: the folder, or a URL. With `automatic_checkpoint_naming` it is ignored, and the folder is
                `checkpoints/checkpoint_N` of the project.
            safe_serialization: False is mapped to True with one warning: pickle is never written.
            save_model_func_kwargs: `background=True` returns as soon as a copy is in host memory, and a thread writes
                it. The next `save_state`, `load_state`, `wait_for_everyone` and `end_training` wait for it, and raise
                if it failed.

        Returns:
            The folder.

        Raises:
            ConfigError: no folder, or an unsupported option. CheckpointError: the numbered folder exists, or a state
                has values that cannot be saved. FolderInUse: another loop is saving there. OSError: writing failed.
        """
        background = bool(save_model_func_kwargs.pop("background", False))
        self._check_options(safe_serialization, save_model_func_kwargs)
        self._warn_of_unfinished_update()
        self.finish()
        numbered, step = self._project.automatic_checkpoint_naming, self._project.iteration
        place = self._places.find(None if numbered else output_dir, "output_dir")
        manager = self._places.to_write(place)
        lock = SaveLock(manager.store, step)
        try:
            lock.take()
            if numbered:
                self._refuse_existing(manager, step)
            saving = self._write(manager, step, background)
        except BaseException:
            lock.release()
            raise
        if saving is None:
            lock.release()
        else:
            self._under_way = _UnderWay(saving, manager, lock, place.shown(step))
        self._project.iteration += 1
        return place.shown(step)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a checkpoint of `save_state` into the prepared objects, on any number of processes. Collective.

        Args:
            input_dir: the folder or URL; with `automatic_checkpoint_naming`, None means the newest valid one.
            load_kwargs, load_model_func_kwargs: refused, except `map_location`, which has no effect: tensors are loaded
                to the devices of their parameters.

        Raises:
            CheckpointError: it is not valid, or does not fit the prepared objects. ConfigError: no folder.
        """
        load_model_func_kwargs.pop("map_location", None)
        self._check_options(True, {**(load_kwargs or {}), **load_model_func_kwargs})
        self.finish()
        checkpoint = self._places.open(self._places.find(input_dir, "input_dir"), input_dir)
        loop_content.check_fits(checkpoint, self._prepared)
        warn_of_other_threads(checkpoint.meta, self._device.type, checkpoint.folder)
        models = [strategy.model for strategy in self._prepared.strategies]
        for hook in self._load_hooks.values():
            hook(models, str(checkpoint.folder))
        loop_content.load_models(checkpoint, self._prepared, models)
        loop_content.load_shared(checkpoint, self._prepared)
        loop_content.load_rank(checkpoint, self._prepared, self._gang, self._device)
        loop = checkpoint.shared("loop")
        self._accumulation.step = int(loop["step"])
        self._engine.load_state_dict(loop)
        if self._project.automatic_checkpoint_naming:
            self._project.iteration = checkpoint.step + 1
        _log.info("Loaded the state of the loop from %s", checkpoint.folder)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load `objects` with the loop. Those of the main process are saved.

        Args:
            objects: with `state_dict` and `load_state_dict`; states are nests of tensors, arrays and plain values.

        Raises:
            ConfigError: an object lacks one of these methods.
        """
        fix = "needs the methods state_dict and load_state_dict to be saved"
        refuse(
            Problem(f"objects[{index}]", type(item).__name__, fix)
            for index, item in enumerate(objects)
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))
        )
        self._prepared.custom += objects

    @property
    def registered_objects(self) -> tuple[Any, ...]:
        """The objects that were passed to `register_for_checkpointing`."""
        return tuple(self._prepared.custom)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, folder)` on every process in each `save_state`.

        The hook may write files to `folder` on the main process, which become part of the checkpoint, and remove state
        dicts from `weights` to save those models itself.
        """
        return _register(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, folder)` on every process in each `load_state`, before weights are loaded.

        The hook may remove models from `models` that it has loaded itself.
        """
        return _register(self._load_hooks, hook)

    def finish(self) -> None:
        """Wait for the save in the background, if any, and raise `CheckpointError` if it failed. Collective."""
        saving = self._under_way
        if saving is None:
            return
        try:
            outcome = saving.saver.finish()
        except Exception:
            self._end(saving)
            raise
        self._end(saving)
        if outcome is not None and outcome.folder is None:
            failure = saving.manager.last_failure
            raise CheckpointError(f"{saving.shown} was not saved: {failure}") from failure

    def release_memory(self) -> None:
        """Free the host memory of copies; a save in the background keeps its copy until it ends."""
        self._memory = HostMemory(self._device)

    def _end(self, saving: _UnderWay) -> None:
        self._under_way = None
        atexit.unregister(saving.saver.leave)
        saving.lock.release()

    # --- writing ------------------------------------------------------------------------------------------------------

    def _check_options(self, safe_serialization: bool, options: Mapping[str, Any]) -> None:
        if not self._engine.saves_state:
            fix = "the Trainer saves its run itself: save_strategy, save_steps, trainer.save_model()"
            raise ConfigError(Problem("accelerator", "trainer.accelerator", fix))
        fix = "is not supported: checkpoints have one format and are loaded strictly"
        refuse(Problem(name, value, fix) for name, value in options.items())
        warn_if_unsafe(safe_serialization)

    def _warn_of_unfinished_update(self) -> None:
        if self._gang.rank == 0 and not self._accumulation.sync_gradients:
            _log.warning(
                "save_state was called in the middle of an update: the gradients of its micro-batches so far are not "
                "saved, and a loop that resumes continues without them. Save if accelerator.sync_gradients is True."
            )

    def _refuse_existing(self, manager: CheckpointManager, step: int) -> None:
        store = manager.store
        target = store.path_for(step)
        exists = store.agree(step, lambda: store.is_committed(target) or target.exists())
        if any(self._gang.gather_objects(exists)):
            raise CheckpointError(
                f"{target} exists already: call load_state() to continue after it, or set another number with "
                "ProjectConfiguration(iteration=)"
            )

    def _write(self, manager: CheckpointManager, step: int, background: bool) -> BackgroundSaver | None:
        """Write the checkpoint and return None; or start writing it, and return the saver that does."""
        store, meta = manager.store, {"windlass": "loop", **thread_count()}
        # If one process fails to read a state, the others must not wait for it.
        models, states = store.agree(
            step,
            lambda: (
                self._content.models(store.disks, hooked=bool(self._save_hooks)),
                self._content.states(store.disks),
            ),
        )
        hooked = HookFiles(store, step)
        hooked.clear()  # of a save that was interrupted
        try:
            content = self._with_models(store, step, models, states, hooked)
            snapshot = self._snapshot(content) if background else None
            if snapshot is None:
                manager.write(step, content, meta=meta)
                return None
            return self._begin(manager, step, snapshot, meta)
        except BaseException:
            hooked.clear()
            raise

    def _with_models(
        self, store: Store, step: int, models: list[ModelContent], states: Content, hooked: HookFiles
    ) -> Content:
        """`states`, the models that no hook saves itself, and the files of the hooks."""
        if not self._save_hooks:
            return store.agree(step, lambda: self._content.whole(states, models, store.disks).encoded())
        store.agree(step, hooked.make)
        weights = [model.state for model in models]
        store.agree(step, lambda: self._call_save_hooks(weights, hooked.folder))
        known = {id(model.state): model for model in models}
        kept = [known.get(id(state)) or ModelContent(state, in_parts=False) for state in weights]
        content = store.agree(step, lambda: self._content.whole(states, kept, store.disks).encoded())
        return replace(content, write_model=hooked.move_into)

    def _call_save_hooks(self, weights: list[dict[str, Tensor]], folder: Path) -> None:
        for hook in self._save_hooks.values():
            hook([strategy.model for strategy in self._prepared.strategies], weights, str(folder))

    def _snapshot(self, content: Content) -> tuple[Content, Callable[[], None]] | None:
        """A copy in host memory; None if a rank has no memory for it."""
        more = max(content.tensor_bytes() - self._memory.nbytes, 0)
        needed, room = room_on_machine(more, self._gang)
        copied = None
        if room is None or needed <= room:
            with contextlib.suppress(MemoryError, RuntimeError):
                copied = self._memory.snapshot(content)
        if self._gang.vote(copied is not None):
            return copied
        _log.info("not enough host memory for a copy of the checkpoint; the loop waits while it is written")
        return None

    def _begin(
        self,
        manager: CheckpointManager,
        step: int,
        snapshot: tuple[Content, Callable[[], None]],
        meta: Mapping[str, Any],
    ) -> BackgroundSaver:
        saver, (content, arrived) = BackgroundSaver(manager), snapshot
        target = manager.store.path_for(step)
        if not saver.begin(step, content, arrived, meta=meta, protected=[target]):
            assert manager.last_failure is not None
            raise manager.last_failure
        saver.commit_when_seen()
        # If the script ends or fails without waiting, the checkpoint is still committed if possible.
        atexit.register(saver.leave)
        return saver


def _register(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


class HookFiles:
    """A folder for the files of save hooks, which run before the checkpoint's folder exists."""

    def __init__(self, store: Store, step: int) -> None:
        self.folder = store.root / f".windlass-hooks-{store.path_for(step).name}"
        self._store = store

    def make(self) -> None:
        """Create the folder on the writer rank."""
        if self._store.is_writer:
            self.folder.mkdir(parents=True)

    def clear(self) -> None:
        if self._store.is_writer and self.folder.exists():
            shutil.rmtree(self.folder, ignore_errors=True)

    def move_into(self, draft: Path) -> None:
        """Move all files to the folder of the checkpoint, which must not have files of the same names."""
        for path in sorted(self.folder.rglob("*")):
            target = draft / path.relative_to(self.folder)
            if path.is_dir() and not path.is_symlink():
                target.mkdir(exist_ok=True)
            elif target.exists():
                raise CheckpointError(
                    f"a save hook wrote {target.name}, which is also a file of the checkpoint: choose another name, or "
                    "remove the model's weights from the list that the hook receives"
                )
            else:
                path.rename(target)
        self.clear()
