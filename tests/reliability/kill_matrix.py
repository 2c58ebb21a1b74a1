"""Kills runs in every way, tells them to leave, and compares what becomes of them with runs that were not killed.

    python -m tests.reliability.kill_matrix --kills 500 --seed 0 --write docs/reliability.md

Called again it goes on where it was interrupted, as long as the code is the same. `--only kill-17` repeats one history
and keeps its folder. `--every "one process"` strikes a case at every update and every single file operation instead.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

from tests.reliability.attempts import preload
from tests.reliability.cases import SETS, trial
from tests.reliability.histories import (
    CLEAN,
    KILLS_OF_A_HISTORY,
    History,
    clean_run,
    exhaustive,
    plan,
    prefix_of,
)
from tests.reliability.table import write
from tests.trainer.resume_cases import run

ROOT = Path(__file__).resolve().parents[2]
# Of each set, cases that import between them nearly all that the others do.
PRELOADED = {"standard": ("one process", "an adapter"), "zero": ("one process", "two ranks, ZeRO-3")}
PRELOADED["layouts"] = PRELOADED["standard"]


class Matrix:
    """Histories of one seed, in a folder that remembers which are done.

    Args:
        jobs: how many histories go on at the same time.
        own: the set of cases.
    """

    def __init__(self, place: Path, seed: int, jobs: int, own: str = "standard") -> None:
        self.place, self.seed, self._own, self._prefix = place, seed, own, prefix_of(own)
        self._results = place / "results.jsonl"
        place.mkdir(parents=True, exist_ok=True)
        preload(lambda folder: [run(folder / name, trial(name).case) for name in PRELOADED[own]], place)
        # Its processes are forked here, while this one has a single thread.
        self._pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"))
        self.results: list[dict[str, Any]] = []
        if self._results.exists():
            self.results = [json.loads(line) for line in self._results.read_text().splitlines()]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def prepare(self, names: Iterable[str]) -> None:
        """Make the undisturbed runs."""
        missing = [name for name in names if not (self._clean(name) / CLEAN).exists()]
        for future in as_completed(
            [self._pool.submit(clean_run, name, self._clean(name)) for name in missing]
        ):
            future.result()

    def until(self, kills: int, say: Any = print) -> None:
        """Make histories of kills until so many kills have struck."""
        number = 0
        while (missing := kills - self.kills()) > 0:
            wave = range(number, number + max(2, -(-missing // (KILLS_OF_A_HISTORY - 1))))
            number = wave.stop
            self.make([f"{self._prefix}kill-{n}" for n in wave], say)

    def kills(self) -> int:
        return sum(
            len(told["struck"]) for told in self.results if told["name"].startswith(f"{self._prefix}kill-")
        )

    def every(self, case: str) -> None:
        """Strike a case at every update and every file operation."""
        self.prepare([case])
        number = [one.name for one in SETS[self._own]].index(case)
        self.make(exhaustive(number, self._clean(case), self._own))

    def make(self, names: Iterable[str], say: Any = print) -> None:
        """Make histories, given by their names; those that are done are not made again."""
        missing = sorted(set(names) - {told["name"] for told in self.results}, key=_natural)
        self.prepare({plan(self.seed, name).trial.name for name in missing})
        futures = [self._pool.submit(make_history, self.place, self.seed, name) for name in missing]
        for future in as_completed(futures):
            told = future.result()
            self.results.append(told)
            with self._results.open("a") as file:
                file.write(json.dumps(told) + "\n")
            for problem in told["problems"]:
                say(f"{told['trial']}: {problem}; again: --seed {self.seed} --only {told['name']}")

    def _clean(self, name: str) -> Path:
        return self.place / "clean" / name.replace(" ", "-")


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in name.split("-")]


def make_history(place: Path, seed: int, name: str, before: str = "") -> dict[str, Any]:
    """`before` begins the name of its folder."""
    chosen = plan(seed, name)
    return History(
        chosen, place / f"{before}{name}", place / "clean" / chosen.trial.name.replace(" ", "-")
    ).run()


def code_hash() -> str:
    """Of everything that results depend on, so that those of other code are not mixed in."""
    digest = hashlib.sha256()
    for folder in ("src/windlass", "tests/reliability", "tests/trainer"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def memory() -> str | None:
    """A folder in memory, where the system has one: thousands of files are synced."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextlib.contextmanager
