"""Inference through a pipeline: two processes compute what one does, with the layers of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.dist.launch import on_ranks
from torch import nn

from windlass import PartialState, prepare_pippy
from windlass.core.errors import ConfigError
from windlass.dist.sharded import Absent


def made() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers).double()


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 40, dtype=torch.float64).view(5, 8)


def test_one_process_has_all_layers() -> None:
    model, expected = made(), made()(batch())
    assert torch.equal(prepare_pippy(model, example_args=(batch(),))(batch()), expected)
    with pytest.raises(ConfigError, match="is inside of 1"):
        prepare_pippy(made(), ["1.1"], no_split_module_classes=["Sequential"])


@pytest.mark.dist
def test_two_processes_have_some_each() -> None:
    first, last = on_ranks(2, main)
    expected = made()(batch()).tolist()
    assert (first["output"], first["held"], last["held"]) == (None, 2 * 72, 72)
    assert first["everywhere"] == last["everywhere"] == last["output"]
    np.testing.assert_allclose(last["output"], expected, rtol=1e-12)


# --- what each rank runs ----------------------------------------------------------------------------------------------


def run(gather_output: bool) -> tuple[nn.Module, Any]:
    model = prepare_pippy(made(), example_args=(batch(),), num_chunks=3, gather_output=gather_output)
    output = model(batch())
    return model, None if output is None else output.tolist()


def main() -> dict[str, Any]:
    PartialState(cpu=True)
    model, output = run(gather_output=False)
    held = sum(p.numel() for p in model.parameters() if not isinstance(p, Absent))
    return {"output": output, "everywhere": run(gather_output=True)[1], "held": held}
