"""What a training loop costs per step beyond the arithmetic: the same tiny model trained by each library.

Every contender runs in a process of its own, on one thread, with the same dataset, shuffling, collation, fused AdamW
and clipping to norm 1.0, and reads the loss every 100 steps. The contenders take turns for `--rounds` rounds; a step's
time is the distance between two calls of the model, and the table gives the tenth percentile over all rounds, which is
steady on a noisy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import caption, facts, percentile, report, table

HERE = Path(__file__).resolve().parent
CONTENDERS = ("raw", "windlass", "accelerate", "lightning", "transformers")
LABELS = {"raw": "PyTorch, written by hand", "lightning": "Lightning"}
SKIPPED = 20  # the first steps of each round warm caches up


class Worker:
    """A contender in its own process, which trains for one round at each request.

    Args:
        source: the `src` folder of another commit; None: the package that is installed.
    """

    def __init__(self, name: str, steps: int, source: Path | None = None) -> None:
        command = [sys.executable, str(HERE / "contenders.py"), name, str(steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if source is not None:
            environment["PYTHONPATH"] = str(source)
        self._name = name
        # What a library says on stderr is shown if it fails.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._log, text=True, env=environment
        )
        self.missing = self._read() == "missing"

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            raise SystemExit(f"{self._log.read()}\n{self._name} stopped with code {code}")
        return json.loads(line)

    def round(self) -> list[float]:
        """Train once; the times of its steps in microseconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        stamps = self._read()
        return [(b - a) / 1000 for a, b in itertools.pairwise(stamps)][SKIPPED:]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._log.close()


def run(names: list[str], steps: int, rounds: int, before: Path | None) -> dict[str, list[float] | None]:
    """Step times of each contender in microseconds; None for what is not installed.

    Args:
        before: the `src` folder of a commit to compare with, under the name "before".
    """
    workers = {name: Worker(name, steps) for name in names}
    if before is not None:
        workers["before"] = Worker("windlass", steps, before)
        names = [*names, "before"]
    times: dict[str, list[float] | None] = {n: None if w.missing else [] for n, w in workers.items()}
    for turn in range(rounds):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order:
            found = times[name]
            if found is not None:
                found.extend(workers[name].round())
    for worker in workers.values():
        worker.close()
    return times


def summarise(times: dict[str, list[float] | None]) -> dict[str, dict[str, float] | None]:
    """Tenth percentile, median and mean of each contender, in microseconds."""
    return {
        name: None
        if found is None
        else {
            "steps": len(found),
            "p10": percentile(found, 0.1),
            "median": percentile(found, 0.5),
            "mean": sum(found) / len(found),
        }
        for name, found in times.items()
    }


def render(figures: dict[str, Any]) -> str:
    base = figures["microseconds"]["raw"]
    rows: list[list[str]] = []
    for name, it in figures["microseconds"].items():
        label = LABELS.get(name, name)
        if it is None:
            rows.append([label, "not installed", "", "", ""])
            continue
        added = "" if name == "raw" else f"{it['p10'] - base['p10']:+.0f}"
        rows.append([label, f"{it['p10']:.0f}", added, f"{it['median']:.0f}", f"{it['steps']}"])
        if name == "windlass" and (ledger := figures.get("ledger")):
            rows.append(["of it, the time ledger", "", f"+{ledger['microseconds']:.1f}", "", ""])
    head = ["loop", "step, us (p10)", "over the raw loop, us", "step, us (median)", "steps timed"]
    return f"{table(head, rows)}\n\n{caption(figures)}"


def clock_cost(updates: int = 20_000) -> dict[str, float]:
    """What the clock of a run adds to an update of one micro-batch: its marks and their time.

    The time is that of the fastest of 7 series on this machine, in microseconds.
    """
    from windlass.core import run_clock as clocks

    clock = clocks.RunClock()
    clock.begin()
    # The marks of one update of one rank, in their order, as `engine/` and `trainer/` make them.
    marks = [
        *(clocks.BACKWARD, clocks.COMPUTE, clocks.UPDATE, clocks.COMPUTE),
        *(clocks.CALLBACKS, clocks.COMPUTE, clocks.DATA, clocks.COMPUTE),
    ]
    best = float("inf")
    step = 0
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(updates):
            for kind in marks:
                clock.enter(kind)
            step += 1
            clock.update_ends(step, True)
        best = min(best, (time.perf_counter() - began) / updates)
    return {"marks": len(marks) + 1, "microseconds": round(best * 1e6, 2)}


@contextlib.contextmanager
def checkout(commit: str | None) -> Iterator[Path | None]:
    """The `src` folder of a commit, while the body runs; None without a commit."""
    if commit is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="windlass-overhead-") as place:
        folder = Path(place) / "tree"
        git = ["git", "-C", str(HERE.parent), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
        try:
            yield folder / "src"
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="steps of one round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--only", default=",".join(CONTENDERS), help="contenders, comma-separated; raw is always run"
    )
    parser.add_argument("--against", help="a commit to compare with")
    parser.add_argument("--write", type=Path, help="a page with a section `overhead` to rewrite")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument(
        "--clock", action="store_true", help="only what the clock of a run costs in an update"
    )
    options = parser.parse_args()
    if options.clock:
        print(json.dumps(clock_cost()))
        return
    asked = {"raw", *options.only.split(",")}
    if asked - set(CONTENDERS):
        parser.error(f"unknown contenders {sorted(asked - set(CONTENDERS))}; known: {', '.join(CONTENDERS)}")
    names = [name for name in CONTENDERS if name in asked]
    with checkout(options.against) as before:
        times = run(names, options.steps, options.rounds, before)
    LABELS["before"] = f"windlass at {options.against}"
    figures = {
        **facts(), "steps": options.steps, "rounds": options.rounds, "microseconds": summarise(times),
        "ledger": clock_cost(),
    }  # fmt: skip
    report("overhead", render(figures), figures, options.write, options.json)


if __name__ == "__main__":
    main()
