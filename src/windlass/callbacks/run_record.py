"""`run.json`: with what a run was started, each of its sessions, and how it ended. The report is made of it and of
`metrics.jsonl`.

A session is one call of `train()`. Once it ended it has `seconds`, by kind of work, whose sum is the time since it
`began`, and `step`, its last one. Of a killed session they are what `.windlass-clock.json` showed last. The counts
`trained` (seconds and samples since `from_step`, usually 0) are sums over all sessions, without updates that were
repeated after an interruption: a checkpoint has the counts of its step.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from windlass import __version__
from windlass.callbacks.clock_file import ClockFile, is_seconds, read_clock, rounded
from windlass.callbacks.metrics_log import read_rows
from windlass.callbacks.rows import as_json
from windlass.config.arguments import TrainingArguments, describe, settings_beside, source_of
from windlass.config.parallel.sources import from_environment
from windlass.config.parallel.table import KEYS
from windlass.core import started
from windlass.core.errors import DataError, Preempted
from windlass.core.locations import is_url
from windlass.core.logs import get_logger
from windlass.core.metric_values import plain_metrics
from windlass.core.optional import is_imported, version_of
from windlass.core.redact import is_secret_name, redact_command, redact_text, redact_value
from windlass.core.run_clock import LATEST, run_clock
from windlass.core.script_command import Needs
from windlass.core.whole_file import OutputFolder, parse_json, read_json, remove_unfinished, write_whole
from windlass.core.world import LAUNCH_VARIABLE, world_from_environment

logger = get_logger(__name__)

RECORD = "run.json"
Record = dict[str, Any]
Trained = Mapping[str, float]

_PACKAGES = ("torch", "numpy", "transformers", "peft", "datasets", "tokenizers", "safetensors")
# Of a rank that failed.
_FAILURE = ".windlass-failure-{}.json"
_MAX_REASON = 300
_MOST_MEMORY = 1 << 63  # bytes; with a larger number a file is damaged
# In errors of gloo's connections, which are of the type RuntimeError alone.
_GLOO = "gloo/transport/"
_SESSION = {"began": float, "from_step": int, "repeated": int}
_TRAINED = {"from_step": int, "seconds": float, "samples": float}
_END = {"status": str, "step": int, "time": float, "reason": str}


class RunRecord:
    """Writes `run.json` of one session. A failed write is warned of and does not stop training.

    Args:
        folder: the run's folder.
        args: of the run.
        writes: False on all processes but the main one.
        needs: what the command of this process, typed again, needs to resume.
    """

    def __init__(
        self,
        folder: Path,
        args: TrainingArguments,
        writes: bool,
        needs: Needs = "script",
    ) -> None:
        self._folder, self._args, self._writes = OutputFolder(folder), args, writes
        self._needs = needs
        self._record: Record = {}  # empty before `begin`, and for a session that trains nothing
        self._clock, self._is_timed, self._began = run_clock(), False, False
        self._clock_file = ClockFile(self._folder, self._clock)

    def begin(
        self, step: int, max_steps: int, trained: Trained, data: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        """Record the beginning of a session at `step`, with the counts of the checkpoint that it resumes from. A
        session that resumes a complete run trains nothing, and leaves the record as it is.

        Args:
            data: returns what the report shows of the data.
        """
        self._began = True
        if not self._writes:
            return
        try:
            # Of an earlier attempt: `windlass status` would name its ranks as the reason of this one's end.
            _remove_failures(self._folder.path)
            remove_unfinished(self._folder.path / RECORD)
            earlier, logged, arguments_before = _earlier(self._folder.path) if step else ([], 0, None)
            # A complete run that is resumed makes no update: its end and its time stay those of the run.
            if earlier and step >= max_steps:
                return
            self._begin_time(step, logged, earlier)
            session: dict[str, Any] = {
                "began": self._clock.read().began if self._is_timed else time.time(),
                "from_step": step,
                "repeated": max(logged - step, 0),
            }
            arguments = changed_arguments(self._args)
            facts = {
                "arguments": arguments,
                "sources": {name: source_of(self._args, name) for name in arguments},
                "settings": settings_of(self._args),
                "data": dict(data()),
                "environment": environment(),
                "process": {**_process(self._args.output_path), "needs": self._needs},
            }
            self._record = {
                "max_steps": max_steps,
                "sessions": [*earlier, session],
                "trained": dict(trained),
                "end": None,
                # `max_grad_norm` may be infinite, for which JSON has no number.
                **as_json(plain_metrics(redact_value("facts", facts))),
            }
            if changed := _changes(arguments_before, self._record["arguments"]):
                session["changed"] = changed
            self._write()
            if self._is_timed:
                self._clock_file.begin()
        except Exception as error:  # what the record holds of arguments and data may be anything
            self._warn(error)

    def add_loss(self, facts: Mapping[str, Any]) -> None:
        """Record how the loss is computed, which the first batch decides."""
        if self._record and facts:
            self._record["loss"] = dict(facts)
            self._write()

    def add_memory(self, facts: Mapping[str, int]) -> None:
        """Record the peak of this session in bytes, and its prediction by `windlass plan`. `end` writes it."""
        if self._record:
            self._record["sessions"][-1]["memory"] = dict(facts)

    def _begin_time(self, step: int, logged: int, earlier: list[dict[str, Any]]) -> None:
        self._is_timed = self._clock.claim()
        if self._is_timed:
            self._clock.continue_from(step, logged)
            if earlier and (ended := ended_at(earlier[-1])) is not None:
                self._clock.not_before(ended)

    def end(self, status: str, step: int, trained: Trained, error: BaseException | None = None) -> None:
        """Record that the session ended at `step`, and the counts of the run."""
        reason = "" if error is None else redact_text(f"{type(error).__name__}: {error}".split("\n")[0])
        end = {"status": status, "step": step, "time": time.time(), "reason": reason[:_MAX_REASON]}
        if status == "failed" and self._began:
            self._write_failure(end, _is_of_others(error))
        if not self._record:
            return
        self._record["end"] = {**end, "trained": dict(trained)}
        self._record["sessions"][-1] |= {"status": status, "reason": end["reason"]}
        self._take_time()
        self._write()

    def _write_failure(self, end: dict[str, Any], of_others: bool) -> None:
        """Write the failure of this rank: the main process, which writes the record, may know nothing of it."""
        with contextlib.suppress(OSError):
            self._folder.check()
            rank = world_from_environment().rank
            failure = {"rank": rank, **end, "of_others": of_others}
            write_whole(self._folder.path / _FAILURE.format(rank), json.dumps(failure) + "\n")

    def close(self) -> None:
        """Record the time after `end` too: this session does nothing more."""
        if not self._record or self._record["end"] is None or not self._is_timed:
            return
        self._take_time()
        self._write()
        self._clock_file.close()

    def _take_time(self) -> None:
        if not self._is_timed:
            return
        reading = self._clock.read()
        self._record["sessions"][-1] |= {"step": reading.step, "seconds": rounded(reading.seconds)}

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


def _is_of_others(error: BaseException | None) -> bool:
    """Return True if a rank failed because another one did, or could not be reached."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"PeerError", "DistError"}) or _GLOO in str(error)


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


