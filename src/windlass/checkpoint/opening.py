"""Opening the store of a run: a folder of this machine or a URL, one disk or several; and the checkpoint in it that all
ranks have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from windlass.checkpoint.export import whole_folder
from windlass.checkpoint.files import Files
from windlass.checkpoint.manager import Checkpoint
from windlass.checkpoint.manifest import CheckpointInfo, lies_elsewhere
from windlass.checkpoint.mirrored import MirroredStore
from windlass.checkpoint.nodes import Disks
from windlass.checkpoint.remote import Mirror, RemoteFolder
from windlass.checkpoint.staged import rank_stem
from windlass.checkpoint.store import Store, no_checkpoint
from windlass.checkpoint.verified import Handover, hand_over, take_over
from windlass.core.errors import CheckpointError
from windlass.core.locations import is_url, local_folder, parent_of
from windlass.core.logs import get_logger
from windlass.dist.gang import Gang

_OF_A_RUN = "checkpoint-{step}"


def open_store(
    output_dir: str, all_ranks: Gang | None = None, disks: Disks | None = None, name: str = _OF_A_RUN
) -> Store:
    """The checkpoints in `output_dir` as this rank of `all_ranks` sees them. Nothing is read or written yet. Raises
    ConfigError for a URL that cannot be opened.

    Args:
        name: of the folder of a checkpoint (see `Store`). Files beside checkpoints are uploaded only with the default,
            which is that of a Trainer's run.
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
    """If `output_dir` is a URL, upload the files beside checkpoints in its staging folder. Raises OSError if something
    did not arrive.
    """
    if is_url(output_dir):
        _mirror(output_dir, local_folder(output_dir), Disks.shared(1)).upload_loose()


def download_folder(output_dir: str, name: str, last: str) -> None:
    """Download a folder beside the checkpoints of a URL into its staging folder, all of it or nothing, if it has the
    file `last`, which completes it there. Raises OSError or CheckpointError if something did not arrive.
    """
    remote, files = RemoteFolder(output_dir).child(name), Files()
    if not remote.has(last):
        return
    with whole_folder(local_folder(output_dir) / name, files, lambda: None) as new:
        for one in filter(remote.has, remote.names()):
            files.write(new / one, remote.chunks(one))


def open_on_all(store: Store, which: Literal[True] | str, all_ranks: Gang) -> Checkpoint:
    """Open a checkpoint, for True the newest one that verifies. Collective: the main process, or one process of each
    disk, chooses and verifies for all, so nothing is hashed twice. Raises CheckpointError if there is none, or it is
    damaged; the same on every rank.
    """
    if store.disks.nodes > 1:
        return received(choose_on_all(store, which), store.files)
    chosen, problem = None, None
    if all_ranks.rank == 0:
        try:
            chosen = hand_over(store.resume_point(which))
        except (CheckpointError, OSError) as error:
            problem = str(error)
    chosen, problem = all_ranks.broadcast_object([chosen, problem])
    if problem is not None:
        raise CheckpointError(problem)
    return received(chosen, store.files)


def received(handover: Handover, files: Files) -> Checkpoint:
    """Open what another rank verified: files that are unchanged since are trusted, others hashed when they are read."""
    return Checkpoint(take_over(handover), files)


_logger = get_logger(__name__)
_Order = tuple[int, int]  # serial and step


@dataclass(frozen=True, slots=True)
class _Found:
    """What the writer rank of one disk found."""

    node: int
    order: _Order
    nodes: int
    held: tuple[int, ...]
    problem: str | None


def choose_on_all(store: Store, which: Literal[True] | str | Path) -> Handover:
    """What `resume_from_checkpoint` means, verified on every disk by its writer rank: True takes the last committed one
    of those that are complete on all disks. Collective. Raises CheckpointError if there is none, or this job cannot go
    on from it; the same on every rank.

    Returns:
        The checkpoint as it lies on this rank's disk.
    """
    info = _newest_on_all(store) if which is True else _at(store, Path(which))
    handovers = store.gather(None if info is None else hand_over(info))
    chosen: Handover = handovers[store.disks.writer_rank]
    _check_files_of_ranks(store, info)
    return chosen


