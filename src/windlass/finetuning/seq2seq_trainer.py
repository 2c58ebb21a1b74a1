"""`Seq2SeqTrainer`: a `Trainer` whose evaluations generate text."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from windlass.config.arguments import TrainingArguments
from windlass.core.attributes import attributes_of
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.optional import require
from windlass.core.types import PredictionOutput
from windlass.data.collate_pad import DataCollatorForSeq2Seq
from windlass.data.order import sample_lengths
from windlass.finetuning.seq2seq_arguments import Seq2SeqTrainingArguments
from windlass.finetuning.text_generation import generate
from windlass.trainer.trainer import Trainer

# What `generate` is limited to if nothing is configured: 20 tokens after the first one of the decoder.
DEFAULT_LENGTH = 21
_FROM_LABELS = ("decoder_input_ids", "decoder_attention_mask")


class Seq2SeqTrainer(Trainer):
    """Trains an encoder-decoder, and generates text in evaluations (`predict_with_generate`).

    Takes what `Trainer` takes. `data_collator` is by default `DataCollatorForSeq2Seq` if there is a tokenizer, so that
    labels are padded with -100.

    Args:
        args: `Seq2SeqTrainingArguments`. Its `generation_config` replaces that of the model.

    Raises:
        ConfigError, ModelError: as `Trainer`; or `generation_config` cannot be loaded or is invalid.
    """

    args: Seq2SeqTrainingArguments

    # Arguments of `generate` for the evaluation that is running.
    _gen_kwargs: Mapping[str, Any] = MappingProxyType({})
    # The default collator. With the model it makes `decoder_input_ids`, which label smoothing needs.
    _padding: DataCollatorForSeq2Seq | None = None

    def _checked_arguments(self, args: TrainingArguments | None) -> TrainingArguments:
        args = super()._checked_arguments(Seq2SeqTrainingArguments() if args is None else args)
        if not hasattr(args, "predict_with_generate"):
            raise ConfigError(Problem("args", type(args).__name__, "must be Seq2SeqTrainingArguments"))
        return args

    def _default_collator(self) -> Callable[[list[Any]], Any]:
        if not hasattr(self.processing_class, "pad"):
            return super()._default_collator()
        self._padding = DataCollatorForSeq2Seq(self.processing_class)
        return self._padding

    @functools.cached_property
    def _generation_config(self) -> Any:
        """The GenerationConfig of the arguments, loaded once; None if they have none."""
        given = self.args.generation_config
        return None if given is None else self.load_generation_config(given)

    def _take_model(self, model: nn.Module) -> None:
        if self._generation_config is not None:
            model.generation_config = self._generation_config
        super()._take_model(model)
        if self.args.predict_with_generate and not hasattr(model, "generate"):
            raise ModelError(
                f"predict_with_generate=True needs a model with a `generate` method, and {type(model).__name__} "
                "has none: set it to False, or override `prediction_step`"
            )
        if self._padding is not None:
            self._padding.model = model

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """The GenerationConfig that an argument names. Raises ConfigError if it cannot be loaded, or its values
        contradict each other.

        Args:
            gen_config_arg: a GenerationConfig (which is copied), a dict of its values, the path of its file or folder,
                or the name of a model.
        """
        cls = require("transformers", "generate text").GenerationConfig
        try:
            found = _loaded(cls, gen_config_arg)
            # `save_pretrained` would refuse it at the end of training.
            found.validate(strict=True)
        except (OSError, ValueError) as error:
            fix = f"cannot be used: {' '.join(str(error).split())}"
            raise ConfigError(Problem("generation_config", gen_config_arg, fix)) from error
        return found

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """As `Trainer.evaluate`; with `predict_with_generate`, `compute_metrics` gets generated token ids.

        Args:
            gen_kwargs: arguments of `model.generate`, such as `max_length`, `num_beams`, `do_sample`. They replace
                those of the arguments.
        """
        with self._generating(gen_kwargs):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """As `Trainer.predict`; with `predict_with_generate`, predictions are generated token ids, int64 of shape
        (samples, tokens), padded with the pad token.

        Args:
            gen_kwargs: arguments of `model.generate`.
        """
        with self._generating(gen_kwargs):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def _generating(self, gen_kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Within the body, generate with these arguments. The sets of a dict inherit those of the whole. Overrides of
        `prediction_step` read them, those of `args` too.
        """
        return attributes_of(self, _gen_kwargs=self._options(gen_kwargs))

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """With `sortish_sampler`, the longest samples first; predictions keep the order of the dataset."""
        if not self.args.sortish_sampler or not hasattr(eval_dataset, "__len__"):
            return super()._get_eval_sampler(eval_dataset)
        lengths = torch.from_numpy(sample_lengths(eval_dataset, self.args.length_column_name))
        order: list[int] = torch.argsort(lengths, descending=True, stable=True).tolist()
        return order

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Loss, generated token ids and labels of one batch, None for those it lacks.

        Token ids and labels are padded with the pad token to the length that generation is limited to, so that batches
        have equal widths.
        """
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        options = self._options(gen_kwargs)
        labels, loss = None, None
        if inputs.get("labels") is not None:
            # Before generation: the first forward of a sharded model must be one of the whole model.
            loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
            labels = self._prepare_inputs(inputs)["labels"]
        generated = self._generate(self._prepare_inputs(inputs), options)
        width = self._width(options)
        padded = [
            self._pad_tensors_to_max_len(ids, width) if ids is not None and ids.shape[-1] < width else ids
            for ids in (generated, labels)
        ]
        return loss, padded[0], padded[1]

    def _options(self, gen_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `generate`: those of this call, of the evaluation, and of `args`, in this order."""
        options = {**self._gen_kwargs, **gen_kwargs}
        for name in ("max_length", "num_beams"):
            if options.get(name) is None:
                options.pop(name, None)
        if options.keys().isdisjoint(("max_length", "max_new_tokens")) and self.args.generation_max_length:
            options["max_length"] = self.args.generation_max_length
        if self.args.generation_num_beams:
            options.setdefault("num_beams", self.args.generation_num_beams)
        return options

    def _generate(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Tensor:
        """Token ids, int64 of shape (batch, tokens).

        `generate` calls parts of the model, which the strategy prepares. Ranks of a sharded model step together, for
        those that reshard to fewer ranks, and engines that gather each layer, communicate in each forward.
        """
        strategy = self._model_writer.strategy
        options = {"synced_gpus": strategy.sharded and self.args.world_size > 1, **options}
        labels, start = inputs.get("labels"), inputs.get("decoder_input_ids")
        dropped = {"labels"}
        if labels is not None and start is not None and labels.shape == start.shape:
            # Shifted labels: generation would continue after them.
            dropped |= set(_FROM_LABELS)
        kept = {name: value for name, value in inputs.items() if name not in dropped}
        with torch.no_grad(), strategy.generating(), self.compute_loss_context_manager():
            return generate(self.model, kept, **options)

    def _width(self, options: Mapping[str, Any]) -> int:
        """The number of tokens that generation is limited to, the first one of the decoder included."""
        config: Any = options.get("generation_config") or getattr(self.model, "generation_config", None)
        for source in (options.get, lambda name: getattr(config, name, None)):
            new, most = source("max_new_tokens"), source("max_length")
            if new is not None:
                return int(new) + 1
            if most is not None:
                return int(most)
        return DEFAULT_LENGTH

    def _pad_tensors_to_max_len(self, tensor: Tensor, max_length: int) -> Tensor:
        """Shorter token ids, padded to `max_length`; under the name that scripts call and override."""
        # The token is asked for only here: a model without one may generate texts of one length.
        return nn.functional.pad(tensor, (0, max_length - tensor.shape[-1]), value=self._pad_token())

    def _pad_token(self) -> int:
        holders = (self.processing_class, getattr(self.model, "generation_config", None), self.model.config)
        for holder in holders:
            for name in ("pad_token_id", "eos_token_id"):
                value = getattr(holder, name, None)
                if isinstance(value, int):
                    return value
        raise ModelError(
            "generated text of different lengths needs a token to pad it with: set pad_token_id in the tokenizer, or "
            "in the model's generation_config"
        )


def _loaded(cls: Any, given: Any) -> Any:
    if isinstance(given, Mapping):
        return cls.from_dict(dict(given))
    if not isinstance(given, str | os.PathLike):
        return deepcopy(given)
    path = Path(given)
    if path.is_file():
        return cls.from_pretrained(str(path.parent), path.name)
    return cls.from_pretrained(str(given))
