"""Processor seconds of the tests of two commits, in turns: `python benchmarks/suite.py --against COMMIT`.

Both commits are checked out beside the repository, in worktrees that share its environment, and their tests run with
the same command. Processor seconds are those of all processes that a run started. Only the ratio of one run of this
command means anything.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import caption, facts, table

ROOT = Path(__file__).resolve().parent.parent


def run(folder: Path, arguments: list[str], workers: int) -> dict[str, float]:
    """Run the tests of one checkout."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "--dist", "worksteal", *arguments]
    paths = f"{folder / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{folder.name}: {done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:]}"
    )
    spent = (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)
    return {"processor": spent, "wall": time.monotonic() - began, "code": done.returncode}


def measure(
    commits: list[str], arguments: list[str], rounds: int, workers: int
) -> dict[str, list[dict[str, float]]]:
    """The runs of each commit, in turns."""
    found: dict[str, list[dict[str, float]]] = {commit: [] for commit in commits}
    with tempfile.TemporaryDirectory(prefix="windlass-suite-") as place:
        folders = {commit: Path(place) / f"tree-{number}" for number, commit in enumerate(commits)}
        try:
            for commit, folder in folders.items():
                subprocess.run(
                    ["git", "worktree", "add", "--detach", str(folder), commit], cwd=ROOT, check=True
                )
            for turn in range(rounds):
                for commit in commits[turn % 2 :] + commits[: turn % 2]:
                    found[commit].append(run(folders[commit], arguments, workers))
        finally:
            for folder in folders.values():
                subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=ROOT, check=False)
    return found


def render(found: dict[str, list[dict[str, float]]]) -> str:
    first = median(run["processor"] for run in next(iter(found.values())))
    rows = []
    for commit, runs in found.items():
        spent, wall = (median(run[name] for run in runs) for name in ("processor", "wall"))
        rows.append([f"`{commit}`", f"{spent:.0f}", f"{spent / first:.2f}", f"{wall:.0f}"])
    head = ["commit", "processor seconds", "times the first", "wall seconds"]
    return f"{table(head, rows)}\n\n{caption(facts())}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", required=True, help="the commit to compare with")
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("tests", nargs="*", help="paths and options for pytest; by default the whole suite")
    options = parser.parse_args()
    found: Any = measure([options.against, options.commit], options.tests, options.rounds, options.workers)
    print(render(found))
    if options.json:
        options.json.write_text(json.dumps({**facts(), "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
