"""`windlass estimate-memory`: the memory of a model, computed without its weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.optional import require
from windlass.core.output import say

# Bits of a parameter when loaded, and bytes of a parameter in training with Adam (None: not a dtype for training):
# weights, gradients and two moments in fp32 are 16; autocast adds a 16-bit copy of the weights.
DTYPES: dict[str, tuple[int, int | None]] = {
    "float32": (32, 16),
    "float16": (16, 18),
    "bfloat16": (16, 18),
    "int8": (8, None),
    "int4": (4, None),
}
HEADERS = ("dtype", "largest layer", "whole model", "training with Adam")


def estimate_memory_command(words: list[str]) -> int:
    """Print the table for one model; return the exit code."""
    options = _parser().parse_args(words)
    if options.library_name not in (None, "transformers"):
        fix = "only models of transformers can be built from a config alone"
        raise ConfigError(Problem("--library_name", options.library_name, fix))
    model = build_empty(options.model, options.trust_remote_code)
    rows = [HEADERS, *estimate(model, options.dtypes)]
    parameters = sum(param.numel() for param in model.parameters())
    say(f"{type(model).__name__} of {options.model}: {parameters:,} parameters")
    print_table(rows, str.rjust)
    say("Training: weights, gradients and Adam's moments, without activations, which depend on the batch.")
    return 0


def print_table(rows: Sequence[tuple[str, ...]], justify: Callable[[str, int], str]) -> None:
    """Print rows of cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(map(justify, row, widths)).rstrip())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="windlass estimate-memory",
        allow_abbrev=False,
        description="Estimate the memory of a model by dtype. The model is built from its config without weights.",
    )
    add = parser.add_argument
    add("model", help="a config.json, a folder with one, or a model's name on the Hub")
    add("--library_name", help="transformers (the default)")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="the dtypes to show (default: all)")
    add("--trust_remote_code", action="store_true", help="run the modelling code that comes with the model")
    return parser


def build_empty(name: str, trust_remote_code: bool = False) -> Any:
    """Build the model of a config in fp32 on the meta device, of the class that the config names, if it does.

    Raises ModelError if there is no such config.
    """
    from windlass.compat.meta import init_empty_weights

    transformers = require("transformers", "build a model from its config")
    path = Path(name)
    if path.suffix == ".json" and not path.is_file():
        raise ModelError(f"{name} does not exist")
    source = path.parent if path.is_file() else path
    if path.is_file() and path.name != "config.json":
        raise ModelError(f"{name}: the file of a model's config is called config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(source) if source.exists() else name, trust_remote_code=trust_remote_code
        )
        with init_empty_weights():
            model = _constructor(transformers, config, trust_remote_code)(config)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"no model can be built from {name!r}: {reason}") from error
    model.tie_weights()
    return model.float()


def _constructor(transformers: Any, config: Any, trust_remote_code: bool) -> Any:
    named = next(iter(getattr(config, "architectures", None) or []), None)
    if named is not None and not getattr(config, "auto_map", None) and hasattr(transformers, named):
        return getattr(transformers, named)
    return lambda config: transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)


def estimate(model: Any, dtypes: list[str]) -> list[tuple[str, str, str, str]]:
    """Return a row for each dtype: its name, and the sizes of the largest layer, the model and training."""
    from windlass.compat.module_sizes import calculate_maximum_sizes

    whole, (largest, _) = calculate_maximum_sizes(model)
    rows = []
    for dtype in dtypes:
        bits, training = DTYPES[dtype]
        trained = "-" if training is None else in_words(whole // 4 * training)
        rows.append((dtype, in_words(largest * bits / 32), in_words(whole * bits / 32), trained))
    return rows


def in_words(size: float) -> str:
    """Return bytes in the largest unit that is at most the size."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:,.4g} TiB"
