"""Checkpoints on the Hub: `hub:OWNER/NAME[@REVISION][/FOLDER]`."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from windlass.checkpoint.manifest import MANIFEST_NAME, parse_manifest
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.hub.client import HubClient, HubError
from windlass.hub.publisher import LAST
from windlass.hub.staging import STAGING

SCHEME = "hub:"
_ADDRESS = re.compile(r"hub:(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/\s]+))?(?:/(?P<folder>\S+))?")


def fetch(address: str, token: str | None, folder: Path) -> Path:
    """Download a checkpoint into the run's `folder`, and return where it is. Its hashes are verified when it is opened.

    All files are of the one commit that the branch points to when this begins. A checkpoint that was downloaded before
    is used again if its manifest is the same.

    Args:
        address: `hub:OWNER/NAME[@REVISION][/FOLDER]`; the folder is `last-checkpoint` by default.

    Raises:
        ConfigError: it is not an address. CheckpointError: there is no such checkpoint, or it cannot be downloaded.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        fix = "name a repository as hub:OWNER/NAME, with @REVISION and /FOLDER if needed"
        raise ConfigError(Problem("resume_from_checkpoint", address, fix))
    client = HubClient(match["repository"], token)
    (folder / STAGING).mkdir(parents=True, exist_ok=True)
    # Of its own, because processes that find the checkpoint there read its manifest again at the same time.
    place, staged = match["folder"] or LAST, Path(tempfile.mkdtemp(prefix="download-", dir=folder / STAGING))
    try:
        commit = client.commit_of(match["revision"])
        if f"{place}/{MANIFEST_NAME}" not in client.names(place, commit):
            raise CheckpointError(
                f"{address} has no checkpoint in {place}; a run with hub_strategy='checkpoint' uploads one"
            )
        manifest = client.fetch(f"{place}/{MANIFEST_NAME}", commit, staged).read_bytes()
        info = parse_manifest(staged / place, manifest)
        target = folder / STAGING / f"checkpoint-{info.step}"
        if not ((target / MANIFEST_NAME).is_file() and (target / MANIFEST_NAME).read_bytes() == manifest):
            for name in info.files:
                client.fetch(f"{place}/{name}", commit, staged)
            shutil.rmtree(target, ignore_errors=True)
            (staged / place).rename(target)
        return target
    except HubError as error:
        raise CheckpointError(str(error)) from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)
