"""The page of runs as one HTML document: what they logged, their tables, and the scripts that draw them.

It loads nothing: style, scripts and data are in it, and its policy lets a browser make no request. The page that
`windlass ui` serves may make one, to its own server, for what changed.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from windlass.callbacks.page_data import page_data
from windlass.callbacks.page_tables import render_differences, render_notes, render_tables
from windlass.callbacks.report_page import TrainingTime, render_details
from windlass.callbacks.rows import measured
from windlass.callbacks.run_view import RunView
from windlass.core.output import in_html

_ASSETS = Path(__file__).with_name("assets")


def render_page(found: Sequence[tuple[RunView, str, TrainingTime | None]], *, live: str = "") -> str:
    """Return the page of runs.

    Args:
        found: for each run, what its folder holds, one line on its state, and its time.
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
        "TITLE": in_html(", ".join(view.name for view, _, _ in found)),
        "STYLE": _asset("uplot.min.css") + _asset("page.css"),
        "HEADER": parts["header"],
        "DETAILS": parts["details"],
        "DATA": in_script({"live": live, "runs": parts["runs"]}),
        "SCRIPTS": "".join(f"<script>{script}</script>\n" for script in scripts),
    }
    head, *rest = page.split("{{")
    return head + "".join(values[piece.partition("}}")[0]] + piece.partition("}}")[2] for piece in rest)


def page_parts(found: Sequence[tuple[RunView, str, TrainingTime | None]]) -> dict[str, Any]:
    """Return what changes on the page as its runs go on: `header` and `details` (HTML), and `runs` (data)."""
    header, details = "", render_differences([view for view, _, _ in found])
    for view, status, time in found:
        facts = {"arguments": view.arguments, "data": view.data, "environment": view.environment}
        history = [measured(row) for row in view.all_rows]
        header += f'<h1>{in_html(view.name)}</h1>\n<p class="sub">{in_html(status)}</p>\n{render_notes(view)}'
        name = f'<h2 class="run">{in_html(view.name)}</h2>\n' if len(found) > 1 else ""
        details += name + render_tables(view) + render_details(history, facts, time)
    return {"header": header, "details": details, "runs": [page_data(view) for view, _, _ in found]}


def in_script(value: Any) -> str:
    """Return JSON that no text in it can end: as the content of a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
