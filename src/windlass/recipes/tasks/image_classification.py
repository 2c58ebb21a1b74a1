"""Classification of images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from windlass.config.arguments import TrainingArguments
from windlass.core.output import shown
from windlass.recipes.marked_text import Marks
from windlass.recipes.modelling import build_model
from windlass.recipes.schema import DIGITS, Recipe, RecipeParts, TokenizerSpec
from windlass.recipes.task import Conflict, Task, model_conflicts


class ImageClassification(Task):
    """A folder with one folder of images for each class, or the digits of scikit-learn."""

    name = "image-classification"
    own_keys = ("data.label_column", "data.image_size")
    own_formats = (DIGITS,)
    rows_at_hand: ClassVar[Mapping[str, str]] = {"format": DIGITS}
    reads_text = False
    measures_accuracy = True

    def file_problem(self, kind: str) -> str | None:
        if kind == "folder":
            return None
        return f"{self.name} reads a folder with one folder of images for each class, or format digits"

    def conflicts(self, recipe: Recipe) -> Iterator[Conflict]:
        yield from model_conflicts(recipe, reads_text=False)
        if recipe.tokenizer != TokenizerSpec():
            yield "tokenizer", "given", f"has no meaning for task {self.name}; leave it out"

    def build_parts(
        self, recipe: Recipe, args: TrainingArguments, saved_tokenizer: Path | None = None
    ) -> RecipeParts:
        from windlass.recipes.images import load_images

        return RecipeParts(recipe, None, *load_images(recipe.data, args.seed))

    def sample_lines(self, parts: RecipeParts, sample: Mapping[str, Any], marks: Marks) -> Iterator[str]:
        pixels, label = sample["pixel_values"], sample["labels"]
        channels, height, width = pixels.shape
        low, high = pixels.min().item(), pixels.max().item()
        yield f"image   {width} x {height}, {channels} channels, values from {low:.3g} to {high:.3g}"
        yield f"label   {shown(parts.labels[label])} (class {label} of {len(parts.labels)})"

    def build_model(self, parts: RecipeParts) -> Any:
        channels, height, width = parts.train.shape
        size = height if height == width else [height, width]
        implied = {"num_channels": channels, "image_size": size}
        return build_model(parts.recipe.model, "AutoModelForImageClassification", parts.labels, implied)
