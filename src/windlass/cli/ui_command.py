"""`windlass ui`: serve the page of the runs below a folder, which follows those that go on."""

from __future__ import annotations

import secrets

from windlass.cli.command_line import CommandParser, local_place
from windlass.cli.ui_server import naming_a_slow_disk, serve
from windlass.core.errors import ConfigError, Problem
from windlass.core.output import STDOUT, say
from windlass.dist.listening import is_loopback

_PORT = 6070


def ui_command(words: list[str]) -> int:
    options = build_parser().parse_args(words)
    with naming_a_slow_disk(options.folder):
        exists, is_folder = options.folder.exists(), options.folder.is_dir()
    if exists and not is_folder:
        raise ConfigError(Problem("DIR", str(options.folder), "is not a folder"))
    if not exists:  # a run that is starting makes it
        say(f"{options.folder} does not exist yet; its runs are listed once it does", error=True)
    if not 0 <= options.port < 1 << 16:
        raise ConfigError(
            Problem("--port", str(options.port), "must be between 0 and 65535; 0 for a free one")
        )
    token = "" if is_loopback(options.host) else secrets.token_urlsafe(24)
    serve(options.folder, options.host, options.port, token, announce)
    return 0


def announce(address: str) -> None:
    # Not `say`, which hides tokens: this one is made for the person who reads it.
    STDOUT.write(f"serving {address}   (Ctrl-C ends it; the files of the runs are only read)\n")
    STDOUT.flush()


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass ui",
        description="Serve the page of the runs below a folder, which is only read: curves, time line, checkpoints, "
        "settings. It follows runs that go on.",
        example="windlass ui runs",
    )
    parser.add_argument(
        "folder", metavar="DIR", type=local_place, help="a run's folder, or one with runs below it"
    )
    parser.add_argument(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="by default 127.0.0.1, which this machine alone reaches; for another one, the printed address has a token "
        "that every request needs",
    )
    parser.add_argument(
        "--port", metavar="PORT", type=int, default=_PORT, help=f"by default {_PORT}; 0 for a free one"
    )
    return parser
