"""What an experiment tracker is: the base class that the built-in ones and users' own have in common."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_logger, warn_once
from windlass.core.world import world_from_environment

logger = get_logger(__name__)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_NEEDED = ("name", "requires_logging_directory", "tracker")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the Trainer knows of its run when a tracker starts.

    Attributes:
        project: the group of runs that this one belongs to.
        name: the run's own name; None leaves it to the tracker.
        folder: the run's output folder, where trackers that write files put them.
        step: updates that a resumed run has done already; 0 for a fresh one.
        run_id: what `GeneralTracker.run_id` was when the checkpoint of a resumed run was written.
        options: options of single trackers, by the names of the training arguments (`trackio_space_id`, ...).
    """

    project: str
    name: str | None
    folder: Path
    step: int = 0
    run_id: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def on_main_process(method: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """Decorator for the methods of a tracker: they run on the main process alone, and give None elsewhere.

    Where the class sets `main_process_only = False` they run everywhere.
    """

    @functools.wraps(method)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        only_main = getattr(args[0], "main_process_only", False)
        if only_main and not world_from_environment().is_main:
            return None
        return method(*args, **kwargs)

    return guarded


class GeneralTracker:
    """Sends what a run measures to one experiment tracker. Subclass it for a tracker of your own.

    A subclass says `name`, `requires_logging_directory` and the property `tracker`, and fills `start`,
    `store_init_configuration`, `log` and `finish` as far as its tracker knows them. Decorate them with
    `on_main_process`, so that one process of a job speaks for all.

    Attributes:
        name: by which `log_with` and `get_tracker` know it.
        requires_logging_directory: whether the constructor takes a folder after the project's name.
        main_process_only: what `on_main_process` goes by.

    Raises:
        ConfigError: the class lacks one of the three.
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool]
    main_process_only: ClassVar[bool] = True

    def __init__(self, _blank: bool = False) -> None:
        if not _blank:
            check_attributes(type(self), _NEEDED)

    def start(self) -> None:
        """Open the run. Called once, before anything is logged."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the hyperparameters of the run: names to truth values, numbers, text or None."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep what was measured: names to numbers or text, at update `step` where it is given."""

    def finish(self) -> None:
        """Close the run; all that was logged is written when this returns."""

    @property
    def run_id(self) -> str | None:
        """Names the open run, so that a resumed training can continue it; None where the tracker cannot."""
        return None

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """The tracker for a run of the Trainer; not yet started."""
        folder = (str(facts.folder),) if cls.requires_logging_directory else ()
        return cls(facts.project, *folder)  # type: ignore[arg-type]


def check_attributes(cls: type, names: tuple[str, ...]) -> None:
    """
    Raises:
        ConfigError: a tracker class lacks attributes, all of which are named.
    """
    fix = "define it in the class"
    missing = [Problem(f"{cls.__name__}.{name}", None, fix) for name in names if not hasattr(cls, name)]
    if missing:
        raise ConfigError(missing)


def split_numbers(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The numbers (truth values among them), and all the rest."""
    known = {name: value for name, value in values.items() if isinstance(value, numbers.Real)}
    return known, {name: value for name, value in values.items() if name not in known}


def numbers_alone(tracker: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers among the values, for a tracker that keeps nothing else; the others are warned of, once each."""
    kept, dropped = split_numbers(values)
    for name, value in dropped.items():
        kind = type(value).__name__
        warn_once(logger, f"{tracker} keeps numbers alone: {name!r}, of type {kind}, is not sent to it")
    return kept
