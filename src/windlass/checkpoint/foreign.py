"""Checkpoints that transformers' Trainer wrote, as far as a run can be continued from one.

    trainer_state.json                           the step, the epoch, what was logged, the best metric
    model.safetensors, pytorch_model.bin, or several of either with an index; adapter_model.safetensors
    optimizer.pt, scheduler.pt, scaler.pt        files of torch.save; see `torch_file`
    rng_state*.pth, training_args.bin            never read

Nothing in such a folder says what it must hold, or how its files must hash. What can be checked without loading it is
checked when it is opened: every file that will be read is whole by its own directory.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from windlass.checkpoint import strict_json
from windlass.checkpoint.files import Files
from windlass.checkpoint.folders import load_folder
from windlass.checkpoint.foreign_optimizer import Division, named_state
from windlass.checkpoint.manager import Checkpoint
from windlass.checkpoint.manifest import MANIFEST_NAME, CheckpointInfo
from windlass.checkpoint.optimizer_state import load_optimizer_state
from windlass.checkpoint.store import Store, is_checkpoint
from windlass.checkpoint.stored import open_folder, open_weights
from windlass.checkpoint.strict_json import MAX_JSON_BYTES
from windlass.checkpoint.torch_file import open_torch_file
from windlass.core.errors import CheckpointError
from windlass.core.logs import get_logger

STATE_NAME = "trainer_state.json"
OPTIMIZER_NAME, SCHEDULE_NAME, SCALER_NAME = "optimizer.pt", "scheduler.pt", "scaler.pt"
# Beside a state, these tell such a checkpoint from a folder that merely holds a model and a state.
_SIGNS = (OPTIMIZER_NAME, SCHEDULE_NAME, "optimizer.bin", "training_args.bin", "latest")
# What is written there in shards or by another program's own layout, and by whom.
_NOT_READ = {
    "pytorch_model_fsdp_0": "FSDP's sharded state dict, whose index is a pickle",
    "optimizer_0": "FSDP's sharded state dict, whose index is a pickle",
    "optimizer.bin": "FSDP's full state dict of the optimizer",
    "latest": "DeepSpeed's own layout",
}
_STATE_TYPES: dict[str, tuple[type, ...]] = {
    "global_step": (int,), "max_steps": (int,), "num_input_tokens_seen": (int,), "total_flos": (int, float),
    "epoch": (int, float, type(None)), "log_history": (list,), "stateful_callbacks": (dict,),
    "best_metric": (int, float, type(None)), "best_global_step": (int, type(None)),
    "best_model_checkpoint": (str, type(None)),
}  # fmt: skip
_logger = get_logger(__name__)


class ForeignCheckpoint(Checkpoint):
    """A checkpoint of transformers' Trainer. It has none of the parts that Windlass writes.

    Attributes:
        state: what `trainer_state.json` says, by the names that both Trainers use.
    """

    def __init__(self, folder: Path, state: dict[str, Any], files: Files) -> None:
        super().__init__(CheckpointInfo(folder, state["global_step"], 1, files={}), files)
        self.state = state
        self._plain_files = files

    @property
    def epoch(self) -> float:
        """Passes over the data made so far, as a fraction."""
        return float(self.state.get("epoch") or 0.0)

    @property
    def max_steps(self) -> int:
        """Updates that the run was to make."""
        return int(self.state.get("max_steps") or 0)

    def load_weights(self, model: nn.Module, name: str = "model") -> None:
        """Copy the weights into `model`, in place (see `folders.load_folder`)."""
        load_folder(self.folder, model, files=self._plain_files)

    def plain(self, name: str) -> Any:
        """The content of a file of torch.save, None where it is not there.

        Raises:
            CheckpointError: it holds more than tensors and plain values, or is damaged.
        """
        if not (self.folder / name).exists():
            return None
        with open_torch_file(self.folder / name, self._plain_files) as file:
            return file.materialised(file.tree)

    def load_divided_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        divisions: Iterable[Division],
        *,
        with_rates: bool,
    ) -> None:
        """Put the state of `optimizer.pt` into `optimizer`; it numbers parameters in the order of its groups.

        Args:
            divisions: how parameters may have been put into groups, by name; the first that fits is taken.
            with_rates: learning rates too are the saved ones; otherwise they stay as they are.

        Raises:
            CheckpointError: there is no such file, or its state fits none of the divisions or another optimizer.
        """
        path = self.folder / OPTIMIZER_NAME
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing (save_only_model=True leaves it out), so a run can't be continued from it. Start a "
                "new run from its weights: load them into the model and call train()"
            )
        with open_torch_file(path, self._plain_files) as file:
            state = named_state(path, file.tree, optimizer, model, divisions, with_rates)
            load_optimizer_state(optimizer, model, file.materialised(state))

    def check(self) -> None:
        """Look whether every file that will be read is whole, without loading its tensors.

        Raises:
            CheckpointError: one is not.
        """
        with open_weights(open_folder(self.folder)):
            pass
        for name in (OPTIMIZER_NAME, SCHEDULE_NAME, SCALER_NAME):
            if (self.folder / name).exists():
                with open_torch_file(self.folder / name, self._plain_files):
                    pass


def is_foreign(folder: Path) -> bool:
    """Whether a folder looks like a checkpoint of transformers' Trainer."""
    if (folder / MANIFEST_NAME).exists() or not (folder / STATE_NAME).exists():
        return False
    return any((folder / name).exists() for name in _SIGNS)


