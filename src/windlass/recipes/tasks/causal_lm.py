"""Causal language modelling: the next token of running text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from windlass.config.arguments import TrainingArguments
from windlass.core.errors import ConfigError, Problem
from windlass.recipes.modelling import config_of_named, writing_fault
from windlass.recipes.readers import Record, texts
from windlass.recipes.schema import PLAIN_TEXT, PYTHON_DOCS, DataSpec, Recipe, RecipeParts
from windlass.recipes.text_task import TextTask
from windlass.recipes.tokenizing import WRITER

if TYPE_CHECKING:
    from windlass.recipes.marked_text import Marks


class CausalLM(TextTask):
    """Texts are joined and cut into blocks."""

    name = "causal-lm"
    own_keys = ("data.block_size", "sample")
    own_formats = PLAIN_TEXT
    rows_at_hand: ClassVar[Mapping[str, str]] = {"format": PYTHON_DOCS}
    model_class = "AutoModelForCausalLM"
    tokenizer_kind = WRITER
    length_key = "block_size"
    provable = True
    marked_tokens = "tokens have a label: each is predicted from those before it"

    def build_parts(
        self, recipe: Recipe, args: TrainingArguments, saved_tokenizer: Path | None = None
    ) -> RecipeParts:
        name = recipe.model.name  # a config of the recipe's own was checked when it was read
        if name is not None and (fault := writing_fault(config_of_named(name))):
            raise ConfigError(Problem("model.name", name, fault))
        return super().build_parts(recipe, args, saved_tokenizer)

    def encode(self, records: list[Record], data: DataSpec, tokenizer: Any, labels: Sequence[str]) -> Any:
        from windlass.recipes.samples import pack

        return pack(texts(records, data.text_column), tokenizer, data.block_size)

    def sample_lines(self, parts: RecipeParts, sample: Mapping[str, Any], marks: Marks) -> Iterator[str]:
        from windlass.core.types import IGNORED
        from windlass.recipes.marked_text import marked
        from windlass.text.trained_pieces import trained_pieces

        ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        end = len(labels) - labels.count(IGNORED)  # of the padding of the last block
        padding = "" if end == len(ids) else f", then {len(ids) - end} of padding"
        yield f"block   {end} tokens{padding}"
        yield marked(trained_pieces(ids[:end], labels[:end], parts.tokenizer), marks)
