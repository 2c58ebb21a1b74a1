"""`windlass train`: train a model as a recipe configures it, and print a summary."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.cli.command_line import EXIT_INTERRUPTED, LAUNCH_VARIABLE, TrainOptions
from windlass.cli.print_config import render_config
from windlass.cli.recipe import load_recipe
from windlass.cli.schema import Recipe
from windlass.cli.training import run_folder, training_arguments
from windlass.config.arguments import TrainingArguments
from windlass.core.errors import EXIT_PREEMPTED, Preempted
from windlass.core.events import TrainerCallback, TrainerControl, TrainerState
from windlass.core.optional import require
from windlass.core.output import say
from windlass.core.whole_file import write_whole
from windlass.core.world import world_from_environment

if TYPE_CHECKING:
    from windlass.cli.recipe_parts import RecipeParts


# Libraries that report at import what they found of optional parts of their own.
_CHATTY = ("torchao", "bitsandbytes", "torch.utils._pytree")


def train_command(options: TrainOptions, arguments: Sequence[str]) -> int:
    """Run `windlass train`; `arguments` is the command line, for the command that resumes."""
    recipe = load_recipe(options.recipe, options.overrides, options.output_dir)
    if options.print_config:
        say(render_config(recipe), end="")
        return 0
    args = training_arguments(recipe.training, recipe.task)
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
        _say_how_to_resume(left.folder, command)
        return EXIT_PREEMPTED


class RunEnds(TrainerCallback):
    """Attributes:
    first_step: the step at which this process began: 0, or that of the checkpoint that it resumed from.
    interrupted: the run ended before its last step. Recipes do not stop early, so the user interrupted it (Ctrl-C).
    """

    first_step = 0
    interrupted = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.first_step = state.global_step

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.interrupted = control.should_training_stop and state.global_step < state.max_steps


def resume_command(arguments: Sequence[str]) -> str:
    """Return the command line that resumes this one, quoted for a shell."""
    kept, skip = [], False
    for index, word in enumerate(arguments):
        if skip:
            skip = False
        elif word == "--resume":
            # The checkpoint after it is older than the newest one.
            following = arguments[index + 1] if index + 1 < len(arguments) else "-"
            is_option = following.startswith("-")
            skip = not (is_option or "=" in following or following.endswith((".yaml", ".yml")))
        elif not word.startswith("--resume=") and word != "--dry-run":
            kept.append(word)
    return shlex.join([*_launcher(), *kept, "--resume"])


def _launcher() -> list[str]:
    """The words before "train" in the command that started this process."""
    launched = json.loads(os.environ.get(LAUNCH_VARIABLE, "[]"))
    if launched and Path(launched[-1]).name == "windlass":  # and not a script that started this command
        return ["windlass", "launch", *launched]
    world = world_from_environment()
    if not world.is_distributed:
        return ["windlass"]
    nodes = [] if world.local_size == world.size else ["--nnodes", str(world.size // world.local_size)]
    return ["torchrun", *nodes, "--nproc-per-node", str(world.local_size), "-m", "windlass"]


def _speaker() -> Callable[[str], None]:
    """Return a function that prints on the first process only."""
    return say if world_from_environment().is_main else lambda text: None


def _quieten_libraries() -> None:
    """Keep the screen for the run: no remarks of imports, and no bars of carriage returns in a log file."""
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # of peft
    if not sys.stderr.isatty():
        require("transformers.utils.logging", "run a recipe").disable_progress_bar()


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


def _train(recipe: Recipe, args: TrainingArguments, resume: bool | str | None, command: str) -> int:
    say = _speaker()
    _quieten_libraries()
    say("Preparing: reading the data, building tokenizer and model ...")
    from windlass.cli.recipe_parts import build_parts, build_trainer, continue_prompt, saved_tokenizer
    from windlass.cli.screen import RunOutcome, describe_run, render_screen

    resume = _downloaded(resume, args)
    parts = build_parts(recipe, args, saved_tokenizer(run_folder(args), resume))
    trainer, ends = build_trainer(parts, args), RunEnds()
    trainer.add_callback(ends)
    say(describe_run(parts, trainer))
    # The weights of a resumed model are not loaded yet.
    before = None if resume else continue_prompt(parts, trainer.model)
    if before:
        say(f"\nBefore training, the model writes: {before}\n")
    output = trainer.train(resume_from_checkpoint=resume)
    if ends.interrupted:
        return _interrupted(args, command)
    evaluation = _final_evaluation(trainer, parts.evaluation is not None)
    if parts.recipe.metric is not None:
        evaluation |= _write_predictions(trainer, parts, args)
    if not (run_folder(args) / f"checkpoint-{trainer.state.global_step}").is_dir():
        _save_last(trainer, args)
    outcome = RunOutcome(
        parts=parts,
        trainer=trainer,
        output=output,
        first_step=ends.first_step,
        evaluation=evaluation,
        before=before,
        after=continue_prompt(parts, trainer.model),
        command=command,
    )
    say(render_screen(outcome))
    return 0


def _write_predictions(trainer: Any, parts: RecipeParts, args: TrainingArguments) -> dict[str, float]:
    """Write what the final weights generate for the test data, or else for the evaluation data; return its metrics."""
    from windlass.cli.text_metrics import PREDICTIONS, decoded

    chosen = parts.evaluation if parts.test is None else parts.test
    if chosen is None:
        return {}
    output = trainer.predict(chosen, metric_key_prefix="eval" if parts.test is None else "test")
    if trainer.is_world_process_zero():
        lines = "".join(f"{text}\n" for text in decoded(parts.tokenizer, output.predictions))
        write_whole(run_folder(args) / PREDICTIONS, lines)
    return dict(output.metrics)


def _save_last(trainer: Any, args: TrainingArguments) -> None:
    """Save the final weights, which no checkpoint has."""
    from windlass.trainer.run_folder import unwritable

    try:
        trainer.save_model(args.output_dir)
    except OSError as error:
        raise unwritable(str(args.output_dir), error) from error


def _final_evaluation(trainer: Any, has_data: bool) -> dict[str, float]:
    """Return the metrics of the final weights, from the last evaluation if it measured them."""
    if not has_data:
        return {}
    state = trainer.state
    rows = [row for row in state.log_history if "eval_loss" in row]
    if rows and rows[-1]["step"] == state.global_step and not trainer.args.load_best_model_at_end:
        return dict(rows[-1])
    return dict(trainer.evaluate())


def _interrupted(args: TrainingArguments, command: str) -> int:
    from windlass.checkpoint.store import Store

    if world_from_environment().is_main:  # one process reads every byte, not all of them
        _say_how_to_resume(Store(run_folder(args)).newest_verified()[0], command)
    return EXIT_INTERRUPTED


def _say_how_to_resume(newest: Path | None, command: str) -> None:
    state = f"{newest} is complete. Resume with:\n  {command}" if newest else "there is no checkpoint yet."
    if world_from_environment().is_main:
        say(f"\nInterrupted: {state}", error=True)
