"""What a run publishes on the Hub, and when. Only the main process has a publisher."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from windlass.checkpoint.export import ExportOptions, export_folder, model_files
from windlass.checkpoint.files import Files
from windlass.checkpoint.manifest import MANIFEST_NAME, read_manifest
from windlass.checkpoint.store import Store, is_checkpoint
from windlass.checkpoint.stored import Folder, open_folder
from windlass.config.callback_interface import Args, Control, TrainerCallback
from windlass.core.errors import CheckpointError, ConfigError, Problem, WindlassError
from windlass.core.events import TrainerState
from windlass.core.logs import get_logger, warn_once
from windlass.core.output import one_line
from windlass.core.redact import HIDDEN
from windlass.core.upload_log import read_uploads
from windlass.hub.client import HubClient, HubError
from windlass.hub.staging import StagedFiles, remove_stale
from windlass.hub.uploads import Upload, Uploads

logger = get_logger(__name__)

LAST = "last-checkpoint"
# Flags of `windlass checkpoint push` for what each strategy uploads.
_FLAGS = {"end": ["--model-only"], "every_save": ["--model-only"], "all_checkpoints": ["--own-folder"]}


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Where and what to publish."""

    repository: str  # `owner/name`, or a name, whose owner is that of the token
    token: str | None = None  # None for that of this machine's login
    private: bool | None = None  # of a new repository; None for the owner's default
    strategy: str = "every_save"  # "end", "every_save", "checkpoint" or "all_checkpoints"
    always: bool = False  # upload every save; otherwise one that waits is replaced by the next
    revision: str | None = None  # branch; None for the main one
    wait: float = 600.0  # seconds that a run which ends waits for its uploads


