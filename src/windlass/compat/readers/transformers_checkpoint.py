"""Reader of checkpoints that transformers' Trainer wrote.

    trainer_state.json                           the step, the epoch, what was logged, the best metric
    model.safetensors, pytorch_model.bin, or several of either with an index; adapter_model.safetensors
    optimizer.pt, scheduler.pt, scaler.pt        files of torch.save; see `torch_file`
    rng_state*.pth, training_args.bin            never read

Such a folder lists neither its files nor their hashes. Opening it checks what can be checked without loading tensors:
the header of every file that will be read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.checkpoint import strict_json
from windlass.checkpoint.files import Files
from windlass.checkpoint.foreign import ForeignCheckpoint
from windlass.checkpoint.history import checked_state
from windlass.checkpoint.optimizer_state import load_optimizer_state
from windlass.checkpoint.stored import open_folder, open_weights
from windlass.compat.readers.numbered_optimizer import Division, named_state
from windlass.compat.readers.torch_file import open_torch_file
from windlass.core.errors import CheckpointError
from windlass.core.types import State
from windlass.optim.groups import decay_parameter_names

WRITER = "transformers' Trainer"
STATE_NAME = "trainer_state.json"
OPTIMIZER_NAME, SCHEDULE_NAME, SCALER_NAME = "optimizer.pt", "scheduler.pt", "scaler.pt"
# A folder with a state and one of these is a checkpoint; one with a state alone may be a saved model.
_SIGNS = (OPTIMIZER_NAME, SCHEDULE_NAME, "optimizer.bin", "training_args.bin", "latest")
# Layouts that are not read, and what they are.
_NOT_READ = {
    "pytorch_model_fsdp_0": "FSDP's sharded state dict, whose index is a pickle",
    "optimizer_0": "FSDP's sharded state dict, whose index is a pickle",
    "optimizer.bin": "FSDP's full state dict of the optimizer",
    "latest": "DeepSpeed's own layout, of which only weights are read",
}


class TransformersCheckpoint(ForeignCheckpoint):
    """A checkpoint of transformers' Trainer."""

    writer = WRITER

    def load_optimizer_of(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, *, with_rates: bool
    ) -> None:
        """Load `optimizer.pt`, which numbers parameters in the order of its groups. Raises CheckpointError if there is
        no such file, its state fits none of the known divisions of the parameters into groups, or it belongs to another
        kind of optimizer.
        """
        path = self.folder / OPTIMIZER_NAME
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing (save_only_model=True leaves it out), so a run can't be continued from it. Start a "
                "new run from its weights: load them into the model and call train()"
            )
        with open_torch_file(path, self.plain_files) as file:
            state = named_state(path, file.tree, optimizer, model, _divisions(optimizer, model), with_rates)
            load_optimizer_state(optimizer, model, file.materialised(state))

    def schedule_state(self) -> State:
        state = self._content(SCHEDULE_NAME)
        if not isinstance(state, dict):
            raise CheckpointError(
                f"{self.folder / SCHEDULE_NAME} is missing or holds no state, and this run's scheduler keeps a count "
                "of its own that it must continue"
            )
        return state

    def learning_rates(self) -> list[float] | None:
        state = self._content(SCHEDULE_NAME)
        rates = state.get("_last_lr") if isinstance(state, dict) else None
        known = isinstance(rates, list) and rates and all(isinstance(rate, float) for rate in rates)
        return rates if known else None

    def scaler_state(self) -> State:
        return scaler_state(self._content(SCALER_NAME))

    def _content(self, name: str) -> Any:
        """The content of a file of torch.save, None if it does not exist. Raises CheckpointError if it holds more than
        tensors and plain values, or is damaged.
        """
        if not (self.folder / name).exists():
            return None
        with open_torch_file(self.folder / name, self.plain_files) as file:
            return file.materialised(file.tree)

    def check(self) -> None:
        """Check the header of every file that will be read. Raises CheckpointError if a file is missing or damaged."""
        with open_weights(open_folder(self.folder)):
            pass
        for name in (OPTIMIZER_NAME, SCHEDULE_NAME, SCALER_NAME):
            if (self.folder / name).exists():
                with open_torch_file(self.folder / name, self.plain_files):
                    pass


def is_of_format(folder: Path) -> bool:
    """Return True if a folder looks like a checkpoint of transformers' Trainer."""
    return (folder / STATE_NAME).exists() and any((folder / name).exists() for name in _SIGNS)


def open_checkpoint(folder: Path, files: Files) -> TransformersCheckpoint:
    """Open such a checkpoint and check that it is complete. Raises CheckpointError if it is not, or has a layout that
    cannot be read; the file is named.
    """
    for name, what in _NOT_READ.items():
        if (folder / name).exists():
            raise CheckpointError(
                f"{folder} cannot be continued: {folder / name} is {what}. Save it again there with whole tensors (one "
                "process without sharding), or start from its weights: load them into the model and call train()"
            )
    path = folder / STATE_NAME
    # transformers writes the NaN of a loss as Python's JSON does.
    state = strict_json.read(path, files, allow_nan=True)
    checkpoint = TransformersCheckpoint(folder, checked_state(path, state), files)
    checkpoint.check()
    return checkpoint


def _divisions(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Division]:
    """How the parameters may have been put into groups: as this run does, as transformers does, or in one."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    by_id = {id(parameter): name for name, parameter in trained.items()}
    present = [[by_id[id(p)] for p in group["params"] if id(p) in by_id] for group in optimizer.param_groups]
    decaying = set(decay_parameter_names(model, norms=(nn.LayerNorm,)))
    theirs = [
        [name for name in trained if name in decaying],
        [name for name in trained if name not in decaying],
    ]
    return [present, theirs, [list(trained)]]


def scaler_state(saved: Any) -> State:
    """The state of a `torch.amp.GradScaler` as `precision.scaler.LossScaler` takes it, empty if there is none. Raises
    CheckpointError if `saved` is not such a state.
    """
    if not saved:
        return {}
    scale, streak = (
        (saved.get(key) for key in ("scale", "_growth_tracker")) if isinstance(saved, dict) else (0, 0)
    )
    if not isinstance(scale, float) or not isinstance(streak, int) or not scale > 0:
        raise CheckpointError(f"{SCALER_NAME} of the checkpoint does not hold the state of a loss scaler")
    return {
        "scale": torch.tensor(scale),
        "growth_streak": torch.tensor(streak, dtype=torch.int32),
        "skipped": 0,
        "skips_in_a_row": 0,
    }
