"""Exit codes, names and options that the parser and the commands share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
# Set by `windlass launch` for its processes: its words up to the script, as JSON, for the command that resumes.
LAUNCH_VARIABLE = "WINDLASS_LAUNCH_COMMAND"
# Names of torch's dtypes on the command line.
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


@dataclass(slots=True)
class TrainOptions:
    """The options of `windlass train`."""

    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)
    output_dir: str | None = None
    resume: Literal[True] | str | None = None
    print_config: bool = False
    dry_run: bool = False
