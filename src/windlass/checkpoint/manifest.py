"""The manifest: the one file that says a checkpoint is whole, and of what it consists.

A folder without a readable manifest is not a checkpoint, whatever its name and age.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from windlass.checkpoint import strict_json
from windlass.checkpoint.files import FileEntry, Files, Fingerprint
from windlass.core.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT, VERSION = "windlass-checkpoint", 1
MAX_MANIFEST_BYTES = 1 << 24
_MAX_RANKS = 1 << 20  # who reads a manifest may count them one by one
_MAX_STEP = (1 << 63) - 1
_PLAIN_DEPTH = 16
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NODE_MANIFEST = re.compile(r"node-\d{5,}\.manifest\.json")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The content of a manifest."""

    path: Path
    step: int  # optimizer updates
    world_size: int
    files: Mapping[str, FileEntry]  # size and hash by relative POSIX path
    meta: Mapping[str, Any] = field(default_factory=dict)
    serial: int = 0  # number of the commit in its folder, from 1; 0 if there is none
    # State on the disk of each file when its content was checked (`Files.check`)
    seen: Mapping[str, Fingerprint] = field(default_factory=dict)
    # `nodes`, `held`: the number of disks it was written to, and of which of them `files` are
    nodes: int = 1
    held: tuple[int, ...] = (0,)

    @property
    def complete(self) -> bool:
        """Return True if the folder has the files of every node."""
        return len(self.held) == self.nodes

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of the checkpoints of a folder: by commit, because a fresh run may follow a longer one."""
        return self.serial, self.step

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes, the manifest aside."""
        return sum(entry.size for entry in self.files.values())


def node_manifest_name(node: int) -> str:
    """Name of the copy of a node's manifest, which is kept if the folders of several nodes are merged."""
    return f"node-{node:05d}.manifest.json"


def is_manifest_name(name: str) -> bool:
    return name == MANIFEST_NAME or _NODE_MANIFEST.fullmatch(name) is not None


def manifest_bytes(
    step: int,
    world_size: int,
    entries: Mapping[str, FileEntry],
    meta: Mapping[str, Any],
    serial: int,
    node: int = 0,
    nodes: int = 1,
) -> bytes:
    """The text of a manifest: of a whole checkpoint, or of what lies on one of several nodes.

    Raises:
        CheckpointError: `meta` holds tensors, or a type that cannot be saved; or it is larger than is read.
    """
    from windlass.checkpoint import codec  # needs torch, which a reader of plain manifests does without

    tree, tensors = codec.encode(dict(meta))
    if tensors:
        raise CheckpointError(
            f"meta of a checkpoint holds tensors ({', '.join(tensors)}); put them into a state"
        )
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "serial": serial,
        "step": step,
        "world_size": world_size,
        "files": listing(entries),
        "meta": tree,
    }
    if nodes > 1:
        body |= {"node": node, "nodes": nodes}
    text = strict_json.dump(body | {"sha256": _seal(body)}, MANIFEST_NAME)
    if len(text) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"{MANIFEST_NAME} would have {len(text):,} bytes, of which at most {MAX_MANIFEST_BYTES:,} are read: "
            f"{len(entries):,} files are too many for one checkpoint"
        )
    return text


def listing(entries: Mapping[str, FileEntry]) -> dict[str, dict[str, int | str]]:
    """Files as JSON, by name."""
    return {name: {"size": entries[name].size, "sha256": entries[name].sha256} for name in sorted(entries)}


