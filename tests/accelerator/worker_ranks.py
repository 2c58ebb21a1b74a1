"""One rank whose datasets hold its accelerator, in data workers that are spawned."""

from __future__ import annotations

from typing import Any

from tests.accelerator.asking_dataset import Asking, Waiting, facts_of
from torch.utils.data import DataLoader

from windlass import Accelerator
from windlass.state import AcceleratorState, PartialState


def spawned(dataset: Any) -> Any:
    return next(iter(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")))


def main() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    states = [accelerator, accelerator.state, PartialState(), AcceleratorState()]
    expected = facts_of(accelerator)
    assert (expected["num_processes"], expected["mixed_precision"]) == ("2", "bf16")
    for held in (states, states[2:3], states[3:]):
        found = spawned(Asking(held, (PartialState, AcceleratorState) if held is states else (PartialState,)))
        assert all(facts.items() <= expected.items() for facts in [*found["held"], *found["new"]]), found
    error = spawned(Waiting(accelerator))
    assert error.startswith("DataError: a data worker of rank"), error
