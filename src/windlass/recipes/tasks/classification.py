"""Classification of texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from windlass.core.output import shown
from windlass.recipes.marked_text import Marks
from windlass.recipes.readers import Record, texts
from windlass.recipes.schema import DataSpec, RecipeParts
from windlass.recipes.text_task import TextTask
from windlass.recipes.tokenizing import CLASSIFIER
from windlass.text.trained_pieces import decoded


class Classification(TextTask):
    """Each text has one class."""

    name = "classification"
    own_keys = ("data.label_column", "data.max_length")
    model_class = "AutoModelForSequenceClassification"
    tokenizer_kind = CLASSIFIER
    measures_accuracy = True

    def label_names(self, train: list[Record], data: DataSpec) -> list[str]:
        from windlass.recipes.splits import label_names

        return label_names(train, data.label_column)

    def encode(self, records: list[Record], data: DataSpec, tokenizer: Any, labels: Sequence[str]) -> Any:
        from windlass.recipes.samples import encode_labelled
        from windlass.recipes.splits import label_ids

        classes = label_ids(records, data.label_column, labels)
        return encode_labelled(texts(records, data.text_column), classes, tokenizer, data.max_length)

    def collator(self, parts: RecipeParts, model: Any) -> Any:
        from windlass.data.collate_pad import DataCollatorWithPadding

        return DataCollatorWithPadding(parts.tokenizer)

    def sample_lines(self, parts: RecipeParts, sample: Mapping[str, Any], marks: Marks) -> Iterator[str]:
        ids, label = sample["input_ids"], sample["labels"]
        yield f"text    {decoded(ids, parts.tokenizer)}"
        yield f"label   {shown(parts.labels[label])} (class {label} of {len(parts.labels)})"
        yield f"tokens  {len(ids)}: {shown(' '.join(parts.tokenizer.convert_ids_to_tokens(ids)))}"
