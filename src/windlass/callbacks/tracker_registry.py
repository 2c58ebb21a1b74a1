"""The experiment trackers by name, built in and registered by scripts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from windlass.callbacks.tracker import GeneralTracker, check_attributes
from windlass.callbacks.trackers.aim import AimTracker
from windlass.callbacks.trackers.clearml import ClearMLTracker
from windlass.callbacks.trackers.codecarbon import CodeCarbonTracker
from windlass.callbacks.trackers.comet_ml import CometMLTracker
from windlass.callbacks.trackers.dvclive import DVCLiveTracker
from windlass.callbacks.trackers.hosted_mlflow import AzureMLTracker, DagsHubTracker
from windlass.callbacks.trackers.mlflow import MLflowTracker
from windlass.callbacks.trackers.neptune import NeptuneTracker
from windlass.callbacks.trackers.swanlab import SwanLabTracker
from windlass.callbacks.trackers.tensorboard import TensorBoardTracker
from windlass.callbacks.trackers.trackio import TrackioTracker
from windlass.callbacks.trackers.wandb import WandBTracker
from windlass.config.enums import REPORT
from windlass.core.errors import ConfigError, Problem, refuse
from windlass.core.optional import is_available, require

# Name of a tracker -> keywords for it.
TrackerOptions = Mapping[str, Mapping[str, Any]]
LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    "aim": AimTracker,
    "azure_ml": AzureMLTracker,
    "clearml": ClearMLTracker,
    "codecarbon": CodeCarbonTracker,
    "comet_ml": CometMLTracker,
    "dagshub": DagsHubTracker,
    "dvclive": DVCLiveTracker,
    "mlflow": MLflowTracker,
    "neptune": NeptuneTracker,
    "swanlab": SwanLabTracker,
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
    "wandb": WandBTracker,
}
BUILT_IN = tuple(LOGGER_TYPE_TO_CLASS)

# Variables by which transformers has a tracker store more than rows, with what to do instead.
_UPLOADS = "keep weights by push_to_hub, or by an output_dir of remote storage"
_UNREAD = {
    "clearml": {"CLEARML_LOG_MODEL": _UPLOADS},
    "comet_ml": {"COMET_LOG_ASSETS": _UPLOADS},
    "dagshub": {"HF_DAGSHUB_LOG_ARTIFACTS": _UPLOADS},
    "dvclive": {"HF_DVCLIVE_LOG_MODEL": _UPLOADS},
    "mlflow": {"HF_MLFLOW_LOG_ARTIFACTS": _UPLOADS},
    "swanlab": {"SWANLAB_LOG_MODEL": _UPLOADS},
    "wandb": {"WANDB_LOG_MODEL": _UPLOADS, "WANDB_WATCH": "call `wandb.watch(model)` in the script"},
}
# By it transformers leaves MLflow out, for machines on which a platform has installed it.
_NO_MLFLOW = "DISABLE_MLFLOW_INTEGRATION"
_OFF = ("", "false", "f", "no", "n", "off", "0")


def get_available_trackers() -> list[str]:
    """Return the built-in trackers whose packages are installed, without services that take the runs of MLflow."""
    found = ((name, LOGGER_TYPE_TO_CLASS[name]) for name in BUILT_IN)
    return [name for name, cls in found if cls.in_all and not _missing(name) and not _is_switched_off(name)]


def _is_switched_off(name: str) -> bool:
    return name == MLflowTracker.name and os.environ.get(_NO_MLFLOW, "").upper() == "TRUE"


def _missing(name: str) -> list[str]:
    """The packages of a built-in tracker that are not installed."""
    needed = LOGGER_TYPE_TO_CLASS[name].packages or (name,)
    return [package for package in needed if not is_available(package)]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Register a tracker of your own for `log_with` in this process. Raises ConfigError if it is not such a class, or
    lacks `name` or `requires_logging_directory`.

    Args:
        tracker_class: subclass of `GeneralTracker`. It is called with the project's name, the logging folder if
            `requires_logging_directory` is true, and the keywords of `init_kwargs`.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ConfigError(Problem("tracker_class", tracker_class, "give a subclass of GeneralTracker"))
    check_attributes(tracker_class, ("name", "requires_logging_directory"))
    if not tracker_class.name:
        raise ConfigError(Problem(f"{tracker_class.__name__}.name", tracker_class.name, "give it a name"))
    if tracker_class.name in LOGGER_TYPE_TO_CLASS:
        replaced = LOGGER_TYPE_TO_CLASS[tracker_class.name].__name__
        text = f"{tracker_class.__name__} replaces {replaced}, which has the same name {tracker_class.name!r}"
        warnings.warn(text, stacklevel=2)
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class


def filter_trackers(
    log_with: Any, logging_dir: str | os.PathLike[str] | None = None, *, field: str = "log_with"
) -> list[str | GeneralTracker]:
    """Return the trackers of `log_with`, each once, with "all" replaced by every built-in tracker that is installed.

    Args:
        log_with: a name or a tracker, or a list of them; None for none. Members of an enum count by their value.
        logging_dir: the folder for trackers that write files.
        field: the name of `log_with` in errors.

    Raises:
        ConfigError: unknown names, or trackers without the folder that they need; all of them at once.
        MissingDependencyError: a tracker's package is not installed.
    """
    wanted = list(dict.fromkeys(_expanded(log_with)))
    names = [item for item in wanted if isinstance(item, str)]
    refuse(Problem(field, name, fix) for name in names if (fix := _objection(name, logging_dir)))
    for name in names:
        for package in _missing(name) if name in BUILT_IN else ():
            require(package, f"report to {name}")  # raises with the command that installs it
    return wanted


def trackers_of_run(report_to: Iterable[str | GeneralTracker]) -> list[str | GeneralTracker]:
    """As `filter_trackers`, for the trackers of a Trainer. Raises ConfigError also for variables of the environment
    that ask for more than rows.
    """
    wanted = filter_trackers(list(report_to), logging_dir="", field="report_to")
    names = [item if isinstance(item, str) else item.name for item in wanted]
    unread = {variable: fix for name in names for variable, fix in _UNREAD.get(name, {}).items()}
    given = {variable: os.environ.get(variable, "") for variable in unread}
    refuse(
        Problem(variable, value, f"is not read; unset it, and {unread[variable]}")
        for variable, value in given.items()
        if value.lower() not in _OFF
    )
    return wanted


def check_trackers(report_to: Iterable[str] | None) -> None:
    """Raise the errors of `trackers_of_run` for the trackers of an argument `report_to`."""
    trackers_of_run([name for name in report_to or () if name != REPORT])


def _expanded(log_with: Any) -> Iterator[str | GeneralTracker]:
    if log_with is None:
        return
    for item in log_with if isinstance(log_with, list | tuple) else [log_with]:
        if isinstance(item, GeneralTracker):
            yield item
            continue
        name = str(getattr(item, "value", item))
        yield from get_available_trackers() if name == "all" else [name]


def _objection(name: str, logging_dir: Any) -> str | None:
    if name not in LOGGER_TYPE_TO_CLASS:
        return f"is not a tracker; known names: all, {', '.join(LOGGER_TYPE_TO_CLASS)}"
    if LOGGER_TYPE_TO_CLASS[name].requires_logging_directory and logging_dir is None:
        return "writes files and needs a folder: give project_dir or logging_dir"
    if _is_switched_off(name):
        return f"is switched off by {_NO_MLFLOW}: unset it, or leave mlflow out"
    return None


def build_tracker(
    item: str | GeneralTracker, project_name: str, folder: str | None, options: TrackerOptions
) -> GeneralTracker:
    """A tracker of `filter_trackers`, one that was named with its `options`. `folder` is for those that write files."""
    if isinstance(item, GeneralTracker):
        return item
    cls: Any = LOGGER_TYPE_TO_CLASS[item]
    place = (folder,) if cls.requires_logging_directory else ()
    tracker: GeneralTracker = cls(project_name, *place, **options.get(item, {}))
    return tracker


def check_tracker_names(
    field: str, given: Iterable[str], used: Sequence[str | GeneralTracker], *, built_in: bool = True
) -> None:
    """Raise ConfigError for names that are of none of the trackers `used`, nor `built_in` ones."""
    known = list(LOGGER_TYPE_TO_CLASS) if built_in else []
    known += [item if isinstance(item, str) else item.name for item in used]
    fix = f"is not a tracker of this loop; known names: {', '.join(known) or 'none'}"
    refuse(Problem(field, name, fix) for name in given if name not in known)
