"""Where the runs of a history lie: in a folder of this machine, or behind a URL, of which each attempt sees nothing but
what was uploaded, as a new machine does.
"""

from __future__ import annotations

import os
from pathlib import Path

from windlass.checkpoint.mirrored import MirroredStore
from windlass.checkpoint.remote import Mirror, RemoteFolder
from windlass.checkpoint.store import Store
from windlass.core.locations import STAGING, local_folder


def output_dir(place: Path, remote: bool) -> str:
    """What a run is given."""
    return f"file://{place}/bucket" if remote else str(place / "run")


def logs(place: Path) -> Path:
    """The folder whose metrics.jsonl tells of the whole run."""
    bucket = place / "bucket"
    return bucket if bucket.exists() else place / "run"


def on_a_new_machine(place: Path, number: int) -> None:
    """Let this process keep its copies of remote folders where no attempt before it did."""
    os.environ[STAGING] = str(place / f"machine-{number}")


def store_of(place: Path, remote: bool) -> Store:
    """The checkpoints, as who resumes sees them."""
    if not remote:
        return Store(place / "run")
    url = output_dir(place, remote)
    here = local_folder(url, {STAGING: str(place / "looked-at")})
    here.mkdir(parents=True, exist_ok=True)
    return MirroredStore(Mirror(here, RemoteFolder(url)))
