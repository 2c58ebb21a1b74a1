"""`FineTuner`: what the trainers of language models have in common beside `Trainer`."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

from torch import Tensor, nn

from windlass.core.logs import get_job_logger
from windlass.finetuning.card_writer import CardWriter
from windlass.finetuning.peft_adapters import describe_trained, is_peft_model
from windlass.finetuning.token_figures import UpdateBorders
from windlass.finetuning.tuning_config import TuningConfig
from windlass.text.summary import TextSummary
from windlass.trainer.trainer import Trainer
from windlass.transforms.activation_offload import ActivationOffload

logger = get_job_logger(__name__)


class FineTuner(Trainer):
    """A `Trainer` of a language model, with figures beside the loss, counts of its data and a model card.

    A subclass calls `_report` after the constructor.

    Attributes:
        TAGS: of the model and of its card.
    """

    args: TuningConfig
    TAGS: ClassVar[tuple[str, ...]] = ("windlass",)

    def _report(self, figures: Any) -> None:
        """Save `figures` with the run and mark its updates for them; write a card with each checkpoint; tag the model,
        and log which of its parameters are trained.
        """
        self._offload, self._figures = ActivationOffload(), figures
        self.accelerator.register_for_checkpointing(figures)
        self.add_callback(UpdateBorders(figures))
        self.add_callback(CardWriter(lambda: self.create_model_card()))  # late bound: scripts override it
        add_tags: Any = getattr(self.model, "add_model_tags", None)
        if add_tags is not None:
            add_tags(list(self.TAGS))
        if is_peft_model(self.model):
            logger.info(describe_trained(self.model))

    def data_summaries(self) -> dict[str, TextSummary]:
        """Return the counts of the prepared datasets by name; streams have none."""
        return {}

    def data_facts(self) -> dict[str, Any]:
        """Return counts of the prepared datasets, for a report: rows, tokens, truncated, dropped, lengths."""
        return {
            f"{n}: {k}": v for n, summary in self.data_summaries().items() for k, v in summary.facts().items()
        }

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """As `Trainer.training_step`, with activations in host memory if `activation_offloading` is set."""
        with self._offload.saving() if self.args.activation_offloading else contextlib.nullcontext():
            return super().training_step(model, inputs, num_items_in_batch)

    def create_model_card(  # type: ignore[override]  # the order is TRL's
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        **facts: Any,
    ) -> None:
        """As `Trainer.create_model_card`, with the tags of the model and of fine-tuning."""
        given = [tags] if isinstance(tags, str) else tags or []
        known = getattr(self.model, "model_tags", None) or []
        facts.setdefault("dataset_tags", dataset_name)
        super().create_model_card(
            model_name=model_name, tags=list(dict.fromkeys([*given, *self.TAGS, *known])), **facts
        )
