"""The forward in which a value becomes non-finite is found, with the forwards before it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.trainer.small import arguments, rows
from torch import Tensor, nn

from windlass import Trainer
from windlass.core.errors import ConfigError, NonFiniteError
from windlass.debug_utils import DebugUnderflowOverflow


class Growing(nn.Module):
    """The output of its second layer overflows from the third forward on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.forwards = 0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.forwards += 1
        factor = 1e38 if self.forwards > 2 else 1.0
        logits = self.third(self.second(self.first(x) * factor * 100))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_the_first_module_is_named_with_those_before_it() -> None:
    model = Growing()
    watch = DebugUnderflowOverflow(model, max_frames_to_save=3)
    for _ in range(2):
        model(torch.ones(2, 4))
    with pytest.raises(NonFiniteError) as caught:
        model(torch.ones(2, 4))
    said = str(caught.value)
    assert said.startswith("output[0] of second (Linear) is not finite, in batch 2. The last 3 forwards")
    frames = said.splitlines()[2:]
    assert [line.split() for line in frames if line.startswith(" " * 18)] == [
        ["(the", "model)", "Growing"], ["first", "Linear"], ["second", "Linear"],
    ]  # fmt: skip
    assert frames[-1].split()[1:] == ["inf", "output[0]"] or frames[-1].split()[1:] == ["nan", "output[0]"]
    weight = model.second.weight.detach().abs()
    assert f"{float(weight.min()):8.2e} {float(weight.max()):8.2e} weight" in frames
    watch.remove()
    model(torch.ones(2, 4))


def test_batches_are_traced(capsys: pytest.CaptureFixture[str]) -> None:
    model = Growing()
    DebugUnderflowOverflow(model, trace_batch_nums=[1], abort_after_batch_num=1)
    model(torch.ones(2, 4))
    assert capsys.readouterr().out == ""
    with pytest.raises(RuntimeError, match="stopped after 2 batches: abort_after_batch_num=1"):
        model(torch.ones(2, 4))
    assert capsys.readouterr().out.count("Linear") == 3


def test_a_run_stops_in_that_forward(tmp_path: Path) -> None:
    model = Growing()
    trainer = Trainer(
        model, arguments(tmp_path, max_steps=9, debug="underflow_overflow"), train_dataset=rows(64)
    )
    with pytest.raises(NonFiniteError, match=r"output\[0\] of second \(Linear\) is not finite"):
        trainer.train()
    model.forwards = 0
    model(rows(1)[0]["x"][None])  # watched no longer
    assert not model._forward_hooks


def test_another_aid_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"debug='tpu_metrics_debug': print torch_xla"):
        arguments(tmp_path, debug="tpu_metrics_debug")
