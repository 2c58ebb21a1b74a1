"""`windlass explain NAME`: what an argument or a setting means, the source of its value, and all its spellings."""

from __future__ import annotations

import json
import math
import os
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from windlass.cli.command_line import CommandParser, answer, names_and_overrides
from windlass.cli.launching.launch import launch_settings
from windlass.cli.launching.launch_flags import add_setting_flags
from windlass.config.accepting import OLD_NAMES
from windlass.config.arguments import TrainingArguments, describe
from windlass.config.deepspeed import explained
from windlass.config.parallel.keys import Key, Setting, Settings, merge
from windlass.config.parallel.parallel_plan import dtype_plans, parallel_problems
from windlass.config.parallel.rows_deepspeed import CONFIG
from windlass.config.parallel.rows_launch import PROCESSES
from windlass.config.parallel.rows_training import MESH_EXPERT, MODEL_AXES, PRECISION
from windlass.config.parallel.sources import from_arguments
from windlass.config.parallel.table import FLAGS, SPELLINGS, spellings
from windlass.config.sections.setting import default_of, rules_in
from windlass.core.errors import ConfigError, Problem, did_you_mean
from windlass.core.output import STDOUT, is_terminal
from windlass.core.world import World
from windlass.precision.dtypes import dtypes_of
from windlass.recipes.argument_table import Argument, all_arguments, find_arguments
from windlass.recipes.recipe import check_draft, read_draft, training_arguments
from windlass.recipes.recipe_draft import RecipeDraft
from windlass.recipes.schema import Recipe
from windlass.recipes.tasks import TASKS


