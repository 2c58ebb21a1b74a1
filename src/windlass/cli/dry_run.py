"""`windlass train --dry-run`: everything a run does, once and small, and what the whole of it would take."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from windlass.assemble.resolve import resolve_cadence
from windlass.callbacks.printer import PrinterCallback
from windlass.checkpoint.remote import check_remote
from windlass.cli.recipe_parts import RecipeParts, build_parts, build_trainer
from windlass.cli.schema import Recipe
from windlass.cli.screen import describe_run, duration
from windlass.cli.training import run_folder, training_arguments
from windlass.config.arguments import TrainingArguments
from windlass.config.plan import CadencePlan
from windlass.core.events import TrainerCallback, TrainerControl, TrainerState
from windlass.core.locations import is_url
from windlass.core.world import world_from_environment
from windlass.trainer.defaults import check_writable

STEPS = 2
EVAL_BATCHES = 2


class StepClock(TrainerCallback):
    """Seconds of each update and of the save. Waits for the device at both ends: an upper bound of what a run takes."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.save = 0.0
        self._since = 0.0

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._since = _now()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.steps.append(_now() - self._since)
        self._since = _now()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.save = _now() - self._since


@dataclass(slots=True)
class Findings:
    """What the rehearsal measured, in seconds and bytes, and what it went through."""

    steps: int = 0
    step_seconds: float = 0.0
    eval_batch_seconds: float = 0.0
    eval_batches: int = 0
    save_seconds: float = 0.0
    checkpoint_bytes: int = 0
    done: list[str] = field(default_factory=list)


def dry_run(recipe: Recipe, args: TrainingArguments, say: Callable[[str], None]) -> None:
    """Build all of `recipe`, run two updates, an evaluation, a save and a load in a temporary folder, and say what the
    full run takes. Raises what the full run would raise.
    """
    say("Dry run: building everything ...")
    if world_from_environment().is_main:
        _try_output_folder(run_folder(args), str(args.output_dir))
        if is_url(str(args.output_dir)):
            check_remote(str(args.output_dir))
    parts = build_parts(recipe, args)
    with tempfile.TemporaryDirectory(prefix="windlass-dry-run-") as folder:
        findings = _rehearse(recipe, parts, folder, say)
    say(_render(args, findings))


def _try_output_folder(folder: Path, shown: str) -> None:
    """Whether the full run could write there; nothing stays behind."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    check_writable(str(folder), shown)
    for path in made:
        path.rmdir()


def _rehearse(recipe: Recipe, parts: RecipeParts, folder: str, say: Callable[[str], None]) -> Findings:
    small = training_arguments({**recipe.training, **_small(folder)})
    trainer, clock = _quiet(build_trainer(parts, small)), StepClock()
    findings = Findings(steps=_full_steps(trainer, training_arguments(recipe.training)))
    trainer.add_callback(clock)
    say(describe_run(parts, trainer).replace(folder, "(a temporary folder)"))
    trainer.train()
    findings.step_seconds = min(clock.steps)  # the first one also warms up
    findings.save_seconds = clock.save
    findings.done.append(f"{len(clock.steps)} updates")
    _evaluate(trainer, parts, small, findings)
    checkpoint = Path(folder) / f"checkpoint-{trainer.state.global_step}"
    findings.checkpoint_bytes = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    findings.done.append("a save")
    _quiet(build_trainer(parts, small)).train(resume_from_checkpoint=str(checkpoint))
    findings.done.append("a load")
    return findings


def _quiet(trainer: Any) -> Any:
    """Without the lines of progress: of two updates there is none to show."""
    trainer.remove_callback(PrinterCallback)
    return trainer


def _small(folder: str) -> dict[str, Any]:
    """The arguments that differ from the full run's: two updates, one save, no evaluation on the way."""
    return {
        "output_dir": folder,
        "max_steps": STEPS,
        "logging_steps": 1,
        "eval_strategy": "no",
        "eval_on_start": False,
        "save_strategy": "steps",
        "save_steps": STEPS,
        "load_best_model_at_end": False,
        "metric_for_best_model": None,
        "resume_from_checkpoint": None,
        "push_to_hub": False,
        "disable_tqdm": True,
        "report_to": "none",
    }


def _evaluate(trainer: Any, parts: RecipeParts, args: TrainingArguments, findings: Findings) -> None:
    if parts.evaluation is None:
        return
    batch = args.per_device_eval_batch_size
    few = [parts.evaluation[index] for index in range(min(len(parts.evaluation), EVAL_BATCHES * batch))]
    began = _now()
    trainer.evaluate(few)
    findings.eval_batch_seconds = (_now() - began) / -(-len(few) // batch)
    findings.eval_batches = -(-len(parts.evaluation) // batch)
    findings.done.append("an evaluation")


def _full_steps(trainer: Any, args: TrainingArguments) -> int:
    """Updates of the whole run, as the Trainer itself counts them."""
    *_, steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())
    return int(steps)


def _times(cadence: CadencePlan, steps: int, epochs: float) -> int:
    """How often something on this cadence happens in the run."""
    if cadence.strategy == "no":
        return 0
    return max(1, round(epochs) if cadence.strategy == "epoch" else -(-steps // cadence.steps))


def _render(args: TrainingArguments, found: Findings) -> str:
    steps, epochs = found.steps, args.num_train_epochs
    stride = args.eval_steps or args.logging_steps
    evaluations = _times(resolve_cadence(args.eval_strategy, stride, steps), steps, epochs)
    saves = _times(resolve_cadence(args.save_strategy, args.save_steps, steps), steps, epochs)
    seconds = (
        found.steps * found.step_seconds
        + evaluations * found.eval_batches * found.eval_batch_seconds
        + saves * found.save_seconds
    )
    kept = saves if args.save_total_limit is None else min(saves, args.save_total_limit + 1)
    size = found.checkpoint_bytes
    rows = [
        ("checked", ", ".join(found.done)),
        ("steps", f"{found.steps:,} at {_milliseconds(found.step_seconds)}"),
        ("time", f"about {duration(seconds)}, with {evaluations} evaluations and {saves} saves"),
        ("disk", f"{_bytes(size)} a checkpoint, at most {_bytes(kept * size)} for the {kept} kept"),
        ("memory", f"{_bytes(peak_memory())} at the peak of this rehearsal ({_memory_kind()})"),
    ]
    return "\n".join(["", "The full run would take:", *(f"  {name:<10}{value}" for name, value in rows)])


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def peak_memory() -> int:
    """Bytes at the peak: of the accelerator's memory where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but there


def _memory_kind() -> str:
    return "memory of the accelerator" if torch.cuda.is_available() else "memory of the process"


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
