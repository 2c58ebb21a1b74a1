"""Questions on a terminal, with arrow keys, and on a pipe, where each answer is a line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from windlass.core.terminal import can_redraw

_UP, _DOWN, _ENTER = ("\x1b[A", "\x1bOA", "k"), ("\x1b[B", "\x1bOB", "j"), ("\r", "\n")
_STOP = ("", "\x03", "\x04")  # the terminal is gone, Ctrl-C, Ctrl-D


def ask_until(read: Callable[[str], Any], ask: Callable[[], str], complain: Callable[[str], None]) -> Any:
    """Ask until `read` accepts the answer, and return what it returns."""
    while True:
        try:
            return read(ask())
        except ValueError as error:
            complain(f"  {error}")


class LinePrompter:
    """Prints a question and reads one line. An empty answer, or the end of the input, selects the default."""

    def __init__(self, source: TextIO, sink: TextIO) -> None:
        self._source, self._sink = source, sink

    def ask(self, question: str, default: str) -> str:
        print(f"{question} [{default}]: ", end="", file=self._sink, flush=True)
        answer = self._source.readline()
        if not self._source.isatty():
            print(file=self._sink)  # no Enter was echoed
        return answer.strip() or default

    def choose(self, question: str, choices: Sequence[str], default: str) -> str:
        listed = ", ".join(f"{number}) {choice}" for number, choice in enumerate(choices))
        answer: str = ask_until(
            lambda text: _chosen(text, choices),
            lambda: self.ask(f"{question} {listed}", default),
            lambda text: print(text, file=self._sink),
        )
        return answer


def _chosen(text: str, choices: Sequence[str]) -> str:
    """Return the choice with this name or number."""
    if text in choices:
        return text
    if text.isdigit() and int(text) < len(choices):
        return choices[int(text)]
    raise ValueError(f"must be one of {', '.join(choices)}, or a number from 0 to {len(choices) - 1}")


class ArrowPrompter(LinePrompter):
    """Selects a choice on a terminal with the arrow keys (or j and k) or numbers, and Enter."""

    def choose(self, question: str, choices: Sequence[str], default: str) -> str:
        at = choices.index(default)
        print(question, file=self._sink)
        self._draw(choices, at)
        with _key_by_key(self._source.fileno()):
            for key in _keys(self._source.fileno()):
                if key in _ENTER:
                    break
                at = _moved(at, key, len(choices))
                print(f"\x1b[{len(choices)}A", end="", file=self._sink)
                self._draw(choices, at)
        return choices[at]

    def _draw(self, choices: Sequence[str], at: int) -> None:
        for number, choice in enumerate(choices):
            mark = "➔" if number == at else " "
            print(f"\r\x1b[K {mark} {choice}", file=self._sink)
        self._sink.flush()


def _moved(at: int, key: str, count: int) -> int:
    if key in _UP:
        return (at - 1) % count
    if key in _DOWN:
        return (at + 1) % count
    return int(key) if key.isdigit() and int(key) < count else at


def _keys(descriptor: int) -> Iterator[str]:
    """Yield pressed keys, an arrow as one. Later keys are left for the next question."""
    while True:
        key = os.read(descriptor, 1).decode(errors="ignore")
        if key == "\x1b":
            key += os.read(descriptor, 2).decode(errors="ignore")
        if key in _STOP:
            raise KeyboardInterrupt
        yield key


@contextmanager
def _key_by_key(descriptor: int) -> Iterator[None]:
    """Deliver keys when they are pressed, without echo."""
    import termios

    before = termios.tcgetattr(descriptor)
    now = termios.tcgetattr(descriptor)
    now[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)
    termios.tcsetattr(descriptor, termios.TCSADRAIN, now)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def prompter(source: TextIO | None = None, sink: TextIO | None = None) -> LinePrompter:
    """Return the prompter for two streams: arrow keys require terminals, and one that can redraw."""
    source, sink = source or sys.stdin, sink or sys.stdout
    arrows = source.isatty() and can_redraw(sink) and os.name == "posix"
    return ArrowPrompter(source, sink) if arrows else LinePrompter(source, sink)
