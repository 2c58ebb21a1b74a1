"""A Hub over HTTP for tests: what `huggingface_hub` asks for, with real files and hashes, and faults on request.

Repositories are folders of commits; a commit is a map from paths to contents by SHA-256.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN, READER = "hf_writerwriterwriter0", "hf_readerreaderreader0"
_LARGE = 4096  # bytes from which a file is uploaded by itself


@dataclass
class Fault:
    """What happens to the next requests whose "METHOD path" matches.

    Attributes:
        status: this answer, and nothing done.
        stall: seconds before anything else, which end with the test.
        hold: waits for this before anything else.
        cut: the connection is closed without an answer, and nothing done.
        half: the connection is closed when half of the content has been read.
        lost: the request is carried out, and the connection closed without an answer.
        lie: the content that is returned is damaged.
    """

    match: str
    status: int | None = None
    stall: float = 0.0
    hold: threading.Event | None = None
    cut: bool = False
    half: bool = False
    lost: bool = False
    lie: bool = False
    times: int = 1


@dataclass
class Repository:
    private: bool
    commits: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    branches: dict[str, int] = field(default_factory=dict)

    def at(self, revision: str) -> tuple[str, dict[str, str]] | None:
        if revision in self.branches:
            return self.commits[self.branches[revision]]
        return next((commit for commit in self.commits if commit[0] == revision), None)


class Hub:
    """The state of the server.

    Attributes:
        repositories: by full name.
        blobs: contents by SHA-256.
        faults: applied in order; each counts down `times`.
        requests: "METHOD path" of all so far.
        rate: bytes that are taken in a second; None for all that come.
        over: set when the test has ended, so that nothing stalls any longer.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.url = ""
        self.rate: float | None = None

    def reset(self) -> None:
        """Forget everything."""
        self.repositories, self.blobs, self.faults, self.requests = {}, {}, [], []
        self.over.clear()

    def create(self, name: str, private: bool = False) -> Repository:
        made = self.repositories[name] = Repository(private)
        self._commit(made, "main", {}, "initial commit")
        return made

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """The files of a branch."""
        found = self.repositories[name].at(revision)
        assert found is not None
        return {path: self.blobs[oid] for path, oid in found[1].items()}

    def keep(self, content: bytes) -> str:
        oid = hashlib.sha256(content).hexdigest()
        self.blobs[oid] = content
        return oid

    def _commit(self, repository: Repository, branch: str, tree: dict[str, str], message: str) -> str:
        oid = hashlib.sha1(f"{len(repository.commits)}{sorted(tree.items())}".encode()).hexdigest()
        repository.commits.append((oid, tree))
        repository.messages.append(message)
        repository.branches[branch] = len(repository.commits) - 1
        return oid

    def commit(self, repository: Repository, branch: str, lines: list[dict[str, Any]]) -> str:
        """Apply the operations of one commit. Raises KeyError for content that was never uploaded."""
        found = repository.at(branch)
        assert found is not None
        tree, message = dict(found[1]), ""
        for line in lines:
            kind, value = line["key"], line["value"]
            if kind == "header":
                message = value["summary"]
            elif kind == "file":
                tree[value["path"]] = self.keep(base64.b64decode(value["content"]))
            elif kind == "lfsFile":
                assert value["oid"] in self.blobs
                tree[value["path"]] = value["oid"]
            elif kind == "deletedFile":
                del tree[value["path"]]
            else:
                raise AssertionError(kind)
        return self._commit(repository, branch, tree, message)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms between its headers and its body

    def log_message(self, *args: Any) -> None:
        """Nothing on stderr."""

    def _read(self, size: int) -> bytes:
        """The content of a request, no faster than the Hub takes it in."""
        if self.hub.rate is None:
            return self.rfile.read(size)
        begun, content = time.monotonic(), bytearray()
        while len(content) < size:
            content += self.rfile.read(min(1 << 18, size - len(content)))
            time.sleep(max(0.0, len(content) / self.hub.rate - (time.monotonic() - begun)))
        return bytes(content)

    def _close(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _route(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        path = urllib.parse.urlsplit(self.path).path
        request = f"{self.command} {path}"
        with self.hub.lock:
            self.hub.requests.append(request)
            fault = next((f for f in self.hub.faults if f.times > 0 and re.search(f.match, request)), None)
            if fault is not None:
                fault.times -= 1
        content = self._read(size // 2 if fault is not None and fault.half else size)
        if fault is not None:
            self.hub.over.wait(fault.stall)
            if fault.hold is not None:
                fault.hold.wait(60)
            if fault.cut or fault.half:
                self._close()
                return
            if fault.lost:
                self._answer = lambda *ignored: self._close()  # type: ignore[method-assign]
            elif fault.status is not None:
                self._answer(fault.status, {"error": f"told to answer {fault.status}"})
                return
        who = {f"Bearer {TOKEN}": "writer", f"Bearer {READER}": "reader"}.get(
            self.headers.get("Authorization", "")
        )
        if who is None and not path.startswith("/lfs/"):
            self._answer(401, {"error": "Invalid credentials"})
            return
        for pattern, method in ROUTES:
            match = re.fullmatch(pattern, request)
            if match is not None:
                writes = (
                    self.command in ("POST", "PUT") and "/validate-yaml" not in path and "/lfs/" not in path
                )
                if (writes or path.endswith("/write")) and who == "reader":
                    self._answer(403, {"error": "You do not have write access"})
                    return
                parts = [None if part is None else urllib.parse.unquote(part) for part in match.groups()]
                with self.hub.lock:
                    method(self, *parts, content)
                return
        self._answer(404, {"error": f"no route for {request}"}, {"X-Error-Code": "EntryNotFound"})

    do_GET = do_POST = do_PUT = do_HEAD = _route  # noqa: N815 (names of the base class)

    # --- what is asked for

    def whoami(self, content: bytes) -> None:
        self._answer(200, {"name": "someone", "type": "user", "orgs": [], "auth": {}})

    def create(self, content: bytes) -> None:
        asked = json.loads(content)
        name = f"{asked.get('organization') or 'someone'}/{asked['name']}"
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or "--" in name:
            self._answer(400, {"error": f"Invalid repository name {name}"})
            return
        known = name in self.hub.repositories
        if not known:
            private = asked.get("visibility") == "private" or bool(asked.get("private"))
            self.hub.create(name, private)
        body = {"url": f"{self.hub.url}/{name}", "name": name}
        self._answer(409 if known else 200, {**body, "error": "exists"} if known else body)

    def _repository(self, name: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        if found is None:
            self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        return found

    def _tree(self, name: str, revision: str) -> tuple[str, dict[str, str]] | None:
        repository = self._repository(name)
        if repository is None:
            return None
        found = repository.at(revision)
        if found is None:
            self._answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        return found

    def auth(self, name: str, content: bytes) -> None:
        if self._repository(name) is not None:
            self._answer(200)

    def branch(self, name: str, branch: str, content: bytes) -> None:
        repository = self._repository(name)
        if repository is not None:
            known = branch in repository.branches
            repository.branches.setdefault(branch, repository.branches["main"])
            self._answer(409 if known else 200, {"error": "exists"} if known else None)

    def preupload(self, name: str, revision: str, content: bytes) -> None:
        found = self._tree(name, revision)
        if found is None:
            return
        ignored = self.hub.blobs.get(found[1].get(".gitignore", ""), b"").decode().split()
        answer = [
            {
                "path": file["path"],
                "uploadMode": "lfs"
                if file["size"] >= _LARGE or file["path"].endswith(".safetensors")
                else "regular",
                "shouldIgnore": file["path"] in ignored,
            }
            for file in json.loads(content)["files"]
        ]
        self._answer(200, {"files": answer})

    def batch(self, name: str, content: bytes) -> None:
        objects = []
        for one in json.loads(content)["objects"]:
            entry: dict[str, Any] = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.hub.blobs:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}
            objects.append(entry)
        self._answer(200, {"transfer": "basic", "objects": objects})

    def store(self, oid: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != oid:
            self._answer(422, {"error": "the content has another hash"})
            return
        self.hub.keep(content)
        self._answer(200)

    def commit(self, name: str, revision: str, content: bytes) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        if revision not in repository.branches:
            self._answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
            return
        oid = self.hub.commit(repository, revision, [json.loads(line) for line in content.splitlines()])
        url = f"{self.hub.url}/{name}/commit/{oid}"
        self._answer(200, {"success": True, "commitOid": oid, "commitUrl": url})

    def validate(self, content: bytes) -> None:
        self._answer(200, {"warnings": [], "errors": []})

    def tree(self, name: str, revision: str, folder: str | None, content: bytes) -> None:
        found = self._tree(name, revision)
        if found is None:
            return
        inside = {p: oid for p, oid in found[1].items() if folder is None or p.startswith(f"{folder}/")}
        if folder is not None and not inside:
            self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        self._answer(
            200,
            [
                {"type": "file", "path": path, "oid": oid[:40], "size": len(self.hub.blobs[oid])}
                for path, oid in sorted(inside.items())
            ],
        )

    def info(self, name: str, revision: str, content: bytes) -> None:
        found = self._tree(name, revision)
        if found is not None:
            card = self.hub.blobs.get(found[1].get("README.md", ""), b"").decode().split("---\n")
            data = yaml.safe_load(card[1]) if len(card) > 2 else None
            files = [{"rfilename": path} for path in found[1]]
            self._answer(200, {"id": name, "sha": found[0], "siblings": files, "cardData": data})

    def main(self, name: str, content: bytes) -> None:
        self.info(name, "main", content)

    def resolve(self, name: str, revision: str, path: str, content: bytes) -> None:
        found = self._tree(name, revision)
        if found is None:
            return
        if path not in found[1]:
            self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        data = self.hub.blobs[found[1][path]]
        fault = next((f for f in self.hub.faults if f.lie and re.search(f.match, f"GET {path}")), None)
        if fault is not None and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        headers = {"X-Repo-Commit": found[0], "ETag": f'"{found[1][path]}"', "Accept-Ranges": "bytes"}
        self._answer(200, data, headers)


_NAME = r"([\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, Callable[..., None]]] = [
    (r"GET /api/whoami-v2", _Handler.whoami),
    (r"POST /api/repos/create", _Handler.create),
    (r"POST /api/validate-yaml", _Handler.validate),
    (rf"GET /api/models/{_NAME}/auth-check(?:/write)?", _Handler.auth),
    (rf"POST /api/models/{_NAME}/branch/([^/]+)", _Handler.branch),
    (rf"POST /api/models/{_NAME}/preupload/([^/]+)", _Handler.preupload),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"PUT /lfs/(\w+)", _Handler.store),
    (rf"POST /api/models/{_NAME}/commit/([^/]+)", _Handler.commit),
    (rf"GET /api/models/{_NAME}/tree/([^/]+)(?:/(.+))?", _Handler.tree),
    (rf"GET /api/models/{_NAME}/revision/([^/]+)", _Handler.info),
    (rf"GET /api/models/{_NAME}", _Handler.main),
    (rf"(?:GET|HEAD) /{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
]


class Server(ThreadingHTTPServer):
    """Answers each connection on a thread. Clients keep connections open: these threads end with `end_connections`.

    Attributes:
        hub: what it serves.
    """

    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
        self.hub = hub
        hub.url = f"http://127.0.0.1:{self.server_port}"
        self._connections: list[tuple[threading.Thread, socket.socket]] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), daemon=True
        )
        self._connections.append((thread, request))
        thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing if a client has left."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def end_connections(self) -> None:
        """Close all of them, and wait for their threads."""
        self.hub.over.set()
        while self._connections:
            thread, connection = self._connections.pop()
            with contextlib.suppress(OSError):  # it is closed
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(60)


@contextmanager
def running() -> Iterator[Server]:
    """A Hub on a free port of this machine."""
    server = Server(Hub())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="tests-hub")
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        server.end_connections()
