"""Uploads beside training: a thread commits them one after the other, and tries again after growing pauses."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path

from windlass.checkpoint.split import left_over
from windlass.core.logs import get_logger
from windlass.core.redact import redact_text
from windlass.core.upload_log import note_upload
from windlass.hub.client import HubClient, HubError
from windlass.hub.staging import StagedFiles

logger = get_logger(__name__)

# Seconds between the attempts of one upload; the last pause repeats until `_LIMIT` has passed.
_PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_LIMIT = 600.0


@dataclass(eq=False)
class Upload:
    """One commit on the Hub."""

    what: str  # what is uploaded, for messages
    message: str
    # As they are to be in the repository; this upload alone owns them, and removes them at its end
    files: StagedFiles
    replaces: str = ""  # folder in the repository, of which other files are removed; "" to remove none
    # Called before the first attempt, on the uploading thread, to complete the files
    prepare: Callable[[], None] | None = None
    later: str = ""  # the command that uploads the same later
    error: str = ""  # why the last attempt failed
    # The address of the commit, once it is made, or the error for which it was dropped
    commit: Future[str] = field(default_factory=Future)
    given_up: threading.Event = field(default_factory=threading.Event)  # no caller waits for it any longer
    number: int = 0  # its place in the order of all uploads
    step: int | None = None  # of the checkpoint; None: it is the model of the run's end
    place: str = ""  # where it is on the Hub: a newer upload to it replaces one that waits; by default `what`

    def __post_init__(self) -> None:
        self.place = self.place or self.what


class Uploads:
    """The uploads of one run, to one repository.

    Args:
        every: commit each upload; otherwise one that waits is replaced by a newer one of the same.
        folder: of the run, where each end of an upload is noted; None for none.
    """

    def __init__(self, client: HubClient, *, every: bool = False, folder: Path | None = None) -> None:
        self._client, self._every, self._folder = client, every, folder
        self._lock = threading.RLock()
        self._waiting: list[Upload] = []
        self._current: Upload | None = None
        self._leaving = False
        self._thread: threading.Thread | None = None
        self._failed: list[Upload] = []
        self._numbers = itertools.count(1)
        self._warned = set[tuple[str, str]]()
        self._newest: dict[str, int] = {}  # place -> number of the last one of it that ended

    def add(self, upload: Upload) -> None:
        """Start an upload, or let it wait for those before it."""
        with self._lock:
            self._leaving = False
            upload.number = next(self._numbers)
            if not self._every:
                for older in [one for one in self._waiting if one.place == upload.place]:
                    self._waiting.remove(older)
                    older.commit.cancel()
                    older.files.remove()
            self._waiting.append(upload)
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="windlass-hub", daemon=True)
                thread.start()  # it waits for the lock
                self._thread = thread  # not before: one that Ctrl-C kept from starting would make no upload

    def drop(self, upload: Upload, why: str) -> None:
        """Note an upload that cannot begin, for what `finish()` returns."""
        upload.error = why
        self._report_loss(upload)
        with self._lock:
            upload.number = next(self._numbers)
            self._fail(upload)

    @property
    def pending(self) -> list[Upload]:
        """The uploads that are queued or running."""
        with self._lock:
            return [*([self._current] if self._current else []), *self._waiting]

    def finish(self, limit: float, report: Callable[[str], None]) -> list[Upload]:
        """Wait until all uploads have ended, at most `limit` seconds (inf: no limit) or until `leave()`; then give up
        on the rest.

        Returns:
            Those that failed since the last call. Unless each is to be committed, without those whose place a newer one
            has taken: to upload them later would replace it.

        Args:
            report: called with a line on what is waited for, at first and then every ten seconds.
        """
        until, told = time.monotonic() + limit, -math.inf
        while pending := self.pending:
            left = until - time.monotonic()
            if left <= 0 or self._leaving:
                self._give_up(
                    "the process had to exit" if self._leaving else f"it did not end within {limit:.0f} s"
                )
                break
            if time.monotonic() - told > 10.0:
                told = time.monotonic()
                most = "" if left == math.inf else f", at most {left:.0f} s"
                report(f"waiting for {len(pending)} upload(s) to the Hub{most}: {pending[0].what}")
            # In short waits: a signal handler sets `_leaving`, and cannot wake this thread.
            wait([pending[0].commit], min(left, 0.2))
        with self._lock:
            failed, self._failed = self._failed, []
            return [one for one in failed if self._every or one.number == self._newest[one.place]]

    def leave(self) -> None:
        """Do not wait for what is under way now, in `finish()` or later. May be called in a signal handler, so it takes
        no lock.
        """
        self._leaving = True

    def _give_up(self, why: str) -> None:
        with self._lock:
            rest = self.pending
            self._waiting, self._current = [], None
            self._thread = None  # it may never return from the Hub
            for upload in rest:
                if upload.commit.cancelled():
                    upload.files.remove()
                    continue
                upload.given_up.set()
                upload.error = upload.error or why
                self._fail(upload)

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        this = threading.current_thread()
        while True:
            with self._lock:
                if self._thread is not this:
                    return
                if not self._waiting:
                    self._thread = None  # a later upload gets another one
                    return
                upload = self._waiting.pop(0)
                # From here on a script cannot cancel it any more; one that it cancelled is left out.
                if not upload.commit.set_running_or_notify_cancel():
                    upload.files.remove()
                    continue
                self._current = upload
            address = self._try(upload)
            with self._lock:
                if self._thread is not this:
                    return
                self._current = None
                if address is None:
                    self._fail(upload)
                else:
                    self._warned.clear()
                    self._end(upload)
                    self._note(upload, "")
                    upload.commit.set_result(address)

    def _try(self, upload: Upload) -> str | None:
        """Commit an upload, and return the address; None if that failed for good."""
        until, attempt = time.monotonic() + _LIMIT, 0
        while not upload.given_up.is_set():
            try:
                if upload.prepare is not None:
                    upload.prepare()
                    upload.prepare = None
                return self._commit(upload)
            except HubError as error:
                why, again = str(error), error.passing
            except Exception as error:  # of the disk
                why, again = f"{type(error).__name__}: {error}", False
            if upload.given_up.is_set():
                break  # its end has been reported, and its files are removed
            upload.error = why
            pause = _PAUSES[min(attempt, len(_PAUSES) - 1)]
            if not again or time.monotonic() + pause > until:
                self._report_loss(upload)
                break
            if attempt == 0:
                self._report("the upload of %s is tried again, and training continues: %s", upload)
            attempt += 1
            upload.given_up.wait(pause)
        return None

    def _commit(self, upload: Upload) -> str:
        folder = upload.files.path
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {path.relative_to(folder).as_posix(): path for path in found}
        there = self._client.names()
        removed = [name for name in there if upload.replaces and name.startswith(f"{upload.replaces}/")]
        # Weights of the model in another number of files: `from_pretrained` prefers one file, however old.
        removed += left_over(there, files)
        # After the files were listed: who gives up removes them, and the Hub's would seem to be no longer wanted.
        if upload.given_up.is_set():
            raise HubError("no caller waits for the upload", passing=False)
        return self._client.commit(
            files, upload.message, removed=[name for name in removed if name not in files]
        )

    def _fail(self, upload: Upload) -> None:
        """Note a failure. The lock is held, so an upload ends once."""
        self._end(upload)
        self._note(upload, upload.error)
        self._failed.append(upload)
        upload.commit.set_exception(HubError(upload.error, passing=False))

    def _end(self, upload: Upload) -> None:
        upload.files.remove()
        self._newest[upload.place] = max(upload.number, self._newest.get(upload.place, 0))

    def _note(self, upload: Upload, problem: str) -> None:
        if self._folder is not None:
            note_upload(self._folder, upload.what, upload.step, redact_text(problem))

    def _report_loss(self, upload: Upload) -> None:
        self._report(
            "%s was not uploaded, and training continues: %s. To upload it later: %s", upload, upload.later
        )

    def _report(self, text: str, upload: Upload, *more: str) -> None:
        """Warn once for each reason, until an upload succeeds: it would be repeated with each save."""
        level = logging.INFO if (text, upload.error) in self._warned else logging.WARNING
        self._warned.add((text, upload.error))
        logger.log(level, text, upload.what, upload.error, *more)
