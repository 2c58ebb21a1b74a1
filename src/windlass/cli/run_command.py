"""`windlass run`: a script as it is, with the names of transformers' trainer and of accelerate answered by Windlass."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from windlass.core.errors import ConfigError, Problem

_HELP = """\
Run a script that imports transformers' Trainer or accelerate, without changing it: those names are Windlass's, and
models, tokenizers and datasets stay those of their libraries. Libraries that train for a script, such as trl, get
Windlass's names too. For several processes: `windlass launch --compat`.

  windlass run train.py --learning_rate 3e-4
  windlass run -m package.train
"""


def run_command(words: Sequence[str]) -> int:
    """Replace this process by Python running the script. Raises ConfigError if there is no such script."""
    from windlass.compat.import_hook import environment

    parser = argparse.ArgumentParser(
        prog="windlass run",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments"
    )
    options = parser.parse_args(words)
    if not options.module and not Path(options.script).is_file():
        raise ConfigError(Problem("SCRIPT", options.script, "there is no such file"))
    command = [sys.executable, *(["-m"] if options.module else []), options.script, *options.arguments]
    sys.stdout.flush()
    os.execve(sys.executable, command, {**os.environ, **environment(os.environ)})
