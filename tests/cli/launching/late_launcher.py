"""`windlass`, with a launcher that is between two looks at its processes when the first of them ends.

It writes the file of the variable LOOKED when it has seen that processes were preempted.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from windlass.cli.launching.failure_report import Watch
from windlass.cli.main import main

_deserted, _preempted = Watch.deserted, Watch.preempted


def deserted(watch: Watch, *rest: Any) -> bool:
    """What the launcher asks after it has looked for failures."""
    while all(code is None for code in watch.codes()):
        time.sleep(0.01)
    return _deserted(watch, *rest)


def preempted(watch: Watch) -> bool:
    found = _preempted(watch)
    if found:
        Path(os.environ["LOOKED"]).touch()
    return found


Watch.deserted, Watch.preempted = deserted, preempted  # type: ignore[method-assign]
sys.exit(main(sys.argv[1:]))
