"""The model and the tokenizer of a run, a checkpoint or a folder, loaded to generate text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint.adapters import ADAPTER_CONFIG
from windlass.checkpoint.sharded import index_name
from windlass.checkpoint.store import Store
from windlass.checkpoint.stored import load_folder
from windlass.checkpoint.survey import notes_of, survey
from windlass.core.device import choose_device
from windlass.core.errors import CheckpointError, ModelError
from windlass.core.locations import at_home, is_folder_name, loading
from windlass.core.optional import require
from windlass.finetuning.base_model import load_model
from windlass.finetuning.merging import base_of, first_tokenizer, load_base, with_adapter

_PURPOSE = "generate text"
_CONFIG = "config.json"


def find_model(word: str) -> str:
    """Return the folder with the model of a run: that in the folder itself, else its best checkpoint, else the newest
    complete one. The name of a model on the Hub is returned as it is. Raises CheckpointError if there is none.
    """
    folder = at_home(word)
    if not folder.is_dir():
        if is_folder_name(word):
            raise CheckpointError(f"{word} is not a folder")
        return word
    if any((folder / name).is_file() for name in (_CONFIG, ADAPTER_CONFIG)):
        return str(folder)
    whole = Store(folder).whole()
    if not whole:
        problems = [f"; {one.path.name}: {one.problem}" for one in survey(folder) if one.problem]
        said = f"{folder} holds neither a model ({_CONFIG}) nor a complete checkpoint"
        raise CheckpointError(said + "".join(problems[-1:]))
    best = notes_of(whole).best
    return str(next((info.path for info in whole if info.path.name == best), whole[-1].path))


def open_trained(
    name: str, base: str | None, dtype: str | torch.dtype, device: torch.device | None = None
) -> tuple[Any, Any]:
    """Return the model, in evaluation mode, and its tokenizer. Raises CheckpointError or
    ModelError if there is no such model, it has no tokenizer, or it cannot generate.

    Args:
        name: a folder with a model, an adapter or the parts of a sharded model; or the name of a model on the Hub.
        base: name or folder of the model below an adapter; by default the one that the adapter names.
        dtype: of the weights; "auto": as they are stored.
        device: of the weights; by default that of this process.
    """
    folder, sources = Path(name), [name]
    if (folder / ADAPTER_CONFIG).is_file():
        below = base or base_of(folder)
        sources.append(below)
        model: Any = with_adapter(load_base(folder, below, dtype), folder)
    elif (folder / index_name("model")).is_file():
        model = _of_parts(folder, dtype)
    else:
        model = load_model(name, {"dtype": dtype})
    if not getattr(model, "can_generate", bool)():  # `bool()` is False
        raise ModelError(f"{name} holds a {type(model).__name__}, which does not generate text")
    if (tokenizer := first_tokenizer(sources)) is None:
        places = " or ".join(sources)
        raise ModelError(f"there is no tokenizer in {places}; save it there (tokenizer.save_pretrained)")
    return model.to(device or choose_device()).eval(), tokenizer


def _of_parts(folder: Path, dtype: str | torch.dtype) -> Any:
    """Return the model whose weights several ranks saved in parts."""
    transformers = require("transformers", _PURPOSE)
    with loading("model", str(folder)):
        config = transformers.AutoConfig.from_pretrained(str(folder))
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        build = transformers.AutoModelForCausalLM.from_config if kind is None else kind._from_config
        # Not converted later: angles of positions stay in float32.
        model = build(config, dtype=(config.dtype or torch.float32) if dtype == "auto" else dtype)
    load_folder(folder, model)
    return model
