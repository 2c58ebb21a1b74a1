"""`windlass plan`: what it prints, as text and as JSON, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.dist.launch import end_of

from windlass.cli.main import main
from windlass.cli.plan_fit import find_layout
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.forecast.child import Child
from windlass.forecast.forecast import SCHEMA
from windlass.forecast.layouts import Devices, layouts
from windlass.forecast.meter import Instant, Owner, Peak
from windlass.forecast.trace import Trace

RECIPE = """\
task: causal-lm
data: {format: python-docs, block_size: 32, max_samples: 40}
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}
tokenizer: {train: {vocab_size: 300}}
training: {max_steps: 20, per_device_train_batch_size: 2, use_cpu: true}
"""
SCRIPT = """\
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from LIBRARY import Trainer, TrainingArguments

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (64, 16))]
args = TrainingArguments(sys.argv[1], per_device_train_batch_size=int(sys.argv[2]), report_to="none")
print("not part of the plan")
Trainer(model, args, train_dataset=rows).train()
raise AssertionError("the script goes on")
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return str(path)


def test_a_plan_as_text_fits_a_terminal(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", recipe, "--device", "h100", "--world", "4", "parallel.strategy=fsdp"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for said in (
        "4 ranks: shard 4",
        "weights",
        "optimizer state",
        "peak: ",
        "sent over",
        "disk",
        "NVIDIA H100",
    ):
        assert said in out
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]


def test_a_plan_as_json_has_its_schema(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", recipe, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == SCHEMA == "windlass-plan/1"
    assert found["update"]["positions"] == 2 * 32
    assert found["memory"]["peak"] > found["memory"]["at_peak"]["weights"] == 4 * found["model"]["parameters"]
    assert len(found["memory"]["owners"]) == 10
    assert found["time"] is None


def test_the_first_layout_that_fits(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", recipe, "--fit", "2x1GB"]) == 0
    assert "replicas: as the recipe is" in capsys.readouterr().out


@pytest.mark.slow
def test_what_does_not_fit_tries_every_layout(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Devices, "room", 1000)
    assert main(["plan", recipe, "--fit", "2x1GB"]) == 2
    out, err = capsys.readouterr()
    assert "no layout fits: the least is" in err
    assert [line.split("  ")[1] for line in out.splitlines()[1:]] == [layout.name for layout in layouts(2)]


@pytest.mark.parametrize("forks", [True, False])
def test_the_first_that_fits_is_taken_and_refusals_are_shown(
    forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without models: the traces are made up, smaller for each override."""
    monkeypatch.setattr(Child, "can_fork", forks)

    def traced(overrides: tuple[str, ...]) -> Trace:
        if overrides == ("parallel.strategy=fsdp",):
            raise ModelError("no shards today")
        if "parallel.mesh.ep=2" in overrides:
            raise ConfigError(Problem("ep_size", 2, "no experts"))
        return held(2000 - 500 * len(overrides))

    lines: list[str] = []
    layout, found = find_layout(traced, Devices(2, 1700), lines.append)
    assert (layout.name, found.peak[1].total) == ("replicas, recomputed", 1500)
    assert [line.split("  ")[-1].strip() for line in lines[::2]] == ["does not fit", "fits"]
    assert "refused: no shards today" in lines[1]
    with pytest.raises(
        ConfigError, match=r"no layout fits: the least is 500 B of a rank \(shards x context 2"
    ):
        find_layout(traced, Devices(2, 500), lines.append)
    assert [line.split("refused: ")[1] for line in lines if "experts" in line] == ["ep_size=2: no experts"]


def held(nbytes: int) -> Trace:
    """A trace whose peak is so large."""
    peak = Peak(nbytes, {Owner("weights", ""): nbytes})
    return Trace({Instant("optimizer step", "", ""): peak}, Counter(), Counter())


def test_a_script_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is stopped at `train()`, and writes nothing."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("LIBRARY", "windlass"))
    monkeypatch.chdir(tmp_path)
    assert main(["plan", str(path), "--json", "--", "run", "3"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["update"]["samples"] == 3
    assert "not part of the plan" in out.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_trainer_of_transformers_is_answered(tmp_path: Path) -> None:
    """In a new interpreter, in which nothing was imported."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("LIBRARY", "transformers"))
    words = ["plan", path, "--json", "--", tmp_path / "run", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "windlass", *words], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["update"]["samples"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["RECIPE", "--device", "h1000"], "--device='h1000': is not known; did you mean 'h100'"),
        (["RECIPE", "--world", "0"], "--world=0: must be at least 1"),
        (["RECIPE", "--world", "3", "parallel.mesh.tp=2"], "tp"),
        (["RECIPE", "--no-such-flag"], "--no-such-flag"),
        (["RECIPE", "--fit", "8"], "such as 8x80GB"),
        (["RECIPE", "--fit", "2x1GB", "--world", "3"], "contradicts --fit 2x1GB"),
        (["RECIPE", "--fit", "8x100GB", "--device", "h100"], "has 80 GB"),
        (["empty.py", "--fit", "8x80GB"], "this is a script"),
        (["missing.py"], "SCRIPT='missing.py': there is no such file"),
        (["missing.yaml"], "missing.yaml"),
        (["pythondocs"], "is neither a recipe"),
        (["sft-loar"], "did you mean 'sft-lora'?"),
        (["empty.py"], "without a call of Trainer.train()"),
        (["leaves.py"], "leaves.py ended with 3 before it called Trainer.train()"),
    ],
)
def test_what_cannot_be_planned(
    words: list[str], said: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    assert main(["plan", *(recipe if word == "RECIPE" else word for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_a_run_records_what_was_predicted_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan`, then the run, then `plan` again, which knows how far the first was off."""
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path / "home"))
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(
        SCRIPT.replace("LIBRARY", "windlass").replace("report_to", "max_steps=3, use_cpu=True, report_to")
    )
    words = ["plan", str(script), "--json", "--", str(out), "4"]
    assert main(words) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["errors"] is None
    for size, known in (("2", False), ("4", True)):
        end_of(script, out, size, environ={"WINDLASS_HOME": str(tmp_path / "home")})
        [session] = json.loads((out / "run.json").read_text())["sessions"]
        assert ("memory" in session) is known, "a batch of another size was not planned"
    memory = session["memory"]
    assert memory["predicted"] == planned["memory"]["peak"]
    assert memory["measured"] > memory["predicted"], "the libraries' first use counts too"
    assert main(words) == 0
    error = memory["predicted"] / memory["measured"] - 1
    assert json.loads(capsys.readouterr().out)["errors"] == {"runs": 1, "least": error, "most": error}
