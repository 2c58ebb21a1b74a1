"""`windlass test`: check that this installation trains in several processes."""

from __future__ import annotations

from collections.abc import Sequence

from windlass.cli.command_line import CommandParser
from windlass.cli.launch_command import launch_command
from windlass.core.output import say


def selftest_command(words: Sequence[str]) -> int:
    """Run the check with the launch configuration of this machine; return the launcher's exit code."""
    options, flags = build_parser().parse_known_args(words)
    processes = [] if options.config_file or options.num_processes else ["--num_processes", "2", "--cpu"]
    if options.config_file:
        processes += ["--config_file", options.config_file]
    if options.num_processes:
        processes += ["--num_processes", str(options.num_processes)]
    say(f"windlass test: launching with {' '.join([*processes, *flags])}")
    code = launch_command([*processes, *flags, "-m", "windlass.cli.selftest_ranks"])
    say("windlass test: all checks passed" if code == 0 else "windlass test: a check failed, see above")
    return code


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass test",
        description="Check that processes connect, and that a replicated update, a sharded update and a checkpoint are "
        "correct. Takes the flags of `windlass launch`; the default is two processes on the CPU.",
    )
    add = parser.add_argument
    add("--config_file", metavar="FILE", help="a launch file of `windlass config`")
    add("--num_processes", type=int, metavar="N", help="processes in all")
    return parser
