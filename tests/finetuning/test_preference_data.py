from __future__ import annotations

from typing import Any

import pytest
from tests.finetuning import small
from tests.finetuning.preferences import pairs

from windlass.core.errors import ConfigError, DataError
from windlass.finetuning.preference_data import PreferenceData
from windlass.text.forms import LocatedRows
from windlass.text.pair_encoder import COMPLETION, PairOptions
from windlass.text.prepare_pairs import prepare_pairs
from windlass.transforms.model_limits import ModelLimits

pytest.importorskip("transformers")

# What `DPOTrainer`, `RewardTrainer` and `KTOTrainer` ask for.
KINDS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "dpo": (pairs(4), {}),
    "reward": (pairs(4), {"whole": True}),
    "kto": (small.prompts(4), {"answers": (COMPLETION,)}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_beyond_the_positions_of_a_model(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    rows, changes = KINDS[kind]

    def prepare(positions: int, *, learned: bool = False) -> int:
        """Prepare the rows for a model with as many positions; return the tokens of the longest."""
        limits = ModelLimits(tokens=36, positions=positions, positions_learned=learned)
        data = PreferenceData(small.tokenizer(), PairOptions(max_length=64, **changes), limits)
        data.prepare(small.table(rows), "train")
        return data.summaries["train"].longest

    longest = prepare(64)
    prepare(longest, learned=True)
    assert "positions" not in caplog.text
    has = f"has {longest} tokens, and the model has {longest - 1} positions"
    prepare(longest - 1)
    assert caplog.text.count(has) == 1
    assert "longest row of the train dataset (row " in caplog.text
    with pytest.raises(
        ConfigError, match=rf"max_length=64: the longest row of the train dataset \(row \d\) {has}"
    ):
        prepare(longest - 1, learned=True)


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_refused(kind: str) -> None:
    rows, changes = KINDS[kind]
    data = PreferenceData(small.tokenizer(), PairOptions(**changes), ModelLimits())
    with pytest.raises(ConfigError, match=r"train_dataset=\['images'\]: .* are trained on text alone"):
        data.prepare([rows[0], {**rows[1], "images": ["a.png"]}], "train")


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_fills_the_positions_of_a_model_is_named_by_its_line(kind: str) -> None:
    rows, changes = KINDS[kind]
    rows = [dict(row) for row in rows]
    rows[2]["prompt"] = " ".join(["cat"] * 40)
    located = LocatedRows(rows, [f"rows.jsonl:{line}" for line in range(1, 5)])
    limits = ModelLimits(tokens=36, positions=32)
    data = PreferenceData(small.tokenizer(), PairOptions(max_length=64, **changes), limits)
    with pytest.raises(
        DataError, match=r"rows.jsonl:3: the prompt has 40 tokens.* 32 positions.*max_length=32"
    ):
        data.prepare(located, "train")
    PreferenceData(small.tokenizer(), PairOptions(max_length=32, **changes), limits).prepare(located, "train")


def test_a_stream_keeps_its_numbers() -> None:
    """datasets before 3.3 removes a column that a step was to replace."""
    rows = [{**row, "margin": float(at)} for at, row in enumerate(pairs(4))]
    stream = small.table(rows).to_iterable_dataset()
    found = prepare_pairs(stream, small.tokenizer(), PairOptions(), numbers=("margin",))
    assert [row["margin"] for row in found] == [0.0, 1.0, 2.0, 3.0]
