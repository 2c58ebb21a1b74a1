"""`windlass compare` on real scripts: both runs, what is measured, and what is answered to wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.cli import compare_command
from windlass.cli.compare_command import _times
from windlass.cli.main import main

LOOP = """
import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
layers, x = nn.LSTM(8, 16, 2, dropout=0.5), torch.ones(2, 3, 8)
assert torch.equal(layers.forward(x)[0], layers.forward(x)[0]), "dropout of a recurrent layer"
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = [(x, x.sum().unsqueeze(0)) for x in torch.randn(64, 8)]
loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(4):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
"""

TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
rows = [{"input_ids": (row := torch.randint(3, 64, (9,))), "labels": row} for _ in range(64)]
args = TrainingArguments(
    "kept", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=20, use_cpu=True, seed=7
)
Trainer(LlamaForCausalLM(config), args, train_dataset=rows).train()
print("never reached")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "train.py"


def test_a_loop_of_accelerate_has_the_same_bits(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(LOOP)
    assert main(["compare", "--updates", "3", "--json", "train.py"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "windlass-compare/1"
    assert found["first_difference"] == "same bits in every update"
    assert found["from_update"] == {}
    for run in (found["own"], found["windlass"]):
        assert [len(rows) for update in run["updates"] for rows in update["rows"]] == [8] * 6
        assert [update["rates"] for update in run["updates"]] == [[1e-2]] * 3
    assert sorted(path.name for path in script.parent.iterdir()) == ["train.py"]


@pytest.mark.slow
def test_a_trainer_of_transformers_differs_by_rounding_and_keeps_no_files(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(TRAINER)
    assert main(["compare", "--updates", "4", "train.py"]) == 0
    text = capsys.readouterr().out
    assert "learning rate, last  4.25e-05" in text
    assert "First difference: from update 1 the loss differs by rounding" in text
    assert sorted(path.name for path in script.parent.iterdir()) == ["train.py"]


# Two optimizers, a block that is recomputed with a graph of its own, and a loader whose `shuffle` is given by position.
TWO_OPTIMIZERS = """
import torch
from torch.utils.checkpoint import checkpoint

rows = torch.utils.data.DataLoader(list(range(64)), 1, True)
assert [int(row) for row in rows] == list(range(64))
model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
for parameter in model.parameters():
    torch.nn.init.ones_(parameter)
optimizers = [torch.optim.SGD(layer.parameters(), lr) for layer, lr in zip(model, (0.0, 0.5))]
for _ in range(4):
    x = torch.ones(1, 2, requires_grad=True)
    checkpoint(model, x, use_reentrant=True).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""


# Of two updates the first is followed by another, and the last by none, as a single one.
@pytest.mark.parametrize("updates", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_last_update_has_the_steps_of_all_optimizers(
    updates: int, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(TWO_OPTIMIZERS)
    assert main(["compare", "--updates", str(updates), "--json", "train.py"]) == 0
    found = json.loads(capsys.readouterr().out)
    for run in (found["own"], found["windlass"]):
        assert [update["rates"] for update in run["updates"]] == [[0.0, 0.5]] * updates
        # All weights are 1, so the second layer gets 2 and 2 and returns 4, and its gradients are 2. Half of them
        # brings it to 0.
        assert [update["loss"] for update in run["updates"]] == [4.0, 0.0][:updates]
        assert [update["norm"] for update in run["updates"]] == pytest.approx([12**0.5, 8**0.5][:updates])


OWN_TRAINER = """
import torch
from windlass import Trainer, TrainingArguments

rows = [{"x": (row := torch.randn(4)), "y": row.sum()} for _ in range(8)]
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, y):
        return {"loss": (self.layer(x).squeeze(1) - y).square().mean()}
args = TrainingArguments("kept", per_device_train_batch_size=2, num_train_epochs=1)
Trainer(Model(), args, train_dataset=rows).train()
"""


def test_a_script_that_imports_windlass_is_run_twice_and_keeps_no_files(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(OWN_TRAINER)
    assert main(["compare", "--updates", "3", "--json", "train.py"]) == 0
    assert json.loads(capsys.readouterr().out)["from_update"] == {}
    assert sorted(path.name for path in script.parent.iterdir()) == ["train.py"]


def test_a_script_that_trains_nothing_and_one_that_fails_are_named(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text("print('hello')\n")
    assert main(["compare", "train.py"]) == 2
    assert "train.py with its own libraries ended without an update" in capsys.readouterr().err
    script.write_text("print('of a library')\nraise ValueError('what went wrong')\n")
    assert main(["compare", "train.py"]) == 2
    error = capsys.readouterr().err
    assert "train.py with its own libraries ended with exit code 1:" in error
    assert "ValueError: what went wrong" in error
    assert "of a library" not in error


NOT_A_NUMBER = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    (model(torch.ones(1, 2)) * float("nan")).sum().backward()
    optimizer.step()
"""
# Two parameters of one shape, and no module.
WITHOUT_MODULES = """
import sys, torch
one, two = (torch.ones(3, requires_grad=True) for _ in range(2))
optimizer = torch.optim.SGD([one, two], lr=0.1)
under_windlass = "windlass.core" in sys.modules
for _ in range(2 if under_windlass else 4):
    (one * (3 if under_windlass else 2) + two).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_losses_that_are_not_a_number_are_the_same(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(NOT_A_NUMBER)
    assert main(["compare", "--json", "train.py"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["first_difference"], found["from_update"]) == ("same bits in every update", {})


def test_parameters_of_no_module_and_runs_of_other_lengths(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[tuple[Any, list[str]]] = []
    monkeypatch.setattr(
        compare_command, "answer", lambda _, facts, lines: answers.append((facts, lines)) or 0
    )
    script.write_text(WITHOUT_MODULES)
    assert main(["compare", "train.py"]) == 0
    [(found, lines)] = answers
    assert found["updates_made"] == {"own": 4, "windlass": 2}
    assert [len(found[name]["updates"]) for name in ("own", "windlass")] == [2, 2]
    assert found["from_update"] == {"loss": 1, "gradient_norm": 1, "weights": 1}
    assert min(found["own"]["seconds"], found["windlass"]["seconds"]) > 0
    text = "\n".join(lines)
    assert "The script ended after 4 updates with its own libraries, and after 2 with Windlass" in text
    assert "Largest difference" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent.py"], "SCRIPT='absent.py': there is no such file"),
        (["--updates", "0", "train.py"], "--updates=0: must be at least 1"),
    ],
)
def test_wrong_input_is_answered_before_anything_runs(
    script: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text("")
    assert main(["compare", *words]) == 2
    assert message in capsys.readouterr().err


def test_times_are_written_in_the_unit_of_the_shorter_one() -> None:
    found = [
        _times("t", *times) for times in ((2.0, 1.5), (2.0, 0.5), (0.004, 0.002), (0.004, 3e-4), (1e-7, 2e-7))
    ]
    assert found == [
        ("t, s", "2", "1.5", "x 0.75"),
        ("t, ms", "2e+03", "500", "x 0.25"),
        ("t, ms", "4", "2", "x 0.50"),
        ("t, us", "4e+03", "300", "x 0.07"),
        ("t, us", "0.1", "0.2", "x 2.00"),
    ]
