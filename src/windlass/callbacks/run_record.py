"""`run.json`: with what a run was started, each of its sessions, and how it ended. The report is made of it and of
`metrics.jsonl`.

A session is one call of `train()`. The counts `trained` (seconds and samples since `from_step`, usually 0) are sums
over all sessions, without updates that were repeated after an interruption: a checkpoint has the counts of its step.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from windlass import __version__
from windlass.callbacks.metrics_log import FILE_NAME, read_metrics
from windlass.callbacks.rows import Row
from windlass.config.arguments import TrainingArguments, describe
from windlass.core.errors import DataError, Preempted
from windlass.core.logs import get_logger
from windlass.core.metric_values import plain_metrics
from windlass.core.optional import is_imported, version_of
from windlass.core.output_folder import OutputFolder
from windlass.core.plain_text import parse_json
from windlass.core.redact import is_secret_name, redact_command, redact_text, redact_value
from windlass.core.whole_file import write_whole

logger = get_logger(__name__)

RECORD = "run.json"
Record = dict[str, Any]
Trained = Mapping[str, float]

_PACKAGES = ("torch", "numpy", "transformers", "peft", "datasets", "tokenizers", "safetensors")
_MAX_REASON = 300
_LARGEST = 2.5e11  # the year 9891 as a time
_SESSION = {"began": float, "from_step": int, "repeated": int}
_TRAINED = {"from_step": int, "seconds": float, "samples": float}
_END = {"status": str, "step": int, "time": float, "reason": str}


class RunRecord:
    """Writes `run.json` of one session. A failed write is warned of and does not stop training.

    Args:
        folder: the run's folder.
        args: of the run.
        data: returns what the report shows of the data.
        writes: False on all processes but the main one.
    """

    def __init__(
        self, folder: Path, args: TrainingArguments, data: Callable[[], Mapping[str, Any]], *, writes: bool
    ) -> None:
        self._folder, self._args, self._data, self._writes = OutputFolder(folder), args, data, writes
        self._record: Record = {}  # empty before `begin`, and for a session that trains nothing

    def begin(self, step: int, max_steps: int, trained: Trained) -> None:
        """Record the beginning of a session at `step`, with the counts of the checkpoint that it resumes from. A
        session that resumes a complete run trains nothing, and leaves the record as it is.
        """
        if not self._writes:
            return
        try:
            earlier, logged = _earlier(self._folder.path) if step else ([], 0)
            if earlier and step >= max_steps:
                return
            session = {"began": time.time(), "from_step": step, "repeated": max(logged - step, 0)}
            arguments, data = changed_arguments(self._args), dict(self._data())
            facts = {"arguments": arguments, "data": data, "environment": environment()}
            self._record = {
                "max_steps": max_steps,
                "sessions": [*earlier, session],
                "trained": dict(trained),
                "end": None,
                **plain_metrics(redact_value("facts", facts)),
            }
            self._write()
        except Exception as error:  # what the record holds of arguments and data may be anything
            self._warn(error)

    def add_loss(self, facts: Mapping[str, Any]) -> None:
        """Record how the loss is computed, which the first batch decides."""
        if self._record and facts:
            self._record["loss"] = dict(facts)
            self._write()

    def end(self, status: str, step: int, trained: Trained, error: BaseException | None = None) -> None:
        """Record that the session ended at `step`, and the counts of the run."""
        if not self._record:
            return
        reason = "" if error is None else redact_text(f"{type(error).__name__}: {error}".split("\n")[0])
        end = {"status": status, "step": step, "time": time.time(), "reason": reason[:_MAX_REASON]}
        self._record["end"] = {**end, "trained": dict(trained)}
        self._write()

    def _write(self) -> None:
        try:
            self._folder.check()
            self._folder.path.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder.path / RECORD, json.dumps(self._record, indent=1) + "\n")
        except OSError as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        logger.warning("%s could not be written; training continues: %r", self._folder.path / RECORD, error)


def status_of(error: BaseException) -> str:
    """Return how a session ended that raised `error`."""
    if isinstance(error, Preempted):
        return "preempted"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def has_counts(found: Any) -> bool:
    """Return True if this is what a checkpoint has as `trained`."""
    return _has(found, _TRAINED)


def read_record(folder: Path) -> Record | None:
    """Return the record of a run; None if the folder has none. Raises DataError if it is damaged."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        found = parse_json(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not _is_record(found):
        raise DataError(f"{path} is damaged: it is not the record of a run")
    record: Record = found
    return record


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of a run's `metrics.jsonl`; none if it has logged nothing. Raises DataError for a damaged row."""
    path = folder / FILE_NAME
    rows = read_metrics(path) if path.is_file() else []
    for number, row in enumerate(rows, start=1):
        timing: Any = row.get("timing")
        if not _has(row, {"step": int}) or not _has(timing, {"wall": float}):
            raise DataError(f"{path}, line {number}: a row without step and time")
        if not _has({"elapsed": 0.0, **timing}, {"elapsed": float}):
            raise DataError(
                f"{path}, line {number}: elapsed={timing['elapsed']!r} is not a number of seconds"
            )
    return rows


def _is_record(found: Any) -> bool:
    if not _has(found, {"max_steps": int}) or "end" not in found:
        return False
    sessions, end = found.get("sessions"), found.get("end")
    facts = [found.get(name) for name in ("arguments", "data", "environment")]
    return (
        isinstance(sessions, list)
        and bool(sessions)
        and all(_has(session, _SESSION) for session in sessions)
        and _has(found.get("trained"), _TRAINED)
        and (end is None or (_has(end, _END) and _has(end.get("trained"), _TRAINED)))
        and all(isinstance(values, dict) for values in facts)
    )


def _has(found: Any, types: Mapping[str, type]) -> bool:
    """Return True if `found` is a map with values of these types, and with numbers in range."""
    return isinstance(found, dict) and all(_is_a(found.get(name), kind) for name, kind in types.items())


def _is_a(value: Any, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str)
    return isinstance(value, int if kind is int else (int, float)) and 0 <= value <= _LARGEST


def _earlier(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """The sessions of a run that is resumed, and the last step that they recorded; none of damaged files."""
    try:
        record, rows = read_record(folder), read_rows(folder)
    except DataError as error:
        logger.warning("%s; earlier sessions of the run are not counted", error)
        return [], 0
    steps = [row["step"] for row in rows]
    if record is None:
        return [], max(steps, default=0)
    return record["sessions"], max(*steps, 0, (record["end"] or {"step": 0})["step"])


# --- facts of this process --------------------------------------------------------------------------------------------


def changed_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments that were set to something else than their defaults, without secrets. A value that follows
    from other arguments counts as default.
    """
    return {
        name: redact_value(name, value)
        for name, value, is_default in describe(args)
        if not is_default and not is_secret_name(name)
    }


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter to a result, as far as they are installed."""
    installed = {name: found for name in _PACKAGES if (found := version_of(name)) is not None}
    return {"python": platform.python_version(), "windlass": __version__, **installed}


def environment() -> dict[str, str]:
    """Return versions and devices of this process."""
    return {
        **package_versions(),
        "system": platform.platform(terse=True),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        **_accelerator(),
        "command": " ".join(redact_command(sys.argv)),
    }


def _accelerator() -> dict[str, str]:
    if not is_imported("torch"):
        return {}
    import torch

    if not torch.cuda.is_available():
        return {"accelerator": "none (CPU)"}
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"accelerator": ", ".join(names), "cuda": str(torch.version.cuda)}
