"""`TuningTrainer`: what the trainers of preferences have in common beside `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from windlass.core.types import EvalLoopOutput
from windlass.finetuning.fine_tuner import FineTuner
from windlass.finetuning.mean_figures import Extremes, MeanFigures
from windlass.text.summary import TextSummary
from windlass.trainer.losses import without_gradient


class TuningTrainer(FineTuner):
    """A `Trainer` whose reports have means over the answers of its batches, and which prepares what it evaluates.

    A subclass prepares datasets before it calls the constructor, and calls `_begin_reports` after it.

    Attributes:
        COLUMNS: of prepared rows.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = ()

    _summaries: Mapping[str, TextSummary]
    _prepare_data: Callable[[Any], Any]

    def _begin_reports(self, names: tuple[str, ...], extremes: tuple[str, ...] = ()) -> None:
        """Report the means `names` with the losses, and the `extremes`; write a card with each checkpoint, and tag the
        model.
        """
        figures = MeanFigures(
            names,
            self.accelerator.device,
            lambda sums: self.accelerator.reduce(sums, "sum"),
            self.accelerator.process_index,
            Extremes(extremes, self.accelerator.device, self.accelerator.gather),
        )
        self._report(figures)
        self.can_return_loss, self.label_names = True, []

    # --- data -------------------------------------------------------------------------------------------------------

    def data_summaries(self) -> dict[str, TextSummary]:
        """Return the counts of the prepared datasets by name; streams have none."""
        return dict(self._summaries)

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = list(self.COLUMNS)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """As `Trainer.evaluate`; a dataset that is passed, or each of a dict of them, is prepared like those of the
        constructor. A name selects one of the sets of the constructor.
        """
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self._prepare_data(eval_dataset)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    # --- steps ------------------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Loss, predictions and labels of one batch; the last two are None if only the loss is asked for."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            if prediction_loss_only:
                return without_gradient(self.compute_loss(model, inputs)), None, None
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return without_gradient(loss), *self._evaluated(inputs, outputs)

    def _derived(self, figures: dict[str, float]) -> dict[str, float]:
        """The figures of a report, with those that are computed from them."""
        return figures

    def _evaluated(self, inputs: Any, outputs: Any) -> tuple[Any, Any]:
        """What `compute_metrics` gets of a batch: the logits and the input ids."""
        return outputs.logits.detach(), inputs["input_ids"]

    # --- reports ----------------------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """As `Trainer.evaluation_loop`; its metrics also have the means."""
        self._figures.forget(training=False)
        output = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        figures = self._derived(self._figures.read(training=False))
        parts = [value for name, value in figures.items() if name.startswith("_")]
        if parts:  # means over different things, which the mean of the batches' losses is not
            output.metrics[f"{metric_key_prefix}_loss"] = sum(parts)
        output.metrics.update({f"{metric_key_prefix}_{n}": v for n, v in figures.items() if n[0] != "_"})
        return output

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """As `Trainer.log`; the reports of a run also have the means."""
        if "loss" in logs or "train_loss" in logs:  # made on all ranks, which the sums need
            figures = self._derived(self._figures.read(training=True))
            logs.update({name: value for name, value in figures.items() if name[0] != "_"})
        super().log(logs, start_time)
