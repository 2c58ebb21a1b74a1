"""The page of runs as one HTML document: what they logged, their tables, and the scripts that draw them.

It loads nothing: style, scripts and data are in it, and its policy lets a browser make no request. The page that
`windlass ui` serves may make one, to its own server, for what changed.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from windlass.callbacks.page_data import page_data
from windlass.callbacks.page_tables import render_differences, render_facts, render_notes, render_tables
from windlass.callbacks.report_page import TrainingTime, render_details
from windlass.callbacks.rows import Row, described_event, measured
from windlass.callbacks.run_view import RunView
from windlass.core.output import in_html


@dataclass(frozen=True, slots=True)
class PageRun:
    """A run as its page shows it.

    Attributes:
        status: one line, below its name.
        time: of all its sessions.
        facts: names and values, below that line.
    """

    view: RunView
    status: str
    time: TrainingTime | None
    facts: Sequence[tuple[str, str]] = ()


_ASSETS = Path(__file__).with_name("assets")


def render_page(found: Sequence[PageRun], *, live: str = "") -> str:
    """Return the page of runs.

    Args:
        found: the runs; the curves of the others are compared with those of the first.
        live: where the page gets what changed, as a path of its own server; empty for a file.
    """
    scripts = [_asset("uplot.min.js"), _asset("page.js"), _asset("controls.js")]
    parts = page_parts(found)
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; "
        f"script-src {' '.join(map(_hash, scripts))}; connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}"
    )
    page = _asset("page.html")
    values = {
        "POLICY": policy,
        "TITLE": in_html(", ".join(run.view.name for run in found)),
        "STYLE": _asset("uplot.min.css") + _asset("page.css"),
        "HEADER": parts["header"],
        "DETAILS": parts["details"],
        "DATA": in_script({"live": live, "runs": parts["runs"]}),
        "SCRIPTS": "".join(f"<script>{script}</script>\n" for script in scripts),
    }
    head, *rest = page.split("{{")
    return head + "".join(values[piece.partition("}}")[0]] + piece.partition("}}")[2] for piece in rest)


def page_parts(found: Sequence[PageRun]) -> dict[str, Any]:
    """Return what changes on the page as its runs go on: `header` and `details` (HTML), and `runs` (data)."""
    header, details = "", render_differences([run.view for run in found])
    for run in found:
        view = run.view
        tables = {"arguments": view.arguments, "data": view.data, "environment": view.environment}
        header += (
            f'<h1>{in_html(view.name)}</h1>\n<p class="sub">{in_html(run.status)}</p>\n'
            f"{render_facts(run.facts)}{render_notes(view)}"
        )
        name = f'<h2 class="run">{in_html(view.name)}</h2>\n' if len(found) > 1 else ""
        details += name + render_tables(view) + render_details(_telling(view.all_rows), tables, run.time)
    return {"header": header, "details": details, "runs": [page_data(run.view) for run in found]}


def _telling(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that figures and tables are made of, as metrics: all but logs, and of these the first and the
    last of each metric, and the one of the highest step.
    """
    telling = {place for place, row in enumerate(rows) if row.get("event") != "log" or described_event(row)}
    for places in (range(len(rows)), reversed(range(len(rows)))):
        seen: set[str] = set()
        for place in places:
            names = rows[place].keys() | rows[place]["timing"].keys()
            if not names <= seen:
                seen |= names
                telling.add(place)
    if rows:
        telling.add(max(range(len(rows)), key=lambda place: rows[place]["step"]))
    return [measured(rows[place]) for place in sorted(telling)]


def in_script(value: Any) -> str:
    """Return JSON that no text in it can end: as the content of a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
