"""Text that two ranks generate with a model that ZeRO divides: that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import on_ranks
from tests.zero import generation_runs

from windlass.core.optional import is_available

TOLERANCE = 5e-6  # of fp32

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (is_available("deepspeed") and is_available("transformers")),
        reason="needs DeepSpeed and transformers: pip install 'windlass-trainer[deepspeed,hf]'",
    ),
]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_same_text_as_one_process(stage: int, tmp_path: Path) -> None:
    """Ranks have different numbers of batches, and texts of different lengths."""
    [alone] = on_ranks(0, generation_runs.main, tmp_path / "alone", -1)
    first, second = on_ranks(2, generation_runs.main, tmp_path / "run", stage)
    assert first == second, "ranks disagree"
    assert first["divided"] == (stage == 3)
    assert first["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    for name in ("predictions", "labels", "bare"):
        assert first[name] == alone[name], name
    assert len({tuple(row) for row in first["predictions"]}) > 3, "the same text for all shows nothing"
