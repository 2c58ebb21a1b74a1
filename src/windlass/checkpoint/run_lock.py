"""The lock of an output folder: one run writes to it at a time.

The lock is a file that names the process that holds it. It is free once that process is dead, which others decide by
the first of these rules that gives an answer:

1. the system's own lock (flock) on the file, which ends with the process;
2. on the same machine: process id, start of the process and boot;
3. a counter in the file, which the holder increments every `BEAT` seconds. If it does not change for `PATIENCE`
   seconds, the holder is dead. Only this rule works across machines without flock; their clocks are never compared.

Exactly one of several runs that start at once gets the lock: a new lock file is created with O_EXCL, and so is the
claim to succeed a dead holder, whose file name has that holder's token.

An exception of a signal handler may occur at any instruction. A lock that it leaves acquired is free once its object is
deleted.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import hashlib
import json
import os
import secrets
import shlex
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Self

from windlass.core.errors import WindlassError
from windlass.core.logs import get_logger
from windlass.core.process_identity import ProcessIdentity
from windlass.core.redact import redact_command
from windlass.core.whole_file import parse_json

if sys.platform != "win32":
    import fcntl

LOCK_NAME = ".windlass-run.lock"
BEAT = 2.0  # seconds between two changes of the counter
PATIENCE = 15.0  # seconds without a change after which an unknown holder counts as dead
GRACE = 5.0  # seconds for a holder to exit: a killed process exists until its memory is freed
_POLL = 0.1
_MAX_BYTES = 1 << 16
_MAX_COMMAND = 300
_COUNTER = b'{"beat": %10d'
_logger = get_logger(__name__)


class FolderInUse(WindlassError):  # noqa: N818 (what is the case, not what is wrong)
    """Another run holds the lock.

    Attributes:
        holder: description of that run.
    """

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path.parent} is in use by another run ({holder})")
        self.holder = holder


class RunLock:
    """The lock of one folder, not reentrant; `acquire` again checks that it is still held.

    Args:
        folder: an existing folder, which other machines may share.
        name: of the lock file.
    """

    token = ""  # of an object whose constructor was interrupted
    _file: FileIO | None = None

    def __init__(self, folder: Path, name: str = LOCK_NAME) -> None:
        self.path = folder / name
        self.token = secrets.token_hex(8)
        self._inode, self._beats = -1, 0
        self.ending = False

    @property
    def held(self) -> bool:
        """True if this object holds the lock or is acquiring it, unless another run took it over."""
        return self.token in _held

    def acquire(self) -> None:
        """Acquire the lock, or check that it is held.

        Raises:
            FolderInUse: another run holds it. OSError: the folder cannot be written.
        """
        if self.held:
            if self._is_own():
                return
            self.forget()  # the folder was removed, or another run took the lock over
        try:
            self._claim()
        except BaseException:
            self.forget()
            raise
        _keep_beating()

    def release(self) -> None:
        """Release the lock. A file that cannot be removed is free once this process has ended."""
        if not self.held:
            return
        is_own = False
        with contextlib.suppress(OSError):
            is_own = self._is_own()
        self.forget()
        if is_own:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _is_own(self) -> bool:
        """Return True if the lock file is the one that this object made: a record names its own token alone."""
        content = _content(self.path)
        return content is not None and self.token.encode() in content[0]

    def release_after(self, wait: Callable[[], None]) -> None:
        """Release the lock in another thread after `wait`; other objects of this process wait for it."""
        self.ending = True

        def release() -> None:
            wait()
            self.release()

        threading.Thread(target=release, name="windlass-run-lock-release", daemon=True).start()

    def forget(self) -> None:
        """Close the file and leave it; in a forked child it would keep the system's lock after the parent's death."""
        # First: after an interrupt the file may be left, which this process knows to be free.
        _held.pop(self.token, None)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    __del__ = forget

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    # --- acquiring it

    def _claim(self) -> None:
        path, passed = self.path, list[FoundLock]()
        while not (self._create(path) and self._moves_up(path, passed)):
            dead = None if self.held else _wait_for_end(path)
            if dead is None:  # released or taken over meanwhile: start again
                if self.held:
                    self.forget()
                    path.unlink(missing_ok=True)
                path, passed = self.path, []
            else:
                passed.append(dead)
                path = self._claim_to(dead)

    def _moves_up(self, path: Path, passed: list[FoundLock]) -> bool:
        """Make the file at `path` the lock file; return False if another run has taken it over first."""
        if not self._leads_to(path, passed):
            return False
        if passed:
            try:
                os.replace(path, self.path)  # no other run changes the chain while its last owner is alive
            except FileNotFoundError:
                return False  # this process was stopped so long that another run took over
            for dead in passed[1:]:
                dead.path.unlink(missing_ok=True)
            _logger.info("%s: the run that held it has ended (%s)", self.path.parent, passed[-1].holder)
        return True

    def _claim_to(self, dead: FoundLock) -> Path:
        return self.path.with_name(f"{self.path.name}.{dead.token}")

    def _create(self, path: Path) -> bool:
        """Create the file with the record of this process; return False if it exists."""
        _held[self.token] = self
        try:
            file = self._file = FileIO(path, "x+")
        except FileExistsError:
            _held.pop(self.token, None)
            return False
        try:
            _lock(file.fileno())
            record = _record(self.token)
            if file.write(record) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(file.fileno())
            self._inode = os.fstat(file.fileno()).st_ino
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        if sys.platform == "win32":  # an open file could not be moved there, and has no flock
            file.close()
        return True

    def _leads_to(self, path: Path, passed: list[FoundLock]) -> bool:
        """Return True if the claims lead from the lock file to `path`: another run may have taken over from the same
        dead one before `path` was created.
        """
        place = self.path
        for dead in passed:
            found = _read(place)
            if found is None or found.token != dead.token:
                return False
            place = self._claim_to(dead)
        return place == path

    # --- holding it

    def beat(self) -> None:
        """Increment the counter."""
        self._beats += 1
        with contextlib.suppress(OSError):  # the next one may get through; a save notices a lost lock
            # Opened each time: closing is what sends the change to the server of a network file system.
            with FileIO(self.path, "r+") as file:
                if os.fstat(file.fileno()).st_ino == self._inode:
                    file.write(_COUNTER % self._beats)


# By token: this shows if a lock of this process is held, not the system's lock.
_held: weakref.WeakValueDictionary[str, RunLock] = weakref.WeakValueDictionary()
# Increments the counters of all of them, from the first lock to the end of the process.
_beater = threading.Thread()


def _keep_beating() -> None:
    global _beater
    if not _beater.is_alive():
        _beater = threading.Thread(target=_beat_for_ever, name="windlass-run-lock", daemon=True)
        _beater.start()


def _beat_for_ever() -> None:
    while True:
        time.sleep(BEAT)
        _beat_all()


def _beat_all() -> None:
    # A function of its own: its variables would keep a lock alive until the next beat.
    for lock in _locks():
        lock.beat()


def _locks() -> list[RunLock]:
    # Not `_held.values()`, which raises where another thread acquires or releases a lock meanwhile.
    return [lock for reference in _held.valuerefs() if (lock := reference()) is not None]


def _is_ending(token: str) -> bool:
    lock = _held.get(token)
    return lock is not None and lock.ending


def _forget_in_child() -> None:
    for lock in _locks():
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def is_held(folder: Path) -> bool | None:
    """Return True if a live run holds the lock of the folder; None if this machine cannot know if it lives."""
    found = holder_of(folder)
    return False if found is None else found.lives()


def holder_of(folder: Path) -> FoundLock | None:
    """Return the lock of a folder, which names its holder; None if there is none."""
    return _read(folder / LOCK_NAME)


# --- the file -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundLock:
    """The content of a lock file."""

    path: Path
    content: bytes  # its bytes, which change with the counter
    token: str
    holder: str  # the process that holds it, for people
    identity: ProcessIdentity | None  # of the process that holds it; None if the record is not whole
    locked: bool  # the system's own lock shows that the holder is alive

    def lives(self) -> bool | None:
        """True if the holder is alive; None if only the counter can show it."""
        if self.identity is not None and self.identity.boot and self.identity == ProcessIdentity.current():
            return self.token in _held
        if self.locked:
            return True
        return None if self.identity is None else self.identity.runs()


def _content(path: Path) -> tuple[bytes, bool] | None:
    """The bytes of the lock file at `path`, and whether another process holds the system's lock on it; None if there is
    none. Raises PermissionError, which names its owner, if this user may not read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return None
    except PermissionError as error:
        problem = f"this user may not read the lock {path.name} in it, which belongs to {_owner(path)}"
        raise PermissionError(error.errno, problem, str(path)) from None
    try:
        locked = _is_locked(descriptor)
        return os.read(descriptor, _MAX_BYTES), locked
    finally:
        os.close(descriptor)


