"""Reading a verified checkpoint: each byte that is loaded was hashed once.

A file may change between verifying and loading. So inode, size and times of change are recorded when it is verified.
If they are equal, it is read without hashing it again; otherwise it is hashed first. If they change while it is read,
it is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

from windlass.checkpoint.files import Files, Fingerprint, fingerprint
from windlass.checkpoint.manifest import CheckpointInfo, lies_elsewhere, manifest_bytes, parse_manifest
from windlass.core.errors import CheckpointError

Handover = dict[str, Any]  # plain JSON values


class VerifiedFiles(Files):
    """The files of one checkpoint, for reading. A file that its manifest does not list is refused."""

    def __init__(self, info: CheckpointInfo, files: Files) -> None:
        self._info, self.plain = info, files
        self._seen: dict[str, Fingerprint] = dict(info.seen)

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[FileIO]:
        name = path.relative_to(self._info.path).as_posix()
        if name not in self._info.files:
            raise CheckpointError(f"{path} is not in the checkpoint's manifest{lies_elsewhere(self._info)}")
        with self.plain.reading(path) as file:
            # Of the open file and not of the path, where another file may be by now.
            opened = fingerprint(file)
            if self._seen.get(name) != opened:
                self._seen[name] = opened = self.plain.check(path, self._info.files[name])
            yield file
            if fingerprint(file) != opened:
                raise CheckpointError(
                    f"{path} changed while it was read: what was read is not what was verified"
                )


def hand_over(info: CheckpointInfo) -> Handover:
    """A verified checkpoint as plain values, for ranks that are to trust this one's verification."""
    manifest = manifest_bytes(info.step, info.world_size, info.files, info.meta, info.serial)
    seen = {name: list(state) for name, state in info.seen.items()}
    held = {"nodes": info.nodes, "held": list(info.held)}
    return {"path": str(info.path), "manifest": manifest.decode("ascii"), "seen": seen, **held}


def take_over(handover: Handover) -> CheckpointInfo:
    """What `hand_over` gave, on another rank."""
    info = parse_manifest(Path(handover["path"]), handover["manifest"].encode("ascii"))
    seen = {name: (state[0], state[1], state[2], state[3]) for name, state in handover["seen"].items()}
    return replace(info, seen=seen, nodes=handover["nodes"], held=tuple(handover["held"]))
