"""Merging an adapter into the model that it was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, peft_library
from windlass.core.errors import CheckpointError
from windlass.core.optional import require
from windlass.finetuning.base_model import load_model

_PURPOSE = "merge an adapter"


def merge_adapter(
    adapter: Path, target: Path, base: str | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write the base with the adapter added to its weights into the folder `target`, with the tokenizer.

    The base is loaded in the precision of its files: an adapter that was trained on a base of few bits is added to the
    weights from which those were made. A base whose files are quantized is dequantized first.

    Args:
        adapter: a checkpoint or folder with `adapter_model.safetensors`.
        target: a new or empty folder.
        base: name or folder of the base; by default the one that the adapter names.
        dtype: of the result; by default that of the base.

    Raises:
        CheckpointError: there is no adapter, its base is not known, or the folder is not empty.
        ModelError: the base cannot be loaded.
    """
    name = base or base_of(adapter)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there already; name a new folder")
    peft = peft_library(_PURPOSE)
    model: Any = load_model(name, {"dtype": "auto"})
    if getattr(model, "quantization_method", None) is not None:
        model = model.dequantize()
    if dtype is not None:
        model = model.to(dtype)
    merged = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
    merged.save_pretrained(target)
    tokenizer = require("transformers", _PURPOSE).AutoTokenizer
    for place in (str(adapter), name):
        try:
            tokenizer.from_pretrained(place).save_pretrained(target)
        except (OSError, ValueError, TypeError, AttributeError):
            continue
        return


def base_of(adapter: Path) -> str:
    """Return the name or folder of the model that an adapter was trained on. Raises CheckpointError if there is no
    adapter, or it does not name its base.
    """
    path = adapter / ADAPTER_CONFIG
    if not path.is_file() or not (adapter / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(
            f"{adapter} holds no adapter: there is no {ADAPTER_WEIGHTS} with its configuration"
        )
    name = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name:
        raise CheckpointError(f"{path} does not name the base of the adapter; give it with --base")
    return str(name)
