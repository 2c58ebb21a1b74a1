"""How long the path through the package is: the files and calls of one steady update, and the files of one save.

A plain `Trainer` trains a model of one layer. `sys.setprofile` sees every function of the package that is called, and
every generator that is resumed; comprehensions are left out, because later releases of Python call no function for
them. An update lasts from one call of the model to the next, so it reads the data of a later one. The threads that a
save starts count as part of it. `--list` prints the path.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from common import caption, facts, report, table
from torch import Tensor, nn

import windlass

PACKAGE = Path(windlass.__file__).parent
STEPS = 12
SETTLED = 6  # an update after which nothing happens for the first time
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")
Call = tuple[str, str]
"""The file below the package, and the qualified name of the function."""


class Recorder:
    """Records the calls of the package while a Trainer trains.

    Attributes:
        updates: the calls on the main thread, from each call of the model to the next.
        save: the calls of the first `_save_checkpoint` and of the threads that it starts, which the last save of a run
            repeats.
    """

    def __init__(self) -> None:
        self.updates: list[list[Call]] = []
        self.save: list[Call] = []
        self._main = threading.current_thread()
        self._saving: FrameType | None = None
        self._before: frozenset[threading.Thread] = frozenset()  # threads that were there before the save
        self._saved = False
        self._known: dict[CodeType, Call | None] = {}

    def _call_of(self, code: CodeType) -> Call | None:
        if code not in self._known:
            file = Path(code.co_filename)
            counts = file.is_relative_to(PACKAGE) and code.co_name not in COMPREHENSIONS
            name = (str(file.relative_to(PACKAGE)), code.co_qualname) if counts else None
            self._known[code] = name
        return self._known[code]

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """The function for `sys.setprofile` and `threading.setprofile`."""
        if event == "return" and frame is self._saving:
            self._saving, self._saved = None, True
        if event != "call":
            return
        call = self._call_of(frame.f_code)
        if call is None:
            return
        thread = threading.current_thread()
        on_main = thread is self._main
        if on_main and self._saving is None and not self._saved and call[1].endswith("._save_checkpoint"):
            self._saving, self._before = frame, frozenset(threading.enumerate())
        if self._saving is not None if on_main else self._before and thread not in self._before:
            self.save.append(call)
        if on_main and self.updates:
            self.updates[-1].append(call)

    def next_update(self) -> None:
        """Begin another update."""
        self.updates.append([])


class Model(nn.Module):
    """One layer, with its loss. Each forward begins an update of `recorder`."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.recorder = recorder

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.recorder.next_update()
        return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}


def record(**options: Any) -> Recorder:
    """Train, and return what was called. `options` are further arguments of the Trainer."""
    recorder = Recorder()
    samples = [{"x": torch.ones(4), "labels": torch.tensor(n % 2)} for n in range(16 * STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = windlass.TrainingArguments(
            output_dir=folder, max_steps=STEPS, logging_steps=100, use_cpu=True, disable_tqdm=True,
            report_to="none", **options,
        )  # fmt: skip
        trainer = windlass.Trainer(Model(recorder), arguments, train_dataset=samples)
        before, before_in_threads = sys.getprofile(), threading.getprofile()
        threading.setprofile(recorder)
        sys.setprofile(recorder)
        try:
            trainer.train()
        finally:
            sys.setprofile(before)
            threading.setprofile(before_in_threads)
    return recorder


def record_update() -> list[Call]:
    """The calls of one update: the shortest, because some updates also look at the clock."""
    return min(record(save_strategy="no").updates[SETTLED:-1], key=len)


def record_save() -> list[Call]:
    """The calls of one save."""
    return record(save_steps=SETTLED).save


def files(calls: Sequence[Call]) -> int:
    return len({file for file, _ in calls})


def measure() -> dict[str, int]:
    """The figures of the table."""
    update, save = record_update(), record_save()
    return {"update_files": files(update), "update_calls": len(update), "save_files": files(save)}


def listing(calls: Sequence[Call]) -> str:
    """The functions of each file with their number of calls, files and functions in the order of their first call."""
    found: dict[str, collections.Counter[str]] = {}
    for file, function in calls:
        found.setdefault(file, collections.Counter())[function] += 1
    lines: list[str] = []
    for file, functions in found.items():
        lines.append(f"{file}: {functions.total()}")
        lines += [f"    {function}{f' x {n}' if n > 1 else ''}" for function, n in functions.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--list", action="store_true", help="print the files and functions, and write nothing"
    )
    parser.add_argument("--write", type=Path, help="a page with a section `call-path` to rewrite")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    if options.list:
        print(f"One update\n\n{listing(record_update())}\n\nOne save\n\n{listing(record_save())}")
        return
    figures = {**facts(("torch", "windlass")), "path": measure()}
    path = figures["path"]
    rows = [
        ["one update", path["update_files"], path["update_calls"]],
        ["one save", path["save_files"], ""],
    ]
    text = table(["part of a run", "files", "calls"], rows)
    report("call-path", f"{text}\n\n{caption(figures)}", figures, options.write, options.json)


if __name__ == "__main__":
    main()
