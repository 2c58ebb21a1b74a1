"""The order of processes, by their local ranks."""

from __future__ import annotations

import pytest
from transformers import trainer_utils as reference

from windlass.compat import script_helpers as ours


@pytest.mark.parametrize("rank", [-1, 0, 1, 3])
def test_main_processes(rank: int) -> None:
    assert ours.is_main_process(rank) is reference.is_main_process(rank)


def test_a_process_by_itself() -> None:
    assert ours.total_processes_number(-1) == reference.total_processes_number(-1) == 1
    with ours.torch_distributed_zero_first(-1):
        pass
