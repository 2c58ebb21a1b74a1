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


class OfNests(nn.Module):
    """Takes its batch as a dict, in which a list holds a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = made()

    def forward(self, inputs: dict[str, Any], scale: torch.Tensor) -> torch.Tensor:
        rows, (shift,) = inputs["rows"], inputs["more"]
        return self.layers(rows + shift) * scale  # type: ignore[no-any-return]


def nested() -> tuple[dict[str, Any], torch.Tensor]:
    return {"rows": batch(), "more": [batch().flip(0)], "name": "batch"}, torch.tensor(2.0).double()


@pytest.mark.dist
def test_batches_in_nests_are_divided_too() -> None:
    expected = OfNests()(*nested()).tolist()
    for found in on_ranks(2, run_nested):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


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


def run_nested() -> Any:
    PartialState(cpu=True)
    return prepare_pippy(OfNests(), example_args=nested(), num_chunks=3, gather_output=True)(
        *nested()
    ).tolist()
