"""One repository on the Hub, through the package `huggingface_hub`, which is imported here alone.

Every failure is a `HubError`, whose text has no token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from windlass.checkpoint.remote import quiet
from windlass.core.errors import WindlassError
from windlass.core.optional import require
from windlass.core.redact import redact_text

# Answers after which the same request may succeed later: too many requests, a conflicting commit, a server in trouble.
_PASSING = (408, 409, 412, 425, 429, 500, 502, 503, 504)


PATIENCE = 60.0
"""Seconds without a byte in either direction after which a request has failed."""


def _limit_waits() -> None:
    """Let requests of the package fail that the Hub never answers; by itself the package waits without a limit.

    The limit holds for the whole process. A script that makes the package's HTTP client itself decides about it.
    """
    http: Any = require("huggingface_hub.utils._http", "publish on the Hub")
    original: Callable[[], Any] = getattr(http, "default_client_factory", lambda: None)
    if getattr(http, "_GLOBAL_CLIENT_FACTORY", None) is not original:
        return

    def factory() -> Any:
        client = original()
        client.timeout = PATIENCE
        return client

    http.set_client_factory(factory)


# Errors of the package whose last line does not name the fault.
_ABSENT = {
    "RepositoryNotFoundError": "no such repository, or the token may not read it",
    "RevisionNotFoundError": "no such branch, tag or commit",
}


def _reason(error: BaseException) -> str:
    """The kind of an error, and the last line of its text, in which the client puts the Hub's own words."""
    if _status(error) == 404 and type(error).__name__ in _ABSENT:
        return _ABSENT[type(error).__name__]
    lines = str(error).strip().rstrip(".").splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _status(error: BaseException) -> int | None:
    """The Hub's answer; None if there was none."""
    return getattr(getattr(error, "response", None), "status_code", None)


class HubError(WindlassError, ConnectionError):
    """A request to the Hub failed.

    Attributes:
        passing: the same request may succeed later.
        status: the Hub's answer; None if there was none.
    """

    def __init__(self, text: str, *, passing: bool, status: int | None = None) -> None:
        super().__init__(text)
        self.passing, self.status = passing, status


class HubClient:
    """A model repository.

    Args:
        repository: `owner/name`, or a name, whose owner is that of the token.
        token: None for the one of `hf auth login` or `HF_TOKEN`. As with these, white space around it does not count.
        revision: branch; None for the main one.

    Raises:
        MissingDependencyError: the package is not installed.
        HubError: the token has characters that cannot be sent.
    """

    def __init__(self, repository: str, token: str | None = None, revision: str | None = None) -> None:
        self._library: Any = require("huggingface_hub", "publish on the Hub")
        _limit_waits()
        self._token, self._revision = (token or "").strip() or None, revision
        self._api: Any = self._library.HfApi(token=self._token)
        self.repository = repository
        if self._token and not (self._token.isascii() and self._token.isprintable()):
            text = f"cannot use {self.address}: the token has characters that no token has"
            raise HubError(text, passing=False, status=401)

    @property
    def address(self) -> str:
        """The page of the repository."""
        return f"{self._api.endpoint}/{self.repository}"

    def open(self, private: bool | None = None) -> None:
        """Create the repository if it does not exist, and check that the token may write there. `private`: of a new
        repository; None for the owner's default.
        """
        # The owner of a name without one is known after this.
        with self._doing("open"):
            created = self._api.create_repo(self.repository, private=private, exist_ok=True)
            self.repository = created.repo_id
            self._api.auth_check(self.repository, write=True)

    def open_branch(self) -> None:
        """Create the branch if it does not exist; nothing for the main one."""
        if self._revision is not None:
            with self._doing(f"create the branch {self._revision} of"):
                self._api.create_branch(self.repository, branch=self._revision, exist_ok=True)

    def commit(self, files: Mapping[str, Path], message: str, *, removed: Iterable[str] = ()) -> str:
        """Upload files, and remove others, in one commit. Return its address.

        Contents are uploaded one file after the other: the client would upload several on threads for which the exit of
        the process waits, however long the Hub does not answer.

        Args:
            files: path in the repository -> file to upload.
            removed: paths of files to remove.
        """
        add, delete = self._library.CommitOperationAdd, self._library.CommitOperationDelete
        with self._doing("upload to"), self._quiet():
            added = [add(name, str(path)) for name, path in files.items()]
            for operation in added:
                self._api.preupload_lfs_files(self.repository, [operation], revision=self._revision)
            removals = [delete(name, is_folder=False) for name in removed]
            done = self._api.create_commit(
                self.repository, [*added, *removals], commit_message=message, revision=self._revision
            )
        # The Hub answers with success also if it applied a .gitignore, without which files of a checkpoint are missing.
        left_out = sorted(files.keys() - set(self.names(revision=done.oid)))
        if left_out:
            raise HubError(
                f"{self.address} left out {', '.join(left_out)}: remove their names from .gitignore there",
                passing=False,
            )
        return str(done.commit_url)

    def names(self, folder: str = "", revision: str | None = None) -> list[str]:
        """Paths of the files in a folder and its folders; none if it does not exist."""
        return list(self.sizes(folder, revision))

    def sizes(self, folder: str = "", revision: str | None = None) -> dict[str, int]:
        """The same paths, with the size of each file in bytes."""
        absent: Any = require("huggingface_hub.errors", "publish on the Hub").EntryNotFoundError
        with self._doing("list"), contextlib.suppress(absent):
            found = self._api.list_repo_tree(
                self.repository, folder or None, recursive=True, revision=revision or self._revision
            )
            return {entry.path: int(entry.size) for entry in found if hasattr(entry, "blob_id")}
        return {}

    def commit_of(self, revision: str | None = None) -> str:
        """The id of the commit that a branch or tag points to now."""
        with self._doing("read"):
            return str(self._api.repo_info(self.repository, revision=revision or self._revision).sha)

    def license_of(self, repository: str) -> str | None:
        """The licence that the card of another model names; None if it cannot be found out."""
        with contextlib.suppress(HubError), self._doing("read"):
            data = self._api.model_info(repository).card_data
            found = None if data is None else data.get("license")
            return found if isinstance(found, str) else None
        return None

    def fetch(self, name: str, revision: str, folder: Path) -> Path:
        """Download a file into `folder`, under its path in the repository."""
        with self._doing("download from"):
            path = self._library.hf_hub_download(
                self.repository, name, revision=revision, token=self._token, local_dir=folder
            )
            return Path(path)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Within the body the client draws no progress bars, which would cut those of training."""
        bars: Any = require("huggingface_hub.utils", "publish on the Hub")
        drawn = not bars.are_progress_bars_disabled()
        if drawn:
            bars.disable_progress_bars()
        try:
            yield
        finally:
            if drawn:
                bars.enable_progress_bars()

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except HubError:
            raise
        except Exception as error:  # of the package, of its HTTP library, or of the disk
            raise self._described(what, error) from quiet(error)

    def _described(self, what: str, error: Exception) -> HubError:
        status = _status(error)
        reasons = [_reason(error)]
        if status is None and error.__cause__ is not None:  # the client names the file alone
            reasons.append(_reason(error.__cause__))
        text = redact_text(f"cannot {what} {self.address}: {': '.join(dict.fromkeys(reasons))}")
        if self._token:
            text = text.replace(self._token, "***")
        # An argument that the package refuses before it asks the Hub is refused each time.
        never = isinstance(error, ValueError | TypeError) and status is None
        return HubError(text, passing=status in _PASSING or (status is None and not never), status=status)
