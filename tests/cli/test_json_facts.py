"""Every command that prints facts prints them as JSON too; the others are named, with what they print."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator

import pytest

from windlass import __version__
from windlass.cli.command_line import CommandParser
from windlass.cli.main import COMMANDS, build_parser, main

PRINTS_NO_FACTS = {
    "init": "writes a file, and names it",
    "schema": "prints a JSON schema",
    "generate": "prints the text that a model writes",
    "chat": "is a conversation",
    "launch": "starts a script, and prints what it prints",
    "run": "starts a script, and prints what it prints",
    "config": "asks questions, and writes a file",
    "ui": "serves a page",
    "completion": "prints the lines that a shell reads",
}


def leaves(name: str, parser: CommandParser) -> Iterator[tuple[str, CommandParser]]:
    below = [
        (word, one)
        for action in parser.arguments()
        if isinstance(action.choices, dict)
        for word, one in action.choices.items()
        if isinstance(one, CommandParser)
    ]
    if not below:
        yield name, parser
    for word, one in below:
        yield from leaves(f"{name} {word}", one)


def every_command() -> dict[str, CommandParser]:
    commands = next(
        action.choices for action in build_parser().arguments() if isinstance(action.choices, dict)
    )
    found = {"version": commands["version"]}
    for name, (module, _, _) in COMMANDS.items():
        found |= dict(leaves(name, importlib.import_module(f"windlass.cli.{module}").build_parser()))
    return found


def test_every_command_that_prints_facts_has_json() -> None:
    without = {name for name, parser in every_command().items() if "--json" not in parser.flags()}
    assert without == set(PRINTS_NO_FACTS)


def test_the_version_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": __version__}


def test_json_of_a_training_is_of_its_rehearsal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--json"])
    assert "windlass status RUN --json" in capsys.readouterr().err
