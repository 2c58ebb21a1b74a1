"""A model as a later stage of a pipeline sees it."""

from __future__ import annotations

import torch
from torch import nn

from windlass.dist.gang import Gang
from windlass.transforms.pipeline_cut import Cut, Output
from windlass.transforms.stage_balance import StageBalance
from windlass.transforms.stage_views import StageView


class Table(nn.Embedding):
    dtype = torch.float64  # as models of transformers have one, of their parameters


def test_a_skipped_unit_answers_as_itself_in_the_dtype_that_is_set() -> None:
    model = nn.ModuleDict({"table": Table(5, 4), "first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
    table, outputs = model["table"], {name: Output(None, 4, torch.float32) for name in ("table", "first")}
    cut = Cut([["table", "first"], ["second"]], ["first"], outputs)
    view = StageView(model, cut, 1, StageBalance(model, Gang(), False, lambda: False))
    ids, received = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, 4)
    for dtype in (None, torch.bfloat16):
        if dtype is not None:
            view.compute_in(dtype)
        view.enter(received)
        found = model["table"](ids)
        assert (found.shape, found.dtype) == ((2, 3, 4), dtype or torch.float32)
        assert model["table"].dtype == torch.float64
        assert model["first"](found) is received
        view.leave()
        assert model["table"] is table
