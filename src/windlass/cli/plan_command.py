"""`windlass plan`: memory, traffic, disk and time of a run before it starts."""

from __future__ import annotations

import contextlib
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.cli.command_line import CommandParser, answer, check_script
from windlass.core.attributes import attributes_of
from windlass.core.errors import ConfigError, ModelError, Problem, did_you_mean
from windlass.core.output import say
from windlass.dist.variables import environment_of
from windlass.recipes.built_in_recipes import is_recipe, names

if TYPE_CHECKING:
    from windlass.forecast.layouts import Devices, Layout
    from windlass.forecast.trace import Trace
    from windlass.metrics.device_peaks import Board

_HELP = """\
Predict the memory of each process, what it sends, the disk of a checkpoint and the time of an update, without weights
and without devices: one update of the real model is run on tensors that have shapes and no memory. A script is run up
to its first Trainer.train().

  windlass plan sft-lora data.train=rows.jsonl --device h100
  windlass plan recipe.yaml --world 1024 --device h100 parallel.strategy=fsdp
  windlass plan recipe.yaml --fit 8x80GB --device h100
  windlass plan train.py --world 8 --json -- --its own arguments
"""
Start = Callable[[], Any]
_USUAL = "h100"
"""The device by whose rates layouts are compared if none is named."""
_MOST = 999999
"""Processes of a plan; groups of more do not fit into the memory of one machine."""


def plan_command(words: list[str]) -> int:
    # A second "--" is the script's own.
    own = words[: words.index("--")] if "--" in words else words
    options, rest = build_parser().parse_known_args(own)
    rest += words[len(own) + 1 :]
    device = _device(options.device)
    if not 1 <= options.world <= _MOST:
        raise ConfigError(Problem("--world", options.world, f"must be from 1 to {_MOST}"))
    devices = None if options.fit is None else _devices(options, device)
    name, overrides = None, tuple[str, ...]()
    # The plan of a run on devices needs none, and tensors without memory are on the CPU.
    with environment_of(CUDA_VISIBLE_DEVICES=""):
        if devices is None:
            found = _traced(_start(options.what, rest), options.world, device)
        else:
            name, overrides, found = _fitting(options, rest, devices, device)
    from windlass.cli.plan_text import plan_lines
    from windlass.forecast.forecast import Forecast

    forecast = Forecast(found, device)
    forecast.keep()
    facts = forecast.to_dict() | ({} if name is None else {"layout": [name, *overrides]})
    chosen = [] if name is None else [f"\n{name}: {' '.join(overrides) or 'as the recipe is'}\n"]
    return answer(options, facts, [*chosen, *plan_lines(forecast, options.what)])


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass plan",
        usage="windlass plan RECIPE_OR_SCRIPT [--world N] [--device NAME] [--fit 8x80GB] [--json] [key=value ...]",
        description=_HELP,
        example="windlass plan sft-lora data.train=rows.jsonl",
    )
    add = parser.add_argument
    add(
        "what",
        metavar="RECIPE_OR_SCRIPT",
        help="a recipe with overrides, or a Python file with its arguments",
    )
    add("--world", type=int, default=1, metavar="N", help="processes that train together (default: 1)")
    add(
        "--device",
        metavar="NAME",
        help="time and memory of this device, such as h100 (default: of the process)",
    )
    fit = "find the cheapest layout of a recipe that fits, such as 8x80GB"
    add("--fit", metavar="NxGB", help=fit)
    add("--json", action="store_true", help="as one JSON object, sizes in bytes (docs/parallelism.md)")
    return parser


def _device(name: str | None) -> tuple[str, Board] | None:
    if name is None:
        return None
    from windlass.metrics.device_peaks import BOARDS, find_board

    board = find_board(name)
    if board is None:
        known = [each.short for each in BOARDS.values()]
        fix = f"must be one of {', '.join(known)}{did_you_mean(name, known)}"
        raise ConfigError(Problem("--device", name, fix))
    return board


