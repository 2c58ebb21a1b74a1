"""`windlass recipes`: list the built-in recipes."""

from __future__ import annotations

from windlass.cli.command_line import CommandParser, answer
from windlass.recipes.built_in_recipes import described, names

_COMMANDS = """
windlass train NAME     run one; training.max_steps=100 changes a value
windlass init NAME      copy one into a file of your own"""


def recipes_command(words: list[str]) -> int:
    options = build_parser().parse_args(words)
    known = {name: described(name) for name in names()}
    facts = [{"name": name, "trains": what, "needs": needs} for name, (what, needs) in known.items()]
    lines = [f"{name:<20}{what}\n{'':<20}needs {needs}" for name, (what, needs) in known.items()]
    return answer(options, facts, [*lines, _COMMANDS])


def build_parser() -> CommandParser:
    description = "List the built-in recipes: what each trains, and what it needs."
    parser = CommandParser(prog="windlass recipes", description=description)
    parser.add_argument("--json", action="store_true", help="as one JSON list")
    return parser
