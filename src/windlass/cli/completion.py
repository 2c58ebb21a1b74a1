"""`windlass completion`: print a script with which a shell completes the words of the command line."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

from windlass.cli import main
from windlass.cli.command_line import CommandParser
from windlass.core.optional import require
from windlass.core.output import say
from windlass.recipes.argument_table import all_arguments
from windlass.recipes.built_in_recipes import names

_HELP = """\
Print a script for a shell that completes commands, flags, arguments and files. Load it once for each shell:

  bash   windlass completion bash > ~/.local/share/bash-completion/completions/windlass
  zsh    windlass completion zsh > ~/.zfunc/_windlass       (with ~/.zfunc in $fpath)
  fish   windlass completion fish > ~/.config/fish/completions/windlass.fish
"""
# Placeholders of words that are files or folders.
_FILES = ("FILE", "SCRIPT", "CHECKPOINT", "PATH", "TARGET", "RECIPE | key=value", "RECIPE.yaml | FILE")
_FOLDERS = ("DIR", "RUN")


def completion_command(words: Sequence[str]) -> int:
    options = build_parser().parse_args(words)
    shtab = require("shtab", "print completions")
    whole = main.build_parser()
    (commands,) = _commands(whole)
    # The main parser has only their names, so that `--help` imports nothing.
    for name, (module, _, _) in main.COMMANDS.items():
        commands[name] = importlib.import_module(f"windlass.cli.{module}").build_parser()
    for parser in _all_parsers(whole):
        for action in parser.arguments():
            if action.metavar in (*_FILES, *_FOLDERS):
                kind = shtab.DIRECTORY if action.metavar in _FOLDERS else shtab.FILE
                vars(action)["complete"] = kind  # the attribute that shtab reads
            elif parser.prog == "windlass explain" and action.dest == "words":
                action.choices = sorted({argument.keys[-1] for argument in all_arguments()})
            elif parser.prog == "windlass init" and action.dest == "name":
                action.choices = names()
    say(shtab.complete(whole, shell=options.shell))
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(prog="windlass completion", description=_HELP, example="windlass completion bash")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    return parser


def _commands(parser: CommandParser) -> list[dict[str, CommandParser]]:
    """Return the commands below a parser, by name, if it has any: in a list of one."""
    return [cast(Any, action.choices) for action in parser.arguments() if action.nargs == argparse.PARSER]


def _all_parsers(parser: CommandParser) -> Iterator[CommandParser]:
    yield parser
    for commands in _commands(parser):
        for inner in commands.values():
            yield from _all_parsers(inner)
