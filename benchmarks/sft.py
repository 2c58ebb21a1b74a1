"""Throughput of fine-tuning on documents of different lengths: tokens that are not padding, per second.

Every contender trains the same small Llama (4 layers, width 192, vocabulary 4,096) with the same loss and optimizer on
about 2,048 tokens an update, in a fresh process of one thread. Contenders take turns for `--rounds` rounds, and the
best round of each counts. The data are documents of random tokens with log-normal lengths (median 120, 99th percentile
1,024), or the problems of GSM8K as words.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import PACKAGES, caption, facts, report, table

HERE = Path(__file__).resolve().parent
LABELS = {
    "hand": "PyTorch, written by hand: each document alone",
    "windlass_packed": "windlass, packed",
    "windlass_budget": "windlass, token budget",
    "transformers_default": "transformers, default",
    "transformers_grouped": "transformers, length-grouped",
    "trl_packed": "TRL, packed",
    "trl_default": "TRL, default",
}


def once(name: str, data: str, updates: int) -> dict[str, float]:
    """One round of one contender in a process of its own: tokens per second and the loss of the last update."""
    command = [sys.executable, str(HERE / "sft_contenders.py"), name, data, str(updates)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stderr[-4000:]}\n{name} stopped with code {done.returncode}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(names: list[str], data: list[str], updates: int, rounds: int) -> dict[str, dict[str, float]]:
    """The best round of each contender in tokens per second, for each kind of data."""
    best: dict[str, dict[str, float]] = {kind: dict.fromkeys(names, 0.0) for kind in data}
    for turn in range(rounds):
        shift = turn % len(names)
        for kind in data:
            for name in names[shift:] + names[:shift]:
                best[kind][name] = max(best[kind][name], once(name, kind, updates)["tokens_per_second"])
    return best


def render(figures: dict[str, Any], command: str) -> str:
    found = figures["tokens_per_second"]
    head = ["loop"]
    for kind in found:
        head += [f"{kind}, tokens/s", "ratio to the hand-written loop"]
    rows = []
    for name in next(iter(found.values())):
        row = [LABELS[name]]
        for speeds in found.values():
            row += [f"{speeds[name]:.0f}", f"{speeds[name] / speeds['hand']:.2f}"]
        rows.append(row)
    return f"{table(head, rows)}\n\n{caption(figures, command)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=30, help="updates of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", default="long tail,gsm8k", help="comma-separated")
    parser.add_argument(
        "--only", default=",".join(LABELS), help="contenders, comma-separated; hand is always run"
    )
    parser.add_argument("--write", type=Path, help="the page whose section is rewritten")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    names = ["hand", *(name for name in options.only.split(",") if name != "hand")]
    found = run(names, options.data.split(","), options.updates, options.rounds)
    figures = {**facts([*PACKAGES, "trl"]), "tokens_per_second": found}
    command = f"python benchmarks/sft.py --updates {options.updates} --rounds {options.rounds}"
    report("sft", render(figures, command), figures, options.write, options.json)


if __name__ == "__main__":
    main()
