"""The attempts of a job that its launcher restarts, and the key-value store through which its processes meet."""

from __future__ import annotations

import os
from typing import Any

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