def _at(store: Store, path: Path) -> CheckpointInfo | None:
    """Exactly the checkpoint at `path`; on writer ranks."""
    info, found = _verify(store, path)
    problems = _problems(found)
    if problems:
        raise CheckpointError("; ".join(problems))
    return info


def _newest_on_all(store: Store) -> CheckpointInfo | None:
    paths, problem = dict[_Order, Path](), None
    try:
        paths = {info.order: info.path for info in store.committed()} if store.is_writer else {}
    except OSError as error:  # raised here, it would leave the other ranks waiting
        problem = f"node {store.disks.node}: {store.root} cannot be listed: {error}"
    gathered = [found for found in store.gather([list(paths), problem] if store.is_writer else None) if found]
    if unreadable := [why for _, why in gathered if why is not None]:
        raise CheckpointError("; ".join(unreadable))
    of_nodes = [set(map(tuple, orders)) for orders, _ in gathered]
    reasons = []
    for order in sorted(set[_Order]().union(*of_nodes), reverse=True):
        absent = [str(node) for node, orders in enumerate(of_nodes) if order not in orders]
        if absent:
            reasons.append(f"{store.path_for(order[1])} is not on the disk of node {', '.join(absent)}")
            continue
        info, found = _verify(store, paths.get(order))
        problems = _problems(found)
        if not problems:
            if reasons and store.rank == 0:
                path, listed = store.path_for(order[1]), "".join(f"\n  - {why}" for why in reasons)
                _logger.warning("Resuming from %s; newer folders were skipped:%s", path, listed)
            return info
        reasons += problems
    listed = "".join(f"\n  - {why}" for why in reasons)
    raise CheckpointError(no_checkpoint(f"{store.root} on all {store.disks.nodes} nodes", listed))


def _verify(store: Store, path: Path | None) -> tuple[CheckpointInfo | None, list[_Found]]:
    """Verify `path` on the writer rank of each disk; return the checkpoint of this one, and what all found."""
    info, answer = None, tuple[Any, ...]()
    if store.is_writer:
        assert path is not None
        node = store.disks.node
        try:
            info = store.verify(path)
            # Plain values, which `gather` can carry.
            answer = node, info.order, info.nodes, info.held, None
        except CheckpointError as error:
            answer = node, (0, 0), 1, (0,), str(error)
    return info, [_Found(*values) for values in store.gather(answer) if values]


def _problems(found: list[_Found]) -> list[str]:
    """Why the disks do not have one complete checkpoint."""
    failed = [f"node {one.node}: {one.problem}" for one in found if one.problem is not None]
    if failed:
        return failed
    first = found[0]
    if any((one.order, one.nodes) != (first.order, first.nodes) for one in found):
        saves = ", ".join(f"node {one.node} has save {one.order[0]} of step {one.order[1]}" for one in found)
        return [f"the disks hold different saves: {saves}"]
    missing = set(range(first.nodes)).difference(*(one.held for one in found))
    if missing:
        nodes = ", ".join(map(str, sorted(missing)))
        return [
            f"what node {nodes} of {first.nodes} wrote at step {first.order[1]} is on no disk of this job"
        ]
    return []


def _check_files_of_ranks(store: Store, info: CheckpointInfo | None) -> None:
    """Check that every rank finds the files that it will read on its disk."""
    problem = None
    if info is not None and not info.complete:
        # Another number of ranks adopts the states of all that saved, and so needs the files of all.
        needed = store.disks.members if info.world_size == store.ranks else range(info.world_size)
        away = next((rank for rank in needed if f"{rank_stem(rank)}.json" not in info.files), None)
        if away is not None:
            name = f"{info.path / rank_stem(away)}.json"
            problem = f"node {store.disks.node}: {name} is missing{lies_elsewhere(info)}"
    problems = [why for why in store.gather(problem) if why is not None]
    if problems:
        raise CheckpointError("; ".join(problems))
