"""Run a script as Python does, and write the losses that it computes to a file as it ends.

    python probe.py LOSSES KIND SCRIPT [ARGUMENT ...]

KIND is where the losses come from: `log` takes what `Trainer.log` is given under names that end in "loss" or "reward";
`forward` takes every cross entropy that gradients flow from. Loaders deal samples in the order of the dataset: from one
seed, two libraries draw two orders.
"""

from __future__ import annotations

import atexit
import functools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

losses: list[tuple[str, Any]] = []


def watch_log() -> None:
    from transformers import Trainer  # the one that the script gets

    log = Trainer.log

    @functools.wraps(log)
    def watched(self: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        losses.extend((name, value) for name, value in logs.items() if name.endswith(("loss", "reward")))
        return log(self, logs, *args, **kwargs)

    Trainer.log = watched


def watch_forward() -> None:
    from torch.nn import functional

    cross_entropy = functional.cross_entropy

    @functools.wraps(cross_entropy)
    def watched(*args: Any, **kwargs: Any) -> Any:
        loss = cross_entropy(*args, **kwargs)
        if loss.requires_grad:
            losses.append(("loss", loss.detach()))
        return loss

    functional.cross_entropy = watched


def keep_order() -> None:
    from torch.utils.data import DataLoader

    build = DataLoader.__init__

    @functools.wraps(build)
    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("shuffle"):
            kwargs["shuffle"] = False
        build(self, *args, **kwargs)

    DataLoader.__init__ = watched


def write(path: Path) -> None:
    path.write_text(json.dumps([(name, float(value)) for name, value in losses]), "utf-8")


def main() -> None:
    target, kind, script, *arguments = sys.argv[1:]
    atexit.register(write, Path(target).absolute())
    keep_order()
    {"log": watch_log, "forward": watch_forward}[kind]()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).absolute().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
