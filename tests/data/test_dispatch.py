"""A process that dies while others depend on what it reads is noticed; no process waits for ever.

What loaders of several ranks give is tested in `prepared_ranks.py`.
"""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.dist.launch import Started

from windlass.core.errors import DataError
from windlass.data.dispatch import _cut

SCRIPT = Path(__file__).with_name("prepared_death_ranks.py")


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["dispatched", "counted"])
def test_the_death_of_a_reader_is_noticed(mode: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    # No launcher ends the second because the first one failed.
    with Started(SCRIPT, mode, environ=ranks[0]) as reader, Started(SCRIPT, mode, environ=ranks[1]) as other:
        codes, said = zip(reader.end(), other.end(), strict=True)
    assert codes == (9, 3), said
    assert "batch 0" in said[1], "it had begun"
    assert "noticed" in said[1]


def test_a_batch_is_cut_with_its_lists_of_samples() -> None:
    batch = {
        "x": torch.arange(4),
        "names": list("abcd"),
        "pair": (torch.eye(4), "all"),
        "scale": torch.tensor(2),
        "weights": np.arange(4.0),
    }
    part = _cut(batch, slice(1, 3), process_index=0, num_processes=2)
    assert part["x"].tolist() == [1, 2]
    assert part["names"] == ["b", "c"]
    assert torch.equal(part["pair"][0], torch.eye(4)[1:3])
    assert part["pair"][1] == "all"
    assert part["scale"] == 2
    assert part["weights"].tolist() == [1.0, 2.0]
    # Weights of classes, say, of which every rank would get others.
    with pytest.raises(DataError, match=r"4 samples.*\[3\].*split_batches=False"):
        _cut({**batch, "weights": np.arange(3.0)}, slice(1, 3), process_index=0, num_processes=2)
