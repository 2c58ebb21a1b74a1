"""The experiment trackers of a user's own loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.callbacks.tracker import GeneralTracker
from windlass.callbacks.tracker_registry import LOGGER_TYPE_TO_CLASS
from windlass.config.refusal import refuse
from windlass.core.errors import Problem
from windlass.core.metric_values import python_number
from windlass.core.redact import redact_value, redacted_argv

TrackerOptions = Mapping[str, Mapping[str, Any]]


class Trackers:
    """Opens trackers, and sends values to them; see the methods of `Accelerator`.

    Args:
        log_with: names and trackers, as returned by `filter_trackers`.
        logging_dir: the folder for trackers that write files.

    Attributes:
        trackers: those that `init_trackers` opened.
    """

    def __init__(self, log_with: Sequence[str | GeneralTracker], logging_dir: str | None) -> None:
        self.log_with, self.logging_dir = list(log_with), logging_dir
        self.trackers: list[GeneralTracker] = []

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: TrackerOptions | None = None,
    ) -> None:
        """Open a run with every tracker of `log_with`. Call it on all processes; only the main one logs."""
        options = init_kwargs or {}
        _check_names("init_kwargs", options, [*LOGGER_TYPE_TO_CLASS, *map(_name, self.log_with)])
        opened = [self._build_tracker(item, project_name, options) for item in self.log_with]
        for tracker in opened:
            with redacted_argv():
                tracker.start()
        self.trackers += opened
        if config is not None:
            for tracker in opened:
                tracker.store_init_configuration(redact_value("config", config))

    def _build_tracker(
        self, item: str | GeneralTracker, project_name: str, options: TrackerOptions
    ) -> GeneralTracker:
        if isinstance(item, GeneralTracker):
            return item
        cls: Any = LOGGER_TYPE_TO_CLASS[item]
        folder = (self.logging_dir,) if cls.requires_logging_directory else ()
        tracker: GeneralTracker = cls(project_name, *folder, **options.get(item, {}))
        return tracker

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of this name, or with `unwrap` the run of its package."""
        if not self.trackers:
            return GeneralTracker(_blank=True)
        found = {tracker.name: tracker for tracker in self.trackers}
        _check_names("name", [name], list(found))
        return found[name].tracker if unwrap else found[name]  # type: ignore[attr-defined]

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: TrackerOptions | None = None
    ) -> None:
        """Send values to every tracker."""
        options = log_kwargs or {}
        _check_names("log_kwargs", options, [*LOGGER_TYPE_TO_CLASS, *map(_name, self.trackers)])
        plain = {name: python_number(value) for name, value in values.items()}
        for tracker in self.trackers:
            tracker.log(plain, step=step, **options.get(tracker.name, {}))

    def finish(self) -> None:
        """Close every run that `init_trackers` opened."""
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []


def _name(item: str | GeneralTracker) -> str:
    return item if isinstance(item, str) else item.name


def _check_names(field: str, given: Any, known: list[str]) -> None:
    fix = f"is not a tracker of this loop; known names: {', '.join(known) or 'none'}"
    refuse(Problem(field, name, fix) for name in given if name not in known)
