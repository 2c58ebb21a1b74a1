"""The experiment trackers by name: one line for each, and those that a script adds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from windlass.callbacks.tracker import GeneralTracker, check_attributes
from windlass.callbacks.trackers.aim import AimTracker
from windlass.callbacks.trackers.clearml import ClearMLTracker
from windlass.callbacks.trackers.comet_ml import CometMLTracker
from windlass.callbacks.trackers.dvclive import DVCLiveTracker
from windlass.callbacks.trackers.mlflow import MLflowTracker
from windlass.callbacks.trackers.swanlab import SwanLabTracker
from windlass.callbacks.trackers.tensorboard import TensorBoardTracker
from windlass.callbacks.trackers.trackio import TrackioTracker
from windlass.callbacks.trackers.wandb import WandBTracker
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger
from windlass.core.optional import is_available, require

logger = get_logger(__name__)

# Each built-in tracker is named as the package that it needs.
LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    "aim": AimTracker,
    "clearml": ClearMLTracker,
    "comet_ml": CometMLTracker,
    "dvclive": DVCLiveTracker,
    "mlflow": MLflowTracker,
    "swanlab": SwanLabTracker,
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
    "wandb": WandBTracker,
}
BUILT_IN = tuple(LOGGER_TYPE_TO_CLASS)


def get_available_trackers() -> list[str]:
    """The built-in trackers whose packages are installed."""
    return [name for name in BUILT_IN if is_available(name)]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let `log_with` name a tracker of your own, from now on in this process.

    Args:
        tracker_class: subclass of `GeneralTracker`. It is called with the project's name, then, where
            `requires_logging_directory` is true, the logging folder, then the keywords of `init_kwargs`.

    Raises:
        ConfigError: it is no such class, or says neither `name` nor `requires_logging_directory`.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ConfigError(Problem("tracker_class", tracker_class, "give a subclass of GeneralTracker"))
    check_attributes(tracker_class, ("name", "requires_logging_directory"))
    if not tracker_class.name:
        raise ConfigError(Problem(f"{tracker_class.__name__}.name", tracker_class.name, "give it a name"))
    if tracker_class.name in LOGGER_TYPE_TO_CLASS:
        replaced = LOGGER_TYPE_TO_CLASS[tracker_class.name].__name__
        logger.warning("%s takes the place of %s", tracker_class.__name__, replaced)
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class


def filter_trackers(
    log_with: Any, logging_dir: str | os.PathLike[str] | None = None, *, field: str = "log_with"
) -> list[str | GeneralTracker]:
    """What `log_with` asks for: each name once, "all" as every built-in tracker that is installed.

    Args:
        log_with: a name or a tracker, or a list of them; None for none. Members of an enum count by their value.
        logging_dir: the folder for trackers that write files.
        field: what an error calls `log_with`.

    Raises:
        ConfigError: unknown names, or names that need a folder where there is none; all of them at once.
        MissingDependencyError: a tracker's package is not installed.
    """
    wanted = list(dict.fromkeys(_expanded(log_with)))
    problems = [problem for item in wanted for problem in _objections(item, logging_dir, field)]
    if problems:
        raise ConfigError(problems)
    for item in wanted:
        if item in BUILT_IN and not is_available(item):
            require(item, f"report to {item}")  # says how to install it
    return wanted


def _expanded(log_with: Any) -> Iterator[str | GeneralTracker]:
    if log_with is None:
        return
    for item in log_with if isinstance(log_with, list | tuple) else [log_with]:
        if isinstance(item, GeneralTracker):
            yield item
            continue
        name = str(getattr(item, "value", item))
        yield from get_available_trackers() if name == "all" else [name]


def _objections(item: str | GeneralTracker, logging_dir: Any, field: str) -> Iterator[Problem]:
    if isinstance(item, GeneralTracker):
        return
    if item not in LOGGER_TYPE_TO_CLASS:
        known = ", ".join(LOGGER_TYPE_TO_CLASS)
        yield Problem(field, item, f"is not a tracker; known names: all, {known}")
    elif LOGGER_TYPE_TO_CLASS[item].requires_logging_directory and logging_dir is None:
        yield Problem(field, item, "writes files and needs a folder: give project_dir or logging_dir")
