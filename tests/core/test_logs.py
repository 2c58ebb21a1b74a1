"""What is logged, and by which process."""

from __future__ import annotations

import logging

import pytest

from windlass.core.logs import get_job_logger


@pytest.mark.parametrize(("rank", "said"), [(None, 1), ("0", 1), ("1", 0)])
def test_the_main_process_speaks_for_the_job(
    rank: str | None, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", None if rank is None else "2")):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    logger = get_job_logger("windlass.test_logs")
    with caplog.at_level(logging.WARNING):
        logger.warning("%d updates", 3)
        logger.info("not asked for")
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("windlass.test_logs", "3 updates")
    ] * said