def _seal(body: Mapping[str, Any]) -> str:
    """Hash of the manifest's own content, so that a flipped bit in it is found as in any other file."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path, files: Files) -> CheckpointInfo:
    """Read and check `folder/manifest.json`, and those of other nodes whose folders were merged into this one."""
    path = folder / MANIFEST_NAME
    if not path.exists() and not path.is_symlink():
        raise CheckpointError(
            f"it has no {MANIFEST_NAME}: the save never finished, or another program wrote it"
        )
    info = parse_manifest(folder, files.read(path, MAX_MANIFEST_BYTES))
    if info.nodes > 1:
        for other in sorted(path.name for path in folder.iterdir() if _NODE_MANIFEST.fullmatch(path.name)):
            data = files.read(folder / other, MAX_MANIFEST_BYTES)
            info = _joined(info, parse_manifest(folder, data, other), other)
    return info


def _joined(info: CheckpointInfo, other: CheckpointInfo, name: str) -> CheckpointInfo:
    """`info` with the files of another node; of those that both list (shared parts) it has its own."""
    if (other.order, other.world_size, other.nodes) != (info.order, info.world_size, info.nodes):
        raise CheckpointError(f"{info.path / name} is of another save than {MANIFEST_NAME} beside it")
    held = tuple(sorted({*info.held, *other.held}))
    return replace(info, files={**other.files, **info.files}, held=held)


def parse_manifest(folder: Path, data: bytes, name: str = MANIFEST_NAME) -> CheckpointInfo:
    """Parse and check the manifest of the checkpoint in `folder`."""
    path = folder / name
    body = strict_json.parse(data, str(path))
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a Windlass checkpoint")
    version = body.get("version")
    # By type, here and below: True is an instance of int.
    if type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{path} has layout version {str(version)[:40]}; this Windlass reads up to {VERSION}"
        )
    if body.pop("sha256", None) != _seal(body):
        raise CheckpointError(f"{path} is damaged: its content does not match its own hash")
    return _info(folder, path, body)


def _info(folder: Path, path: Path, body: dict[str, Any]) -> CheckpointInfo:
    step, world, listed, meta = (body.get(key) for key in ("step", "world_size", "files", "meta"))
    if (
        type(step) is not int
        or not 0 <= step <= _MAX_STEP
        or type(world) is not int
        or not 1 <= world <= _MAX_RANKS
    ):
        raise CheckpointError(f"{path} is malformed: step and world_size must be whole numbers of a run")
    serial = body.get("serial", 0)
    if type(serial) is not int or not 0 <= serial <= _MAX_STEP:
        raise CheckpointError(f"{path} is malformed: serial must be a whole number")
    node, nodes = body.get("node", 0), body.get("nodes", 1)
    if type(node) is not int or type(nodes) is not int or not 0 <= node < nodes <= world:
        raise CheckpointError(f"{path} is malformed: node must be below nodes, and nodes at most world_size")
    if not isinstance(listed, dict) or not isinstance(meta, dict):
        raise CheckpointError(f"{path} is malformed: files and meta must be maps")
    entries = {_safe_name(name, path): _entry(name, entry, path) for name, entry in listed.items()}
    meta = _decoded(meta)
    if not isinstance(meta, dict):
        raise CheckpointError(f"{path} is malformed: meta must be a map")
    return CheckpointInfo(folder, step, world, entries, meta, serial, nodes=nodes, held=(node,))


def _decoded(meta: Any) -> Any:
    if not _has_tags(meta):
        return meta
    from windlass.checkpoint import codec

    return codec.decode(meta, {})


def _has_tags(tree: Any) -> bool:
    """Return True if `tree` is not the plain data that it encodes; also if it is nested deeper than meta usually is."""
    pending = [(tree, 0)]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, dict):
            if depth > _PLAIN_DEPTH or any(key.startswith("$") for key in value):
                return True
            pending += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            if depth > _PLAIN_DEPTH:
                return True
            pending += [(item, depth + 1) for item in value]
    return False


def _entry(name: str, entry: Any, path: Path) -> FileEntry:
    size, digest = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    if type(size) is not int or size < 0 or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise CheckpointError(f"{path} is malformed: the entry of {name[:100]!r} needs size and sha256")
    return FileEntry(size, digest)


def _safe_name(name: str, path: Path) -> str:
    parts = name.split("/")
    # Backslashes and colons make paths, drives and streams on Windows.
    if len(name) > 1000 or any(part in ("", ".", "..") for part in parts) or any(c in name for c in "\\:\0"):
        raise CheckpointError(f"{path} names {name[:100]!r}, which does not lie inside the checkpoint")
    return name


def lies_elsewhere(info: CheckpointInfo) -> str:
    """An addition to "... is missing" if the folder has the files of some nodes only, else ""."""
    if info.complete:
        return ""
    here = ", ".join(map(str, info.held))
    return (
        f": this folder has what node {here} of {info.nodes} wrote to a disk of its own. Start as many processes on "
        f"the same machines in the same order, or copy {info.path.name} of all of them into one folder"
    )


def check_sizes(info: CheckpointInfo) -> None:
    """Check that every file exists, is a plain file and has its size."""
    for name, entry in info.files.items():
        path = info.path
        # Each folder on the way too: a link there would lead out of the checkpoint.
        for part in name.split("/"):
            path = path / part
            if path.is_symlink():
                raise CheckpointError(f"{path} is a symbolic link; a checkpoint holds plain files only")
        if not path.exists():
            raise CheckpointError(f"{path} is missing")
        if not path.is_file():
            raise CheckpointError(f"{path} is not a plain file")
        size = path.stat().st_size
        if size != entry.size:
            raise CheckpointError(
                f"{path} is damaged: it has {size:,} bytes and was saved with {entry.size:,}"
            )


def check_content(info: CheckpointInfo, files: Files) -> CheckpointInfo:
    """Check all sizes, then all hashes; return `info` with `seen`."""
    check_sizes(info)
    seen = {name: files.check(info.path / name, entry) for name, entry in info.files.items()}
    return replace(info, seen=seen)
