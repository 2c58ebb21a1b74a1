"""What the client makes of the Hub's answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.hub.server import READER, Fault, Hub

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


def test_a_name_that_no_hub_takes(hub: Hub, token: str) -> None:
    with pytest.raises(HubError, match=r"cannot open .*a--b") as error:
        HubClient("a--b", token).open()
    assert not error.value.passing


def test_no_hub_at_all(hub: Hub, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="cannot open") as error:
        HubClient("run", token).open()
    assert error.value.passing


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
