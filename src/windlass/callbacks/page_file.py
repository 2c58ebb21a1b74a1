"""The page of runs as one HTML document: what they logged, their tables, and the scripts that draw them.

It loads nothing: style, scripts and data are in it, and its policy lets a browser make no request. The page that
`windlass ui` serves may make one, to its own server, for what changed.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from windlass.callbacks.page_data import page_data
from windlass.callbacks.page_tables import (
    TrainingTime,
    render_details,
    render_differences,
    render_facts,
    render_notes,
    render_tables,
)
from windlass.callbacks.rows import Row, described_event, measured
from windlass.callbacks.run_view import RunView
from windlass.core.output import in_html


@dataclass(frozen=True, slots=True)
class PageRun:
    """A run as its page shows it."""

    view: RunView
    status: str  # one line, below its name
    time: TrainingTime | None  # of all its sessions
    facts: Sequence[tuple[str, str]] = ()  # names and values, below that line
    # Of its charts; None: that of the rows of `view`, which are all then
    data: Mapping[str, Any] | None = None


# Reports whose speed the time that is left is estimated by, and more.
_NEWEST = 20
_ASSETS = Path(__file__).with_name("assets")


def render_page(found: Sequence[PageRun], *, live: str = "") -> str:
    """Return the page of runs.

    Args:
        found: the runs; the curves of the others are compared with those of the first.
        live: where the page gets what changed, as a path of its server; empty for a file.
    """
    scripts = [_asset("uplot.min.js"), _asset("page.js"), _asset("controls.js")]
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; "
        f"script-src {' '.join(map(_hash, scripts))}; connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}"
    )
    page = _asset("page.html")
    sections = {key: f'<div id="{key}">{text}</div>\n' for key, text in page_sections(found).items()}
    values = {
        "POLICY": policy,
        "TITLE": in_html(", ".join(run.view.name for run in found)),
        "STYLE": _asset("uplot.min.css") + _asset("page.css"),
        "HEADER": sections.pop("header"),
        "DETAILS": "".join(sections.values()),
        "DATA": in_script({"live": live, "runs": [run.data or page_data(run.view) for run in found]}),
        "SCRIPTS": "".join(f"<script>{script}</script>\n" for script in scripts),
    }
    head, *rest = page.split("{{")
    return head + "".join(values[piece.partition("}}")[0]] + piece.partition("}}")[2] for piece in rest)


def page_sections(found: Sequence[PageRun]) -> dict[str, str]:
    """Return the parts of the page without scripts as HTML, by the names of their elements, in order."""
    header = ""
    sections = {"differences": render_differences([run.view for run in found])}
    for number, run in enumerate(found):
        view = run.view
        facts = {"data": view.data, "environment": view.environment}
        header += (
            f'<h1>{in_html(view.name)}</h1>\n<p class="sub">{in_html(run.status)}</p>\n'
            f"{render_facts(run.facts)}{render_notes(view)}"
        )
        name = f'<h2 class="run">{in_html(view.name)}</h2>\n' if len(found) > 1 else ""
        metrics = [measured(row) for row in telling(view.all_rows)]
        parts = {
            "name": name,
            **render_tables(view),
            **render_details(metrics, facts, run.time, view.configuration),
        }
        sections |= {f"run-{number}-{key}": text for key, text in parts.items()}
    return {"header": header, **sections}


def telling(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that figures, tables and the state of a run are made of: all but logs, and of these the newest,
    the first and the last of each metric, and the one of the highest step.
    """
    chosen = {place for place, row in enumerate(rows) if row.get("event") != "log" or described_event(row)}
    for places in (range(len(rows)), reversed(range(len(rows)))):
        seen: set[str] = set()
        for place in places:
            names = rows[place].keys() | rows[place]["timing"].keys()
            if not names <= seen:
                seen |= names
                chosen.add(place)
    if rows:
        chosen.add(max(range(len(rows)), key=lambda place: rows[place]["step"]))
    newest = (place for place in reversed(range(len(rows))) if rows[place].get("event") == "log")
    chosen.update(islice(newest, _NEWEST))
    return [rows[place] for place in sorted(chosen)]


def in_script(value: Any) -> str:
    """Return JSON that no text in it can end: as the content of a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
