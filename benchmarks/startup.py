"""What importing costs: seconds, resident memory and modules, each in a fresh interpreter.

The statements take turns for `--rounds` rounds, after one that only warms the file cache; the table gives medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import caption, facts, report, table

STATEMENTS = {
    "torch": "import torch",
    "windlass, the name alone": "import windlass",
    "windlass": "from windlass import Trainer, TrainingArguments",
    "accelerate": "from accelerate import Accelerator",
    "transformers": "from transformers import Trainer, TrainingArguments",
}
PROBE = """
import json, resource, sys, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
try:
    resident = next(int(l.split()[1]) / 1024 for l in open("/proc/self/status") if l.startswith("VmRSS"))
except OSError:
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({{"seconds": seconds, "megabytes": resident, "modules": len(sys.modules)}}))
"""


def measure(statement: str) -> dict[str, float] | None:
    """One fresh interpreter; None where the package is not installed."""
    command = [sys.executable, "-c", PROBE.format(statement=statement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ModuleNotFoundError" in done.stderr:
        return None
    if done.returncode:
        raise SystemExit(f"{statement} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def run(rounds: int) -> dict[str, dict[str, float]]:
    """Median of each figure for each statement, the statements taking turns."""
    samples: dict[str, list[dict[str, float]]] = {}
    for turn in range(rounds + 1):
        for name, statement in STATEMENTS.items():
            sample = measure(statement)
            if turn and sample is not None:
                samples.setdefault(name, []).append(sample)
    return {
        name: {key: statistics.median(s[key] for s in found) for key in found[0]}
        for name, found in samples.items()
    }


def render(figures: dict[str, Any]) -> str:
    base = figures["medians"]["torch"]
    rows = []
    for name, statement in STATEMENTS.items():
        if name not in figures["medians"]:
            rows.append([f"`{statement}`", "not installed", "", "", "", ""])
            continue
        it = figures["medians"][name]
        more, larger = it["seconds"] - base["seconds"], it["megabytes"] - base["megabytes"]
        seconds, megabytes = (
            [f"{it['seconds']:.2f}", f"{more:+.2f}"],
            [f"{it['megabytes']:.0f}", f"{larger:+.0f}"],
        )
        rows.append([f"`{statement}`", *seconds, *megabytes, f"{it['modules']:.0f}"])
    head = ["statement", "s", "over torch, s", "resident, MB", "over torch, MB", "modules"]
    return f"{table(head, rows)}\n\n{caption(figures)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", type=Path, help="a page with a section `startup` to rewrite")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    figures = {**facts(), "rounds": options.rounds, "medians": run(options.rounds)}
    report("startup", render(figures), figures, options.write, options.json)


if __name__ == "__main__":
    main()
