"""SwanLab."""

from __future__ import annotations

import os
from typing import Any, Self

from windlass.callbacks.tracker import GeneralTracker, RunFacts, on_main_process, split_numbers
from windlass.core.optional import require

_PURPOSE = "report to SwanLab"


class SwanLabTracker(GeneralTracker):
    """A run of SwanLab; one that the script has opened already is used as it is.

    Args:
        run_name: the *project*, as scripts know this argument.
        **kwargs: for `swanlab.init`.
    """

    name = "swanlab"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """In project `$SWANLAB_PROJECT`, or the one that the arguments name; `$SWANLAB_MODE` says whether to connect.
        A resumed run keeps its identity.
        """
        project = os.environ.get("SWANLAB_PROJECT") or facts.project
        identity = {} if facts.run_id is None else {"id": facts.run_id, "resume": "allow"}
        return cls(project, name=facts.name, **identity)

    @property
    def run_id(self) -> str | None:
        return None if self.run is None else str(self.run.id)

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def start(self) -> None:
        swanlab = require("swanlab", _PURPOSE)
        if swanlab.has_run():
            self.run = swanlab.get_run()
        else:
            self.run = swanlab.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers and SwanLab's own objects as they are, text as text."""
        swanlab = require("swanlab", _PURPOSE)
        numbers, others = split_numbers(values)
        texts = {
            name: swanlab.Text(value) if isinstance(value, str) else value for name, value in others.items()
        }
        self.run.log({**numbers, **texts}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Names to lists of images (arrays, tensors or PIL images)."""
        swanlab = require("swanlab", _PURPOSE)
        for name, images in values.items():
            self.log({name: [swanlab.Image(image) for image in images]}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
