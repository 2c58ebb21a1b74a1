"""Every command that a page prints exists, with its flags, and so does the recipe that it trains."""

from __future__ import annotations

import functools
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from windlass.cli.command_line import CommandParser
from windlass.cli.main import COMMANDS
from windlass.config.parallel.table import FLAGS
from windlass.recipes.built_in_recipes import is_recipe

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(?:bash|console|sh)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BEFORE_A_COMMAND = ("|", "&&", ";", "srun")
# After these a script and its own flags follow.
_STARTS_A_SCRIPT = ("launch", "run")
_SCRIPT = re.compile(r".*\.(py|yaml|yml|json)|-m|--module")


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each `windlass` command in the shell blocks of a page, without the name of the program."""
    for block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for start, word in enumerate(words):
                before = words[start - 1] if start else ";"
                if word == "windlass" and (before in _BEFORE_A_COMMAND or "=" in before):
                    yield words[start + 1 :]


@functools.cache
def flags_of(command: str) -> frozenset[str]:
    """Return the flags of a command and of the commands below it."""
    # The help of a launch lists one spelling of each setting.
    spellings = [f"--{flag}" for flag in FLAGS] if command in ("launch", "explain") else []
    return frozenset([*_flags_below(_parser_of(command)), *spellings])


def _parser_of(command: str) -> CommandParser:
    module = importlib.import_module(f"windlass.cli.{COMMANDS[command][0]}")
    return module.build_parser()


def _flags_below(parser: CommandParser) -> Iterator[str]:
    for action in parser.arguments():
        yield from action.option_strings
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                if isinstance(below, CommandParser):
                    yield from _flags_below(below)


def faults(words: list[str]) -> list[str]:
    """Return what is wrong with the words of a command."""
    command, *rest = words or [""]
    if command.startswith("-") or command in ("", "version"):
        return []
    if command not in COMMANDS:
        return [f"no command {command!r}"]
    found = []
    for word in rest:
        if word in ("|", ">", "&&", "&", ";", "--"):
            break
        if command in _STARTS_A_SCRIPT and _SCRIPT.fullmatch(word):
            break
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in flags_of(command):
            found.append(f"windlass {command} has no {flag}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_exists(page: Path) -> None:
    wrong = [fault for words in commands(page.read_text("utf-8")) for fault in faults(words)]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_recipes_that_are_trained_exist(page: Path) -> None:
    """A word without a dot after `train`, `init` is the name of a built-in recipe; a path into `recipes/` is a file."""
    names = [
        words[1]
        for words in commands(page.read_text("utf-8"))
        if words[:1] in (["train"], ["init"]) and words[1:]
    ]
    built_in = [name for name in names if re.fullmatch(r"[a-z][\w-]*", name)]
    files = [name for name in names if name.startswith("recipes/")]
    assert not [name for name in built_in if not is_recipe(name)]
    assert not [name for name in files if not (ROOT / name).exists()]


def test_what_is_wrong_is_found() -> None:
    lines = [
        "X=1 windlass trian",
        "windlass train --resme",
        "windlass launch --num_processes 2 a.py --own",
        "ls",
    ]
    page = "\n".join(["```bash", *lines, "```"])
    assert [faults(words) for words in commands(page)] == [
        ["no command 'trian'"],
        ["windlass train has no --resme"],
        [],
    ]
