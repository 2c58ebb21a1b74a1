"""Calls that need all processes, made by some of them only (`if accelerator.is_main_process: save_state()`)."""

from __future__ import annotations

import re
import tempfile

import pytest
import torch
from tests.dist.launch import on_ranks

from windlass.accelerator.accelerator import Accelerator
from windlass.core.errors import RankMismatchError


@pytest.mark.dist
def test_processes_in_different_calls_learn_of_it_at_once() -> None:
    first, second = on_ranks(2, different_calls)
    assert first == second
    for said, calls in zip(first, CALLS, strict=True):
        for rank, call in enumerate(calls):
            place = rf"Accelerator\.{call} at test_same_call\.py:\d+ on rank {rank}"
            assert re.search(place, said)
        assert said.endswith("made by all of them: not under `if accelerator.is_main_process:`.")
        assert "setting" not in said


# --- what each rank runs ----------------------------------------------------------------------------------------------

# The calls of two ranks that meet
CALLS = [
    ("save_state", "wait_for_everyone"),
    ("gather", "wait_for_everyone"),
    ("wait_for_everyone", "gather_for_metrics"),
    ("gather_for_metrics", "save_state"),
    ("load_state", "gather"),
]


def different_calls() -> list[str]:
    accelerator, said = Accelerator(cpu=True), []
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with tempfile.TemporaryDirectory() as folder:
        given = dict.fromkeys(("save_state", "load_state"), (folder,))
        for calls in CALLS:
            call = calls[accelerator.process_index]
            values = () if call == "wait_for_everyone" else given.get(call, (torch.ones(2),))
            with pytest.raises(RankMismatchError) as error:
                getattr(accelerator, call)(*values)
            said.append(str(error.value))
        accelerator.wait_for_everyone()
    assert accelerator.gather(model.weight.detach()[0]).numel() == accelerator.num_processes
    return said
