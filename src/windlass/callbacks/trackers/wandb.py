"""Weights & Biases."""

from __future__ import annotations

import os
from typing import Any, Self

from windlass.callbacks.tracker import GeneralTracker, RunFacts, on_main_process
from windlass.core.optional import require

_PURPOSE = "report to Weights & Biases"


class WandBTracker(GeneralTracker):
    """A run of Weights & Biases; one that the script has opened already is used as it is.

    Args:
        run_name: the *project*, as scripts know this argument.
        **kwargs: for `wandb.init`.
    """

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        """In project `$WANDB_PROJECT`, or the one that the arguments name. A resumed run keeps its identity; without a
        connection it becomes a second part of the same run, which `wandb sync` joins to the first.
        """
        project = os.environ.get("WANDB_PROJECT") or facts.project
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
        wandb = require("wandb", _PURPOSE)
        self.run = wandb.run or wandb.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Anything that `wandb.log` takes."""
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Names to lists of images (arrays, tensors or PIL images)."""
        wandb = require("wandb", _PURPOSE)
        for name, images in values.items():
            self.log({name: [wandb.Image(image) for image in images]}, step=step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """A table, given as columns and rows or as a dataframe."""
        wandb = require("wandb", _PURPOSE)
        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
