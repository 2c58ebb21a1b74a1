"""Checkpoints on the Hub: `hub:OWNER/NAME[@REVISION][/FOLDER]`."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

from windlass.checkpoint.files import Files
from windlass.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, CheckpointInfo, parse_manifest
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.whole_file import parse_json
from windlass.hub.client import HubClient, HubError
from windlass.hub.publisher import LAST
from windlass.hub.staging import STAGING, StagedFiles, remove_stale

SCHEME = "hub:"
_NEWEST = "fetched.json"  # address -> folder, of the last call
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_ADDRESS = re.compile(
    r"hub:(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/\s]+))?(?:/(?P<folder>\S+?))?/?"
)


def fetch(address: str, token: str | None, folder: Path) -> Path:
    """Download a checkpoint into the run's `folder`, and return where it is. Its hashes are verified when it is opened.

    All files are of the one commit that the branch points to when this begins. A checkpoint that was downloaded before
    is used again if its manifest and the sizes of its files are the same.

    Args:
        address: `hub:OWNER/NAME[@REVISION][/FOLDER]`; the folder is `last-checkpoint` by default. A slash in the name
            of a branch is written %2F.

    Raises:
        ConfigError: it is not an address. CheckpointError: there is no such checkpoint, or it cannot be downloaded.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        fix = "name a repository as hub:OWNER/NAME, with @REVISION and /FOLDER if needed"
        raise ConfigError(Problem("resume_from_checkpoint", address, fix))
    # Of its own, because processes that find the checkpoint there read its manifest again at the same time.
    place, files = match["folder"] or LAST, StagedFiles(folder)
    try:
        remove_stale(folder)
        staged = files.path
        client = HubClient(match["repository"], token)
        commit = client.commit_of(unquote(match["revision"] or "") or None)
        sizes = client.sizes(place, commit)
        listed = sizes.get(f"{place}/{MANIFEST_NAME}")
        if listed is None:
            raise CheckpointError(
                f"{address} has no checkpoint in {place}; a run with hub_strategy='checkpoint' uploads one"
            )
        if listed > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{address} has a {MANIFEST_NAME} of {listed:,} bytes; at most {MAX_MANIFEST_BYTES:,} are read"
            )
        path = client.fetch(f"{place}/{MANIFEST_NAME}", commit, staged)
        manifest = Files().read(path, MAX_MANIFEST_BYTES)
        info = parse_manifest(staged / place, manifest)
        target = folder / STAGING / f"checkpoint-{info.step}"
        if not _holds(target, manifest, info):
            _check_listed(address, info, {name: sizes.get(f"{place}/{name}") for name in info.files})
            for name in info.files:
                client.fetch(f"{place}/{name}", commit, staged)
            _put(staged / place, target, manifest, info)
        # Last: who finds the name finds the whole checkpoint.
        (staged / _NEWEST).write_text(json.dumps({address: target.name}), "utf-8")
        (staged / _NEWEST).replace(folder / STAGING / _NEWEST)
        return target
    except HubError as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:  # one kind of error, because other ranks wait for it
        raise CheckpointError(f"{address} cannot be downloaded into {folder}: {error}") from error
    finally:
        files.remove()


def _holds(target: Path, manifest: bytes, info: CheckpointInfo) -> bool:
    """Return True if a folder has this checkpoint, with all files in their sizes."""
    path = target / MANIFEST_NAME
    if not (path.is_file() and path.read_bytes() == manifest):
        return False
    files = {name: target / name for name in info.files}
    return all(
        file.is_file() and file.stat().st_size == info.files[name].size for name, file in files.items()
    )


def _put(made: Path, target: Path, manifest: bytes, info: CheckpointInfo) -> None:
    """Move a whole download to its place. Another machine of the job may have put the same checkpoint there meanwhile,
    on a disk that they share: that one stays, because its ranks read it.
    """
    try:
        made.rename(target)
    except OSError:  # the place is taken
        if not _holds(target, manifest, info):
            shutil.rmtree(target, ignore_errors=True)
            made.rename(target)


def _check_listed(address: str, info: CheckpointInfo, listed: Mapping[str, int | None]) -> None:
    """Refuse a checkpoint before its files are downloaded if they cannot be those of its manifest."""
    for name, entry in info.files.items():
        if listed[name] is None:
            raise CheckpointError(f"{address} is damaged: {name} is missing")
        if listed[name] != entry.size:
            raise CheckpointError(
                f"{address} is damaged: {name} has {listed[name]:,} bytes and was saved with {entry.size:,}"
            )


def fetched_before(address: str, folder: Path) -> Path:
    """Where `fetch` of another process of this job has put the checkpoint: the branch may have moved since. Raises
    CheckpointError if it is not there, as on a machine with a disk of its own.
    """
    found, names = folder / STAGING / _NEWEST, None
    if found.is_file():
        with contextlib.suppress(ValueError):
            names = parse_json(Files().read(found, MAX_MANIFEST_BYTES))
    name = names.get(address) if isinstance(names, dict) else None
    if not isinstance(name, str) or not _CHECKPOINT.fullmatch(name):
        raise CheckpointError(
            f"{address} was not downloaded into {folder} by the first process of this machine"
        )
    return folder / STAGING / name
