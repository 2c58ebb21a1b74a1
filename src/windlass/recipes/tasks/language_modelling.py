"""Language modelling: the next token of running text, or hidden ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

from windlass.core.types import IGNORED
from windlass.recipes.marked_text import Marks, marked
from windlass.recipes.readers import Record, texts
from windlass.recipes.schema import PLAIN_TEXT, PYTHON_DOCS, DataSpec, RecipeParts
from windlass.recipes.text_task import TextTask
from windlass.recipes.tokenizing import READER, WRITER
from windlass.text.trained_pieces import decoded, trained_pieces


class BlockTask(TextTask):
    """Texts are joined and cut into blocks."""

    own_formats = PLAIN_TEXT
    rows_at_hand: ClassVar[Mapping[str, str]] = {"format": PYTHON_DOCS}
    length_key = "block_size"


class CausalLM(BlockTask):
    """Each token is predicted from those before it."""

    name = "causal-lm"
    own_keys = ("data.block_size", "sample")
    model_class = "AutoModelForCausalLM"
    tokenizer_kind = WRITER
    writes = True
    provable = True
    marked_tokens = "tokens have a label: each is predicted from those before it"

    def encode(self, records: list[Record], data: DataSpec, tokenizer: Any, labels: Sequence[str]) -> Any:
        from windlass.recipes.samples import pack

        return pack(texts(records, data.text_column), tokenizer, data.block_size)

    def sample_lines(self, parts: RecipeParts, sample: Mapping[str, Any], marks: Marks) -> Iterator[str]:
        ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        end = len(labels) - labels.count(IGNORED)  # of the padding of the last block
        padding = "" if end == len(ids) else f", then {len(ids) - end} of padding"
        yield f"block   {end} tokens{padding}"
        yield marked(trained_pieces(ids[:end], labels[:end], parts.tokenizer), marks)


class MaskedLM(BlockTask):
    """The collator hides tokens of a batch, which are predicted from the others."""

    name = "masked-lm"
    own_keys = ("data.block_size", "data.mlm_probability")
    model_class = "AutoModelForMaskedLM"
    tokenizer_kind = READER
    marked_tokens = "is what was there before, and what the model predicts"

    def encode(self, records: list[Record], data: DataSpec, tokenizer: Any, labels: Sequence[str]) -> Any:
        from windlass.recipes.samples import MaskedBlocks, pack

        return pack(texts(records, data.text_column), tokenizer, data.block_size, MaskedBlocks)

    def collator(self, parts: RecipeParts, model: Any) -> Any:
        from windlass.data.collate_mlm import DataCollatorForLanguageModeling

        return DataCollatorForLanguageModeling(
            parts.tokenizer, mlm_probability=parts.recipe.data.mlm_probability
        )

    def sample_lines(self, parts: RecipeParts, sample: Mapping[str, Any], marks: Marks) -> Iterator[str]:
        batch = self.collator(parts, None)([sample])
        length = int(sample["attention_mask"].sum())
        ids, labels = (batch[name][0, :length].tolist() for name in ("input_ids", "labels"))
        yield f"block   {length} tokens, {length - labels.count(IGNORED)} of them to predict; each epoch draws others"
        pairs = zip(ids, labels, strict=True)
        pieces = []
        for hidden, group in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
            given, wanted = zip(*group, strict=True)
            was = f"{marks[0]}={decoded(wanted, parts.tokenizer)}{marks[1]}" if hidden else ""
            pieces.append(decoded(given, parts.tokenizer) + was)
        yield " ".join(pieces)
