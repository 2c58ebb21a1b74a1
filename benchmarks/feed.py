"""How fast batches come without data workers: batches per second of each loader, as a share of torch's own.

Each contender reads one shuffled pass over the same rows in memory, in turns, for `--rounds` rounds, and collates them
to the same batches. torch's `DataLoader` is the reference of each round, so the speed of the machine cancels out. A run
reads groups: the batches of an update, with their position.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from common import caption, facts, report, table
from torch import Tensor, nn
from torch.utils.data import DataLoader

BATCH = 8
REFERENCE = "torch's DataLoader"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        raise NotImplementedError  # no batch is computed


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of `width` tokens, made before the clock starts."""

    def __init__(self, rows: int, width: int) -> None:
        tokens = torch.randint(0, 1000, (rows, width))
        self._rows = [{"input_ids": row, "labels": row} for row in tokens]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._rows[index]


def contenders(data: Rows, folder: Path) -> dict[str, Callable[[], Iterable[Any]]]:
    """Each makes one pass; packages that are not installed are left out."""
    import windlass

    def options(name: str, **more: Any) -> dict[str, Any]:
        return {
            "output_dir": str(folder / name),
            "per_device_train_batch_size": BATCH,
            "dataloader_num_workers": 0,
            "report_to": "none",
            "use_cpu": True,
            **more,
        }

    torchs = DataLoader(data, batch_size=BATCH, shuffle=True)
    trainer = windlass.Trainer(Model(), windlass.TrainingArguments(**options("windlass")), train_dataset=data)
    loader = trainer.get_train_dataloader()
    prepared = windlass.Accelerator(cpu=True).prepare(DataLoader(data, batch_size=BATCH, shuffle=True))
    found: dict[str, Callable[[], Iterable[Any]]] = {
        REFERENCE: lambda: torchs,
        "Windlass, a run": lambda: (group.batches for group in loader.groups(1)),
        "Windlass, `get_train_dataloader`": lambda: loader,
        "Windlass, `Accelerator.prepare`": lambda: prepared,
    }
    try:
        import transformers
        from accelerate import Accelerator
    except ImportError:
        return found
    peer = transformers.Trainer(
        Model(), transformers.TrainingArguments(**options("peer")), train_dataset=data
    )
    theirs = Accelerator(cpu=True).prepare(DataLoader(data, batch_size=BATCH, shuffle=True))
    return {
        **found,
        "transformers, `get_train_dataloader`": peer.get_train_dataloader,
        "accelerate, `Accelerator.prepare`": lambda: theirs,
    }


def seconds(make: Callable[[], Iterable[Any]]) -> tuple[float, int]:
    """Of one pass, and its batches."""
    began, count = time.perf_counter(), 0
    for _ in make():
        count += 1
    return time.perf_counter() - began, count


def run(rows: int, width: int, rounds: int) -> dict[str, float]:
    """The median share of torch's speed of each contender. The first round only warms up."""
    torch.set_num_threads(1)
    shares: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="windlass-feed-") as place:
        ways = contenders(Rows(rows, width), Path(place))
        for turn in range(rounds + 1):
            measured = {name: seconds(make) for name, make in ways.items()}
            counts = {count for _, count in measured.values()}
            assert len(counts) == 1, f"not the same batches: {measured}"
            for name, (spent, _) in measured.items() if turn else ():
                shares.setdefault(name, []).append(measured[REFERENCE][0] / spent)
    return {name: statistics.median(found) for name, found in shares.items()}


def render(figures: dict[str, Any]) -> str:
    head = ["loader", *(f"{width} tokens a row" for width in figures["widths"])]
    names = next(iter(figures["shares"].values()))
    rows = [[name, *(f"{shares[name]:.2f}" for shares in figures["shares"].values())] for name in names]
    return f"{table(head, rows)}\n\n{caption(figures)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", type=Path, help="page whose section 'feed' gets the table")
    parser.add_argument("--raw", type=Path)
    asked = parser.parse_args()
    widths = [64, 1024]
    shares = {str(width): run(asked.rows, width, asked.rounds) for width in widths}
    figures = {**facts(), "widths": widths, "shares": shares}
    report("feed", render(figures), figures, asked.write, asked.raw)


if __name__ == "__main__":
    main()