def _is_record(found: Any) -> bool:
    if not _has(found, {"max_steps": int}) or "end" not in found:
        return False
    sessions, end = found.get("sessions"), found.get("end")
    facts = [found.get(name) for name in ("arguments", "data", "environment")]
    return (
        isinstance(sessions, list)
        and bool(sessions)
        and all(_has(session, _SESSION) and _has_time(session) for session in sessions)
        and _has(found.get("trained"), _TRAINED)
        and (end is None or (_has(end, _END) and _has(end.get("trained"), _TRAINED)))
        and all(isinstance(values, dict) for values in facts)
        # Records of earlier versions have none.
        and isinstance(found.get("process"), dict | None)
    )


def _has(found: Any, types: Mapping[str, type]) -> bool:
    """Return True if `found` is a map with values of these types, and with numbers in range."""
    return isinstance(found, dict) and all(_is_a(found.get(name), kind) for name, kind in types.items())


def _has_time(session: dict[str, Any]) -> bool:
    return "seconds" not in session or (is_seconds(session["seconds"]) and _has(session, {"step": int}))


def _is_a(value: Any, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str)
    return isinstance(value, int if kind is int else (int, float)) and 0 <= value <= LATEST


def _earlier(folder: Path) -> tuple[list[dict[str, Any]], int, Record | None]:
    """The sessions of a run that is resumed, the last step that they recorded, and the arguments of the last one; none
    of damaged files.
    """
    try:
        record, rows = read_record(folder), read_rows(folder)
    except DataError as error:
        logger.warning("%s; earlier sessions of the run are not counted", error)
        return [], 0, None
    steps = [row["step"] for row in rows]
    if record is None:
        return [], max(steps, default=0), None
    last, clock = record["sessions"][-1], read_clock(folder)
    if "seconds" not in last and clock is not None and clock.began >= last["began"] - 1:  # it was killed
        last |= {"step": clock.step, "seconds": clock.seconds}
    highest = max(*steps, 0, (record["end"] or {"step": 0})["step"], last.get("step", 0))
    return record["sessions"], highest, record["arguments"]


