"""Small runs, each in a process of its own whose standard streams break; prints how each of them ended.

One process imports everything and forks them: each goes on to the regular end of this script, as a user's would.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.trainer.small import Net, arguments, rows

from windlass import Trainer, TrainerCallback
from windlass.core.logs import get_logger

CASES = ("full", "pipe", "terminal", "ascii")


class Waits(TrainerCallback):
    """Has the reader go away in the middle of the run: tells it, and goes on when it has gone."""

    def __init__(self, tell: int, wait: int) -> None:
        self.tell, self.wait = tell, wait

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            os.write(self.tell, b"x")
            os.read(self.wait, 1)


class Says(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        logs["note"] = "Größe 学習 ✓"


def train(folder: Path, *callbacks: TrainerCallback) -> None:
    for plain in (True, False):
        args = arguments(
            folder / str(plain),
            max_steps=5,
            logging_steps=1,
            save_steps=5,
            save_strategy="steps",
            disable_tqdm=plain,
            use_cpu=True,
        )
        trainer = Trainer(Net(), args, train_dataset=rows(32), callbacks=[Says(), *callbacks])
        output = trainer.train()
        get_logger("windlass.test").warning("a warning: Größe")
        trainer.log_metrics("train", output.metrics)
        callbacks = ()
    (folder / "done").write_text("done")


def into_full(folder: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    _standard(full, full)
    train(folder)


def into_pipe(folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    _standard(writer, writer)
    train(folder)


def into_ascii(folder: Path) -> None:
    sink = os.open(folder / "said.txt", os.O_WRONLY | os.O_CREAT)
    _standard(sink, sink, "ascii")
    train(folder)


def into_terminal(folder: Path) -> None:
    master, slave = pty.openpty()
    tell, wait = os.pipe(), os.pipe()
    if pid := os.fork():
        # The terminal's window, which is closed at the second step.
        os.close(slave), os.close(tell[1]), os.close(wait[0])
        while not os.read(tell[0], 1):
            pass
        os.close(master)
        os.close(wait[1])
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) % 256)
    os.close(master), os.close(wait[1])
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    os.dup2(slave, 0)
    _standard(slave, slave)
    os.close(slave)
    train(folder, Waits(tell[1], wait[0]))


def _standard(out: int, err: int, encoding: str = "utf-8") -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding=encoding, closefd=False, buffering=1)  # noqa: SIM115
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr


def main(root: Path) -> None:
    runs: dict[str, Callable[[Path], None]] = {
        "full": into_full, "pipe": into_pipe, "terminal": into_terminal, "ascii": into_ascii,
    }  # fmt: skip
    ended = {}
    for name in CASES:
        folder = root / name
        folder.mkdir()
        if not (pid := os.fork()):
            runs[name](folder)
            return  # to the end of the script, where Python flushes its streams
        ended[name] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), (folder / "done").exists()]
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
