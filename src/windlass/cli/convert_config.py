"""`windlass convert-config`: turn a file of TRL, Axolotl or LLaMA-Factory into a recipe."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from windlass.cli import convert_keys as keys
from windlass.cli.training import training_arguments, training_fields
from windlass.config.documents import loads, one_line
from windlass.core.errors import ConfigError, Problem
from windlass.core.output import say
from windlass.core.plain_text import read_text

_HELP = """\
Turn a configuration of TRL, Axolotl or LLaMA-Factory into a recipe, and list what it could not carry over.

  windlass convert-config axolotl.yaml
  windlass convert-config trl.yaml --output recipe.yaml
"""


@dataclass(slots=True)
class Conversion:
    """The recipe under construction.

    Attributes:
        recipe: sections and their values.
        lost: key of the file -> value and reason, for what the recipe does not have.
    """

    recipe: dict[str, Any] = field(default_factory=lambda: {"task": "sft"})
    lost: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def put(self, dotted: str, value: Any) -> None:
        """Set a key of the recipe; later ones win."""
        *sections, last = dotted.split(".")
        place = self.recipe
        for name in sections:
            place = place.setdefault(name, {})
        place[last] = value


def convert_command(arguments: Sequence[str]) -> int:
    """Run `windlass convert-config`, and return the exit code."""
    parser = argparse.ArgumentParser(
        "windlass convert-config", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument(
        "--output", metavar="RECIPE.yaml", help="write the recipe there instead of printing it"
    )
    options = parser.parse_args(list(arguments))
    source, made = convert(_read(Path(options.file)))
    text = render(made, f"From {Path(options.file).name}, a configuration of {source}.")
    if options.output is None:
        say(text, end="")
        return 0
    Path(options.output).write_text(text, encoding="utf-8")
    say(f"{options.output}: written. Not carried over: {len(made.lost)} keys" + ("" if made.lost else "."))
    for name, (value, reason) in made.lost.items():
        say(f"  {name}={one_line(value)}: {reason}")
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(loads(read_text(path), str(path), json_text=path.suffix == ".json").values)
    except OSError as error:
        raise ConfigError(Problem("FILE", str(path), f"cannot be read: {error.strerror}")) from error


def convert(values: Mapping[str, Any]) -> tuple[str, Conversion]:
    """Return the name of the program whose configuration this is, and the recipe. Raises ConfigError if it is of none
    of the three, or not of supervised fine-tuning.
    """
    source = keys.source_of(values)
    made = Conversion()
    for name, reason in keys.other_training(source, values):
        raise ConfigError(Problem(name, values[name], reason))
    table, known = keys.TABLES[source], set(training_fields())
    for name, value in values.items():
        if value is None or name in keys.MEANINGLESS[source]:
            continue
        if name in table:
            _apply(made, name, value, table[name])
        elif name in known:
            made.put(f"training.{name}", value)
        else:
            made.lost[name] = value, keys.REASONS.get(name, "a recipe has no such key")
    keys.settle(source, values, made.put, lambda name, why: made.lost.__setitem__(name, (values[name], why)))
    if not _evaluates(made.recipe):
        made.put("data.eval_fraction", 0)  # a recipe holds out a part of the data by default
    if "task_type" not in made.recipe.get("adapter", {}):  # without an adapter, its options have no effect
        made.recipe.pop("adapter", None)
        if "quantization" in made.recipe:
            made.lost["quantization"] = (
                made.recipe.pop("quantization"),
                "needs an adapter, which is trained instead",
            )
    _drop_what_is_refused(made)
    return source, made


def _evaluates(recipe: Mapping[str, Any]) -> bool:
    data, strategy = recipe.get("data", {}), recipe.get("training", {}).get("eval_strategy", "no")
    return bool({"eval", "eval_split", "eval_fraction"} & data.keys()) or strategy not in ("no", False)


def _apply(made: Conversion, name: str, value: Any, rule: Any) -> None:
    try:
        for dotted, converted in rule(value) if callable(rule) else ((rule, value),):
            made.put(dotted, converted)
    except ValueError as error:
        made.lost[name] = value, str(error)


def _drop_what_is_refused(made: Conversion) -> None:
    """Move values of `training` that Windlass refuses to the list."""
    training = made.recipe.get("training", {})
    while True:
        try:
            training_arguments(training, "sft")
        except ConfigError as error:
            wrong = {problem.field.partition(".")[0]: problem for problem in error.problems}
            found = [name for name in wrong if name in training]
            if not found:
                raise
            for name in found:
                made.lost[name] = training.pop(name), wrong[name].fix
        else:
            return


def render(made: Conversion, head: str) -> str:
    """Return the recipe as YAML, with a list of what is not in it."""
    lines = [f"# {head}"]
    if made.lost:
        lines += ["#", "# Not carried over:"]
        lines += [f"#   {name}: {one_line(value)}  ({why})" for name, (value, why) in made.lost.items()]
    return "\n".join(lines) + "\n" + yaml.safe_dump(made.recipe, sort_keys=False, allow_unicode=True)
