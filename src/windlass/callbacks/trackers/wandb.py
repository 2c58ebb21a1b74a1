"""Weights & Biases."""

from __future__ import annotations

from typing import Any, Self

from windlass.callbacks.tracker import PackageTracker, RunFacts, main_only

_STEP = "train/global_step"  # as transformers calls it


@main_only
class WandBTracker(PackageTracker):
    """A run of Weights & Biases; one that the script has opened is used as it is, and left open.

    A resumed run keeps its id; offline it becomes a second part of the same run, which `wandb sync` joins to the first.
    The arguments are those of `PackageTracker`, for `wandb.init`.
    """

    name = "wandb"
    project_variable = "WANDB_PROJECT"
    run: Any = None
    is_of_trainer = False  # whose steps are those of charts, whatever else the script logs

    @classmethod
    def of_run(cls, facts: RunFacts) -> Self:
        tracker = super().of_run(facts)
        tracker.is_of_trainer = True
        return tracker

    def start(self) -> None:
        self.is_ours = self.package.run is None
        self.run = self.package.run or self.package.init(project=self.run_name, **self.init_kwargs)
        if self.is_of_trainer:
            self.run.define_metric(_STEP)
            self.run.define_metric("*", step_metric=_STEP, step_sync=True)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log any values that `wandb.log` takes."""
        if self.is_of_trainer and step is not None:
            values = {**values, _STEP: step}
            # A script's own `wandb.log` moves the run on, which drops what is logged for an earlier step.
            step = None if step < self.run.step else step
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log `values`, lists of images (arrays, tensors or PIL images) by name, at update `step`."""
        for name, images in values.items():
            self.log({name: [self.package.Image(image) for image in images]}, step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, `table_name`, at update `step`: `columns` and rows in `data`, or a `dataframe`."""
        table = self.package.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)
