"""The process that the launcher starts instead of `python script.py`: it runs the script, and records why it failed.

    python -P -m windlass.cli.launching.worker [-m | --exec] SCRIPT [ARGUMENT ...]

The script runs as if Python had started it: as `__main__`, with its own folder first on the path. That folder is added
here: without `-P` the current one would be first, and its `queue.py` imported instead of the standard library's. Before
that the process binds itself to its cores; after an exception it writes the calls that led to it, with the step, into
the file that torch's launcher reads. With `--exec` SCRIPT is any program, which replaces this process. Nothing heavy is
imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from windlass.cli.command_line import ERROR_FILE_VARIABLE, EXIT_INTERRUPTED
from windlass.core.activity import Opening
from windlass.core.errors import Preempted
from windlass.core.job_signals import end_with_parent
from windlass.core.lazy import import_torch_uncollected
from windlass.core.output import say, shown
from windlass.core.package_remarks import mute_import_remarks
from windlass.core.tracebacks import calls_of, printed, report_uncaught
from windlass.core.world import world_from_environment
from windlass.dist.beacon import END, END_ALONE, LEFT, beacon
from windlass.dist.watchdog import watch

# Set by the launcher: "1" binds each process to its share of the machine's cores.
BIND_VARIABLE = "WINDLASS_BIND_CORES"
# Set by the launcher: its process id.
LAUNCHER_VARIABLE = "WINDLASS_LAUNCHER"


def main(words: Sequence[str]) -> None:
    """Run the script of a command line."""
    if os.environ.get(BIND_VARIABLE) == "1":
        bind_cores(os.environ)
    if LAUNCHER_VARIABLE in os.environ:
        # Removed, since programs that the script starts have another parent.
        end_with_parent(int(os.environ.pop(LAUNCHER_VARIABLE)))
    if words[0] == "--exec":
        execute(words[1:])
    watch(os.environ)
    mute_import_remarks()
    import_torch_uncollected()
    as_module, script = (True, words[1]) if words[0] == "-m" else (False, words[0])
    sys.argv[:] = words[1:] if as_module else words[:]
    if not os.environ.get("PYTHONSAFEPATH"):  # the flag is set in any case
        sys.path.insert(0, os.getcwd() if as_module else str(Path(script).resolve().parent))
    try:
        with Opening(f"starting {shown(Path(script).name)}"):  # its imports alone take seconds
            if as_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    except Preempted as leaving:
        beacon().call(LEFT, leaving.step)
        raise
    except KeyboardInterrupt:
        if world_from_environment().is_main:
            raise
        sys.exit(EXIT_INTERRUPTED)  # one process shows where it was
    except Exception as error:
        # The frames of this file and of runpy are the same in every traceback, and not the user's.
        error.__traceback__ = of_the_script(error.__traceback__)
        record(error, os.environ)
        # As after any uncaught exception; torch puts the rank before each line.
        if sys.excepthook in (sys.__excepthook__, report_uncaught):
            say(printed(error), error=True, end="")
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    except SystemExit as leaving:
        # With another code the process failed, and the last mark tells where.
        if not leaving.code:
            mark_end()
        raise
    mark_end()


def mark_end() -> None:
    """Write the last mark of a script that ended without an error."""
    groups = sys.modules.get("torch.distributed.distributed_c10d")
    # Never reset, since it names the groups: above 0 even if the group is closed by now.
    joined = groups is not None and groups._world.group_count > 0
    beacon().call(END if joined or os.environ.get("WORLD_SIZE", "1") == "1" else END_ALONE)


def of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the script on, without the frames that start it."""
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        rest = rest.tb_next
    return rest or trace


def cores_of(local_rank: int, local_size: int, cores: Sequence[int]) -> list[int]:
    """Return the share of one process, a run of neighbours; all cores if there are too few."""
    each = len(cores) // local_size
    return list(cores[local_rank * each : (local_rank + 1) * each]) if each else list(cores)


def bind_cores(environ: Mapping[str, str]) -> None:
    """Bind this process, and those that it will start, to its share of the cores (Linux only)."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        mine = cores_of(int(environ["LOCAL_RANK"]), int(environ["LOCAL_WORLD_SIZE"]), cores)
        os.sched_setaffinity(0, mine)


def execute(command: Sequence[str]) -> NoReturn:
    """Replace this process by another program, which ends with the launcher too."""
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        sys.exit(f"windlass launch: {command[0]} cannot be started: {error.strerror}")


def record(error: Exception, environ: Mapping[str, str]) -> None:
    """Write the exception to the file that the launcher reads, in the format of torch's own error files.

    A failure to write is ignored: the traceback is printed in any case.
    """
    path = environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return
    mark = beacon().mark()
    extra = {
        "py_callstack": calls_of(error),
        "timestamp": str(int(time.time())),  # torch reads whole seconds
        "monotonic": time.monotonic(),  # the same clock in all processes of a machine
        "step": mark.step,
        "call": mark.call,
    }
    message = shown(f"{type(error).__name__}: {_text_of(error)}")
    with contextlib.suppress(OSError):
        Path(path).parent.mkdir(parents=True, exist_ok=True)  # the temporary folder may have been cleared
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), "utf-8")


def _text_of(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # of the exception's own `__str__`
        return "(its message cannot be shown)"


if __name__ == "__main__":
    main(sys.argv[1:])
