"""Everything shown to people goes through here: progress, tables, messages and log lines.

A full disk, a closed pipe or terminal, or an encoding without a letter costs the text, and never ends a run. Text is
shown without secrets, and without control characters that a file's author may have put into a name.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import html
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from windlass.core.redact import redact_text, redact_value

# C0 and C1 controls but for tab and newline; marks that change the direction of text; what ends a line elsewhere;
# characters that take no room; halves of surrogate pairs.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
# After these errors nothing that is written arrives; a full disk may have room again.
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ESHUTDOWN, errno.ECONNRESET)
_reported: set[str] = set()


def escaped(text: str) -> str:
    """`text` with control characters as Python would write them (`\\x1b`); lines and tabs stay."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def one_line(text: object) -> str:
    """A name or a value from a file as part of one line: without secrets, line breaks escaped."""
    return escaped(redact_text(str(text))).replace("\n", "\\n").replace("\t", "\\t")


def in_html(text: str) -> str:
    """`text` as a page shows it."""
    return html.escape(shown(text))


def shown(text: object) -> str:
    """`text` as it may be shown: without secrets and control characters."""
    return escaped(redact_text(str(text)))


def say(*words: object, error: bool = False, end: str = "\n") -> None:
    """Print to standard output, or to standard error, at once. Write errors are not raised."""
    stream = STDERR if error else STDOUT
    stream.write(shown(" ".join(map(str, words))) + end)
    stream.flush()


def table(rows: Sequence[Sequence[str]], justify: Callable[[str, int], str] = str.ljust) -> Iterator[str]:
    """Yield the lines of rows whose cells stand in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(justify, row, widths)).rstrip()


def as_json(value: Any) -> str:
    """Facts for programs as one JSON value, and a line feed: texts without secrets, what has no form in JSON as text,
    numbers that are not finite as null.
    """
    return json.dumps(_plain(redact_value("", value)), indent=1) + "\n"


def say_json(value: Any) -> None:
    """Print facts for programs."""
    STDOUT.write(as_json(value))
    STDOUT.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int) else redact_text(str(value))


def is_terminal(stream: Any) -> bool:
    """Whether `stream` is a terminal; a closed stream and None are not."""
    try:
        return bool(stream.isatty())
    except (OSError, ValueError, AttributeError):
        return False


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, whose cells show pages."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class TolerantStream:
    """A text stream whose write errors are reported once and never raised.

    Args:
        target: a stream, or "stdout" or "stderr" for whatever `sys` has under this name when something is written:
            notebooks and tests replace it.

    Attributes:
        was_lost: text could not be written; not where a reader took no more of it, such as `head`.
    """

    def __init__(self, target: TextIO | str) -> None:
        self._target = target
        self.was_lost = False

    @property
    def _stream(self) -> Any:
        return getattr(sys, self._target) if isinstance(self._target, str) else self._target

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "ascii"

    def write(self, text: str) -> int:
        stream = self._stream
        if stream is None:  # a program without a console
            return len(text)
        try:
            try:
                stream.write(text)
            except UnicodeEncodeError:
                stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        except (OSError, ValueError) as problem:
            self._drop(stream, problem)
        return len(text)

    def flush(self) -> None:
        stream = self._stream
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError) as problem:
            self._drop(stream, problem)

    def isatty(self) -> bool:
        return is_terminal(self._stream)

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def writable(self) -> bool:
        return True

    def _drop(self, stream: Any, problem: Exception) -> None:
        """Continue without this text. Python would fail to flush its streams at exit, so they are flushed before."""
        _flush_at_exit()
        code = getattr(problem, "errno", None)
        if code in _GONE:
            _redirect_to_null(stream)
        if code == errno.EPIPE:
            return  # no error: a reader such as `head` took what it needed
        self.was_lost = True
        is_error = stream in (sys.stderr, sys.__stderr__)
        name = "standard error" if is_error else "standard output"
        if name not in _reported:
            _reported.add(name)
            if not is_error:
                STDERR.write(f"windlass: {name} cannot be written ({problem}); going on without it\n")
                STDERR.flush()


STDOUT = TolerantStream("stdout")
STDERR = TolerantStream("stderr")


def flush_standard_streams() -> None:
    """Flush Python's own streams; what cannot be written is dropped, and the process keeps its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                _redirect_to_null(stream)


@functools.cache
def _flush_at_exit() -> None:
    atexit.register(flush_standard_streams)


def _redirect_to_null(stream: Any) -> None:
    """Discard what is written to this stream from now on, and what is in its buffer."""
    if stream not in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        return
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
        stream.flush()
