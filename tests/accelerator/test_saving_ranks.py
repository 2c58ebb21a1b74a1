"""`save_state` on two ranks: disks of their own, URLs, adapters, and saves in the background."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import launch

HERE = Path(__file__).parent


@pytest.mark.dist
def test_two_ranks_save_wherever_they_are(tmp_path: Path) -> None:
    assert launch(2, HERE / "saving_ranks.py", tmp_path).count("SAVED ON ALL") == 2
