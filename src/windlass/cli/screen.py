"""The summary of a run: a few lines before it, one screen after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from windlass.core.locations import is_url, local_folder, shown_path
from windlass.core.output import STDOUT
from windlass.core.tensors import count_elements
from windlass.core.terminal import folded, folded_command
from windlass.core.types import TrainOutput
from windlass.finetuning.peft_adapters import describe_trained, is_peft_model
from windlass.metrics.answer_scores import ROUGE
from windlass.recipes.images import Images
from windlass.recipes.samples import Blocks
from windlass.recipes.schema import RecipeParts
from windlass.recipes.text_metrics import PREDICTIONS

MARGIN = 15
SHOWN = ("eval_loss", "eval_accuracy", "test_loss")
TEXT_METRICS = ("bleu", *ROUGE)
FILES = (
    ("log", "metrics.jsonl"),
    ("predictions", PREDICTIONS),
    ("report", "report.html"),
    ("picture", "training.png"),
)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The values of the final screen."""

    parts: RecipeParts
    trainer: Any
    output: TrainOutput  # of `train()`
    first_step: int  # the step at which this process began
    evaluation: dict[str, float]  # metrics of the final weights; empty without evaluation
    is_saved: bool  # the last weights are in the checkpoint of the last step, and else in the folder itself
    # `before`, `after`: texts generated before and after training
    before: str | None
    after: str | None
    command: str | None  # the command line that resumes the run; None if nothing was saved to resume from


def _prepared(trainer: Any) -> str:
    """What was truncated, dropped and packed; empty for a trainer that prepares no text."""
    counts: dict[str, Any] = getattr(trainer, "data_summaries", dict)()
    return "".join(f"  {name + ':':<9} {summary}\n" for name, summary in counts.items())


def describe_run(parts: RecipeParts, trainer: Any) -> str:
    config = trainer.model.config
    size = count_elements(trainer.model.parameters())
    held = "no evaluation"
    if parts.evaluation is not None:
        held = f"{_amount(parts.evaluation)} held out for evaluation"
    vocabulary = "" if parts.tokenizer is None else f", vocabulary {len(parts.tokenizer):,}"
    output = trainer.args.output_path
    place = trainer.args.output_dir if is_url(output) else shown_path(local_folder(output))
    adapter = f"Adapter     {describe_trained(trainer.model)}\n" if is_peft_model(trainer.model) else ""
    text = (
        f"Model       {config.model_type}, {count(size)} parameters{vocabulary}\n"
        f"{adapter}"
        f"Data        {_amount(parts.train)}, {held}\n"
        f"{_prepared(trainer)}"
        f"Output      {place}"
    )
    return "\n".join(folded(line, 12) for line in text.split("\n"))


def _amount(data: Any) -> str:
    if isinstance(data, Blocks):
        return f"{data.tokens:,} tokens in {len(data):,} blocks"
    if not hasattr(data, "__len__"):
        return "a stream of texts"
    return f"{len(data):,} {'images' if isinstance(data, Images) else 'texts'}"


def count(number: float) -> str:
    """Return 1234567 as `1.23 M`."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"


def duration(seconds: float) -> str:
    """Return seconds as `75 s`, `12 min` or `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def render_screen(outcome: RunOutcome) -> str:
    rule = "-" * 72
    texts = [
        folded(f"{name:<{MARGIN}}{text}", MARGIN)
        for name, text in (("before", outcome.before), ("after", outcome.after))
        if text
    ]
    command = outcome.command
    resume = [] if command is None else [("resume", folded_command(command, STDOUT, MARGIN))]
    rows = [*_results(outcome), *_files(outcome), *resume]
    return "\n".join(["", rule, *texts, *(f"{name:<{MARGIN}}{value}" for name, value in rows), rule])


def _results(outcome: RunOutcome) -> Iterator[tuple[str, str]]:
    state = outcome.trainer.state
    losses = [(row["step"], row["loss"]) for row in state.log_history if "loss" in row]
    if len(losses) > 1:
        (first_step, first), (last_step, last) = losses[0], losses[-1]
        yield "loss", f"{first:.4f} (step {first_step}) -> {last:.4f} (step {last_step})"
    else:
        yield "loss", f"{outcome.output.training_loss:.4f} (mean of this run)"
    for name in SHOWN:
        if name in outcome.evaluation:
            yield name.replace("_", " "), f"{outcome.evaluation[name]:.4f}"
    for name in TEXT_METRICS:
        for split in ("eval", "test"):
            if f"{split}_{name}" in outcome.evaluation:
                yield f"{split} {name}", f"{outcome.evaluation[f'{split}_{name}']:.2f}"
    yield "speed", _speed(outcome)


def _speed(outcome: RunOutcome) -> str:
    state, parts = outcome.trainer.state, outcome.parts
    steps = state.global_step - outcome.first_step
    if steps <= 0:
        return f"nothing to train: the run was complete at step {state.global_step}"
    # Those after the summary of the training are not part of its time.
    ends = [number for number, row in enumerate(state.log_history) if "train_runtime" in row]
    evaluating = sum(
        row.get("eval_runtime", 0.0)
        for row in state.log_history[: max(ends, default=0)]
        if row["step"] > outcome.first_step
    )
    runtime = float(outcome.output.metrics["train_runtime"])
    # Without evaluations: the speed of training is what can be compared with other runs.
    seconds = max(runtime - evaluating, 1e-9)
    tokens = [row["num_tokens"] for row in state.log_history if "num_tokens" in row]
    # They are counted from the beginning of the run, and the seconds from that of this process.
    if tokens and not outcome.first_step:
        return f"{tokens[-1] / seconds:,.0f} tokens/s, {steps} steps in {duration(runtime)}"
    samples = steps * outcome.trainer.get_total_train_batch_size(outcome.trainer.args)
    if isinstance(parts.train, Blocks):
        rate = f"{samples * parts.recipe.data.block_size / seconds:,.0f} tokens/s"
    else:
        rate = f"{samples / seconds:,.0f} samples/s"
    return f"{rate}, {steps} steps in {duration(runtime)}"


def _files(outcome: RunOutcome) -> Iterator[tuple[str, str]]:
    args, state = outcome.trainer.args, outcome.trainer.state
    folder = local_folder(args.output_path)
    checkpoint = folder / f"checkpoint-{state.global_step}"
    if args.load_best_model_at_end and state.best_model_checkpoint:
        yield "model", f"{shown_path(state.best_model_checkpoint)} (the best by {args.metric_for_best_model})"
    else:
        yield "model", shown_path(checkpoint if outcome.is_saved else folder)
    for name, file in FILES:
        if (folder / file).is_file():
            yield name, shown_path(folder / file)
