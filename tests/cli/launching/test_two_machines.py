"""`windlass launch` on each of two machines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.launching.machines import launch_on_both
from tests.cli.launching.resuming_ranks import UPDATES, train

SCRIPT = Path(__file__).parent / "resuming_ranks.py"


@pytest.mark.slow
@pytest.mark.dist
def test_a_job_whose_worker_was_killed_starts_again_and_ends_with_the_right_weights(tmp_path: Path) -> None:
    codes, said = launch_on_both("--max_restarts", 1, SCRIPT, tmp_path / "two")
    assert codes == [0, 0], "\n".join(said)
    assert "rank 1 of machine 1" in said[0]
    assert "rank 0 of machine 0" in said[1]
    for text in said:
        assert "the job failed: rank 1 was killed by SIGKILL" in text
        assert "[step 5," in text
        assert "restart 1 of 1" in text
    train(tmp_path / "one", world=1)
    found, expected = (
        load_file(tmp_path / name / f"checkpoint-{UPDATES}" / "model.safetensors") for name in ("two", "one")
    )
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
