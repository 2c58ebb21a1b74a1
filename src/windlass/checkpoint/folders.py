"""Weights of a folder, in whichever form they lie there."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from windlass.checkpoint import codec
from windlass.checkpoint.adapters import ADAPTER_WEIGHTS, BASE_STATE, load_adapter
from windlass.checkpoint.files import Files
from windlass.checkpoint.sharded import index_name, load_parts
from windlass.checkpoint.weights import WEIGHTS_NAME, load_weights


def load_folder(folder: Path, model: nn.Module, *, files: Files | None = None) -> None:
    """Copy the weights of `folder` into `model`, in place: whole ones, ranks' parts, or an adapter's alone.

    Raises:
        CheckpointError: there are none, they are damaged, or they do not fit the model.
    """
    files = files or Files()
    if (folder / WEIGHTS_NAME).exists() or folder.is_file():
        load_weights(folder, model, files=files)
    elif (folder / index_name("model")).exists():
        load_parts(folder, model, files=files)
    elif (folder / ADAPTER_WEIGHTS).exists():
        known = (folder / f"{BASE_STATE}.json").exists()
        load_adapter(
            folder, model, codec.load_state(folder / BASE_STATE, files) if known else None, files=files
        )
    else:
        load_weights(folder, model, files=files)  # says what is missing
