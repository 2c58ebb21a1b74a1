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

from windlass.checkpoint import codec, strict_json
from windlass.checkpoint.files import FileEntry, Files, Fingerprint
from windlass.core.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT, VERSION = "windlass-checkpoint", 1
MAX_MANIFEST_BYTES = 1 << 24
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a manifest says. `step` counts optimizer updates; `files` maps relative POSIX paths to size and
    hash. `serial` counts the commits of the folder it lies in, from 1; 0 where an early version wrote none.

    `seen` says of each file whose content was checked how it stood then (`Files.check`).
    """

    path: Path
    step: int
    world_size: int
    files: Mapping[str, FileEntry]
    meta: Mapping[str, Any] = field(default_factory=dict)
    serial: int = 0
    seen: Mapping[str, Fingerprint] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, int]:
        """Place among the checkpoints of a folder: by commit, not by step, for a fresh run may follow a longer one."""
        return self.serial, self.step

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes, the manifest aside."""
        return sum(entry.size for entry in self.files.values())


def manifest_bytes(
    step: int, world_size: int, entries: Mapping[str, FileEntry], meta: Mapping[str, Any], serial: int
) -> bytes:
    """The text of a manifest.

    Raises:
        CheckpointError: `meta` holds tensors, or a type that cannot be saved.
    """
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
    return strict_json.dump(body | {"sha256": _seal(body)}, MANIFEST_NAME)


def listing(entries: Mapping[str, FileEntry]) -> dict[str, dict[str, int | str]]:
    """Files as JSON, by name."""
    return {name: {"size": entries[name].size, "sha256": entries[name].sha256} for name in sorted(entries)}


def _seal(body: Mapping[str, Any]) -> str:
    """Hash of the manifest's own content, so that a flipped bit in it is found as in any other file."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path, files: Files) -> CheckpointInfo:
    """Read and check `folder/manifest.json`; the files it names are not looked at.

    Raises:
        CheckpointError: it is missing, damaged, of a newer version, or names files outside the folder.
    """
    path = folder / MANIFEST_NAME
    if not path.exists() and not path.is_symlink():
        raise CheckpointError(
            f"it has no {MANIFEST_NAME}: the save never finished, or another program wrote it"
        )
    return parse_manifest(folder, files.read(path, MAX_MANIFEST_BYTES))


def parse_manifest(folder: Path, data: bytes) -> CheckpointInfo:
    """What the manifest `data` of the checkpoint in `folder` says.

    Raises:
        CheckpointError: it is damaged, of a newer version, or names files outside the folder.
    """
    path = folder / MANIFEST_NAME
    body = strict_json.parse(data, str(path))
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a Windlass checkpoint")
    version = body.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{path} has layout version {str(version)[:40]}; this Windlass reads up to {VERSION}"
        )
    if body.pop("sha256", None) != _seal(body):
        raise CheckpointError(f"{path} is damaged: its content does not match its own hash")
    return _info(folder, path, body)


def _info(folder: Path, path: Path, body: dict[str, Any]) -> CheckpointInfo:
    step, world, listed, meta = (body.get(key) for key in ("step", "world_size", "files", "meta"))
    if type(step) is not int or step < 0 or type(world) is not int or world < 1:
        raise CheckpointError(f"{path} is malformed: step and world_size must be whole numbers")
    serial = body.get("serial", 0)
    if type(serial) is not int or serial < 0:
        raise CheckpointError(f"{path} is malformed: serial must be a whole number")
    if not isinstance(listed, dict) or not isinstance(meta, dict):
        raise CheckpointError(f"{path} is malformed: files and meta must be maps")
    entries = {_safe_name(name, path): _entry(name, entry, path) for name, entry in listed.items()}
    return CheckpointInfo(folder, step, world, entries, codec.decode(meta, {}), serial)


def _entry(name: str, entry: Any, path: Path) -> FileEntry:
    size, digest = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    if type(size) is not int or size < 0 or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise CheckpointError(f"{path} is malformed: the entry of {name[:100]!r} needs size and sha256")
    return FileEntry(size, digest)


def _safe_name(name: str, path: Path) -> str:
    parts = name.split("/")
    if len(name) > 1000 or any(part in ("", ".", "..") for part in parts) or any(c in name for c in "\\:\0"):
        raise CheckpointError(f"{path} names {name[:100]!r}, which does not lie inside the checkpoint")
    return name


def check_sizes(info: CheckpointInfo) -> None:
    """The quick check: every file is there, plain and of its size. Reads no content.

    Raises:
        CheckpointError: naming the first file that is not.
    """
    for name, entry in info.files.items():
        path = info.path
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
    """The full check: sizes first, then every hash. Gives `info` with what was `seen`.

    Raises:
        CheckpointError: naming the first file that is wrong.
    """
    check_sizes(info)
    seen = {name: files.check(info.path / name, entry) for name, entry in info.files.items()}
    return replace(info, seen=seen)
