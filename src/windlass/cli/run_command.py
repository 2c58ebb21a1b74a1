"""`windlass run`: a script as it is, with the names of transformers' trainer and of accelerate answered by Windlass."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from windlass.cli.command_line import CommandParser, add_script, check_script, program
from windlass.core.outside import load_outside
from windlass.core.world import LAUNCH_VARIABLE

_HELP = """\
Run a script that imports transformers' Trainer or accelerate, without changing it: those names are Windlass's, and
models, tokenizers and datasets stay those of their libraries. Libraries that train for a script, such as trl, get
Windlass's names too. For several processes: `windlass launch --compat`.

  windlass run train.py --learning_rate 3e-4
  windlass run -m package.train
"""


def run_command(words: Sequence[str]) -> int:
    """Replace this process by Python running the script. Raises ConfigError if there is no such script."""
    options = build_parser().parse_args(words)
    if not options.module:
        check_script(options.script)
    command = [sys.executable, *(["-m"] if options.module else []), options.script, *options.arguments]
    sys.stdout.flush()
    typed = [*program(), "run", *(["-m"] if options.module else []), options.script]
    added = {
        **load_outside("imports of other libraries").environment(os.environ),
        LAUNCH_VARIABLE: json.dumps(typed),
    }
    os.execve(sys.executable, command, {**os.environ, **added})


def build_parser() -> CommandParser:
    parser = CommandParser(prog="windlass run", description=_HELP, example="windlass run train.py")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    add_script(parser)
    return parser
