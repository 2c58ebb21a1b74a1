"""What an upload takes from training, with a Hub that takes in 50 MB a second.

The same small language model is trained by `Trainer`, with the same saves: without a Hub, with one that gets the model
of each save, and with one that gets the whole checkpoint of each. Each run is a fresh process on one core; the Hub of
the tests (`tests/hub/server.py`) is a process on another one. The runs take turns. Timed is training alone, between the
first and the last update: a run waits for its last upload after that. How often a run saves decides the share, so the
table also gives the seconds of training that each upload costs.
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
from statistics import median
from typing import Any

from common import caption, facts, report, table

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "none": "no Hub", "every_save": "the model of each save", "checkpoint": "the whole checkpoint of each save"
}  # fmt: skip
VOCABULARY, WIDTH, LAYERS, LENGTH, ROWS = 8192, 384, 4, 64, 4


def pin(core: int) -> None:
    """Keep this process on one core, if the system can."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})


def serve(rate: float) -> None:
    """The Hub, until the process that asked for it closes the pipe; a line that comes in gives the commits so far."""
    pin(1)
    sys.path.insert(0, str(ROOT))
    from tests.hub.server import running

    with running() as server:
        hub = server.hub
        hub.rate = rate
        print(json.dumps(hub.url), flush=True)
        for _ in sys.stdin:
            print(json.dumps(sum(len(found.commits) - 1 for found in hub.repositories.values())), flush=True)
            hub.reset()


def train(kind: str, updates: int, every: int) -> dict[str, float]:
    """Train in this process; the seconds of its updates, and the bytes of a checkpoint and of its model."""
    pin(0)
    import torch
    from small_model import SmallModel

    from windlass import Trainer, TrainerCallback, TrainingArguments

    class Stamps(TrainerCallback):
        def __init__(self) -> None:
            self.at: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.at.append(time.perf_counter())

    torch.set_num_threads(1)
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (64 * ROWS, LENGTH))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    stamps = Stamps()
    hub = {} if kind == "none" else {"push_to_hub": True, "hub_strategy": kind, "hub_always_push": True}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=ROWS, max_steps=updates, logging_steps=1000, save_steps=every,
            save_total_limit=1, disable_tqdm=True, report_to="none", use_cpu=True, hub_model_id="someone/run",
            hub_token="hf_writerwriterwriter0", **hub,
        )  # fmt: skip
        Trainer(SmallModel(VOCABULARY, WIDTH, LAYERS), args, train_dataset=rows, callbacks=[stamps]).train()
        newest = next(Path(folder).glob("checkpoint-*"))
        size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
        weights = (newest / "model.safetensors").stat().st_size
    return {"seconds": stamps.at[-1] - stamps.at[0], "checkpoint": size, "every_save": weights, "none": 0}


def measure(updates: int, every: int, rounds: int, rate: float) -> dict[str, list[dict[str, float]]]:
    """The runs of each kind, in turns."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, __file__, "--serve", str(rate)], **options) as server:  # type: ignore[call-overload]
        assert server.stdin is not None
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())
        switches = {
            "HF_ENDPOINT": url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "OMP_NUM_THREADS": "1",
        }
        for turn in range(rounds):
            kinds = list(KINDS)
            for kind in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
                command = [
                    sys.executable,
                    __file__,
                    "--train",
                    kind,
                    f"--updates={updates}",
                    f"--every={every}",
                ]
                done = subprocess.run(
                    command, env=os.environ | switches, stdout=subprocess.PIPE, text=True, check=True
                )
                server.stdin.write("\n")
                server.stdin.flush()
                commits = json.loads(server.stdout.readline())
                found[kind].append({**json.loads(done.stdout.splitlines()[-1]), "commits": commits})
        server.stdin.close()
    return found


def render(figures: dict[str, Any]) -> str:
    runs = figures["runs"]
    alone = median(run["seconds"] for run in runs["none"])
    body = []
    for kind, label in KINDS.items():
        seconds = median(run["seconds"] for run in runs[kind])
        size, uploads = runs[kind][0][kind] / 1e6, runs[kind][0]["commits"]
        cost = f"{(seconds - alone) / uploads:+.2f}" if uploads else ""
        body.append([
            label, f"{size:.0f}" if uploads else "", uploads, f"{seconds:.1f}", f"{100 * (seconds / alone - 1):+.1f} %",
            cost,
        ])  # fmt: skip
    head = ["uploaded", "MB each", "uploads", "seconds of training", "against no Hub", "seconds per upload"]
    note = (
        f"The median of {len(runs['none'])} runs of {figures['updates']} updates with a save every {figures['every']} "
        f"updates ({alone / figures['updates'] * figures['every']:.0f} s); the Hub takes in "
        f"{figures['rate'] / 1e6:.0f} MB/s."
    )
    return f"{table(head, body)}\n\n{note}\n\n{caption(figures)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--every", type=int, default=200, help="updates between two saves")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=50e6, help="bytes that the Hub takes in a second")
    parser.add_argument("--write", type=Path, help="a page with a section `hub` to rewrite")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--train", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    if options.train:
        print(json.dumps(train(options.train, options.updates, options.every)))
        return
    runs = measure(options.updates, options.every, options.rounds, options.rate)
    settings = {"updates": options.updates, "every": options.every, "rate": options.rate}
    figures = {**facts(("torch", "windlass", "huggingface_hub")), **settings, "runs": runs}
    report("hub", render(figures), figures, options.write, options.json)


if __name__ == "__main__":
    main()
