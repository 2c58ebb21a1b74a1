"""The size of an update: what the arguments say, what a checkpoint had, and what divides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.assemble.batch import objections, resolve_batches, update_size
from windlass.config.accelerator_config import AcceleratorConfig
from windlass.config.plan import BatchPlan, UpdateSize
from windlass.core.mesh import Mesh

SMALL = st.integers(1, 6)


def args(micro: int = 4, accumulation: int = 1, samples: int | None = None, find: bool = False) -> Any:
    return SimpleNamespace(
        per_device_train_batch_size=micro,
        train_batch_size_of=lambda world: micro,
        eval_batch_size_of=lambda world: micro,
        accelerator_config=AcceleratorConfig(),
        gradient_accumulation_steps=accumulation,
        global_batch_size=samples,
        auto_find_batch_size=find,
    )


def of_world(world: int, *given: Any, **changes: Any) -> BatchPlan:
    """The batches that the arguments of `args` ask for, in a job of `world` processes."""
    return resolve_batches(args(*given, **changes), Mesh(replicate=world), 0)


@given(micro=SMALL, asked=SMALL, world=SMALL, limit=SMALL)
def test_smaller_micro_batches_make_the_same_update(micro: int, asked: int, world: int, limit: int) -> None:
    size = UpdateSize(micro, asked, world, asked)
    smaller = size.within(limit)
    assert smaller.samples == size.samples
    assert smaller.micro <= max(limit, 1)
    again = update_size(of_world(world, micro, asked, find=True), smaller)[0]
    assert again == smaller, "a run that is continued begins with what was found"
    assert update_size(of_world(world, micro, asked), smaller)[0].micro == micro, (
        "unless it is not to look for it"
    )
    assert update_size(of_world(world, micro, asked, find=True), fits=limit)[0].samples == size.samples


@given(micro=SMALL, asked=SMALL, worlds=st.lists(SMALL, min_size=1, max_size=5))
def test_samples_are_kept_through_any_number_of_worlds_or_the_reason_is_given(
    micro: int, asked: int, worlds: list[int]
) -> None:
    size: UpdateSize | None = None
    for world in worlds:
        fresh, note = update_size(of_world(world, micro, asked), size)
        assert (fresh.micro, fresh.ranks, fresh.asked) == (micro, world, asked)
        if size is not None and size.samples % (micro * world) == 0:
            assert fresh.samples == size.samples
        elif size is not None:
            assert note is not None
            assert "not a multiple" in note
        size = fresh


@given(micro=SMALL, asked=SMALL, world=SMALL)
def test_a_fresh_run_is_what_its_arguments_say(micro: int, asked: int, world: int) -> None:
    assert update_size(of_world(world, micro, asked)) == (UpdateSize(micro, asked, world, asked), None)


def test_a_new_size_in_the_arguments_wins() -> None:
    saved = UpdateSize(4, 2, 2, 2)
    assert update_size(of_world(1, 8, 2), saved)[0].samples == 16
    assert update_size(of_world(1, 4, 1), saved)[0].samples == 4
    assert update_size(of_world(1, 4, 2), saved)[0].samples == 16, "as before: the update is kept"


@pytest.mark.parametrize(("samples", "wrong"), [(None, 0), (16, 0), (24, 0), (12, 1), (0, 1), (-8, 1)])
def test_what_a_global_batch_size_may_be(samples: int | None, wrong: int) -> None:
    assert len(objections(args(samples=samples), ranks=2)) == wrong
    if samples and not wrong:
        assert update_size(of_world(2, samples=samples))[0].samples == samples
