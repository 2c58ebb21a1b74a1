"""What is printed when an error ends a program: the user's own lines on the way to it, and what it says.

The frames of libraries between them say nothing about a mistake in data, arguments or a model, and push it off the
screen.
"""

from __future__ import annotations

import _thread
import os
import sys
import sysconfig
import traceback
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from windlass.core.output import say, shown
from windlass.core.terminal import folded_message

# "full" prints every frame of every error.
VARIABLE = "WINDLASS_TRACEBACK"
_PACKAGE = Path(__file__).parents[1]
_CALLS, _LINES = 2, 10
_before = sys.excepthook


def printed(error: BaseException) -> str:
    """`error` as it is printed: with few frames if a user's code or settings are the cause, else with all."""
    is_ctrl_c = isinstance(error, KeyboardInterrupt)
    short = is_ctrl_c or is_explained(error) or _is_below_windlass(error.__traceback__)
    if not short or os.environ.get(VARIABLE) == "full":
        return shown("".join(traceback.format_exception(error)))
    cause = _cause(error)
    said = traceback.format_exception_only(error)
    if cause is not None:
        said.append(f"It came from {''.join(traceback.format_exception_only(cause)).splitlines()[0]}\n")
    room = _LINES - "".join(said).count("\n")
    calls = _calls(error, cause)[-max(1, (room - 1) // 2) :]
    head = f"Traceback ({VARIABLE}=full shows all frames):\n" if calls and room > 2 * len(calls) else ""
    return shown("".join([head, *traceback.format_list(calls), *said]))


def calls_of(error: BaseException) -> str:
    """The part of `printed` before the message, if the message explains the error; else all of it."""
    if not is_explained(error):
        return printed(error)
    return shown("".join(traceback.format_list(_calls(error, _cause(error)))))


def is_explained(error: BaseException) -> bool:
    """Whether `error` is one of Windlass's own: what is wrong, where, and the fix."""
    return hasattr(error, "is_explained")


def report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook`: print `error` as in `printed`."""
    if isinstance(error, Exception | KeyboardInterrupt):
        say(folded_message(printed(error.with_traceback(trace))), error=True)
    else:
        _before(kind, error, trace)


def _interrupt_again(lost: sys.UnraisableHookArgs) -> None:
    """`sys.unraisablehook`: Ctrl-C that came while an object was destroyed, where Python drops errors, comes again."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        # From another thread, for in this one it would be raised here, where it is dropped as well.
        _thread.start_new_thread(_thread.interrupt_main, ())
    else:
        sys.__unraisablehook__(lost)


def install() -> None:
    """Print uncaught errors by `report_uncaught`, and keep each Ctrl-C, unless a program has a way of its own."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = report_uncaught
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _interrupt_again


def _cause(error: BaseException) -> BaseException | None:
    """The first of the errors that led to `error`, if it is another."""
    seen = [error]
    while True:
        last = seen[-1]
        following = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if following is None or following in seen:
            return None if last is error else last
        seen.append(following)


def _calls(error: BaseException, cause: BaseException | None) -> list[traceback.FrameSummary]:
    """The last calls of the user's own code on the way to `error` and its cause, and where another library failed."""
    calls = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)][
        -_CALLS:
    ]
    if cause is not None:
        calls += [frame for frame in traceback.extract_tb(cause.__traceback__) if _is_own(frame.filename)][
            -1:
        ]
    elif not (is_explained(error) or isinstance(error, KeyboardInterrupt)):
        last = traceback.extract_tb(error.__traceback__)[-1]
        calls += [] if _is_own(last.filename) else [last]
    # Without the marks below their lines.
    return [traceback.FrameSummary(call.filename, call.lineno, call.name) for call in calls]


def _is_below_windlass(trace: TracebackType | None) -> bool:
    """Whether the error was raised in code of the user that Windlass called, or below it."""
    own = [
        not _is_windlass(frame.filename)
        for frame in traceback.extract_tb(trace)
        if _is_own(frame.filename) or _is_windlass(frame.filename)
    ]
    return bool(own) and own[-1] and False in own


def _is_windlass(file: str) -> bool:
    return Path(file).is_relative_to(_PACKAGE)


@lru_cache(maxsize=256)
def _is_own(file: str) -> bool:
    if file.startswith("<frozen ") or _is_windlass(file):
        return False
    path = Path(file)
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
