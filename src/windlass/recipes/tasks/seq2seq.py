"""Text to text: a target is generated from a source, as in translation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from windlass.config.arguments import TrainingArguments
from windlass.finetuning.seq2seq_arguments import Seq2SeqTrainingArguments
from windlass.recipes.marked_text import Marks
from windlass.recipes.readers import Record, texts
from windlass.recipes.schema import DataSpec, Recipe, RecipeParts
from windlass.recipes.task import Conflict
from windlass.recipes.text_metrics import of_predictions
from windlass.recipes.text_task import TextTask
from windlass.recipes.tokenizing import TRANSLATOR
from windlass.text.trained_pieces import decoded


class Seq2Seq(TextTask):
    """Pairs of texts; evaluations generate, if `metric` is set."""

    name = "seq2seq"
    own_keys = ("data.target_column", "data.test", "data.test_split", "data.max_length", "metric", "sample")
    own_formats = ("parallel",)
    arguments = Seq2SeqTrainingArguments
    model_class = "AutoModelForSeq2SeqLM"
    tokenizer_kind = TRANSLATOR
    trainer = "windlass.finetuning.seq2seq_trainer:Seq2SeqTrainer"

    def training_defaults(self, recipe: Recipe) -> dict[str, Any]:
        return {"predict_with_generate": recipe.metric is not None}

    def conflicts(self, recipe: Recipe) -> Iterator[Conflict]:
        yield from super().conflicts(recipe)
        if recipe.metric is None:
            return
        if not recipe.training.get("predict_with_generate"):
            fix = "is computed from generated text; leave training.predict_with_generate out"
            yield "metric", recipe.metric, fix
        if recipe.training.get("prediction_loss_only"):
            fix = (
                "is computed from generated text, which is not kept; leave training.prediction_loss_only out"
            )
            yield "metric", recipe.metric, fix

    def text_columns(self, data: DataSpec) -> tuple[str, ...]:
        return (data.text_column, data.target_column)

    def encode(self, records: list[Record], data: DataSpec, tokenizer: Any, labels: Sequence[str]) -> Any:
        from windlass.recipes.samples import encode_pairs

        sources, targets = (texts(records, column) for column in self.text_columns(data))
        return encode_pairs(sources, targets, tokenizer, data.max_length)

    def sample_lines(self, parts: RecipeParts, sample: Mapping[str, Any], marks: Marks) -> Iterator[str]:
        for name, key in (("source", "input_ids"), ("target", "labels")):
            yield f"{name}  {len(sample[key])} tokens: {decoded(sample[key], parts.tokenizer)}"

    def implied_config(self, tokenizer: Any) -> dict[str, Any]:
        return {"decoder_start_token_id": tokenizer.pad_token_id, "forced_eos_token_id": None}

    def collator(self, parts: RecipeParts, model: Any) -> Any:
        from windlass.data.collate_pad import DataCollatorForSeq2Seq

        return DataCollatorForSeq2Seq(parts.tokenizer, model)

    def trainer_options(self, parts: RecipeParts, args: TrainingArguments) -> dict[str, Any]:
        metric = parts.recipe.metric
        if metric is None or parts.evaluation is None:
            return {}
        return {"compute_metrics": of_predictions(parts.tokenizer, metric, parts.evaluation.targets)}

    def build_trainer(self, parts: RecipeParts, args: TrainingArguments) -> Any:
        assert isinstance(args, Seq2SeqTrainingArguments)
        if args.predict_with_generate and args.generation_max_length is None:
            args.generation_max_length = parts.recipe.data.max_length  # as long as the targets may be
        return super().build_trainer(parts, args)
