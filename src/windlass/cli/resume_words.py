"""The command line that resumes a run, and how it is printed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from windlass.cli.command_line import program
from windlass.core.redact import HIDDEN
from windlass.core.script_command import launch_words, torchrun, with_flag
from windlass.core.world import world_from_environment
from windlass.recipes.built_in_recipes import is_recipe


def resume_command(arguments: Sequence[str]) -> str:
    """Return the command line that resumes this one, quoted for a shell."""
    return shlex.join([*_launcher(), *_resuming(arguments)])


def start_command(arguments: Sequence[str]) -> str:
    """Return this command line itself, quoted for a shell."""
    return shlex.join([*_launcher(), *arguments])


def _resuming(arguments: Sequence[str], *checkpoint: str) -> list[str]:
    """Return the words of `windlass train`, with `--resume` and the checkpoint, if it is given, in place of what they
    have of it. A search continues by itself, and takes no such flag.
    """
    if _searches(arguments):
        return list(arguments)
    kept, skip = [], False
    for index, word in enumerate(arguments):
        if skip:
            skip = False
        elif word == "--resume":
            # The checkpoint after it is older than the newest one.
            following = arguments[index + 1] if index + 1 < len(arguments) else "-"
            skip = not following.startswith("-") and names_checkpoint(following)
        elif not word.startswith("--resume=") and word != "--dry-run":
            kept.append(word)
    return [*kept, "--resume", *checkpoint]


def _searches(arguments: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == "--search" for word in arguments)


def names_checkpoint(word: str) -> bool:
    """Return True if a word after `--resume` is the checkpoint to resume from, and not a recipe or an override."""
    # A name of a key has no slash: `runs/lr=0.1/checkpoint-3` may be removed by now.
    name, equals, _ = word.partition("=")
    is_override = bool(equals) and "/" not in name
    return os.path.isdir(word) or not (is_override or is_recipe(word))


def _launcher() -> list[str]:
    """The words before "train" in the command that started this process."""
    launched = launch_words()
    if launched and Path(launched[-1]).name == "windlass":  # and not a script that started this command
        return launched
    world = world_from_environment()
    if not world.is_distributed:
        return program()
    return [*torchrun(world.machines, world.local_size), "-m", "windlass"]


def resume_recorded(
    process: Mapping[str, Any], resumes: bool, moved_to: Path | None = None, *, starts: bool = False
) -> tuple[str | None, str]:
    """Return the command line that resumes a recorded run, and what it needs besides; None if it is not recorded.

    Args:
        process: `process` of `run.json`.
        resumes: the same command resumes it, whatever is recorded.
        moved_to: the run's folder, if that is not where the command would look for it.
        starts: there is no checkpoint to resume from.
    """
    words, launcher = process.get("arguments"), process.get("launcher") or []
    if not _are_words(words) or not words or not _are_words(launcher):
        return None, ""
    script, rest = words[0], words[1:]
    is_command = Path(script).name in ("windlass", "__main__.py") and rest[:1] == ["train"]
    if launcher:
        start = launcher
    else:
        sizes = process.get("machines"), process.get("processes_per_machine")
        # Of a record that may be damaged; `isinstance` would take True for 1.
        machines, processes = (value if type(value) is int else 1 for value in sizes)
        if machines * processes > 1:
            start = [*torchrun(machines, processes), *(["-m", "windlass"] if is_command else [script])]
        else:
            start = ["windlass"] if is_command else ["python", script]
    has_folder = is_command and not _searches(rest)  # a search names that of all its trials
    if is_command:
        rest = _of_folder(rest, moved_to) if moved_to is not None and has_folder else rest
        rest = _resuming(rest, "auto") if starts else _resuming(rest)
    command = [*start, *rest]
    needed = "nothing" if is_command or resumes or starts else process.get("needs")
    if needed == "flag":
        command = with_flag(command)
    needs = []
    if needed not in ("nothing", "flag"):
        needs.append('the script must call trainer.train(resume_from_checkpoint="auto")')
    if moved_to is not None and not has_folder:
        needs.append(f"the run was moved: its output_dir is {moved_to} now")
    if any(HIDDEN in word for word in command):
        needs.append(f"put back the secrets that are shown as {HIDDEN}")
    folder = process.get("folder")
    place = f"cd {shlex.quote(folder)} && " if isinstance(folder, str) and folder else ""
    return place + shlex.join(command), "; ".join(needs)


def _of_folder(words: Sequence[str], folder: Path) -> list[str]:
    """Return the words of `windlass train` with another output folder."""
    kept = []
    for before, word in zip(["", *words], words, strict=False):
        if before != "--output-dir" and not word.startswith(("--output-dir", "training.output_dir=")):
            kept.append(word)
    return [*kept, "--output-dir", str(folder)]


def _are_words(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(word, str) for word in found)
