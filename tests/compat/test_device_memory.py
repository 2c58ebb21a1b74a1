"""How much each device may take, compared with accelerate's."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil
import pytest
from accelerate.utils import modeling as reference
from tests.compat.big_models import Model

from windlass.checkpoint import host_memory
from windlass.compat.big_models.device_memory import (
    available_host_memory,
    get_balanced_memory,
    get_max_memory,
)
from windlass.core.errors import ConfigError


def test_what_the_system_says_is_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    available = psutil.virtual_memory().available
    assert 0 < available_host_memory() <= 1.2 * available
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    assert available_host_memory() == pytest.approx(available, rel=0.2), "without the limits of a container"


def test_devices_come_in_order_and_sizes_in_bytes() -> None:
    given = {"disk": "1GB", "cpu": "2KiB", 1: 5, 0: "1MB"}
    ours, theirs = get_max_memory(dict(given)), reference.get_max_memory(dict(given))
    assert list(ours.items()) == list(theirs.items()) == [(0, 10**6), (1, 5), ("cpu", 2048), ("disk", 10**9)]
    assert given["cpu"] == "2KiB", "what was given stays as it was"


def test_absent_devices_are_said(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("windlass").propagate = True
    get_max_memory({64: 1})
    assert "64" in caplog.text


def test_every_unknown_device_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)gpu.*hdd"):
        get_max_memory({"gpu": 1, "hdd": 2, "cpu": 3})


@pytest.mark.parametrize("low_zero", [False, True])
@pytest.mark.parametrize(
    "room", [{0: 4000, 1: 4000}, {0: 900, 1: 5000, 2: 5000}, {0: 9000}, {"cpu": 5}, {0: 0, 1: 50}]
)
@pytest.mark.parametrize("blocks", [None, "Block", ["Block", "Linear"]])
def test_shares_are_those_of_the_reference(room: dict, low_zero: bool, blocks: object) -> None:
    model = Model()
    ours = get_balanced_memory(model, dict(room), blocks, low_zero=low_zero)  # type: ignore[arg-type]
    assert ours == reference.get_balanced_memory(model, dict(room), blocks, low_zero=low_zero)


def test_devices_need_not_be_numbered_without_gaps() -> None:
    """accelerate raises KeyError."""
    model = Model()
    packed = get_balanced_memory(model, {0: 4000, 1: 5000}, low_zero=True)
    gap = get_balanced_memory(model, {0: 4000, 3: 5000}, low_zero=True)
    assert list(gap.values()) == list(packed.values())
    without_zero = {1: 4000, 2: 4000}
    assert get_balanced_memory(model, without_zero, low_zero=True) == get_balanced_memory(model, without_zero)
