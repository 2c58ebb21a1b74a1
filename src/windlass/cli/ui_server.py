"""The server of `windlass ui`: an index of runs, their page, and what changes on it as server-sent events.

It answers GET requests for runs that it found itself below its folder: no part of an address becomes a path. Requests
for names of other machines are refused, so that a page of the web cannot read it through a name that leads here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hmac
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

from windlass.callbacks.page_file import render_page
from windlass.cli.followed_runs import FollowedRuns, RunHistory, kept_histories
from windlass.cli.ps_command import runs_below
from windlass.cli.run_status import status_of_run
from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.optional import require
from windlass.core.output import in_html, say
from windlass.core.threads import said_if_long

_PURPOSE = "serve the page of runs"
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'self'"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
# Between two looks at the files; and of the time that a run was read, so many times are waited: 1 % of a core at most.
_LOOK_SECONDS, _SHARE = 1.0, 100
_MOST_RUNS = 8  # on one page
_PATIENCE = 5.0  # seconds after which a look at files is named
_STYLE = """\
:root { color-scheme: light dark; } body { font: 15px/1.5 system-ui, sans-serif; margin: 24px auto; max-width: 1000px;
padding: 0 12px; } td, th { text-align: left; padding: 4px 14px 4px 0; overflow-wrap: anywhere; }
"""

T = TypeVar("T")
Answer = Callable[[Any], Awaitable[Any]]


def serve(folder: Path, host: str, port: int, token: str, announce: Callable[[str], None]) -> None:
    """Serve the runs below a folder until the process is interrupted.

    Args:
        port: 0 for a free one.
        token: that every request needs; empty for none.
        announce: is called with the address once it is bound.

    Raises:
        MissingDependencyError: starlette or uvicorn is not installed. ConfigError: the address cannot be bound.
    """
    uvicorn = require("uvicorn", _PURPOSE)
    app = application(folder, token)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
            bound.listen()
        except OSError as error:
            fix = f"cannot be bound ({error.strerror or error}); choose another --port, or 0 for a free one"
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                fix = f"is not an address of this machine ({error.strerror or error})"
            raise ConfigError(Problem("--host, --port", f"{host}:{port}", fix)) from error
        shown = f"[{host}]" if ":" in host else host
        query = f"?{urlencode({'token': token})}" if token else ""
        announce(f"http://{shown}:{bound.getsockname()[1]}/{query}")
        # Streams of events never end by themselves, so the server would wait for its pages without the limit.
        # Colours are those of standard output, which may be closed.
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            use_colors=False,
        )
        server = uvicorn.Server(config)
        # It cancels the requests that are left at its end, and would log each with a traceback.
        logging.getLogger("uvicorn.error").addFilter(lambda record: not server.should_exit)
        server.run(sockets=[bound])


def application(folder: Path, token: str) -> Any:
    """Return the application (ASGI) that serves the runs below a folder."""
    responses = require("starlette.responses", _PURPOSE)
    routing = require("starlette.routing", _PURPOSE)
    applications = require("starlette.applications", _PURPOSE)
    history_of = kept_histories()

    async def index(request: Any) -> Any:
        text = await _read(folder, _index, folder, history_of)
        return responses.HTMLResponse(text, headers={**_HEADERS, "Content-Security-Policy": _POLICY})

    async def page(request: Any) -> Any:
        chosen = len(request.query_params.getlist("run"))
        if chosen > _MOST_RUNS:
            text = f"{chosen} runs are chosen, and a page shows {_MOST_RUNS} at most: choose fewer"
            return responses.PlainTextResponse(text, status_code=400, headers=_HEADERS)
        runs = await _read(folder, _chosen, folder, request.query_params.getlist("run"))
        if not runs:
            return responses.PlainTextResponse("no such run", status_code=404, headers=_HEADERS)
        text = await _read(folder, _page, {place: history_of(path) for place, path in runs.items()})
        return responses.HTMLResponse(text, headers=_HEADERS)

    async def events(request: Any) -> Any:
        runs = await _read(folder, _chosen, folder, request.query_params.getlist("run"))
        if not runs:
            return responses.PlainTextResponse("no such run", status_code=404, headers=_HEADERS)
        # A browser that lost the connection names the last event that it got.
        at = request.headers.get("last-event-id") or request.query_params.get("at", "")
        paths = list(runs.values())
        following = follow(paths, FollowedRuns([history_of(path) for path in paths], at.split(",")))
        return responses.StreamingResponse(following, media_type="text/event-stream", headers=_HEADERS)

    guard = _guarded(token, responses)
    paths: dict[str, Answer] = {"/": index, "/page": page, "/events": events}
    return applications.Starlette(
        routes=[routing.Route(path, guard(answer), methods=["GET"]) for path, answer in paths.items()]
    )


def _guarded(token: str, responses: Any) -> Callable[[Answer], Answer]:
    """Return what wraps an answer: requests without the token, or for another name, are refused."""

    def guard(answer: Answer) -> Answer:
        async def guarded(request: Any) -> Any:
            # By port: a browser sends its cookies to every port of a machine, also to those of other servers.
            cookie = f"windlass_token_{request.scope['server'][1]}"
            given = request.query_params.get("token") or request.cookies.get(cookie, "")
            if token and not hmac.compare_digest(given.encode(), token.encode()):
                text = "this page needs the token that windlass ui printed"
                return responses.PlainTextResponse(text, status_code=403, headers=_HEADERS)
            if not token and _host_of(request) not in _LOCAL_NAMES:
                text = "served to this machine alone: open it as localhost"
                return responses.PlainTextResponse(text, status_code=403, headers=_HEADERS)
            if token and "token" in request.query_params:
                # Into a cookie, so that links, the history and screenshots do not show it.
                rest = [pair for pair in request.query_params.multi_items() if pair[0] != "token"]
                found = responses.RedirectResponse(
                    f"{request.url.path}?{urlencode(rest)}" if rest else request.url.path,
                    status_code=303,
                    headers=_HEADERS,
                )
                found.set_cookie(cookie, token, httponly=True, samesite="strict")
                return found
            try:
                return await answer(request)
            except DataError as error:
                return responses.PlainTextResponse(str(error), status_code=500, headers=_HEADERS)

        return guarded

    return guard


def _host_of(request: Any) -> str | None:
    """Return the name that a request was sent to, without the port; None if it is not a name."""
    try:
        return urlsplit(f"//{request.headers.get('host', '')}").hostname
    except ValueError:  # a bracket alone, for example
        return None


def naming_a_slow_disk(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Around what reads `folder`: says after a few seconds what is waited for, since nothing else would."""
    said = f"still reading {folder} after {_PATIENCE:g} s: its disk is slow, or does not answer"
    return said_if_long(_PATIENCE, functools.partial(say, error=True), said)


