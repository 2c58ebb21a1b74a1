"""What a device does otherwise than a CPU, in a plan of it; and parts of an update that are run for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forecast.models import BATCH, LENGTH, VOCABULARY, trainer

from windlass.core.errors import ConfigError, Problem
from windlass.forecast.child import apart
from windlass.forecast.devices import uncompiled
from windlass.forecast.forecast import Forecast
from windlass.forecast.trace import Trace
from windlass.forecast.tracing import trace_of
from windlass.transforms import linear_cross_entropy


def trace(folder: Path, **options: Any) -> Trace:
    names = ("whole", "on_device")
    given = {name: options.pop(name) for name in names if name in options}
    return trace_of(lambda: trainer(folder, layers=2, **options).train(), **given)


def at_most(found: Trace, kind: str) -> int:
    return found.at_most(lambda owner: owner.kind == kind)


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_few_chunks_of_the_loss_are_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bf16: bool
) -> None:
    """128 targets in chunks of 10: the last is shorter. Two layers are not cut, so only chunks differ."""
    monkeypatch.setattr(linear_cross_entropy, "_FEWEST", 10)
    monkeypatch.setattr(linear_cross_entropy, "_AT_ONCE", 1)
    few, every = (trace(tmp_path, bf16=bf16, whole=whole) for whole in (False, True))
    assert few.peaks == every.peaks
    assert few.work == every.work
    assert sum(every.work.values()) > sum(trace(tmp_path, bf16=bf16, lean_loss=False).work.values())


def test_chunks_are_those_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "_FEWEST", 16)
    monkeypatch.setattr(linear_cross_entropy, "_AT_ONCE", 1)
    on_cpu, on_device = (at_most(trace(tmp_path, on_device=each), "logits") for each in (False, True))
    targets = BATCH * (LENGTH - 1)
    assert (on_cpu, on_device) == tuple(2 * 4 * VOCABULARY * rows for rows in (16, targets))


@pytest.mark.slow
def test_an_optimizer_of_a_device_updates_all_parameters_at_once(tmp_path: Path) -> None:
    temporary = {
        (optim, on_device): at_most(trace(tmp_path, optim=optim, on_device=on_device), "temporary")
        for optim in ("adamw_torch", "adamw_torch_fused")
        for on_device in (False, True)
    }
    assert temporary["adamw_torch", True] > 1.5 * temporary["adamw_torch", False]
    assert temporary["adamw_torch_fused", True] == temporary["adamw_torch_fused", False]


def test_formats_that_this_machine_lacks_are_planned_for_a_device(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a device")
    assert trace(tmp_path, tf32=True, on_device=True).facts["tf32"]
    with pytest.raises(ConfigError, match="tf32"):
        trace(tmp_path, tf32=True)


@pytest.mark.slow
def test_fp16_is_planned(tmp_path: Path) -> None:
    half, single = (trace(tmp_path, fp16=fp16) for fp16 in (True, False))
    assert at_most(half, "copies of weights") > 0
    assert at_most(half, "weights") == at_most(single, "weights")
    assert Forecast(half).peak != Forecast(single).peak


def test_a_forked_process_does_not_wait_for_threads_that_it_lacks() -> None:
    assert apart(torch.get_num_threads) == 1


def test_a_refusal_in_a_forked_process_keeps_its_problems() -> None:
    def refuse() -> None:
        raise ConfigError(
            [Problem("tp_size", 4, "must divide num_attention_heads"), Problem("fsdp", None, "x")]
        )

    with pytest.raises(ConfigError) as refused:
        apart(refuse)
    assert [each.value for each in refused.value.problems] == [4, None]
    assert str(refused.value).count("problem") == 1


def test_every_spelling_of_torch_compile_is_run_as_written() -> None:
    def function() -> None: ...

    before = torch.compile
    with uncompiled():
        assert torch.compile(function, dynamic=False) is torch.compile(model=function) is function
        assert torch.compile(fullgraph=True)(function) is function
    assert torch.compile is before
