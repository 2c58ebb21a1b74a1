"""One stage of a model, on one process. What ranks compute is in `tests/trainer/test_pipeline_runs.py`."""

from __future__ import annotations

import pytest
import torch
from tests.transforms.test_pipeline_cut import Decoder
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.dist.gang import Gang
from windlass.transforms.pipeline_cut import example_of, find_cut
from windlass.transforms.stage_balance import StageBalance
from windlass.transforms.stage_link import StageLink
from windlass.transforms.staged_model import StagedModel

CPU = torch.device("cpu")


def staged(model: nn.Module, placement: list[int]) -> tuple[StagedModel, Tensor]:
    """The stages, and what the whole model made of its example."""
    cut, result = find_cut(model, len(placement), (), example_of(model))
    return StagedModel(model, cut, placement, Gang(), CPU, StageBalance(model, Gang(), False, bool)), result


def test_a_training_step_calls_the_model_once() -> None:
    model, ids = Decoder(2).eval(), torch.arange(5)[None]
    stages, expected = staged(model, [0, 0])
    stages.randomness.begin()
    sent = stages.run(0, 0, None, lambda: model(ids))
    with pytest.raises(ModelError, match="calls the model twice"):
        stages.run(1, 0, sent, lambda: model(ids) + model(ids))
    with pytest.raises(ModelError, match="did not call the model"):
        stages.run(1, 0, sent, lambda: torch.zeros(()))
    assert not stages.in_step
    torch.testing.assert_close(stages.run(1, 0, sent, lambda: model(ids)), expected)


def test_layers_draw_by_their_stage_and_micro_batch_and_a_training_step_by_its_micro_batch() -> None:
    model, ids = Decoder(2).eval(), torch.arange(5)[None]
    stages, _ = staged(model, [0, 0])
    drawn: dict[tuple[str, int, int], float] = {}
    further = 0  # numbers that each layer draws besides

    def compute(stage: int, index: int, received: Tensor | None) -> Tensor:
        def draw(when: str, count: int = 1) -> None:
            drawn[when, stage, index] = float(torch.rand(count)[0])

        def step() -> Tensor:
            draw("before")
            result: Tensor = model(ids)
            draw("after")
            return result

        hook = model.layers[stage].register_forward_pre_hook(lambda *_: draw("layer", further))
        try:
            return stages.run(stage, index, received, step)
        finally:
            hook.remove()

    def update(*order: int) -> dict[tuple[str, int, int], float]:
        nonlocal further
        further += 1
        torch.manual_seed(3)
        drawn.clear()
        stages.randomness.begin()
        for index in order:
            compute(1, index, compute(0, index, None))
        return dict(drawn)

    found = update(0, 1)
    assert found == update(1, 0), "whatever ran before, and however much it drew"
    for index in (0, 1):
        # What the step draws for its rows is the same wherever it draws it.
        assert found.pop(("before", 1, index)) == found["before", 0, index]
    assert len(found) == len(set(found.values())) == 8


def test_a_weight_of_three_ranks_is_refused() -> None:
    model = Decoder(3)
    for layer in model.layers[1:]:
        layer.inner.weight = model.layers[0].inner.weight  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="is used on 3 ranks of the pipeline"):
        staged(model, [0, 1, 2])


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.int64), torch.zeros([1] * 9)])
def test_what_a_stage_cannot_send_is_refused(tensor: Tensor) -> None:
    with pytest.raises(ModelError, match="only floating-point ones of up to 8 axes"):
        StageLink(Gang(), CPU).announce(tensor, 1)
