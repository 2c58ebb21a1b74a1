from __future__ import annotations

import pytest

from windlass.metrics.predictions import are_any


@pytest.mark.parametrize("home", ["~a-user-without-a-home", "/" + "x" * 300])
def test_a_run_of_a_user_who_cannot_enter_a_home_looks_for_no_prediction(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_HOME", home)
    assert not are_any()
