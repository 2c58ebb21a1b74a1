"""A real browser without a window, which tests drive by the DevTools protocol."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
needs_browser = pytest.mark.skipif(
    not any(map(shutil.which, NAMES)), reason=f"needs a browser: one of {', '.join(NAMES)}"
)


class Tab:
    """One page of a browser."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self.requests: list[str] = []
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Send a command, and return its result; what the page did meanwhile is noted."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": arguments}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message["method"] == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        elif message["method"] == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.errors.append(message["params"]["entry"]["text"])

    def open(self, address: str) -> None:
        """Open an address, and wait until its charts are drawn."""
        self.call("Page.navigate", url=address)
        self.until("document.body && document.body.dataset.drawn !== undefined")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait in the browser until an expression is true."""
        for _ in range(600):
            # A page that is being replaced has no promises that last: each look is an evaluation of its own.
            wait = f"new Promise((go) => setTimeout(() => go(Boolean({condition})), 50))"
            found = self.call("Runtime.evaluate", expression=wait, returnByValue=True, awaitPromise=True)
            if found["result"].get("value") is True:
                return
        raise AssertionError(f"never: {condition}; {self.errors}")

    def press(self, key: str) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse at one place, and release it at another."""
        for kind, (x, y), held in (
            ("mouseMoved", start, 0),
            ("mousePressed", start, 1),
            ("mouseMoved", end, 1),
            ("mouseReleased", end, 0),
        ):
            button = "none" if kind == "mouseMoved" and not held else "left"
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=held, clickCount=1
            )


@contextmanager
def browser() -> Iterator[Tab]:
    """Start a browser, and give a page of it."""
    from websockets.sync.client import connect

    program = next(found for name in NAMES if (found := shutil.which(name)))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        process = subprocess.Popen(
            [program, *flags, "--remote-debugging-port=0", f"--user-data-dir={folder}", "--window-size=1200,1400"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert process.stderr is not None
            root = next(line.split()[-1] for line in process.stderr if "DevTools listening on" in line)
            with connect(root, max_size=None) as socket:
                socket.send(
                    json.dumps({"id": 0, "method": "Target.createTarget", "params": {"url": "about:blank"}})
                )
                made = json.loads(socket.recv(timeout=60))["result"]["targetId"]
            place = f"{root.split('/devtools/')[0]}/devtools/page/{made}"
            with connect(place, max_size=None) as socket:
                yield Tab(socket)
        finally:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


def address_of(path: Path) -> str:
    """Return the address of a file."""
    return path.absolute().as_uri()
