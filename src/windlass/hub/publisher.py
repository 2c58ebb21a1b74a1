"""What a run publishes on the Hub, and when. Only the main process has a publisher."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from windlass.checkpoint.export import ExportOptions, export_folder, model_files
from windlass.checkpoint.files import Files
from windlass.checkpoint.manifest import MANIFEST_NAME, read_manifest
from windlass.checkpoint.stored import Folder, open_folder
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.logs import get_logger, warn_once
from windlass.core.output import one_line
from windlass.core.redact import HIDDEN
from windlass.hub.client import HubClient, HubError
from windlass.hub.uploads import Upload, Uploads, linked

logger = get_logger(__name__)

LAST = "last-checkpoint"
STAGING = ".windlass-hub"


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Where and what to publish.

    Attributes:
        repository: `owner/name`, or a name, whose owner is that of the token.
        token: None for that of this machine's login.
        private: of a new repository; None for the owner's default.
        strategy: "end", "every_save", "checkpoint" or "all_checkpoints".
        always: upload every save; otherwise one that waits is replaced by the next.
        revision: branch; None for the main one.
        wait: seconds that a run which ends waits for its uploads.
    """

    repository: str
    token: str | None = None
    private: bool | None = None
    strategy: str = "every_save"
    always: bool = False
    revision: str | None = None
    wait: float = 600.0


class Publisher:
    """Uploads the files of one run beside training.

    Args:
        folder: of the run, on this machine's disk. Files under way are linked in its folder `.windlass-hub`.
    """

    def __init__(self, settings: HubSettings, folder: Path) -> None:
        self._settings, self._staging = settings, folder / STAGING
        self._numbers = itertools.count()
        self._client: HubClient | None = None
        self._uploads: Uploads | None = None

    @property
    def repository(self) -> str:
        """Its full name, once it is open."""
        return self._settings.repository if self._client is None else self._client.repository

    def open(self) -> Uploads:
        """Create the repository, if it does not exist.

        Raises:
            ConfigError: the Hub refuses the name or the token, or cannot be reached.
        """
        if self._uploads is None:
            settings = self._settings
            client = HubClient(settings.repository, settings.token, settings.revision)
            field, value = "hub_model_id", settings.repository
            try:
                client.open(settings.private)
                field, value = "hub_revision", settings.revision or ""
                client.open_branch()
            except HubError as error:
                raise ConfigError(_problem(settings, error, field, value)) from error
            for left in self._staging.glob("upload-*"):  # of a run that was killed
                shutil.rmtree(left, ignore_errors=True)
            self._client, self._uploads = client, Uploads(client, every=settings.always)
            atexit.register(self._finish_process, os.getpid())
        return self._uploads

    def license_of(self, base: str) -> str | None:
        """The licence of the model that this one was fine-tuned from; None if the Hub does not tell."""
        return HubClient(base, self._settings.token).license_of(base)

    def holds(self, name: str) -> bool:
        """Return True if the branch has a file of this name in its root."""
        self.open()
        assert self._client is not None
        try:
            return name in self._client.names()
        except HubError as error:
            raise CheckpointError(str(error)) from None

    def saved(self, checkpoint: Path, further: Mapping[str, Path] | None = None) -> None:
        """Publish a committed checkpoint, as the strategy asks. Returns at once.

        Args:
            further: files for the root of the repository (name -> file).
        """
        strategy = self._settings.strategy
        if strategy == "end":
            return
        if read_manifest(checkpoint, Files()).nodes > 1:
            warn_once(
                logger,
                "checkpoints on several disks are not uploaded during the run; publish its model at the end with "
                "push_to_hub(), or let all machines write into one folder",
            )
            return
        uploads, source = self.open(), open_folder(checkpoint)
        folder = self._new_folder()
        place = {"checkpoint": LAST, "all_checkpoints": checkpoint.name}.get(strategy, "")
        if place:
            names = [*source.names, MANIFEST_NAME]
            linked({f"{place}/{name}": checkpoint / name for name in names}, folder)
        linked(further or {}, folder)
        plain = model_files(source)
        if plain is not None:
            linked({name: checkpoint / name for name in plain}, folder)
        elif not place:  # kept until its weights are exported
            linked(
                {name: checkpoint / name for name in [*source.names, MANIFEST_NAME]}, folder / checkpoint.name
            )
        prepare = (
            None if plain is not None else partial(_export, folder, place or checkpoint.name, bool(place))
        )
        uploads.add(
            Upload(
                what=checkpoint.name if strategy == "all_checkpoints" else "the newest checkpoint",
                message=f"Training in progress, step {source.path.name.rpartition('-')[2]}",
                folder=folder,
                replaces=place,
                prepare=prepare,
                later=self._command(checkpoint),
            )
        )

    def push(self, files: Mapping[str, Path], message: str, source: Path) -> Future[str]:
        """Start to upload these files (path in the repository -> file). The result is the address of the commit.

        Args:
            source: the folder they are in, for the command that uploads it later.
        """
        uploads, folder = self.open(), self._new_folder()
        linked(files, folder)
        upload = Upload("the model", message, folder, later=self._command(source))
        uploads.add(upload)
        return upload.commit

    def finish(self) -> bool:
        """Wait for the uploads under way, log what was not uploaded, and return True if there is nothing of it. Called
        at the end of the process too.
        """
        if self._uploads is None:
            return True
        failed = self._uploads.finish(self._settings.wait, logger.info)
        if failed:
            logger.warning(
                "not uploaded to %s:%s", self.repository,
                "".join(f"\n  {one.what} ({one.error}); later: {one.later}" for one in failed),
            )  # fmt: skip
        return not failed

    def _finish_process(self, owner: int) -> None:
        """Wait for what a script saved after training. A forked process has no uploads, only a copy of their list."""
        if os.getpid() == owner:
            self.finish()

    def leave(self) -> None:
        """Do not wait for the uploads under way, in `finish()` or at the end of the process; for signal handlers."""
        if self._uploads is not None:
            self._uploads.leave()

    def _new_folder(self) -> Path:
        folder = self._staging / f"upload-{next(self._numbers)}"
        folder.mkdir(parents=True)
        return folder

    def _command(self, source: Path) -> str:
        return f"windlass checkpoint push {one_line(source)} {self.repository}"


def _export(folder: Path, place: str, keeps: bool) -> None:
    """Write the whole weights of the sharded checkpoint in `folder/place` to `folder`."""
    source: Folder = open_folder(folder / place)
    whole = folder / "tmp-whole"
    export_folder(source, whole, ExportOptions(force=True))
    for path in sorted(whole.iterdir()):
        path.rename(folder / path.name)
    whole.rmdir()
    if not keeps:
        shutil.rmtree(folder / place)


def _problem(settings: HubSettings, error: HubError, field: str, value: str) -> Problem:
    """The setting to change; `field` if it is neither the token nor the network."""
    ways = {401: "Log in with `hf auth login`, or set HF_TOKEN", 403: "Give a token that may write there"}
    if error.status in ways:
        return Problem("hub_token", HIDDEN if settings.token else None, f"{error}. {ways[error.status]}")
    if error.passing:
        where = "Without a network" if error.status is None else "If the Hub stays in trouble"
        fix = f"{error}. {where} set push_to_hub=False, and upload later with `windlass checkpoint push`"
        return Problem("push_to_hub", True, fix)
    return Problem(field, value, str(error))