def _read(path: Path) -> FoundLock | None:
    """The lock at `path`; see `_content`."""
    found = _content(path)
    if found is None:
        return None
    content, locked = found
    record: Any = None
    with contextlib.suppress(ValueError):
        record = parse_json(content)
    if not isinstance(record, dict):
        record = {}
    identity, token = ProcessIdentity.from_dict(record), record.get("token")
    if identity is None or not isinstance(token, str) or not token.isalnum():
        identity, token = None, hashlib.sha256(content).hexdigest()[:16]
    return FoundLock(path, content, token, _described(record), identity, locked)


def _wait_for_end(path: Path) -> FoundLock | None:
    """Wait until the holder of a lock file is known to be dead, and return its lock; None if the file is removed.

    Raises:
        FolderInUse: the holder is alive.
    """
    first, began = _read(path), time.monotonic()
    found = first
    while found is not None and first is not None and found.token == first.token:
        alive, waited = found.lives(), time.monotonic() - began
        if alive is False:
            return found
        beats = alive is None and found.content != first.content
        if beats or (alive and waited >= GRACE and not _is_ending(found.token)):
            raise FolderInUse(path, found.holder)
        if alive is None and waited >= PATIENCE:
            return found
        time.sleep(_POLL)
        found = _read(path)
    return None


