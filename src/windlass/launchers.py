"""A function in many processes, started from a notebook or from a running program.

The processes are forks of this one: they find everything that was defined here, and nothing has to be sent to them.
Scripts are started with `windlass launch` instead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from windlass.config.launch_token import NEEDS_TOKEN, reachable_from_here_only, read_token
from windlass.config.parallel import KEYS, OWN_VARIABLE, Settings, to_environment
from windlass.core.errors import ConfigError, Problem
from windlass.dist.elastic import quiet_elastic

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
    from torch.distributed.launcher.api import LaunchConfig

    from windlass.dist.machines import Meeting

_BACKEND = "windlass"


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
        num_processes: on this machine; None takes one for each accelerator. One runs the function right here.
        mixed_precision: "no", "fp16" or "bf16", for an `Accelerator()` made in `function`.
        use_port, master_addr: where machines meet. On one machine a free port is taken instead.
        node_rank, num_nodes: this machine among all; the same call runs on each of them.
        rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id, max_restarts, monitor_interval, log_line_prefix_template: as
            torch's elastic launcher has them.

    Raises:
        ConfigError: the processes cannot be started as said, or this one has used a device already.
        RuntimeError: a process failed; carries the traceback of the first.
    """
    import torch

    count = _devices() or 1 if num_processes is None else num_processes
    settings = Settings()
    settings.record(
        KEYS["precision"], mixed_precision, "notebook_launcher(mixed_precision=)", "flag", implicit=False
    )
    problems = [*settings.problems, *_machine_problems(count, node_rank, num_nodes, rdzv_backend)]
    if count * num_nodes > 1:
        problems += _process_problems("notebook_launcher")
    if problems:
        raise ConfigError(problems)
    if count * num_nodes == 1:
        with _told(settings):
            function(*args)
        return
    threads = torch.get_num_threads() if _devices() else 1
    meeting = _alone() if num_nodes == 1 else _meeting(
        num_nodes, node_rank, rdzv_backend, rdzv_endpoint or f"{master_addr}:{use_port}", rdzv_conf or {}, rdzv_id
    )  # fmt: skip
    config = _config(
        count, meeting, max_restarts=max_restarts, monitor_interval=monitor_interval,
        log_line_prefix_template=log_line_prefix_template,
    )  # fmt: skip
    _launch(_Rank(function, tuple(args), settings, threads), config)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run `function(*args)` in processes on the CPU, to try out what it does when there are several.

    Raises:
        RuntimeError: a process failed; carries the traceback of the first.
    """
    problems = [
        *_machine_problems(num_processes, 0, 1, "c10d"),
        *_process_problems("debug_launcher", cpu=True),
    ]
    if problems:
        raise ConfigError(problems)
    settings = Settings()
    settings.record(KEYS["cpu"], True, "debug_launcher", "flag", implicit=False)
    _launch(
        _Rank(function, tuple(args), settings, threads=1),
        _config(num_processes, _alone()),
    )


class _Rank:
    """What each process runs. It is inherited with the fork, and never sent."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], settings: Settings, threads: int
    ) -> None:
        self._function = function
        self._args = args
        self._settings = settings
        self._threads = threads
        # torch's launcher names its jobs by it.
        self.__name__ = self.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)

    def __call__(self) -> None:
        import torch

        # A fork inherits OpenMP's bookkeeping and not its threads: a parallel region on the CPU would wait for them.
        torch.set_num_threads(self._threads)
        with _told(self._settings):
            self._function(*self._args)


@contextlib.contextmanager
def _told(settings: Settings) -> Iterator[None]:
    """Within it, an `Accelerator` finds what the launcher said."""
    before = os.environ.get(OWN_VARIABLE)
    os.environ[OWN_VARIABLE] = to_environment(settings)
    try:
        yield
    finally:
        if before is None:
            del os.environ[OWN_VARIABLE]
        else:
            os.environ[OWN_VARIABLE] = before


