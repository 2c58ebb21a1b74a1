"""What is logged, and by which process."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from windlass.core.logs import get_job_logger, get_logger


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


@pytest.mark.parametrize("at_terminal", [True, False])
def test_a_line_names_the_package_and_is_folded_at_a_terminal(
    at_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    written.isatty = lambda: at_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setenv("COLUMNS", "40")
    path = "/a/long/path/that/cannot/be/copied/once/it/is/folded"
    get_logger("windlass.test_logs").warning("the files of this run are in %s and stay there", path)
    get_logger("windlass.test_logs").warning("a list\n%s", "one two " * 10)
    lines = written.getvalue().splitlines()
    whole = f"windlass: the files of this run are in {path} and stay there"
    if at_terminal:
        assert lines[:-2] == ["windlass: the files of this run are in", path, "and stay there"]
    else:
        assert lines[:-2] == [whole]
    assert lines[-2:] == ["windlass: a list", "one two " * 10]
