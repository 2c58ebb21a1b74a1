from __future__ import annotations

from typing import Any

import pytest
from tests.finetuning import small
from tests.finetuning.preferences import pairs

from windlass.core.errors import ConfigError
from windlass.finetuning.preference_data import PreferenceData
from windlass.text.pair_encoder import COMPLETION, PairOptions
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
    message = (
        f"longest row of the train dataset has {longest} tokens, and the model has {longest - 1} positions"
    )
    prepare(longest - 1)
    assert caplog.text.count(message) == 1
    with pytest.raises(ConfigError, match=f"max_length=64: the {message}"):
        prepare(longest - 1, learned=True)
