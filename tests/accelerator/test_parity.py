"""`Accelerator` beside the real one: the same names with the same signatures, each with a row in the support table."""

from __future__ import annotations

import inspect
from typing import Any

import accelerate
import pytest
from tests.docs import support_table as rows
from tests.versions import with_pinned

from windlass import Accelerator
from windlass.config.enums import ACCELERATOR_REFUSED

# Instance attributes of the real one, which a class does not show.
ATTRIBUTES = {"device", "mixed_precision", "logging_dir"}
# Decorators hide these signatures, or their own class needs a call without a function.
HIDDEN = {"init_trackers", "log", "on_main_process", "on_local_main_process"}
MEMBERS = {*rows.MEMBERS.split(), *rows.MEMBERS_MAPPED, *rows.MEMBERS_REFUSED}
ARGUMENTS = {*rows.ACCELERATOR.split(), *ACCELERATOR_REFUSED}


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@with_pinned("accelerate")
def test_every_public_name_is_there_and_has_a_row() -> None:
    theirs = public(accelerate.Accelerator)
    assert not theirs - public(Accelerator) - ATTRIBUTES
    assert not theirs - MEMBERS - {"use_distributed"}
    assert not MEMBERS - theirs - {"use_distributed"}


@with_pinned("accelerate")
@pytest.mark.parametrize("name", sorted(public(accelerate.Accelerator) - ATTRIBUTES - HIDDEN))
def test_a_name_is_of_the_same_kind_and_signature(name: str) -> None:
    theirs = inspect.getattr_static(accelerate.Accelerator, name)
    ours = inspect.getattr_static(Accelerator, name)
    assert isinstance(ours, property) == isinstance(theirs, property)
    if not isinstance(theirs, property):
        assert shape(getattr(Accelerator, name)) == shape(getattr(accelerate.Accelerator, name))
    elif theirs.fset is not None:
        assert ours.fset is not None


@with_pinned("accelerate")
def test_arguments_are_the_same_in_the_same_order_with_the_same_defaults() -> None:
    theirs, ours = shape(accelerate.Accelerator), shape(Accelerator)
    assert [name for name, _, _ in ours] == [*(name for name, _, _ in theirs), "scheduler_unit"]
    assert {name for name, _, _ in ours} == ARGUMENTS
    defaults = {name: default for name, _, default in ours}
    # Its default is an object that means "not given".
    differ = [name for name, _, default in theirs if defaults[name] != default and name != "split_batches"]
    assert not differ


def test_attributes_of_an_instance() -> None:
    accelerator = Accelerator(cpu=True)
    assert all(hasattr(accelerator, name) for name in ATTRIBUTES)


@with_pinned("accelerate")
def test_what_properties_say_in_one_process() -> None:
    theirs, ours = accelerate.Accelerator(cpu=True), Accelerator(cpu=True)
    try:
        unsaid = {"tensor_parallel_rank", "data_parallel_rank", "data_parallel_shard_rank"}
        refused = {"pipeline_parallel_rank", "context_parallel_rank"}
        for name in sorted(public(accelerate.Accelerator) - unsaid - refused):
            if isinstance(inspect.getattr_static(accelerate.Accelerator, name), property):
                assert getattr(ours, name) == getattr(theirs, name), name
        assert (str(ours.device), ours.mixed_precision) == (str(theirs.device), theirs.mixed_precision)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
