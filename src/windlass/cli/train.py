"""`windlass train`: train a model as a recipe configures it, and print a summary."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.callbacks.early_stopping import EarlyStoppingCallback
from windlass.callbacks.tracker_registry import check_trackers
from windlass.cli.command_line import EXIT_INTERRUPTED
from windlass.cli.print_config import render_config
from windlass.cli.resume_point import changed_keys, check_folder, find_resume_point, past_the_end
from windlass.cli.resume_words import resume_command, start_command
from windlass.config.arguments import TrainingArguments
from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.activity import Activity
from windlass.core.errors import Preempted
from windlass.core.events import TrainerState
from windlass.core.locations import shown_path
from windlass.core.optional import check_installed
from windlass.core.output import STDERR, say, say_json
from windlass.core.terminal import folded, folded_command
from windlass.core.whole_file import write_whole
from windlass.core.world import world_from_environment
from windlass.recipes.recipe import note_recipe, open_recipe, run_folder, training_arguments
from windlass.recipes.schema import Recipe
from windlass.recipes.tasks import TASKS
from windlass.recipes.tokenizing import saved_tokenizer

if TYPE_CHECKING:
    from windlass.recipes.schema import RecipeParts


def train_by_recipe(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run `windlass train`; `arguments` is the command line, for the command that resumes."""
    with Activity("checking the recipe"):
        recipe, draft = open_recipe(
            options.recipe,
            options.overrides,
            options.output_dir,
            tiny=options.tiny,
            asks_libraries=not options.print_config,
        )
        if options.print_config:
            say(render_config(recipe, everything=options.all), end="")
            return 0
        check_installed("transformers", "train by a recipe", extra="train")
        args = training_arguments(recipe.training, recipe.task)
        note_recipe(args, recipe, draft)
        check_trackers(args.report_to)  # before data and model are prepared
    if options.dry_run:
        with Activity("rehearsing"):
            from windlass.cli.dry_run import dry_run

            found = dry_run(recipe, args, (lambda text: None) if options.json else _speaker())
        if options.json and world_from_environment().is_main:
            say_json(found)
        return 0
    # The flag before the key: it is what the user typed now.
    resume = options.resume or args.resume_from_checkpoint or None
    try:
        return _train(recipe, args, resume, arguments)
    except KeyboardInterrupt:
        return _interrupted(args, arguments)
    except Preempted as left:
        _say_how_to_resume(left.folder, arguments)
        raise  # ends the process with its code; a launcher notes the step


