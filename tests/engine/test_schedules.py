"""A schedule of a pipeline that the installed torch does not have is refused with the release that does."""

from __future__ import annotations

import pytest
import torch

from windlass.config.plan import PipelinePlan
from windlass.core.errors import ConfigError
from windlass.engine.schedules import check_schedule


def test_a_schedule_of_a_newer_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    check_schedule(PipelinePlan(2, "ZBVZeroBubble", 2))
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    with pytest.raises(ConfigError, match=r"pp_schedule='ZBVZeroBubble'.* torch 2\.11 .* 2\.9\.1 is"):
        check_schedule(PipelinePlan(2, "ZBVZeroBubble", 2))
    check_schedule(PipelinePlan(2, "InterleavedZeroBubble", 2))
