"""Optional packages: found without importing them, and asked for with the command that installs them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from windlass.core.errors import MissingDependencyError

# import name -> the extra of the `windlass` distribution that brings it
EXTRAS = {
    "transformers": "hf",
    "tokenizers": "hf",
    "datasets": "datasets",
    "rich": "rich",
    "matplotlib": "report",
    "pyarrow": "parquet",
    "submitit": "slurm",
    "ray": "ray",
    "fsspec": "remote",
    "peft": "peft",
    "huggingface_hub": "hub",
    "bitsandbytes": "bnb",
    "torchao": "torchao",
    "deepspeed": "deepspeed",
    "sacrebleu": "metrics",
    "rouge_score": "metrics",
    "sklearn": "images",
    "PIL": "images",
}


def is_available(name: str) -> bool:
    """Whether package `name` is installed. Does not import it."""
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None


def is_imported(name: str) -> bool:
    """Whether package `name` was already imported: a value of one of its types can only exist then."""
    return sys.modules.get(name) is not None


def require(name: str, purpose: str) -> ModuleType:
    """Import optional package `name`, or raise with the command that installs it.

    `purpose` completes the sentence "... is needed to <purpose>".
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        top = name.split(".")[0]
        if error.name is not None and error.name.split(".")[0] != top:
            raise  # the package is there and is itself broken: its own message says more
        extra = EXTRAS.get(top)
        target = f'"windlass[{extra}]"' if extra else top
        raise MissingDependencyError(
            f"{top} is needed to {purpose}, and it is not installed. Install it with: pip install {target}"
        ) from error
