"""The order of transforms: recomputation, then compilation, over a model that stays itself."""

from __future__ import annotations

import torch
from tests.transforms.test_recompute import Plain

from windlass.assemble.build import apply_transforms
from windlass.config.plan import CompilePlan, TransformPlan


def test_nothing_asked_nothing_done() -> None:
    model = Plain()
    before = type(model.blocks[0])
    assert apply_transforms(model, TransformPlan()) is model
    assert type(model.blocks[0]) is before
    assert model._compiled_call_impl is None


def test_recomputed_and_compiled_together_give_the_gradients_of_neither() -> None:
    ids = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(0))
    results = []
    for plan in (TransformPlan(), TransformPlan(recompute=True, compile=CompilePlan("aot_eager"))):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Plain(depth=2)
        for block in model.blocks:
            block.drop.p = 0.0  # compiled dropout draws from another stream
        names = list(model.state_dict())
        apply_transforms(model, plan)
        assert list(model.state_dict()) == names
        model(ids).backward()
        results.append([p.grad for p in model.parameters()])
    torch._dynamo.reset()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
