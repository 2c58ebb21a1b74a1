"""What training in two processes costs: a step by hand, by Windlass and by accelerate, replicated, sharded, and under
DeepSpeed, whose loop by hand calls its engine.

Every contender is a pair of gloo processes, each on one thread and, if there are as many, on a core of its own.
All train the same small language model on the same data with fused AdamW and clipping to norm 1.0, and read the loss
every 20 steps. Under DeepSpeed all have the two groups of parameters that a Trainer makes, with weight decay and
without: its engine sums and gathers each group by itself. The pairs take turns for `--rounds` rounds; a step's time
is the distance between two calls of the model on the first process. The ratio compares the tenth percentiles over all
rounds, which are steady on a noisy machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import caption, facts, percentile, report, table

HERE = Path(__file__).resolve().parent
STRATEGIES = {
    "ddp": "replicated (DDP)",
    "fsdp": "sharded (FSDP2)",
    "zero1": "DeepSpeed (ZeRO-1)",
    "zero3": "DeepSpeed (ZeRO-3)",
}
# Section of the page -> its strategies.
SECTIONS = {"distributed": ("ddp", "fsdp"), "deepspeed": ("zero1", "zero3")}
CONTENDERS = ("raw", "accelerator", "trainer", "accelerate")
LABELS = {
    "raw": "written by hand",
    "accelerator": "windlass, `Accelerator`",
    "trainer": "windlass, `Trainer`",
    "accelerate": "accelerate",
}
PROCESSES = 2
SKIPPED = 5  # the first steps of each round warm caches up


class Pair:
    """A contender in two processes, which train for one round at each request."""

    def __init__(self, strategy: str, name: str, steps: int) -> None:
        self._name, self._timed = f"{name} ({strategy})", steps - 1 - SKIPPED
        # What a library says on stderr is shown if it fails.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        port = _free_port()
        self._processes = [self._start(strategy, name, steps, rank, port) for rank in range(PROCESSES)]
        self.missing = "missing" in [self._read(process) for process in self._processes]

    def _start(self, strategy: str, name: str, steps: int, rank: int, port: int) -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / "distributed_contenders.py"), strategy, name, str(steps)]
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": PROCESSES, "LOCAL_WORLD_SIZE": PROCESSES}
        environment = {
            **os.environ,
            **{key: str(value) for key, value in ranks.items()},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._log, text=True, env=environment
        )

    def _read(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            self.close()
            self._log.seek(0)
            raise SystemExit(f"{self._log.read()}\n{self._name} stopped")
        return json.loads(line)

    def round(self) -> list[float]:
        """Train once; the first process's step times in milliseconds."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("run\n")
            process.stdin.flush()
        stamps, *_ = [self._read(process) for process in self._processes]
        # The last ones: some loops call the model a few times more before they begin.
        return [(b - a) / 1e6 for a, b in itertools.pairwise(stamps)][-self._timed :]

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(strategy: str, names: list[str], steps: int, rounds: int) -> dict[str, list[float] | None]:
    """Step times of each contender in milliseconds; None for what is not installed."""
    pairs = {name: Pair(strategy, name, steps) for name in names}
    times: dict[str, list[float] | None] = {n: None if p.missing else [] for n, p in pairs.items()}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found = times[name]
            if found is not None:
                found.extend(pairs[name].round())
    for pair in pairs.values():
        pair.close()
    return times


def summarise(times: dict[str, list[float] | None]) -> dict[str, dict[str, float] | None]:
    """Median and tenth percentile of each contender, in milliseconds."""
    return {
        name: None
        if found is None
        else {"steps": len(found), "median": percentile(found, 0.5), "p10": percentile(found, 0.1)}
        for name, found in times.items()
    }


def render(figures: dict[str, Any]) -> str:
    rows: list[list[str]] = []
    for strategy, found in figures["milliseconds"].items():
        for name, it in found.items():
            cells = ["not installed", "", "", ""]
            if it is not None:
                ratio = "" if name == "raw" else f"{it['p10'] / found['raw']['p10']:.3f}"
                cells = [f"{it['p10']:.1f}", ratio, f"{it['median']:.1f}", f"{it['steps']}"]
            rows.append([f"{STRATEGIES[strategy]}: {LABELS[name]}", *cells])
    head = ["loop", "step, ms (p10)", "ratio to the hand-written loop", "step, ms (median)", "steps timed"]
    return f"{table(head, rows)}\n\n{caption(figures)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="steps of one round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--deepspeed", action="store_true", help="compare under DeepSpeed")
    parser.add_argument("--strategies", help="comma-separated; by default all, with or without DeepSpeed")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="contenders; raw is always run")
    parser.add_argument(
        "--write", type=Path, help="a page with a section `distributed`, or `deepspeed`, to rewrite"
    )
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    section = "deepspeed" if options.deepspeed else "distributed"
    strategies = options.strategies.split(",") if options.strategies else SECTIONS[section]
    asked = {"raw", *options.only.split(",")}
    if unknown := [*(asked - set(CONTENDERS)), *(set(strategies) - STRATEGIES.keys())]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join((*STRATEGIES, *CONTENDERS))}")
    names = [name for name in CONTENDERS if name in asked]
    # On CPUs accelerate leaves its DeepSpeed plugin aside without a word, and replicates.
    of_engines = [name for name in names if name != "accelerate"]
    times = {
        one: run(one, of_engines if one.startswith("zero") else names, options.steps, options.rounds)
        for one in strategies
    }
    figures = {
        **facts(),
        "steps": options.steps,
        "rounds": options.rounds,
        "milliseconds": {one: summarise(found) for one, found in times.items()},
    }
    report(section, render(figures), figures, options.write, options.json)


if __name__ == "__main__":
    main()
