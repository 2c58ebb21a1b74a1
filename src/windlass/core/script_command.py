"""The command that started this process, and how it is typed again so that its run resumes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from windlass.core.locations import shown_path
from windlass.core.output import STDERR
from windlass.core.terminal import folded, folded_command
from windlass.core.world import LAUNCH_VARIABLE, world_from_environment

ARGUMENT = "resume_from_checkpoint"
_FLAG = f"--{ARGUMENT}"
_LOGGED = "windlass: "
_SPELLINGS = (_FLAG, "--resume-from-checkpoint")
# What a command that is typed again needs to resume: nothing; the flag of the script's parser; a change of the script.
Needs = Literal["nothing", "flag", "script"]

_flags: set[str] = set()


def note_flags(parser: argparse.ArgumentParser) -> None:
    """Note the flags of a parser that reads the command line of this process."""
    _flags.update(action.dest for action in parser._actions if action.option_strings)


def needs_to_resume(asked: Any) -> Needs:
    """Return what this process's command, typed again, needs to resume.

    Args:
        asked: the argument `resume_from_checkpoint` of its run.
    """
    if asked is True or asked == "auto":
        return "nothing"
    return "flag" if ARGUMENT in _flags else "script"


def with_flag(words: Sequence[str]) -> list[str]:
    """Return the words of a script's command, with `--resume_from_checkpoint auto` in place of what they have of it."""
    kept, skips = [], False
    for word in words:
        if skips and not word.startswith("-"):
            skips = False
            continue
        skips = word in _SPELLINGS
        if not skips and not word.startswith(tuple(f"{flag}=" for flag in _SPELLINGS)):
            kept.append(word)
    return [*kept, _FLAG, "auto"]


def torchrun(machines: int, processes: int) -> list[str]:
    """Return the words that start a script in several processes of each machine without `windlass launch`."""
    nodes = [] if machines == 1 else ["--nnodes", str(machines)]
    return ["torchrun", *nodes, "--nproc-per-node", str(processes)]


def launch_words() -> list[str]:
    """Return the command of `windlass launch` or `windlass run` that started this process, up to its script; nothing if
    another did.
    """
    found = json.loads(os.environ.get(LAUNCH_VARIABLE) or "[]")
    return [str(word) for word in found] if isinstance(found, list) else []


def _typed() -> list[str]:
    """Return the command of this process; nothing if it runs no script."""
    if launched := launch_words():
        return [*launched, *sys.argv[1:]]
    main = sys.modules.get("__main__")
    if not sys.argv or getattr(main, "__file__", None) is None:
        return []
    world, spec = world_from_environment(), getattr(main, "__spec__", None)
    script = [sys.argv[0]] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    start = torchrun(world.machines, world.local_size) if world.is_distributed else ["python"]
    return [*start, *script, *sys.argv[1:]]


def resume_hint(step: int, last: int, newest: Path | None, asked: Any) -> str:
    """Return what the user of a script that was stopped may do next, for standard error.

    Args:
        step, last: where it stopped, and the last step of its run.
        newest: its newest checkpoint.
        asked: the argument `resume_from_checkpoint` of its run.
    """
    state, command = f"stopped at step {step:,} of {last:,}", _typed()
    if newest is None:
        return _hint(f"{state}; nothing was saved. Start again with", command)
    state += f"; {shown_path(newest)} is complete."
    if not command:
        return _folded(f"{state} train({ARGUMENT}=True) continues from it")
    match needs_to_resume(asked):
        case "nothing":
            return _hint(f"{state} The same command resumes", command)
        case "flag":
            return _hint(f"{state} Resume with", with_flag(command))
        case "script":
            change = f'To resume, write trainer.train({ARGUMENT}="auto") in the script, and start it again'
            return _hint(f"{state} {change}", command)


def _hint(sentence: str, command: Sequence[str]) -> str:
    if not command:
        return sentence.partition(". ")[0]
    return f"{_folded(f'{sentence}:')}\n  {folded_command(shlex.join(command), STDERR, 2)}"


def _folded(sentence: str) -> str:
    """Return a sentence as rows, of which the logger's name begins the first."""
    return folded(f"{_LOGGED}{sentence}", stream=STDERR).removeprefix(_LOGGED)
