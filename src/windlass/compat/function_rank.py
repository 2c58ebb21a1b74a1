"""One process of `notebook_launcher` or `debug_launcher`: a new interpreter that calls the function in a file.

It is run as a file, with the folder of what it shall call as its argument.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FUNCTION_FILE = "function.bin"
PLACE_FILE = "place.json"


def write_call(folder: Path, packed: bytes, threads: int) -> list[str]:
    """Write what a process shall call into `folder`; return the arguments of the interpreter that does it, which this
    process has to start.

    Args:
        packed: see `pack_call`.
        threads: of torch on the CPU.
    """
    # Python itself passes over an entry that is not text, such as a path object.
    path = [entry for entry in sys.path if isinstance(entry, str)]
    place = {"path": path, "argv": sys.argv, "threads": threads, "launcher": os.getpid()}
    (folder / FUNCTION_FILE).write_bytes(packed)
    (folder / PLACE_FILE).write_text(json.dumps(place), "utf-8")
    # -P: the folder of this file is not one of modules.
    return ["-P", *(f"-W{option}" for option in sys.warnoptions), __file__, str(folder)]


def run_call(folder: Path) -> None:
    """Call the function in `folder`, in the place where it was packed; a failure is written for the launcher."""
    place = json.loads((folder / PLACE_FILE).read_text("utf-8"))
    sys.path[:] = place["path"]
    sys.argv[:] = place["argv"]
    from windlass.core.job_signals import end_with_parent

    end_with_parent(place["launcher"])
    # What the function finds in `__main__` is sent with it, but for what Python gives each module that it runs: the
    # compiler and custom functions of torch look that up among a function's globals.
    sys.modules["__main__"] = main = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        record(_call)(folder, place)
    except Exception:  # recorded: the launcher reports it, once
        sys.exit(1)


def _call(folder: Path, place: dict[str, Any]) -> None:
    import torch

    from windlass.compat.function_transfer import unpack_call

    torch.set_num_threads(place["threads"])
    function, args = unpack_call((folder / FUNCTION_FILE).read_bytes())
    function(*args)


if __name__ == "__main__":
    run_call(Path(sys.argv[1]))
