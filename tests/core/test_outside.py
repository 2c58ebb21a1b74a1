"""What the core asks of `compat/`, and what it says without it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from windlass.checkpoint.foreign import explain_unread, format_of
from windlass.core import outside
from windlass.core.errors import MissingDependencyError


@pytest.mark.skipif(importlib.util.find_spec("windlass.compat") is None, reason="a core without compat")
@pytest.mark.parametrize("what", outside.OUTSIDE)
def test_everything_that_is_asked_for_exists(what: str) -> None:
    assert outside.load_outside(what).__name__ == outside.OUTSIDE[what]


def test_without_it_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"files of torch\.save need .* no windlass\.compat"):
        outside.load_outside("files of torch.save")
    assert outside.find_outside("the state singletons") is None
    assert format_of(tmp_path) is None
    assert explain_unread(tmp_path) is None
