"""A layout of axes: how it is written, what it makes, and the smaller layouts that are tried in its place."""

from __future__ import annotations

import pytest

from windlass.core.errors import ConfigError
from windlass.proofs.small_config import AxisLayout


def test_a_layout_is_read_in_any_spelling_and_printed_in_one() -> None:
    assert str(AxisLayout.parse("cp=2, tp=2")) == "tp=2 cp=2"
    assert AxisLayout.parse("fsdp=2 tensor=4 pp_size=1") == AxisLayout.parse("dp_shard=2,tp=4")
    assert str(AxisLayout.parse("")) == "one process"


def test_every_part_that_is_not_an_axis_with_a_size_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        AxisLayout.parse("tensr=2,cp=0,sp,dp=2,ddp=3")
    assert [str(problem.value) for problem in caught.value.problems] == ["tensr=2", "cp=0", "sp", "ddp=3"]
    assert "did you mean 'tensor'?" in str(caught.value)


def test_ranks_with_samples_of_their_own_are_counted() -> None:
    layout = AxisLayout.parse("dp=2,dp_shard=3,tp=4,cp=2")
    assert (layout.processes, layout.data_ranks, layout.along("tp", "cp")) == (48, 6, 8)


def test_a_large_layout_is_tried_with_two_ranks_on_each_axis() -> None:
    assert str(AxisLayout.parse("dp=64,tp=8").reduced()) == "dp=2 tp=2"
    assert str(AxisLayout.parse("tp=8").reduced()) == "tp=8"


def test_parts_have_fewer_axes_first() -> None:
    parts = [str(part) for part in AxisLayout.parse("dp=2,tp=2,cp=2").parts()]
    assert parts == ["dp=2", "tp=2", "cp=2", "dp=2 tp=2", "dp=2 cp=2", "tp=2 cp=2"]
