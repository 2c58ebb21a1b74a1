"""A mistake that users make, what they read after it, and the words that must be in it."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.said import listening

from windlass.cli.main import main
from windlass.core.tracebacks import report_uncaught

LINES = 10
"""An answer is looked for in so many of the last lines that were printed."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake.

    Attributes:
        name: what the user did.
        words: what the answer must hold: what is wrong, where, and the fix. Several in a tuple: any of them.
        make: does it, in the folder that it is given.
        warns: the run goes on, and the answer is a warning before its first update.
    """

    name: str
    words: tuple[str | tuple[str, ...], ...]
    make: Callable[[Path], object]
    warns: bool = False

    def answer(self, folder: Path) -> Answer:
        """Make the mistake, and return what its user reads."""
        before = Path.cwd()
        os.chdir(folder)
        try:
            with listening() as said, contextlib.redirect_stdout(io.StringIO()):
                return _answer(self.make, folder, said)
        finally:
            os.chdir(before)


class Mistakes(list[Mistake]):
    """Mistakes, in the order in which they were added."""

    def add(
        self, name: str, *words: str | tuple[str, ...], warns: bool = False
    ) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
        """Return a decorator of a function that makes the mistake of this name; the rest is as in `Mistake`."""

        def added(make: Callable[[Path], object]) -> Callable[[Path], object]:
            self.append(Mistake(name, words, make, warns))
            return make

        return added


@dataclass(frozen=True, slots=True)
class Answer:
    """What a user reads after a mistake.

    Attributes:
        text: what is printed when an error ends a script, or by a command; after a warning all that was logged.
        raised: an error ended the script, or the command's exit code was not 0.
    """

    text: str
    raised: bool

    def faults(self, mistake: Mistake) -> list[str]:
        """What is wrong with the answer; empty if it is a good one."""
        found = []
        if self.raised == mistake.warns:
            found.append("an error ended it" if self.raised else "no error ended it")
        lines = self.text.strip().splitlines()
        if not mistake.warns and len(lines) > LINES:
            found.append(f"{len(lines)} lines")
        for words in mistake.words:
            options = (words,) if isinstance(words, str) else words
            if not any(option in self.text for option in options):
                found.append(f"does not name {' or '.join(map(repr, options))}")
        return found


def command(*words: str) -> Callable[[Path], Answer]:
    """Run `windlass` with these words."""

    def run(folder: Path) -> Answer:
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            try:
                code = main(words)
            except SystemExit as ended:
                code = int(ended.code or 0)
        return Answer(printed.getvalue(), code != 0)

    return run


def _read_after(error: Exception) -> str:
    """What is on the terminal of a script that `error` ended."""
    printed = io.StringIO()
    trace = error.__traceback__ and error.__traceback__.tb_next  # from the function that makes the mistake on
    with contextlib.redirect_stderr(printed):
        report_uncaught(type(error), error, trace)
    return printed.getvalue()


def _answer(make: Callable[[Path], object], folder: Path, said: list[str]) -> Answer:
    try:
        done = make(folder)
    except Exception as error:
        return Answer(_read_after(error), raised=True)
    return done if isinstance(done, Answer) else Answer("\n".join(said), raised=False)
