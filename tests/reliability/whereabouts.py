"""Where the runs of a history lie: in a folder of this machine, or behind a URL, of which each attempt sees nothing but
what was uploaded, as a new machine does.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tests.reliability.cases import Trial

from windlass.checkpoint.mirrored import MirroredStore
from windlass.checkpoint.remote import Mirror, RemoteFolder
from windlass.checkpoint.store import Store
from windlass.core.errors import CheckpointError
from windlass.core.locations import STAGING


def output_dir(place: Path, trial: Trial, rank: int = 0) -> str:
    """What a rank of the run is given."""
    if trial.remote:
        return f"file://{place}/bucket"
    return str(place / f"disk-{rank}" / "run" if trial.own_disks else place / "run")


def logs(place: Path, trial: Trial) -> Path:
    """The folder whose metrics.jsonl tells of the whole run."""
    return Path(output_dir(place, trial).removeprefix("file://"))


def on_a_new_machine(place: Path, number: int) -> None:
    """Let this process keep its copies of remote folders where no attempt before it did."""
    os.environ[STAGING] = str(place / f"machine-{number}")


def newest_whole(place: Path, trial: Trial) -> int:
    """Step of the newest checkpoint that verifies, on every disk that has a part of it; 0 if there is none."""
    if not trial.own_disks:
        path, _ = (store := _store_of(place, trial)).newest_verified()
        return 0 if path is None else store.verify(path).step
    of_disks = [_whole_steps(Store(disk / "run")) for disk in sorted(place.glob("disk-*"))]
    return max(set.intersection(*of_disks), default=0) if of_disks else 0


def _whole_steps(store: Store) -> set[int]:
    steps = set()
    for info in store.list():
        with contextlib.suppress(CheckpointError):
            steps.add(store.verify(info.path).step)
    return steps


def _store_of(place: Path, trial: Trial) -> Store:
    """The checkpoints, as who resumes sees them."""
    if not trial.remote:
        return Store(place / "run")
    url = output_dir(place, trial)
    here = place / "looked-at"
    here.mkdir(exist_ok=True)
    return MirroredStore(Mirror(here, RemoteFolder(url)))