def matrix_in(folder: Path, seed: int, jobs: int, own: str = "standard") -> Iterator[Matrix]:
    matrix = Matrix(folder, seed, jobs, own)
    try:
        yield matrix
    finally:
        matrix.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=500, help="end when so many have struck")
    parser.add_argument(
        "--faults", type=int, help="histories with failing disks and damaged files (kills / 5)"
    )
    parser.add_argument("--interrupts", type=int, help="histories that are interrupted (kills / 10)")
    parser.add_argument("--leaves", type=int, help="histories that are preempted (kills / 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", type=Path, help="page whose section 'kill matrix' gets the table")
    parser.add_argument("--only", help="one history, by its name")
    parser.add_argument(
        "--cases", choices=SETS, default="standard", help="zero: those of DeepSpeed; layouts: those of axes"
    )
    parser.add_argument("--every", metavar="CASE", help="the name of a case")
    parser.add_argument("--folder", type=Path, help="where the runs lie")
    given = parser.parse_args(arguments)
    base = given.folder or Path(memory() or tempfile.gettempdir())
    if given.every and given.every not in {one.name for one in SETS[given.cases]}:
        parser.error(f"--every: {given.every!r} is not a case of {given.cases}")
    place = base / f"windlass-kill-matrix-{given.cases}-{given.seed}-{code_hash()}"
    with matrix_in(place, given.seed, given.jobs, given.cases) as matrix:
        if given.only:
            return repeat(matrix, given.only)
        return everything(matrix, given)


def repeat(matrix: Matrix, name: str) -> int:
    chosen = plan(matrix.seed, name)
    print(chosen)
    matrix.prepare([chosen.trial.name])
    told = make_history(matrix.place, matrix.seed, name, "again-")  # the folder of a failed one stays
    print(json.dumps(told, indent=1))
    print(f"its folder: {matrix.place}")
    return bool(told["problems"])


def everything(matrix: Matrix, given: argparse.Namespace) -> int:
    started = time.monotonic()
    if given.every:
        matrix.every(given.every)
    else:
        matrix.prepare([one.name for one in SETS[given.cases]])
        before = prefix_of(given.cases)
        faults = given.kills // 5 if given.faults is None else given.faults
        interrupts = given.kills // 10 if given.interrupts is None else given.interrupts
        leaves = given.kills // 10 if given.leaves is None else given.leaves
        matrix.make([f"{before}fault-{number}" for number in range(faults)])
        matrix.make([f"{before}interrupt-{number}" for number in range(interrupts)])
        matrix.make([f"{before}leave-{number}" for number in range(leaves)])
        matrix.until(given.kills)
    chosen = f'--every "{given.every}"' if given.every else f"--kills {given.kills}"
    for name in ("faults", "interrupts", "leaves"):
        chosen += "" if getattr(given, name) is None else f" --{name} {getattr(given, name)}"
    chosen += "" if given.cases == "standard" else f" --cases {given.cases}"
    command = f"python -m tests.reliability.kill_matrix {chosen} --seed {given.seed}"
    write(matrix.results, command, given.write, given.cases)
    failed = [told for told in matrix.results if told["problems"]]
    print(f"{len(matrix.results)} histories, {len(failed)} with problems, {time.monotonic() - started:.0f} s")
    if failed:
        print(f"folders of those with problems: {matrix.place}")
    else:
        shutil.rmtree(matrix.place)
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
