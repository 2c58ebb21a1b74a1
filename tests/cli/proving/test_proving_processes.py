from __future__ import annotations

from pathlib import Path

from windlass.cli.proving.proving_processes import EndedTraining
from windlass.cli.proving.small_training import REPORT, SmallTraining
from windlass.proofs.small_config import AxisLayout


def test_a_rank_killed_while_it_writes_its_report_is_named(tmp_path: Path) -> None:
    (tmp_path / REPORT.format(0)).write_text('{"reported": [{"los')
    trial = SmallTraining({}, AxisLayout.of({}), batches=1, facts={})
    ended = EndedTraining(trial, tmp_path, {0: -9})
    assert ended.failed == "rank 0 ended with exit code -9"
    assert ended.refused is None
