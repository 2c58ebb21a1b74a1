"""The live page by a real server: who may read it, what cannot be reached, and that it follows a run."""

from __future__ import annotations

import http.client
import io
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.browser import browser, needs_browser
from tests.callbacks.page_runs import append_rows, row, write_run

from windlass.cli import ui_server
from windlass.cli.main import main
from windlass.cli.ui_command import is_loopback, ui_command

pytest.importorskip("starlette", reason="windlass ui needs starlette")
pytest.importorskip("uvicorn", reason="windlass ui needs uvicorn")


def started(folder: Path, *words: str, **streams: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "windlass", "ui", str(folder), "--port", "0", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **streams)


def address_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The port, and what follows it in the address."""
    assert process.stdout is not None
    said = process.stdout.readline()
    found = re.search(r"http://[\d.]+:(\d+)(/\S*)", said)
    assert found, said
    return int(found[1]), found[2]


@contextmanager
def server(folder: Path, *words: str) -> Iterator[tuple[int, str]]:
    """Run `windlass ui`; give its port and what follows it in the address."""
    process = started(folder, *words)
    assert process.stdout is not None
    try:
        yield address_of(process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ui") / "runs"
    write_run(folder / "first", 20)
    write_run(folder / "with space & <b>", 10)
    (folder.parent / "secret.txt").write_text("secret")
    return folder


@pytest.fixture(scope="module")
def port(runs: Path) -> Iterator[int]:
    with server(runs) as (found, _):
        yield found


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = (
        answer.status,
        {name.lower(): value for name, value in answer.getheaders()},
        answer.read().decode(),
    )
    connection.close()
    return found


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_index_and_the_page_of_each_run(port: int, runs: Path) -> None:
    before = files(runs)
    status, headers, index = ask(port, "/")
    assert status == 200
    assert "script" not in headers["content-security-policy"]
    links = re.findall(r'href="(page\?[^"]+)"', index)
    assert len(links) == 2
    assert "with space &amp; &lt;b&gt;" in index
    for link in links:
        status, _, page = ask(port, f"/{link}")
        assert (status, "connect-src 'self'" in page) == (200, True)
    both = ask(port, f"/page?run=first&run={quote('with space & <b>')}")[2]
    assert both.count('"series":{') == 2
    assert files(runs) == before


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that no process can read")
def test_the_index_lists_runs_beside_one_that_cannot_be_read(tmp_path: Path) -> None:
    write_run(tmp_path / "first", 5)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").symlink_to("/proc/self/mem")
    with server(tmp_path) as (port, _):
        status, _, index = ask(port, "/")
        assert (status, ask(port, "/page?run=first")[0]) == (200, 200)
        status, _, text = ask(port, "/page?run=other")
        assert (status, "other cannot be read" in text) == (500, True)
    assert "run=first" in index
    assert "other cannot be read" in index


@pytest.mark.parametrize(
    "name",
    ["../secret.txt", "..", "", ".", "/etc", "first/../../secret.txt", "first/metrics.jsonl", "%2e%2e"],
)
def test_nothing_but_a_run_is_reached(port: int, name: str) -> None:
    for kind in ("page", "events"):
        status, _, text = ask(port, f"/{kind}?run={quote(name)}")
        assert (status, text) == (404, "no such run")


@pytest.mark.parametrize(
    "path", ["/../secret.txt", "/first/metrics.jsonl", "/%2e%2e/secret.txt", "//etc/passwd"]
)
def test_files_have_no_address(port: int, path: str) -> None:
    assert ask(port, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_it_only_reads(port: int, method: str) -> None:
    assert ask(port, "/page?run=first", method)[0] == 405


def test_a_name_that_leads_here_is_refused(port: int) -> None:
    for name in ("evil.example", "["):
        assert ask(port, "/", Host=name)[0] == 403
    assert ask(port, "/", Host=f"localhost:{port}")[0] == 200


def test_another_host_needs_the_token(runs: Path) -> None:
    with server(runs, "--host", "0.0.0.0") as (port, rest):
        for path in ("/", "/page?run=first", "/events?run=first"):
            assert ask(port, path)[0] == 403
            assert ask(port, path, Cookie=f"windlass_token_{port}=x")[0] == 403
        assert ask(port, "/?token=wrong")[0] == 403
        status, headers, _ = ask(port, rest)
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert ask(port, "/page?run=first", Cookie=cookie.partition(";")[0], Host="node17")[0] == 200


def test_two_servers_of_one_machine_do_not_log_each_other_out(runs: Path) -> None:
    """A browser has one set of cookies for all ports of a machine."""
    with server(runs, "--host", "0.0.0.0") as first, server(runs, "--host", "0.0.0.0") as second:
        cookies = dict(
            ask(port, rest)[1]["set-cookie"].partition(";")[0].split("=", 1) for port, rest in (first, second)
        )
        sent = "; ".join(f"{name}={value}" for name, value in cookies.items())
        assert [ask(port, "/", Cookie=sent)[0] for port, _ in (first, second)] == [200, 200]


def test_more_runs_than_a_page_shows_are_refused(port: int) -> None:
    status, _, text = ask(port, "/page?" + "&".join(["run=first"] * 9))
    assert (status, text) == (400, "9 runs are chosen, and a page shows 8 at most: choose fewer")


def test_an_interrupt_while_a_page_follows_a_run_ends_it_in_one_line(runs: Path) -> None:
    with started(runs, stderr=subprocess.PIPE) as process:
        follower = http.client.HTTPConnection("127.0.0.1", address_of(process)[0], timeout=60)
        follower.request("GET", "/events?run=first")
        assert follower.getresponse().read(3) == b"id:"
        process.send_signal(signal.SIGINT)
        assert process.communicate()[1] == "windlass: interrupted\n"
    follower.close()


def test_a_page_follows_a_run_again_that_could_not_be_read_for_a_while(tmp_path: Path) -> None:
    """As on a share that was away: a stream that breaks is opened again by no browser once it was refused."""
    write_run(tmp_path / "first", 5)
    rows = tmp_path / "first" / "metrics.jsonl"
    with server(tmp_path) as (port, _):
        follower = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        follower.request("GET", "/events?run=first")
        lines = follower.getresponse()
        assert lines.readline().startswith(b"id:")
        rows.rename(tmp_path / "away")
        rows.symlink_to("/proc/self/mem")
        while (line := lines.readline()) != b": \n":
            assert line, "the stream has ended"
        (tmp_path / "away").replace(rows)
        append_rows(tmp_path / "first", [row(6)])
        while not (line := lines.readline()).startswith(b"id:"):
            assert line, "the stream has ended"
        follower.close()


def test_runs_in_a_run_are_listed_beside_it_by_whatever_name(tmp_path: Path) -> None:
    write_run(tmp_path / "same", 20)
    write_run(tmp_path / "same" / "same", 10)
    # A name that is not UTF-8.
    write_run(tmp_path / "same" / "r\udcff", 10)
    with server(tmp_path / "same") as (port, _):
        links = re.findall(r'href="(page\?[^"]+)"', ask(port, "/")[2])
        pages = {ask(port, f"/{link}")[2] for link in links}
    assert len(links) == len(pages) == 3


def test_it_may_be_started_before_the_first_run(tmp_path: Path) -> None:
    with server(tmp_path / "runs") as (port, _):
        assert "No runs yet." in ask(port, "/")[2]
        write_run(tmp_path / "runs" / "first", 3)
        assert "page?run=first" in ask(port, "/")[2]
        page = ask(port, "/page?run=first")[2]
        assert "<dt>checkpoint</dt><dd>none that is whole</dd>" in page  # as `windlass status`


def test_it_serves_where_standard_output_is_closed(runs: Path) -> None:
    program = (
        "import pathlib, sys; from windlass.cli.ui_server import serve; out, sys.stdout = sys.stdout, None; "
        "serve(pathlib.Path(sys.argv[1]), '127.0.0.1', 0, '', lambda where: print(where, file=out, flush=True))"
    )
    command = [sys.executable, "-c", program, str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert ask(address_of(process)[0], "/")[0] == 200
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("node17", False),
        ("", False),
    ],
)
def test_which_hosts_are_this_machine(host: str, alone: bool) -> None:
    assert is_loopback(host) == alone


@needs_browser
def test_the_page_follows_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "first", 10)
    with server(tmp_path) as (port, _), browser() as tab:
        tab.open(f"http://127.0.0.1:{port}/page?run=first")
        tab.until("document.body.dataset.updates >= 1")
        tab.press("+")
        shown = tab.value("windlass.view.range")
        append_rows(tmp_path / "first", row(11, loss=0.25, grad_norm=0.5), row(12, loss=0.125, grad_norm=0.5))
        tab.until("windlass.charts()[0].chart.data[0].at(-1) === 12")
        assert tab.value("windlass.charts()[0].chart.data[1].at(-1)") == 0.125
        assert tab.value("windlass.view.range") == shown
        assert tab.value("windlass.page.runs[0].series.loss.s") == list(range(1, 13))
        assert tab.value("Number(document.body.dataset.bytes)") < 8000, "what is new, and no more"
        assert "step 12 of 10" in tab.value("document.getElementById('header').textContent")
        assert tab.errors == []
        assert {url.split("/")[2] for url in tab.requests if url.startswith("http")} == {f"127.0.0.1:{port}"}


@needs_browser
def test_a_page_without_its_server_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "first", 3)
    told = "document.getElementById('connection').checkVisibility()"
    with browser() as tab:
        with server(tmp_path) as (port, _):
            tab.open(f"http://127.0.0.1:{port}/page?run=first")
            tab.until("document.body.dataset.connection === 'open'")
            assert tab.value(told) is False
        tab.until("document.body.dataset.connection === 'lost'")
        assert tab.value(told) is True


def test_a_disk_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, seen = list[str](), threading.Event()

    class Seen(io.StringIO):
        def write(self, text: str) -> int:
            said.append(text)
            seen.set()
            return len(text)

    def answers_late(folder: Path) -> bool:
        assert seen.wait(60)
        raise OSError("the disk is gone")

    monkeypatch.setattr(ui_server, "_PATIENCE", 0.01)
    monkeypatch.setattr(sys, "stderr", Seen())
    monkeypatch.setattr(Path, "exists", answers_late)
    with pytest.raises(OSError, match="the disk is gone"):
        ui_command([str(tmp_path)])
    assert f"still reading {tmp_path} after" in said[0]


def test_without_the_packages_the_command_that_installs_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["ui", str(tmp_path)]) == 2
    assert 'pip install "windlass-trainer[ui]"' in capsys.readouterr().err
    assert main(["ui", os.devnull]) == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_cannot_be_bound(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ui", str(tmp_path), "--host", host]) == 2
    assert "is not an address of this machine" in capsys.readouterr().err
