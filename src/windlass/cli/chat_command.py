"""`windlass chat`: talk to a trained model on the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from windlass.cli.command_line import CommandParser, standard_input, typed_text
from windlass.cli.generate_command import add_options
from windlass.core.activity import Activity
from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.output import is_terminal, say

if TYPE_CHECKING:
    from windlass.cli.text_writer import Message, Writer

_HELP = "Ctrl-C stops an answer, Ctrl-D ends the chat, /clear begins a new one."
_PROMPT = "> "


def chat_command(words: list[str]) -> int:
    options = build_parser().parse_args(words)
    system = typed_text(lambda: options.system or "")
    with Activity("loading the model"):
        from windlass.cli.text_writer import Writer

        writer = Writer(options)
    if writer.tokenizer.chat_template is None:
        fix = "its tokenizer has no chat template, so it was not trained on conversations; use windlass generate"
        raise ConfigError(Problem("MODEL", options.model, fix))
    begin: list[Message] = [{"role": "system", "content": system}] if system else []
    if is_terminal(sys.stdin):
        with contextlib.suppress(ImportError):  # not on every system
            import readline  # noqa: F401  (makes input() a line that can be edited)
        say(_HELP)
    messages = list(begin)
    with contextlib.suppress(EOFError):
        while True:
            line = _read()
            if line == "/clear":
                messages = list(begin)
            elif line:
                messages = _answer(writer, [*messages, {"role": "user", "content": line}])
    return 0


def _read() -> str:
    """Return the next line. Raises EOFError at the end of the input, and for Ctrl-C on a terminal."""
    if not is_terminal(sys.stdin):
        line = typed_text(standard_input().readline)
        if not line:
            raise EOFError
        return line.strip()
    try:
        return typed_text(lambda: input(_PROMPT)).strip()
    except (EOFError, KeyboardInterrupt):
        say()
        raise EOFError from None


def _answer(writer: Writer, messages: list[Message]) -> list[Message]:
    """Print the model's turn, and return the messages with it; without the last one if it was not answered."""
    try:
        text = writer.write("", messages)
    # The unanswered turn goes too: a chat template wants turns of the two in alternation.
    except KeyboardInterrupt:
        say("(stopped)", error=True)
        return messages[:-1]
    except DataError as error:
        say(f"{error} (/clear begins a new chat)", error=True)
        return messages[:-1]
    return [*messages, {"role": "assistant", "content": text}]


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass chat",
        description=f"Talk to a trained model, which answers in its chat template. {_HELP}",
        example="windlass chat runs/sft-lora",
    )
    add_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message, at the beginning of each chat")
    return parser
