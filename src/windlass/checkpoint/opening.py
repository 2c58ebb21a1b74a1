"""Opening the store of a run: a folder of this machine or a URL, one disk or several."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from windlass.checkpoint.manager import Checkpoint, CheckpointManager
from windlass.checkpoint.meeting import choose_on_all
from windlass.checkpoint.mirrored import MirroredStore
from windlass.checkpoint.nodes import Disks
from windlass.checkpoint.remote import Mirror, RemoteFolder
from windlass.checkpoint.store import Store
from windlass.core.errors import CheckpointError
from windlass.core.locations import is_url, local_folder, parent_of
from windlass.dist.gang import Gang

_OF_A_RUN = "checkpoint-{step}"


def open_store(
    output_dir: str,
    all_ranks: Gang | None = None,
    disks: Disks | None = None,
    name: str = _OF_A_RUN,
) -> Store:
    """The checkpoints in `output_dir` as this rank of `all_ranks` sees them. Nothing is read or written yet.

    Args:
        name: of the folder of a checkpoint (see `Store`). Files beside checkpoints are uploaded only with the default,
            which is that of a Trainer's run.

    Raises:
        ConfigError: a URL that cannot be opened.
    """
    all_ranks = all_ranks or Gang()
    disks = disks or Disks.shared(all_ranks.size)
    folder = local_folder(output_dir)
    if not is_url(output_dir):
        return Store(folder, all_ranks=all_ranks, disks=disks, name=name)
    return MirroredStore(
        _mirror(output_dir, folder, disks, name), all_ranks=all_ranks, disks=disks, name=name
    )


def _mirror(url: str, folder: Path, disks: Disks, name: str = _OF_A_RUN) -> Mirror:
    """Machines that do not share a staging folder upload into separate folders."""
    remote = RemoteFolder(url)
    own = remote if disks.nodes == 1 else remote.child(f"node-{disks.node:05d}")
    uploads_more = disks.node == 0 and name == _OF_A_RUN
    return Mirror(folder, own, loose=remote if uploads_more else None, name=name)


def store_of_checkpoint(url: str, all_ranks: Gang, disks: Disks) -> tuple[Store, str]:
    """The store that the checkpoint at `url` belongs to, and the checkpoint's path on this machine."""
    parent, name = parent_of(url)
    if re.fullmatch(r"checkpoint-\d+", name) is None:
        raise CheckpointError(f"Can't find a valid checkpoint at {url}: its last part is not checkpoint-N")
    store = open_store(parent, all_ranks, disks)
    return store, str(store.root / name)


def upload_files(output_dir: str) -> None:
    """If `output_dir` is a URL, upload the files beside checkpoints in its staging folder.

    Raises:
        OSError: something did not arrive.
    """
    if is_url(output_dir):
        _mirror(output_dir, local_folder(output_dir), Disks.shared(1)).upload_loose()


def open_on_all(manager: CheckpointManager, which: Literal[True] | str, all_ranks: Gang) -> Checkpoint:
    """Open a checkpoint, for True the newest one that verifies. Collective: the main process, or one process of each
    disk, chooses and verifies for all, so nothing is hashed twice.

    Raises:
        CheckpointError: there is none, or it is damaged; the same on every rank.
    """
    if manager.store.disks.nodes > 1:
        return manager.receive(choose_on_all(manager.store, which))
    chosen, problem = None, None
    if all_ranks.rank == 0:
        try:
            chosen = manager.choose(which)
        except (CheckpointError, OSError) as error:
            problem = str(error)
    chosen, problem = all_ranks.broadcast_object([chosen, problem])
    if problem is not None:
        raise CheckpointError(problem)
    return manager.receive(chosen)
