"""What a checkpoint costs a run: how long training pauses, when the checkpoint is committed, what steps lose meanwhile.

A model of 100 M parameters with AdamW is trained and saved by each library, one after the other in turns, each in a
process of its own. The first save of a process is left out: host memory is new to it. A pause is the time
between the end of a step and the beginning of the next, where a save lies; the commit is counted from the end of that
step; "steps meanwhile" is how much longer steps take on average while a checkpoint is being written. On a slow disk
(`--disk` MB/s, by waiting in each write) only Windlass is measured, for the others pause that long: with every
core training, and with one left free, as on a machine that trains on an accelerator.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from checkpoint_contenders import LAYERS, WIDTH
from common import caption, facts, report, table

from windlass.checkpoint.files import Files

HERE = Path(__file__).resolve().parent
CONTENDERS = ("windlass", "transformers", "transformers, fsynced")
SLOW, FREE = "windlass, slow disk", "windlass, slow disk, one core free"


def contend(name: str, options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """The figures of one process of this contender."""
    slow = name in (SLOW, FREE)
    speed, every = (options.disk * 1e6, options.every * 4) if slow else (0.0, options.every)
    command = [
        sys.executable, str(HERE / "checkpoint_contenders.py"), "windlass" if slow else name, str(options.saves),
        str(every), str(speed), str(options.width), str(options.layers), str(place / "run"),
    ]  # fmt: skip
    threads = max(1, options.threads - 1) if name == FREE else options.threads
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stderr}\n{name} stopped with code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def summarise(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over all saves but the first of each process, in seconds; the mean step during a save as ratio to the
    mean of the others. Steps before the first save are left out, in which a process warms up.
    """
    middle = statistics.median
    during, idle = _steps(runs, meanwhile=True), _steps(runs, meanwhile=False)
    return {
        "blocked": middle(value for run in runs for value in run["blocked"][1:]),
        "committed": middle(value for run in runs for value in run["committed"][1:]),
        "step": middle(idle or during),
        "during": statistics.mean(during) / statistics.mean(idle) if during and idle else float("nan"),
        "steps_during": len(during),
    }


def _steps(runs: list[dict[str, Any]], meanwhile: bool) -> list[float]:
    return [
        seconds
        for run in runs
        for step, seconds in run["steps"].items()
        if int(step) > run["first_save"] and (int(step) in run["during"]) is meanwhile
    ]


def hashing(place: Path, size: int = 1 << 30) -> float:
    """GB/s at which one core reads and hashes a file that lies in the page cache."""
    path = place / "hashed"
    path.write_bytes(os.urandom(1 << 20) * (size >> 20))
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        Files().digest(path)
        rates.append(size / (time.perf_counter() - start) / 1e9)
    path.unlink()
    return statistics.median(rates)


def render(figures: dict[str, Any]) -> str:
    found = figures["seconds"]
    base = found["transformers"]["blocked"]
    rows = []
    for name, it in found.items():
        share = "" if name in (SLOW, FREE) else f"{it['blocked'] / base:.1%}"
        during = f"{it['during']:.2f}" if it["steps_during"] else ""
        rows.append(
            [name, f"{it['blocked']:.3f}", share, f"{it['committed']:.2f}", f"{it['step'] * 1e3:.0f}", during]
        )
    head = [
        "",
        "training pauses for, s",
        "of transformers'",
        "committed after, s",
        "step, ms",
        "steps meanwhile",
    ]
    ratio = found["windlass"]["committed"] / found["transformers, fsynced"]["committed"]
    return (
        f"{table(head, rows)}\n\nThe checkpoint is committed after {ratio:.2f} of the time that a peer's needs that is "
        "fsynced too. "
        f"Hashing, which is what verifying takes: {figures['hashing']:.2f} GB/s on one core. "
        f"{figures['parameters'] / 1e6:.0f} M parameters, {figures['threads']} thread(s), slow disk: "
        f"{figures['disk']} MB/s.\n\n{caption(figures)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--saves", type=int, default=3, help="saves of one process, the first of which is left out"
    )
    parser.add_argument(
        "--every", type=int, default=20, help="updates between saves; four times that on a slow disk"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the training process")
    parser.add_argument("--disk", type=float, default=100, help="MB/s of the slow disk")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--folder", type=Path, help="where to save; a temporary folder by default")
    parser.add_argument("--write", type=Path, help="a page with a section `checkpoint` to rewrite")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (*CONTENDERS, SLOW, FREE)}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        place = Path(name)
        for _ in range(options.rounds):
            for contender in runs:
                runs[contender].append(contend(contender, options, place))
        rate = hashing(place)
    figures = {
        **facts(),
        "seconds": {name: summarise(found) for name, found in runs.items()},
        "hashing": rate,
        "parameters": options.layers * (options.width**2 + options.width),
        "threads": options.threads,
        "disk": options.disk,
    }
    report("checkpoint", render(figures), figures, options.write, options.json)


if __name__ == "__main__":
    main()
