"""The weights of a checkpoint in few bits, for `from_pretrained`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint.adapters import ADAPTER_WEIGHTS
from windlass.checkpoint.export import ExportOptions, export_folder
from windlass.checkpoint.files import Files
from windlass.checkpoint.stored import Folder, find_weights
from windlass.checkpoint.strict_json import read
from windlass.config.sections.fields import QAT_SCHEMES, TRAINED_SCHEME
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.optional import require
from windlass.finetuning.base_model import load_model
from windlass.transforms.quantization_aware import apply_qat, quantized_config

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
