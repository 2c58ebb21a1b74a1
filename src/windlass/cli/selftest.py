"""`windlass test`: check that this installation trains in several processes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from windlass.cli.command_line import CommandParser
from windlass.cli.launch_command import launch_command
from windlass.core.output import say, say_json
from windlass.core.whole_file import parse_json

SCHEMA = "windlass-test/1"


def selftest_command(words: Sequence[str]) -> int:
    """Run the check with the launch configuration of this machine; return the launcher's exit code."""
    options, flags = build_parser().parse_known_args(words)
    given = {"--config_file": options.config_file, "--num_processes": options.num_processes}
    processes = [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
    processes = processes or ["--num_processes", "2", "--cpu"]
    ranks = [*processes, *flags, "-m", "windlass.cli.selftest_ranks"]
    if options.json:
        return _in_json(ranks, [*processes, *flags])
    say(f"windlass test: launching with {' '.join([*processes, *flags])}")
    code = launch_command(ranks)
    if code:  # that all passed is said by the checks: with --print, or in a queue, none has run yet
        say("windlass test: a check failed, see above")
    return code


def _in_json(ranks: list[str], flags: list[str]) -> int:
    """Run the checks, whose results the main process writes into a file, and print them as one object."""
    with tempfile.TemporaryDirectory(prefix="windlass-test-") as folder:
        path = Path(folder) / "checks.json"
        code = launch_command([*ranks, str(path)])
        checks = parse_json(path.read_bytes()) if path.is_file() else []
    # Without an outcome if none ran here: they were only shown, or those of another machine count.
    passed = None if code == 0 and not checks else code == 0
    say_json({"schema": SCHEMA, "passed": passed, "launched_with": flags, "checks": checks})
    return code


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass test",
        description="Check that processes connect, and that a replicated update, a sharded update and a checkpoint are "
        "correct. Takes the flags of `windlass launch`; the default is two processes on the CPU.",
    )
    add = parser.add_argument
    add("--config_file", "--config-file", metavar="FILE", help="a launch file of `windlass config`")
    add("--num_processes", "--num-processes", type=int, metavar="N", help="processes in all")
    add("--json", action="store_true", help="print the results as one JSON object")
    return parser
