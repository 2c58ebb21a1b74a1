"""What the command line said, and what it answers with: known to the parser and to the commands alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
# What the command line calls torch's dtypes.
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


@dataclass(slots=True)
class TrainOptions:
    """What the command line of `windlass train` said."""

    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)
    output_dir: str | None = None
    resume: Literal[True] | str | None = None
    print_config: bool = False
    dry_run: bool = False
