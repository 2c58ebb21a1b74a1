"""Save and load the checkpoints of a user's own loop, in local folders or at URLs, on one disk or on several."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from windlass.accelerator.accumulation import AccumulationState
from windlass.accelerator.engine import LoopEngine
from windlass.accelerator.prepared import Prepared
from windlass.accelerator.saved_parts import LoopContent, ModelState, check_fits, described_ranks
from windlass.accelerator.setup import Setup
from windlass.accelerator.value_files import warn_if_unsafe
from windlass.checkpoint.background import Ended, Saver
from windlass.checkpoint.content import Content
from windlass.checkpoint.foreign import explain_unread
from windlass.checkpoint.host_memory import HostMemory
from windlass.checkpoint.manager import Checkpoint, CheckpointManager
from windlass.checkpoint.nodes import Disks, find_disks
from windlass.checkpoint.opening import open_on_all, open_store
from windlass.checkpoint.retention import Retention
from windlass.checkpoint.run_lock import RunLock
from windlass.checkpoint.script_files import ScriptFiles
from windlass.checkpoint.store import LEFTOVERS, Store
from windlass.config.loop_options import ProjectConfiguration
from windlass.core.errors import CheckpointError, ConfigError, Problem, refuse
from windlass.core.job_signals import handled_later
from windlass.core.locations import at_home, is_url, local_folder, named, parent_of, working_folder
from windlass.core.logs import get_logger
from windlass.core.threads import THREADS, said_if_long, warn_of_other_threads
from windlass.dist.gang import Gang

_log = get_logger(__name__)

PATIENCE = 20.0  # seconds until a save names what it waits for

SaveHook = Callable[[list[nn.Module], list[dict[str, Tensor]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A save in the background, and the lock of its folder."""

    saver: Saver
    lock: RunLock


