"""`SFTTrainer`: supervised fine-tuning of a causal language model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windlass.config.arguments import TrainingArguments
from windlass.core.errors import ConfigError, Problem
from windlass.core.tensors import is_fake
from windlass.finetuning.answers import AnsweringModel, answers_anything, check_answers, open_answers
from windlass.finetuning.fine_tuner import FineTuner
from windlass.finetuning.peft_adapters import predicts_first_labels
from windlass.finetuning.sft_checks import check_settings, router_coefficient
from windlass.finetuning.sft_config import SFTConfig
from windlass.finetuning.sft_data import SFTData, holds_images
from windlass.finetuning.sft_parts import open_images, refuse_unequal, sft_arguments, sft_collator
from windlass.finetuning.skipped_overrides import check_overrides
from windlass.finetuning.tuned_model import open_tuned_model
from windlass.metrics.tokens import TargetCounter
from windlass.trainer.trainer import Trainer
from windlass.transforms.document_attention import OwnAttention, documents_apart, refuse_leaks
from windlass.transforms.first_rank import has_weights
from windlass.transforms.lean_loss import lean_causal_lm_loss
from windlass.transforms.linear_cross_entropy import LossOptions
from windlass.transforms.model_limits import ModelLimits

_COLUMNS = ("input_ids", "labels", "seq_lengths", "images")
_FOR_OWN_COLLATORS = ("image", "messages", "prompt", "completion")  # of rows with images


class SFTTrainer(FineTuner):
    """Tunes a causal language model on texts, conversations, or prompts with completions.

    Args:
        model: a model; its name or folder; a config of transformers, for new weights; or a `PeftModel`.
        args: the configuration; a `TrainingArguments` is converted. Defaults to `SFTConfig("<model name>-SFT")`.
        data_collator: list of samples -> batch; by default padding on the right, or one row without padding.
        train_dataset: a `Dataset` or `IterableDataset` of the package datasets, a sequence of mappings, or a
            `DatasetMixture` of them. Its form is recognised (see docs/fine-tuning.md).
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer, or a processor with one; by default that of the model's name or folder.
            `tokenizer=` is its earlier name.
        quantization_config: how a model given by name is quantized.
        peft_config: the adapter to train, such as `peft.LoraConfig`; the model's own weights are frozen.
        formatting_func: row -> text.
        earlier: arguments of earlier versions, which are now fields of `SFTConfig` (`dataset_text_field`,
            `max_seq_length`, ...).

    The other arguments are those of `Trainer`.

    Raises:
        ConfigError, DataError, ModelError: whatever can be known to be wrong before training.
    """

    args: SFTConfig
    TAGS = ("windlass", "sft")
    COLUMNS = (*_COLUMNS, *_FOR_OWN_COLLATORS)

    def __init__(
        self,
        model: Any,
        args: SFTConfig | TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[Any], Any] | None = None,
        *,
        tokenizer: Any = None,
        **earlier: Any,
    ) -> None:
        check_overrides(self, self.CALLED)
        args = sft_arguments(args, model, train_dataset, earlier)
        own_collator, own_loss = data_collator is not None, compute_loss_func is not None
        formatted, scored = formatting_func is not None, compute_metrics is not None
        check_settings(args, own_collator=own_collator, own_loss=own_loss, formatted=formatted)
        are_prepared = not (args.skips_preparation or own_collator)
        with_images = are_prepared and (holds_images(train_dataset) or holds_images(eval_dataset))
        processing_class = processing_class or tokenizer
        base = open_tuned_model(model, args, processing_class, quantization_config, peft_config, with_images)
        check_answers(
            args, base.model, eval_dataset, with_images=with_images, formatted=formatted, scored=scored
        )
        self._router_weight = router_coefficient(args.router_aux_loss_coef, base.model)
        images = open_images(base, args, formatted) if with_images else None
        limits = ModelLimits.of(base.model)
        self._data = SFTData(args, base.tokenizer, formatting_func, own_collator, limits, images)
        self._answers = open_answers(args, base.tokenizer, limits, eval_dataset, compute_metrics)
        super().__init__(
            base.model,
            args,
            sft_collator(data_collator, base, args, images),
            self._data.prepare(train_dataset, "train", args.packing),
            None if eval_dataset is None else self._data.prepare_all(eval_dataset, args.packs_evaluation),
            base.processing_class,
            None,
            compute_loss_func,
            None if args.predict_with_generate else compute_metrics,
            callbacks,
            optimizers,
            optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics,
        )
        self._own_attention = OwnAttention(self.model)
        self._begin_reports(("entropy", "mean_token_accuracy"))
        self._add_answers()
        self._check_documents()

    def _add_answers(self) -> None:
        if not answers_anything(self.args):
            return
        if self._session.data_ranks.size != self._session.all_ranks.size:
            fix = "ranks that share the samples of a batch do not generate; train with data parallelism alone"
            name = "predict_with_generate" if self.args.predict_with_generate else "eval_prompts"
            raise ConfigError(Problem(name, getattr(self.args, name), fix))
        self.add_callback(self._answers.log)

    def _check_documents(self) -> None:
        """Refuse a model that lets packed documents see each other. A forecast has no values to see it by."""
        fake = is_fake(next(self.model.parameters()))
        if self.args.joins_rows and has_weights(self.model) and not fake:
            with self._documents_apart(), self.compute_loss_context_manager():
                refuse_leaks(self.model)
                if self._data.images is not None:
                    refuse_unequal(self.model, self._data.images)

    def _documents_apart(self) -> contextlib.AbstractContextManager[None]:
        return documents_apart(self.model) if self.args.joins_rows else contextlib.nullcontext()

    # --- data -------------------------------------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = [*_COLUMNS, *(_FOR_OWN_COLLATORS if self._data.own_collator else ())]

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """As `FineTuner.evaluate`, and answers are generated for the prompts of this evaluation."""
        with self._answers.during(eval_dataset, metric_key_prefix):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def _prepared(self, datasets: Any) -> Any:
        return self._data.prepare_all(datasets, self.args.packs_evaluation)

    # --- loss -------------------------------------------------------------------------------------------------------

    def count_targets(self, batch: Any) -> float:
        """Targets of a batch: label t of a row is predicted from position t-1, the first one from a learnt prompt if
        there is one. Known, so that no forward with whole logits has to measure it.
        """
        return TargetCounter(shifted=not predicts_first_labels(self.model))(batch)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of one batch, and its figures for the log.

        It is the sum over targets divided by `num_items_in_batch`, which is the count of the batch; the mean over its
        targets if `num_items_in_batch` is None. The load-balancing loss of experts is added.
        """
        own_function = self.compute_loss_func is not None
        count = None if own_function else num_items_in_batch
        smoothing = 0.0 if own_function else self.args.label_smoothing_factor
        options = LossOptions(label_smoothing=smoothing, dynamic=self.args.loss_type == "dft")
        # With a function of the script's it is for the figures alone: that gets the outputs of another forward.
        with torch.no_grad() if own_function else contextlib.nullcontext():
            divisor = None if count is None else torch.as_tensor(count).clamp(min=1)
            loss, found = lean_causal_lm_loss(
                model, inputs, divisor, options=options, router_aux_loss_coef=self._router_weight
            )
        targets = found.targets
        sums = {"entropy": (found.entropy, targets), "mean_token_accuracy": (found.correct, targets)}
        self._count(sums, inputs, found.auxiliary)
        if own_function:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = self._services.loss.multiplied(loss, count)
        if not return_outputs:
            return loss
        # The loss was made without logits. These have a graph, as in training a script may compute with them.
        return loss, model(**{name: value for name, value in inputs.items() if name != "labels"})

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """As `FineTuner.prediction_step`; a batch without labels has predictions alone."""
        if not isinstance(inputs, Mapping) or "labels" not in inputs:
            return Trainer.prediction_step(self, model, inputs, prediction_loss_only, ignore_keys)
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _evaluated(self, inputs: Any, outputs: Any) -> tuple[Any, Any]:
        return outputs.logits.detach(), inputs["labels"]

    # --- reports ----------------------------------------------------------------------------------------------------

    def _answer(self, prefix: str) -> dict[str, float]:
        if not answers_anything(self.args):
            return {}
        strategy = self._model_writer.strategy
        answerer = AnsweringModel(
            self.model,
            self._session.device,
            self._session.data_ranks,
            in_step=strategy.sharded and self.args.world_size > 1,
            context=self.compute_loss_context_manager,
        )
        with self._services.evaluator.generating(strategy), self._own_attention.used():
            return self._answers.metrics(prefix, self.state.global_step, answerer)
