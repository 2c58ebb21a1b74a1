"""A loop of the user's own on PyTorch/XLA's devices: equal to the CPU, one sync per update, saved and restored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.xla.models import TOLERANCE, counters, furthest, needs_xla, new_model, rows, weights
from torch.utils.data import DataLoader

from windlass import Accelerator

pytestmark = [pytest.mark.xla, needs_xla]


class Loop:
    """AdamW with clipping and a schedule, over updates of two micro-batches of four samples."""

    def __init__(self, **options: Any) -> None:
        self.accelerator = Accelerator(gradient_accumulation_steps=2, **options)
        model = new_model()
        # Made before `prepare` moves the model, as scripts do.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader = DataLoader(rows(), batch_size=4)  # type: ignore[arg-type]
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )

    def losses(self) -> Iterator[torch.Tensor]:
        """Train for an epoch; the loss of each micro-batch, on the device."""
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch)["loss"]
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            yield loss.detach()


def numbers(losses: Iterator[torch.Tensor]) -> list[float]:
    return [float(loss) for loss in losses]


def test_losses_and_weights_are_those_of_the_cpu() -> None:
    here = Loop()
    found = numbers(here.losses())
    assert here.accelerator.device.type == "xla"
    assert here.model.head.weight is here.model.embed.weight
    there = Loop(cpu=True)
    assert found == pytest.approx(numbers(there.losses()), abs=TOLERANCE)
    assert furthest(weights(here.model), weights(there.model)) < TOLERANCE


def test_one_graph_one_sync_and_no_read_in_an_update() -> None:
    found = [counters() for number, _ in enumerate(Loop().losses()) if number % 2]
    settled = found[2:]
    assert len(settled) >= 4
    for earlier, later in itertools.pairwise(settled):
        asked = {name: later[name] - earlier[name] for name in later}
        assert asked == {"compiled": 0, "graphs": 1, "syncs": 1, "read": 0}


def test_each_batch_of_an_evaluation_is_one_graph_and_is_not_read() -> None:
    """The sum of losses is not read before the end: that alone would keep all batches in one graph."""
    loop, found = Loop(), []
    loop.model.eval()
    total: Any = 0.0
    for batch in loop.loader:
        with torch.no_grad():
            total = total + loop.model(**batch)["loss"]
        found.append(counters())
    settled = found[2:]
    assert len(settled) > 10
    for earlier, later in itertools.pairwise(settled):
        asked = {name: later[name] - earlier[name] for name in later}
        assert asked == {"compiled": 0, "graphs": 1, "syncs": 1, "read": 0}
    assert loop.accelerator.device.type == "xla"


def test_a_state_is_continued_with_the_same_bits(tmp_path: Path) -> None:
    whole = Loop()
    numbers(whole.losses())
    whole.accelerator.save_state(str(tmp_path / "state"))
    expected = numbers(whole.losses())
    again = Loop()
    again.accelerator.load_state(str(tmp_path / "state"))
    assert numbers(again.losses()) == expected
    assert furthest(weights(again.model), weights(whole.model)) == 0
    there = Loop(cpu=True)
    there.accelerator.load_state(str(tmp_path / "state"))
    assert numbers(there.losses()) == pytest.approx(expected, abs=1e-4)


def test_values_are_gathered_for_metrics() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(rows(10), batch_size=4))  # type: ignore[arg-type]
    found = [accelerator.gather_for_metrics(batch["labels"]) for batch in loader]
    assert [len(part) for part in found] == [4, 4, 2]
    expected = torch.stack([row["labels"] for row in rows(10)])
    assert torch.equal(torch.cat([part.cpu() for part in found]), expected)
