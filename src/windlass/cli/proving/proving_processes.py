"""The processes of trials, forked from one that has imported everything, and the verdict on what they report."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from windlass.cli.proving.small_training import (
    FIGURES,
    OUTPUT,
    REPORT,
    TOLERANCE,
    UPDATES,
    VALUES,
    SmallTraining,
)
from windlass.core.errors import ModelError
from windlass.core.optional import require
from windlass.dist.listening import free_port
from windlass.dist.variables import environment_of

# What each process of a trial needs, imported once before all of them are forked: it takes seconds.
_PRELOADED = (
    "windlass.cli.proving.proving_rank",
    "windlass.trainer.preparation",
    "windlass.trainer.run_training",
    "windlass.trainer.services",
    "windlass.finetuning.sft_trainer",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "windlass.transforms.strategies",
    "windlass.transforms.context",
    "windlass.transforms.tensor_parallel",
)
# Seconds until ranks are ended that have lost a peer, and all that take too long: a layout may make them wait.
_GRACE, LIMIT = 5.0, 180.0


class EndedTraining:
    """How the processes of a trial ended.

    Attributes:
        folder: the files that they left.
        reports: what each of them reported; empty for one that was killed.

    Args:
        codes: exit codes by rank, of those that ended by themselves.
    """

    def __init__(self, trial: SmallTraining, folder: Path, codes: dict[int, int]) -> None:
        self.trial, self.folder, self._codes = trial, folder, codes
        self.reports = [_read(folder / REPORT.format(rank)) for rank in range(trial.layout.processes)]

    @property
    def refused(self) -> str | None:
        """Why the layout is refused; None if it is not."""
        return self._first("refused")

    @property
    def failed(self) -> str | None:
        """What went wrong; None if all ranks trained."""
        for rank, code in self._codes.items():  # without a report: the others failed because they lost it
            if not self.reports[rank]:
                return f"rank {rank} ended with exit code {code}\n{self._printed(rank)}".rstrip()
        if (error := self._first("failed")) is not None:
            return error
        if len(self._codes) < len(self.reports):
            return f"the processes did not end within {LIMIT:.0f} s: some of them wait for the others"
        return None

    def _first(self, key: str) -> str | None:
        """The text of the rank that wrote it first: others fail because they lose it."""
        found = [
            ((self.folder / REPORT.format(rank)).stat().st_mtime_ns, str(report[key]))
            for rank, report in enumerate(self.reports)
            if key in report
        ]
        return min(found)[1] if found else None

    def _printed(self, rank: int) -> str:
        path = self.folder / OUTPUT.format(rank)
        return path.read_text("utf-8", "replace")[-2000:] if path.is_file() else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # it was killed before it had written all of it
        return {}


class StartedTraining:
    """The processes of one trial, which run. `folder` must be empty."""

    def __init__(self, context: Any, trial: SmallTraining, folder: Path) -> None:
        folder.mkdir()
        self._trial, self._folder = trial, folder
        port = free_port()
        self.processes: list[BaseProcess] = [
            context.Process(target=_run, args=(trial, rank, port, str(folder)), daemon=True)
            for rank in range(trial.layout.processes)
        ]
        for process in self.processes:
            process.start()

    def wait(self) -> EndedTraining:
        """Wait for the end of all of them. Those that are left when one failed are ended."""
        # A layout with a fault may wait forever: a collective that some ranks do not reach is one such fault.
        end = time.monotonic() + LIMIT
        while alive := [process for process in self.processes if process.is_alive()]:
            # Looked at before each wait: one may have failed before the first.
            if any(self._codes().values()):
                end = min(end, time.monotonic() + _GRACE)
            left = end - time.monotonic()
            if left <= 0:
                break
            connection.wait([process.sentinel for process in alive], timeout=left)
        codes = self._codes()
        self.end()
        return EndedTraining(self._trial, self._folder, codes)

    def _codes(self) -> dict[int, int]:
        """Exit codes by rank, of those that ended."""
        found = ((rank, process.exitcode) for rank, process in enumerate(self.processes))
        return {rank: code for rank, code in found if code is not None}

    def end(self) -> None:
        """Kill those that are left."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()


