"""Start data workers many times, on several ranks, and count those that had to be replaced.

    python -m tests.reliability.worker_starts --starts 20000 --ranks 2,3,4

A worker is forked from a process with the threads of process groups: a lock that one of them holds at that instant
stays locked in the worker. Each rank trains a tiny model with workers that end with each epoch, by a `Trainer` with an
evaluation, or in a loop of its own. A job whose starts stop growing for `--patience` seconds counts as a hang: what its
processes wait for is printed, and the command fails.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import platform
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

LOOPS = ("trainer", "own-loop")
_COUNTS = struct.Struct("<qq")  # forks, replacements
_TICK = 0.5


class Counts(logging.Handler):
    """Counts forks and warnings of a replaced worker in a file that outlives this process."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("w+b", buffering=0)
        self._forks, self._replaced = 0, 0
        os.register_at_fork(after_in_parent=self._forked)

    def emit(self, record: logging.LogRecord) -> None:
        self._replaced += "replaced" in record.getMessage()
        self._write()

    def _forked(self) -> None:
        self._forks += 1
        self._write()

    def _write(self) -> None:
        os.pwrite(self._file.fileno(), _COUNTS.pack(self._forks, self._replaced), 0)


def run_rank(loop: str, epochs: int, folder: Path) -> None:
    """One rank of a job, in this process."""
    import torch.distributed as dist

    from windlass.core.logs import get_logger

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    get_logger("windlass").addHandler(Counts(folder / f"counts-{rank}"))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    (_with_trainer if loop == "trainer" else _in_own_loop)(epochs, folder)


def _with_trainer(epochs: int, folder: Path) -> None:
    from windlass import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=str(folder / "out"),
        num_train_epochs=epochs,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        dataloader_num_workers=1,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
    )
    Trainer(_model(), args, train_dataset=_samples(2), eval_dataset=_samples(1)).train()


def _in_own_loop(epochs: int, folder: Path) -> None:
    import torch
    from torch.utils.data import DataLoader

    from windlass import Accelerator

    accelerator = Accelerator(cpu=True)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(_samples(2), batch_size=2, shuffle=True, num_workers=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for batch in loader:
            loss, _ = model(**batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.gather(loss.detach())


def _samples(batches: int) -> list[dict[str, Any]]:
    """As many batches of two for each rank."""
    import torch

    count = 2 * batches * int(os.environ["WORLD_SIZE"])
    return [{"x": torch.full((4,), float(i)), "labels": torch.tensor(i % 2)} for i in range(count)]


def _model() -> Any:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

        def forward(self, x: Any, labels: Any) -> Any:
            logits = self.layers(x)
            return nn.functional.cross_entropy(logits, labels), logits

    torch.manual_seed(0)
    return Net()


class Job:
    """The ranks of one job, as processes, each at the head of a group to which its workers belong."""

    def __init__(self, loop: str, world: int, starts: int, folder: Path) -> None:
        self._folder, self.world = folder, world
        epochs = max(starts // (world * (2 if loop == "trainer" else 1)), 1)
        command = [sys.executable, "-m", __spec__.name, "--rank-of", loop, "--epochs", str(epochs)]
        self._ranks = [
            subprocess.Popen(
                [*command, "--folder", str(folder)],
                env=os.environ | _variables(rank, world),
                stdout=subprocess.DEVNULL,
                stderr=(folder / f"said-{rank}").open("w"),
                start_new_session=True,
            )
            for rank in range(world)
        ]

    def counts(self) -> tuple[int, int]:
        """Forks and replacements so far, over all ranks."""
        forks, replaced = 0, 0
        for rank in range(self.world):
            with contextlib.suppress(FileNotFoundError):
                content = (self._folder / f"counts-{rank}").read_bytes()
                if len(content) == _COUNTS.size:
                    one, other = _COUNTS.unpack(content)
                    forks, replaced = forks + one, replaced + other
        return forks, replaced

    def wait(self, patience: float) -> str:
        """Until all ranks have ended: what went wrong, empty if nothing did."""
        seen, moved = -1, time.monotonic()
        while any(rank.poll() is None for rank in self._ranks):
            time.sleep(_TICK)
            forks, _ = self.counts()
            if forks != seen:
                seen, moved = forks, time.monotonic()
            if time.monotonic() - moved > patience:
                return f"no worker was started for {patience:g} s\n{self._waits()}"
            if any(rank.poll() for rank in self._ranks):
                break
        codes = [rank.wait(patience) if rank.poll() is None else rank.returncode for rank in self._ranks]
        if not any(codes):
            return ""
        said = "".join((self._folder / f"said-{rank}").read_text()[-2000:] for rank in range(self.world))
        return f"the ranks ended with {codes}\n{said}"

    def _waits(self) -> str:
        lines = []
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                if os.getsid(int(status.parent.name)) in [rank.pid for rank in self._ranks]:
                    threads = [
                        (task / "comm").read_text().strip() + ":" + (task / "wchan").read_text()
                        for task in (status.parent / "task").iterdir()
                    ]
                    parent = next(line for line in status.read_text().splitlines() if "PPid" in line)
                    lines.append(f"{status.parent.name} ({parent}) {threads}")
        return "\n".join(lines)

    def end(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


def _variables(rank: int, world: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }


def start_many(starts: int, worlds: Sequence[int], patience: float, per_job: int = 1000) -> str:
    """Run jobs until so many workers were started; returns a report.

    Raises:
        SystemExit: a job hung or failed.
    """
    import torch

    begun, done, replaced, number = time.monotonic(), 0, 0, 0
    while done < starts:
        world, loop = worlds[number % len(worlds)], LOOPS[number // len(worlds) % len(LOOPS)]
        with tempfile.TemporaryDirectory(prefix="windlass-starts-") as name:
            job = Job(loop, world, min(per_job, starts - done), Path(name))
            try:
                trouble = job.wait(patience)
                forks, other = job.counts()
            finally:
                job.end()
        number, done, replaced = number + 1, done + forks, replaced + other
        passed = time.monotonic() - begun
        print(f"{loop}, {world} ranks: {done} starts, {replaced} replaced, {passed:.0f} s", flush=True)
        if trouble:
            raise SystemExit(f"job {number} failed after {forks} starts: {trouble}")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{done} starts on {worlds} ranks, {replaced} replaced, none hung, {passed:.0f} s ({versions})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=20_000)
    parser.add_argument("--ranks", default="2,3,4", help="sizes of the jobs, one after the other")
    parser.add_argument("--patience", type=float, default=180.0)
    parser.add_argument("--per-job", type=int, default=1000)
    parser.add_argument("--rank-of", choices=LOOPS, help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        run_rank(args.rank_of, args.epochs, args.folder)
        return
    worlds = [int(world) for world in args.ranks.split(",")]
    print(start_many(args.starts, worlds, args.patience, args.per_job))


if __name__ == "__main__":
    main()
