"""Detects which ranks share a disk, with files: neither settings nor host names show if machines share a folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger
from windlass.dist.gang import Gang

_logger = get_logger(__name__)
# A network file system may take a moment to show what another machine wrote (seconds, all in all).
WAITS = (0.05, 0.15, 0.3, 0.5)


@dataclass(frozen=True, slots=True)
class Disks:
    """The disks of the output folder, for one rank. Machines that share a folder are one node."""

    # `node`, `nodes`: index of this rank's node, in order of their lowest ranks, and their number
    node: int
    nodes: int
    members: tuple[int, ...]  # the ranks on this node, ascending

    @classmethod
    def shared(cls, ranks: int) -> Disks:
        """One disk of all ranks."""
        return cls(0, 1, tuple(range(ranks)))

    @property
    def writer_rank(self) -> int:
        """The rank that creates, commits and removes the folders on this node."""
        return self.members[0]


def whole_on_one_disk(disks: Disks, field: str, folder: str) -> ConfigError:
    """The error of a checkpoint of whole tensors, which one rank writes, in a folder on several disks.

    Args:
        field: the setting that asks for whole tensors.
        folder: what the folder is called in the message.
    """
    fix = (
        f"{folder} lies on {disks.nodes} disks, and a checkpoint of whole tensors would lie on the first alone: "
        f"use SHARDED_STATE_DICT, or a folder that all machines share"
    )
    return ConfigError(Problem(field, "FULL_STATE_DICT", fix))


def find_disks(all_ranks: Gang, folder: Path) -> Disks:
    """Create `folder` on every machine and detect which ranks see the same one. Collective.

    The first rank of each machine creates a file with a random name; ranks that see it share its disk. Ranks that see
    none (the launcher did not set local ranks) create files of their own. Raises ConfigError if a machine cannot write
    there; on every rank.
    """
    if all_ranks.size == 1:
        return Disks.shared(1)
    seen = _look_for_marks(all_ranks, folder, writes=all_ranks.world.is_local_main)
    lost = {rank for rank, marks in enumerate(seen) if not marks}
    if lost:
        more = _look_for_marks(all_ranks, folder, writes=all_ranks.rank in lost)
        seen = [[*first, *second] for first, second in zip(seen, more, strict=True)]
    groups = _joined(seen)
    if len(groups) > 1 and all_ranks.rank == 0:
        _logger.info(
            "%s lies on %d disks: each keeps the files of its ranks (%s)",
            folder,
            len(groups),
            "; ".join(_ranks(group) for group in groups),
        )
    node = next(number for number, group in enumerate(groups) if all_ranks.rank in group)
    return Disks(node, len(groups), tuple(groups[node]))


def _look_for_marks(all_ranks: Gang, folder: Path, writes: bool) -> list[list[int]]:
    """The ranks whose marks each rank sees, by rank. Collective."""
    mark, problem = (folder / f".windlass-disk-{secrets.token_hex(8)}"), None
    try:
        if writes:
            try:
                _write(mark)
            except OSError as error:
                problem = str(error.strerror or error)
        gathered = all_ranks.gather_objects([mark.name if writes else None, problem])
        if failed := "; ".join(
            f"rank {rank}: {why}" for rank, (_, why) in enumerate(gathered) if why is not None
        ):
            fix = f"it can't be written ({failed}): choose another folder, or make room and permission"
            raise ConfigError(Problem("output_dir", str(folder), fix))
        names = {rank: name for rank, (name, _) in enumerate(gathered) if name is not None}
        # A rank that sees all marks need not wait; otherwise separate disks are likely.
        return all_ranks.gather_objects(_visible(folder, names))
    finally:
        # Not before the second exchange: all ranks have looked then.
        if writes:
            with contextlib.suppress(OSError):
                mark.unlink()


def _write(mark: Path) -> None:
    mark.parent.mkdir(parents=True, exist_ok=True)
    with mark.open("xb") as file:
        file.flush()
        os.fsync(file.fileno())


def _visible(folder: Path, names: dict[int, str]) -> list[int]:
    """The ranks whose marks exist; repeated for a while."""
    for wait in (*WAITS, 0.0):
        # Not `Path.exists`, which may raise: the other ranks wait in the exchange that follows.
        found = [rank for rank, name in names.items() if os.path.exists(folder / name)]
        if len(found) == len(names):
            break
        time.sleep(wait)
        with contextlib.suppress(OSError):
            os.listdir(folder)  # makes a network file system ask its server again
    return found


def _joined(seen: list[list[int]]) -> list[list[int]]:
    """Groups of ranks that share a disk: of two ranks one must see the mark of the other."""
    groups: list[set[int]] = []
    for rank, marks in enumerate(seen):
        together = {rank, *marks}
        touching = [group for group in groups if group & together]
        groups = [group for group in groups if not group & together]
        groups.append(together.union(*touching))
    return sorted(sorted(group) for group in groups)


def _ranks(group: list[int]) -> str:
    if len(group) == 1:
        return f"rank {group[0]}"
    whole_range = group == list(range(group[0], group[-1] + 1))
    return f"ranks {group[0]} to {group[-1]}" if whole_range else "ranks " + ", ".join(map(str, group))
