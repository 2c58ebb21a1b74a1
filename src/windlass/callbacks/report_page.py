"""The figures and tables of a run on its page, as a pure function of its history."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.callbacks.charts import Point, short
from windlass.callbacks.log_table import clock_text
from windlass.callbacks.rows import described_event, is_number, is_timing
from windlass.callbacks.run_view import Configured
from windlass.core.output import in_html


@dataclass(frozen=True, slots=True)
class TrainingTime:
    """The time of all sessions of a run, without updates that were repeated."""

    # `seconds`, `samples`, `updates`: since `from_step`; samples are known of a run that ended
    seconds: float
    samples: float | None
    updates: int
    from_step: int  # 0, unless the run continues one of which this is not recorded
    sessions: int  # calls of `train()`
    repeated: int  # updates that were made again after interruptions, as far as they were logged before


History = Sequence[Mapping[str, Any]]

# Of one session; a tile has that of all.
_SPEED = ("train_runtime", "train_samples_per_second", "train_steps_per_second")


def render_details(
    history: History,
    facts: Mapping[str, Any],
    time: TrainingTime | None = None,
    configuration: Sequence[Configured] = (),
) -> dict[str, str]:
    """Return the figures and tables of a run as HTML without scripts, each by its name.

    Args:
        history: the rows of `metrics.jsonl` as metrics; each has `step`, most have `epoch`.
        facts: any of `data`, `environment` (name -> value).
        time: of all sessions; None if only that of the last one is known, from its summary in `history`.
        configuration: what differs from the defaults.
    """
    rows = [row for row in history if described_event(row) is None]
    return {
        "tiles": _tiles(rows, time),
        "evaluations": _evaluations(rows),
        "metrics": _cards("Details", {"Final metrics": _final(rows), "Events": _events(history)}),
        "configuration": _configuration(configuration),
        "settings": _cards(
            "Data and environment", {"Data": facts.get("data"), "Environment": facts.get("environment")}
        ),
    }


def _configuration(found: Sequence[Configured]) -> str:
    if not found:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{in_html(one.name)}</th><td class="num">{_cell(one.value)}</td>'
        f'<td class="muted">{in_html(one.source)}</td></tr>\n'
        for one in found
    )
    head = "<tr><th>setting</th><th>value</th><th>set in</th></tr>"
    table = f"<table><thead>{head}</thead><tbody>\n{rows}</tbody></table>"
    return f'<h2>Settings that differ from their defaults</h2>\n<div class="card">{table}</div>\n'


def _events(history: History) -> dict[str, str]:
    """Return what happened once, with a number, which distinguishes equal events."""
    found = [
        (row.get("step", "?"), event[1]) for row in history if (event := described_event(row)) is not None
    ]
    return {f"{number}. step {step}": text for number, (step, text) in enumerate(found, start=1)}


def curve(history: History, name: str) -> list[Point]:
    """Return `(step, value)` of every row that has the metric as a number."""
    return [(float(row.get("step", 0)), float(row[name])) for row in history if is_number(row.get(name))]


def evaluation_losses(history: History) -> list[str]:
    """Return names such as `eval_loss` and `eval_news_loss` with values, in order of appearance."""
    losses = [name for name in _names(history) if name.startswith("eval_") and name.endswith("_loss")]
    return [name for name in losses if curve(history, name)]


# --- the parts of the page


def _tiles(history: History, time: TrainingTime | None) -> str:
    loss = curve(history, "loss")
    tiles: list[tuple[str, Any, str]] = []
    if loss:
        tiles.append(("Training loss", loss[-1][1], f"from {short(loss[0][1])} at step {short(loss[0][0])}"))
    for name in evaluation_losses(history)[:1]:
        step, best = min(curve(history, name), key=lambda p: (math.isnan(p[1]), p[1]))
        tiles.append((f"Best {name}", best, f"at step {short(step)}"))
    if history:
        epoch = _last(history, "epoch")
        steps = max(float(row.get("step", 0)) for row in history)
        tiles.append(("Updates", steps, f"{short(epoch)} epochs" if epoch is not None else ""))
    runtime, speed = _last(history, "train_runtime"), _last(history, "train_samples_per_second")
    if time is not None:
        tiles.append(("Training time", _duration(time.seconds), ", ".join(_told(time))))
    elif runtime is not None:
        rate = f"{short(speed)} samples per second" if speed is not None else ""
        tiles.append(("Training time of the last session", _duration(runtime), rate))
    cells = "".join(
        f'<div class="card tile"><div class="label">{in_html(label)}</div><div class="value">{_cell(value)}</div>'
        f'<div class="more">{in_html(more)}</div></div>'
        for label, value, more in tiles
    )
    return f'<div class="tiles">{cells}</div>\n' if cells else ""


def _duration(seconds: float) -> str:
    return clock_text(seconds) if seconds >= 60 else f"{short(seconds, 3)} s"


def _told(time: TrainingTime) -> Iterator[str]:
    if time.seconds > 0 and time.samples:
        yield f"{short(time.samples / time.seconds)} samples per second"
    elif time.seconds > 0 and time.updates:
        yield f"{short(time.updates / time.seconds)} updates per second"
    if time.from_step:
        yield f"since step {time.from_step:,}"
    if time.sessions > 1:
        yield f"in {time.sessions} sessions"
    if time.repeated:
        yield f"{time.repeated:,} updates repeated"


def _evaluations(history: History) -> str:
    rows = [row for row in history if any(name.startswith("eval_") for name in row)]
    names = [name for name in _names(rows) if name.startswith("eval_") and not is_timing(name)]
    if not names:
        return ""
    columns = ("step", "epoch", *names)
    head = "".join(f"<th>{in_html(name)}</th>" for name in columns)
    cells = [[f'<td class="num">{_cell(row.get(name, ""))}</td>' for name in columns] for row in rows]
    lines = "".join(f"<tr>{''.join(line)}</tr>\n" for line in cells)
    table = f'<table class="wide"><thead><tr>{head}</tr></thead><tbody>\n{lines}</tbody></table>'
    return f'<h2>Evaluations</h2>\n<div class="card">{table}</div>\n'


def _cards(title: str, tables: Mapping[str, Mapping[str, Any] | None]) -> str:
    shown = "".join(_pairs(name, values) for name, values in tables.items())
    return f'<h2>{title}</h2>\n<div class="columns">{shown}</div>\n' if shown else ""


def _pairs(title: str, values: Mapping[str, Any] | None) -> str:
    if not values:
        return ""
    cells = [(in_html(str(name)), _cell(value)) for name, value in values.items()]
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td class="num">{value}</td></tr>\n' for name, value in cells
    )
    table = f"<table><caption>{in_html(title)}</caption><tbody>\n{rows}</tbody></table>"
    return f'<div class="card">{table}</div>\n'


# --- values


def _names(history: History) -> list[str]:
    """Return all names, each once, in order of appearance."""
    return list(dict.fromkeys(name for row in history for name in row))


def _final(history: History) -> dict[str, Any]:
    """Return the last value of each metric without a curve."""
    latest = {name: value for row in history for name, value in row.items()}
    shown = ("step", "loss", "grad_norm", "learning_rate", *_SPEED)
    return {name: value for name, value in latest.items() if name not in shown}


def _last(history: History, name: str) -> float | None:
    values = curve(history, name)
    return values[-1][1] if values else None


def _cell(value: Any) -> str:
    return short(value, 5) if is_number(value) else in_html(str(value))