@dataclass(slots=True)
class Explanation:
    """Attributes:
    name: its dotted name.
    value: in the recipe or settings given, else its default.
    facts: what is said about it, in the order of the lines: a word, and a text or several.
    """

    name: str
    value: Any
    facts: list[tuple[str, str | list[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if is_dataclass(self.value):  # a section
            self.value = asdict(self.value)  # type: ignore[arg-type]

    def add(self, word: str, said: str | list[str] | None) -> None:
        """Add a fact, unless there is nothing to say."""
        if said:
            self.facts.append((word, said))

    def lines(self) -> Iterator[str]:
        yield f"{self.name} = {as_text(self.value)}"
        for word, said in self.facts:
            yield f"  {word:<9} {said if isinstance(said, str) else ', '.join(said)}"

    def as_json(self) -> dict[str, Any]:
        """Return it for programs: a word that occurs several times has a list of texts."""
        facts: dict[str, str | list[str]] = {}
        for word, said in self.facts:
            before = facts.get(word)
            facts[word] = said if before is None else [*_listed(before), *_listed(said)]
        return {"name": self.name, "value": self.value, "facts": facts}


def _listed(said: str | list[str]) -> list[str]:
    return [said] if isinstance(said, str) else said


def as_text(value: Any) -> str:
    """Return a value as a recipe spells it."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=str)


_HELP = """\
Print what an argument or a setting means, its value, and where the value was set: by a recipe with overrides, a flag, a
launch file or the environment. Any spelling will do.

  windlass explain learning_rate
  windlass explain data.block_size --recipe shakespeare
  windlass explain training.optim --recipe my.yaml --json
  windlass explain precision --config_file two.yaml --mixed_precision bf16
"""
_PLACES = 16
"""The places of so many processes are printed, at most."""
# Sections whose keys are those of another library.
_OF_LIBRARIES = {
    "adapter": "peft.LoraConfig",
    "model.config": "the model's config in transformers",
    "base.config": "the model's config in transformers",
}
# Pages on the arguments of a section.
_PAGES = {
    "OptimisationSection": "training.md, optimizers.md",
    "ComputeSection": "training.md, low-memory.md",
    "ReportingSection": "logging.md",
    "EvaluationSection": "training.md",
    "SavingSection": "checkpoints.md, hub.md",
    "RunningSection": "training.md, data.md, distributed.md",
    "GenerationSection": "seq2seq.md",
    "SFTConfig": "fine-tuning.md, text.md",
}


def explain_command(words: list[str]) -> int:
    """Print one argument or setting, or all that are set; return the exit code."""
    parser = build_parser()
    options = parser.parse_intermixed_args(words)
    names, overrides = names_and_overrides(options.words)
    if len(names) > 1 or (overrides and options.recipe is None):
        parser.error(f"one name at a time: {' '.join(names)}" if names[1:] else "overrides need --recipe")
    settings, given = launch_settings(options, os.environ), None
    if options.recipe:
        given = GivenRecipe.read(options.recipe, overrides)
        settings = merge(from_arguments(given.training), settings)
    found = list(_one(names[0], settings, given)) if names else []
    facts: Any = [one.as_json() for one in found] if names else _facts(settings, given)
    lines = [line for one in found for line in one.lines()] if names else _all(facts, given)
    width = shutil.get_terminal_size().columns if is_terminal(STDOUT) else None
    folded = (
        line if width is None else textwrap.fill(line, width, subsequent_indent=" " * 12) for line in lines
    )
    return answer(options, facts, folded)


def build_parser() -> CommandParser:
    usage = "windlass explain [NAME] [--recipe FILE [key=value ...]] [FLAGS]"
    parser = CommandParser(prog="windlass explain", usage=usage, description=_HELP)
    add = parser.add_argument
    add(
        "words",
        nargs="*",
        metavar="NAME | key=value",
        help="an argument or setting (default: all that are set), and overrides of keys of the recipe",
    )
    add("--recipe", metavar="FILE", help="a recipe that is to be trained; its data need not exist")
    add("--json", action="store_true", help="as JSON: a list of what the name means, or all that are set")
    add_setting_flags(parser)
    return parser


@dataclass(frozen=True, slots=True)
class GivenRecipe:
    """A checked recipe, its arguments, and where each key was set."""

    recipe: Recipe
    training: TrainingArguments
    draft: RecipeDraft

    @classmethod
    def read(cls, path: str, overrides: list[str]) -> GivenRecipe:
        """Read a recipe file. Raises ConfigError with all problems, except missing files."""
        draft = read_draft(path, overrides)
        recipe = check_draft(draft, opens_files=False)
        return cls(recipe, training_arguments(recipe.training, recipe.task), draft)

    def value(self, argument: Argument) -> Any:
        """Return the value of a key; None below a section that is absent."""
        if argument.is_training:
            return {name: value for name, value, _ in describe(self.training)}[argument.keys[-1]]
        return argument.value_in(self.recipe)

    def has(self, argument: Argument) -> bool:
        """Return True if the task of the recipe reads a key, and the recipe has its section."""
        is_absent = len(argument.keys) > 1 and getattr(self.recipe, argument.keys[0]) is None
        return not is_absent and (not argument.readers or self.recipe.task in argument.readers)


def find_setting(word: str) -> Key | None:
    """Return the setting of a launch with this name, flag, variable, key of a launch file or field of arguments."""
    spelling = word.lstrip("-").replace("-", "_").removeprefix("TrainingArguments.").removeprefix("parallel.")
    return SPELLINGS.get(spelling) or FLAGS.get(spelling.rpartition(".")[2])


def _one(word: str, settings: Settings, given: GivenRecipe | None) -> Iterator[Explanation]:
    spelling = word.replace("-", "_")
    key, old = find_setting(word), OLD_NAMES.get(spelling)
    # Those that do not set it: a launch and a conversation have a "role" each.
    arguments = [
        argument
        for argument in _arguments(spelling, given)
        if key is None or argument.keys[-1] not in key.fields
    ]
    if key is not None and arguments and "." in spelling:  # means one of them
        key, arguments = (key, []) if key.name == spelling else (None, arguments)
    if key is not None:
        yield explain(key, settings)
    for argument in arguments:
        yield _explain_argument(argument, given)
    if key is not None or arguments:
        return
    if old is not None:
        yield Gone(spelling, None, [("gone", old.note)])
    elif (owner := _OF_LIBRARIES.get(spelling.rpartition(".")[0])) is not None:
        raise ConfigError(Problem("NAME", word, f"is an option of {owner}, which documents it"))
    else:
        known = list(all_arguments())
        names = [*SPELLINGS, *(one.dotted for one in known), *(one.keys[-1] for one in known)]
        hint = did_you_mean(spelling, names) or "; docs/support.md lists them"
        raise ConfigError(Problem("NAME", word, f"there is no such argument or setting{hint}"))


class Gone(Explanation):
    """A name without a successor."""

    def lines(self) -> Iterator[str]:
        yield f"{self.name} {self.facts[0][1]}"


def _arguments(word: str, given: GivenRecipe | None) -> list[Argument]:
    """Return the arguments of this name; of several, those that the recipe has, if it has one."""
    inside = word.partition(".")[2]  # of a class, such as TrainingArguments.seed
    if given is not None:
        task = given.recipe.task
        found = find_arguments(word, task) or find_arguments(inside, task)
        if own := [argument for argument in found if given.has(argument)]:
            return own
    return find_arguments(word) or find_arguments(inside)


def _explain_argument(argument: Argument, given: GivenRecipe | None) -> Explanation:
    name, rules = argument.keys[-1], rules_in(argument.field)
    if given is None or not given.has(argument):
        said = Explanation(argument.dotted, argument.default, [("from", "its default")])
        for word, default in _other_defaults(argument):
            said.add(word, default)
    else:
        value, origin = given.value(argument), given.draft.origin(*argument.keys)
        unset = "its default" if value == argument.default else "derived from other keys, or set by the task"
        said = Explanation(argument.dotted, value, [("from", origin or unset)])
        said.add("default", as_text(argument.default))
    said.add("means", argument.doc)
    said.add("type", argument.type_in_words())
    said.add("values", list(argument.values()))
    said.add("refused", rules.refused)
    said.add("but", rules.mapped)
    said.add("tasks", argument.readers)
    said.add("python", f"{argument.owner.__name__}.{name}" if argument.is_training else None)
    said.add("recipe", argument.dotted)
    said.add("earlier", argument.earlier_names)
    declaring = next(kind for kind in argument.owner.__mro__ if name in vars(kind).get("__annotations__", {}))
    pages = _PAGES.get(declaring.__name__, "recipes.md").split(", ")
    said.add("page", [f"docs/{page}" for page in pages])
    return said


def _other_defaults(argument: Argument) -> Iterator[tuple[str, str]]:
    """Yield the defaults in the arguments of tasks that have others, by the name of the class."""
    for kind in dict.fromkeys(task.arguments for task in TASKS.values() if argument.is_training):
        for item in fields(kind):
            if item.name == argument.keys[-1] and default_of(item) != argument.default:
                yield kind.__name__, as_text(default_of(item))


def explain(key: Key, settings: Settings) -> Explanation:
    given = settings.get(key.name)
    said = Explanation(key.name, settings.value(key))
    if given is None:
        said.add("from", "its default")
    else:
        said.add("from", f"{given.origin}{_note(given)}")
        for other in given.overridden:
            said.add("over", f"{as_text(other.value)} from {other.origin}{_note(other)}")
        said.add("default", as_text(key.default))
    said.add("means", key.doc)
    said.add("refused", key.refused)
    said.add("but", key.idle)
    if key is CONFIG and given is not None:
        for path, value, source in explained(given.value):
            said.add("value", f"{path} = {as_text(value)}{source and f'  # {source}'}")
    if key is PRECISION and not settings.problems:
        said.add("dtypes", str(dtypes_of(*dtype_plans(settings), "as the model is loaded")))
    for place, spelling in spellings(key):
        said.add(place, spelling)
    for problem in settings.problems:
        said.add("problem", str(problem))
    return said


def _set_keys(settings: Settings, given: GivenRecipe | None) -> Iterator[tuple[str, Any, str]]:
    """Yield what is set: name, value, where."""
    unset: set[str] = set()
    if given is not None:
        # Of these `from_arguments` reads the value also if it was not set.
        unset = {
            f"TrainingArguments.{name}" for name, _, is_default in describe(given.training) if is_default
        }
        for argument in all_arguments(given.recipe.task):
            value, origin = given.value(argument), given.draft.origin(*argument.keys)
            if origin is not None and not is_dataclass(value):
                yield argument.dotted, value, origin
    for name in sorted(settings):
        setting = settings[name]
        if setting.origin not in unset:
            yield name, setting.value, f"{setting.origin}{_note(setting)}"


def _facts(settings: Settings, given: GivenRecipe | None) -> dict[str, Any]:
    """Return all that is set, its problems, and the layout."""
    keys = [
        {"name": name, "value": value, "from": origin} for name, value, origin in _set_keys(settings, given)
    ]
    problems = [str(problem) for problem in settings.problems]
    return {"settings": keys, "problems": problems, "layout": [] if problems else list(_layout(settings))}


def _all(facts: Mapping[str, Any], given: GivenRecipe | None) -> Iterator[str]:
    if not facts["settings"] and given is None:
        yield "no settings given; all defaults apply"
    for one in facts["settings"]:
        yield f"{one['name']} = {as_text(one['value'])}  # {one['from']}"
    yield from (f"problem: {problem}" for problem in facts["problems"])
    yield from facts["layout"]


def _layout(settings: Settings) -> Iterator[str]:
    """The place of each process, if some of them compute the same samples together, or divide experts."""
    together = math.prod(settings.value(key) for key in (*MODEL_AXES, MESH_EXPERT))
    if together == 1:
        return
    # Without a number of processes, as few as the axes need: the layout is the question, and not its size.
    world = World(0, max(settings.value(PROCESSES) or 0, together))
    if problems := parallel_problems(settings, world):
        yield from (f"problem: {problem}" for problem in problems)
        return
    mesh = dtype_plans(settings, world)[1].mesh(world.size)
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.used().items())
    yield f"layout: {mesh.size()} processes = {sizes}"
    for rank in range(min(mesh.size(), _PLACES)):
        yield f"  rank {rank}: {mesh.place(rank)}"
    if mesh.size() > _PLACES:
        yield "  ..."


def _note(given: Setting) -> str:
    return " (written by a tool by default; any other source overrides it)" if given.implicit else ""
