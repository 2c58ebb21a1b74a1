"""Folders of runs for tests of the page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from windlass.callbacks.run_record import RunRecord
from windlass.config.arguments import TrainingArguments

NOTHING = {"from_step": 0, "seconds": 0.0, "samples": 0.0}
BEGAN = 1_700_000_000.0


def row(step: int, event: str = "log", **values: Any) -> dict[str, Any]:
    """Return a row of `metrics.jsonl`, a second after that of the step before."""
    return {"event": event, "step": step, **values, "timing": {"wall": BEGAN + step}}


def write_run(folder: Path, steps: int, scale: float = 1.0, **arguments: Any) -> list[dict[str, Any]]:
    """Write the files of a run that logged every step and was killed, and return its rows."""
    args = TrainingArguments(str(folder), use_cpu=True, **arguments)
    RunRecord(folder, args, writes=True).begin(0, steps, NOTHING)
    record = json.loads((folder / "run.json").read_text())
    record["sessions"][0]["began"] = BEGAN
    (folder / "run.json").write_text(json.dumps(record))
    rows = [
        row(step, loss=scale / math.sqrt(step), grad_norm=(step * 37 % 11) / 10, learning_rate=1 / (step + 3),
            num_input_tokens_seen=step * 512)
        for step in range(1, steps + 1)
    ]  # fmt: skip
    rows.append(row(steps, "evaluate", eval_loss=0.5 * scale))
    append_rows(folder, *rows)
    return rows


def append_rows(folder: Path, *rows: dict[str, Any]) -> None:
    """Append rows to the `metrics.jsonl` of a run."""
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(one) + "\n" for one in rows)
