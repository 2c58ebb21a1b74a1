"""`windlass train --dry-run`: run every part of a training once, and estimate the full run."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from windlass.assemble.resolve import resolve_cadence
from windlass.callbacks.progress import PrinterCallback
from windlass.callbacks.report import ReportCallback
from windlass.checkpoint.remote import check_remote
from windlass.cli.command_line import amount, in_words
from windlass.cli.screen import describe_run, duration
from windlass.config.arguments import TrainingArguments
from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.config.plan import CadencePlan
from windlass.core.events import TrainerState
from windlass.core.locations import is_url
from windlass.core.world import world_from_environment
from windlass.metrics.stage_memory import device_peak_bytes, process_peak_bytes
from windlass.recipes.recipe import run_folder, training_arguments
from windlass.recipes.schema import Recipe, RecipeParts
from windlass.recipes.tasks import TASKS
from windlass.recipes.text_metrics import generated_set
from windlass.trainer.run_folder import check_writable
from windlass.trainer.session import Session

SCHEMA = "windlass-dry-run/1"
STEPS = 2
EVAL_BATCHES = 2


class StepClock(TrainerCallback):
    """Measures updates and the save in seconds, and ends the run after `STEPS` updates. It waits for the device, so
    these are upper bounds.
    """

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.save = 0.0
        self._since = 0.0

    def on_step_begin(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self._since = _now()

    def on_step_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self.steps.append(_now() - self._since)
        self._since = _now()
        # And not with `max_steps`: schedules and other settings that do not fit into two updates would be refused.
        if state.global_step >= STEPS:
            control.should_training_stop = True

    def on_save(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        self.save = _now() - self._since


@dataclass(frozen=True, slots=True)
class Findings:
    """The updates of the full run and of an epoch, and measurements in seconds; `evaluation` and `predictions` are of
    all data, or None without any.
    """

    steps: int
    epoch: int
    step: float
    evaluation: float | None
    predictions: float | None
    save: float
    checkpoint_bytes: int


def dry_run(recipe: Recipe, args: TrainingArguments, say: Callable[[str], None]) -> dict[str, Any]:
    """Build `recipe`, run two updates, an evaluation, a save and a load in a temporary folder; print an estimate of the
    full run, and return it as plain data.

    Raises what the full run would raise.
    """
    say("Dry run: building everything ...")
    if world_from_environment().is_main:
        _try_output_folder(run_folder(args), str(args.output_dir))
        if is_url(str(args.output_dir)):
            check_remote(str(args.output_dir))
    parts = TASKS[recipe.task].build_parts(recipe, args)
    with _shared_folder(args) as folder:
        estimate = _estimate(args, _rehearse(recipe, parts, folder, say))
    say(_in_lines(estimate))
    return estimate


def _try_output_folder(folder: Path, shown: str) -> None:
    """Raise if the full run could not write there; leave nothing."""
    # A rehearsal leaves nothing: folders that the check makes are removed, and those of the user stay.
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    check_writable(str(folder), shown)
    for path in made:
        path.rmdir()


@contextlib.contextmanager
def _shared_folder(args: TrainingArguments) -> Iterator[str]:
    """A temporary folder that the processes of a machine share, as those of the full run share its output folder.
    Collective.
    """
    world, all_ranks = world_from_environment(), Session.open(args).all_ranks
    with tempfile.TemporaryDirectory(prefix="windlass-dry-run-") as own:
        folders = all_ranks.gather_objects((world.machine, own))
        yield next(folder for machine, folder in folders if machine == world.machine)
        # The process that made it removes it, and another may still read the checkpoint.
        all_ranks.gather_objects(None)


def _rehearse(recipe: Recipe, parts: RecipeParts, folder: str, say: Callable[[str], None]) -> Findings:
    small = training_arguments({**recipe.training, **_small(folder)}, recipe.task)
    clock = StepClock()
    trainer = _open(recipe, parts, small, clock)
    _, epoch, *_, steps = trainer.set_initial_training_values(small, trainer.get_train_dataloader())
    say(describe_run(parts, trainer).replace(folder, "(a temporary folder)"))
    trainer.train()
    if trainer.state.global_step < min(STEPS, steps):
        raise KeyboardInterrupt
    evaluation = _timed(trainer.evaluate, parts.evaluation, small)
    # At the end `windlass train` measures the test data, or with a metric of generated text writes what is generated.
    if recipe.metric is None:
        predictions = _timed(trainer.evaluate, parts.test, small)
    else:
        predictions = _timed(trainer.predict, generated_set(trainer, parts)[0], small)
    checkpoint = Path(folder) / f"checkpoint-{trainer.state.global_step}"
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    if not small.save_only_model:
        _open(recipe, parts, small, StepClock()).train(resume_from_checkpoint=str(checkpoint))
    # The fastest step: the first one also warms up.
    return Findings(int(steps), int(epoch), min(clock.steps), evaluation, predictions, clock.save, size)


def _open(recipe: Recipe, parts: RecipeParts, args: TrainingArguments, clock: StepClock) -> Any:
    """Return a trainer without lines of progress and without a report, which would be removed with the folder: to draw
    its picture takes longer than the updates.
    """
    trainer: Any = TASKS[recipe.task].open_trainer(parts, args)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ReportCallback)
    trainer.add_callback(clock)
    return trainer


def _small(folder: str) -> dict[str, Any]:
    """Return the arguments that differ from those of the full run."""
    return {
        "output_dir": folder,
        "logging_steps": 1,
        # It keeps its strategy, on which others depend, and its turn never comes.
        "eval_delay": 2 * STEPS,
        "eval_on_start": False,
        "save_strategy": "steps",
        "save_steps": STEPS,
        "load_best_model_at_end": False,
        "resume_from_checkpoint": None,
        "push_to_hub": False,
        "disable_tqdm": True,
        "report_to": "none",
    }


def _timed(work: Callable[[list[Any]], object], rows: Any, args: TrainingArguments) -> float | None:
    """Return the seconds that `work` takes for all rows, by a few of them; None without rows."""
    if rows is None:
        return None
    batch = args.eval_batch_size
    # An upper bound: the first batch, which also warms up, is half of what is measured.
    few = [rows[index] for index in range(min(len(rows), EVAL_BATCHES * batch))]
    began = _now()
    work(few)
    return (_now() - began) / -(-len(few) // batch) * -(-len(rows) // batch)


def _moments(cadence: CadencePlan, found: Findings) -> set[int]:
    """Return the updates after which something with this cadence happens; for "best", none of its own."""
    if cadence.strategy in ("no", "best"):
        return set()
    stride = found.epoch if cadence.strategy == "epoch" else cadence.steps
    # The last epoch may be a part of one, and ends too.
    return {*range(stride, found.steps, stride), found.steps}


def _evaluations(args: TrainingArguments, found: Findings) -> set[int]:
    """Return the updates after which the run evaluates."""
    if found.evaluation is None:
        return set()
    moments = _moments(
        resolve_cadence(args.eval_strategy, args.eval_steps or args.logging_steps, found.steps), found
    )
    delay = args.eval_delay * (found.epoch if args.eval_strategy == "epoch" else 1)
    return {step for step in moments if step >= delay}


def _kept(args: TrainingArguments, saves: int, best: int) -> int:
    """Return how many checkpoints are on the disk at most, the `best` ones among them: a new one is complete before an
    old one is removed.
    """
    if args.save_total_limit is not None:
        return min(saves, max(args.save_total_limit, 1 + best) + 1)
    if args.keep_last is not None or args.keep_best is not None:
        return min(saves, (args.keep_last or 1) + best + 1)
    return saves


def _estimate(args: TrainingArguments, found: Findings) -> dict[str, Any]:
    """What the full run would take; times in seconds, sizes in bytes."""
    steps, evaluated = found.steps, _evaluations(args, found)
    saved = _moments(resolve_cadence(args.save_strategy, args.save_steps, steps), found)
    evaluations, saves = len(evaluated), len(saved)
    if args.save_strategy == "best" or args.load_best_model_at_end or args.keep_best is not None:
        # At most: each evaluation may be the best so far, and is saved then; at the end of an epoch for a second time.
        saved_before = args.eval_strategy == "epoch" and args.save_strategy == "steps"
        saves += len(evaluated if saved_before else evaluated - saved)
    if found.evaluation is not None:
        # `windlass train` evaluates the final weights, unless the last evaluation did.
        evaluations += args.eval_on_start + (steps not in evaluated or args.load_best_model_at_end)
    seconds = steps * found.step + evaluations * (found.evaluation or 0.0) + saves * found.save
    seconds += found.predictions or 0.0
    kept = _kept(args, saves, 0 if args.metric_for_best_model is None else args.keep_best or 1)
    on_device = device_peak_bytes(args.device)
    peak, owner = (process_peak_bytes() or 0, "process") if on_device is None else (on_device, "accelerator")
    return {
        "schema": SCHEMA,
        "checked": {
            "updates": min(STEPS, steps),
            "evaluation": found.evaluation is not None,
            "predictions": found.predictions is not None,
            "save": True,
            "load": not args.save_only_model,
        },
        "steps": steps,
        "seconds_per_step": found.step,
        "seconds": seconds,
        "evaluations": evaluations,
        "saves": saves,
        "checkpoint_bytes": found.checkpoint_bytes,
        "checkpoints_kept": kept,
        "disk_bytes": kept * found.checkpoint_bytes,
        "memory": {"bytes": peak, "of": owner},
    }


def _in_lines(found: dict[str, Any]) -> str:
    checked, memory = found["checked"], found["memory"]
    evaluation = "an evaluation, " if checked["evaluation"] else ""
    predictions = "predictions, " if checked["predictions"] else ""
    load = ", a load" if checked["load"] else ""
    size, disk = in_words(found["checkpoint_bytes"]), in_words(found["disk_bytes"])
    work = f"{amount(found['evaluations'], 'evaluation')} and {amount(found['saves'], 'save')}"
    rows = {
        "checked": f"{amount(checked['updates'], 'update')}, {evaluation}{predictions}a save{load}",
        "steps": f"{found['steps']:,} at {found['seconds_per_step'] * 1000:,.0f} ms",
        "time": f"about {duration(found['seconds'])}, with {work}",
        "disk": f"{size} per checkpoint, at most {disk} for the {found['checkpoints_kept']:,} kept",
        "memory": f"{in_words(memory['bytes'])} at the peak of this rehearsal (memory of the {memory['of']})",
    }
    lines = (f"  {name:<10}{value}" for name, value in rows.items())
    return "\n".join(["", "The full run would take:", *lines])


def _now() -> float:
    """The time when the work that was started on an accelerator is done."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        torch.get_device_module(device).synchronize()
    return time.perf_counter()
