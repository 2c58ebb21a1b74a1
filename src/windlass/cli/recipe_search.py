"""`windlass train RECIPE --search SPACE.yaml`: a recipe trained once for each set of values of a search."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.cli.command_line import EXIT_INTERRUPTED
from windlass.config.documents import load
from windlass.config.values import alternatives, type_fault
from windlass.core.activity import Activity
from windlass.core.errors import ConfigError, Problem, refuse, unknown
from windlass.core.output import say
from windlass.recipes.argument_table import all_arguments
from windlass.recipes.recipe import load_recipe, note_recipe, open_recipe, run_folder, training_arguments
from windlass.recipes.tasks import TASKS

if TYPE_CHECKING:
    from windlass.search.search import ChosenTrial, TrialWatch
    from windlass.search.search_settings import SearchSettings


@dataclass(frozen=True, slots=True)
class SearchSpec:
    """The keys of a file with a space."""

    space: dict[str, Any]  # key of the recipe -> a list of values, or {low, high, step, log}
    trials: int = 20  # how many, those of earlier calls included
    # What is compared, of the last evaluation of each trial; several are several objectives
    metric: str | list[str] = "eval_loss"
    direction: str | list[str] = "minimize"  # minimize or maximize, for each metric
    backend: str | None = None  # optuna, random or grid; by default optuna if it is installed
    # Median ends trials that are worse than the median of the others; optuna does so by default
    pruner: str | None = None
    seed: int = 42  # of random choices


def search_command(options: argparse.Namespace) -> int:
    for flag in ("resume", "dry_run", "print_config"):
        if given := getattr(options, flag):
            fix = "has no meaning with --search, which continues by itself; leave it out"
            raise ConfigError(Problem(f"--{flag.replace('_', '-')}", given, fix))
    spec = read_spec(Path(str(options.search)))
    recipe = load_recipe(options.recipe, options.overrides, options.output_dir, tiny=options.tiny)
    args = training_arguments(recipe.training, recipe.task)
    with Activity("importing libraries"):
        from windlass.search.search import Search
        from windlass.trainer.session import Session
    settings, root = _settings(spec), run_folder(args)
    search = Search(settings, args.output_path, Session.open(args).all_ranks, asdict(recipe))
    interrupted = False

    def train(trial: ChosenTrial, watch: TrialWatch) -> dict[str, float] | None:
        nonlocal interrupted
        metrics = _trained(options, root, trial, watch)
        interrupted = interrupted or metrics is None
        return metrics

    best = search.run(train)
    if args.process_index == 0:
        for record in best:
            values = " ".join(f"{key}={json.dumps(value)}" for key, value in record.params.items())
            say(f"\nbest  {root / record.name}\n      {values}")
    return EXIT_INTERRUPTED if interrupted else 0


def read_spec(path: Path) -> SearchSpec:
    """Read the file of a search. Raises ConfigError with all problems."""
    document = load(path)
    values, known = document.values, [item.name for item in fields(SearchSpec)]
    problems = unknown(values, known, document.where, "is not a key of a search")
    space = values.get("space")
    if not isinstance(space, Mapping) or not space:
        fix = "must be a mapping: key of the recipe -> a list of values, or {low: ..., high: ...}"
        problems.append(Problem(document.where("space"), space, fix))
    else:
        keys = {argument.dotted for argument in all_arguments()}
        # Below a key that holds a mapping (`adapter.r`) anything may be.
        strange = {k: v for k, v in space.items() if not any(k.startswith(f"{key}.") for key in keys)}
        problems += unknown(strange, keys, partial(document.where, "space"), "is not a key of a recipe")
        if (name := "training.output_dir") in space:
            fix = "is a folder of each trial below that of the search, and cannot be chosen"
            problems.append(Problem(document.where("space", name), space[name], fix))
    hints = alternatives(SearchSpec)
    problems += [
        Problem(document.where(name), value, fault)
        for name, value in values.items()
        if name in hints and name != "space" and (fault := type_fault(value, hints[name]))
    ]
    refuse(problems)
    return SearchSpec(**values)


def _settings(spec: SearchSpec) -> SearchSettings:
    from windlass.search.search_settings import SearchSettings

    names = [spec.metric] if isinstance(spec.metric, str) else list(spec.metric)

    def objective(metrics: dict[str, float]) -> list[float]:
        if missing := [name for name in names if name not in metrics]:
            fix = f"is not a metric of an evaluation; there are: {', '.join(sorted(metrics)) or 'none'}"
            raise ConfigError(Problem("metric", ", ".join(missing), fix))
        return [metrics[name] for name in names]

    options = {} if spec.pruner is None else {"pruner": spec.pruner}
    return SearchSettings(
        spec.space, objective, spec.trials, spec.direction, spec.backend, None, options, spec.seed
    )


def _trained(
    options: argparse.Namespace, root: Path, trial: ChosenTrial, watch: TrialWatch
) -> dict[str, float] | None:
    """Train a trial, from its newest checkpoint if it has one; return its last metrics, or None if interrupted."""
    from windlass.cli.train import RunEnds, early_stopping
    from windlass.search.search import last_evaluation

    overrides = [f"{key}={json.dumps(value)}" for key, value in trial.params.items()]
    recipe, draft = open_recipe(
        options.recipe, [*options.overrides, *overrides], str(root / trial.name), tiny=options.tiny
    )
    args = training_arguments(recipe.training, recipe.task)
    draft.chosen_by("the search", trial.params)
    note_recipe(args, recipe, draft)
    task, early = TASKS[recipe.task], early_stopping(recipe)
    ends, parts = RunEnds(early), task.build_parts(recipe, args)
    if parts.evaluation is None:
        fix = "holds out nothing, and a search compares evaluations: make it larger, or set data.eval"
        raise ConfigError(Problem("data.eval_fraction", recipe.data.eval_fraction, fix))
    trainer = task.open_trainer(parts, args)
    for callback in (ends, watch, early):
        if callback is not None:
            trainer.add_callback(callback)
    # A trial that was interrupted is continued.
    trainer.train(resume_from_checkpoint="auto")
    if ends.interrupted and watch.pruned is None:
        return None
    return last_evaluation(trainer.state.log_history)[1] or dict(trainer.evaluate())
