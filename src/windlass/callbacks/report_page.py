"""The page of a run's report, as a pure function of its history."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from windlass.callbacks.charts import Point, Series, line_chart, short
from windlass.callbacks.metrics_log import is_timing

History = Sequence[Mapping[str, Any]]

_NOT_CURVES = {
    "step",
    "epoch",
    "total_flos",
    "train_loss",
    "learning_rate",
    "grad_norm",
    "loss",
    "num_input_tokens_seen",
}
_STYLE = """
:root { color-scheme: light dark; --page:#f4f4f2; --card:#fcfcfb; --ink:#0b0b0b; --soft:#52514e;
--faint:#8a8984;
  --line:#e1e0d9; --axis:#c3c2b7; --c0:#2a78d6; --c1:#eb6834; --c2:#1baf7a; --c3:#eda100; --c4:#e87ba4;
  --c5:#4a3aa7 }
@media (prefers-color-scheme: dark) { :root { --page:#0d0d0d; --card:#1a1a19; --ink:#f4f4f2; --soft:#c3c2b7;
--faint:#8f8e88;
  --line:#2c2c2a; --axis:#4a4a47; --c0:#3987e5; --c1:#d95926; --c2:#199e70; --c3:#c98500; --c4:#d55181;
  --c5:#9085e9 } }
* { box-sizing: border-box }
body { margin:0 auto; padding:32px 24px 56px; max-width:1240px; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif }
h1 { font-size:26px; line-height:1.25; margin:0 0 4px } h2 { font-size:17px; margin:36px 0 12px }
.muted { color:var(--faint) } .sub { color:var(--soft); margin:0 0 24px }
.grid-2 { display:grid; gap:16px; grid-template-columns:repeat(auto-fit, minmax(min(100%, 460px), 1fr));
align-items:start } .card { background:var(--card); border:1px solid var(--line); border-radius:10px;
padding:14px 16px; margin:0; overflow-x:auto } .tiles { display:grid; gap:12px;
grid-template-columns:repeat(auto-fit, minmax(150px, 1fr)); margin-bottom:16px } .tile .label {
color:var(--soft); font-size:13px } .tile .value { font-size:24px; font-weight:600; line-height:1.3 } .tile
.more { color:var(--faint); font-size:12.5px } figcaption { font-weight:600; display:flex; flex-wrap:wrap;
gap:4px 16px; justify-content:space-between; margin-bottom:6px } .legend { font-weight:400; font-size:13px;
color:var(--soft); display:flex; flex-wrap:wrap; gap:4px 14px } .key::before { content:"";
display:inline-block; width:14px; height:3px; border-radius:2px; margin-right:6px;
  vertical-align:middle; background:var(--c) }
svg { display:block; width:100%; height:auto; font-size:11.5px } svg text { fill:var(--faint);
font-variant-numeric:tabular-nums } .grid { stroke:var(--line) } .axis { stroke:var(--axis) } polyline {
fill:none; stroke:var(--c); stroke-width:2; stroke-linejoin:round; stroke-linecap:round } .dot {
fill:var(--c); stroke:var(--card); stroke-width:1.5 } .spot { fill:transparent } .spot:hover { fill:var(--c) }
.s0 { --c:var(--c0) } .s1 { --c:var(--c1) } .s2 { --c:var(--c2) } .s3 { --c:var(--c3) } .s4 { --c:var(--c4) }
.s5 { --c:var(--c5) } table { border-collapse:collapse; width:100%; font-size:14px } caption {
text-align:left; font-weight:600; margin-bottom:6px } th, td { text-align:left; padding:5px 12px 5px 0;
border-top:1px solid var(--line); vertical-align:top; overflow-wrap:anywhere } thead th { color:var(--soft);
font-weight:500; border-top:0; white-space:nowrap } tbody th { font-weight:400; color:var(--soft) } .num {
font-variant-numeric:tabular-nums } .wide td, .wide th { overflow-wrap:normal; white-space:nowrap }
"""


def render_report(history: History, facts: Mapping[str, Any]) -> str:
    """A self-contained HTML page: it loads nothing, runs no script, and follows the reader's light or dark
    setting.

    Args:
        history: the rows of `state.log_history`; each has `step`, most have `epoch`.
        facts: any of `title`, `status` (one line under the title), `arguments`, `environment` and `final`
            (name -> value), `events` (a list of strings or of `{"step": ..., "text": ...}`), `samples` (name
            -> text).
    """
    title = str(facts.get("title") or "Training run")
    body = "".join(
        [
            f"<h1>{escape(title)}</h1>\n",
            f'<p class="sub">{escape(str(facts.get("status", "")))}</p>\n',
            _tiles(history),
            _charts(history),
            _evaluations(history),
            _tables(history, facts),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def curve(history: History, name: str) -> list[Point]:
    """`(step, value)` of every row that has the metric as a number."""
    return [(float(row.get("step", 0)), float(row[name])) for row in history if _is_number(row.get(name))]


def evaluation_losses(history: History) -> list[str]:
    """Names such as `eval_loss` and `eval_news_loss`, in order of appearance."""
    return [name for name in _names(history) if name.startswith("eval_") and name.endswith("_loss")]


# --- the parts of the page
# ----------------------------------------------------------------------------------------


def _tiles(history: History) -> str:
    loss, tiles = curve(history, "loss"), []
    if loss:
        tiles.append(("Training loss", loss[-1][1], f"from {short(loss[0][1])} at step {loss[0][0]:g}"))
    for name in evaluation_losses(history)[:1]:
        step, best = min(curve(history, name), key=lambda p: (math.isnan(p[1]), p[1]))
        tiles.append((f"Best {name}", best, f"at step {step:g}"))
    if history:
        epoch = _last(history, "epoch")
        steps = max(float(row.get("step", 0)) for row in history)
        tiles.append(("Updates", steps, f"{short(epoch)} epochs" if epoch is not None else ""))
    for name, label in (
        ("train_runtime", "Training time"),
        ("train_samples_per_second", "Samples per second"),
    ):
        value = _last(history, name)
        if value is not None:
            tiles.append((label, value, "seconds" if name == "train_runtime" else ""))
    cells = "".join(
        f'<div class="card tile"><div class="label">{escape(label)}</div><div class="value">{_cell(value)}</div>'
        f'<div class="more">{escape(more)}</div></div>'
        for label, value, more in tiles
    )
    return f'<div class="tiles">{cells}</div>\n' if cells else ""


def _charts(history: History) -> str:
    losses = [Series("training", curve(history, "loss"))]
    losses += [Series(name, curve(history, name)) for name in evaluation_losses(history)]
    figures = [line_chart("Loss", losses)]
    for name, title in (("learning_rate", "Learning rate"), ("grad_norm", "Gradient norm (before clipping)")):
        figures.append(line_chart(title, [Series(name, curve(history, name))]))
    drawn = {*_NOT_CURVES, *evaluation_losses(history)}
    for name in _names(history):
        if name not in drawn and not is_timing(name) and len(curve(history, name)) > 1:
            figures.append(line_chart(name, [Series(name, curve(history, name))]))
    shown = "".join(figures)
    if not shown:
        return '<p class="muted">Nothing has been logged yet.</p>\n'
    return f'<div class="grid-2">{shown}</div>\n'


def _evaluations(history: History) -> str:
    rows = [row for row in history if any(name.startswith("eval_") for name in row)]
    names = [name for name in _names(rows) if name.startswith("eval_") and not is_timing(name)]
    if not names:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in ("step", "epoch", *names))
    lines = "".join(
        "<tr>"
        + "".join(f'<td class="num">{_cell(row.get(name, ""))}</td>' for name in ("step", "epoch", *names))
        + "</tr>\n"
        for row in rows
    )
    table = f'<table class="wide"><thead><tr>{head}</tr></thead><tbody>\n{lines}</tbody></table>'
    return f'<h2>Evaluations</h2>\n<div class="card">{table}</div>\n'


def _tables(history: History, facts: Mapping[str, Any]) -> str:
    final = facts.get("final") or _final(history)
    cards = [
        _pairs("Final metrics", final),
        _pairs("Arguments that differ from their defaults", facts.get("arguments")),
        _pairs("Environment", facts.get("environment")),
        _pairs("Events", _events(facts.get("events", ()))),
        _pairs("Samples", facts.get("samples")),
    ]
    shown = "".join(cards)
    return f'<h2>Details</h2>\n<div class="grid-2">{shown}</div>\n' if shown else ""


def _pairs(title: str, values: Mapping[str, Any] | None) -> str:
    if not values:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escape(str(name))}</th><td class="num">{_cell(value)}</td></tr>\n'
        for name, value in values.items()
    )
    return (
        f'<div class="card"><table><caption>{escape(title)}</caption><tbody>\n{rows}</tbody></table></div>\n'
    )


def _events(events: Iterable[Any]) -> dict[str, str]:
    """Numbered, so that equal events stay apart."""
    shown = {}
    for number, event in enumerate(events, start=1):
        if isinstance(event, Mapping):
            shown[f"{number}. step {event.get('step', '?')}"] = str(event.get("text", ""))
        else:
            shown[f"{number}."] = str(event)
    return shown


# --- values
# -------------------------------------------------------------------------------------------------------


def _names(history: History) -> list[str]:
    """All metric names, each once, in order of appearance."""
    return list(dict.fromkeys(name for row in history for name in row))


def _final(history: History) -> dict[str, Any]:
    """The last value of everything but the position and the curves that are drawn anyway."""
    latest = {name: value for row in history for name, value in row.items()}
    return {
        name: value
        for name, value in latest.items()
        if name not in ("step", "loss", "grad_norm", "learning_rate")
    }


def _last(history: History, name: str) -> float | None:
    values = curve(history, name)
    return values[-1][1] if values else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else escape(str(value))
    return short(value, 5) if _is_number(value) else escape(str(value))
