"""What attention on divided rows does not have. What ranks compute is in `tests/transforms/test_context.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from windlass.core.errors import ModelError
from windlass.transforms.divided_sequences import DividedMask, Division, divided_attention
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


class Layer(nn.Module):
    pass
