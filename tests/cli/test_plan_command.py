"""`windlass plan`: what it prints, as text and as JSON, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import end_of

from windlass.cli import plan_fit
from windlass.cli.main import main
from windlass.cli.plan_command import plan_command
from windlass.cli.plan_fit import Looks, Tried, find_layout
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.mesh import Mesh
from windlass.forecast.child import Child, apart
from windlass.forecast.forecast import SCHEMA
from windlass.forecast.layouts import Cost, Devices, Layout, layouts
from windlass.forecast.meter import Instant, Owner, Peak
from windlass.forecast.size import Size
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
print(f"not part of the plan")
Trainer(model, args, train_dataset=rows).train()
raise AssertionError("the script goes on")
"""


TAKES_HALF = """\
class Half(Trainer):
    def get_batch_samples(self, *args):
        batches, count = super().get_batch_samples(*args)
        return [{name: value[:, :8] for name, value in batch.items()} for batch in batches], count

Half(model"""


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
    out = capsys.readouterr().out
    assert "replicas 2: as the recipe is" in out
    assert f"{len(list(layouts(2, 1))) - 1} more cost as much or more" in out


@pytest.mark.slow
def test_what_does_not_fit_is_told_with_the_least(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every layout is planned, refused, or known to need more than one that was planned."""
    monkeypatch.setattr(Devices, "room", 400_000)
    assert main(["plan", recipe, "--fit", "2x1GB"]) == 2
    out, err = capsys.readouterr()
    assert "no layout fits: the least is" in err
    lines = [line.strip() for line in out.splitlines()[2:]]
    more = sum(int(line.partition(" more ")[0]) for line in lines if " more " in line)
    assert len([line for line in lines if "does not fit" in line or "refused: " in line]) + more == len(
        list(layouts(2, 1))
    )


SIZE = Size(1, 0, 0, 1, 1, 1, 4, 0)


def priced(*layouts: Layout) -> list[tuple[Cost, Layout]]:
    return [(Cost(1.0 + number, False, 0.0, 0), layout) for number, layout in enumerate(layouts)]


@pytest.mark.parametrize("forks", [True, False])
def test_the_cheapest_that_fits_is_taken_and_it_says_why_others_are_passed_over(
    forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without models: the traces are made up."""
    monkeypatch.setattr(Child, "can_fork", forks)
    peaks = {"replicas 4": 2000, "replicas 4, recomputed": 1500, "pipeline 4, recomputed": 1000}

    def check(layout: Layout) -> None:
        if layout.sharded:
            raise ModelError("no shards today")
        if layout.mesh.expert > 1:
            raise ConfigError(Problem("model", "Llama", "has no experts"))
        if layout.mesh.tensor > 1:
            raise ConfigError(Problem("tp_size", layout.mesh.tensor, "no such heads"))

    def trace(layout: Layout) -> Trace:
        check(layout)
        return held(peaks[layout.name])

    order = priced(
        Layout(Mesh(replicate=4)),
        Layout(Mesh(shard=4), sharded=True),
        Layout(Mesh(replicate=2, expert=2)),
        Layout(Mesh(pipeline=2, tensor=2)),
        Layout(Mesh(expert=4)),
        Layout(Mesh(replicate=2, tensor=2)),
        Layout(Mesh(tensor=2, shard=2), sharded=True),
        Layout(Mesh(replicate=4), recomputed=True),
        Layout(Mesh(pipeline=4), recomputed=True),
    )
    lines: list[str] = []
    layout, found = find_layout(Looks(trace, check), order, SIZE, Devices(4, 1700), lines.append)
    assert (layout.name, found.peak[1].total) == ("replicas 4, recomputed", 1500)
    assert [" ".join(line.split()) for line in lines] == [
        "replicas 4 1.00 1.953 KiB does not fit",
        "shards 4: refused: no shards today",
        "replicas 2 x experts 2: refused: model='Llama': has no experts",
        "pipeline 2 x tensor 2: refused: tp_size=2: no such heads",
        "replicas 4, recomputed 8.00 1.465 KiB fits",
        "1 more with expert, refused as above",
        "1 more with tensor 2, refused as above",
        "1 more with sharded, refused as above",
        "1 more cost as much or more",
    ]
    with pytest.raises(ConfigError, match=r"the least is 1000 B of a rank \(pipeline 4, recomputed"):
        find_layout(Looks(trace, check), order, SIZE, Devices(4, 500), lines.append)


def test_a_number_of_ranks_with_samples_is_refused_and_not_what_divides_them_further() -> None:
    order = priced(
        Layout(Mesh(replicate=4)),
        Layout(Mesh(shard=4), sharded=True),
        Layout(Mesh(replicate=4), recomputed=True),
        Layout(Mesh(shard=2, tensor=2), sharded=True),
    )

    def check(layout: Layout) -> None:
        if layout.mesh.replicate * layout.mesh.shard > 2:
            raise ConfigError(Problem("global_batch_size", 2, "must be a multiple of 4"))

    def trace(layout: Layout) -> Trace:
        check(layout)
        return held(100)

    lines: list[str] = []
    layout, _ = find_layout(Looks(trace, check), order, SIZE, Devices(4, 1000), lines.append)
    assert layout.name == "shards 2 x tensor 2"
    assert " ".join(lines[-1].split()) == "2 more with samples over 4 ranks, refused as above"

    def refuse(layout: Layout) -> None:
        raise ConfigError(Problem("learning_rate", -1, "must be at least 0"))

    with pytest.raises(ConfigError, match="the run refuses every layout that could fit: learning_rate"):
        find_layout(Looks(refuse, refuse), order, SIZE, Devices(4, 1000), lines.append)  # type: ignore[arg-type]
    assert " ".join(lines[-1].split()) == "3 more with any axes, refused as above"


def test_what_cannot_fit_is_not_planned() -> None:
    """Weights, and what another layout took of what the next divides no further."""
    order = priced(
        Layout(Mesh(replicate=8)),
        Layout(Mesh(shard=2, replicate=4), sharded=True),
        Layout(Mesh(shard=8), sharded=True),
    )
    lines: list[str] = []

    def trace(layout: Layout) -> Trace:
        return held(1200, "weights") if layout.mesh.shard == 2 else held(100)

    find_layout(
        Looks(trace, lambda layout: None), order, SIZE._replace(held=1000), Devices(8, 1000), lines.append
    )
    assert [" ".join(line.split()) for line in lines] == [
        "replicas 4 x shards 2 2.00 1.172 KiB does not fit",
        "shards 8 3.00 100 B fits",
        "1 more need above 900 B by what those took",
    ]


def test_what_one_layout_says_of_another() -> None:
    """Recomputation saves activations, and those of one number of stages have other layers than of another."""
    tried = Tried(Layout(Mesh(tensor=2)), 100, held={"state": 60, "activations": 30, "gathered": 10})
    assert tried.least(Layout(Mesh(tensor=4))) == 50
    assert tried.least(Layout(Mesh(tensor=4), recomputed=True)) == 30
    assert tried.least(Layout(Mesh(tensor=2, shard=2), sharded=True)) == 60
    assert tried.least(Layout(Mesh(pipeline=4))) == 55
    stages = Tried(Layout(Mesh(pipeline=4)), 100, held={"state": 60, "activations": 40})
    assert stages.least(Layout(Mesh(tensor=4))) == stages.least(Layout(Mesh(pipeline=8))) == 0
    assert stages.least(Layout(Mesh(pipeline=4, tensor=2))) == 50


def test_temporaries_of_an_optimizer_are_divided_as_its_parameters_are() -> None:
    order = priced(Layout(Mesh(shard=2), sharded=True), Layout(Mesh(shard=8), sharded=True))

    def trace(layout: Layout) -> Trace:
        return held(1200, "temporary") if layout.mesh.shard == 2 else held(300)

    found, _ = find_layout(
        Looks(trace, lambda layout: None), order, SIZE, Devices(8, 1000), lambda line: None
    )
    assert found.mesh.shard == 8


@pytest.mark.slow
def test_what_is_passed_over_does_not_change_what_is_found(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With every layout planned until one fits, in devices of each size that separates two of them."""
    peaks: dict[str, int] = {}
    looks: list[tuple[Looks, Any, Size]] = []

    def every(given: Looks, priced: Any, size: Size, devices: Devices, say: Any) -> Any:
        looks.append((given, priced, size))
        raise ModelError("looked at")

    monkeypatch.setattr(plan_fit, "find_layout", every)
    with pytest.raises(ModelError):
        plan_command([recipe, "--fit", "2x1GB", "training.gradient_accumulation_steps=2"])
    (own, priced, size) = looks[0]
    known: dict[str, dict[str, Any] | Exception] = {}

    def trace(layout: Layout) -> Trace:
        found = known[layout.name]
        if isinstance(found, Exception):
            raise found
        return Trace.from_dict(found)

    for _, layout in priced:
        try:
            known[layout.name] = apart(lambda layout=layout: own.trace(layout).to_dict())  # type: ignore[misc]
            peaks[layout.name] = trace(layout).peak[1].total
        except (ConfigError, ModelError) as error:
            known[layout.name] = error
    assert len(peaks) > 8
    for room in sorted(peaks.values()):
        monkeypatch.setattr(Devices, "room", room)
        cheapest = next(layout.name for _, layout in priced if peaks.get(layout.name, room + 1) <= room)
        found, _ = find_layout(Looks(trace, own.check), priced, size, Devices(2, 1), lambda line: None)
        assert found.name == cheapest, room


def held(nbytes: int, kind: str = "batch") -> Trace:
    """A trace whose peak is so large."""
    peak = Peak(nbytes, {Owner(kind, ""): nbytes})
    return Trace({Instant("optimizer step", "", ""): peak}, Counter(), Counter())


def test_a_script_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is stopped at `train()`, and writes nothing."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("LIBRARY", "windlass").replace("the plan", "the plan {sys.argv[3:]}"))
    monkeypatch.chdir(tmp_path)
    assert main(["plan", str(path), "--json", "--", "run", "3", "--", "x"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["update"]["samples"] == 3
    assert "not part of the plan ['--', 'x']" in out.err
    assert not (tmp_path / "run").exists()


def test_batches_are_planned_as_the_script_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "script.py"
    script = SCRIPT.replace("LIBRARY", "windlass")
    monkeypatch.chdir(tmp_path)
    for text, positions in ((script, 48), (script.replace("Trainer(model", TAKES_HALF), 24)):
        path.write_text(text)
        assert main(["plan", str(path), "--json", "--", "run", "3"]) == 0
        assert json.loads(capsys.readouterr().out)["update"]["positions"] == positions


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
        (["RECIPE", "--device", "h1000"], "--device='h1000': must be one of h200, h100, "),
        (["RECIPE", "--world", "0"], "--world=0: must be from 1 to 999999"),
        (["RECIPE", "--world", "1000000"], "--world=1000000: must be from 1 to 999999"),
        (["RECIPE", "--world", "3", "parallel.mesh.tp=2"], "tp"),
        (["RECIPE", "--no-such-flag"], "--no-such-flag"),
        (["RECIPE", "--fit", "8"], "such as 8x80GB"),
        (["RECIPE", "--fit", "2x1GB", "--world", "3"], "contradicts --fit 2x1GB"),
        (["RECIPE", "--fit", "8x100GB", "--device", "h100"], "has 80 GB"),
        (["empty.py", "--fit", "8x80GB"], "this is a script"),
        (["missing.py"], "SCRIPT='missing.py': there is no such file"),
        (["missing.yaml"], "missing.yaml"),
        (["pythondocs"], "is neither a recipe"),
        (["."], "is neither a recipe"),
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