class LoopSaver:
    """Saves and loads everything that was prepared or registered; see the methods of `Accelerator`."""

    def __init__(
        self, setup: Setup, accumulation: AccumulationState, prepared: Prepared, engine: LoopEngine
    ) -> None:
        self._all_ranks, self._device, self._project = setup.all_ranks, setup.device, setup.settings.project
        self._accumulation, self._prepared, self._engine = accumulation, prepared, engine
        self._places = StatePlaces(self._all_ranks, self._project)
        self._content = LoopContent(self._all_ranks, setup.device, accumulation, prepared, engine)
        self._memory = HostMemory(setup.device)
        self._under_way: _UnderWay | None = None
        self.save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self.load_hooks: OrderedDict[int, LoadHook] = OrderedDict()

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save a checkpoint, and return its folder. Collective."""
        background = bool(save_model_func_kwargs.pop("background", False))
        self._check_options(safe_serialization, save_model_func_kwargs)
        self._warn_of_unfinished_update()
        self.finish()
        # Its lock would refuse this save, which is of the same loop.
        self._release()  # if Ctrl-C came between the end of the last save and this
        numbered, step = self._project.automatic_checkpoint_naming, self._project.iteration
        place = self._places.find(None if numbered else output_dir, "output_dir")
        refuse(place.objections())
        if self._all_ranks.size > 1:
            with _named_if_alone():
                self._all_ranks.barrier()
        manager, shown = self._places.to_write(place), place.shown(step)
        saver = Saver(manager, self._all_ranks, self._memory, exchanges=False)
        # Two loops never save to the same folder at the same time.
        lock = RunLock(manager.store.root, f".windlass-{manager.store.path_for(step).name}.lock")

        def ended(folder: Path | None) -> None:
            self._release()
            if folder is None:
                failure = manager.last_failure
                raise CheckpointError(f"{shown} was not saved: {failure}") from failure

        # Before it begins: Ctrl-C may come at any instant afterwards, and it goes on.
        self._under_way = _UnderWay(saver, lock)
        try:
            _take(lock, manager.store, step)
            if numbered:
                self._refuse_existing(manager, step)
            self._write(saver, step, background, ended)
        except BaseException as error:
            if not saver.busy:
                self._release()
                if isinstance(error, Exception):  # nothing was saved, on any process
                    self._project.iteration = step
            raise
        return shown

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a checkpoint into the prepared objects. Collective."""
        load_model_func_kwargs.pop("map_location", None)
        self._check_options(True, {**(load_kwargs or {}), **load_model_func_kwargs})
        self.finish()
        checkpoint = self._places.open(self._places.find(input_dir, "input_dir"), input_dir)
        check_fits(checkpoint, self._prepared)
        warn_of_other_threads(checkpoint.meta, self._device.type, checkpoint.folder)
        models = [strategy.module for strategy in self._prepared.strategies]
        for hook in self.load_hooks.values():
            hook(models, str(checkpoint.folder))
        if self.load_hooks:
            self._compare_left(models)
        self._content.load(checkpoint, models)
        if self._project.automatic_checkpoint_naming:
            # Of a folder that was named, later numbers may exist; the newest that is whole has none after it.
            earlier = 0 if input_dir is None else self._project.iteration
            self._project.iteration = max(earlier, checkpoint.step + 1)
        _log.info("Loaded the state of the loop from %s", checkpoint.folder)

    def _compare_left(self, models: list[nn.Module]) -> None:
        """Checkpoints number the models that hooks leave: with others left, ranks would load different weights.
        Collective.
        """
        own = [id(strategy.module) for strategy in self._prepared.strategies]
        left = [own.index(id(model)) if id(model) in own else None for model in models]
        everywhere = self._all_ranks.gather_objects(left)
        if any(other != left for other in everywhere):
            raise CheckpointError(
                f"load hooks have left other models on some processes than on others ({everywhere}, by number): "
                "a hook loads its model, and removes it from the list, on every process"
            )

    def finish(self) -> None:
        """Wait for the save in the background, if any, and raise `CheckpointError` if it failed. Collective."""
        saving = self._under_way
        if saving is None:
            return
        try:
            saving.saver.finish()
        except Exception:
            self._release()
            raise

    def _release(self) -> None:
        """Unlock the folder of a save that has ended."""
        if self._under_way is not None:
            self._under_way.lock.release()
            self._under_way = None

    def release_memory(self) -> None:
        """Release the models, and free the host memory of copies; a save in the background keeps its copy until it
        ends.
        """
        self._content.forget()
        self._memory.free()

    # --- writing ------------------------------------------------------------------------------------------------------

    def _check_options(self, safe_serialization: bool, options: Mapping[str, Any]) -> None:
        if not self._engine.saves_state:
            fix = "the Trainer saves its run itself: save_strategy, save_steps, trainer.save_model()"
            raise ConfigError(Problem("accelerator", "trainer.accelerator", fix))
        fix = "is not supported: checkpoints have one format and are loaded strictly"
        refuse(Problem(name, value, fix) for name, value in options.items())
        warn_if_unsafe(safe_serialization)

    def _warn_of_unfinished_update(self) -> None:
        if self._all_ranks.rank == 0 and not self._accumulation.sync_gradients:
            _log.warning(
                "save_state was called in the middle of an update: the gradients of its micro-batches so far are not "
                "saved, and a loop that resumes continues without them. Save if accelerator.sync_gradients is True."
            )

    def _refuse_existing(self, manager: CheckpointManager, step: int) -> None:
        store = manager.store
        target = store.path_for(step)
        exists = store.on_all_ranks(step, lambda: store.is_committed(target) or target.exists())
        if any(self._all_ranks.gather_objects(exists)):
            raise CheckpointError(
                f"{target} exists already: call load_state() to continue after it, or set another number with "
                "ProjectConfiguration(iteration=)"
            )

    def _write(self, saver: Saver, step: int, background: bool, ended: Ended) -> None:
        """Write the checkpoint, or start writing it."""
        store = saver.manager.store
        # If one process fails to read a state, the others must not wait for it: nor those that gather shards, which
        # follows.
        store.on_all_ranks(step, self._prepared.check_restorable)
        models, states = store.on_all_ranks(step, lambda: self._gathered(store.disks))
        hooked = ScriptFiles(store, step)
        hooked.clear()  # of a save that was interrupted
        try:
            content = self._with_models(store, step, models, states, hooked)
            meta = {"windlass": "loop", THREADS: torch.get_num_threads(), **described_ranks(self._all_ranks)}
            self._project.iteration = step + 1  # of the next save, however far this one comes
            saver.save(step, content, meta=meta, background=background, ended=ended)
        except BaseException:
            if not saver.busy:
                hooked.clear()
            raise

    def _gathered(self, disks: Disks) -> tuple[list[ModelState], Content]:
        """The content of the models, and everything else."""
        # Ctrl-C between two exchanges of sharded weights would leave the other ranks in the next one.
        with handled_later() if self._all_ranks.size > 1 else contextlib.nullcontext():
            models = self._content.models(disks, hooked=bool(self.save_hooks))
            return models, self._content.states(disks)

    def _with_models(
        self, store: Store, step: int, models: list[ModelState], states: Content, hooked: ScriptFiles
    ) -> Content:
        """`states`, the models that no hook saves itself, and the files of the hooks."""
        if not self.save_hooks:
            return store.on_all_ranks(
                step, lambda: self._content.whole(states, models, store.disks).encoded()
            )
        store.on_all_ranks(step, hooked.make)
        weights = [model.state for model in models]
        store.on_all_ranks(step, lambda: self._call_save_hooks(weights, hooked.folder))
        kept = self._kept(models, weights)
        content = store.on_all_ranks(step, lambda: self._content.whole(states, kept, store.disks).encoded())
        return replace(content, write_model=hooked.move_into)

    def _kept(self, models: list[ModelState], weights: list[dict[str, Tensor]]) -> list[ModelState]:
        """What the main process has left in the list, on all ranks: hooks remove models under `if is_main_process`, and
        each rank writes its part of a sharded one under the model's number. Collective.
        """
        numbers = {id(model.state): number for number, model in enumerate(models)}
        added = iter([state for state in weights if id(state) not in numbers])
        left = self._all_ranks.broadcast_object([numbers.get(id(state)) for state in weights])
        return [ModelState(next(added, {})) if number is None else models[number] for number in left]

    def _call_save_hooks(self, weights: list[dict[str, Tensor]], folder: Path) -> None:
        for hook in self.save_hooks.values():
            hook([strategy.module for strategy in self._prepared.strategies], weights, str(folder))


