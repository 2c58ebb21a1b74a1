"""A Hub on this machine, and a run that publishes there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.hub.server import TOKEN, Hub, running


@pytest.fixture(scope="session")
def _server() -> Iterator[Hub]:
    with running() as hub:
        yield hub


@pytest.fixture
def hub(_server: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """An empty Hub, to which the unmodified client of this process speaks."""
    client: Any = pytest.importorskip("huggingface_hub.constants", reason="the client of the Hub")
    _server.reset()
    monkeypatch.setenv("HF_ENDPOINT", _server.url)
    constants = {
        "ENDPOINT": _server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": _server.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_PROGRESS_BARS": True,
    }  # fmt: skip
    for name, value in constants.items():  # read from the environment when the package was imported
        monkeypatch.setattr(client, name, value)
    return _server


@pytest.fixture
def token() -> str:
    return TOKEN
