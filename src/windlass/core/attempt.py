"""The attempts of a job that its launcher restarts, and the key-value store through which its processes meet."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from windlass.core.errors import ConfigError, Problem
from windlass.core.world import meeting_place

# A store that lives for one attempt holds this key: its processes need no prefix of their own in it.
ONE_ATTEMPT = "windlass/one-attempt"


def uses_launchers_store() -> bool:
    """Return True if the launcher of this process holds the store of the job."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def of_attempt(store: Any) -> Any:
    """The part of the job's store that belongs to this attempt. Torch's launcher keeps one store over its restarts, and
    in it the addresses of processes that are gone and the failures of earlier attempts; Windlass's opens a new one.
    """
    # Here, because a torch that was built without distribution has none.
    from torch._C._distributed_c10d import PrefixStore

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # Machines may count restarts differently: all of them go by what is in the store.
    if uses_launchers_store() and attempt != "0" and not store.check([ONE_ATTEMPT]):
        return PrefixStore(f"attempt-{attempt}", store)
    return store


def open_store_of_job(rank: int, size: int, **timeout: timedelta) -> Any:
    """The store of this attempt, which the process of rank 0 holds unless its launcher does. Raises ConfigError if the
    launcher named no place for it, or another program has its port.
    """
    from torch.distributed import DistNetworkError
    from torch.distributed.rendezvous import rendezvous

    _, port = meeting_place()
    try:
        store, _, _ = next(rendezvous("env://", rank, size, **timeout))
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        fix = "is in use on this machine, by another job or program: give each job a port of its own"
        raise ConfigError(Problem("MASTER_PORT", port, fix)) from error
    return of_attempt(store)