def _run(trial: SmallTraining, rank: int, port: int, folder: str) -> None:
    """In a process of a trial; the command itself does not need these imports."""
    from windlass.cli.proving.proving_rank import run_rank

    run_rank(trial, rank, port, folder)


class ProvingProcesses:
    """Starts trials, whose files go into `folder`. `module`: of the model, imported once for all processes."""

    def __init__(self, folder: Path, module: str) -> None:
        self._folder, self._count = folder, 0
        self._started: list[StartedTraining] = []
        forks = "forkserver" in multiprocessing.get_all_start_methods()
        # A fork of this process itself could hang: it has threads of PyTorch by now.
        self._context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            from multiprocessing import forkserver

            # A process with threads must not be forked: libraries start none if the environment allows one.
            with environment_of(OMP_NUM_THREADS="1"), _quiet_errors(folder / "server.txt"):
                self._context.set_forkserver_preload([*_PRELOADED, module])
                forkserver.ensure_running()

    def start(self, trial: SmallTraining) -> StartedTraining:
        self._count += 1
        self._started.append(StartedTraining(self._context, trial, self._folder / str(self._count)))
        return self._started[-1]

    def close(self) -> None:
        """Kill everything that still runs."""
        for started in self._started:
            started.end()


@contextlib.contextmanager
def _quiet_errors(path: Path) -> Iterator[None]:
    """What a process that is started within prints to standard error goes to a file: warnings of its imports."""
    sys.stderr.flush()
    before = os.dup(2)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 2)
    os.close(target)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


