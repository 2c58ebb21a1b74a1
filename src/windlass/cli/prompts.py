"""Questions on a terminal or a pipe, where each answer is a line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO


def ask_until(read: Callable[[str], Any], ask: Callable[[], str], complain: Callable[[str], None]) -> Any:
    """Ask until `read` accepts the answer, and return what it returns."""
    while True:
        try:
            return read(ask())
        except ValueError as error:
            complain(f"  {error}")


class LinePrompter:
    """Prints a question and reads one line. An empty answer, or the end of the input, selects the default."""

    def __init__(self, source: TextIO | None = None, sink: TextIO | None = None) -> None:
        self._source, self._sink = source or sys.stdin, sink or sys.stdout

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
