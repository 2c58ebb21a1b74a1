"""What a run says in words: a few lines before it, one screen after it."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from windlass.cli.recipe_parts import RecipeParts
from windlass.cli.samples import Blocks
from windlass.core.locations import local_folder

WIDTH = 100
MARGIN = 15
FILES = (("log", "metrics.jsonl"), ("report", "report.html"), ("picture", "training.png"))


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What the last screen is made of.

    Attributes:
        runtime: seconds that `train()` took, evaluations included.
        mean_loss: over the updates of this process.
        first_step: the step at which this process took the run up.
        evaluation: metrics of the final weights; empty where the recipe evaluates nothing.
        command: what resumes the run.
    """

    parts: RecipeParts
    trainer: Any
    runtime: float
    mean_loss: float
    first_step: int
    evaluation: dict[str, float]
    before: str | None
    after: str | None
    command: str


def describe_run(parts: RecipeParts, trainer: Any) -> str:
    """Model and data in numbers."""
    config = trainer.model.config
    size = sum(p.numel() for p in trainer.model.parameters())
    held = (
        f", {_amount(parts.evaluation)} held back for evaluation"
        if parts.evaluation is not None
        else ", no evaluation"
    )
    return "\n".join(
        [
            f"Model       {config.model_type}, {count(size)} parameters, vocabulary {len(parts.tokenizer):,}",
            f"Data        {_amount(parts.train)}{held}",
            f"Output      {trainer.args.output_dir}",
        ]
    )


def _amount(data: Any) -> str:
    if isinstance(data, Blocks):
        return f"{data.tokens:,} tokens in {len(data):,} blocks"
    return f"{len(data):,} texts"


def count(number: float) -> str:
    """1234567 as `1.23 M`."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"


def duration(seconds: float) -> str:
    """Seconds as `75 s`, `12 min` or `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def render_screen(outcome: RunOutcome) -> str:
    """The screen that ends a run."""
    rule = "-" * 72
    rows = [*_results(outcome), *_places(outcome)]
    lines = [f"{name:<{MARGIN}}{value}" for name, value in rows]
    return "\n".join(["", rule, *_sentences(outcome), *lines, f"{'resume':<{MARGIN}}{outcome.command}", rule])


def _sentences(outcome: RunOutcome) -> Iterator[str]:
    for name, text in (("before", outcome.before), ("after", outcome.after)):
        if text:
            yield textwrap.fill(
                text, WIDTH, initial_indent=f"{name:<{MARGIN}}", subsequent_indent=" " * MARGIN
            )


def _results(outcome: RunOutcome) -> Iterator[tuple[str, str]]:
    state = outcome.trainer.state
    losses = [(row["step"], row["loss"]) for row in state.log_history if "loss" in row]
    if len(losses) > 1:
        (first_step, first), (last_step, last) = losses[0], losses[-1]
        yield "loss", f"{first:.4f} (step {first_step}) -> {last:.4f} (step {last_step})"
    else:
        yield "loss", f"{outcome.mean_loss:.4f} (mean of this run)"
    for name in ("eval_loss", "eval_accuracy"):
        if name in outcome.evaluation:
            yield name.replace("_", " "), f"{outcome.evaluation[name]:.4f}"
    yield "speed", _speed(outcome)


def _speed(outcome: RunOutcome) -> str:
    state, parts = outcome.trainer.state, outcome.parts
    steps = state.global_step - outcome.first_step
    if steps <= 0:
        return f"nothing was left to train: the run was complete at step {state.global_step}"
    evaluating = sum(
        row.get("eval_runtime", 0.0) for row in state.log_history if row["step"] > outcome.first_step
    )
    seconds = max(outcome.runtime - evaluating, 1e-9)
    samples = steps * outcome.trainer.get_total_train_batch_size(outcome.trainer.args)
    if parts.recipe.task == "causal-lm":
        rate = f"{samples * parts.recipe.data.block_size / seconds:,.0f} tokens/s"
    else:
        rate = f"{samples / seconds:,.0f} samples/s"
    return f"{rate}, {steps} steps in {duration(outcome.runtime)}"


def _places(outcome: RunOutcome) -> Iterator[tuple[str, str]]:
    args, state = outcome.trainer.args, outcome.trainer.state
    folder = local_folder(args.output_path)
    checkpoint = folder / f"checkpoint-{state.global_step}"
    if args.load_best_model_at_end and state.best_model_checkpoint:
        yield (
            "model",
            f"{os.path.relpath(state.best_model_checkpoint)} (the best by {args.metric_for_best_model})",
        )
    else:
        yield "model", str(checkpoint if checkpoint.is_dir() else folder)
    for name, file in FILES:
        if (folder / file).is_file():
            yield name, str(folder / file)
