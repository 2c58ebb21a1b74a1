"""Exit codes, names, options and the parser that the commands share."""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from windlass.core.errors import ConfigError, DataError, Problem, WindlassError, did_you_mean
from windlass.core.locations import at_home, is_url
from windlass.core.output import one_line, say, say_json

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
# Set by a launcher: the file in which a process of a job records why it failed, in the format of torch.
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
# Names of torch's dtypes on the command line.
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


def program() -> list[str]:
    """Return the words that start this command: `windlass`, or what was typed if that is not on PATH."""
    typed = Path(sys.argv[0])
    if typed.name == "__main__.py" and typed.parent.name == "windlass":
        return [sys.executable, "-m", "windlass"]
    on_path = shutil.which("windlass")
    # Another installation on PATH is another version, with which a command to copy would not resume the run.
    is_other = on_path is None or not typed.exists() or not os.path.samefile(on_path, typed)
    return [str(typed)] if typed.stem == "windlass" and is_other else ["windlass"]


class _Paragraphs(argparse.HelpFormatter):
    """Fits descriptions to the terminal by paragraphs; indented ones are printed as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return (
            "\n\n".join(part if part.startswith(" ") else textwrap.fill(part, width) for part in paragraphs)
            + "\n"
        )


class CommandParser(argparse.ArgumentParser):
    """Reports an error in one line: what is wrong, the nearest known word, and an example. Flags are not abbreviated,
    so that a command that works keeps its meaning when a flag is added.

    Attributes:
        example: a command that works, for errors about missing words.
    """

    # "argument COMMAND: invalid choice: 'trian' (choose from 'train', 'run')", in the spellings of all versions
    _CHOICE = re.compile(
        r"argument (?P<name>.+): invalid choice: (?P<word>.+) \(choose from (?P<known>.+)\)", re.DOTALL
    )

    def __init__(self, *, example: str = "", **options: Any) -> None:
        super().__init__(**{"formatter_class": _Paragraphs, "allow_abbrev": False, **options})
        self.example = example

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        if choice := self._CHOICE.fullmatch(message):
            word, known = choice["word"].strip("'"), re.findall(r"[\w.-]+", choice["known"])
            is_flag = choice["name"].startswith("-")
            what = (
                f"{choice['name']}={word}: must be one of" if is_flag else f"unknown command {word!r}; known:"
            )
            message = f"{what} {', '.join(known)}{did_you_mean(word, known)}"
        elif message.startswith("the following arguments are required: "):
            message = f"{message.partition(': ')[2]} missing" + (
                f"; example: {self.example}" if self.example else ""
            )
        elif not message.startswith("argument "):  # a flag that is known, with a wrong value
            unknown = [word.partition("=")[0] for word in message.partition("; ")[0].split()]
            flags = self.flags()
            message += "".join(
                did_you_mean(word, flags) for word in unknown if word.startswith("-") and word not in flags
            )
        self.exit(EXIT_USER_ERROR, f"{self.prog}: {message}; see: {self.prog} --help\n")

    def flags(self) -> list[str]:
        """Return the flags that the help lists."""
        return [flag for action in self.arguments() for flag in action.option_strings]

    def arguments(self) -> list[argparse.Action]:
        """Return the arguments that the help lists."""
        return [action for action in self._actions if action.help != argparse.SUPPRESS]


def add_script(parser: CommandParser) -> None:
    """Add a script and its arguments, the last ones of a command."""
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments"
    )
    rest.required = False  # argparse would report it as missing with the script


def check_script(path: str) -> None:
    """Raise ConfigError if there is no such file."""
    if not os.path.isfile(path):
        raise ConfigError(Problem("SCRIPT", path, "there is no such file"))


def local_place(word: str) -> Path:
    """The type of an argument that is a path of this machine. Raises WindlassError for a URL, which would name a folder
    here as a path.
    """
    if is_url(word):
        raise WindlassError(f"{word} is a URL, and this command reads and writes on this machine alone")
    return at_home(word)


def standard_input() -> TextIO:
    """Return standard input; an empty one if it is closed, as for a job that a service starts."""
    return sys.stdin or io.StringIO()


def typed_text(read: Callable[[], str]) -> str:
    """Return the text that `read` returns. Raises DataError if it was not typed in UTF-8."""
    try:
        text = read()
        # In some locales Python keeps such bytes as surrogates, at which tokenizers fail.
        text.encode()
    except UnicodeError:
        raise DataError("the text is not UTF-8; convert it, such as with iconv") from None
    return text


def names_and_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words without and with an equals sign; the path of a file may have one."""
    overrides = [word for word in words if "=" in word and not os.path.isfile(word)]
    return [word for word in words if word not in overrides], overrides


def folders_below(root: Path) -> Iterator[Path]:
    """Yield a folder and those below it, sorted; hidden ones and those of checkpoints are not searched. Links are
    followed out of the folder: each one below it is yielded once. One that cannot be listed is reported.
    """
    top, outside = os.path.realpath(root), set()

    def is_new(path: str) -> bool:
        real = os.path.realpath(path)
        if Path(real).is_relative_to(top):
            # By its own name, and not by that of a link to it.
            return not os.path.islink(path)
        # Up to the folder itself, a link would list what is beside it.
        known = real in outside or Path(top).is_relative_to(real)
        outside.add(real)
        return not known

    def report(error: OSError) -> None:
        say(one_line(f"{error.filename} cannot be searched: {error.strerror}"), error=True)

    for place, folders, _ in os.walk(root, onerror=report, followlinks=True):
        if not os.access(place, os.X_OK):  # its names are listed, and nothing of them can be read
            report(PermissionError(errno.EACCES, os.strerror(errno.EACCES), place))
            folders.clear()
            continue
        yield Path(place)
        # In place, because `os.walk` reads this list; sorted, because systems list folders in any order.
        folders[:] = [
            name
            for name in sorted(folders)
            if not name.startswith((".", "checkpoint-", "replaced-")) and is_new(os.path.join(place, name))
        ]


def answer(options: argparse.Namespace, facts: Any, lines: Iterable[str], code: int = 0) -> int:
    """Print facts for programs if `--json` asks for them, else lines for people; return the exit code."""
    if options.json:
        say_json(facts)
    else:
        for line in lines:
            say(line)
    return code


def amount(number: int, name: str) -> str:
    """Return a number with its noun, which gets an s unless there is one of it."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def in_words(size: float) -> str:
    """Return bytes in the largest unit that is at most the size."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:,.4g} TiB"
