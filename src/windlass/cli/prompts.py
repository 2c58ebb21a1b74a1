"""Questions on a terminal, where arrow keys choose, and from a pipe, where each answer is a line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

_UP, _DOWN, _ENTER = ("\x1b[A", "\x1bOA", "k"), ("\x1b[B", "\x1bOB", "j"), ("\r", "\n")
_STOP = ("", "\x03", "\x04")  # the terminal is gone, Ctrl-C, Ctrl-D


class Prompter(Protocol):
    """Asks one thing at a time; an empty answer takes the default."""

    def ask(self, question: str, default: str) -> str: ...

    def choose(self, question: str, choices: Sequence[str], default: str) -> str: ...


def ask_until(read: Callable[[str], Any], ask: Callable[[], str], complain: Callable[[str], None]) -> Any:
    """What `read` makes of the first answer that it can read; after any other it is asked again."""
    while True:
        try:
            return read(ask())
        except ValueError as error:
            complain(f"  {error}")


class LinePrompter:
    """Plain lines: the question is printed, one line is read. At the end of the input every default is taken."""

    def __init__(self, source: TextIO, sink: TextIO) -> None:
        self._source, self._sink = source, sink

    def ask(self, question: str, default: str) -> str:
        print(f"{question} [{default}]: ", end="", file=self._sink, flush=True)
        answer = self._source.readline()
        if not self._source.isatty():
            print(file=self._sink)  # nobody pressed Enter on the screen
        return answer.strip() or default

    def choose(self, question: str, choices: Sequence[str], default: str) -> str:
        listed = ", ".join(f"{number}) {choice}" for number, choice in enumerate(choices))
        answer: str = ask_until(
            lambda said: _chosen(said, choices),
            lambda: self.ask(f"{question} {listed}", default),
            self._complain,
        )
        return answer

    def _complain(self, text: str) -> None:
        print(text, file=self._sink)


def _chosen(said: str, choices: Sequence[str]) -> str:
    """The choice meant: by itself, or by its number."""
    if said in choices:
        return said
    if said.isdigit() and int(said) < len(choices):
        return choices[int(said)]
    raise ValueError(f"must be one of {', '.join(choices)}, or a number from 0 to {len(choices) - 1}")


class ArrowPrompter(LinePrompter):
    """A terminal: choices are walked with the arrow keys (or j and k) or their numbers, and taken with Enter."""

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
    """Pressed keys, one by one; an arrow comes as one. Keys that follow stay for the next question."""
    while True:
        key = os.read(descriptor, 1).decode(errors="ignore")
        if key == "\x1b":
            key += os.read(descriptor, 2).decode(errors="ignore")
        if key in _STOP:
            raise KeyboardInterrupt
        yield key


@contextmanager
def _key_by_key(descriptor: int) -> Iterator[None]:
    """Keys reach the program when they are pressed, and are not shown."""
    import termios

    before = termios.tcgetattr(descriptor)
    now = termios.tcgetattr(descriptor)
    now[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)
    termios.tcsetattr(descriptor, termios.TCSADRAIN, now)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def prompter(source: TextIO | None = None, sink: TextIO | None = None) -> Prompter:
    """The prompter that fits where questions are asked: arrow keys need a terminal on both sides."""
    source, sink = source or sys.stdin, sink or sys.stdout
    arrows = source.isatty() and sink.isatty() and os.name == "posix"
    return ArrowPrompter(source, sink) if arrows else LinePrompter(source, sink)
