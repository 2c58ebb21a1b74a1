"""DVCLive: tables in a folder that DVC displays and compares."""

from __future__ import annotations

import atexit
from typing import Any, Self

from windlass.callbacks.tracker import PackageTracker, RunFacts, main_only, warn_of_value
from windlass.core.optional import require


@main_only
class DVCLiveTracker(PackageTracker):
    """The folder of a `dvclive.Live`.

    Args:
        run_name: not used: DVCLive names experiments itself.
        live: a `Live` of the script.
        **kwargs: for `dvclive.Live`.
    """

    name = "dvclive"
    handle = "live"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.live = live

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """In the folder `dvclive` of the output; a resumed run continues its tables."""
        resume = facts.run_id is not None
        return cls(dir=str(facts.folder / "dvclive"), exp_name=facts.name, resume=resume)

    @property
    def run_id(self) -> str | None:
        return None if self.live is None else "dvclive"  # the folder identifies the run

    def start(self) -> None:
        if self.live is None:
            self.live = self.package.Live(**self.init_kwargs)
            atexit.register(self.live.end)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.live.log_params(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and text, and warn of other values, once each. Without `step` DVCLive counts itself."""
        metric = require("dvclive.plots", "report to DVCLive").Metric
        if step is not None:
            self.live.step = step
        for name, value in values.items():
            if metric.could_log(value):
                self.live.log_metric(name, value, **kwargs)
            else:
                warn_of_value("DVCLive", name, value)
        self.live.next_step()

    def finish(self) -> None:
        atexit.unregister(self.live.end)
        self.live.end()
