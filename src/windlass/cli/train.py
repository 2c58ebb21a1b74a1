"""`windlass train`: from a recipe to a trained model, and one screen that says where everything is."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from windlass.cli.command_line import EXIT_INTERRUPTED, TrainOptions
from windlass.cli.print_config import render_config
from windlass.cli.recipe import load_recipe
from windlass.cli.schema import Recipe
from windlass.cli.training import run_folder, training_arguments
from windlass.config.arguments import TrainingArguments
from windlass.core.errors import EXIT_PREEMPTED, Preempted
from windlass.core.output import say
from windlass.core.world import world_from_environment


def train_command(options: TrainOptions, arguments: Sequence[str]) -> int:
    """Run `windlass train`; `arguments` are the words of the command line, for the command that resumes."""
    recipe = load_recipe(options.recipe, options.overrides, options.output_dir)
    if options.print_config:
        say(render_config(recipe), end="")
        return 0
    args = training_arguments(recipe.training)
    resume = options.resume or args.resume_from_checkpoint or None
    command = resume_command(arguments)
    try:
        if options.dry_run:
            from windlass.cli.dry_run import dry_run

            dry_run(recipe, args, _speaker())
            return 0
        return _train(recipe, args, resume, command)
    except KeyboardInterrupt:
        return _interrupted(args, command)
    except Preempted as left:
        _say_how_to_go_on(left.folder, command)
        return EXIT_PREEMPTED


def resume_command(arguments: Sequence[str]) -> str:
    """The command line that goes on where this one stops, ready to be pasted into a shell."""
    kept, skip = [], False
    for index, word in enumerate(arguments):
        if skip:
            skip = False
        elif word == "--resume":
            # The checkpoint named after it is the past of this run, not the newest one.
            following = arguments[index + 1] if index + 1 < len(arguments) else "-"
            skip = not (
                following.startswith("-") or "=" in following or following.endswith((".yaml", ".yml"))
            )
        elif not word.startswith("--resume=") and word != "--dry-run":
            kept.append(word)
    return shlex.join([*_launcher(), *kept, "--resume"])


def _launcher() -> list[str]:
    world = world_from_environment()
    if not world.is_distributed:
        return ["windlass"]
    nodes = [] if world.local_size == world.size else ["--nnodes", str(world.size // world.local_size)]
    return ["torchrun", *nodes, "--nproc-per-node", str(world.local_size), "-m", "windlass"]


def _speaker() -> Callable[[str], None]:
    """Prints on the first process only; at once, also into a pipe."""
    if world_from_environment().is_main:
        return lambda text: say(text)
    return lambda text: None


def _train(recipe: Recipe, args: TrainingArguments, resume: bool | str | None, command: str) -> int:
    say = _speaker()
    say("Preparing: reading the data, building tokenizer and model ...")
    from windlass.cli.course import Course
    from windlass.cli.recipe_parts import build_parts, build_trainer, saved_tokenizer
    from windlass.cli.sampling import continue_prompt
    from windlass.cli.screen import RunOutcome, describe_run, render_screen

    parts = build_parts(recipe, args, saved_tokenizer(run_folder(args), resume))
    trainer, course = build_trainer(parts, args), Course()
    trainer.add_callback(course)
    say(describe_run(parts, trainer))
    # A resumed model has its weights yet to come.
    before = None if resume else continue_prompt(parts, trainer.model)
    if before:
        say(f"\nBefore training, the model writes: {before}\n")
    output = trainer.train(resume_from_checkpoint=resume)
    if course.stopped:
        return _interrupted(args, command)
    evaluation = _final_evaluation(trainer, parts.evaluation is not None)
    if not (run_folder(args) / f"checkpoint-{trainer.state.global_step}").is_dir():
        _save_last(trainer, args)
    after = continue_prompt(parts, trainer.model)
    outcome = RunOutcome(
        parts=parts,
        trainer=trainer,
        runtime=float(output.metrics["train_runtime"]),
        mean_loss=output.training_loss,
        first_step=course.first_step,
        evaluation=evaluation,
        before=before,
        after=after,
        command=command,
    )
    say(render_screen(outcome))
    return 0


def _save_last(trainer: Any, args: TrainingArguments) -> None:
    """The weights that the run ended with, where no checkpoint holds them."""
    from windlass.trainer.defaults import unwritable

    try:
        trainer.save_model(args.output_dir)
    except OSError as error:
        raise unwritable(str(args.output_dir), error) from error


def _final_evaluation(trainer: Any, has_data: bool) -> dict[str, float]:
    """Metrics of the weights that the run ended with: those of its last evaluation where that measured them."""
    if not has_data:
        return {}
    state = trainer.state
    rows = [row for row in state.log_history if "eval_loss" in row]
    if rows and rows[-1]["step"] == state.global_step and not trainer.args.load_best_model_at_end:
        return dict(rows[-1])
    metrics: dict[str, float] = trainer.evaluate()
    return metrics


def _interrupted(args: TrainingArguments, command: str) -> int:
    from windlass.checkpoint.store import Store

    if world_from_environment().is_main:  # one process reads every byte, not all of them
        _say_how_to_go_on(Store(run_folder(args)).newest_verified()[0], command)
    return EXIT_INTERRUPTED


def _say_how_to_go_on(newest: Path | None, command: str) -> None:
    state = f"{newest} is whole. Go on with:\n  {command}" if newest else "there is no checkpoint yet."
    if world_from_environment().is_main:
        say(f"\nInterrupted: {state}", error=True)
