"""Rows of single judged answers, from pairs too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from windlass.core.errors import DataError
from windlass.core.logs import get_job_logger
from windlass.finetuning.kto_config import KTOConfig
from windlass.finetuning.sft_data import columns_of
from windlass.text.located_rows import LocatedRows, RowError
from windlass.text.pair_encoder import CHOSEN, COMPLETION, REJECTED, split_prompt
from windlass.text.pair_rows import PairRows
from windlass.text.tables import is_stream

logger = get_job_logger(__name__)
# The weights that arXiv:2402.01306 recommends: the ratio of the weighted counts, equation 8.
_LEAST, _MOST = 1.0, 1.33


def as_judged_rows(dataset: Any) -> Any:
    """Return rows with "prompt", "completion" and "label"; of pairs, the chosen answers and then the rejected ones.

    Raises:
        DataError: a pair is invalid, a stream has pairs, or the dataset has neither form.
    """
    columns = columns_of(dataset)
    if {COMPLETION, "label"} <= columns:
        return dataset
    if not {CHOSEN, REJECTED} <= columns:
        have = ", ".join(sorted(columns)) or "none"
        raise DataError(f"a row needs prompt, completion and label, or chosen and rejected; found: {have}")
    if is_stream(dataset):
        raise DataError("a stream of pairs is not made into single answers; load it, or make its rows before")
    places = dataset.places if isinstance(dataset, LocatedRows) else None
    made: dict[str, list[dict[str, Any]]] = {CHOSEN: [], REJECTED: []}
    try:
        for number, row in enumerate(dataset):
            for name, answer in _answers(row, number).items():
                made[name].append({**answer, "label": name == CHOSEN})
    except RowError as error:
        raise error.located(dataset) from None
    origins = places or [f"row {at}" for at in range(len(made[CHOSEN]))]
    return LocatedRows([*made[CHOSEN], *made[REJECTED]], [*origins, *origins])


def _answers(row: Mapping[str, Any], number: int) -> dict[str, dict[str, Any]]:
    for name in (CHOSEN, REJECTED):
        if row.get(name) is None:
            raise RowError(number, f"column {name!r} is missing or null")
    prompt, answers = split_prompt(row.get("prompt"), [row[CHOSEN], row[REJECTED]], number)
    extras = {name: row[name] for name in ("tools", "chat_template_kwargs") if row.get(name)}
    return {
        name: {"prompt": prompt, COMPLETION: answer, **extras}
        for name, answer in zip((CHOSEN, REJECTED), answers, strict=True)
    }


def warn_of_balance(rows: Any, args: KTOConfig) -> None:
    """Warn if neither weight is within what the paper recommends for the counts of the two kinds of answers."""
    if not isinstance(rows, PairRows):
        return
    labels = rows.numbers["label"][rows.kept].astype(bool)
    desirable, undesirable = max(int(np.sum(labels)), 1), max(int(np.sum(~labels)), 1)
    ratio = desirable * args.desirable_weight / max(undesirable * args.undesirable_weight, 1e-30)
    if desirable != undesirable and not (_LEAST <= round(ratio, 2) <= _MOST):
        low = undesirable * args.undesirable_weight / desirable
        logger.warning(
            "%d answers are desirable and %d are not, and their weights do not make up for it: set desirable_weight "
            "between %.2f and %.2f (arXiv:2402.01306, equation 8)",
            desirable,
            undesirable,
            low * _LEAST,
            low * _MOST,
        )
