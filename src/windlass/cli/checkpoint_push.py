"""`windlass checkpoint push`: publish a checkpoint, or a model, on the Hub."""

from __future__ import annotations

import argparse
import math
import shlex
import tempfile
from pathlib import Path

from windlass.checkpoint.export import model_files
from windlass.checkpoint.store import Store
from windlass.checkpoint.stored import open_folder
from windlass.cli.checkpoint_listing import is_one_checkpoint, local_path
from windlass.cli.command_line import answer
from windlass.core.errors import CheckpointError
from windlass.hub.client import HubError
from windlass.hub.publisher import HubSettings, Publisher
from windlass.trainer.card import CARD, of_checkpoint, write_card


def push_command(options: argparse.Namespace) -> int:
    folder = local_path(options.folder)
    strategy = (
        "every_save" if options.model_only else "all_checkpoints" if options.own_folder else "checkpoint"
    )
    # Without a limit: nothing else waits for this process, and Ctrl-C ends it.
    settings = HubSettings(
        options.repository,
        private=options.private or None,
        strategy=strategy,
        revision=options.revision,
        wait=math.inf,
    )
    model = _model(folder) if options.model_only else []
    checkpoint = None if model else _checkpoint(folder)
    if checkpoint is None:
        names = model or model_files(open_folder(folder))
        if names is None:
            advice = f"windlass checkpoint export {shlex.quote(str(folder))} NEW_FOLDER"
            raise CheckpointError(
                f"{folder} holds no model in safetensors files: export it first, with {advice}"
            )
        publisher = _connected(Publisher(settings, folder))
        publisher.push({name: folder / name for name in names}, "Upload of the model", folder)
    else:
        publisher = _connected(Publisher(settings, checkpoint.parent))
        # The card is linked or copied within `saved`, so this folder may be removed before the upload ends.
        with tempfile.TemporaryDirectory() as made:
            publisher.saved(checkpoint, _card(publisher, checkpoint, Path(made)))
    try:
        if not publisher.finish():
            return 1
    except KeyboardInterrupt:
        publisher.leave()  # else the end of the process would wait for the upload again
        raise
    facts = {"published": str(checkpoint or folder), "repository": publisher.repository}
    return answer(options, facts, [f"{checkpoint or folder} is published in {publisher.repository}"])


def _connected(publisher: Publisher) -> Publisher:
    """Open the repository. Errors name the options of this command, not the arguments of a run."""
    try:
        publisher.connect()
    except HubError as error:
        advice = "log in with `hf auth login`, or set HF_TOKEN to a token that may write there"
        raise CheckpointError(f"{error}{f'; {advice}' if error.status in (401, 403) else ''}") from None
    return publisher


def _model(folder: Path) -> list[str]:
    """The files of the final model that a run saved beside its checkpoints; empty if there is none."""
    if is_one_checkpoint(folder):
        return []
    try:
        return model_files(open_folder(folder)) or []
    except CheckpointError:
        return []


def _card(publisher: Publisher, checkpoint: Path, made: Path) -> dict[str, Path]:
    """The card in the run's folder, or one that is made; none if the repository has one, which may have been edited."""
    if publisher.holds(CARD):
        return {}
    written = checkpoint.parent / CARD
    if not written.is_file():
        found = of_checkpoint(checkpoint, publisher.repository.rpartition("/")[2])
        if found is None:
            return {}
        written = made / CARD
        write_card(written, found)
    return {CARD: written}


def _checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `folder` is, or the newest one in it, verified; None for a folder with a model alone."""
    if is_one_checkpoint(folder):
        return Store(folder.resolve().parent).verify(folder.resolve()).path
    store = Store(folder)
    if store.folders():
        return store.resume_point(True).path
    if not any(folder.iterdir()):
        raise CheckpointError(f"{folder} is empty")
    return None
