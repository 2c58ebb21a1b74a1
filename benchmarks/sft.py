"""Throughput of fine-tuning on documents of different lengths: tokens that are not padding, per second.

Every contender trains the same small Llama (4 layers, width 192, vocabulary 4,096) with the same loss and optimizer on
about 2,048 tokens an update, in a fresh process of one thread, for `--seconds` after its first updates. Contenders take
turns for `--rounds` rounds, and the best round of each counts; one that fails is a row with the reason. The data are
documents of random tokens with log-normal lengths (median 120, 99th percentile 1,024), or words of GSM8K.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import PACKAGES, caption, facts, report, table

HERE = Path(__file__).resolve().parent
STARTUP = (
    240.0  # seconds for imports, data and measurements of the first batch, before a process counts as hung
)
LABELS = {
    "hand": "PyTorch, written by hand: each document alone",
    "windlass_packed": "windlass, packed",
    "windlass_budget": "windlass, token budget",
    "transformers_default": "transformers, default",
    "transformers_grouped": "transformers, length-grouped",
    "trl_packed": "TRL, packed",
    "trl_default": "TRL, default",
}


@dataclass(slots=True)
class Outcome:
    """The best round of a contender in tokens per second, or why it has none."""

    speed: float = 0.0
    failure: str = ""

    def add(self, found: float | str) -> None:
        """Count one round: its speed, or what went wrong."""
        if isinstance(found, str):
            self.failure = found
        else:
            self.speed = max(self.speed, found)


def once(name: str, data: str, seconds: float) -> float | str:
    """One round of one contender in a process of its own: tokens per second, or why there are none."""
    command = [sys.executable, str(HERE / "sft_contenders.py"), name, data, str(seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    limit = STARTUP + 10 * seconds
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=limit
        )
        if done.returncode == 0:
            return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_second"])
    except subprocess.TimeoutExpired:
        return f"no figure after {limit:.0f} s"
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1][:100]


def run(names: list[str], data: list[str], seconds: float, rounds: int) -> dict[str, dict[str, Outcome]]:
    """The outcome of each contender for each kind of data. A contender that fails once is not started again."""
    found = {kind: {name: Outcome() for name in names} for kind in data}
    for turn in range(rounds):
        shift = turn % len(names)
        for kind in data:
            for name in names[shift:] + names[:shift]:
                outcome = found[kind][name]
                if not outcome.failure:
                    outcome.add(once(name, kind, seconds))
                    shown = outcome.failure or f"{outcome.speed:.0f} tokens/s"
                    print(f"round {turn + 1}, {kind}, {name}: {shown}", file=sys.stderr, flush=True)
    return found


def render(figures: dict[str, Any]) -> str:
    found = figures["outcomes"]
    head = ["loop"]
    for kind in found:
        head += [f"{kind}, tokens/s", "ratio to the hand-written loop"]
    rows = []
    for name in next(iter(found.values())):
        row = [LABELS[name]]
        for outcomes in found.values():
            mine, hand = outcomes[name], outcomes["hand"]
            if mine["failure"]:
                row += [f"failed: {mine['failure']}", ""]
            else:
                ratio = f"{mine['speed'] / hand['speed']:.2f}" if hand["speed"] else ""
                row += [f"{mine['speed']:.0f}", ratio]
        rows.append(row)
    return f"{table(head, rows)}\n\n{caption(figures)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="measured in one round of one contender")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", default="long tail,gsm8k", help="comma-separated")
    parser.add_argument(
        "--contenders", default=",".join(LABELS), help="comma-separated; hand is always run, for the ratios"
    )
    parser.add_argument("--write", type=Path, help="the page whose section is rewritten")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    names = ["hand", *(name for name in options.contenders.split(",") if name != "hand")]
    unknown = [name for name in names if name not in LABELS]
    if unknown:
        parser.error(f"no contender {', '.join(unknown)}; there is: {', '.join(LABELS)}")
    found = run(names, options.data.split(","), options.seconds, options.rounds)
    outcomes = {kind: {name: asdict(one) for name, one in by_name.items()} for kind, by_name in found.items()}
    figures = {**facts([*PACKAGES, "trl"]), "outcomes": outcomes}
    report("sft", render(figures), figures, options.write, options.json)


if __name__ == "__main__":
    main()
