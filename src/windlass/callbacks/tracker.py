"""Base classes of experiment trackers, built in or of a script."""

from __future__ import annotations

import contextlib
import functools
import numbers
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

from windlass.core.errors import Problem, refuse
from windlass.core.logs import get_logger, warn_once
from windlass.core.optional import require
from windlass.core.world import world_from_environment
from windlass.dist.beacon import REPORT, limited_wait, waiting

logger = get_logger(__name__)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_Tracker = TypeVar("_Tracker", bound="PackageTracker")
_NEEDED = ("name", "requires_logging_directory", "tracker")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run of the Trainer, for the tracker that is to be started."""

    project: str  # the group of runs that this one belongs to
    name: str | None  # the run's own name; None for one that the tracker chooses
    folder: Path  # the run's output folder, for trackers that write files
    step: int = 0  # updates that a resumed run has done already; 0 for a new one
    run_id: str | None = None  # `GeneralTracker.run_id` when the checkpoint of a resumed run was written
    # Options of single trackers, by the names of the training arguments (`trackio_space_id`, ...)
    options: Mapping[str, Any] = field(default_factory=dict)


def on_main_process(method: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """Decorator for the methods of a tracker: they run on the main process only, and return None elsewhere.

    If the class sets `main_process_only = False`, they run on every process.
    """

    @functools.wraps(method)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        only_main = getattr(args[0], "main_process_only", False)
        if only_main and not world_from_environment().is_main:
            return None
        return method(*args, **kwargs)

    return guarded


def main_only(cls: type[_Tracker]) -> type[_Tracker]:
    """Class decorator for the trackers of packages: `on_main_process` for every public method that the class has."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(cls, name, on_main_process(method))
    return cls


class GeneralTracker:
    """Sends the metrics of a run to one experiment tracker. Subclass it for a tracker of your own.

    A subclass defines `name`, `requires_logging_directory` and the property `tracker`, and those of `start`,
    `store_init_configuration`, `log` and `finish` that its tracker supports. Decorate them with `on_main_process`, so
    that one process reports for the whole job.

    Raises:
        ConfigError: the class lacks one of the three.
    """

    name: ClassVar[str]  # used by `log_with` and `get_tracker`
    # Whether the constructor takes a folder after the project's name
    requires_logging_directory: ClassVar[bool]
    main_process_only: ClassVar[bool] = True  # read by `on_main_process`
    # That a built-in tracker needs, if they are not the one of its name
    packages: ClassVar[tuple[str, ...]] = ()
    in_all: ClassVar[bool] = True  # whether "all" has it, if its package is installed

    def __init__(self, _blank: bool = False) -> None:
        if not _blank:
            check_attributes(type(self), _NEEDED)

    def start(self) -> None:
        """Open the run. Called once, before anything is logged."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the hyperparameters of the run; `values` maps names to bools, numbers, text or None."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store metrics; `values` maps names to numbers or text.

        Args:
            step: the update that they belong to; None leaves it to the tracker.
            **kwargs: further arguments of the package's own function, from a script that calls this itself.
        """

    def finish(self) -> None:
        """Close the run; everything logged is written when this returns."""

    @property
    def run_id(self) -> str | None:
        """Id of the open run, with which a resumed training continues it; None if the tracker cannot."""
        return None

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """Return the tracker, not yet started, for the run of a Trainer that `facts` describes."""
        folder = (str(facts.folder),) if cls.requires_logging_directory else ()
        return cls(facts.project, *folder)  # type: ignore[arg-type]


@main_only
class PackageTracker(GeneralTracker):
    """A tracker whose package has one object for the open run.

    Args:
        run_name: name of the *project*, as scripts know this argument.
        **kwargs: for the function of the package that opens a run.
    """

    requires_logging_directory = False
    # The attribute with the package's object, what of that object is the run's id, its method that closes the run, and
    # the variable whose project precedes that of the arguments.
    handle: ClassVar[str] = "run"
    identity: ClassVar[str] = "id"
    closes: ClassVar[str] = "finish"
    project_variable: ClassVar[str] = ""
    # What has the package continue a run: arguments, with {} for the run's id
    resumption: ClassVar[Mapping[str, str]] = {"id": "{}", "resume": "allow"}
    # False for a run that the script has opened: it goes on after training, and is not closed here
    is_ours = True

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @property
    def package(self) -> Any:
        """The package of the tracker. Raises MissingDependencyError if it is not installed."""
        return require((self.packages or (self.name,))[0], f"report to {self.name}")

    @property
    def tracker(self) -> Any:
        """The package's object of the open run; None before the start."""
        return getattr(self, self.handle)

    @property
    def run_id(self) -> str | None:
        return None if self.tracker is None else str(operator.attrgetter(self.identity)(self.tracker))

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """In the project of `$project_variable`, or of the arguments; a resumed run is continued."""
        project = os.environ.get(cls.project_variable) or facts.project
        asked = {} if facts.run_id is None else cls.resumption
        identity = {name: text.replace("{}", str(facts.run_id)) for name, text in asked.items()}
        return cls(project, name=facts.name, **identity)

    def finish(self) -> None:
        if self.is_ours:
            getattr(self.tracker, self.closes)()


@contextlib.contextmanager
def reporting(tracker: GeneralTracker) -> Iterator[None]:
    """Around calls of a tracker, whose server may never answer: the wait is reported, and limited by `ddp_timeout`."""
    with limited_wait(f"{REPORT}{tracker.name}"):
        yield


def end_reporting(tracker: GeneralTracker) -> None:
    """Close the run of a tracker. The wait is reported, and has no limit: large files may be under way."""
    with waiting(f"{REPORT}{tracker.name}"):
        tracker.finish()


def check_attributes(cls: type, names: tuple[str, ...]) -> None:
    """Raise ConfigError with all attributes that a tracker class lacks."""
    fix = "define it in the class"
    refuse(Problem(f"{cls.__name__}.{name}", None, fix) for name in names if not hasattr(cls, name))


def split_numbers(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the numbers (bools included), and all other values."""
    known = {name: value for name, value in values.items() if isinstance(value, numbers.Real)}
    return known, {name: value for name, value in values.items() if name not in known}


def numbers_alone(tracker: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers, for a tracker that stores nothing else; warn of the other values, once each."""
    kept, dropped = split_numbers(values)
    for name, value in dropped.items():
        warn_of_value(tracker, name, value)
    return kept


def warn_of_value(tracker: str, name: str, value: Any) -> None:
    """Warn, once, that a tracker cannot store a value of this type."""
    kind = type(value).__name__
    warn_once(logger, f"{tracker} cannot store {name!r}, of type {kind}: it is not sent to it")
