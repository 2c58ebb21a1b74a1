"""Saving and loading checkpoints, for training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.checkpoint import codec
from windlass.checkpoint.adapters import ADAPTER_WEIGHTS, base_part, load_adapter
from windlass.checkpoint.content import Content
from windlass.checkpoint.files import FileEntry, Files, is_disk_failure, is_full_disk
from windlass.checkpoint.manifest import CheckpointInfo
from windlass.checkpoint.optimizer_state import join_parts, load_optimizer_state
from windlass.checkpoint.retention import Retention
from windlass.checkpoint.sharded import index_name, load_parts, open_parts
from windlass.checkpoint.split import SPLIT_INDEX_NAME
from windlass.checkpoint.staged import rank_stem
from windlass.checkpoint.store import SaveDropped, Store
from windlass.checkpoint.stored import load_folder
from windlass.checkpoint.strict_json import MAX_JSON_BYTES
from windlass.checkpoint.verified import VerifiedFiles
from windlass.checkpoint.weights import WEIGHTS_NAME, load_weights
from windlass.core.errors import CheckpointError
from windlass.core.logs import get_logger
from windlass.core.types import State

_logger = get_logger(__name__)


class Checkpoint:
    """A verified checkpoint. A missing part is an error, never an empty state."""

    def __init__(self, info: CheckpointInfo, files: Files) -> None:
        self.info = info
        self._files = VerifiedFiles(info, files)
        self._ranks: dict[int, State] = {}

    @property
    def folder(self) -> Path:
        return self.info.path

    @property
    def step(self) -> int:
        """Optimizer updates when it was saved."""
        return self.info.step

    @property
    def meta(self) -> Mapping[str, Any]:
        return self.info.meta

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        return self.info.world_size

    def has(self, name: str) -> bool:
        """Return True if the shared part `name` was saved."""
        return f"{name}.json" in self.info.files

    def shared(self, name: str) -> State:
        """The shared part `name`, as it was given to `save`; tensors on the host."""
        return self._load(name, f"part {name!r}")

    def per_rank(self, name: str, rank: int) -> State:
        if not 0 <= rank < self.world_size:
            raise CheckpointError(
                f"{self.folder} was saved by {self.world_size} rank(s); it has nothing of rank {rank}"
            )
        parts = self._parts_of(rank)
        if name not in parts:
            raise CheckpointError(
                f"{self.folder} has no part {name!r} of rank {rank}; it has: {', '.join(parts) or 'none'}"
            )
        part: State = parts[name]
        return part

    def has_of_rank(self, name: str, rank: int) -> bool:
        return rank < self.world_size and name in self._parts_of(rank)

    def _parts_of(self, rank: int) -> State:
        # Kept: all states of a rank are in one pair of files, and are asked for one by one.
        if rank not in self._ranks:
            self._ranks[rank] = self._load(rank_stem(rank), f"the part of rank {rank}")
        return self._ranks[rank]

    def load_weights(self, model: nn.Module, name: str = "model") -> None:
        """Copy the saved weights into `model`, in place (see `weights.load_weights`): whole ones, in one file or
        several, parts of ranks, or those of an adapter, for the base that it was trained on. `name`: of several models;
        "model" is in the folder itself, others are in a subfolder of their name.
        """
        if self.has_parts(name):
            load_parts(self.folder, model, stem=name, files=self._files)
            return
        adapter = weights_file(name, ADAPTER_WEIGHTS)
        if adapter in self.info.files:
            base = self.shared(base_part(name)) if self.has(base_part(name)) else None
            load_adapter((self.folder / adapter).parent, model, base, files=self._files)
            return
        path = weights_file(name)
        if weights_file(name, SPLIT_INDEX_NAME) in self.info.files:  # large, or saved in a script's own way
            load_folder((self.folder / path).parent, model, files=self._files)
            return
        if path not in self.info.files:
            raise CheckpointError(f"{self.folder} has no weights ({path} is not in its manifest)")
        load_weights(self.folder / path, model, files=self._files)

    def has_parts(self, stem: str) -> bool:
        """Return True if ranks wrote their parts of `stem` ("model", "optimizer") instead of whole tensors."""
        return index_name(stem) in self.info.files

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, name: str = "optimizer"
    ) -> None:
        """Load the shared part `name`, and the parts of ranks that belong to it, into `optimizer`."""
        self._check_saved(name, f"part {name!r}")
        with ExitStack() as opened:
            state = opened.enter_context(codec.open_state(self.folder / name, self._files))
            if self.has_parts(name):
                parts = opened.enter_context(open_parts(self.folder, name, self._files))
                state = join_parts(state, parts)
            load_optimizer_state(optimizer, model, state)

    def read(self, name: str) -> bytes | None:
        """The content of a small file, None if it was not saved."""
        if name not in self.info.files:
            return None
        return self._files.read(self.folder / name, MAX_JSON_BYTES)

    def read_shared_file(self, name: str) -> bytes:
        """The content of a file that is shared by hard links: its inode may change, so the bytes read are hashed."""
        path = self.folder / name
        data = self._files.plain.read(path, MAX_JSON_BYTES)
        if self.info.files.get(name) != FileEntry(len(data), hashlib.sha256(data).hexdigest()):
            raise CheckpointError(f"{path} is damaged: its content does not match the manifest's hash")
        return data

    def _check_saved(self, stem: str, what: str) -> None:
        if f"{stem}.json" not in self.info.files:
            raise CheckpointError(f"{self.folder} has no {what} ({stem}.json is not in its manifest)")

    def _load(self, stem: str, what: str) -> State:
        self._check_saved(stem, what)
        return codec.load_state(self.folder / stem, self._files)


def weights_file(name: str, file: str = WEIGHTS_NAME) -> str:
    """Relative path of the weights of the model `name`; "model" has no folder of its own."""
    return file if name == "model" else f"{name}/{file}"


def costs_one_save(error: Exception) -> bool:
    """Return True if an error ends the save and not the run: the system refused something, here or on another rank."""
    return is_disk_failure(error) or isinstance(error, SaveDropped)


class CheckpointManager:
    """Saves, retains and loads. Every rank calls `save` with the same step.

    Args:
        retention: which checkpoints are kept; all by default.
    """

    def __init__(self, store: Store, retention: Retention | None = None) -> None:
        self.store = store
        self.last_failure: Exception | None = None
        self.retention = retention or Retention()

    def save(
        self, step: int, content: Content, *, meta: Mapping[str, Any], protected: Iterable[Path] = ()
    ) -> Path | None:
        """Save checkpoint `step` and apply retention; return its folder, or None if the system refused something (any
        `OSError`), which is logged; earlier checkpoints remain. Raises CheckpointError if a state holds a type that
        cannot be saved (a mistake in the program, not of the disk).

        Args:
            meta: plain values for the manifest (best metric, ...).
            protected: folders that retention keeps, beside this one.
        """
        try:
            return self.write(step, content, meta=meta, protected=protected)
        except Exception as error:
            if not costs_one_save(error):
                raise
            self.warn(step, error)
            return None

    def write(
        self, step: int, content: Content, *, meta: Mapping[str, Any], protected: Iterable[Path] = ()
    ) -> Path:
        """`save` that raises errors of the system. Raises CheckpointError or OSError if the checkpoint was not saved;
        earlier ones remain.
        """
        store = self.store
        store.write(
            step,
            meta,
            lambda staged: content.write(staged, store.is_writer),
            names=content.names(store.rank, store.is_writer),
            needed=content.disk_bytes(store.writers),
        )
        path = store.path_for(step)
        try:
            if store.is_writer:
                self.retention.apply(store, [path, *protected])
        finally:
            store.barrier()  # a rank must not list the folder while another removes from it
        return path

    def warn(self, step: int, error: Exception) -> None:
        """Log that a checkpoint failed, and which one is the newest complete one."""
        self.last_failure = error
        if isinstance(error, SaveDropped) and self.store.rank != 0:
            return  # the rank that failed and rank 0 log it; a thousand others need not
        remaining = self._last_committed()
        advice = f". Make room in {self.store.root} before the next save" if is_full_disk(error) else ""
        _logger.error(
            "CHECKPOINT %d WAS NOT SAVED on rank %d: %s; %s%s",
            step,
            self.store.rank,
            error,
            remaining,
            advice,
        )

    def _last_committed(self) -> str:
        try:
            last = self.store.list()
        except OSError as error:  # the disk that failed may not even list its folders
            return (
                f"earlier checkpoints in {self.store.root} cannot be listed now ({error.strerror or error})"
            )
        return f"{last[-1].path} is still whole" if last else "there is no earlier one"

    def load(self, path: Path | str) -> Checkpoint:
        """Open the checkpoint at `path`, with every byte verified. Not collective."""
        return Checkpoint(self.store.verify(path), self.store.files)
