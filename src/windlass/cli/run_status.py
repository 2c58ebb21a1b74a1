"""The state of a run in one object, for people, programs and agents. `status.schema.json` describes it.

A change that a reader could notice gets another number in `SCHEMA`. New names may be added under the same one.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from windlass.callbacks.rows import Row, is_number
from windlass.callbacks.run_record import RECORD
from windlass.callbacks.run_view import Attempt, RunView, status_in_words, verify
from windlass.checkpoint.survey import Found
from windlass.cli.resume_words import resume_recorded
from windlass.core.locations import anchored, is_url

SCHEMA = "windlass-status/1"
SCHEMA_FILE = Path(__file__).with_name("status.schema.json")
# Reports whose time is averaged for the estimate.
_RECENT = 10
_MOST_ALERTS = 20
_RATES = ("samples_per_second", "tokens_per_second", "mfu", "data_wait")


def with_verified(view: RunView) -> RunView:
    """Read every byte of the newest whole checkpoints, until one is what was saved; return the view with that."""
    checked = list(view.checkpoints)
    # Only until one is whole: reading all of them takes as long as saving all of them took.
    for index in reversed(range(len(checked))):
        checked[index] = verify(checked[index])
        if checked[index].verified:
            break
    return replace(view, checkpoints=tuple(checked))


def status_of_run(view: RunView) -> dict[str, Any]:
    """Return the state of a run as plain data."""
    state = state_of(view)
    newest = view.newest_whole
    last = view.rows[-1] if view.rows else None
    seconds = _seconds_per_update(view)
    resumes = view.arguments.get("resume_from_checkpoint") in (True, "auto")
    command, needs = resume_recorded(view.process, resumes, _moved_to(view), starts=newest is None)
    return {
        "schema": SCHEMA,
        "name": view.name,
        "folder": str(view.folder.absolute()),
        "read_at": view.read_at,
        "state": state,
        "sureness": view.life.sureness,
        "why": view.life.why,
        "sentence": _sentence(view, state),
        "failure": _failure(view, state),
        "step": view.step,
        "max_steps": view.max_steps,
        "progress": view.step / view.max_steps if view.max_steps else None,
        "epoch": _number(last, "epoch"),
        "loss": _measured(last, "loss"),
        "evaluation": _evaluation(view),
        "seconds_per_update": seconds,
        "eta_seconds": _eta(view, state, seconds),
        "rates": {name: _number((last or {}).get("timing", {}), name) for name in _RATES},
        "slowest_rank": _slowest(last),
        "checkpoint": None if newest is None else _checkpoint(newest),
        "damaged_checkpoints": [
            {"path": str(one.path.absolute()), "problem": one.problem} for one in view.checkpoints if one.problem
        ],
        "at_risk": _at_risk(view, state, newest),
        "resume": {"command": command, "needs": needs},
        "alerts": _alerts(view),
        "goodput": _goodput(view),
        "memory": next((one.memory for one in reversed(view.attempts) if one.memory), None),
        "configuration": [
            {"name": one.name, "value": _plain(one.value), "source": one.source} for one in view.configuration
        ],
        "attempts": [_attempt(attempt) for attempt in view.attempts],
        "notes": list(view.notes),
    }  # fmt: skip


def _moved_to(view: RunView) -> Path | None:
    """Return the run's folder if the recorded command would look for it elsewhere. None too if the working directory of
    that command is not on this machine, which may see the folders of another one or of a container.
    """
    base = view.process.get("folder")
    # Records of earlier versions have no `output`; `folder` is the working directory at the begin of the run there.
    output = view.process.get("output", view.arguments.get("output_dir"))
    if not isinstance(output, str) or not isinstance(base, str) or is_url(output) or not os.path.isdir(base):
        return None
    here = os.path.realpath(view.folder)
    return None if os.path.realpath(anchored(output, base)) == here else Path(here)


def state_of(view: RunView) -> str:
    """Return the word for the state of a run."""
    if view.life.runs:
        return "running"
    if view.attempts:
        return view.attempts[-1].status
    return "unknown"  # without a record nothing says how it ended


def _sentence(view: RunView, state: str) -> str:
    failure = _failure(view, state)
    if failure is not None:
        rank = "" if failure["rank"] is None else f" on rank {failure['rank']}"
        return f"failed at step {failure['step']:,}{rank}: {failure['reason']}"
    last = view.attempts[-1].status if view.attempts else "unknown"
    if state == "running" and last not in ("running", "killed", "unknown"):
        ended = status_in_words(last, view.step, view.max_steps)
        return f"the last attempt {ended}; a process is starting or ending here"
    if view.record is None and view.life.runs is False:
        return f"ended after step {view.step:,}, how is not known: {RECORD} is missing or damaged"
    words = status_in_words(state, view.step, view.max_steps)
    return f"{words}: it left no reason" if state == "killed" else words


def _failure(view: RunView, state: str) -> dict[str, Any] | None:
    """The failure of the last attempt: of the rank that failed first, if ranks left what happened to them."""
    if state not in ("failed", "killed"):
        return None
    if view.failures:
        first = view.failures[0]
        return {name: first[name] for name in ("rank", "step", "reason")}
    if state == "killed" or not view.attempts:
        return None
    last = view.attempts[-1]
    return {"rank": None, "step": last.step, "reason": last.reason}


# --- progress ---------------------------------------------------------------------------------------------------------


def _seconds_per_update(view: RunView) -> float | None:
    """The median over the newest reports of the last attempt; pauses within them count."""
    began = view.attempts[-1].began if view.attempts else 0.0
    rows = [row for row in view.rows if row["timing"]["wall"] >= began][-_RECENT - 1 :]
    # A median: one long pause, as of a save or a stopped machine, does not move the estimate.
    pairs = [
        ((after["timing"]["wall"] - before["timing"]["wall"]) / (after["step"] - before["step"]))
        for before, after in itertools.pairwise(rows)
        if after["step"] > before["step"]
    ]
    return statistics.median(pairs) if pairs else None


def _eta(view: RunView, state: str, seconds: float | None) -> float | None:
    if state != "running" or seconds is None or not view.max_steps:
        return None
    return max((view.max_steps - view.step) * seconds, 0.0)


def _at_risk(view: RunView, state: str, newest: Found | None) -> dict[str, Any] | None:
    """What would be done again if the run died now, or has to be done again; None of a complete run."""
    if state == "finished":
        return None
    from_step = 0 if newest is None else newest.step
    since = None if newest is None else newest.saved_at
    if since is None:
        since = view.attempts[0].began if view.attempts else None
    alive = view.read_at if state == "running" else (view.attempts[-1].ended if view.attempts else None)
    seconds = None if since is None or alive is None else max(alive - since, 0.0)
    return {"updates": max(view.step - from_step, 0), "seconds": seconds}


def _measured(row: Row | None, name: str) -> dict[str, Any] | None:
    value = _number(row, name)
    return None if row is None or value is None else {"value": value, "step": row["step"]}


def _number(values: Mapping[str, Any] | None, name: str) -> float | None:
    """A number of a row; None if there is none, or JSON cannot represent it."""
    value = None if values is None else values.get(name)
    return value if is_number(value) and math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """A value of a setting; numbers that JSON cannot represent as text."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _evaluation(view: RunView) -> dict[str, Any] | None:
    if not view.evaluations:
        return None
    row = view.evaluations[-1]
    metrics = {name: value for name in row if (value := _number(row, name)) is not None}
    return {
        "step": row["step"],
        "metrics": {name: value for name, value in metrics.items() if name not in ("step", "epoch")},
    }


