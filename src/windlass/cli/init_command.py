"""`windlass init`: copy a built-in recipe into a file of the user's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from windlass.cli.command_line import CommandParser, local_place
from windlass.cli.recipe_schema import EDITOR_LINE
from windlass.core.errors import ConfigError, Problem
from windlass.core.output import say
from windlass.core.whole_file import write_whole
from windlass.recipes.built_in_recipes import ENDINGS, built_in


def init_command(words: list[str]) -> int:
    options = build_parser().parse_args(words)
    source = built_in(options.name)
    target = options.path or Path(source.name)
    if target.is_dir():
        target /= source.name
    if target.suffix not in ENDINGS:
        raise ConfigError(Problem("PATH", str(target), "must be a folder, or end with .yaml"))
    if target.exists():
        raise ConfigError(Problem("PATH", str(target), "exists already; name another file"))
    text = source.read_text(encoding="utf-8")
    # The commands in its header run the copy.
    command = rf"^(#.*windlass train)(?: {source.stem})?(?= |$)"
    target.parent.mkdir(parents=True, exist_ok=True)
    quoted = shlex.quote(str(target))
    text = re.sub(command, lambda found: f"{found[1]} {quoted}", text, flags=re.MULTILINE)
    # In a locale that is not UTF-8, Python keeps such bytes of a path as surrogates.
    write_whole(target, (EDITOR_LINE + text).encode(errors="surrogateescape"))
    say(f"{target} is written. Run it:\n  windlass train {quoted}")
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass init",
        description="Copy a built-in recipe into a file of your own, to change it.",
        example="windlass init sst2 mine.yaml",
    )
    parser.add_argument("name", metavar="NAME", help="a built-in recipe; `windlass recipes` lists them")
    parser.add_argument(
        "path", type=local_place, nargs="?", metavar="PATH", help="the new file (default: NAME.yaml)"
    )
    return parser
