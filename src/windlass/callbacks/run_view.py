"""What a run's folder says about the run: the one reader of `run.json`, `metrics.jsonl`, the clock and the checkpoints.

`windlass status`, `ps` and `report` are made of it. It only reads, needs no torch, and takes any folder: of a run that
goes on, that was killed, or that was copied from another machine. What is damaged is left out and named in `notes`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from windlass.callbacks.clock_file import read_clock
from windlass.callbacks.metrics_log import FILE_NAME, UNFINISHED, whole_rows
from windlass.callbacks.rows import Row, described_event
from windlass.callbacks.run_record import RECORD, Record, ended_at, memory_of, read_failures, read_record
from windlass.checkpoint.files import Files
from windlass.checkpoint.manifest import check_content, read_manifest
from windlass.checkpoint.run_lock import holder_of
from windlass.checkpoint.survey import Found, survey
from windlass.core.errors import CheckpointError, DataError
from windlass.core.run_clock import KINDS, STOPPED, ClockReading
from windlass.core.upload_log import read_uploads

Sureness = Literal["certain", "likely", "unknown"]
# A run writes its clock once a second; after so many without a change it is not this folder that it writes to.
PATIENCE = 15.0
_MOST_NOTES = 5  # of one kind


@dataclass(frozen=True, slots=True)
class Life:
    """Whether a process writes to the folder now."""

    runs: bool | None  # None if the folder does not show it
    sureness: Sureness  # of `runs`
    why: str  # one sentence, for people
    sign: float | None  # when it last wrote its clock, in seconds since 1970; None if there is no clock


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call of `train()`.

    Attributes:
        number: from 1.
        began, ended: in seconds since 1970; `ended` is None if it is not known, and the last sign of a live one.
        from_step, step: where it began, and the last update that is known.
        repeated: updates that an earlier attempt had done.
        status: "finished", "stopped", "preempted", "interrupted", "failed", "killed", "running" or "unknown".
        reason: of a failure; one line.
        seconds: by kind of work (`windlass.core.run_clock.KINDS`); empty if they are not known.
        changed: arguments that differ from those of the attempt before: the values before and now, None for a default.
        memory: bytes of the peak on rank 0, `predicted` by `windlass plan` and `measured`; None if either is not known.
    """

    number: int
    began: float
    ended: float | None
    from_step: int
    step: int
    repeated: int
    status: str
    reason: str
    seconds: Mapping[str, float]
    changed: Mapping[str, Sequence[Any]]
    memory: Mapping[str, int] | None


