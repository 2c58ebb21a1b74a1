"""What changed in the folders of runs since the last look, for a page that follows them.

Rows are read once. Of those that were read, few are kept: the ones that the state and the tables of a run are made of.
So a look costs as much as what is new, however long the run is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windlass.callbacks.metrics_log import FILE_NAME
from windlass.callbacks.page_data import page_data, page_events, page_growth, tokens_of
from windlass.callbacks.page_file import PageRun, page_sections, telling
from windlass.callbacks.report import summarised
from windlass.callbacks.row_reader import RowTail
from windlass.callbacks.rows import Row
from windlass.callbacks.run_view import RunView
from windlass.cli.report_command import described
from windlass.cli.status_command import read_folder


class FollowedRun:
    """A run whose folder is looked at again and again.

    Args:
        position: of the reader that the page was made by; empty for none.
    """

    def __init__(self, folder: Path, position: str = "") -> None:
        self._folder, self._tail = folder, RowTail(folder / FILE_NAME)
        self._sent: dict[str, Any] = {}
        before = self._tail.read_to(position)
        self._kept, self._tokens = telling(before), _last_tokens(before)
        self._is_known = bool(before)

    @property
    def position(self) -> str:
        """Up to where its rows were read."""
        return self._tail.position

    def whole(self) -> PageRun:
        """Return all of the run: the first look."""
        found = self._tail.read()
        return _page_run(read_folder(self._folder, whole=(found.rows, found.damage)))

    def look(self) -> tuple[PageRun, dict[str, Any]]:
        """Return the run, with few of its rows, and what is new for its curves: all of them as `whole`, if the page has
        other ones.
        """
        found = self._tail.read()
        is_whole = not (found.continues and self._is_known)
        if is_whole:
            self._kept, self._tokens, self._sent = [], None, {}
        tokens = self._tokens
        self._kept = telling([*self._kept, *found.rows])
        self._tokens = _last_tokens(found.rows, tokens)
        self._is_known = True
        if is_whole:
            view = read_folder(self._folder, whole=(found.rows, found.damage))
            return _page_run(view), {"whole": page_data(view)}
        view = read_folder(self._folder, whole=(self._kept, found.damage))
        growth = page_growth(view, found.rows, tokens) if found.rows else {"series": {}, "clip": None}
        return _page_run(view), {"growth": growth, **self._unsent(page_events(view))}

    def _unsent(self, events: dict[str, Any]) -> dict[str, Any]:
        new = {name: value for name, value in events.items() if self._sent.get(name) != value}
        self._sent |= new
        return new


class FollowedRuns:
    """The runs of one page.

    Args:
        positions: of the readers that the page was made by, one for each run; empty for a page that has nothing.
    """

    def __init__(self, folders: Sequence[Path], positions: Sequence[str] = ()) -> None:
        known = positions if len(positions) == len(folders) else [""] * len(folders)
        self._runs = [FollowedRun(folder, at) for folder, at in zip(folders, known, strict=True)]
        self._sections: dict[str, str] = {}

    @property
    def position(self) -> str:
        """Up to where the rows of all runs were read."""
        return ",".join(run.position for run in self._runs)

    def whole(self) -> list[PageRun]:
        """Return all of the runs: the first look."""
        return [run.whole() for run in self._runs]

    def look(self) -> dict[str, Any]:
        """Return what changed: `sections`, the parts of the page as HTML by the names of their elements, and `runs`."""
        found = [run.look() for run in self._runs]
        sections = page_sections([run for run, _ in found])
        changed = {key: text for key, text in sections.items() if self._sections.get(key) != text}
        self._sections = sections
        return {"sections": changed, "runs": [news for _, news in found]}


def _page_run(view: RunView) -> PageRun:
    return summarised(view, described(view))


def _last_tokens(rows: Sequence[Row], before: float | None = None) -> float | None:
    return next((found for row in reversed(rows) if (found := tokens_of(row)) is not None), before)
