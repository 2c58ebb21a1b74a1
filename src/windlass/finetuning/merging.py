"""Models for `from_pretrained` made of a checkpoint: with its adapter merged into the base, or in few bits."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, peft_library
from windlass.checkpoint.export import MAX_SHARD_SIZE, ExportOptions, export_folder
from windlass.checkpoint.files import Files
from windlass.checkpoint.stored import Folder, find_weights
from windlass.checkpoint.strict_json import read
from windlass.config.sections.fields import QAT_SCHEMES, TRAINED_SCHEME
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.optional import require
from windlass.finetuning.base_model import load_model
from windlass.transforms.quantization_aware import apply_qat, quantized_config

_PURPOSE = "merge an adapter"


def merge_adapter(
    adapter: Path,
    target: Path,
    base: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Write the base with the adapter added to its weights into the folder `target`, with the tokenizer.

    The base is loaded in the precision of its files: an adapter that was trained on a base of few bits is added to the
    weights from which those were made. A base whose files are quantized is dequantized first.

    Args:
        adapter: a checkpoint or folder with `adapter_model.safetensors`.
        target: a new or empty folder.
        base: name or folder of the base; by default the one that the adapter names.
        dtype: of the result; by default that of the base.
        max_shard_size: of a file with weights, in bytes.

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
    merged.save_pretrained(target, max_shard_size=max_shard_size)
    if (tokenizer := first_tokenizer((str(adapter), name))) is not None:
        tokenizer.save_pretrained(target)


def first_tokenizer(places: Sequence[str]) -> Any:
    """Return the tokenizer of the first folder or name that has one; None if none has."""
    auto = require("transformers", "load a tokenizer").AutoTokenizer
    for place in places:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            return auto.from_pretrained(place)
    return None


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


_ARGUMENTS = "training_args.json"


def export_quantized(source: Folder, target: Path, scheme: str, options: ExportOptions) -> str:
    """Write the weights of `source`, quantized, with configuration and tokenizer into the folder `target`. Return the
    scheme.

    Args:
        scheme: a key of `QAT_SCHEMES`, or `TRAINED_SCHEME`.
        options: `dtype` is that of the weights that are not quantized.

    Raises:
        CheckpointError: it holds an adapter, or the folder exists.
        ConfigError: the scheme is not known, or cannot be had of this model or on this machine.
    """
    if find_weights(source) == ADAPTER_WEIGHTS:
        raise CheckpointError(
            f"{source.path} holds an adapter: merge it first (--merge), and quantize the result"
        )
    if scheme == TRAINED_SCHEME:
        scheme = _trained_for(source)
    if scheme == "float8" and not torch.cuda.is_available():
        fix = "torchao rounds weights to float8 on a GPU that multiplies in it; export there, or use int8"
        raise ConfigError(Problem("--quantize", scheme, f"needs a GPU: {fix}"))
    if scheme == "float8":  # torchao rounds weights in bfloat16 alone to it
        if options.dtype not in (None, torch.bfloat16):
            raise ConfigError(
                Problem("--dtype", str(options.dtype), "weights beside float8 are in bf16: leave it out")
            )
        options = replace(options, dtype=torch.bfloat16)
    export_folder(source, target, options, finish=lambda new, files: _quantize(new, scheme, options, files))
    return scheme


def _trained_for(source: Folder) -> str:
    """The `qat` of the run that saved the checkpoint."""
    scheme = None
    if _ARGUMENTS in source:
        path = source.path / _ARGUMENTS
        arguments = read(path, source.files, allow_nan=True)
        scheme = arguments.get("qat") if isinstance(arguments, dict) else None
    if scheme in QAT_SCHEMES:
        return str(scheme)
    fix = f"the checkpoint was not trained with qat, so name one: {', '.join(QAT_SCHEMES)}"
    raise ConfigError(Problem("--quantize", None, fix))


def _quantize(folder: Path, scheme: str, options: ExportOptions, files: Files) -> None:
    """Replace the weights in a folder of a model by quantized ones."""
    apply_qat(load_model(str(folder), {"dtype": "auto"}, empty=True), scheme)  # refuses what training refuses
    config = require("transformers", "quantize a model").TorchAoConfig(quantized_config(scheme))
    model: Any = load_model(str(folder), {"dtype": "auto", "quantization_config": config})
    new = folder / "quantized"
    model.save_pretrained(new, max_shard_size=options.max_shard_size)
    for path in list(folder.glob("*.safetensors*")):
        files.remove_file(path)
    for path in list(new.iterdir()):
        files.sync_file(path)
        files.rename(path, folder / path.name)
    new.rmdir()
