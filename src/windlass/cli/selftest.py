"""`windlass test`: does this installation train in several processes?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from windlass.cli.launch_command import launch_command
from windlass.core.output import say


def selftest_command(words: Sequence[str]) -> int:
    """Run the check with the launch configuration that is in force; returns the launcher's exit code."""
    options, flags = _parser().parse_known_args(words)
    processes = [] if options.config_file or options.num_processes else ["--num_processes", "2", "--cpu"]
    if options.config_file:
        processes += ["--config_file", options.config_file]
    if options.num_processes:
        processes += ["--num_processes", str(options.num_processes)]
    say(f"windlass test: launching with {' '.join([*processes, *flags])}")
    code = launch_command([*processes, *flags, "-m", "windlass.cli.selftest_ranks"])
    say("windlass test: all is well" if code == 0 else "windlass test: something is wrong, see above")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="windlass test",
        description="Check this installation: processes meet, and a replicated and a sharded update and a checkpoint "
        "are right. Takes the flags of `windlass launch`; without any, two processes on the CPU.",
    )
    parser.add_argument(
        "--config_file", metavar="FILE", help="a launch configuration, as `windlass config` writes it"
    )
    parser.add_argument("--num_processes", type=int, metavar="N", help="processes in all")
    return parser
