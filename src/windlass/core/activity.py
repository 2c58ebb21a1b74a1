"""What a process is doing while it has no progress to count: a row at the foot of its terminal, with the seconds."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from windlass.core.locations import is_folder_name
from windlass.core.terminal import can_redraw, foot_of
from windlass.core.world import world_from_environment

_SECONDS = 1.0
# Held while a row is drawn from a thread: a process that is forked meanwhile would never get its stream's lock.
_drawing = threading.Lock()


class Ticking:
    """Calls `tick` once a second on a thread of its own, until it returns False or `stop` is called."""

    def __init__(self, tick: Callable[[], bool]) -> None:
        self._tick = tick
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="windlass-display", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it; no call is under way afterwards."""
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        goes_on = True
        while goes_on and not self._over.wait(_SECONDS):
            with _drawing:
                goes_on = self._tick()


class Activity:
    """A row that names what this process is doing, from now until `close` or the end of a `with` block.

    Only the main process of a job has one, and only if standard output is a terminal.
    """

    def __init__(self, what: str) -> None:
        self._what, self._began = what, time.monotonic()
        self._ticking: Ticking | None = None
        self._is_shown = False
        if world_from_environment().is_main and can_redraw(sys.stdout):
            self._foot = foot_of(sys.stdout)
            self._is_shown = True
            try:
                self._foot.draw(self, [what])
                self._ticking = Ticking(self._draw)
            except BaseException:  # Ctrl-C: the caller has no object to close yet
                self._remove()
                raise

    def __enter__(self) -> Activity:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the row. A second call does nothing."""
        if self._ticking is not None:
            self._ticking.stop()
            self._ticking = None
        self._remove()

    def _remove(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._foot.draw(self, [])
            self._foot.close(self)

    def _draw(self) -> bool:
        """Draw the row; return False to stop drawing."""
        row = f"{self._what}: {time.monotonic() - self._began:.0f} s"
        # A bar within it shows more.
        self._foot.draw(self, [] if self._foot.is_shared(self) else [row])
        return True


class Opening(Activity):
    """A row of the same kind that ends by itself once anything else is shown: of a program that knows nothing of it."""

    def _draw(self) -> bool:
        if self._foot.has_text or self._foot.is_shared(self):
            self._remove()
            return False
        return super()._draw()


def looking_for(name: str) -> contextlib.AbstractContextManager[object]:
    """A row of the same kind while a model or a dataset is looked for on the Hub, which may take long to answer; none
    for what is on this machine.
    """
    if is_folder_name(name) or os.path.exists(name):
        return contextlib.nullcontext()
    return Activity(f"looking for {name} on the Hub, or in its cache")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_drawing.acquire, after_in_parent=_drawing.release, after_in_child=_drawing.release
    )
