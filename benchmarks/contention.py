"""What other programs on the machine cost a training step, under several ways in which its threads may wait.

The same small language model is trained by `Trainer` in processes that differ only in the environment with which they
were started: PyTorch's own waiting (`GOMP_SPINCOUNT=300000`: its default, which counts as the user's choice once it is
set), sleeping at once (`OMP_WAIT_POLICY=passive`), and none of these, so that Windlass chooses. They take turns while
0, 1, 2, 6 and 12 other processes compute without a pause. A step's time is
the distance between two ends of steps; the table gives the mean, because waiting for a turn is what a busy machine
costs, and the median where no other process runs. A fair share of the cores takes (threads + busy processes) / cores
times as long as an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from common import caption, facts, report, table

POLICIES = {"default": "PyTorch's default", "passive": "sleep at once", "windlass": "Windlass"}
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with who started it
VOCABULARY, WIDTH, LAYERS, LENGTH, ROWS = 512, 192, 3, 64, 8


def environment(policy: str) -> dict[str, str]:
    """The variables under which a process of this policy is started."""
    unset = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
    plain = {name: value for name, value in os.environ.items() if name not in unset}
    chosen = {
        "default": {"GOMP_SPINCOUNT": "300000"},
        "passive": {"OMP_WAIT_POLICY": "passive"},
        "windlass": {},
    }
    return {**plain, **chosen[policy]}


# --- the process that trains ---------------------------------------------------------------------------------------


def train(seconds: float) -> list[float]:
    """Train for `seconds`; the seconds of each step after the first two."""
    import torch
    from small_model import SmallModel

    from windlass import Trainer, TrainerCallback, TrainingArguments

    class Stamps(TrainerCallback):
        def __init__(self) -> None:
            self.at: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self.at.append(time.perf_counter())
            control.should_training_stop = len(self.at) > 2 and self.at[-1] - self.at[1] > seconds
            return control

    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    stamps = Stamps()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=ROWS, max_steps=100_000, logging_steps=1000, save_strategy="no",
            disable_tqdm=True, report_to="none", use_cpu=True,
        )  # fmt: skip
        Trainer(SmallModel(VOCABULARY, WIDTH, LAYERS), args, train_dataset=rows, callbacks=[stamps]).train()
    return [after - before for before, after in zip(stamps.at[1:-1], stamps.at[2:], strict=True)]


def serve() -> None:
    """Train whenever a number of seconds comes in; the pipe carries figures alone."""
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
    train(0.1)
    print(json.dumps("ready"), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(train(float(line))), file=out, flush=True)


# --- the process that compares -------------------------------------------------------------------------------------


class Contender:
    """A process of one policy, which trains whenever it is asked to."""

    def __init__(self, policy: str) -> None:
        command = [sys.executable, __file__, "--serve"]
        pipe, env = subprocess.PIPE, environment(policy)
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=env
        )
        self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a contender stopped with code {self._process.wait()}")
        return json.loads(line)

    def run(self, seconds: float) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        steps: list[float] = self._read()
        return steps

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def measure(
    policies: list[str], loads: list[int], seconds: float, rounds: int, starts: int
) -> dict[str, dict[int, list[float]]]:
    """Seconds of every step, by policy and number of busy processes."""
    steps: dict[str, dict[int, list[float]]] = {policy: {load: [] for load in loads} for policy in policies}
    for load in [*loads, *[0] * (starts - 1)]:
        contenders = {policy: Contender(policy) for policy in policies}
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(load)]
        try:
            for turn in range(rounds):
                order = policies[turn % len(policies) :] + policies[: turn % len(policies)]
                for policy in order:
                    steps[policy][load] += contenders[policy].run(seconds)
        finally:
            for process in busy:
                process.kill()
                process.wait()
        for contender in contenders.values():
            contender.close()
    return steps


def summarise(steps: dict[str, dict[int, list[float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds per step and number of steps, by policy and load: the mean, on the idle machine the median."""
    return {
        policy: {
            str(load): {"ms": 1000 * (mean(times) if load else median(times)), "steps": len(times)}
            for load, times in of_load.items()
        }
        for policy, of_load in steps.items()
    }


def render(figures: dict[str, Any]) -> str:
    cores, threads, measured = figures["cores"], figures["threads"], figures["policies"]
    idle = measured["default"]["0"]["ms"]
    rows = []
    for load in figures["loads"]:
        fair = max(1.0, (threads + load) / cores)
        cells = [
            f"{measured[p][str(load)]['ms']:.0f} ({measured[p][str(load)]['ms'] / idle:.2f})"
            for p in measured
        ]
        rows.append([f"{load}", f"{fair:.1f}", *cells])
    head = ["busy processes", "fair share, times as long", *(f"{POLICIES[p]}, ms" for p in measured)]
    note = (
        "The median step of several starts on the idle machine, the mean on a busy one. In brackets: times as long as "
        f"PyTorch's default takes on the idle machine. {threads} threads on {cores} "
        f"cores; at least {min(m['steps'] for of in measured.values() for m in of.values())} steps a cell."
    )
    return f"{table(head, rows)}\n\n{note}\n\n{caption(figures)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--loads", default="0,1,2,6,12", help="numbers of busy processes, comma-separated; with 0"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of one turn of one policy")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--starts", type=int, default=4, help="on the idle machine, where starts differ more than policies do"
    )
    parser.add_argument(
        "--policies", default=",".join(POLICIES), help="comma-separated; default is always run"
    )
    parser.add_argument("--write", type=Path, help="a page with a section `contention` to rewrite")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    loads = sorted({0, *map(int, options.loads.split(","))})
    from windlass.core.threads import usable_cores

    chosen = ["default", *(name for name in options.policies.split(",") if name != "default")]
    policies = summarise(measure(chosen, loads, options.seconds, options.rounds, options.starts))
    cores = usable_cores()
    figures = {**facts(), "cores": cores, "threads": cores, "loads": loads, "policies": policies}
    report("contention", render(figures), figures, options.write, options.json)


if __name__ == "__main__":
    main()
