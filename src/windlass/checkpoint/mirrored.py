"""A store whose checkpoints are also in a remote folder: uploaded after the commit, and fetched from there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from windlass.checkpoint.manifest import CheckpointInfo
from windlass.checkpoint.remote import Mirror, Uploaded
from windlass.checkpoint.staged import StagedCheckpoint
from windlass.checkpoint.store import Store
from windlass.core.errors import CheckpointError
from windlass.core.logs import get_logger

_logger = get_logger(__name__)
# What a resumed run cuts back and continues.
_ROW_FILES = ("metrics.jsonl", "answers.jsonl")
_Infos = list[CheckpointInfo]
_Paths = list[Path]


class MirroredStore(Store):
    """Commit each save on this machine, then upload it. A save that could not be uploaded has failed, although it is
    committed here. Nothing here communicates with other ranks.

    Args:
        mirror: the remote folder. Only writer ranks write to it.
        options: those of `Store`.
    """

    def __init__(self, mirror: Mirror, **options: Any) -> None:
        super().__init__(mirror.root, **options)
        self.mirror = mirror

    def commit(self, staged: StagedCheckpoint) -> None:
        super().commit(staged)
        if self.is_writer:
            self.mirror.upload(self._read(staged.target))
            self._catch_up()

    def _catch_up(self) -> None:
        """Upload other files of the run, and checkpoints whose upload failed or was interrupted earlier. Errors do not
        affect the new checkpoint.
        """
        try:
            self.mirror.upload_loose()
            there = {one.info.order for one in self.mirror.list()}
            # Those here: `whole` of this class lists the remote folder.
            for info in super().whole():
                if info.order not in there:
                    self.mirror.upload(info)
        except OSError as error:
            _logger.warning(
                "not everything was uploaded; the next save tries again: %s", error.strerror or error
            )

    def remove(self, path: Path) -> None:
        """Remove a checkpoint here and in the remote folder. Leftovers of replacements and interrupted saves are
        removed here only: the remote one of their step may be the only one there.
        """
        if path == self.path_for(self._step_in(path) or 0):
            self.mirror.remove(path)
        if path.exists():
            super().remove(path)

    def committed(self) -> _Infos:
        found = {info.order: info for info in (*self._elsewhere(), *self.list())}
        return [info for _, info in sorted(found.items())]

    def _elsewhere(self) -> _Infos:
        try:
            return [one.info for one in self.mirror.list()]
        except OSError as error:  # the next save tries again
            _logger.warning("%s; going by what was seen there before", error.strerror or error)
            return list(self.mirror.seen)

    def whole(self) -> _Infos:
        """Those in the remote folder: retention there must not count local ones."""
        return [one.info for one in self.mirror.list()]

    def is_fresh(self) -> bool:
        """Return True if there is no checkpoint here or there. Raises CheckpointError if the remote folder cannot be
        reached.
        """
        return super().is_fresh() and not self._uploaded() and not self._of_other_nodes()

    def is_committed(self, path: Path) -> bool:
        return super().is_committed(path) or self._uploaded_at(path) is not None

    def verify(self, path: Path | str) -> CheckpointInfo:
        """Check every byte of the checkpoint at `path`, which is fetched if this machine has none or an older one.
        Raises CheckpointError if neither here nor there is a whole one.
        """
        path = Path(path)
        info, problem = None, ""
        try:
            info = super().verify(path)
        except CheckpointError as error:
            problem = str(error)
        uploaded = self._newer_at(path, info)
        if uploaded is None:
            if info is None:
                raise CheckpointError(problem)
            return info
        _logger.info("fetching %s/%s: %s", self.mirror.remote.url, uploaded.name, problem or "it is newer")
        try:
            self.mirror.fetch(uploaded, self.files)
            for name in _ROW_FILES:
                self.mirror.fetch_loose(name, self.files)
        except OSError as error:
            raise CheckpointError(
                f"Can't find a valid checkpoint at {path}: {error.strerror or error}"
            ) from error
        return super().verify(path)

    def _newest_first(self) -> _Paths:
        ages = {path: self._age_rank(path) for path in self.folders()}
        for one in self._uploaded():
            # True counts as newest: a remote checkpoint takes the place of a local one that cannot be read.
            unreadable, order = ages.get(one.info.path, (True, (0, 0)))
            if unreadable or order < one.info.order:
                ages[one.info.path] = False, one.info.order
        if not ages and self._of_other_nodes():
            raise CheckpointError(
                f"{self.mirror.remote.url} was written by machines with disks of their own: start as many, or copy "
                "checkpoint-N of all its node-* folders into one folder and resume from that"
            )
        return sorted(ages, key=ages.__getitem__, reverse=True)

    def _newer_at(self, path: Path, info: CheckpointInfo | None) -> Uploaded | None:
        """The remote counterpart of `path`, if it is newer than the complete one here."""
        try:
            uploaded = self._uploaded_at(path)
        except CheckpointError as error:
            if info is None:
                raise
            _logger.warning("%s; going by %s, which is whole", error, path)
            return None
        return uploaded if info is None or uploaded is None or uploaded.info.order > info.order else None

    def _uploaded_at(self, path: Path) -> Uploaded | None:
        return next((one for one in reversed(self._uploaded()) if one.info.path == path), None)

    def _uploaded(self) -> list[Uploaded]:
        """The checkpoints in the remote folder. Raises CheckpointError if it cannot be reached: what was newest there
        is not known then.
        """
        with _reaching():
            return list(self.mirror.list())

    def _of_other_nodes(self) -> bool:
        with _reaching():
            return self.mirror.of_other_nodes()


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"the remote folder cannot be read: {error.strerror or error}") from error
