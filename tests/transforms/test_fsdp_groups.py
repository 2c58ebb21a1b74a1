from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from windlass.transforms.fsdp_groups import groups_of


@pytest.mark.parametrize("group", [None, object()])
def test_older_torch_has_at_most_one_group_in_a_unit(group: object) -> None:
    state = SimpleNamespace(_fsdp_param_group=group)
    unit: Any = SimpleNamespace(_get_fsdp_state=lambda: state)
    assert groups_of(unit) == ([] if group is None else [group])
