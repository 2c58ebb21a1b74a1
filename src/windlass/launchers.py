"""Run a function in several processes, started from a notebook or a running program.

Each process is a new interpreter, whatever this one has done before: forks of a process that has used threads, a device
or a process group can crash or hang. The function and what it uses are sent to them; scripts are started with
`windlass launch` instead.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass.cli.launching.failure_report import lost_peers
from windlass.cli.launching.launch_checks import TOKEN_VARIABLE, notes_without_token, read_token
from windlass.compat.refused_names import WHY
from windlass.config.parallel.keys import Settings
from windlass.config.parallel.sources import OWN_VARIABLE, to_environment
from windlass.config.parallel.table import KEYS
from windlass.core.device import visible_devices
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.core.lazy import loader_of
from windlass.core.logs import get_logger, warn_once
from windlass.dist.elastic import quiet_elastic
from windlass.dist.variables import environment_of

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

    from windlass.dist.rendezvous import Meeting

_BACKEND = "windlass"
logger = get_logger(__name__)
__getattr__ = loader_of(__name__, {}, WHY)


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run `function(*args)` in several processes, and return when all have ended.

    Args:
        function: what each process runs.
        args: its arguments.
        num_processes: on this machine; None for one per accelerator. 1 runs the function in this process.
        mixed_precision: "no", "fp16", "bf16" or "fp8", for an `Accelerator()` made in `function`.
        use_port: port of the rendezvous. On one machine a free port is used instead.
        master_addr: address of the rendezvous.
        node_rank: the number of this machine; the same call runs on each machine.
        num_nodes: number of machines.

    The arguments from `rdzv_backend` on are those of torch's elastic launcher.

    Raises:
        ConfigError: the processes cannot be started, or the function uses a value that cannot be sent to them.
        RuntimeError: a process failed; with the traceback of the first.
    """
    import torch

    count = visible_devices() or 1 if num_processes is None else num_processes
    settings = _settings(
        mixed_precision=mixed_precision, max_restarts=max_restarts, monitor_interval=monitor_interval
    )
    refuse([*settings.problems, *_problems(function, args, count, node_rank, num_nodes, rdzv_backend)])
    if count * num_nodes == 1:
        with _in_environment(settings):
            function(*args)
        return
    # Without a device the processes compute on the cores themselves, which they share.
    threads = torch.get_num_threads() if visible_devices() else 1
    endpoint = rdzv_endpoint or f"{master_addr}:{use_port}"
    meeting = _meeting(num_nodes, node_rank, rdzv_backend, endpoint, rdzv_conf or {}, rdzv_id)
    _launch(
        _Call(function, args, settings, threads),
        count,
        meeting,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        log_line_prefix_template=log_line_prefix_template,
    )


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run `function(*args)` in several processes on the CPU, for a trial. Raises ConfigError if the function uses a
    value that cannot be sent to new processes, and RuntimeError if a process failed, with the traceback of the first.
    """
    refuse(_problems(function, args, num_processes, 0, 1, "c10d"))
    settings = Settings()
    settings.record(KEYS["cpu"], True, "debug_launcher", "flag", implicit=False)
    _launch(_Call(function, args, settings, threads=1), num_processes, _alone(), max_restarts=0)


class _Call(NamedTuple):
    """What each process calls, and how it is set up for it."""

    function: Callable[..., Any]
    args: Sequence[Any]
    settings: Settings
    threads: int

    def write(self, folder: Path) -> list[str]:
        """Write the call into `folder`; return the arguments of the interpreter that carries it out."""
        from windlass.compat.function_rank import write_call
        from windlass.compat.function_transfer import pack_call

        return write_call(folder, pack_call(self.function, tuple(self.args)), self.threads)


def _settings(**given: Any) -> Settings:
    """Options of `notebook_launcher`, read as those of a launch file are."""
    keys = {"mixed_precision": "precision"}
    settings = Settings()
    for name, value in given.items():
        key = KEYS[keys.get(name, f"launch.{name}")]
        settings.record(key, value, f"notebook_launcher({name}=)", "flag", implicit=False)
    return settings


@contextlib.contextmanager
def _in_environment(settings: Settings) -> Iterator[None]:
    """Set the variable from which an `Accelerator`, here or in a process started here, reads the settings, and remove
    the job's token, which only launchers need.
    """
    with environment_of(**{OWN_VARIABLE: to_environment(settings), TOKEN_VARIABLE: None}):
        yield


def _problems(
    function: object, args: object, count: int, node_rank: int, num_nodes: int, backend: str
) -> Iterator[Problem]:
    if not callable(function):
        yield Problem("function", function, "must be a function: its name, without a call")
    elif inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        yield Problem("function", function, "must be a plain function: a call of this one runs nothing of it")
    if not isinstance(args, Sequence) or isinstance(args, str):
        yield Problem("args", args, "must be a tuple of the function's arguments; of one: (argument,)")
    if not isinstance(count, Integral) or count < 1:
        yield Problem("num_processes", count, "must be a whole number, 1 or more")
    if not isinstance(num_nodes, Integral) or num_nodes < 1:
        yield Problem("num_nodes", num_nodes, "must be a whole number, 1 or more")
    elif not isinstance(node_rank, Integral) or not 0 <= node_rank < num_nodes:
        yield Problem("node_rank", node_rank, f"must lie in 0..{num_nodes - 1} for num_nodes={num_nodes}")
    if backend not in ("static", "c10d"):
        yield Problem("rdzv_backend", backend, "must be static or c10d")


def _alone() -> Meeting:
    """Return the rendezvous of one machine: a free port, so that two launches cannot meet by mistake."""
    from windlass.dist.rendezvous import Meeting

    return Meeting("127.0.0.1", 0, 1, 0, True, uuid.uuid4().hex, 0)


def _meeting(
    nodes: int, node: int, backend: str, endpoint: str, options: Mapping[str, Any], run: str
) -> Meeting:
    """Return the rendezvous of the machines; a single machine has one of its own. Raises ConfigError if the endpoint is
    not HOST:PORT, or the token is too short.
    """
    from windlass.cli.launching.local import rendezvous_options
    from windlass.dist.listening import can_listen
    from windlass.dist.rendezvous import Meeting

    if nodes == 1:
        return _alone()
    address, _, port = endpoint.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(Problem("rdzv_endpoint", endpoint, "must be HOST:PORT"))
    # The rank is that of torch's static rendezvous, which other launchers pass here too.
    _, wait = rendezvous_options({k: v for k, v in options.items() if k != "rank"}, "rdzv_conf['{}']")
    token = read_token(None, os.environ)
    for note in notes_without_token(address, token):
        warn_once(logger, note)
    static = backend == "static"
    hosts = node == 0 if static else can_listen(address, int(port))
    return Meeting(address, int(port), nodes, node if static else None, hosts, run, wait, token)


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    from windlass.dist.machines import meet

    return meet(parameters.get("meeting"))


def _launch(call: _Call, count: int, meeting: Meeting, **options: Any) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    quiet_elastic()
    # Torch's launcher finds a rendezvous by the name of its backend.
    rendezvous_handler_registry.register(_BACKEND, _handler)
    config = LaunchConfig(
        min_nodes=meeting.machines,
        max_nodes=meeting.machines,
        nproc_per_node=count,
        run_id=meeting.run_id,
        rdzv_endpoint=f"{meeting.address}:{meeting.port}",
        rdzv_backend=_BACKEND,
        rdzv_configs={"meeting": meeting},
        **options,
    )
    # Only this user may read the folder.
    with tempfile.TemporaryDirectory(prefix="windlass-launch-") as folder, _signals_restored():
        arguments = call.write(Path(folder))
        try:
            with _in_environment(call.settings):
                elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            rank_number, failure = _cause(error.failures)
            text = f"rank {rank_number} failed (exit code {failure.exitcode}):\n\n{_traceback(failure)}"
            raise RuntimeError(text) from None


def _cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first, and how. Times are whole seconds, in which others lose their peer and fail."""
    return min(failures.items(), key=lambda found: (lost_peers(_message(found[1])), found[1].timestamp))


def _message(failure: ProcessFailure) -> str:
    """Return the message of the exception, without its traceback."""
    message = failure.error_file_data.get("message")
    return str(message.get("message") if isinstance(message, dict) else message or failure.message)


def _traceback(failure: ProcessFailure) -> str:
    """Return the traceback that the process wrote, else the signal that ended it, or where to look."""
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        return str(message.get("extraInfo", {}).get("py_callstack") or message.get("message"))
    return str(failure.message) if failure.exitcode < 0 else "It wrote no traceback: see its output above."


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """Restore the handlers of the notebook, which torch's launcher replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            with contextlib.suppress(ValueError):  # outside the main thread none was replaced
                signal.signal(number, handler)
