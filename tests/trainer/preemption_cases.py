"""Runs that are preempted, at one place or another."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.trainer.resume_cases import SAMPLES, Case, sample

from windlass import TrainerCallback
from windlass.checkpoint.files import Files
from windlass.core.errors import EXIT_PREEMPTED

RANK = int(os.environ.get("RANK", "0"))
CODE = EXIT_PREEMPTED
Signal = Callable[[], None]


def send(
    number: int = signal.SIGTERM, times: int = 1, after: float = 0.0, ranks: tuple[int, ...] | None = None
) -> Signal:
    """What sends this process a signal, on these ranks, once."""
    left = [1]

    def act() -> None:
        if left[0] and (ranks is None or RANK in ranks):
            left[0] = 0
            time.sleep(after * RANK)
            for _ in range(times):
                os.kill(os.getpid(), number)

    return act


class At(TrainerCallback):
    """At an event of a step."""

    def __init__(self, event: str, step: int, act: Signal) -> None:
        def listen(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                act()

        setattr(self, event, listen)


class Reading:
    """Samples, of which reading one acts; it may wait then until a signal interrupts."""

    def __init__(self, index: int, act: Signal, waits: bool = False) -> None:
        self._index, self._act, self._waits = index, act, waits

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self._index:
            self._act()
            if self._waits:
                threading.Event().wait(60)  # it is never set: only what interrupts the wait ends it
        return sample(index)


def while_saving(step: int, act: Signal) -> None:
    """Act while the thread that saves this step writes."""
    write = Files.write_some

    def acting(files: Files, descriptor: int, piece: memoryview) -> int:
        if threading.current_thread().name == f"windlass-save-{step}":
            act()
        return write(files, descriptor, piece)

    Files.write_some = acting  # type: ignore[method-assign]


# An evaluation in the middle and at the ends of epochs; the schedule moves, so that a lost step would show.
EVALUATED = Case({"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "linear", "save_steps": 3})


def newest(folder: Path) -> int:
    return max(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))
