"""tqdm's bar, once per machine."""

from __future__ import annotations

from typing import Any

from windlass.accelerator.state import PartialState
from windlass.core.optional import require


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """tqdm's bar.

    Args:
        args, kwargs: what tqdm takes.
        main_process_only: only the first process of each machine draws it.
    """
    if args and isinstance(args[0], bool):
        raise ValueError("tqdm's first argument is what it counts; give main_process_only by name")
    if main_process_only and not kwargs.get("disable"):
        kwargs["disable"] = not PartialState().is_local_main_process
    return require("tqdm.auto", "draw a bar").tqdm(*args, **kwargs)
