"""Checkpoints of other programs: what a run needs of one. The modules that know a format are imported by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from windlass.checkpoint.files import Files
from windlass.checkpoint.manager import Checkpoint
from windlass.checkpoint.manifest import MANIFEST_NAME, CheckpointInfo
from windlass.checkpoint.store import Store, is_checkpoint, no_checkpoint
from windlass.checkpoint.stored import load_folder
from windlass.core.errors import CheckpointError
from windlass.core.locations import named
from windlass.core.logs import get_logger
from windlass.core.outside import find_outside
from windlass.core.types import State

_logger = get_logger(__name__)


class ForeignCheckpoint(Checkpoint, ABC):
    """A checkpoint that another program wrote. It has none of the parts that Windlass writes.

    Attributes:
        writer: the program ("transformers' Trainer").
        state: the state of the run, by the names of `TrainerState`.
    """

    writer: str

    def __init__(self, folder: Path, state: dict[str, Any], files: Files) -> None:
        # Without a manifest no file is known to be whole: `plain_files` reads them unverified.
        super().__init__(CheckpointInfo(folder, state["global_step"], 1, files={}), files)
        self.state = state
        self.plain_files = files

    @property
    def epoch(self) -> float:
        """Passes over the data made so far, as a fraction."""
        return float(self.state.get("epoch") or 0.0)

    @property
    def max_steps(self) -> int:
        """Updates that the run was to make."""
        return int(self.state.get("max_steps") or 0)

    def load_weights(self, model: nn.Module, name: str = "model") -> None:
        """Copy the weights into `model`, in place (see `stored.load_folder`)."""
        load_folder(self.folder, model, files=self.plain_files)

    @abstractmethod
    def load_optimizer_of(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, *, with_rates: bool
    ) -> None:
        """Load the saved state into `optimizer`. `with_rates`: also load the learning rates."""

    @abstractmethod
    def schedule_state(self) -> State:
        """Return the state dict of the learning-rate scheduler. Raises CheckpointError if none was saved."""

    @abstractmethod
    def learning_rates(self) -> list[float] | None:
        """Return the last learning rate of each parameter group, None if none was saved."""

    @abstractmethod
    def scaler_state(self) -> State:
        """Return the state of the loss scaler as `precision.scaler.LossScaler` takes it, empty if none was saved."""


def format_of(folder: Path) -> ModuleType | None:
    """The module that reads the checkpoint of another program in `folder`, None for any other folder."""
    # Windlass writes names of theirs, too (`trainer_state.json`): the manifest decides.
    if (folder / MANIFEST_NAME).exists():
        return None
    known = find_outside("checkpoints of transformers")
    return known if known is not None and known.is_of_format(folder) else None


def explain_unread(folder: Path) -> str | None:
    """Who wrote a folder that cannot be read, and what to do; None if that is not known."""
    known = find_outside("checkpoints of accelerate")
    explained: str | None = None if known is None else known.explain(folder)
    return explained


def open_foreign(folder: Path) -> ForeignCheckpoint:
    """Open the checkpoint of another program. Raises CheckpointError if it is not one, is incomplete, or has a layout
    that cannot be read; the file is named.
    """
    found = format_of(folder)
    if found is None:
        raise CheckpointError(f"{folder} is not a checkpoint of a known format")
    opened: ForeignCheckpoint = found.open_checkpoint(folder, Files())
    return opened


def find_foreign(store: Store, which: Literal[True] | str | Path) -> Path | None:
    """Return the folder of another program that `resume_from_checkpoint` refers to, if any.

    For True it is the newest complete one, and only if the output folder has no checkpoint of Windlass, not even a
    damaged one: an old run must not silently continue in the place of a new one.
    """
    if which is not True:
        return None if format_of(Path(which)) is None else named(Path(which))
    folders = store.folders()
    candidates = [folder for folder in folders if format_of(folder) is not None]
    if not candidates or any(is_checkpoint(folder) for folder in folders) or store.committed():
        return None
    skipped = ""
    for folder in reversed(candidates):
        try:
            open_foreign(folder)
        except CheckpointError as error:
            skipped += f"\n  - {error}"
            continue
        if skipped:
            _logger.warning("Continuing from %s; newer folders were skipped:%s", folder, skipped)
        return folder
    raise CheckpointError(no_checkpoint(str(store.root), skipped))
