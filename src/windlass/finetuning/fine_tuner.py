"""`FineTuner`: what the trainers of language models have in common beside `Trainer`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.logs import get_job_logger, warn_once
from windlass.core.types import IGNORED, EvalLoopOutput, TrainOutput
from windlass.dist import operations
from windlass.finetuning.mean_figures import Extremes, MeanFigures, Sums, UpdateBorders
from windlass.finetuning.peft_adapters import describe_trained, is_peft_model
from windlass.finetuning.tuning_config import TuningConfig
from windlass.text.mixture import DatasetMixture
from windlass.text.summary import TextSummary
from windlass.trainer.batch_rows import rows_of_batch, sample_of
from windlass.trainer.losses import without_gradient
from windlass.trainer.trainer import Trainer
from windlass.transforms.activation_offload import ActivationOffload
from windlass.transforms.first_rank import has_weights

_SAMPLES = 3  # of each dataset


def kept_samples(dataset: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the first rows of a prepared dataset, or of each source of a mixture, as `samples.json` has them; none of
    a stream, and of rows that are not prepared text.
    """
    sources = dataset.sources if isinstance(dataset, DatasetMixture) else {"train": dataset}
    return [sample for name, rows in sources.items() for sample in _samples(name, rows, tokenizer)]


def _samples(name: str, rows: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    if not hasattr(rows, "__len__") or tokenizer is None:
        return
    for number in range(min(len(rows), _SAMPLES)):
        row = rows[number]
        if isinstance(row, Mapping):
            for which, sample in _in_row(row, tokenizer):
                yield {"name": f"{name}, row {number}{which}", **sample}


def _in_row(row: Mapping[str, Any], tokenizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what a prepared row holds: its text, or the answers to its prompt."""
    if {"input_ids", "labels"} <= row.keys():
        labels = list(row["labels"])
        yield "", sample_of(list(row["input_ids"]), [label != IGNORED for label in labels], tokenizer)
    elif "prompt_ids" in row:
        prompt = list(row["prompt_ids"])
        judged = {True: "desirable", False: "undesirable"}
        label = judged[bool(row["label"])] if "label" in row else None
        for name in ("chosen", "rejected", "completion"):
            if f"{name}_ids" in row:
                answer = list(row[f"{name}_ids"])
                trained = [False] * len(prompt) + [True] * len(answer)
                which = "" if name == "completion" else f", {name}"
                yield which, sample_of(prompt + answer, trained, tokenizer, label=label)


def mixture_facts(dataset: Any, summaries: Mapping[str, TextSummary]) -> dict[str, Any]:
    """Return what an epoch of a mixture is made of, by source: the share that was wanted, that of its samples and of
    their tokens, and how often the source is read. Empty for another dataset.
    """
    if not isinstance(dataset, DatasetMixture):
        return {}
    counts, wanted = dataset.counts, dataset.wanted
    means = {name: _mean_tokens(summaries.get(f"train {name}")) for name in counts}
    tokens = {name: count * (means[name] or 0.0) for name, count in counts.items()}
    total = sum(tokens.values()) if all(means.values()) else 0.0
    facts = {}
    for name, count in counts.items():
        by_tokens = f", {tokens[name] / total:.2%} of the tokens" if total else ""
        used = f"{count / len(dataset):.2%} of the samples{by_tokens}"
        passes = count / len(dataset.sources[name])
        facts[f"mixture: {name}"] = f"wanted {wanted[name]:.2%}; used {used}; {passes:.3g} times an epoch"
    return facts


def _mean_tokens(summary: TextSummary | None) -> float | None:
    """Tokens of a row of a prepared dataset, packed ones counted as one row."""
    rows = 0 if summary is None else summary.packed_rows or summary.rows
    return None if summary is None or not rows else summary.tokens / rows


logger = get_job_logger(__name__)


class FineTuner(Trainer):
    """A `Trainer` of a language model: its reports have means over its batches beside the loss, what it evaluates is
    prepared, and a model card lies beside each checkpoint.

    A subclass prepares datasets before it calls the constructor, and calls `_begin_reports` after it.
    """

    args: TuningConfig
    TAGS: ClassVar[tuple[str, ...]] = ("windlass",)  # of the model and of its card
    COLUMNS: ClassVar[tuple[str, ...]] = ()  # of prepared rows
    # Methods beside `compute_loss` that its loss calls, and scripts may override
    CALLED: ClassVar[tuple[str, ...]] = ()
    PAIRS: ClassVar[bool] = False  # the second half of a batch are the rejected answers of the first half

    # Prepares datasets: an `SFTData` or a `PreferenceData`.
    _data: Any
    # Of the load-balancing loss of experts; 0 if there are none.
    _router_weight = 0.0

    def _begin_reports(self, names: tuple[str, ...], extremes: tuple[str, ...] = ()) -> None:
        """Report the means `names` with the losses, and the `extremes`; save them with the run; write a card with each
        checkpoint; tag the model, and log which of its parameters are trained.
        """
        accelerator, all_ranks = self.accelerator, self._session.all_ranks
        counts = self._session.counts_figures(self._engine.dist)
        self._offload = ActivationOffload()
        self._figures = MeanFigures(
            (*names, *(("aux_loss",) if self._router_weight else ())),
            accelerator.device,
            partial(operations.reduce, reduction="sum", gang=all_ranks),
            counts and self._session.data_ranks.rank == 0,
            Extremes(extremes, accelerator.device, partial(operations.gather, gang=all_ranks)),
            counts=counts,
        )
        accelerator.register_for_checkpointing(self._figures)
        self.add_callback(UpdateBorders(self._figures))
        add_tags: Any = getattr(self.model, "add_model_tags", None)
        if add_tags is not None:
            add_tags(list(self.TAGS))
        if is_peft_model(self.model):
            logger.info(describe_trained(self.model))

    def _checkpoint_committed(self) -> None:
        """Write the model's card, on the main process."""
        try:
            self.create_model_card()
        except OSError as error:  # a full disk: training goes on
            logger.warning("the model card could not be written: %s", error)

    def _count(
        self,
        sums: Sums,
        inputs: Mapping[str, Any],
        auxiliary: Tensor | None = None,
        weight: float = 1,
        extremes: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add the figures of one batch to the next report, unless it only fills a round that other ranks need.

        Args:
            auxiliary: the load-balancing loss of experts, a mean over the batch, which counts `weight` times.
        """
        services, training = self._services, self.model.training
        # Its rows are those of another batch, which has counted them.
        if services.loss.normaliser.filler if training else services.evaluator.filling:
            return
        if self._router_weight:
            times = torch.full((), float(weight), device=self.accelerator.device)
            sums = {**sums, "aux_loss": (times * (0 if auxiliary is None else auxiliary), times)}
        self._figures.add(sums, count_tokens(inputs), training=training, extremes=extremes)

    # --- data -------------------------------------------------------------------------------------------------------

    def data_summaries(self) -> dict[str, TextSummary]:
        """Return the counts of the prepared datasets by name; streams have none."""
        return dict(self._data.summaries)

    def data_facts(self) -> dict[str, Any]:
        """Return counts of the prepared datasets, for a report: rows, tokens, truncated, dropped, lengths."""
        summaries = self.data_summaries()
        counts = {f"{n}: {k}": v for n, summary in summaries.items() for k, v in summary.facts().items()}
        return {**mixture_facts(self.train_dataset, summaries), **counts}

    def data_samples(self, batch: Any) -> list[dict[str, Any]]:
        """Return the first rows of a prepared dataset, or of each source of a mixture; of a stream, of `batch`."""
        kept = kept_samples(self.train_dataset, self.processing_class or self._data.tokenizer)
        return kept or rows_of_batch(batch, self.model, self.processing_class, pairs=self.PAIRS)

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = list(self.COLUMNS)

    def _used_columns(self) -> list[str]:
        """As `Trainer._used_columns`; refuses columns that a script keeps and the preparation of the rows did not."""
        used = super()._used_columns()
        lost = sorted(self._data.given.difference(self.COLUMNS))
        if asked := [column for column in lost if column in used]:
            fix = (
                "prepared rows do not have these columns; prepare the rows yourself, and train with `Trainer`"
            )
            raise ConfigError(Problem("_set_signature_columns_if_needed", asked, fix))
        if lost and not used and not type(self.data_collator).__module__.startswith("windlass."):
            warn_once(
                logger,
                f"the data collator gets no {', '.join(lost)}: prepared rows do not have these columns",
            )
        return used

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """As `Trainer.evaluate`; a dataset that is passed, or each of a dict of them, is prepared like those of the
        constructor. A name selects one of the sets of the constructor.
        """
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self._prepared(eval_dataset)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def _prepared(self, datasets: Any) -> Any:
        """One dataset, or each of a dict of them, prepared as those of the constructor."""
        return self._data.prepare_all(datasets)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _documents_apart(self) -> contextlib.AbstractContextManager[None]:
        """Context in which texts that share a row do not see each other; by default each has its own row."""
        return contextlib.nullcontext()

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As `Trainer.train`; texts that share a row do not see each other."""
        with self._documents_apart():
            return super().train(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """As `Trainer.training_step`, with activations in host memory if `activation_offloading` is set."""
        with self._offload.saving() if self.args.activation_offloading else contextlib.nullcontext():
            return super().training_step(model, inputs, num_items_in_batch)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Loss, predictions and labels of one batch; the last two are None if only the loss is asked for."""
        given = self._services.loss.in_evaluation(self.count_targets, inputs)
        inputs = self._prepare_inputs(inputs)
        script = self._services.loss.script
        with torch.no_grad(), self.compute_loss_context_manager(), script.watching(self.args):
            if prediction_loss_only:
                loss = self.compute_loss(model, inputs, **given)
                return without_gradient(script.undivided(loss)), None, None
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True, **given)
            loss = without_gradient(script.undivided(loss))
        return loss, *self._evaluated(inputs, outputs)

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
        """As `Trainer.evaluation_loop`; its metrics also have the means, and the scores of generated answers. Raises
        ModelError if a process has no weights yet.
        """
        self._check_weights()
        self._figures.forget(training=False)
        with self._documents_apart():
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        figures = self._derived(self._figures.read(training=False))
        parts = [value for name, value in figures.items() if name.startswith("_")]
        if parts:  # means over different things, which the mean of the batches' losses is not
            output.metrics[f"{metric_key_prefix}_loss"] = sum(parts)
        output.metrics.update({f"{metric_key_prefix}_{n}": v for n, v in figures.items() if n[0] != "_"})
        if description == "Evaluation":
            output.metrics.update(self._answer(metric_key_prefix))
        return output

    def _check_weights(self) -> None:
        shard = self._plan.dist.shard
        some_read = shard is not None and shard.ram_efficient
        if some_read and not all(self._session.all_ranks.gather_objects(has_weights(self.model))):
            raise ModelError(
                "with cpu_ram_efficient_loading the first process of each machine alone has the weights until train() "
                "divides them: evaluate after training or with eval_on_start=True, or set it to false"
            )

    def _answer(self, prefix: str) -> dict[str, float]:
        """Generate the answers of one evaluation, and return their metrics; by default there are none."""
        return {}

    def reported_figures(self) -> dict[str, float]:
        """Return the means over the batches since the last report. Collective."""
        figures = self._derived(self._figures.read(training=True))
        return {name: value for name, value in figures.items() if name[0] != "_"}

    def create_model_card(  # type: ignore[override]  # the order is TRL's
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        **facts: Any,
    ) -> None:
        """As `Trainer.create_model_card`, with the tags of the model and of fine-tuning.

        Args:
            dataset_name: ids of datasets on the Hub: `dataset_tags` there.
            **facts: its other arguments.
        """
        given = [tags] if isinstance(tags, str) else tags or []
        known = getattr(self.model, "model_tags", None) or []
        facts.setdefault("dataset_tags", dataset_name)
        super().create_model_card(
            model_name=model_name, tags=list(dict.fromkeys([*given, *self.TAGS, *known])), **facts
        )


def count_tokens(inputs: Mapping[str, Any]) -> Tensor:
    """The inputs of a batch that are not padding, as a scalar tensor on its device; of a prompt that answers share, for
    each of them.
    """
    if "sequence_lengths" in inputs:
        lengths: Tensor = inputs["sequence_lengths"]
        return lengths.sum()
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor):
        return mask.sum()
    ids = inputs["input_ids"]
    return torch.full((), ids.numel(), dtype=torch.int64, device=ids.device)
