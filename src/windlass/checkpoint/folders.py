"""Weights of a folder, in whichever form they lie there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from windlass.checkpoint import codec
from windlass.checkpoint.adapters import ADAPTER_WEIGHTS, BASE_STATE, load_adapter
from windlass.checkpoint.files import Files
from windlass.checkpoint.sharded import index_name, load_parts
from windlass.checkpoint.stored import FURTHER_FORMS, open_folder, open_weights
from windlass.checkpoint.weights import WEIGHTS_NAME, fill, load_weights


def load_folder(folder: Path, model: nn.Module, *, files: Files | None = None) -> None:
    """Copy the weights of `folder` into `model`, in place: whole ones, ranks' parts, an adapter's alone,
    or what transformers writes: several files with an index, or those of torch.save (`pytorch_model.bin`).

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
    elif any((folder / name).exists() for name in FURTHER_FORMS):
        with open_weights(replace(open_folder(folder), files=files)) as tensors:
            fill(folder, tensors, tensors.aliases, model)
    else:
        load_weights(folder, model, files=files)  # says what is missing
