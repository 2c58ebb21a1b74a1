"""Kills runs in every way and compares what becomes of them with runs that nobody killed.

    python -m tests.reliability.kill_matrix --kills 500 --seed 0 --write docs/reliability.md

Called again it goes on where it was interrupted, as long as the code is the same. `--only 17` repeats one history and
keeps its folder, `--only fault-17` one of the faults.
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
from tests.reliability.cases import TRIALS
from tests.reliability.histories import CLEAN, KILLS_OF_A_HISTORY, History, clean_run, plan
from tests.reliability.table import write

ROOT = Path(__file__).resolve().parents[2]


class Matrix:
    """Histories of one seed, in a folder that remembers which are done.

    Args:
        jobs: how many histories go on at the same time.
    """

    def __init__(self, place: Path, seed: int, jobs: int) -> None:
        self.place, self.seed = place, seed
        self._results = place / "results.jsonl"
        place.mkdir(parents=True, exist_ok=True)
        preload(TRIALS[0], place)
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
        number = 1 + max((told["number"] for told in self.results if not told["fault"]), default=-1)
        while (missing := kills - self.kills()) > 0:
            wave = range(number, number + max(2, -(-missing // (KILLS_OF_A_HISTORY - 1))))
            number = wave.stop
            self.make([(n, False) for n in wave], say)

    def kills(self) -> int:
        return sum(len(told["struck"]) for told in self.results if not told["fault"])

    def make(self, wanted: Iterable[tuple[int, bool]], say: Any = print) -> None:
        """Make histories, given by number and whether they are of faults; those that are done are not made again."""
        done = {(told["number"], told["fault"]) for told in self.results}
        plans = [key for key in wanted if key not in done]
        self.prepare({plan(self.seed, *key).trial.name for key in plans})
        for told in self._told(plans):
            self.results.append(told)
            with self._results.open("a") as file:
                file.write(json.dumps(told) + "\n")
            for problem in told["problems"]:
                name = f"fault-{told['number']}" if told["fault"] else str(told["number"])
                say(f"{told['trial']}: {problem}; again: --seed {self.seed} --only {name}")

    def _told(self, keys: list[tuple[int, bool]]) -> Iterator[dict[str, Any]]:
        futures = {self._pool.submit(make_history, self.place, self.seed, *key): key for key in keys}
        for future in as_completed(futures):
            yield {**future.result(), "fault": futures[future][1]}

    def _clean(self, name: str) -> Path:
        return self.place / "clean" / name.replace(" ", "-")


def make_history(place: Path, seed: int, number: int, fault: bool) -> dict[str, Any]:
    chosen = plan(seed, number, fault)
    folder = place / f"{'fault' if fault else 'history'}-{number}"
    return History(chosen, folder, place / "clean" / chosen.trial.name.replace(" ", "-")).run()


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
def matrix_in(folder: Path, seed: int, jobs: int) -> Iterator[Matrix]:
    matrix = Matrix(folder, seed, jobs)
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", type=Path, help="page whose section 'kill matrix' gets the table")
    parser.add_argument("--only", help="one history, by its number (fault-N for one of faults)")
    parser.add_argument("--folder", type=Path, help="where the runs lie")
    given = parser.parse_args(arguments)
    base = given.folder or Path(memory() or tempfile.gettempdir())
    place = base / f"windlass-kill-matrix-{given.seed}-{code_hash()}"
    with matrix_in(place, given.seed, given.jobs) as matrix:
        if given.only:
            return repeat(matrix, given.only)
        return everything(matrix, given)


def repeat(matrix: Matrix, name: str) -> int:
    number, fault = int(name.removeprefix("fault-")), name.startswith("fault-")
    chosen = plan(matrix.seed, number, fault)
    print(chosen)
    matrix.prepare([chosen.trial.name])
    told = make_history(matrix.place, matrix.seed, number, fault)
    print(json.dumps(told, indent=1))
    print(f"its folder: {matrix.place}")
    return bool(told["problems"])


def everything(matrix: Matrix, given: argparse.Namespace) -> int:
    started = time.monotonic()
    matrix.prepare([one.name for one in TRIALS])
    faults = given.kills // 5 if given.faults is None else given.faults
    matrix.make([(number, True) for number in range(faults)])
    matrix.until(given.kills)
    command = f"python -m tests.reliability.kill_matrix --kills {given.kills} --seed {given.seed}"
    write(matrix.results, command, given.write)
    failed = [told for told in matrix.results if told["problems"]]
    print(f"{len(matrix.results)} histories, {matrix.kills()} kills, {len(failed)} with problems, "
          f"{time.monotonic() - started:.0f} s")  # fmt: skip
    if failed:
        print(f"folders of those with problems: {matrix.place}")
    else:
        shutil.rmtree(matrix.place)
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
