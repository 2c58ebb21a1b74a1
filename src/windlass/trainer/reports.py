"""Logs and metrics of a run, and the files that hold them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from torch import nn

from windlass.checkpoint import strict_json
from windlass.checkpoint.files import Files
from windlass.config.arguments import TrainingArguments
from windlass.core.errors import CheckpointError
from windlass.core.events import TrainerState
from windlass.core.logs import get_logger
from windlass.core.metric_values import plain_metrics
from windlass.core.output import say
from windlass.core.run_clock import Moment
from windlass.core.tensors import count_elements
from windlass.core.types import EvalLoopOutput
from windlass.core.whole_file import write_whole
from windlass.metrics.speed import multiplied, speed_metrics
from windlass.trainer.session import Session

logger = get_logger(__name__)


def complete_logs(
    logs: dict[str, Any], state: TrainerState, count_tokens: bool, start_time: float | None, first_tokens: int
) -> None:
    """Convert `logs` to plain data, in place, and add the epoch and, if `count_tokens`, the tokens and their rate since
    `start_time` (seconds), when there were `first_tokens`.
    """
    # Checkpoints and callbacks write the history: both hold only plain data.
    plain = plain_metrics(logs)
    logs.clear()
    logs.update(plain)
    logs["epoch"] = state.epoch
    if count_tokens:
        logs["num_input_tokens_seen"] = state.num_input_tokens_seen
        if start_time is not None:
            tokens = state.num_input_tokens_seen - first_tokens
            logs.update(speed_metrics("train", start_time, num_tokens=tokens))


def evaluation_speed(
    args: TrainingArguments,
    session: Session,
    stage: str,
    prefix: str,
    started: Moment,
    output: EvalLoopOutput,
) -> dict[str, float]:
    """Runtime and throughput of an evaluation, and the memory of its stage unless `skip_memory_metrics`."""
    samples = output.num_samples
    ranks = session.data_ranks.size
    batches = math.ceil(samples / (args.eval_batch_size_of(ranks) * ranks))
    speed = speed_metrics(prefix, started, num_samples=samples, num_steps=batches)
    return speed if args.skip_memory_metrics else {**speed, **session.memory.report(stage, prefix)}


def flops_per_position(model: nn.Module) -> int:
    """FLOPs of a forward (2 for each parameter) and its backward (4), for each position of a batch."""
    return 6 * count_elements(multiplied(model))


def show_metrics(split: str, metrics: dict[str, Any]) -> None:
    """Print metrics as aligned lines."""
    width = max((len(str(name)) for name in metrics), default=0)
    say(f"***** {split} metrics *****")
    for name in sorted(metrics):
        say(f"  {name:<{width}} = {metrics[name]}")


def write_metrics(folder: Path, split: str, metrics: dict[str, float], combined: bool) -> None:
    """Write `{split}_results.json` into the folder, and merge into `all_results.json` (`combined`)."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics = plain_metrics(metrics)
    _write_json(folder / f"{split}_results.json", metrics)
    if combined:
        path = folder / "all_results.json"
        _write_json(path, {**_earlier(path), **metrics})


def readable(name: str, value: Any) -> Any:
    """A metric for people: times as h:m:s, memory in MB, FLOPs in GF, other floats with four digits."""
    if not isinstance(value, (int, float)):
        return value
    if name.endswith("_runtime"):
        # Rounded first: no minute has 60.00 seconds.
        minutes, seconds = divmod(round(float(value), 2), 60)
        hours, minutes = divmod(int(minutes), 60)
        return f"{hours}:{minutes:02}:{seconds:05.2f}"
    # As transformers shows them: GF are 2**30 operations, and MB 2**20 bytes.
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    if "_mem_" in name:
        return f"{int(value) >> 20}MB"
    return round(value, 4) if isinstance(value, float) else value


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_whole(path, json.dumps(values, indent=4, sort_keys=True) + "\n")


def _earlier(path: Path) -> dict[str, Any]:
    """The metrics in a file; empty if it does not exist, or is damaged, which is logged."""
    if not path.exists():
        return {}
    try:
        found = strict_json.read(path, Files(), allow_nan=True)
    except CheckpointError as error:
        logger.warning("%s: replacing the file", error)
        return {}
    return found if isinstance(found, dict) else {}
