"""Optimizers on PyTorch/XLA's devices: their updates are those of the CPU, and none is computed on the host."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.xla.models import counters, furthest, needs_xla, weights
from torch import nn

from windlass import Trainer, TrainingArguments
from windlass.core import xla
from windlass.optim.optimizers.rounding import add_stochastically_, round_up_or_down

pytestmark = [pytest.mark.xla, needs_xla]
RATE = 1e-3
LOW_RANK = {"optim_target_modules": "all-linear", "optim_args": "rank=4"}
# Adam and its kin divide by gradients' own size, so a rounding of the last bit of a small one shows.
CLOSE = 1e-6
# bfloat16 within: its matrices are orthogonal to two or three digits, and move a parameter by the rate or less.
HALF = {"muon": 0.5 * RATE}


class Layers(nn.Module):
    """A wide and a tall matrix."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return hidden


def trained(folder: Path, on_cpu: bool, dtype: torch.dtype, **options: Any) -> tuple[nn.Module, list[Any]]:
    """Five updates by hand; what each asked of the device."""
    args = TrainingArguments(str(folder), use_cpu=on_cpu, report_to="none", learning_rate=RATE, **options)
    model = Layers(dtype).to(args.device)
    optimizer = Trainer(model, args).create_optimizer()
    batches = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = [counters()]
    for batch in batches:
        model(batch.to(args.device)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not on_cpu:
            xla.sync()
        found.append(counters())
    return model, found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in (
            "adamw_torch_fused", "adafactor", "lion_32bit", "muon", "ademamix", "stable_adamw", "grokadamw",
            "schedule_free_adamw",
        )),
        ("apollo_adamw", LOW_RANK),
        ("galore_adafactor", LOW_RANK),
        ("adamw_anyprecision", {"optim_args": "use_kahan_summation=True"}),
    ],
)  # fmt: skip
def test_an_update_is_that_of_the_cpu_and_one_graph(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    half = name == "adamw_anyprecision"
    dtype = torch.bfloat16 if half else torch.float32
    there, _ = trained(tmp_path, True, dtype, optim=name, **options)
    here, found = trained(tmp_path, False, dtype, optim=name, **options)
    start = weights(Layers(dtype))
    tolerance = 2.0**-9 if half else HALF.get(name, CLOSE)  # half a step of bf16 below 1, of values below 0.5
    assert furthest(weights(here), weights(there)) <= tolerance
    assert furthest(weights(here), start) > tolerance
    assert_one_graph_each(found[3:])


def assert_one_graph_each(found: list[Any]) -> None:
    assert len(found) > 2
    for before, after in itertools.pairwise(found):
        asked = {key: after[key] - before[key] for key in after}
        assert asked == {"compiled": 0, "graphs": 1, "syncs": 1, "read": 0}


def test_weights_rounded_at_random_draw_on_the_device_and_repeat_with_its_seed(tmp_path: Path) -> None:
    after = []
    for seed in (1, 1, 2):
        xla.Generator().manual_seed(seed)
        model, found = trained(
            tmp_path,
            False,
            torch.bfloat16,
            optim="adamw_anyprecision",
            optim_args="bf16_stochastic_round=True",
        )
        after.append(weights(model))
        assert_one_graph_each(found[3:])
    assert furthest(after[0], after[1]) == 0
    assert furthest(after[0], after[2]) > 0


def test_rounding_with_given_noise_has_the_bits_of_the_cpu() -> None:
    device = xla.device()
    kinds = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.0, 3.0e38])
    exact = torch.cat([kinds, torch.randn(4096, generator=torch.Generator().manual_seed(3))])
    noise = torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32)
    expected = round_up_or_down(exact, noise)
    found = round_up_or_down(exact.to(device), noise.to(device)).cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_rounding_at_random_is_to_one_of_the_neighbours_and_right_in_the_mean() -> None:
    device = xla.device()
    weight = torch.ones(1 << 16, dtype=torch.bfloat16, device=device)
    add_stochastically_(weight, torch.full((1 << 16,), 2.0**-9, device=device), 1)
    assert set(weight.cpu().float().unique().tolist()) == {1.0, 1 + 2.0**-7}
    assert abs(weight.cpu().float().mean().item() - (1 + 2.0**-9)) < 5 * 2.0**-7 * 0.5 / 256
