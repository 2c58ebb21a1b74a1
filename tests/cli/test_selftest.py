from __future__ import annotations

import pytest
from tests.cli.launching.test_local import windlass


@pytest.mark.dist
def test_this_installation_trains_in_two_processes() -> None:
    code, said = windlass("test")
    assert code == 0, said
    assert said.count("  ok  ") == 4
    assert "all is well" in said