def status_in_words(status: str, step: int, max_steps: int | None) -> str:
    """The status of an attempt, or whether it runs, in words: how it ended, or how far it is known to be."""
    if status == "finished":
        return f"finished after {step:,} steps"
    words = {"running": "running, step", "killed": "killed after step", "unknown": "running or killed, step"}
    of = f" of {max_steps:,}" if max_steps else ""
    return f"{words.get(status, f'{status} at step')} {step:,}{of}"


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that happened once."""

    # "rolled_back", "skipped_update", "out_of_memory", "alert", "arguments_changed", "uploaded" or "upload_failed"
    kind: str
    step: int
    wall: float  # in seconds since 1970
    text: str  # one line, for people
    values: Mapping[str, Any]  # what the row in `metrics.jsonl` has of it


@dataclass(frozen=True, slots=True)
class TimeLedger:
    """The time between the first start of a run and its end, or the last sign of it."""

    began: float  # in seconds since 1970
    wall: float  # seconds; the sum of `seconds`
    seconds: Mapping[str, float]  # by kind of work, and "stopped" between attempts

    @property
    def goodput(self) -> float:
        """The share of the time in which the run got on: compute, exchange and update."""
        useful = sum(self.seconds.get(kind, 0.0) for kind in ("compute", "exchange", "update"))
        return useful / self.wall if self.wall > 0 else 0.0

    def shares(self) -> dict[str, float]:
        """Return the share of each kind, the largest first; they add up to 1."""
        pairs = sorted(self.seconds.items(), key=lambda pair: -pair[1])
        return {kind: value / self.wall for kind, value in pairs} if self.wall > 0 else {}


@dataclass(frozen=True, slots=True)
class Configured:
    """A setting that differs from its default.

    Attributes:
        source: where it was set, such as `recipe.yaml:12`, `the command line`, `the script`, or a variable; empty if
            the record does not have it.
    """

    name: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class RunView:
    """All that a run's folder holds, as it was at `read_at` (seconds since 1970).

    Attributes:
        name: of the folder.
        record: `run.json`; None if there is none.
        max_steps: None without a record.
        step: the last update that is known.
        arguments, data, environment, process: the facts of the last attempt.
        configuration: what differs from the defaults, arguments first.
        attempts: calls of `train()`, in order.
        rows, evaluations, summary: rows of `metrics.jsonl` that are logs, evaluations, and the last summary.
        all_rows: every row, in order.
        events: in order of the file, and changed arguments at the beginning of their attempt.
        checkpoints: in order of their commits; those without a readable manifest first.
        failures: what ranks of the last attempt left: `rank`, `step`, `time`, `reason`; the earliest first.
        ledger: None if the record of an attempt has no times.
        notes: what was damaged and left out; for people.
    """

    folder: Path
    name: str
    read_at: float
    record: Record | None
    max_steps: int | None
    step: int
    arguments: Mapping[str, Any]
    configuration: tuple[Configured, ...]
    data: Mapping[str, Any]
    environment: Mapping[str, Any]
    process: Mapping[str, Any]
    life: Life
    attempts: tuple[Attempt, ...]
    all_rows: tuple[Row, ...]
    rows: tuple[Row, ...]
    evaluations: tuple[Row, ...]
    summary: Row | None
    events: tuple[RunEvent, ...]
    checkpoints: tuple[Found, ...]
    failures: tuple[Mapping[str, Any], ...]
    ledger: TimeLedger | None
    notes: tuple[str, ...]

    @property
    def newest_whole(self) -> Found | None:
        """The checkpoint that a resumed run continues from."""
        return next((one for one in reversed(self.checkpoints) if one.problem is None), None)


def is_run(folder: Path) -> bool:
    """Return True if the folder has the files of a run."""
    return (folder / FILE_NAME).is_file() or (folder / RECORD).is_file()


def read_run(
    folder: Path,
    *,
    strict: bool = False,
    now: float | None = None,
    whole: tuple[list[Row], list[str]] | None = None,
) -> RunView:
    """Read a run's folder.

    Args:
        strict: raise DataError for a damaged `run.json` or row, instead of leaving it out.
        now: seconds since 1970; by default the time.
        whole: what `whole_rows` would return, of a reader that follows the run; by default it is read.

    Raises:
        OSError: the folder cannot be read.
    """
    now = time.time() if now is None else now
    notes: list[str] = []
    record = _record(folder, strict, notes)
    rows = _rows(folder, strict, notes, whole or whole_rows(folder / FILE_NAME))
    clock = read_clock(folder)
    life = _life(folder, clock, now)
    attempts = _attempts(record, rows, clock, life)
    events = [event for row in rows if (event := event_of(row)) is not None]
    changes = [_changed(attempt) for attempt in attempts if attempt.changed]
    last = max([row["step"] for row in rows] + [attempt.step for attempt in attempts], default=0)
    facts = record or {}
    return RunView(
        folder=folder,
        name=folder.absolute().name,
        read_at=now,
        record=record,
        max_steps=facts.get("max_steps"),
        step=last,
        arguments=facts.get("arguments", {}),
        configuration=tuple(_configuration(facts)),
        data=facts.get("data", {}),
        environment=facts.get("environment", {}),
        process=facts.get("process") or {},
        life=life,
        attempts=attempts,
        all_rows=tuple(rows),
        rows=tuple(row for row in rows if row.get("event") == "log" and described_event(row) is None),
        evaluations=tuple(row for row in rows if row.get("event") == "evaluate"),
        summary=next((row for row in reversed(rows) if row.get("event") == "summary"), None),
        events=tuple(
            sorted([*events, *changes, *_uploads(folder, attempts, last)], key=lambda event: event.wall)
        ),
        checkpoints=tuple(_checkpoints(folder)),
        failures=tuple(read_failures(folder)),
        ledger=_ledger(attempts),
        notes=tuple(notes),
    )


# --- the files --------------------------------------------------------------------------------------------------------


def _record(folder: Path, strict: bool, notes: list[str]) -> Record | None:
    try:
        return read_record(folder)
    except DataError as error:
        if strict:
            raise
        notes.append(f"{error}; it is left out")
        return None


def _configuration(record: Record) -> Iterator[Configured]:
    """Yield what differs from the defaults; records of earlier versions have no sources."""
    sources, settings = (
        found if isinstance(found := record.get(name), dict) else {} for name in ("sources", "settings")
    )
    for name, value in record.get("arguments", {}).items():
        yield Configured(name, value, str(sources.get(name, "")))
    for name, one in settings.items():
        if isinstance(one, dict) and {"value", "source"} <= one.keys():
            yield Configured(name, one["value"], str(one["source"]))


def _rows(folder: Path, strict: bool, notes: list[str], whole: tuple[list[Row], list[str]]) -> list[Row]:
    """Return the whole rows; a last line without an end is one that the run writes now, or was killed in."""
    rows, damage = whole
    serious = [problem for problem in damage if not problem.endswith(UNFINISHED)]
    if strict and serious:
        raise DataError(f"{folder / FILE_NAME}, {serious[0]}")
    notes.extend(f"{FILE_NAME}, {problem}; it is left out" for problem in damage[:_MOST_NOTES])
    if len(damage) > _MOST_NOTES:
        notes.append(f"{FILE_NAME}: {len(damage) - _MOST_NOTES} more lines are damaged and left out")
    return rows


def _checkpoints(folder: Path) -> list[Found]:
    found = [replace(one, problem=_problem(one)) for one in survey(folder)]
    whole = [one.info for one in found if one.info is not None and one.problem is None]
    best = whole[-1].meta.get("best_metric") if whole else None
    return [replace(one, is_best=best is not None and one.metric == best) for one in found]


def _problem(found: Found) -> str | None:
    info = found.info
    if found.problem is not None or info is None or info.complete:
        return found.problem
    return f"it has the files of {len(info.held)} of {info.nodes} machines"


def verify(checkpoint: Found) -> Found:
    """Read every byte of a checkpoint; return it with what was found."""
    if checkpoint.problem is not None:
        return checkpoint
    try:
        check_content(read_manifest(checkpoint.path, Files()), Files())
    except (CheckpointError, OSError) as error:
        return replace(checkpoint, problem=str(error))
    return replace(checkpoint, verified=True)


# --- is it alive ------------------------------------------------------------------------------------------------------


def _life(folder: Path, clock: ClockReading | None, now: float) -> Life:
    sign = None if clock is None else clock.began + clock.elapsed
    try:
        lock = holder_of(folder)
    except OSError as error:
        return Life(None, "unknown", f"its lock cannot be read: {error}", sign)
    if lock is None:
        return Life(False, "certain", "no process holds the lock of the folder", sign)
    lives, silent = lock.lives(), None if sign is None else now - sign
    if lock.locked:
        return Life(True, "certain", f"a process holds the lock of the folder: {lock.holder}", sign)
    if lives is False:
        return Life(False, "certain", f"the process that held the lock is dead: {lock.holder}", sign)
    if silent is not None and silent <= PATIENCE:
        why = f"its clock moved {max(silent, 0.0):.0f} s ago: {lock.holder}"
        return Life(True, "likely", why, sign)
    if lives and silent is None:
        return Life(True, "likely", f"the process that the lock names is alive: {lock.holder}", sign)
    if silent is None:
        return Life(None, "unknown", f"the lock names a process of another machine: {lock.holder}", sign)
    why = f"its clock has not moved for {silent:.0f} s, or this is a copy of its folder: {lock.holder}"
    return Life(False, "likely", why, sign)


# --- attempts and time ------------------------------------------------------------------------------------------------


def _attempts(
    record: Record | None, rows: Sequence[Row], clock: ClockReading | None, life: Life
) -> tuple[Attempt, ...]:
    if record is None:
        return ()
    sessions: list[dict[str, Any]] = record["sessions"]
    made = [_attempt(number, session) for number, session in enumerate(sessions, start=1)]
    last, end = made[-1], record["end"]
    if end is not None:
        status = "unknown" if last.status == "killed" else last.status
        made[-1] = replace(
            last,
            status=end["status"] if status == "unknown" else status,
            reason=end["reason"],
            step=max(last.step, end["step"]),
            ended=last.ended or end["time"],
        )
        return tuple(made)
    status = {True: "running", False: "killed", None: "unknown"}[life.runs]
    step = max([last.step, *(row["step"] for row in rows[-1:])])
    last = replace(last, status=status, step=step)
    if clock is not None and clock.began >= last.began - 1:
        last = replace(
            last, seconds=clock.seconds, ended=clock.began + clock.elapsed, step=max(step, clock.step)
        )
    elif rows and last.ended is None:
        last = replace(last, ended=rows[-1]["timing"]["wall"])
    made[-1] = last
    return tuple(made)


def _attempt(number: int, session: Mapping[str, Any]) -> Attempt:
    changed = session.get("changed")
    return Attempt(
        number=number,
        began=session["began"],
        ended=ended_at(session),
        from_step=session["from_step"],
        step=session.get("step", session["from_step"]),
        repeated=session["repeated"],
        status=str(session.get("status", "killed")),
        reason=str(session.get("reason", "")),
        seconds=session.get("seconds", {}),
        changed={name: pair for name, pair in changed.items() if _is_pair(pair)}
        if isinstance(changed, dict)
        else {},
        memory=memory_of(session),
    )


def _is_pair(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 2


def _ledger(attempts: Sequence[Attempt]) -> TimeLedger | None:
    if not attempts or not all(attempt.seconds for attempt in attempts):
        return None
    seconds = dict.fromkeys(KINDS, 0.0)
    stopped, end = 0.0, attempts[0].began
    for attempt in attempts:
        stopped += max(attempt.began - end, 0.0)
        for kind, value in attempt.seconds.items():
            seconds[kind] += value
        end = attempt.began + sum(attempt.seconds.values())
    spent = {kind: value for kind, value in {**seconds, STOPPED: stopped}.items() if value}
    return TimeLedger(attempts[0].began, sum(spent.values()), spent)


# --- events -----------------------------------------------------------------------------------------------------------


def event_of(row: Row) -> RunEvent | None:
    """Return the event that a row is; None for metrics."""
    found = described_event(row)
    if found is None:
        return None
    return RunEvent(found[0], row["step"], row["timing"]["wall"], found[1], row)


def _uploads(folder: Path, attempts: Sequence[Attempt], last: int) -> list[RunEvent]:
    """The uploads since the run began: the file may have those of a run before it."""
    began = attempts[0].began if attempts else 0.0
    events = []
    for row in read_uploads(folder):
        if row["time"] >= began:
            failed = bool(row["problem"])
            text = (
                f"{row['what']} was not uploaded: {row['problem']}" if failed else f"{row['what']} uploaded"
            )
            step = last if row["step"] is None else row["step"]
            events.append(RunEvent("upload_failed" if failed else "uploaded", step, row["time"], text, row))
    return events


def _changed(attempt: Attempt) -> RunEvent:
    shown = ", ".join(f"{name}: {pair[0]!r} -> {pair[1]!r}" for name, pair in attempt.changed.items())
    text = f"attempt {attempt.number} has other arguments: {shown}"
    return RunEvent("arguments_changed", attempt.from_step, attempt.began, text, attempt.changed)
