"""The token with which the machines of a job prove that they belong to it."""

from __future__ import annotations

import ipaddress
import os
import shlex
import stat
from collections.abc import Iterator, Mapping

from windlass.cli.launching.launch_plan import LaunchPlan
from windlass.config.parallel import rows_launch as rows
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger, warn_once

logger = get_logger(__name__)
TOKEN_VARIABLE = "WINDLASS_RDZV_TOKEN"
_LEAST_LENGTH = 16


def read_token(path: str | None, environ: Mapping[str, str]) -> str | None:
    """The token in the file at `path`, else that of the variable; None if neither is given. Warns about a file that
    other users can read. Raises ConfigError if it cannot be read, or the token is too short to be a secret.
    """
    name, text = (TOKEN_VARIABLE, environ.get(TOKEN_VARIABLE)) if path is None else _of_file(path)
    if text is None:
        return None
    token = text.strip()
    if len(token) < _LEAST_LENGTH:
        # The value itself is a secret, and is not shown.
        fix = f"must have at least {_LEAST_LENGTH} characters; `openssl rand -hex 32` makes one"
        raise ConfigError(Problem(name, f"{len(token)} characters", fix))
    return token


def _of_file(path: str) -> tuple[str, str]:
    flag = f"--{rows.TOKEN_FILE.flags[0]}"
    try:
        with open(path, encoding="utf-8") as file:
            text, mode = file.read(), os.fstat(file.fileno()).st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(flag, path, f"cannot be read: {error}")) from None
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        permissions = stat.S_IMODE(mode)
        advice = f"chmod 600 {shlex.quote(path)}"
        warn_once(
            logger, f"{flag}={path!r} is open to other users of this machine (mode {permissions:o}): {advice}"
        )
    return f"the token in {path}", text


def token_problems(plan: LaunchPlan, environ: Mapping[str, str]) -> Iterator[Problem]:
    """A token that is given must be a secret that can be read."""
    if _meets_others(plan):
        try:
            read_token(plan.token_file, environ)
        except ConfigError as error:
            yield from error.problems


def token_notes(plan: LaunchPlan, environ: Mapping[str, str]) -> list[str]:
    """Return the warning about a job that any machine on its network could join; an empty list if none can."""
    if not _meets_others(plan) or plan.main_address is None:
        return []
    return notes_without_token(plan.main_address, read_token(plan.token_file, environ))


def _meets_others(plan: LaunchPlan) -> bool:
    return plan.engine == "local" and plan.machines > 1


def notes_without_token(address: str, token: str | None) -> list[str]:
    """Return the warning about a job whose machines meet at `address`; an empty list if it needs none."""
    if token is not None or _reachable_from_here_only(address):
        return []
    return [
        f"the job has no secret: any machine that reaches {address} could join it, and read or change what it "
        f"computes. Set the same secret on every machine, as {TOKEN_VARIABLE} or in a file with "
        f"--{rows.TOKEN_FILE.flags[0]} (`openssl rand -hex 32` makes one)"
    ]


def _reachable_from_here_only(address: str) -> bool:
    """Return True for localhost and loopback numbers."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
