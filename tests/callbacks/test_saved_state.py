"""State in and out over random sets of callbacks."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from windlass.callbacks.saved_state import export_states, import_states


class _Counting:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


class Ones(_Counting):
    pass


class Twos(_Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


SETS = st.lists(
    st.builds(lambda cls, n: cls(n), st.sampled_from([Ones, Twos]), st.integers(1, 99)), max_size=6
)


@given(saved=SETS, shape=SETS)
def test_each_class_gets_its_states_back_in_order(saved: list[_Counting], shape: list[_Counting]) -> None:
    fresh = [type(callback)() for callback in shape]
    import_states(fresh, json.loads(json.dumps(export_states(saved))), restore_args=False)
    for cls in (Ones, Twos):
        old = [callback.count for callback in saved if type(callback) is cls]
        new = [callback.count for callback in fresh if type(callback) is cls]
        assert new == (old + [0] * len(new))[: len(new)]