def _devices() -> int:
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _machine_problems(count: int, node_rank: int, num_nodes: int, backend: str) -> Iterator[Problem]:
    if count < 1:
        yield Problem("num_processes", count, "must be 1 or more")
    if num_nodes < 1:
        yield Problem("num_nodes", num_nodes, "must be 1 or more")
    elif not 0 <= node_rank < num_nodes:
        yield Problem("node_rank", node_rank, f"must lie in 0..{num_nodes - 1} for num_nodes={num_nodes}")
    if backend not in ("static", "c10d"):
        yield Problem("rdzv_backend", backend, "must be static or c10d")


def _process_problems(launcher: str, cpu: bool = False) -> Iterator[Problem]:
    """What stands against forking this process."""
    import torch
    import torch.distributed as dist

    if not hasattr(os, "fork"):
        yield Problem(launcher, sys.platform, "needs an operating system that forks; use `windlass launch`")
    if not cpu and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        fix = "has used CUDA, which does not survive a fork; restart it and touch no device before this call"
        yield Problem("this process", os.getpid(), fix)
    if dist.is_initialized():
        yield Problem(
            "this process", os.getpid(), "is in a process group already; call the launcher outside of it"
        )
    state = sys.modules.get("windlass.accelerator.state")
    if state is not None and state.PartialState._shared_state:
        fix = "has made an Accelerator; make it inside the function, and restart this process first"
        yield Problem("this process", os.getpid(), fix)


def _alone() -> Meeting:
    """One machine needs no agreed place: a free port, so that two launches do not meet by mistake."""
    from windlass.dist.machines import Meeting

    return Meeting("127.0.0.1", 0, 1, 0, True, uuid.uuid4().hex, 0)


def _meeting(
    nodes: int, node: int, backend: str, endpoint: str, options: Mapping[str, Any], run: str
) -> Meeting:
    """Where several machines meet.

    Raises:
        ConfigError: the endpoint is not HOST:PORT, or other machines reach it and there is no token.
    """
    from windlass.dist.listening import can_listen
    from windlass.dist.machines import DEFAULT_WAIT_SECONDS, Meeting

    address, _, port = endpoint.rpartition(":")
    if not address or not port.isdecimal():
        raise ConfigError(Problem("rdzv_endpoint", endpoint, "must be HOST:PORT"))
    token = read_token(None, os.environ)
    if token is None and not reachable_from_here_only(address):
        raise ConfigError(Problem("master_addr", address, NEEDS_TOKEN))
    wait = int(options.get("timeout", options.get("join_timeout", DEFAULT_WAIT_SECONDS)))
    static = backend == "static"
    hosts = node == 0 if static else can_listen(address, int(port))
    return Meeting(address, int(port), nodes, node if static else None, hosts, run, wait, token)


def _config(count: int, meeting: Meeting, **rest: Any) -> LaunchConfig:
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig

    # Torch's launcher finds a rendezvous by the name of its backend.
    rendezvous_handler_registry.register(_BACKEND, _handler)
    return LaunchConfig(
        min_nodes=meeting.machines,
        max_nodes=meeting.machines,
        nproc_per_node=count,
        run_id=meeting.run_id,
        rdzv_endpoint=f"{meeting.address}:{meeting.port}",
        rdzv_backend=_BACKEND,
        rdzv_configs={"meeting": meeting},
        start_method="fork",
        **{"max_restarts": 0, **rest},
    )


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    from windlass.dist.machines import meet

    return meet(parameters.get("meeting"))


def _launch(rank: _Rank, config: LaunchConfig) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    quiet_elastic()
    with _signals_kept():
        try:
            elastic_launch(config, rank)()
        except ChildFailedError as error:
            rank_number, failure = error.get_first_failure()
            text = f"rank {rank_number} failed (exit code {failure.exitcode}):\n\n{_traceback(failure)}"
            raise RuntimeError(text) from None


def _traceback(failure: ProcessFailure) -> str:
    """What the process wrote before it ended: its traceback, else what torch knows."""
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        return str(message.get("extraInfo", {}).get("py_callstack") or message.get("message"))
    return str(message or failure.message)


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Torch's launcher takes the signals that end a process; a notebook wants to have its own back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            with contextlib.suppress(ValueError):  # outside the main thread nothing was taken
                signal.signal(number, handler)
