"""DVCLive: tables in a folder that DVC shows and compares."""

from __future__ import annotations

import atexit
from typing import Any, Self

from windlass.callbacks.tracker import GeneralTracker, RunFacts, on_main_process
from windlass.core.logs import get_logger, warn_once
from windlass.core.optional import require

logger = get_logger(__name__)


class DVCLiveTracker(GeneralTracker):
    """The folder of a `dvclive.Live`.

    Args:
        run_name: not used: DVCLive names experiments itself.
        live: a `Live` of the script's own.
        **kwargs: for `dvclive.Live`.
    """

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.live = live
        self.init_kwargs = kwargs

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """In the folder `dvclive` of the output; a resumed run continues its tables."""
        resume = facts.run_id is not None
        return cls(dir=str(facts.folder / "dvclive"), exp_name=facts.name, resume=resume)

    @property
    def run_id(self) -> str | None:
        return None if self.live is None else "dvclive"  # the folder is all the identity that there is

    @property
    def tracker(self) -> Any:
        """The `Live`."""
        return self.live

    @on_main_process
    def start(self) -> None:
        if self.live is None:
            self.live = require("dvclive", "report to DVCLive").Live(**self.init_kwargs)
            atexit.register(self.live.end)  # it does not see to this itself

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.live.log_params(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers and text; the rest is warned of, once each, and left out. Without `step` DVCLive counts itself."""
        metric = require("dvclive.plots", "report to DVCLive").Metric
        if step is not None:
            self.live.step = step
        for name, value in values.items():
            if metric.could_log(value):
                self.live.log_metric(name, value, **kwargs)
            else:
                kind = type(value).__name__
                warn_once(logger, f"DVCLive has no place for {name!r}, of type {kind}: it is not sent to it")
        self.live.next_step()

    @on_main_process
    def finish(self) -> None:
        atexit.unregister(self.live.end)
        self.live.end()