def _slowest(row: Row | None) -> dict[str, Any] | None:
    timing = {} if row is None else row["timing"]
    rank, wait = timing.get("slowest_rank"), _number(timing, "slowest_rank_wait")
    return {"rank": rank, "wait": wait} if isinstance(rank, int) and wait is not None else None


# --- the rest ---------------------------------------------------------------------------------------------------------


def _checkpoint(one: Found) -> dict[str, Any]:
    return {
        "path": str(one.path.absolute()),
        "step": one.step,
        "saved_at": one.saved_at,
        "bytes": one.info and one.info.nbytes,
        "verified": "bytes" if one.verified else "sizes",
    }


def _alerts(view: RunView) -> list[dict[str, Any]]:
    found = [event for event in view.events if event.kind == "alert"][-_MOST_ALERTS:]
    return [
        {"rule": str(event.values["alert"]), "step": event.step, "time": event.wall, "message": event.text}
        for event in found
    ]


def _goodput(view: RunView) -> dict[str, Any] | None:
    if view.ledger is None:
        return None
    seconds = {kind: round(value, 3) for kind, value in view.ledger.seconds.items()}
    return {
        "share": round(view.ledger.goodput, 4),
        "wall_seconds": round(view.ledger.wall, 3),
        "seconds": seconds,
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    """All of an attempt but what the status has of the whole run."""
    return {name: value for name, value in asdict(attempt).items() if name not in ("seconds", "memory")}
