"""A terminal with rows at its foot that are drawn again and again, while anybody writes lines above them.

The cursor rests at the beginning of an empty line, and the rows are below it. So a writer only has to erase what
is below the cursor first; a process that does not know of the rows writes one clean line, and no copy of them is left
behind. Nothing else on the screen is moved: a process that is killed leaves the terminal as usable as before.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import sys
import textwrap
import threading
from collections.abc import Sequence
from typing import Any, TextIO

from windlass.core.output import STDERR, STDOUT, TolerantStream, is_terminal, shown

_ERASE = "\x1b[J"  # from the cursor to the end of the screen
# Text that another process or the keyboard left unfinished on this line is overwritten.
_NEW_LINE = f"\r{_ERASE}"


def can_redraw(stream: Any) -> bool:
    """Whether `stream` is a terminal that obeys more than newlines."""
    return is_terminal(stream) and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def row_width() -> int:
    """How long a row may be: a full one would begin another in some terminals."""
    return max(shutil.get_terminal_size().columns - 1, 1)


def folded(text: str, indent: int = 0, stream: Any = STDOUT) -> str:
    """Return one line as lines of whole words that fit the terminal, further ones indented; as it is elsewhere."""
    text = shown(text)  # which makes some characters longer
    if not stream.isatty() or len(text) <= row_width():
        return text
    return textwrap.fill(
        text, row_width(), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def folded_message(text: str) -> str:
    """Return a message of several lines for standard error: each is folded, and its further ones are indented more.
    Places and code of a traceback are left whole, as editors and terminals read them.
    """
    return "\n".join(
        line
        if line.startswith(('  File "', "    "))
        else folded(line, len(line) - len(line.lstrip()) + 4, STDERR)
        for line in text.splitlines()
    )


def folded_command(command: str, stream: TolerantStream, indent: int) -> str:
    """Return a command line as rows that fit the terminal of `stream`, joined by backslashes so that a shell takes them
    as they are; further rows are indented. Elsewhere it stays one line.
    """
    if not stream.isatty():
        return command
    width, lines = row_width() - len(" \\"), [" " * indent]
    for word in map(shlex.quote, shlex.split(command)):
        if lines[-1].strip() and len(lines[-1]) + len(word) > width:
            lines.append(" " * (indent + 2))
        lines[-1] += f"{word} "
    return " \\\n".join(line.rstrip() for line in lines)[indent:]


def foot_of(stream: Any) -> Foot:
    """Return the foot of the terminal that `stream` writes to; while rows are drawn there, the one that draws them."""
    return stream.foot if isinstance(stream, _Above) else Foot(stream)


def write_at_once(text: str) -> None:
    """Write a line to standard error past all buffers and locks: a signal handler may have interrupted a print.

    It is left out where it would have to wait, as in a pipe that no process reads: the process may have to end soon.
    """
    with contextlib.suppress(OSError, ValueError):
        descriptor = sys.__stderr__.fileno() if sys.__stderr__ else 2
        if hasattr(select, "poll"):
            room = select.poll()
            room.register(descriptor, select.POLLOUT)
            if not room.poll(0):
                return
        begin = _NEW_LINE if _in_use and os.isatty(descriptor) else ""
        os.write(descriptor, f"{begin}{text}\n".encode())


class Foot:
    """The rows at the foot of one terminal.

    Attributes:
        has_text: something was written above the rows.

    While there is at least one owner of rows, `sys.stdout` and `sys.stderr` are replaced where they write to this
    terminal, by streams that write above the rows. A line without its end stays alone until it has one: no rows are
    drawn below a prompt, or below another program's bar.
    """

    def __init__(self, terminal: TextIO) -> None:
        self.stream = TolerantStream(terminal)
        self.lock = threading.RLock()
        self._terminal = terminal
        self._rows: dict[object, Sequence[str]] = {}
        self._replaced: dict[str, _Above] = {}
        self._mid_line = self.has_text = False

    @property
    def in_use(self) -> bool:
        """Whether anybody has rows here."""
        return bool(self._rows)

    def is_shared(self, owner: object) -> bool:
        """Whether anybody but `owner` has rows here."""
        return any(rows for other, rows in [*self._rows.items()] if other is not owner)

    def draw(self, owner: object, rows: Sequence[str]) -> None:
        """Show these rows of `owner`, each shorter than the terminal is wide, in place of its rows before."""
        with self.lock:
            if not self._rows:
                self._open()
            self._rows[owner] = rows
            if not self._mid_line:
                self._write(self.stream, _NEW_LINE)

    def say(self, text: str) -> None:
        """Write whole lines, without the end of the last one, above the rows."""
        with self.lock:
            begin = "\n" if self._mid_line else ""
            self.write(self.stream, f"{begin}{text}\n")

    def close(self, owner: object) -> None:
        """The rows of `owner` stay on the screen as they are, as lines."""
        with self.lock:
            if owner not in self._rows:
                return
            rows, self._rows[owner] = self._rows[owner], ()
            try:
                if rows:
                    self.say("\n".join(rows))
            finally:  # whatever interrupts it, such as Ctrl-C
                self._rows.pop(owner, None)
                if not self._rows:
                    self._close()

    def write(self, stream: TolerantStream, text: str) -> None:
        """Write `text` above the rows, to `stream`, which leads to this terminal."""
        if not self._rows:  # other code still holds this stream
            self._write(stream, text)
            return
        begin = _ERASE if self._mid_line else _NEW_LINE
        self.has_text = True
        rest = text.rpartition("\n")[2]
        self._mid_line = bool(rest) and not rest.endswith("\r")
        self._write(stream, begin + text)

    def forked(self) -> None:
        """In a child: its parent draws the rows, and a thread of its parent may have held the lock."""
        self.lock = threading.RLock()
        self._rows = dict.fromkeys(self._rows, ())
        for above in self._replaced.values():
            above.forget()

    def _write(self, stream: TolerantStream, text: str) -> None:
        # A copy: an owner that is collected meanwhile closes its rows.
        rows = [] if self._mid_line else [row for rows in [*self._rows.values()] for row in rows]
        drawn = "".join(f"\r\n{row}" for row in rows)
        stream.write(f"{text}{drawn}\x1b[{len(rows)}A\r" if rows else text)
        stream.flush()

    def _open(self) -> None:
        _in_use.append(self)
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is self._terminal or _lead_to_one_terminal(stream, self._terminal):
                TolerantStream(stream).flush()
                self._replaced[name] = _Above(self, stream)
                setattr(sys, name, self._replaced[name])

    def _close(self) -> None:
        for name, above in self._replaced.items():
            above.flush()
            if getattr(sys, name) is above:  # and not what a script put there meanwhile
                setattr(sys, name, above.replaced)
        self._replaced, self._mid_line = {}, False
        _in_use.remove(self)  # last: a child that is forked meanwhile needs a lock of its own


class _Above:
    """What `sys.stdout` or `sys.stderr` is while rows are drawn: whole lines appear above them."""

    def __init__(self, foot: Foot, replaced: TextIO) -> None:
        self.foot, self.replaced = foot, replaced
        self._stream = TolerantStream(replaced)
        self._held = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replaced, name)

    def write(self, text: str) -> int:
        with self.foot.lock:
            self._held += text  # `print` writes each of its words by itself
            # Who keeps this stream after the rows are gone may never flush it.
            at_once = self._held.endswith("\r") or not self.foot.in_use
            end = len(self._held) if at_once else self._held.rfind("\n") + 1
            if end:
                whole, self._held = self._held[:end], self._held[end:]
                self.foot.write(self._stream, whole)
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        with self.foot.lock:
            text, self._held = self._held, ""
            if text:
                self.foot.write(self._stream, text)

    def forget(self) -> None:
        self._held = ""


def _lead_to_one_terminal(one: Any, other: Any) -> bool:
    try:
        return is_terminal(one) and os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError, AttributeError):
        return False


_in_use: list[Foot] = []


def _forked() -> None:
    for foot in _in_use:
        foot.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
