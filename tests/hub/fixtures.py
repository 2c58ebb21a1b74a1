"""A Hub on this machine, and a run that publishes there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.hub.server import TOKEN, Hub, running


@pytest.fixture(scope="session")
def _server() -> Iterator[Hub]:
    with running() as hub:
        yield hub


def set_address(url: str, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let the unmodified client of this process use the Hub at `url`."""
    client: Any = pytest.importorskip("huggingface_hub.constants", reason="the client of the Hub")
    constants = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_PROGRESS_BARS": True,
    }  # fmt: skip
    for name, value in constants.items():  # read from the environment when the package was imported
        put(client, name, value)


@pytest.fixture
def hub(_server: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """An empty Hub, to which the client of this process speaks."""
    set_address(_server.url, monkeypatch.setattr)
    _server.reset()
    monkeypatch.setenv("HF_ENDPOINT", _server.url)
    return _server


@pytest.fixture
def token() -> str:
    return TOKEN
