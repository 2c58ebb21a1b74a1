"""Documents of divided rows, and what attention there does not have. `test_context.py` tests what ranks compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from windlass.core.errors import ModelError
from windlass.core.types import IGNORED
from windlass.dist.gang import Gang
from windlass.transforms.divided_sequences import DividedMask, Division, divide, divided_attention
from windlass.transforms.zigzag import Zigzag


@pytest.mark.parametrize(
    ("mask", "options", "words"),
    [
        (torch.ones(1, 1, 2, 2), {}, "Layer makes a mask of its own"),
        (
            DividedMask(None, lambda: None),
            {"dropout": 0.1},
            "Layer asks for attention dropout 0.1.* Set attention_drop",
        ),
        (
            DividedMask(None, lambda: None),
            {"softcap": 30.0},
            "Layer asks for softcap.* Train with",
        ),
    ],
)
def test_what_is_not_built_is_refused(mask: Any, options: dict[str, Any], words: str) -> None:
    states = torch.ones(1, 1, 2, 4)
    whole = Division(None, None, Zigzag(1, 2), None, torch.ones(1, 2), torch.tensor(1))
    attended, _ = divided_attention(Layer(), states, states, states, DividedMask(None, bool), divided=whole)
    assert attended.shape == (1, 2, 1, 4)
    with pytest.raises(ModelError, match=words):
        divided_attention(Layer(), states, states, states, mask, divided=whole, **options)


def test_padding_is_no_document_and_a_batch_may_have_no_targets() -> None:
    ids = torch.ones(1, 4, dtype=torch.int64)
    batch = {
        "input_ids": ids,
        "labels": torch.full_like(ids, IGNORED),
        "attention_mask": torch.tensor([[0, 1, 1, 1]]),
    }
    part = divide(batch, Gang())
    assert part["divided"].documents.tolist() == [[-1, 0, 0, 0]]
    assert part["divided"].real.tolist() == [[False, True, True, True]]
    assert int(part["num_items_in_batch"]) == 1
    packed = {"attention_mask": torch.tensor([[1, 1, 1, 0]]), "position_ids": torch.tensor([[0, 1, 0, 1]])}
    assert divide(batch | packed, Gang())["divided"].documents.tolist() == [[0, 0, 1, -1]]


class Layer(nn.Module):
    pass