async def _read(folder: Path, read: Callable[..., T], *values: Any) -> T:
    """`read(*values)` in a thread, so that a slow disk does not stop the answers to other pages; it is named."""
    with naming_a_slow_disk(folder):
        return await asyncio.to_thread(read, *values)


# --- what is served ---------------------------------------------------------------------------------------------------


def _chosen(folder: Path, wanted: Sequence[str]) -> dict[str, Path]:
    """The runs at these paths, relative to the folder, as far as there are any."""
    found = {_place(folder, path): path for _, path in runs_below(folder)}
    return {place: found[place] for place in wanted[:_MOST_RUNS] if place in found}


def _place(folder: Path, run: Path) -> str:
    """Return the path of a run as an address has it; the name of `folder` itself may be that of a run in it, too."""
    # As the server decodes it: a name may have bytes that are not UTF-8.
    return os.fsencode(run.relative_to(folder)).decode(errors="replace")


def _page(runs: Mapping[str, RunHistory]) -> str:
    found = [history.page() for history in runs.values()]
    position = ",".join(position for _, position in found)
    live = "events?" + urlencode([*(("run", place) for place in runs), ("at", position)])
    return render_page([run for run, _ in found], live=live)


def _index(folder: Path, history_of: Callable[[Path], RunHistory]) -> str:
    rows = ""
    for name, path in runs_below(folder):
        try:
            status = status_of_run(history_of(path).view())
            sentence, measured = status["sentence"], status["loss"]
        except DataError as error:  # as of another user: the others are listed all the same
            sentence, measured = str(error), None
        place = _place(folder, path)
        link = in_html(f"page?{urlencode({'run': place})}")
        loss = "" if measured is None else f"{measured['value']:.4g}"
        rows += (
            f'<tr><td><input type="checkbox" name="run" value="{in_html(place)}" aria-label="{in_html(name)}"></td>'
            f'<td><a href="{link}">{in_html(name)}</a></td><td>{in_html(sentence)}</td><td>{loss}</td></tr>\n'
        )
    title = in_html(f"Runs below {folder.absolute().name}")
    heads = "<th></th><th>run</th><th>state</th><th>loss</th>"
    body = (
        f"<table><thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table>"
        if rows
        else "<p>No runs yet.</p>"
    )
    again = "" if rows else '<meta http-equiv="refresh" content="5">'
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{again}<style>{_STYLE}</style></head>\n'
        f'<body><h1>{title}</h1><form action="page">{body}<p><button>Compare the chosen runs</button></p></form>'
        "</body></html>\n"
    )


async def follow(runs: Sequence[Path], followed: FollowedRuns) -> AsyncIterator[str]:
    """Yield an event whenever the files of the runs changed, with what the page lacks. Between two, at least a hundred
    times the time that it took to read them is waited.
    """
    seen: Any = None
    while True:
        text, pause = ": \n\n", _LOOK_SECONDS  # no event, so that a client that is gone is noticed
        # What cannot be read now, as on a share that is mounted again, is looked at again.
        with contextlib.suppress(DataError, OSError):
            found = await _read(runs[0], _signature, runs)
            if found != seen:
                text, spent = await asyncio.to_thread(_event, followed)
                seen, pause = found, max(pause, spent * _SHARE)
        yield text
        await asyncio.sleep(pause)


def _event(followed: FollowedRuns) -> tuple[str, float]:
    began = time.thread_time()
    data = json.dumps(followed.look(), separators=(",", ":"))
    return f"id: {followed.position}\ndata: {data}\n\n", time.thread_time() - began


def _signature(runs: Sequence[Path]) -> list[tuple[str, int, int]]:
    """What changes when a run writes: names, sizes and times of the files of its folder."""
    found = []
    for run in runs:
        for path in sorted(run.iterdir()) if run.is_dir() else ():
            try:
                state = path.stat()
            except OSError:  # removed since
                continue
            if path.name != ".windlass-clock.json":
                found.append((path.name, state.st_size, state.st_mtime_ns))
    return found
