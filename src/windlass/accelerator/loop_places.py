"""The folders of a loop's checkpoints: local paths or URLs, on one disk or on several."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from windlass.checkpoint.foreign import explain_unread
from windlass.checkpoint.manager import Checkpoint, CheckpointManager
from windlass.checkpoint.nodes import Disks, find_disks
from windlass.checkpoint.opening import open_on_all, open_store
from windlass.checkpoint.retention import Retention
from windlass.checkpoint.run_lock import RunLock
from windlass.checkpoint.store import Store
from windlass.config.loop_options import ProjectConfiguration
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.locations import is_url, local_folder, parent_of
from windlass.dist.gang import Gang


@dataclass(frozen=True, slots=True)
class StatePlace:
    """A folder of checkpoints, and their names in it.

    Attributes:
        parent: a path or a URL.
        name: the name of the checkpoints; contains `{step}` if they are numbered.
    """

    parent: str
    name: str

    def shown(self, step: int) -> str:
        """The path or URL of checkpoint `step`."""
        name = self.name.replace("{step}", str(step))
        return f"{self.parent}/{name}" if is_url(self.parent) else str(Path(self.parent, name))


class StatePlaces:
    """Resolves and opens the folders of a loop's checkpoints."""

    def __init__(self, all_ranks: Gang, project: ProjectConfiguration) -> None:
        self._all_ranks, self._project = all_ranks, project
        self._disks: dict[Path, Disks] = {}

    def find(self, folder: str | os.PathLike[str] | None, argument: str) -> StatePlace:
        """The place of the checkpoint `folder`; None means a numbered one of the project. `argument` is for errors."""
        if folder is None:
            return self._of_project(argument)
        if not is_url(folder):
            path = Path(folder).expanduser().absolute()
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
        root = folder if is_url(folder) else str(Path(folder).expanduser().absolute())
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
        manager = self._manager(place, Disks.shared(self._all_ranks.size))
        which: Literal[True] | str = True if folder is None else str(manager.store.path_for(0))
        divided = self._all_ranks.rank == 0 and _is_divided(manager.store, newest=folder is None)
        if self._all_ranks.broadcast_object(divided or is_url(place.parent)):
            manager = self.to_write(place)
        try:
            return open_on_all(manager, which, self._all_ranks)
        except CheckpointError as error:
            explained = explain_unread(Path(which)) if isinstance(which, str) else None
            if explained is None:
                raise
            raise CheckpointError(explained) from error


def _is_divided(store: Store, newest: bool) -> bool:
    """Return True if this folder has a part of a checkpoint whose other parts are on other machines."""
    # Only then ranks detect who shares the disk, because that needs a writable folder.
    try:
        here = store.list()
    except OSError:
        return False
    chosen = here[-1:] if newest else [info for info in here if info.path == store.path_for(0)]
    return any(not info.complete for info in chosen)


class SaveLock:
    """A lock that keeps two loops from saving to the same folder at the same time."""

    def __init__(self, store: Store, step: int) -> None:
        self._store, self._step = store, step
        self._lock = RunLock(store.root, f".windlass-{store.path_for(step).name}.lock")

    def take(self) -> None:
        """Take the lock, or raise `FolderInUse` after a few seconds. Collective."""

        def take() -> None:
            if self._store.is_writer:
                self._store.root.mkdir(parents=True, exist_ok=True)
                self._lock.acquire()

        self._store.on_all_ranks(self._step, take)

    def release(self) -> None:
        self._lock.release()
