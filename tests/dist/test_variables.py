"""Variables are set for the body alone, and are as before after it, also if it fails."""

from __future__ import annotations

import contextlib
import os

import pytest

from windlass.dist.variables import environment_of


def test_variables_are_as_before_after_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_ONE", "1")
    monkeypatch.setenv("WINDLASS_TWO", "2")
    monkeypatch.delenv("WINDLASS_THREE", raising=False)
    with environment_of(WINDLASS_ONE="other", WINDLASS_TWO=None, WINDLASS_THREE="3"):
        assert (os.environ["WINDLASS_ONE"], os.environ["WINDLASS_THREE"]) == ("other", "3")
        assert "WINDLASS_TWO" not in os.environ
    assert (os.environ["WINDLASS_ONE"], os.environ["WINDLASS_TWO"]) == ("1", "2")
    assert "WINDLASS_THREE" not in os.environ


def test_a_body_that_fails_leaves_nothing() -> None:
    with contextlib.suppress(KeyError), environment_of(WINDLASS_THREE="3"):
        raise KeyError
    assert "WINDLASS_THREE" not in os.environ
