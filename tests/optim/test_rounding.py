"""Sums in half precision: compensated, or rounded at random."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from windlass.dist.imagined import imagined_job
from windlass.optim.optimizers.rounding import add_compensated_, add_stochastically_, seed_of


def test_what_rounding_loses_is_added_later() -> None:
    weight, error = torch.ones(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(64):
        add_compensated_([weight], [error], [torch.full((1,), 2.0**-10)])
    assert weight.item() + error.item() == 1 + 64 * 2.0**-10


def test_rounding_at_random_is_to_one_of_the_neighbours_and_right_in_the_mean() -> None:
    weight = torch.ones(1 << 16, dtype=torch.bfloat16)
    add_stochastically_(weight, torch.full((1 << 16,), 2.0**-9), 1)
    assert set(weight.float().unique().tolist()) == {1.0, 1 + 2.0**-7}
    assert abs(weight.float().mean().item() - (1 + 2.0**-9)) < 5 * 2.0**-7 * 0.5 / 256


def test_a_seed_repeats_its_bits_and_another_does_not() -> None:
    sums = []
    for seed in (1, 1, 2):
        weight = torch.ones(256, dtype=torch.bfloat16)
        add_stochastically_(weight, torch.full((256,), 2.0**-9), seed)
        sums.append(weight)
    assert torch.equal(sums[0], sums[1])
    assert not torch.equal(sums[0], sums[2])


def test_infinity_and_nan_stay_what_they_are() -> None:
    weight = torch.tensor([float("inf"), float("nan"), -1.0]).bfloat16()
    add_stochastically_(weight, torch.zeros(3), 3)
    assert weight[0].item() == float("inf")
    assert weight[1].isnan()
    assert weight[2].item() == -1


def test_seeds_differ_between_updates_and_parameters() -> None:
    parameter = torch.ones(3)
    numbers = itertools.product(range(10), repeat=3)
    assert len({seed_of(parameter, group, position, step) for group, position, step in numbers}) == 1000


@pytest.mark.parametrize("dim", [0, 1])
def test_seeds_differ_between_parts_along_any_dimension(dim: int) -> None:
    seeds = set()
    for rank in range(2):
        with imagined_job(2, rank):
            mesh = init_device_mesh("cpu", (2,))
            seeds.add(
                seed_of(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(dim)], run_check=False), 0, 0, 1)
            )
    assert len(seeds) == 2
