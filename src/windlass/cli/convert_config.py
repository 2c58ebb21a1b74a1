"""`windlass convert-config`: turn a file of TRL, Axolotl or LLaMA-Factory into a recipe."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from windlass.cli.command_line import CommandParser, local_place
from windlass.config.documents import ForeignYaml, load, loads, one_line
from windlass.core.errors import ConfigError, Problem
from windlass.core.output import say, say_json
from windlass.core.outside import load_outside
from windlass.core.terminal import folded
from windlass.core.whole_file import write_whole
from windlass.recipes.recipe import training_arguments, training_fields
from windlass.recipes.schema import Recipe, field_names

_HELP = """\
Turn a configuration of TRL, Axolotl or LLaMA-Factory into a recipe, and list what it could not carry over.

  windlass convert-config axolotl.yaml
  windlass convert-config trl.yaml --output recipe.yaml
  windlass convert-config factory.yaml dataset_dir=LLaMA-Factory/data

key=value replaces a value of the file before it is converted.
"""


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass convert-config", description=_HELP, example="windlass convert-config trl.yaml"
    )
    parser.add_argument("file", metavar="FILE", help="the configuration, in YAML")
    values = "a key of it, with another value"
    parser.add_argument("values", nargs="*", default=[], metavar="key=value", help=values)
    parser.add_argument(
        "--output",
        type=local_place,
        metavar="RECIPE.yaml",
        help="write the recipe there instead of printing it",
    )
    parser.add_argument("--json", action="store_true", help="print the conversion as one JSON object")
    return parser


def convert_command(arguments: Sequence[str]) -> int:
    options = build_parser().parse_intermixed_args(list(arguments))
    path, output = Path(options.file), options.output
    if output is not None and output.exists() and output.samefile(path):
        raise ConfigError(Problem("--output", str(output), "is the file that is converted; name another"))
    values = load(path, ForeignYaml).values | _given(options.values)
    # `save_strategy: no` is that word, although it is False in their YAML.
    words = {name: "no" for name in values if name.endswith("_strategy") and values[name] is False}
    made = convert(values | words, path.parent)
    text = render(made, f"From {path.name}, a configuration of {made.program}.")
    if output is not None:
        write_whole(output, text)
    if options.json:
        lost = {name: {"value": value, "reason": reason} for name, (value, reason) in made.lost.items()}
        facts = {"program": made.program, "recipe": made.recipe, "not_carried_over": lost}
        say_json({**facts, "written": output and str(output)})
        return 0
    if output is None:
        say(text, end="")
        return 0
    say(f"{output}: written. Not carried over: {len(made.lost)} keys" + ("" if made.lost else "."))
    for name, (value, reason) in made.lost.items():
        say(f"  {folded(f'{name}={one_line(value)}: {reason}', 4)}")
    return 0


def _given(words: Sequence[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign:
            raise ConfigError(
                Problem("VALUE", word, "write the name of the value as well, such as dataset_dir=FOLDER")
            )
        given |= loads(f"{key}: {text}", word, ForeignYaml).values
    return given


def convert(values: Mapping[str, Any], folder: Path = Path()) -> Any:
    """Return the conversion of a configuration (`compat.conversion.made.Conversion`), with a recipe that is accepted.
    Raises ConfigError if it is of none of the three programs, or not of supervised fine-tuning.
    """
    programs = load_outside("configurations of other programs")
    made = programs.convert(values, set(training_fields()), folder)
    for section in made.recipe.keys() - set(field_names(Recipe)):
        made.lost[section] = made.recipe.pop(section), "a recipe has no such section"
    _drop_what_is_refused(made)
    return made


def _drop_what_is_refused(made: Any) -> None:
    """Move values of `training` that Windlass refuses to the list."""
    training = made.recipe.get("training", {})
    # Several times: rules between values are only checked when each of them is valid by itself.
    while True:
        try:
            with warnings.catch_warnings(record=True):  # of a value that is dropped in the next turn
                training_arguments(training, made.recipe["task"])
        except ConfigError as error:
            wrong = {problem.field.partition(".")[0]: problem for problem in error.problems}
            found = [name for name in wrong if name in training]
            if not found:
                raise
            for name in found:
                made.lost[name] = training.pop(name), wrong[name].fix
        else:
            return


def render(made: Any, head: str) -> str:
    """Return the recipe as YAML, with a list of what is not in it."""
    lines = [f"# {head}"]
    if made.lost:
        lines += ["#", "# Not carried over:"]
        # A reason is on one line too: what follows a line break would be read as a key of the recipe.
        lines += [
            f"#   {name}: {one_line(value)}  ({' '.join(why.split())})"
            for name, (value, why) in made.lost.items()
        ]
    return "\n".join(lines) + "\n" + yaml.safe_dump(made.recipe, sort_keys=False, allow_unicode=True)
