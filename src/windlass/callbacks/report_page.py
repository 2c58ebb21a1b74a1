"""The page of a run's report, as a pure function of its history."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from windlass.callbacks.charts import Point, Series, line_chart, short
from windlass.callbacks.displays import clock_text
from windlass.callbacks.report_style import STYLE
from windlass.callbacks.rows import is_timing
from windlass.core.output import in_html

History = Sequence[Mapping[str, Any]]

_NOT_CURVES = {
    "step", "epoch", "total_flos", "train_loss", "learning_rate", "grad_norm", "loss", "num_input_tokens_seen",
}  # fmt: skip


def render_report(history: History, facts: Mapping[str, Any]) -> str:
    """Return a self-contained HTML page, light or dark, that loads nothing and runs no script.

    Args:
        history: the rows of `state.log_history`; each has `step`, most have `epoch`.
        facts: any of `title`, `status` (one line under the title), `arguments`, `data`, `environment`, `final` (name ->
            value), `events` (a list of strings or of `{"step": ..., "text": ...}`), `samples` (name -> text).
    """
    title = str(facts.get("title") or "Training run")
    measured = [row for row in history if _event_of(row) is None]
    body = "".join(
        [
            f"<h1>{in_html(title)}</h1>\n",
            f'<p class="sub">{in_html(str(facts.get("status", "")))}</p>\n',
            _tiles(measured),
            _charts(measured),
            _evaluations(measured),
            _tables(measured, {**facts, "events": [*events_of(history), *facts.get("events", ())]}),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{in_html(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def events_of(history: History) -> list[dict[str, Any]]:
    """Return the events of a run: rollbacks, skipped updates, micro-batches too large for memory."""
    texts = [(row.get("step", "?"), _event_of(row)) for row in history]
    return [{"step": step, "text": text} for step, text in texts if text is not None]


def _event_of(row: Mapping[str, Any]) -> str | None:
    """Return the text of a row that is an event; None for metrics."""
    if "rolled_back_to" in row:
        left_out = f" and {row['samples_left_out']} samples left out" if "samples_left_out" in row else ""
        to = row["rolled_back_to"]
        back = f"rolled back from update {row['rolled_back_from']} to the checkpoint of {to}"
        return f"{back}, {row.get('updates_undone')} updates undone{left_out}: {row.get('reason')}"
    if "skipped_update" in row:
        return f"update {row['skipped_update']} skipped: {row.get('reason')}"
    if "micro_batch_too_large" in row:
        size = f"{row['micro_batches']} x {row['micro_batch_size']} samples"
        return f"out of memory at micro-batch size {row['micro_batch_too_large']}; continued with {size}"
    return None


def curve(history: History, name: str) -> list[Point]:
    """Return `(step, value)` of every row that has the metric as a number."""
    return [(float(row.get("step", 0)), float(row[name])) for row in history if _is_number(row.get(name))]


def evaluation_losses(history: History) -> list[str]:
    """Return names such as `eval_loss` and `eval_news_loss` with values, in order of appearance."""
    losses = [name for name in _names(history) if name.startswith("eval_") and name.endswith("_loss")]
    return [name for name in losses if curve(history, name)]


# --- the parts of the page


def _tiles(history: History) -> str:
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
    if runtime is not None:
        rate = f"{short(speed)} samples per second" if speed is not None else ""
        duration = clock_text(runtime) if runtime >= 60 else f"{short(runtime, 3)} s"
        tiles.append(("Training time", duration, rate))
    cells = "".join(
        f'<div class="card tile"><div class="label">{in_html(label)}</div><div class="value">{_cell(value)}</div>'
        f'<div class="more">{in_html(more)}</div></div>'
        for label, value, more in tiles
    )
    return f'<div class="tiles">{cells}</div>\n' if cells else ""


def _charts(history: History) -> str:
    losses = evaluation_losses(history)
    names = [name for name in _names(history) if not is_timing(name) and name not in {*_NOT_CURVES, *losses}]
    others = [name for name in names if len(curve(history, name)) > 1]
    titles = {"learning_rate": "Learning rate", "grad_norm": "Gradient norm (before clipping)"}
    charts = [("Loss", {"training": "loss"} | {name: name for name in losses})]
    charts += [(title, {name: name}) for name, title in (titles | {name: name for name in others}).items()]
    shown = "".join(
        line_chart(title, [Series(label, curve(history, name)) for label, name in lines.items()])
        for title, lines in charts
    )
    if not shown:
        return '<p class="muted">Nothing has been logged yet.</p>\n'
    return f'<div class="grid-2">{shown}</div>\n'


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


def _tables(history: History, facts: Mapping[str, Any]) -> str:
    cards = [
        _pairs("Final metrics", facts.get("final") or _final(history)),
        _pairs("Arguments that differ from their defaults", facts.get("arguments")),
        _pairs("Data", facts.get("data")),
        _pairs("Environment", facts.get("environment")),
        _pairs("Events", _events(facts.get("events", ()))),
        _pairs("Samples", facts.get("samples")),
    ]
    shown = "".join(cards)
    return f'<h2>Details</h2>\n<div class="columns">{shown}</div>\n' if shown else ""


def _pairs(title: str, values: Mapping[str, Any] | None) -> str:
    if not values:
        return ""
    cells = [(in_html(str(name)), _cell(value)) for name, value in values.items()]
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td class="num">{value}</td></tr>\n' for name, value in cells
    )
    table = f"<table><caption>{in_html(title)}</caption><tbody>\n{rows}</tbody></table>"
    return f'<div class="card">{table}</div>\n'


def _events(events: Iterable[Any]) -> dict[str, str]:
    """Return the events with a number, which distinguishes equal ones."""
    shown = {}
    for number, event in enumerate(events, start=1):
        if isinstance(event, Mapping):
            shown[f"{number}. step {event.get('step', '?')}"] = str(event.get("text", ""))
        else:
            shown[f"{number}."] = str(event)
    return shown


# --- values


def _names(history: History) -> list[str]:
    """Return all names, each once, in order of appearance."""
    return list(dict.fromkeys(name for row in history for name in row))


def _final(history: History) -> dict[str, Any]:
    """Return the last value of each metric without a curve."""
    latest = {name: value for row in history for name, value in row.items()}
    drawn = ("step", "loss", "grad_norm", "learning_rate")
    return {name: value for name, value in latest.items() if name not in drawn}


def _last(history: History, name: str) -> float | None:
    values = curve(history, name)
    return values[-1][1] if values else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    return short(value, 5) if _is_number(value) else in_html(str(value))
