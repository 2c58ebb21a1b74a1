"""`windlass launch`: a script in many processes, on this machine or on a cluster."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from windlass.cli.command_line import CommandParser, program
from windlass.cli.launching.launch_checks import Machine
from windlass.core.activity import Activity
from windlass.core.errors import ConfigError
from windlass.core.optional import require
from windlass.core.output import say
from windlass.core.outside import load_outside
from windlass.core.world import LAUNCH_VARIABLE
from windlass.dist.variables import environment_of

if TYPE_CHECKING:
    import torch

_HELP = """\
Start a script in many processes. The file of `windlass config` applies unless a flag overrides it, and everything is
checked before the first process starts.

  windlass launch --num_processes 2 train.py --lr 3e-4
  windlass launch --config_file two_machines.yaml --machine_rank 1 train.py
  windlass launch --engine slurm --engine_options partition=long --print train.py

Exit codes: 0 every process succeeded; 2 the configuration is wrong; 69 the machines did not find each other, or one was
lost; 75 the job saved and exited, because a scheduler sent SIGTERM or SIGUSR1; 124 the job stalled for longer than
--stall_timeout, or a process waited longer than ddp_timeout; 130 and 143 stopped by Ctrl-C and by SIGTERM; else that of
the process that failed first, 128 + the signal if it was killed.
"""


def launch_command(words: Sequence[str]) -> int:
    options = build_parser().parse_args(words)
    with Activity("preparing the launch"):
        # Torch's store warns with C++ stacks when another machine has gone; the report has it in one line. The level of
        # the processes does not change.
        with environment_of(TORCH_CPP_LOG_LEVEL=os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")):
            require("torch", "launch")
            from windlass.cli.launching.launch import resolve_launch
        plan = resolve_launch(options, os.environ, this_machine())
        # Without the script's arguments, which may hold secrets.
        own = words[: len(words) - len(plan.arguments)]
        added = {
            LAUNCH_VARIABLE: json.dumps([*program(), "launch", *(word for word in own if word != "--print")])
        }
        if options.compat:
            added |= load_outside("imports of other libraries").environment(os.environ)
        plan = replace(plan, environment={**plan.environment, **added})
        # One for each engine: `run` starts the job and returns its exit code; `show` returns the job as text.
        engine = importlib.import_module(f"windlass.cli.launching.{plan.engine}")
    if options.print:
        say(engine.show(plan))
        return 0
    return int(engine.run(plan))


def build_parser() -> CommandParser:
    from windlass.cli.launching.launch_flags import add_launch_flags

    parser = CommandParser(
        prog="windlass launch",
        usage="windlass launch [FLAGS] SCRIPT [ITS ARGUMENTS]",
        description=_HELP,
        example="windlass launch --num_processes 2 train.py",
    )
    add_launch_flags(parser)
    return parser


def this_machine() -> Machine:
    """Return its accelerators and their precisions (imports torch)."""
    from windlass.core import xla
    from windlass.core.device import choose_device, visible_devices

    if xla.is_selected():  # its runtime belongs to the process that trains
        return Machine(device_kind="xla")
    device = choose_device()
    return Machine(visible_devices(), device.type, lambda precision, cpu: _lacks(precision, cpu, device))


def _lacks(precision: str, cpu: bool, device: torch.device) -> str | None:
    """Return why `precision` is not available; None if it is."""
    import torch

    from windlass.config.plan import Float8Plan, PrecisionPlan
    from windlass.precision.check import check_precision

    if precision == "no":
        return None
    float8 = Float8Plan() if precision == "fp8" else None
    plan = PrecisionPlan("fp16" if precision == "fp16" else "bf16", float8=float8)
    try:
        check_precision(plan, torch.device("cpu") if cpu else device)
    except ConfigError as error:
        return "; ".join(problem.fix for problem in error.problems)
    return None