# A tensor whose values should be 0 has rounding of the others in it: it is compared with their size.
_SHARE = 1e-2
Tensors = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A value that differs."""

    update: int  # in which it was computed, from 1; 0 for the evaluation after training
    what: str  # "tokens", "loss", "gradient", "norm", "weight" or "evaluation"
    name: str  # of the tensor; empty for a figure
    rank: int  # the process that has it
    # `expected`, `found`: the values of one process and of the layout, of the element that differs most; None for a
    # tensor that one of them lacks
    expected: float | None
    found: float | None
    relative: float  # the difference as a share of the largest value

    def __str__(self) -> str:
        named = f"{self.what} of {self.name}" if self.name else self.what
        when = f"in update {self.update}" if self.update else "after training"
        where = f"{named} {when}, rank {self.rank}"
        if self.found is None or self.expected is None:
            return f"{where}: only {'one process has' if self.found is None else 'the layout has'} it"
        return f"{where}: {self.found:.10g}, and {self.expected:.10g} on one process"


@dataclass(frozen=True, slots=True)
class ProofVerdict:
    """What came of one layout."""

    layout: str
    status: str  # "equal", "differs", "refused" or "failed"
    detail: str = ""  # the reason of the last two
    compared: int = 0  # tensors and figures, over all ranks
    largest: float = 0.0  # of their relative differences
    first: Mismatch | None = None  # the first difference beyond the tolerance; None if there is none
    differing: int = 0  # how many tensors and figures differ

    @property
    def is_equal(self) -> bool:
        return self.status == "equal"


def judge(expected: EndedTraining, found: EndedTraining) -> ProofVerdict:
    """Compare what each rank of a layout has with what one process has. Raises ModelError if that could not train."""
    layout = str(found.trial.layout)
    if reason := expected.refused or expected.failed:
        raise ModelError(f"the small model cannot be trained on one process: {reason}")
    for status, detail in (("refused", found.refused), ("failed", found.failed)):
        if detail:
            return ProofVerdict(layout, status, detail)
    differences = list(_differences(expected, found))
    beyond = [one for one in differences if not one.relative <= TOLERANCE]
    largest = max((one.relative for one in differences), default=0.0)
    status = "differs" if beyond else "equal"
    first = beyond[0] if beyond else None
    return ProofVerdict(layout, status, "", len(differences), largest, first, len(beyond))


def _differences(expected: EndedTraining, found: EndedTraining) -> Iterator[Mismatch]:
    """Every comparison, in the order in which the values are computed."""
    one = _RankValues(expected, 0)
    others = [_RankValues(found, rank) for rank in range(found.trial.layout.processes)]
    divided = found.trial.layout.along("pp") > 1  # ranks have some of the layers each
    for update in range(1, UPDATES + 1):
        for what, key in (("tokens", "num_input_tokens_seen"), ("loss", "loss")):
            yield from _figures(one, others, update, what, key)
        yield from _tensors(one, others, update, "gradient", divided)
        for what, key in FIGURES.items():
            yield from _figures(one, others, update, what, key)
        yield from _tensors(one, others, update, "weight", divided)
    yield from _figures(one, others, 0, "evaluation", "eval_loss")


class _RankValues:
    """What one rank reported and wrote."""

    def __init__(self, outcome: EndedTraining, rank: int) -> None:
        self.reported: list[dict[str, float]] = outcome.reports[rank]["reported"]
        values = _load(outcome.folder / VALUES.format(rank))
        self._values: Tensors = {name: values[name] for name in outcome.reports[rank]["order"]}

    def figure(self, update: int, key: str) -> float:
        """What was logged after an update; NaN if it was not."""
        row = self.reported[update - 1] if update else self.reported[-1]
        return row.get(key, math.nan)

    def tensors(self, what: str, update: int) -> dict[str, Any]:
        """Tensors by name, from the head of the model to its embedding, as gradients are computed."""
        prefix = f"{what}/{update}/"
        found = {
            name.removeprefix(prefix): value
            for name, value in self._values.items()
            if name.startswith(prefix)
        }
        return dict(reversed(found.items()))


def _load(path: Path) -> Tensors:
    library = require("safetensors.numpy", "compare what was trained")
    return {name: value.astype(np.float64) for name, value in library.load_file(path).items()}


def _figures(
    one: _RankValues, others: list[_RankValues], update: int, what: str, key: str
) -> Iterator[Mismatch]:
    expected = one.figure(update, key)
    for rank, other in enumerate(others if not math.isnan(expected) else ()):
        found = other.figure(update, key)
        relative = abs(found - expected) / max(abs(expected), 1e-300) if found != expected else 0.0
        yield Mismatch(update, what, "", rank, expected, found, _finite(relative))


def _tensors(
    one: _RankValues, others: list[_RankValues], update: int, what: str, divided: bool
) -> Iterator[Mismatch]:
    expected = one.tensors(what, update)
    per_rank = [other.tensors(what, update) for other in others]
    scale = max((float(np.abs(value).max(initial=0.0)) for value in expected.values()), default=0.0)
    for name, value in expected.items():
        having = [rank for rank, found in enumerate(per_rank) if name in found]
        for rank, found in enumerate(per_rank):
            if rank in having and found[name].shape == value.shape:
                yield Mismatch(update, what, name, rank, *_worst(value, found[name], scale))
            elif rank in having:
                shape = f"{name} (shape {found[name].shape})"
                yield Mismatch(update, what, shape, rank, 0.0, None, math.inf)
            elif not (divided and having):
                yield Mismatch(update, what, name, rank, 0.0, None, math.inf)
    for rank, found in enumerate(per_rank):
        for name in found.keys() - expected.keys():
            yield Mismatch(update, what, name, rank, None, 0.0, math.inf)


def _worst(expected: Any, found: Any, scale: float) -> tuple[float, float, float]:
    """The element that differs most: its values, and the difference as a share of the largest value."""
    if not expected.size:
        return 0.0, 0.0, 0.0
    apart = np.abs(found - expected)
    at = int(np.argmax(np.where(np.isnan(apart), np.inf, apart)))
    size = max(float(np.abs(expected).max()), _SHARE * scale, 1e-300)
    return float(expected.flat[at]), float(found.flat[at]), _finite(float(apart.flat[at]) / size)


def _finite(relative: float) -> float:
    return math.inf if math.isnan(relative) else relative
