"""A Hub on this machine, and a run that publishes there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.hub.server import TOKEN, Hub, Server, running


@pytest.fixture(scope="session")
def _server() -> Iterator[Server]:
    with running() as server:
        yield server


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


def end_uploads() -> None:
    """Wait until no thread of this process uploads."""
    for thread in threading.enumerate():
        if thread.name == "windlass-hub":
            thread.join(60)
            assert not thread.is_alive(), "it waits, and there is nothing to upload"


@pytest.fixture
def hub(_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty Hub, to which the client of this process speaks. No thread of either outlives the test."""
    set_address(_server.hub.url, monkeypatch.setattr)
    monkeypatch.setenv("HF_ENDPOINT", _server.hub.url)
    _server.hub.reset()
    yield _server.hub
    _server.hub.over.set()
    end_uploads()
    pytest.importorskip("huggingface_hub").close_session()
    _server.end_connections()


@pytest.fixture
def token() -> str:
    return TOKEN