def _record(token: str) -> bytes:
    """The record of this process: a JSON object that begins with the counter, which can be overwritten alone."""
    said = {
        **asdict(ProcessIdentity.current()),
        "user": _user(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(redact_command(sys.orig_argv))[:_MAX_COMMAND],
        "token": token,
    }
    return _COUNTER % 0 + b", " + json.dumps(said)[1:].encode("ascii") + b"\n"


def _described(record: dict[str, Any]) -> str:
    names = {"host": "host", "pid": "pid", "user": "user", "since": "started", "command": "command"}
    parts = [f"{name} {str(record[key])[:1000]}" for key, name in names.items() if key in record]
    return ", ".join(parts) or "unknown: its lock file is not complete"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container may have no name for its user
        return str(getattr(os, "getuid", lambda: "unknown")())


def _owner(path: Path) -> str:
    try:
        return f"user {path.owner()}"
    except KeyError:
        return f"user {path.lstat().st_uid}"
    except (OSError, NotImplementedError):
        return "another user"


def _lock(descriptor: int) -> None:
    """Acquire the system's lock if the file system has one; others hold it only for an instant, to check it."""
    if sys.platform != "win32":
        # For half a second in all.
        for _ in range(50):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                return
            else:
                return


def _is_locked(descriptor: int) -> bool:
    """Return True if a process has the system's lock. The check uses a shared lock, which other checks do not see."""
    if sys.platform != "win32":
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False
