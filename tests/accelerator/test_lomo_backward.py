"""Optimizers that update inside the backward, in loops of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.fused_cases import Tied, rows
from torch import nn
from torch.utils.data import DataLoader

from windlass import Accelerator, Lomo
from windlass.core.errors import ConfigError, ModelError
from windlass.optim.optimizers.adalomo import AdaLomo


def loop(optimizer: type[torch.optim.Optimizer], way: str, steps: int = 1) -> tuple[nn.Module, Accelerator]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = Tied(dropout=0.0)
    loader: Any = DataLoader(rows(12), batch_size=2)  # type: ignore[arg-type]
    model, made, loader = accelerator.prepare(model, optimizer(model.parameters(), lr=0.1), loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)[0]
            if way == "lomo_backward":
                accelerator.lomo_backward(loss, 0.05)
            elif way == "learning_rate":
                accelerator.backward(loss, learning_rate=0.05)
            else:
                made.param_groups[0]["lr"] = 0.05
                accelerator.backward(loss)
                made.step()
                made.zero_grad()
    return model, accelerator


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("way", ["lomo_backward", "learning_rate", "step"])
def test_a_loop_with_lomo_is_one_with_sgd(way: str, steps: int) -> None:
    ours, _ = loop(Lomo, way, steps)
    theirs, _ = loop(torch.optim.SGD, "step", steps)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
        assert mine.grad is None


def test_gradients_that_were_used_cannot_be_clipped() -> None:
    model, accelerator = loop(Lomo, "lomo_backward")
    with pytest.raises(ModelError, match="used and freed"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)


def test_options_of_its_backward_are_refused() -> None:
    model, accelerator = loop(Lomo, "lomo_backward")
    with pytest.raises(ModelError, match=r"backward\(retain_graph=...\) is not possible"):
        accelerator.backward(model(**rows_batch())[0], retain_graph=True)


def test_it_must_be_the_only_optimizer() -> None:
    accelerator, model = Accelerator(cpu=True), Tied()
    first, second = Lomo(model.blocks.parameters()), torch.optim.SGD(model.embed.parameters(), lr=0.1)
    model, *_ = accelerator.prepare(model, first, second)
    with pytest.raises(ConfigError, match="the only optimizer"):
        accelerator.backward(model(**rows_batch())[0])


def test_it_updates_before_an_overflow_is_known() -> None:
    accelerator, model = Accelerator(cpu=True, mixed_precision="fp16"), Tied()
    model, _ = accelerator.prepare(model, Lomo(model.parameters()))
    with pytest.raises(ConfigError, match="Lomo updates in the backward, before an overflow is known"):
        accelerator.backward(model(**rows_batch())[0])


def rows_batch() -> dict[str, torch.Tensor]:
    return next(iter(DataLoader(rows(2), batch_size=2)))  # type: ignore[arg-type]


def test_free_memory_removes_its_hooks() -> None:
    model, accelerator = loop(Lomo, "lomo_backward")
    accelerator.free_memory()
    model(**rows_batch())[0].backward()
    assert all(p.grad is not None for p in model.parameters())


def test_its_state_is_saved_and_loaded(tmp_path: Path) -> None:
    _, saving = loop(AdaLomo, "lomo_backward")
    saving.save_state(str(tmp_path / "saved"))
    model = Tied()
    accelerator = Accelerator(cpu=True)
    loader: Any = DataLoader(rows(12), batch_size=2)  # type: ignore[arg-type]
    model, made, loader = accelerator.prepare(model, AdaLomo(model.parameters(), lr=0.1), loader)
    accelerator.load_state(str(tmp_path / "saved"))
    assert len(made.state) == len(list(model.parameters()))
    assert {state["step"] for state in made.state.values()} == {6}
    assert all(float(state["exp_avg_sq_row"].sum()) > 0 for p, state in made.state.items() if p.dim() > 1)
