"""The final model of a Trainer, and its saves, on the Hub."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from windlass.callbacks.handler import CallbackHandler
from windlass.checkpoint.adapters import ADAPTER_WEIGHTS
from windlass.checkpoint.export import model_files
from windlass.checkpoint.manager import Checkpoint
from windlass.checkpoint.stored import open_folder
from windlass.config.arguments import TrainingArguments
from windlass.config.kinds import seconds
from windlass.core.errors import ConfigError, Problem, WindlassError
from windlass.dist.gang import Gang
from windlass.dist.lockstep import together
from windlass.hub.fetching import SCHEME, fetch
from windlass.hub.publisher import HubCallback, HubSettings, Publisher
from windlass.trainer.card_facts import base_of, is_repository
from windlass.trainer.run_folder import RunFolder

T = TypeVar("T")


def repository(args: TrainingArguments) -> str:
    """The repository that the arguments name; by default the output folder's name."""
    return args.hub_model_id or Path(args.output_path).name


def hub_callback(args: TrainingArguments, folder: Path) -> HubCallback:
    """The callback that publishes what a run saves in `folder`."""
    return HubCallback(Publisher(_settings(args), folder))


def publisher(
    args: TrainingArguments,
    handler: CallbackHandler,
    folder: Path,
    token: str | None = None,
    revision: str | None = None,
) -> Publisher:
    """The publisher of this Trainer; another one for another token or branch."""
    if token is not None or revision is not None:
        return Publisher(_settings(args, token, revision), folder)
    if not handler.of_kind(HubCallback):
        handler.add_callback(hub_callback(args, folder))
    return handler.of_kind(HubCallback)[0].publisher


def card_facts(publisher: Publisher, model: Any, facts: dict[str, Any]) -> dict[str, Any]:
    """Facts for the card of a model, with a name, and the licence of its base if none is given."""
    facts.setdefault("model_name", publisher.repository.rpartition("/")[2])
    base = facts.get("finetuned_from") or base_of(model)
    if base and is_repository(base) and not facts.get("license"):
        facts["license"] = publisher.license_of(base)
    return facts


def push(publisher: Publisher, folder: Path, message: str, *, adapter: bool) -> Future[str]:
    """Start to upload the model in `folder`, with its card. `adapter`: it is an adapter; an earlier run may have left
    whole weights beside it.
    """
    source = open_folder(folder)
    names = model_files(source, ADAPTER_WEIGHTS if adapter and ADAPTER_WEIGHTS in source else None)
    assert names is not None, "save_model() writes whole weights"
    return publisher.push({name: folder / name for name in names}, message, folder)


def model_saved(args: TrainingArguments, handler: CallbackHandler, folder: Path, *, adapter: bool) -> None:
    """Start to upload the model that a script saved, if the run publishes. On the main process."""
    if args.push_to_hub:
        push(publisher(args, handler, folder), folder, "Model save", adapter=adapter)


def on_main(all_ranks: Gang, work: Callable[[], T]) -> T | None:
    """What `work` returns on the main process; None on the others. Collective. If it fails, the others raise
    CheckpointError with its reason.
    """
    return together(all_ranks, lambda: work() if all_ranks.rank == 0 else None, ())


def end_waits(handler: CallbackHandler) -> None:
    """Do not wait for the uploads under way: the run has to end. For signal handlers, too."""
    for callback in handler.of_kind(HubCallback):
        callback.publisher.leave()


def opened(handler: CallbackHandler, all_ranks: Gang) -> None:
    """Create the repository that a run publishes in, on the main process. Collective. Raises ConfigError if the Hub
    refuses it, or cannot be reached; the same on every rank. What else fails there is a ConfigError on the others.
    """
    failure: Exception | None = None
    problems: list[tuple[str, Any, str]] = []
    try:
        for callback in handler.of_kind(HubCallback) if all_ranks.rank == 0 else ():
            callback.publisher.open()
    except ConfigError as error:
        failure, problems = error, [(found.field, found.value, found.fix) for found in error.problems]
    except Exception as error:  # such as a package that is not installed, or a disk that is full
        failure, problems = error, [("push_to_hub", True, f"the main process cannot publish: {error}")]
    refused = all_ranks.broadcast_object(problems)
    if failure is not None:
        raise failure
    if refused:
        raise ConfigError(Problem(*found) for found in refused)


def continued(handler: CallbackHandler, checkpoint: Checkpoint | None, all_ranks: Gang) -> None:
    """Publish the checkpoint that a run continues from, if it did not arrive, on the main process."""
    if checkpoint is not None and all_ranks.rank == 0:
        for callback in handler.of_kind(HubCallback):
            callback.publisher.continued(checkpoint.folder, checkpoint.step)


def fetched(resume: Any, args: TrainingArguments, all_ranks: Gang, folder: RunFolder) -> Any:
    """Return `resume_from_checkpoint`; one on the Hub is downloaded once for each disk, and its path returned.
    Collective. Raises CheckpointError if it is not there, or cannot be downloaded; the same on every rank.
    """
    if not (isinstance(resume, str) and resume.startswith(SCHEME)):
        return resume
    writes = all_ranks.rank == folder.disks.writer_rank
    path = together(
        all_ranks, lambda: fetch(resume, args.hub_token, folder.path) if writes else None, (WindlassError,)
    )
    return next(path for path in all_ranks.gather_objects(path) if path is not None)


def _settings(args: TrainingArguments, token: str | None = None, revision: str | None = None) -> HubSettings:
    strategy = getattr(args.hub_strategy, "value", args.hub_strategy)
    wait = seconds(args.hub_wait)
    if args.world_size > 1:
        # The other ranks wait for this one in their next exchange, which fails after `ddp_timeout`.
        wait = min(wait, args.ddp_timeout_delta.total_seconds() / 2)
    return HubSettings(
        repository(args),
        token or args.hub_token,
        args.hub_private_repo,
        strategy,
        args.hub_always_push,
        revision or args.hub_revision or None,
        wait,
    )
