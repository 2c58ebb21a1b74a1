"""A process that takes the lock of a folder, says so, and holds it until its input ends."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from windlass.checkpoint.run_lock import RunLock


def main() -> None:
    lock = RunLock(Path(sys.argv[1]))  # which is free once its object is gone
    lock.acquire()
    if "fork" in sys.argv and os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    print("held", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