class Publisher:
    """Uploads the files of one run beside training.

    Args:
        folder: of the run, on this machine's disk. Files under way are linked there (`hub/staging.py`).
    """

    def __init__(self, settings: HubSettings, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self._client: HubClient | None = None
        self._uploads: Uploads | None = None

    @property
    def repository(self) -> str:
        """Its full name, once it is open."""
        return self._settings.repository if self._client is None else self._client.repository

    def open(self) -> Uploads:
        """As `connect`; the error names the setting to change. Raises ConfigError if the Hub refuses the name or the
        token, or cannot be reached.
        """
        try:
            return self.connect()
        except HubError as error:
            raise ConfigError(_problem(self._settings, error, in_branch=self._client is not None)) from None

    def connect(self) -> Uploads:
        """Create the repository and the branch, if they do not exist. Raises HubError if the Hub refuses it, or cannot
        be reached.
        """
        if self._uploads is None:
            settings = self._settings
            client = HubClient(settings.repository, settings.token, settings.revision)
            client.open(settings.private)
            self._client = client
            client.open_branch()
            remove_stale(self._folder)
            self._uploads = Uploads(client, every=settings.always, folder=self._folder)
            # The thread is a daemon: without this, what a script saved last would end with the process.
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
        """Publish a committed checkpoint, as the strategy asks. Returns at once. `further`: files for the root of the
        repository (name -> file).
        """
        strategy = self._settings.strategy
        if strategy == "end":
            return
        uploads = self.open()
        upload = Upload(
            what=f"the model of {checkpoint.name}" if strategy == "every_save" else checkpoint.name,
            message=f"Training in progress, step {checkpoint.name.rpartition('-')[2]}",
            files=StagedFiles(self._folder),
            replaces={"checkpoint": LAST, "all_checkpoints": checkpoint.name}.get(strategy, ""),
            later=self._command(checkpoint, *_FLAGS.get(strategy, [])),
            step=int(checkpoint.name.rpartition("-")[2]),
            place=checkpoint.name if strategy == "all_checkpoints" else strategy,
        )
        try:
            if read_manifest(checkpoint, Files()).nodes > 1:
                warn_once(
                    logger,
                    "checkpoints on several disks are not uploaded during the run; publish its model at the end with "
                    "push_to_hub(), or let all machines write into one folder",
                )
                return
            _stage(upload, checkpoint, further or {})
        except (OSError, WindlassError) as error:
            uploads.drop(upload, f"{type(error).__name__}: {error}")
        else:
            uploads.add(upload)

    def continued(self, checkpoint: Path, step: int) -> None:
        """Publish the checkpoint that a run continues from, unless it is noted that it arrived: the process that saved
        it may have ended before; if all checkpoints are published, those before it too. Returns at once. One that is
        not of this run's folder is left alone.
        """
        own = self._folder / f"checkpoint-{step}"
        if checkpoint.resolve() != own.resolve() or not is_checkpoint(own):
            return
        steps = {step}
        if self._settings.strategy == "all_checkpoints":
            earlier = [info for info in Store(self._folder).list() if info.step < step]
            # An interrupted save, or a person, may have left one under another name.
            steps |= {info.step for info in earlier if info.path.name == f"checkpoint-{info.step}"}
        missing = {one for one in steps if not self._has_arrived(one)}
        if missing:
            # The newest one is the last, because the model of the last upload stays in the root of the repository.
            for one in sorted({*missing, step}):
                self.saved(self._folder / f"checkpoint-{one}")

    def _has_arrived(self, step: int) -> bool:
        """Return True if it is noted that this checkpoint is on the Hub."""
        saved_at = (self._folder / f"checkpoint-{step}" / MANIFEST_NAME).stat().st_mtime
        # An earlier run of this folder may have noted the same step.
        return any(
            row["step"] == step and not row["problem"] and row["time"] >= saved_at
            for row in read_uploads(self._folder)
        )

    def push(self, files: Mapping[str, Path], message: str, source: Path) -> Future[str]:
        """Start to upload these files (path in the repository -> file). The result is the address of the commit.
        `source`: the folder they are in, for the command that uploads it later.
        """
        uploads = self.open()
        later = self._command(source, "--model-only")
        upload = Upload("the model", message, StagedFiles(self._folder), later=later)
        try:
            upload.files.link(files)
        except BaseException:
            upload.files.remove()
            raise
        uploads.add(upload)
        return upload.commit

    def finish(self) -> bool:
        """Wait for the uploads under way, log what was not uploaded, and return True if there is nothing of it. Called
        at the end of the process too.
        """
        if self._uploads is None:
            return True
        failed = self._uploads.finish(self._settings.wait, logger.warning)
        if failed:
            logger.warning(
                "not uploaded to %s:%s",
                self.repository,
                "".join(f"\n  {one.what} ({one.error}); later: {one.later}" for one in failed),
            )
        return not failed

    def _finish_process(self, owner: int) -> None:
        """Wait for what a script saved after training. A forked process has no uploads, only a copy of their list."""
        if os.getpid() == owner:
            self.finish()

    def leave(self) -> None:
        """Do not wait for the uploads under way, in `finish()` or at the end of the process; for signal handlers."""
        if self._uploads is not None:
            self._uploads.leave()

    def _command(self, source: Path, *flags: str) -> str:
        branch = [] if self._settings.revision is None else ["--revision", self._settings.revision]
        words = ["windlass", "checkpoint", "push", one_line(source), self.repository, *branch, *flags]
        return shlex.join(words)


def _stage(upload: Upload, checkpoint: Path, further: Mapping[str, Path]) -> None:
    """Link the files of a checkpoint that `upload` publishes, and `further` ones for the root of the repository."""
    source, files = open_folder(checkpoint), upload.files
    whole = {name: checkpoint / name for name in [*source.names, MANIFEST_NAME]}
    plain = model_files(source)
    keeps = bool(upload.replaces)
    place = upload.replaces or checkpoint.name
    if keeps or plain is None:  # one that is not to be published is kept until its weights are exported
        files.link({f"{place}/{name}": path for name, path in whole.items()})
    files.link({**further, **{name: checkpoint / name for name in plain or []}})
    if plain is None:
        upload.prepare = partial(_export, files.path, place, keeps)


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


def _problem(settings: HubSettings, error: HubError, *, in_branch: bool) -> Problem:
    """The setting to change: token, network, name, or the branch, if that was asked for."""
    ways = {401: "Log in with `hf auth login`, or set HF_TOKEN", 403: "Give a token that may write there"}
    if error.status in ways:
        return Problem("hub_token", HIDDEN if settings.token else None, f"{error}. {ways[error.status]}")
    # Not refused: with the same settings the run may start later, or elsewhere.
    if error.passing:
        where = "Without a network" if error.status is None else "If the Hub stays in trouble"
        fix = f"{error}. {where} set push_to_hub=False, and upload later with `windlass checkpoint push`"
        return Problem("push_to_hub", True, fix)
    if in_branch:
        return Problem("hub_revision", settings.revision, str(error))
    return Problem("hub_model_id", settings.repository, str(error))


class HubCallback(TrainerCallback):
    """Uploads what is saved, and waits for the uploads at the end. The repository is open before training begins.

    Args:
        publisher: used on the main process; other processes do nothing.
    """

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher

    def on_save(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.publisher.saved(Path(args.output_path) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Args, state: TrainerState, control: Control, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.publisher.finish()
