"""`windlass launch`: a script in many processes, on this machine or on a cluster."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from windlass.config.nearest import did_you_mean
from windlass.core.optional import require
from windlass.core.output import say

_HELP = """\
Start a script in many processes. What was said to `windlass config` holds where no flag says otherwise, and everything
is checked before the first process starts.

  windlass launch --num_processes 2 train.py --lr 3e-4
  windlass launch --config_file two_machines.yaml --machine_rank 1 train.py
  windlass launch --engine slurm --engine_options partition=long --print train.py

Exit codes: 0 every process ended well; 2 the configuration is wrong; 69 the machines did not find each other, or one
was lost; 75 the job saved and left, because a scheduler sent SIGTERM or SIGUSR1; 124 the job stood still for longer
than --stall_timeout, or a process waited longer than ddp_timeout; 130 and 143 stopped by Ctrl-C and by SIGTERM; else
that of the process that failed first, 128 + the signal where one killed it.
"""


def launch_command(words: Sequence[str]) -> int:
    """Launch what `words` say; returns the exit code."""
    # Torch's store warns with C++ stacks when another machine has gone; the report says it in one line. The processes
    # themselves keep the level that they were given.
    unsaid = "TORCH_CPP_LOG_LEVEL" not in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    require("torch", "launch")
    from windlass.cli.launching.engines import engine
    from windlass.cli.machine import this_machine
    from windlass.config.launch import resolve_launch

    if unsaid:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    options = _parser().parse_args(words)
    plan = resolve_launch(options, os.environ, this_machine())
    carrier = engine(plan.engine)
    if options.print:
        say(carrier.show(plan))
        return 0
    return carrier.run(plan)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: the usage of so many flags would hide it."""

    def error(self, message: str) -> NoReturn:
        flags = [name.lstrip("-") for name in self._option_string_actions]
        unknown = [word for word in message.split() if word.startswith("--")]
        hints = "".join(did_you_mean(word.lstrip("-").split("=")[0], flags) for word in unknown)
        self.exit(2, f"windlass launch: {message}{hints}; `windlass launch --help` lists the flags\n")


def _parser() -> argparse.ArgumentParser:
    from windlass.config.launch_flags import add_launch_flags

    parser = _Parser(
        prog="windlass launch",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--print", action="store_true", help="show the job that would run, and start nothing")
    add_launch_flags(parser)
    return parser
