"""Datasets of an `SFTTrainer`: prepared, packed, shuffled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from windlass.core.errors import ConfigError, DataError, Problem
from windlass.core.logs import get_job_logger
from windlass.finetuning.prepared_text import prepare_kept, text_options
from windlass.finetuning.sft_config import SFTConfig
from windlass.text.forms import Form, place_of, recognise_form
from windlass.text.image_messages import COLUMNS, has_image_parts
from windlass.text.image_processing import ImageProcessing
from windlass.text.mixture import DatasetMixture
from windlass.text.summary import TextSummary
from windlass.text.tables import is_stream, is_table
from windlass.transforms.model_limits import ModelLimits

logger = get_job_logger(__name__)

_MASKS = ("completion_mask", "assistant_masks")


@dataclass(frozen=True, slots=True)
class SFTData:
    """Prepares the datasets of one trainer."""

    args: SFTConfig  # the settings
    tokenizer: Any  # turns text into ids
    formatting_func: Callable[[Any], Any] | None  # row -> text
    # The script passed a collator, which may read masks itself, and gets rows with images as they are
    own_collator: bool
    limits: ModelLimits = field(default_factory=ModelLimits)  # the tokens and positions that the model has
    # What the processor makes of images; None: the tokenizer alone is known
    images: ImageProcessing | None = None
    # Name of a dataset -> counts of its preparation; streams have none
    summaries: dict[str, TextSummary] = field(default_factory=dict)
    # Columns of what was prepared; most are not in prepared rows
    given: set[str] = field(default_factory=set)

    def prepare(self, dataset: Any, name: str, packing: bool) -> Any:
        """Return a dataset with the columns `input_ids` and `labels`, and `seq_lengths` if rows are packed by best fit.
        The sources of a mixture are prepared one by one, and mixed again. Raises ConfigError or DataError for what
        cannot be prepared, before training.

        Args:
            name: of the dataset, for errors and for the summary.
        """
        as_they_are = self.args.skips_preparation or (self.own_collator and holds_images(dataset))
        if self.images is None and not as_they_are:
            _refuse_images(dataset, name)
        if as_they_are:
            self._check_skipped(dataset, name)
            return dataset
        if isinstance(dataset, DatasetMixture):
            return dataset.map_sources(lambda source, rows: self.prepare(rows, f"{name} {source}", packing))
        _check_transform(dataset)
        self.given.update(columns_of(dataset).difference({*_MASKS, "attention_mask"}))
        completion_only = trains_on_completions(self.args, dataset, self.formatting_func is not None)
        options = text_options(self.args, packing, completion_only, self.formatting_func)
        found = prepare_kept(dataset, self.tokenizer, options, name, not self.args.disable_tqdm, self.images)
        if found.summary is not None:
            self.summaries[name] = found.summary
            # Joined texts have the positions of one, but for those that other packings keep apart.
            joined = packing and self.args.packing_strategy == "wrapped"
            self._check(dataset, name, found.summary, joined)
        prepared = found.dataset
        return prepared.shuffle(seed=self.args.seed) if self.args.shuffle_dataset else prepared

    def prepare_all(self, datasets: Any, packing: bool) -> Any:
        """Prepare one dataset, or each of a dict of them."""
        if isinstance(datasets, Mapping):
            return {name: self.prepare(dataset, name, packing) for name, dataset in datasets.items()}
        return self.prepare(datasets, "eval", packing)

    def _check(self, dataset: Any, name: str, found: TextSummary, joined: bool) -> None:
        """Check the rows against the limits of the model; `joined`: into rows of the greatest length."""
        most, (prompt, number) = self.args.max_length, found.longest_prompt
        if joined:
            self.limits.check_rows(name, found.largest_id, (most or 0, ""), most)
            return
        where = "" if found.longest_row is None else place_of(dataset, found.longest_row)
        asked = (prompt, place_of(dataset, number))
        self.limits.check_rows(name, found.largest_id, (found.longest, where), most, asked)

    def _check_skipped(self, dataset: Any, name: str) -> None:
        columns = columns_of(dataset)
        if not self.own_collator and "labels" not in columns and set(_MASKS) & columns:
            raise DataError(
                f"the {name} dataset has mask columns but no 'labels', and skip_prepare_dataset=True builds none, so "
                "it would train on all tokens. Add a 'labels' column (-100: not a target), or leave out "
                "skip_prepare_dataset"
            )


def columns_of(dataset: Any) -> set[str]:
    """The names of a dataset's columns, from its first row if it does not list them; empty for no rows."""
    names = getattr(dataset, "column_names", None)
    if isinstance(names, (list, tuple)):
        return set(names)
    first = next(iter(islice(iter(dataset), 1)), None)
    return set(first) if isinstance(first, Mapping) else set()


def holds_images(dataset: Any) -> bool:
    """Return True if rows of a dataset, or of one of several, may have images: it has a column of them, or messages
    with such parts.
    """
    if dataset is None:
        return False
    several = dataset.sources if isinstance(dataset, DatasetMixture) else dataset
    if isinstance(several, Mapping):
        return any(map(holds_images, several.values()))
    if image_columns(dataset):
        return True
    if is_table(dataset) or is_stream(dataset):
        features = dataset.features or {}
        return any(_may_have_parts(features.get(name)) for name in ("messages", "prompt", "completion"))
    return isinstance(dataset, (list, tuple)) and any(map(has_image_parts, dataset))


def image_columns(dataset: Any) -> set[str]:
    """The columns of images that a dataset has; of a list also those in which a later row has one."""
    rows = dataset if isinstance(dataset, (list, tuple)) else ()
    values = ((name, row.get(name)) for row in rows if isinstance(row, Mapping) for name in COLUMNS)
    filled = {name for name, value in values if not isinstance(value, list | None) or value}
    return columns_of(dataset) & set(COLUMNS) | filled


def _refuse_images(dataset: Any, name: str) -> None:
    found = sorted(image_columns(dataset))
    if found:
        fix = (
            "has images, and no dataset of the constructor has: pass eval_dataset there as well, or remove the column "
            "to evaluate on the text alone"
        )
        raise ConfigError(Problem(f"{name}_dataset", found, fix))


def _may_have_parts(feature: Any) -> bool:
    """Return True if messages of this type have contents of parts with more than text."""
    message = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
    content = message.get("content") if isinstance(message, Mapping) else None
    part = content[0] if isinstance(content, list) and content else getattr(content, "feature", None)
    return isinstance(part, Mapping) and bool(set(part) - {"type", "text"})


def trains_on_completions(args: SFTConfig, dataset: Any, formatted: bool) -> bool:
    """Resolve `completion_only_loss`: by default True if rows are read as a prompt and a completion."""
    if args.completion_only_loss is not None:
        return args.completion_only_loss
    try:
        form = recognise_form(columns_of(dataset), args.dataset_text_field)
    except DataError:
        return False  # raised again, with the row, when the rows are prepared
    return not formatted and form in (Form.PROMPT_COMPLETION, Form.ALPACA)


def _check_transform(dataset: Any) -> None:
    format_of = getattr(dataset, "format", None)
    if isinstance(format_of, Mapping) and format_of.get("type") == "custom":
        raise DataError(
            "SFTTrainer cannot prepare a dataset that uses `Dataset.with_transform()`: the preparation would store "
            "what the transform returned once. Pass dataset_kwargs={'skip_prepare_dataset': True} and let the "
            "transform return tokenized rows, or use `Dataset.map()` before"
        )
