from __future__ import annotations

from pathlib import Path

import pytest
from tests.dist.launch import on_ranks
from tests.zero import loop_ranks, whole_ranks
from tests.zero.needed import needs_deepspeed

pytestmark = [pytest.mark.dist, needs_deepspeed]


@pytest.mark.parametrize("before", ["", pytest.param("evaluated", marks=pytest.mark.slow)])
def test_forwards_before_the_first_update_leave_no_order_behind(before: str, tmp_path: Path) -> None:
    """The first batch is measured, and maybe evaluated, without backwards. Each update gathers its parameters once."""
    whole, _ = on_ranks(2, whole_ranks.main, tmp_path, before == "evaluated")
    assert whole == [False, *[True] * 5], "the first update records the order"


def test_options_of_a_schedule_are_known_before_it_is_made() -> None:
    unknown, needed = on_ranks(0, loop_ranks.refused_options)[0]
    assert "params.warmup_steps=3: WarmupLR has no such option; did you mean" in unknown
    assert "params.total_num_steps=None: must be set: WarmupCosineLR needs it" in needed
