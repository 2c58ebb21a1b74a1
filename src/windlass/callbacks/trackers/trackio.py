"""Trackio: a local database, displayed on the machine itself or in a space."""

from __future__ import annotations

from typing import Any, Self

from windlass.callbacks.tracker import PackageTracker, RunFacts, main_only


@main_only
class TrackioTracker(PackageTracker):
    """A run of Trackio. The arguments are those of `PackageTracker`, for `trackio.init`."""

    name = "trackio"
    identity = "name"
    run: Any = None

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """In the project, and the space or bucket of the arguments; a resumed run is continued."""
        places = {
            "space_id": facts.options.get("trackio_space_id"),
            "bucket_id": facts.options.get("trackio_bucket_id"),
        }
        resume = "never" if facts.run_id is None else "allow"
        return cls(facts.project, name=facts.run_id or facts.name, resume=resume, **places)

    def start(self) -> None:
        self.run = self.package.init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.package.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log any values that `trackio.log` takes."""
        self.run.log(values, step=step, **kwargs)