def ended_at(session: Mapping[str, Any]) -> float | None:
    """Return when a session ended, in seconds since 1970; None if that is not known."""
    return session["began"] + sum(session["seconds"].values()) if "seconds" in session else None


def memory_of(session: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the bytes that were `predicted` and `measured` of a session; None if either is not known."""
    found, names = session.get("memory"), ("predicted", "measured")
    if not isinstance(found, dict) or not all(
        type(found.get(name)) is int and 0 < found[name] < _MOST_MEMORY for name in names
    ):
        return None
    return {name: found[name] for name in names}


def _changes(before: Record | None, now: Record) -> dict[str, list[Any]]:
    """Arguments that differ between two attempts: the values before and now, None for a default."""
    if before is None:
        return {}
    names = sorted({*before, *now})
    return {name: [before.get(name), now.get(name)] for name in names if before.get(name) != now.get(name)}


def _remove_failures(folder: Path) -> None:
    name = _FAILURE.format("*")
    for path in [*folder.glob(name), *folder.glob(f"tmp-{name}-*")]:
        with contextlib.suppress(OSError):
            path.unlink()


def read_failures(folder: Path) -> list[dict[str, Any]]:
    """Return the failures of ranks that the last attempt left; each has `rank`, `step`, `time` and `reason`. A damaged
    file is left out.

    Those that are not the consequence of another rank's come first, then those of earlier steps: the clocks of machines
    may differ by more than what lies between a failure and its consequences, and only order what else is equal.
    """
    found = map(read_json, folder.glob(_FAILURE.format("*")))
    return sorted(
        [failure for failure in found if _has(failure, {"rank": int, **_END})],
        key=lambda failure: (failure.get("of_others") is True, failure["step"], failure["time"]),
    )


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


def settings_of(args: TrainingArguments) -> dict[str, dict[str, Any]]:
    """Return what was set beside the arguments to something else than its default, as `value` and `source`: keys of a
    recipe, and what the launcher of this process passed.
    """
    launched = from_environment(os.environ)
    found = {
        name: (setting.value, setting.origin)
        for name, setting in launched.items()
        if not setting.implicit and setting.value != KEYS[name].default
    }
    return {
        name: {"value": redact_value(name, value), "source": source}
        for name, (value, source) in {**settings_beside(args), **found}.items()
        if not is_secret_name(name)
    }


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter to a result, as far as they are installed."""
    installed = {name: found for name in _PACKAGES if (found := version_of(name)) is not None}
    return {"python": platform.python_version(), "windlass": __version__, **installed}


def _process(output: str) -> dict[str, Any]:
    """What is needed to start this job again. `output`: its output folder, which may be a URL."""
    world = world_from_environment()
    launched = parse_json(os.environ.get(LAUNCH_VARIABLE) or "[]")
    return {
        "arguments": redact_command(sys.argv),
        "launcher": redact_command(launched) if isinstance(launched, list) else [],
        "folder": started.FOLDER,
        # A URL may hold a secret, and does not move.
        "output": None if is_url(output) else output,
        "processes": world.size,
        "machines": world.machines,
        "processes_per_machine": world.local_size,
    }


def environment() -> dict[str, str]:
    """Return versions and devices of this process."""
    return {
        **package_versions(),
        # Not `platform.platform()`: it starts a program to ask for the processor, and a fork copies the page table of
        # all that a training holds.
        "system": f"{platform.system()}-{platform.release()}",
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        **_accelerator(),
        "command": " ".join(redact_command(sys.argv)),
    }


def _accelerator() -> dict[str, str]:
    if not is_imported("torch"):
        return {}
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return {"accelerator": "none (CPU)"}
    # PyTorch has no name of Apple's GPU.
    name_of = getattr(torch.get_device_module(device), "get_device_name", lambda index: device.type)
    names = ", ".join(str(name_of(index)) for index in range(torch.accelerator.device_count()))
    return {"accelerator": names, **({"cuda": str(torch.version.cuda)} if device.type == "cuda" else {})}
