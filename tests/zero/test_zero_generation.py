"""Text that two ranks generate with a model that ZeRO divides: that of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.dist.launch import launch, run_script
from tests.zero import generation_runs

from windlass.core.optional import is_available

SCRIPT = Path(generation_runs.__file__)
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
    run_script(SCRIPT, tmp_path, "alone", -1)
    launch(2, SCRIPT, tmp_path, "run", stage)
    names = ("alone-0", "run-0", "run-1")
    alone, first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in names)
    assert first == second, "ranks disagree"
    assert first["divided"] == (stage == 3)
    assert first["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    for name in ("predictions", "labels", "bare"):
        assert first[name] == alone[name], name
    assert len({tuple(row) for row in first["predictions"]}) > 3, "the same text for all shows nothing"