class RunEnds(TrainerCallback):
    """Attributes:
    first_step: the step at which this process began: 0, or that of the checkpoint that it resumed from.
    interrupted: the user ended the run before its last step (Ctrl-C).
    last_save: the step of the last checkpoint that this process saved; 0 for none.

    Args:
        early: ends the run early if the recipe asks for it.
    """

    first_step = 0
    interrupted = False
    last_save = 0

    def __init__(self, early: EarlyStoppingCallback | None) -> None:
        self._early = early

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self.first_step = state.global_step
        if state.global_step > state.max_steps:
            raise past_the_end(args, state.max_steps, state.global_step)

    def on_save(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self.last_save = state.global_step

    def saved(self, args: TrainingArguments, step: int) -> bool:
        """Return True if the output folder has the checkpoint of this step, of this run and not of an earlier one."""
        is_there = (run_folder(args) / f"checkpoint-{step}").is_dir()
        return is_there and step in (self.first_step, self.last_save)

    def on_train_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        stopped = control.should_training_stop and state.global_step < state.max_steps
        self.interrupted = stopped and not (self._early and self._early.has_stopped)


def _speaker() -> Callable[[str], None]:
    """Return a function that prints on the first process only."""
    return say if world_from_environment().is_main else lambda text: None


def _downloaded(resume: bool | str | None, args: TrainingArguments) -> bool | str | None:
    """Return where a run is resumed from. A checkpoint on the Hub is downloaded first: its tokenizer is needed before
    there is a Trainer.
    """
    from windlass.hub.fetching import SCHEME, fetch, fetched_before

    if not (isinstance(resume, str) and resume.startswith(SCHEME)):
        return resume
    folder = run_folder(args)
    with args.main_process_first(desc="downloading the checkpoint"):
        if args.local_process_index > 0:
            return str(fetched_before(resume, folder))
        return str(fetch(resume, args.hub_token, folder))


def _train(
    recipe: Recipe, args: TrainingArguments, resume: bool | str | None, arguments: Sequence[str]
) -> int:
    say = _speaker()
    check_folder(args)
    with Activity("looking for a checkpoint"):
        resume = _downloaded(resume, args)
        point = find_resume_point(resume, args)
    if point is not None:
        say(f"Continuing from {shown_path(point.path)}, step {point.step:,}")
        for line in changed_keys(args, point):
            say(f"  {folded(line, 4)}")
    with Activity("importing libraries"):
        from windlass.assemble.resolve import resolve_parallel
        from windlass.cli.screen import RunOutcome, describe_run, render_screen
        from windlass.cli.text_writer import continue_prompt
        from windlass.dist.operations import gather_object
    # A layout that does not fit is refused before the data is read and a base is trained.
    resolve_parallel(args, world_from_environment())
    task, early = TASKS[recipe.task], early_stopping(recipe)
    ends = RunEnds(early)
    saved = saved_tokenizer(args, resume if point is None else str(point.path))
    with Activity("reading the data"):
        parts = task.build_parts(recipe, args, saved)
    with Activity("building the model"):
        trainer = task.open_trainer(parts, args)
    for callback in (ends, early):
        if callback is not None:
            trainer.add_callback(callback)
    say(describe_run(parts, trainer))
    # The weights of a resumed model are not loaded yet.
    with Activity("generating text with the untrained model"):
        before = None if resume else continue_prompt(parts, trainer)
    if before:
        say(f"\n{folded(f'Before training, the model writes: {before}')}\n")
    output = trainer.train(resume_from_checkpoint=resume)
    if ends.interrupted:
        return _interrupted(args, arguments)
    with Activity("evaluating the trained model"):
        # Before the evaluation, which may fail. One answer for all ranks, which save together: a shared folder may show
        # a new name to some of them later.
        is_saved = any(gather_object([ends.saved(args, trainer.state.global_step)]))
        if not is_saved:
            trainer.save_model(args.output_dir)
        evaluation = _final_evaluation(trainer, parts.evaluation is not None)
        evaluation |= _measure_test(trainer, parts, args)
        after = continue_prompt(parts, trainer)
    outcome = RunOutcome(
        parts=parts,
        trainer=trainer,
        output=output,
        first_step=ends.first_step,
        evaluation=evaluation,
        is_saved=is_saved,
        before=before,
        after=after,
        command=None if args.save_strategy == "no" else resume_command(arguments),
    )
    say(render_screen(outcome))
    return 0


def early_stopping(recipe: Recipe) -> EarlyStoppingCallback | None:
    """Return the callback that a recipe asks for."""
    spec = recipe.early_stopping
    return None if spec is None else EarlyStoppingCallback(spec.patience, spec.threshold)


def _measure_test(trainer: Any, parts: RecipeParts, args: TrainingArguments) -> dict[str, float]:
    """Return the metrics of the final weights on the test data. With a metric of texts, write what they generate for
    it, or else for the evaluation data. Collective. Raises CheckpointError on all ranks if it cannot be written.
    """
    if parts.recipe.metric is None:
        return {} if parts.test is None else dict(trainer.evaluate(parts.test, metric_key_prefix="test"))
    from windlass.dist.gang import current
    from windlass.dist.lockstep import together
    from windlass.recipes.text_metrics import PREDICTIONS, decoded, generated_set

    chosen, prefix = generated_set(trainer, parts)
    if chosen is None:
        return {}
    output = trainer.predict(chosen, metric_key_prefix=prefix)

    def write() -> None:
        if trainer.is_world_process_zero():
            lines = "".join(f"{text}\n" for text in decoded(parts.tokenizer, output.predictions))
            write_whole(run_folder(args) / PREDICTIONS, lines)

    # Else the others would wait for the first rank in their next exchange.
    together(current(), write, (OSError,))
    return dict(output.metrics)


def _final_evaluation(trainer: Any, has_data: bool) -> dict[str, float]:
    """Return the metrics of the final weights, from the last evaluation if it measured them."""
    if not has_data:
        return {}
    state = trainer.state
    # With the best weights loaded at the end, the last evaluation was of other weights.
    rows = [row for row in state.log_history if "eval_loss" in row]
    if rows and rows[-1]["step"] == state.global_step and not trainer.args.load_best_model_at_end:
        return dict(rows[-1])
    return dict(trainer.evaluate())


def _interrupted(args: TrainingArguments, arguments: Sequence[str]) -> int:
    from windlass.checkpoint.store import Store

    if world_from_environment().is_main:  # one process reads every byte, not all of them
        _say_how_to_resume(Store(run_folder(args)).newest_verified()[0], arguments)
    return EXIT_INTERRUPTED


def _say_how_to_resume(newest: Path | None, arguments: Sequence[str]) -> None:
    if newest is None:
        state, command = " before the first checkpoint. Start again with:", start_command(arguments)
    else:
        state = f": {shown_path(newest)} is complete. Resume with:"
        command = resume_command(arguments)
    if world_from_environment().is_main:
        say(f"\nInterrupted{state}\n  {folded_command(command, STDERR, 2)}", error=True)
