"""Runs whose pages are served: each row of their files is read once, however many pages show it, and however often.

Of the rows that were read, few are kept: the ones that the state and the tables of a run are made of, and the newest,
for pages that lack them. So a look costs as much as what is new, however long the run is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from windlass.callbacks.metrics_log import FILE_NAME, RowTail
from windlass.callbacks.page_data import Curves, page_events, whole_data
from windlass.callbacks.page_file import PageRun, page_sections, telling
from windlass.callbacks.report import summarised
from windlass.callbacks.rows import Row
from windlass.callbacks.run_view import RunView, read_run
from windlass.cli.report_command import described
from windlass.cli.status_command import unreadable

_MOST_RUNS = 64  # whose histories are kept
_NEWEST_ROWS = 2000  # that a page may lack without getting all


@dataclass(frozen=True, slots=True)
class _Grown:
    """What one look found: rows, the position before them, and the tokens counted until then."""

    position: str
    rows: Sequence[Row]
    tokens: float | None


class RunHistory:
    """A run as far as its folder was read."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()  # pages are made in threads
        self._tail = RowTail(folder / FILE_NAME)
        self._forget()

    def _forget(self) -> None:
        self._curves, self._kept = Curves(), list[Row]()
        self._grown: deque[_Grown] = deque()
        self._grown_rows = 0

    def view(self) -> RunView:
        """Read what is new; return the run, with few of its rows."""
        with self._lock:
            return self._read()

    def page(self) -> tuple[PageRun, str]:
        """Read what is new; return the run for its page, and the position up to which that has its rows."""
        with self._lock:
            view = self._read()
            page = replace(summarised(view, described(view)), data=whole_data(view, self._curves))
            return page, self._tail.position

    def since(self, position: str) -> tuple[RunView, dict[str, Any], str]:
        """Read what is new; return the run, what a page that has the rows up to `position` lacks, and the new position.
        It lacks `whole`, all of the run, if the file is another one or the position is not known.
        """
        with self._lock:
            view = self._read()
            found = [number for number, one in enumerate(self._grown) if one.position == position]
            if position == self._tail.position:
                news = {"growth": Curves().as_data()}
            elif found:
                missing = list(self._grown)[found[0] :]
                curves = Curves(missing[0].tokens)
                curves.add(view, [row for one in missing for row in one.rows])
                news = {"growth": curves.as_data()}
            else:
                news = {"whole": whole_data(view, self._curves)}
            return view, news, self._tail.position

    def _read(self) -> RunView:
        try:
            return self._look()
        except OSError as error:
            # The tail does not return its rows again, and the curves would lack them for good.
            self._tail = RowTail(self._folder / FILE_NAME)
            self._forget()
            raise unreadable(self._folder, error) from error

    def _look(self) -> RunView:
        before = self._tail.position
        found = self._tail.read()
        if not found.continues:
            self._forget()
        tokens = self._curves.tokens
        self._kept = telling([*self._kept, *found.rows])
        view = read_run(self._folder, whole=(self._kept, found.damage))
        self._curves.add(view, found.rows)
        if found.continues and self._tail.position != before:
            self._grown.append(_Grown(before, found.rows, tokens))
            self._grown_rows += len(found.rows)
            while self._grown_rows > _NEWEST_ROWS:
                self._grown_rows -= len(self._grown.popleft().rows)
        return view


def kept_histories() -> Callable[[Path], RunHistory]:
    """Return a function from folders to their runs, which keeps those that were looked at last."""
    return lru_cache(_MOST_RUNS)(RunHistory)


class FollowedRuns:
    """The runs of one page.

    Args:
        positions: up to where the page has the rows, one for each run; empty for a page that has nothing.
    """

    def __init__(self, histories: Sequence[RunHistory], positions: Sequence[str] = ()) -> None:
        self._histories = histories
        self._positions = list(positions) if len(positions) == len(histories) else [""] * len(histories)
        self._events: list[dict[str, Any]] = [{} for _ in histories]  # that the page has
        self._sections: dict[str, str] = {}

    @property
    def position(self) -> str:
        """Up to where the page has the rows of all runs."""
        return ",".join(self._positions)

    def look(self) -> dict[str, Any]:
        """Return what changed: `sections`, the parts of the page as HTML by the names of their elements, and `runs`."""
        found = [self._look(number) for number in range(len(self._histories))]
        sections = page_sections([run for run, _ in found])
        changed = {key: text for key, text in sections.items() if self._sections.get(key) != text}
        self._sections = sections
        return {"sections": changed, "runs": [news for _, news in found]}

    def _look(self, number: int) -> tuple[PageRun, dict[str, Any]]:
        """A run, with few of its rows, and what is new for its curves: all as `whole`, if the page has other ones."""
        view, news, self._positions[number] = self._histories[number].since(self._positions[number])
        run = summarised(view, described(view))
        if "whole" in news:  # the page starts again, with all events
            self._events[number] = {}
            return run, news
        sent, events = self._events[number], page_events(view)
        self._events[number] = sent | events
        return run, {**news, **{name: value for name, value in events.items() if sent.get(name) != value}}