def open_foreign(folder: Path, files: Files | None = None) -> ForeignCheckpoint:
    """Open such a checkpoint and look whether it is whole.

    Raises:
        CheckpointError: it is not, or is of a layout that is not read; the file is named.
    """
    files = files or Files()
    for name, what in _NOT_READ.items():
        if (folder / name).exists():
            raise CheckpointError(
                f"{folder} cannot be continued: {folder / name} is {what}. Save it again there with whole tensors (one "
                "process without sharding), or start from its weights: load them into the model and call train()"
            )
    checkpoint = ForeignCheckpoint(folder, _read_state(folder / STATE_NAME, files), files)
    checkpoint.check()
    return checkpoint


def find_foreign(store: Store, which: Literal[True] | str | Path) -> Path | None:
    """The folder of transformers' Trainer that `resume_from_checkpoint` means, None where it means none.

    For True it is the newest that is whole, and only where the output folder has no checkpoint of Windlass, not even a
    damaged one: an old run must not be taken up silently for a new one.
    """
    if which is not True:
        return Path(which) if is_foreign(Path(which)) else None
    folders = store.folders()
    candidates = [folder for folder in folders if is_foreign(folder)]
    if not candidates or any(is_checkpoint(folder) for folder in folders) or store.committed():
        return None
    skipped = []
    for folder in reversed(candidates):
        try:
            open_foreign(folder)
        except CheckpointError as error:
            skipped.append(f"\n  - {error}")
            continue
        if skipped:
            _logger.warning("Continuing from %s; newer folders were skipped:%s", folder, "".join(skipped))
        return folder
    if skipped:
        raise CheckpointError(
            f"No valid checkpoint found in output directory ({store.root}){''.join(skipped)}"
        )
    return None


def _read_state(path: Path, files: Files) -> dict[str, Any]:
    # transformers writes the NaN of a loss as Python's JSON does.
    state = strict_json.parse(files.read(path, MAX_JSON_BYTES), str(path), allow_nan=True)
    return checked_state(path, state)


def checked_state(path: Path, state: Any) -> dict[str, Any]:
    """What `trainer_state.json` holds, by the names that both Trainers use.

    Raises:
        CheckpointError: a name holds something of another type; `path` is named.
    """
    if not isinstance(state, dict) or "global_step" not in state:
        raise CheckpointError(f"{path} is not the state of a Trainer: it has no global_step")
    for name, kinds in _STATE_TYPES.items():
        value = state.get(name, kinds[0]())
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise CheckpointError(f"{path} is malformed: {name} is a {type(value).__name__}")
    rows = state.get("log_history", [])
    if state["global_step"] < 0 or not all(isinstance(row, dict) for row in rows):
        raise CheckpointError(f"{path} is malformed: global_step is negative, or log_history holds no rows")
    return state
