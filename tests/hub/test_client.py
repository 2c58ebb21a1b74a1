"""What the client makes of the Hub's answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hub.server import READER, Fault, Hub

from windlass.hub import client as module
from windlass.hub.client import HubClient, HubError


def test_a_repository_is_created_once_and_then_used(hub: Hub, token: str) -> None:
    for _ in range(2):
        client = HubClient("run", token, "branch")
        client.open(private=True)
        client.open_branch()
        assert client.repository == "someone/run"
    assert hub.repositories["someone/run"].private
    assert set(hub.repositories["someone/run"].branches) == {"main", "branch"}


@pytest.mark.parametrize(("secret", "status"), [(READER, 403), ("hf_nobodynobodynobody", 401)])
def test_a_token_that_may_not_write(hub: Hub, token: str, secret: str, status: int) -> None:
    HubClient("run", token).open()  # the reader may see it
    with pytest.raises(HubError) as error:
        HubClient("someone/run", secret).open()
    assert (error.value.status, error.value.passing) == (status, False)
    assert secret not in str(error.value)


def test_white_space_around_a_token_is_not_part_of_it(
    hub: Hub, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the package does with tokens of its own: that of a file often ends with its line."""
    HubClient("run", f" {token}\n").open()
    monkeypatch.setenv("HF_TOKEN", token)
    for absent in ("", " "):
        HubClient("run", absent).open()
    with pytest.raises(HubError, match="no such") as error:
        HubClient("someone/other", " ").commit_of()
    assert "cannot read http" in str(error.value)


def test_a_name_that_no_hub_takes(hub: Hub, token: str) -> None:
    with pytest.raises(HubError, match=r"cannot open .*a--b") as error:
        HubClient("a--b", token).open()
    assert not error.value.passing


def test_no_hub_at_all(hub: Hub, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="cannot open") as error:
        HubClient("run", token).open()
    assert error.value.passing


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The client waits half a second for an answer."""
    from huggingface_hub.utils import _http as library

    library.set_client_factory(library.default_client_factory)
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    yield
    library.set_client_factory(library.default_client_factory)


@pytest.mark.usefixtures("impatient")
def test_a_hub_that_never_answers_is_not_waited_for(hub: Hub, token: str, tmp_path: Path) -> None:
    """The package itself sets no limit, so one lost answer would hold back all later uploads of a run."""
    hub.faults = [Fault("POST /api/repos/create", stall=20.0)]
    with pytest.raises(HubError, match="Timeout") as error:
        HubClient("run", token).open()
    assert error.value.passing
    hub.faults = [Fault("PUT /lfs/", stall=20.0)]
    client = HubClient("run", token)
    client.open()
    (tmp_path / "w").write_bytes(b"w" * 9000)
    client.commit({"w.safetensors": tmp_path / "w"}, "after a second attempt")
    assert client.names() == ["w.safetensors"]


def test_a_script_may_make_the_http_client_itself(hub: Hub, token: str) -> None:
    from huggingface_hub.utils import _http as library

    made = []

    def factory() -> object:
        made.append(library.default_client_factory())
        return made[-1]

    library.set_client_factory(factory)
    try:
        HubClient("run", token).open()
        assert made[-1].timeout.read is None
    finally:
        library.set_client_factory(library.default_client_factory)


def test_files_come_back_as_they_were(hub: Hub, token: str, tmp_path: Path) -> None:
    client = HubClient("run", token)
    client.open()
    (tmp_path / "w").write_bytes(bytes(range(256)) * 100)
    client.commit({"a/w.safetensors": tmp_path / "w", "b.json": tmp_path / "w"}, "two files")
    assert client.names() == ["a/w.safetensors", "b.json"]
    assert client.names("a") == ["a/w.safetensors"]
    assert client.names("absent") == []
    path = client.fetch("a/w.safetensors", client.commit_of(), tmp_path / "got")
    assert path.read_bytes() == (tmp_path / "w").read_bytes()


def test_a_token_in_an_answer_is_not_shown(hub: Hub, token: str, tmp_path: Path) -> None:
    client = HubClient("run", token)
    client.open()
    hub.faults = [Fault("POST .*/commit/", status=400)]
    (tmp_path / "w").write_text("w")
    with pytest.raises(HubError) as error:
        client.commit({token: tmp_path / "w"}, "a file")
    assert token not in str(error.value)
