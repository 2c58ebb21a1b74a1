"""Datasets of the trainers of preferences: tokenized, checked against the window and the vocabulary of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from windlass.core.errors import ConfigError, Problem
from windlass.finetuning.sft_data import columns_of, image_columns
from windlass.text.forms import naming_dataset, place_of
from windlass.text.pair_encoder import PairOptions, PairRows
from windlass.text.prepare_pairs import prepare_pairs, within
from windlass.text.prepare_text import refuse_passing
from windlass.text.summary import TextSummary
from windlass.text.tables import is_stream
from windlass.text.token_store import default_cache
from windlass.transforms.model_limits import ModelLimits


@dataclass(frozen=True, slots=True)
class PreferenceData:
    """Prepares the datasets of one trainer."""

    tokenizer: Any  # turns text into ids
    options: PairOptions  # the columns of answers, and their greatest length
    limits: ModelLimits  # the tokens and positions that the model has
    numbers: tuple[str, ...] = ()  # columns of numbers that are taken over
    arrange: Callable[[Any], Any] = lambda rows: rows  # gives a dataset the columns that are prepared
    # Name of a dataset -> counts of its preparation; streams have none
    summaries: dict[str, TextSummary] = field(default_factory=dict)
    # Columns of what was prepared; most are not in prepared rows
    given: set[str] = field(default_factory=set)

    def prepare(self, dataset: Any, name: str) -> Any:
        """Return rows of tokens, or a stream of them. Rows that are prepared already stay as they are.

        Args:
            name: of the dataset, for errors and for the summary.

        Raises:
            ConfigError, DataError: what cannot be prepared, before training.
        """
        if isinstance(dataset, PairRows) or self._is_prepared(dataset):
            return dataset
        if not is_stream(dataset):
            with naming_dataset(name):
                refuse_passing(dataset)
        if images := sorted(image_columns(dataset)):
            fix = "holds images, and preferences are trained on text alone: remove the column"
            raise ConfigError(Problem(f"{name}_dataset", images, fix))
        self.given.update(columns_of(dataset))
        with naming_dataset(name):
            dataset = self.arrange(dataset)
            found = prepare_pairs(
                dataset, self.tokenizer, self.options, numbers=self.numbers, cache=default_cache(), name=name
            )
            if is_stream(found):
                return found
            rows, summary = within(found, self.options, name, dataset, whole_sequences=self.options.whole)
        self.summaries[name] = summary
        self._check(dataset, name, rows, summary)
        return rows

    def prepare_all(self, datasets: Any) -> Any:
        """Prepare one dataset, or each of a dict of them."""
        if isinstance(datasets, Mapping):
            return {name: self.prepare(dataset, name) for name, dataset in datasets.items()}
        return self.prepare(datasets, "eval")

    def _check(self, dataset: Any, name: str, rows: PairRows, found: TextSummary) -> None:
        """Check the rows against the limits of the model."""
        most, lengths = self.options.max_length, rows.lengths
        asked = lengths[:, 0]
        whole = asked + lengths[:, 1:].max(axis=1)
        if most is not None:
            asked, whole = np.minimum(asked, most), np.minimum(whole, most)
        where = [place_of(dataset, int(rows.kept[values.argmax()])) for values in (whole, asked)]
        prompt = (int(asked.max()), where[1])
        self.limits.check_rows(name, found.largest_id, (found.longest, where[0]), most, prompt)

    def _is_prepared(self, dataset: Any) -> bool:
        names = getattr(dataset, "column_names", None) or []
        return all(f"{name}_ids" in names for name in self.options.answers)
