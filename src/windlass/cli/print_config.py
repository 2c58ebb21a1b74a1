"""`windlass train --print-config`: print a recipe as YAML that can be run, with what each key means."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from windlass.cli.recipe_schema import EDITOR_LINE
from windlass.config.accepting import TWINS
from windlass.config.arguments import as_plain, describe
from windlass.config.documents import Keys, one_line
from windlass.config.sections.setting import rules_in
from windlass.core.redact import is_secret_name
from windlass.recipes.argument_table import Argument, all_arguments
from windlass.recipes.recipe import training_arguments
from windlass.recipes.schema import Recipe

MARK = "# *"
_WIDTH = 80
_USUAL = "Keys that differ from their defaults or are often set; --all prints the others"
_HEAD = f"""\
# {{what}}.
# Lines marked `{MARK}` differ from the default. On a key: windlass explain KEY
# Save it and run it: windlass train FILE
"""
# Arguments of `training` that are often set.
_OFTEN_SET = (
    "output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type",
    "warmup_steps", "optim", "weight_decay", "gradient_accumulation_steps", "max_grad_norm", "bf16",
    "activation_checkpointing", "logging_steps", "report_to", "eval_strategy", "eval_steps",
    "per_device_eval_batch_size", "save_strategy", "save_steps", "keep_last",
    "load_best_model_at_end", "seed", "max_length", "packing",
)  # fmt: skip


def render_config(recipe: Recipe, *, everything: bool = False) -> str:
    """Return YAML from which an equal recipe is read, with a comment on each key. `everything`: with all keys that the
    task reads and that have an effect, also those that are seldom set.
    """
    what = "The complete recipe, defaults included" if everything else _USUAL
    known = {argument.keys: argument for argument in all_arguments(recipe.task)}

    def section(path: Keys, values: Any) -> Iterator[str]:
        """Yield the lines on the keys of a section, without `training`."""
        for item in fields(values):
            keys, value = (*path, item.name), getattr(values, item.name)
            if is_dataclass(value):
                if lines := list(section(keys, value)):
                    yield f"{_indent(keys) or chr(10)}{item.name}:"
                    yield from lines
            elif keys in known:
                argument = known[keys]
                is_read = not argument.readers or recipe.task in argument.readers
                is_usual = is_read and (everything or argument.default is not None)
                if is_usual or value != argument.default:
                    yield from _entry(argument, value)

    def training() -> Iterator[str]:
        """Yield the lines on the arguments. What was derived from others has its default, so that it still is."""
        for name, value, is_default in describe(training_arguments(recipe.training, recipe.task)):
            argument = known.get(("training", name))
            if argument is None or is_secret_name(name) or name in TWINS:
                continue
            rules = rules_in(argument.field)
            has_effect = not (rules.mapped or rules.refused)
            if not is_default or name in _OFTEN_SET or (everything and has_effect):
                yield from _entry(argument, argument.default if is_default else value)

    lines = [EDITOR_LINE + _HEAD.format(what=what), *section((), recipe), "\ntraining:", *training()]
    return "\n".join(lines) + "\n"


def _entry(argument: Argument, value: Any) -> Iterator[str]:
    """Yield a key with its comment: on the line of the key, or before it if that would be too long."""
    indent = _indent(argument.keys)
    text = f"{indent}{argument.keys[-1]}: {one_line(as_plain(value))}"
    doc, default = argument.doc.rstrip("."), as_plain(argument.default)
    mark = ""
    if as_plain(value) != default:
        mark, doc = f"  {MARK}", f"{doc} (default: {one_line(default)})"
    line = f"{text}{mark} {doc}" if mark else f"{text}  # {doc}"
    if len(line) <= _WIDTH:
        yield line
    else:
        yield from textwrap.wrap(doc, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        yield f"{text}{mark}"


def _indent(keys: Keys) -> str:
    return "  " * (len(keys) - 1)