@dataclass(frozen=True, slots=True)
class StatePlace:
    """A folder of checkpoints, and their names in it."""

    parent: str  # a path or a URL
    name: str  # the name of the checkpoints; contains `{step}` if they are numbered

    def shown(self, step: int) -> str:
        """The path or URL of checkpoint `step`."""
        name = self.name.replace("{step}", str(step))
        return f"{self.parent}/{name}" if is_url(self.parent) else str(Path(self.parent, name))

    def objections(self) -> Iterator[Problem]:
        """A name under which a save of another folder would remove this one, as what an interrupted save left; and a
        folder that cannot be replaced as a whole.
        """
        for prefix in LEFTOVERS:
            if self.name.startswith(prefix):
                fix = f"a save of {self.name.removeprefix(prefix)!r} removes folders of this name: choose another"
                yield Problem("output_dir", self.name, fix)
        if Path(working_folder()).is_relative_to(self.shown(0)):
            fix = "a checkpoint replaces a folder as a whole, and the working directory lies in it: name a new folder"
            yield Problem("output_dir", self.shown(0), fix)


class StatePlaces:
    """Resolves and opens the folders of a loop's checkpoints."""

    def __init__(self, all_ranks: Gang, project: ProjectConfiguration) -> None:
        self._all_ranks, self._project = all_ranks, project
        self._disks: dict[Path, Disks] = {}

    def find(self, folder: str | os.PathLike[str] | None, argument: str) -> StatePlace:
        """The place of the checkpoint `folder`; None means a numbered one of the project. `argument` is for errors."""
        if folder is None:
            return self._of_project(argument)
        if "{step}" in Path(folder).name:
            fix = "the name has braces that no f-string replaced: write the number itself, or another name"
            raise ConfigError(Problem(argument, os.fspath(folder), fix))
        if not is_url(folder):
            path = named(at_home(folder).absolute())
            return StatePlace(str(path.parent), path.name)
        parent, name = parent_of(os.fspath(folder))
        if not is_url(parent):
            raise ConfigError(Problem(argument, os.fspath(folder), "name a folder in it for the checkpoint"))
        return StatePlace(parent, name)

    def _of_project(self, argument: str) -> StatePlace:
        project = self._project
        if not project.automatic_checkpoint_naming:
            fix = "give the folder, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            raise ConfigError(Problem(argument, None, fix))
        if project.project_dir is None:
            fix = "automatic_checkpoint_naming needs a folder: Accelerator(project_dir=...)"
            raise ConfigError(Problem("project_dir", None, fix))
        folder = project.project_dir
        root = folder if is_url(folder) else str(at_home(folder).absolute())
        return StatePlace(f"{root.rstrip('/')}/checkpoints", "checkpoint_{step}")

    def to_write(self, place: StatePlace) -> CheckpointManager:
        """The manager for writing to `place`. Collective: the first call detects which ranks share the disk."""
        root = local_folder(place.parent)
        if root not in self._disks:
            self._disks[root] = find_disks(self._all_ranks, root)
        return self._manager(place, self._disks[root])

    def _manager(self, place: StatePlace, disks: Disks) -> CheckpointManager:
        store = open_store(place.parent, self._all_ranks, disks, place.name)
        return CheckpointManager(store, Retention(self._project.total_limit))

    def open(self, place: StatePlace, folder: str | os.PathLike[str] | None) -> Checkpoint:
        """Open and verify the checkpoint `folder`, or the newest valid one if it is None. Collective."""
        # Files are hashed once: by the main process, or by one process per machine if machines share no disk.
        store = self._manager(place, Disks.shared(self._all_ranks.size)).store
        # A name that was given has no place for a number: that of each step is the same.
        which: Literal[True] | str = True if folder is None else str(store.path_for(0))
        divided = self._all_ranks.rank == 0 and _is_divided(store, newest=folder is None)
        if self._all_ranks.broadcast_object(divided or is_url(place.parent)):
            store = self.to_write(place).store
        try:
            return open_on_all(store, which, self._all_ranks)
        except CheckpointError as error:
            explained = explain_unread(Path(which)) if isinstance(which, str) else None
            if explained is None:
                raise
            raise CheckpointError(explained) from error


def _named_if_alone() -> contextlib.AbstractContextManager[None]:
    """Warn if the other processes do not come to a save for a while: a script may call it on the main process alone,
    and their next exchange would then wait for this process until `ddp_timeout`.
    """
    return said_if_long(
        PATIENCE,
        _log.warning,
        "save_state waits for the other processes, which have not called it for %g s. Call it on all of them: not "
        "under `if accelerator.is_main_process:`.",
        PATIENCE,
    )


def _is_divided(store: Store, newest: bool) -> bool:
    """Return True if this folder has a part of a checkpoint whose other parts are on other machines."""
    # Only then ranks detect who shares the disk, because that needs a writable folder.
    try:
        here = store.list()
    except OSError:
        return False
    chosen = here[-1:] if newest else [info for info in here if info.path == store.path_for(0)]
    return any(not info.complete for info in chosen)


def _take(lock: RunLock, store: Store, step: int) -> None:
    """Take the lock, or raise `FolderInUse` after a few seconds. Collective."""

    def take() -> None:
        if store.is_writer:
            store.root.mkdir(parents=True, exist_ok=True)
            lock.acquire()

    store.on_all_ranks(step, take)
