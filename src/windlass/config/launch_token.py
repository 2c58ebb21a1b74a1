"""The token with which the machines of a job prove that they belong to it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from pathlib import Path

from windlass.config.launch_plan import LaunchPlan
from windlass.config.parallel import rows_launch as rows
from windlass.core.errors import ConfigError, Problem

TOKEN_VARIABLE = "WINDLASS_RDZV_TOKEN"
_LEAST_LENGTH = 16


def read_token(path: str | None, environ: Mapping[str, str]) -> str | None:
    """The token in the file at `path`, else that of the variable; None if neither is given. Raises ConfigError if the
    file cannot be read, or the token is too short to be a secret.
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
        return f"the token in {path}", Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(flag, path, f"cannot be read: {error}")) from None


def token_problems(plan: LaunchPlan, environ: Mapping[str, str]) -> Iterator[Problem]:
    """A job that other machines can reach needs a token."""
    if plan.engine != "local" or plan.machines == 1:
        return
    try:
        token = read_token(plan.token_file, environ)
    except ConfigError as error:
        yield from error.problems
        return
    if token is None and plan.main_address is not None and not reachable_from_here_only(plan.main_address):
        yield Problem(f"--{rows.MAIN_ADDRESS.flags[0]}", plan.main_address, NEEDS_TOKEN)


NEEDS_TOKEN = (
    "is reachable from other machines, which could join the job: set the same secret on every "
    f"machine, as {TOKEN_VARIABLE} or in a file with --{rows.TOKEN_FILE.flags[0]} (`openssl rand -hex 32` makes one)"
)


def reachable_from_here_only(address: str) -> bool:
    """Return True for localhost and loopback numbers."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
