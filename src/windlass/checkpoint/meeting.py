"""Choosing a checkpoint that is complete on the disks of all machines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from windlass.checkpoint.manifest import CheckpointInfo, lies_elsewhere
from windlass.checkpoint.staged import rank_stem
from windlass.checkpoint.store import Store, no_checkpoint
from windlass.checkpoint.verified import Handover, hand_over
from windlass.core.errors import CheckpointError
from windlass.core.logs import get_logger

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
    """What `resume_from_checkpoint` means, verified on every disk by its writer rank: True takes the last
    committed one of those that are complete on all disks. Collective.

    Returns:
        The checkpoint as it lies on this rank's disk.

    Raises:
        CheckpointError: there is none, or this job cannot go on from it; the same on every rank.
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
    paths = {info.order: info.path for info in store.committed()} if store.is_writer else {}
    told = [orders for orders in store.gather(list(paths) if store.is_writer else None) if orders is not None]
    of_nodes = [set(orders) for orders in told]
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
        needed = store.disks.members if info.world_size == store.ranks else range(info.world_size)
        away = next((rank for rank in needed if f"{rank_stem(rank)}.json" not in info.files), None)
        if away is not None:
            name = f"{info.path / rank_stem(away)}.json"
            problem = f"node {store.disks.node}: {name} is missing{lies_elsewhere(info)}"
    problems = [why for why in store.gather(problem) if why is not None]
    if problems:
        raise CheckpointError("; ".join(problems))
