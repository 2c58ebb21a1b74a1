"""tqdm's bar on one process per machine."""

from __future__ import annotations

from typing import Any

from windlass.compat.state import PartialState
from windlass.core.optional import require


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return tqdm's bar.

    Args:
        args, kwargs: arguments of tqdm.
        main_process_only: only the first process of each machine draws it.
    """
    if args and isinstance(args[0], bool):
        raise ValueError("pass main_process_only by keyword; the first argument of tqdm is an iterable")
    if main_process_only and not kwargs.get("disable"):
        kwargs["disable"] = not PartialState().is_local_main_process
    return require("tqdm.auto", "draw a bar").tqdm(*args, **kwargs)
