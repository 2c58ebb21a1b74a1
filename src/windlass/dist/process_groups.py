"""The process groups of a job, each of which is opened once, with the timeout of the run."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class ProcessGroups:
    """Opens groups of the job's ranks within the default group, which is open.

    Attributes:
        timeout: how long the opening of a group, and a collective of it, waits for the other ranks.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._open: dict[tuple[str | None, tuple[tuple[int, ...], ...]], Any] = {}

    def of(self, parts: Iterable[Iterable[int]], backend: str | None = None) -> Any:
        """The group of this rank's part of the job. Collective in the job, if these parts have no groups yet.

        Args:
            parts: ranks, each in one part: the same on every rank.
            backend: None is that of the default group, which may depend on the device.
        """
        backend = None if backend == dist.get_backend() else backend
        sorted_parts = tuple(tuple(sorted(part)) for part in parts)
        key = backend, sorted_parts
        if key not in self._open:
            is_default = len(sorted_parts) == 1 and backend is None
            self._open[key] = dist.group.WORLD if is_default else self._opened(sorted_parts, backend)
        return self._open[key]

    def _opened(self, parts: tuple[tuple[int, ...], ...], backend: str | None) -> Any:
        # Every rank opens the groups of all parts, in the same order, and gets the one that it is in.
        lists = [list(part) for part in parts]
        group, _ = dist.new_subgroups_by_enumeration(lists, self.timeout, backend)  # type: ignore[no-untyped-call]
        return group

    def among(self, ranks: list[int]) -> Any:
        """A group of these ranks, in ascending order, on the default backend. Collective among them alone."""
        return dist.new_group(ranks, self.timeout, use_local_synchronization=True)

    def limit(self, group: Any) -> None:
        """Let the collectives of a group that others opened wait as long as those of these groups: torch gives each new
        group a timeout of its own.
        """
        if group is not dist.group.WORLD:  # the script may have opened that one, with its timeout
            dist.distributed_c10d._set_pg_timeout(self.timeout, group)
