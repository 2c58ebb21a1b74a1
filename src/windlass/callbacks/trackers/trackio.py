"""Trackio: a local database, shown on the machine itself or in a space."""

from __future__ import annotations

from typing import Any, Self

from windlass.callbacks.tracker import GeneralTracker, RunFacts, on_main_process
from windlass.core.optional import require


class TrackioTracker(GeneralTracker):
    """A run of Trackio.

    Args:
        run_name: the *project*, as scripts know this argument.
        **kwargs: for `trackio.init`.
    """

    name = "trackio"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """In the project and, if one is given, the space or bucket that the arguments name; a resumed run continues
        its own.
        """
        places = {
            "space_id": facts.options.get("trackio_space_id"),
            "bucket_id": facts.options.get("trackio_bucket_id"),
        }
        resume = "never" if facts.run_id is None else "allow"
        return cls(facts.project, name=facts.run_id or facts.name, resume=resume, **places)

    @property
    def run_id(self) -> str | None:
        return None if self.run is None else str(self.run.name)

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def start(self) -> None:
        trackio = require("trackio", "report to Trackio")
        self.run = trackio.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        trackio = require("trackio", "report to Trackio")
        trackio.config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers, text, and what else `trackio.log` takes."""
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
