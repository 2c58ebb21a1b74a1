"""Layouts that are tried for given devices: what is written is read, and what is proposed is not refused by the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.forecast.models import llama, trainer

from windlass import ParallelismConfig
from windlass.core.errors import ConfigError
from windlass.forecast.layouts import Devices, layouts
from windlass.forecast.tracing import trace_of


def test_devices_as_they_are_written() -> None:
    assert Devices.read("8x80GB") == (8, 80 * 10**9)
    assert Devices.read("8x80GB").room < 80 * 10**9
    for text in ("8", "80GB", "0x80GB", "8x80", "-1x80GB"):
        with pytest.raises(ConfigError, match="such as 8x80GB"):
            Devices.read(text)


@pytest.mark.parametrize("devices", [1, 2, 3, 6, 8, 1024])
def test_sizes_of_axes_fit_the_number_of_devices(devices: int) -> None:
    found = list(layouts(devices))
    assert found[0].overrides == ()
    assert len({each.name for each in found}) == len(found)
    for layout in found:
        for word in layout.overrides:
            if word.startswith("parallel.mesh."):
                assert devices % int(word.partition("=")[2]) == 0


ARGUMENTS: dict[str, dict[str, Any]] = {
    "parallel.strategy=fsdp": {"fsdp": True},
    "training.activation_checkpointing=true": {"activation_checkpointing": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 6, 8])
def test_what_is_traced_was_checked_as_the_run_is(tmp_path: Path, devices: int) -> None:
    """Every layout is planned, or refused in the words of the run: heads that an axis does not divide, for example."""
    refused = []
    for layout in layouts(devices):
        arguments: dict[str, Any] = {}
        for word in layout.overrides:
            name, _, size = word.partition("=")
            if name.startswith("parallel.mesh."):
                arguments["parallelism_config"] = ParallelismConfig(**{f"{name[-2:]}_size": int(size)})
            else:
                arguments |= ARGUMENTS[word]
        try:
            trace_of(lambda given=arguments: trainer(tmp_path, llama(2), **given).train(), devices)  # type: ignore[misc]
        except ConfigError as error:
            refused.append(f"{layout.name}: {error}")
    assert all("_size" in line for line in refused), refused
    assert len(refused) < len(list(layouts(devices)))