def _start(what: str, rest: list[str]) -> Start:
    """What runs the recipe or the script up to its `train()`. Raises ConfigError if there is neither."""
    if what.endswith(".py"):
        check_script(what)
        from windlass.core.outside import load_outside

        # As `windlass run` does: the Trainer of a script for transformers must be the one that is rehearsed.
        load_outside("imports of other libraries").install()
        return lambda: _run_script(what, rest)
    flags = [word for word in rest if "=" not in word]
    if flags:
        fix = "is neither a flag of `windlass plan` nor an override such as training.bf16=true"
        raise ConfigError(Problem("plan", flags[0], fix))
    if not is_recipe(what) and not Path(what).is_file():
        fix = "is neither a recipe (a YAML file, or a name that `windlass recipes` lists) nor a script (a file.py)"
        raise ConfigError(Problem("RECIPE_OR_SCRIPT", what, fix + did_you_mean(what, names())))
    return _recipe(what, rest)


def _recipe(path: str, overrides: list[str]) -> Start:
    from windlass.core.optional import check_installed
    from windlass.recipes.recipe import load_recipe

    recipe = load_recipe(path, overrides, asks_libraries=True)
    check_installed("transformers", "plan a recipe", extra="train")

    def start() -> None:
        from windlass.recipes.recipe import training_arguments
        from windlass.recipes.tasks import TASKS

        args, task = training_arguments(recipe.training, recipe.task), TASKS[recipe.task]
        task.open_trainer(task.build_parts(recipe, args), args).train()

    return start


def _run_script(path: str, arguments: list[str]) -> None:
    places = [str(Path(path).resolve().parent), *sys.path]
    try:
        with attributes_of(sys, argv=[path, *arguments], path=places):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise ModelError(f"{path} ended with {error.code} before it called Trainer.train()") from None


def _devices(options: Any, device: tuple[str, Board] | None) -> Devices:
    """The devices of `--fit`. Raises ConfigError if other options contradict them."""
    from windlass.forecast.layouts import Devices

    devices = Devices.read(options.fit)
    processes: int = options.world
    if processes not in (1, devices.number):
        raise ConfigError(Problem("--world", processes, f"contradicts --fit {options.fit}; leave it out"))
    if options.what.endswith(".py"):
        fix = (
            "changes keys of a recipe, and this is a script: plan it with --world for each layout of its own"
        )
        raise ConfigError(Problem("--fit", options.fit, fix))
    if device is not None and device[1].memory * 10**9 < devices.memory:
        raise ConfigError(Problem("--fit", options.fit, f"{device[0]} has {device[1].memory} GB"))
    return devices


def _fitting(
    options: Any, rest: list[str], devices: Devices, device: tuple[str, Board] | None
) -> tuple[str, tuple[str, ...], Trace]:
    """The name of the cheapest layout that fits, the overrides that ask for it, and its trace."""
    from windlass.cli.plan_fit import Looks, find_layout
    from windlass.forecast.layouts import Layout, cost_of, layouts
    from windlass.forecast.tracing import check_run, size_of
    from windlass.metrics.device_peaks import find_board
    from windlass.recipes.recipe import read_draft

    values = read_draft(options.what, rest).values

    def start(layout: Layout) -> Start:
        return _start(options.what, [*rest, *layout.overrides(values)])

    def trace(layout: Layout) -> Trace:
        return _traced(start(layout), devices.number, device, devices.room)

    with contextlib.redirect_stdout(sys.stderr):
        try:
            size = size_of(_start(options.what, rest), devices.number)
        except ConfigError:  # of its own layout, perhaps
            size = size_of(start(Layout()))
    known = device or find_board(_USUAL)
    assert known is not None, "it has figures"
    board = known[1]
    every = ((cost_of(layout, size, board), layout) for layout in layouts(devices.number, size.micro_batches))
    priced = sorted(every, key=lambda each: each[0])
    say_line: Callable[[str], None] = (lambda line: None) if options.json else say
    say_line(f"layouts for {options.fit}, the cheapest first by estimate at the rates of {board.short}")
    say_line(f"  {'':<42}{'cost':>8}{'peak of rank':>13}")
    looks = Looks(trace, lambda layout: check_run(start(layout), layout.mesh.size()))
    layout, found = find_layout(looks, priced, size, devices, say_line)
    return layout.name, layout.overrides(values), found


def _traced(start: Start, world: int, device: tuple[str, Board] | None, room: float = math.inf) -> Trace:
    from windlass.forecast.tracing import trace_of_largest

    # What a script prints is not part of the plan.
    with contextlib.redirect_stdout(sys.stderr):
        return trace_of_largest(start, world, on_device=device is not None, room=room)
