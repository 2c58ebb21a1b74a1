"""Callbacks that report to one tracker each, as scripts add and remove them: `trainer.remove_callback(WandbCallback)`.

Each is the `TrackingCallback` of its tracker. The one that `report_to="wandb"` makes counts as a `WandbCallback`; one
that reports to several trackers does not.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from windlass.callbacks.tracker import GeneralTracker
from windlass.callbacks.tracker_registry import LOGGER_TYPE_TO_CLASS, get_available_trackers
from windlass.callbacks.tracking import TrackingCallback


class _OneTracker(type(TrackingCallback)):  # type: ignore[misc]
    """Lets a `TrackingCallback` of the same single tracker count as an instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        if type.__instancecheck__(cls, instance):
            return True
        return isinstance(instance, TrackingCallback) and instance.names == [getattr(cls, "name", None)]


class _TrackerCallback(TrackingCallback, metaclass=_OneTracker):
    name: ClassVar[str]

    def __init__(self, tracker: GeneralTracker | None = None) -> None:
        super().__init__(tracker or self.name)

    # `_initialized`, and names like it below, are what subclasses of scripts read.

    @property
    def _initialized(self) -> bool:
        return bool(self.trackers)


def _run_of(callback: _TrackerCallback) -> Any:
    """The object of the tracker's own package for the open run; None if there is no open run."""
    return next((getattr(tracker, "tracker", None) for tracker in callback.trackers), None)


def _package_of(callback: _TrackerCallback) -> Any:
    kind: Any = LOGGER_TYPE_TO_CLASS[callback.name]
    return kind(None).package


class ClearMLCallback(_TrackerCallback):
    """Reports to ClearML."""

    name = "clearml"


class CometCallback(_TrackerCallback):
    """Reports to Comet."""

    name = "comet_ml"

    _experiment = property(_run_of)


class DVCLiveCallback(_TrackerCallback):
    """Reports to DVCLive."""

    name = "dvclive"

    live = property(_run_of, doc="The `dvclive.Live` of the open run, or None.")


class MLflowCallback(_TrackerCallback):
    """Reports to MLflow."""

    name = "mlflow"

    _ml_flow = property(_package_of)


class SwanLabCallback(_TrackerCallback):
    """Reports to SwanLab."""

    name = "swanlab"


class TensorBoardCallback(_TrackerCallback):
    """Writes event files for TensorBoard.

    Args:
        tb_writer: a `SummaryWriter` to write to, instead of one in the run's output folder.
    """

    name = "tensorboard"

    def __init__(self, tb_writer: Any = None) -> None:
        kind: Any = LOGGER_TYPE_TO_CLASS[self.name]
        super().__init__(None if tb_writer is None else kind.of_writer(tb_writer))

    @property
    def tb_writer(self) -> Any:
        """The `SummaryWriter` of the open run, or None: scripts add images and texts to it."""
        return _run_of(self)


class TrackioCallback(_TrackerCallback):
    """Reports to Trackio."""

    name = "trackio"


class WandbCallback(_TrackerCallback):
    """Reports to Weights & Biases."""

    name = "wandb"

    _wandb = property(_package_of)


INTEGRATION_TO_CALLBACK: dict[str, type[TrackingCallback]] = {
    cls.name: cls for cls in _TrackerCallback.__subclasses__()
}


get_available_reporting_integrations = get_available_trackers


def get_reporting_integration_callbacks(
    report_to: str | Iterable[str] | None,
) -> list[type[TrackingCallback]]:
    """The callbacks of the trackers that `report_to` names. Raises ValueError for a name that is not a tracker."""
    wanted = [report_to] if isinstance(report_to, str) else list(report_to or ())
    if wanted == ["none"]:
        return []
    names = (
        [name for name in get_available_trackers() if name in INTEGRATION_TO_CALLBACK]
        if wanted == ["all"]
        else wanted
    )
    unknown = [name for name in names if name not in INTEGRATION_TO_CALLBACK]
    if unknown:
        known = ", ".join(INTEGRATION_TO_CALLBACK)
        raise ValueError(f"report_to={unknown[0]!r}: is not a tracker with a callback; known names: {known}")
    return [INTEGRATION_TO_CALLBACK[name] for name in names]


def rewrite_logs(d: Mapping[str, Any]) -> dict[str, Any]:
    """Logs with `eval/`, `test/` and `train/` before their names, as trackers group them."""
    renamed = {}
    for name, value in d.items():
        split, _, rest = name.partition("_")
        renamed[f"{split}/{rest}" if rest and split in ("eval", "test") else f"train/{name}"] = value
    return renamed


def default_logdir() -> str:
    """A folder for event files, named after this minute and machine: `runs/Jan31_12-59-59_host`."""
    return os.path.join("runs", f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}")
