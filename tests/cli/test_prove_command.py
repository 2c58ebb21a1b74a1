from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.cli.proving.families import FAMILIES
from tests.dist.launch import ROOT, end_of, launch, run_script

from windlass.cli.main import main

pytest.importorskip("transformers")
FAULTY = ROOT / "tests" / "cli" / "proving" / "faulty_prove.py"
RECIPE = """
data: {train: text.txt}
model: {config: {model_type: %s, %s}}
tokenizer: {train: {vocab_size: 2048}}
parallel: {tp: 2}
"""
# Fault -> the family, what is said of it, the layout, and the axes that are named.
FOUND = {
    "missing_sum_of_outputs": ("mistral", "loss in update 1", "tp=2", "tp=2"),
    "missing_sum_of_input_gradients": ("mistral", "gradient of model.norm.weight in update 1", "tp=2,cp=2", "tp=2"),
    "wrong_divisor": ("mistral", "loss in update 1", "cp=2", "cp=2"),
    "ignored_window": ("mistral", "loss in update 1", "tp=2,cp=2", "cp=2"),
    "tie_that_drifts": ("qwen3", "gradient of model.embed_tokens.weight in update 1", "dp=2", "dp=2"),
    "gradients_over_the_wrong_gang": ("mistral", "gradient of lm_head.weight in update 1", "tp=2,dp=2", "dp=2 tp=2"),
    "norm_of_a_shard": ("mistral", "norm in update 1", "tp=2", "tp=2"),
    "norm_per_rank": ("mistral", "norm in update 1, rank 1", "dp=2", "dp=2"),
    "tokens_counted_twice": ("mistral", "tokens in update 1", "tp=2", "tp=2"),
    "positions_of_the_part": ("mistral", "loss in update 1", "cp=2", "cp=2"),
    "keys_in_the_wrong_order": ("mistral", "loss in update 1", "cp=2", "cp=2"),
    "state_of_another_shard": ("mistral", "weight of", "dp_shard=2", "dp_shard=2"),
    "dropout_is_on": ("mistral", "loss in update 1", "tp=2", "tp=2"),
    "doubled_balancing_loss": ("mixtral-balanced", "loss in update 1", "dp=2", "dp=2"),
    "sum_of_parts_not_multiplied": ("mistral", "gradient of", "cp=2", "cp=2"),
    "average_twice": ("mistral", "gradient of", "dp=2", "dp=2"),
    "a_rank_dies": ("mistral", "rank 1 ended with exit code 9", "tp=2", "tp=2"),
    "a_rank_refuses": ("mistral", "", "tp=2", ""),
}  # fmt: skip


def recipe(folder: Path, family: str = "llama") -> Path:
    options: dict[str, Any] = {"num_key_value_heads": 8, **FAMILIES[family]}
    kind = options.pop("model_type", family)
    path = folder / "recipe.yaml"
    path.write_text(
        RECIPE % (kind, ", ".join(f"{key}: {json.dumps(value)}" for key, value in options.items()))
    )
    return path


def proofs(folder: Path, *faults: str) -> list[tuple[int, dict[str, Any], str]]:
    """Exit code, facts and output of a proof with each fault, which cannot be recorded. One process makes all: the
    server from which it forks takes seconds to start.
    """
    words: list[str] = []
    for fault in faults:
        family, _, layout, _ = FOUND[fault]
        place = folder / fault
        place.mkdir()
        words += ["--", fault, str(recipe(place, family)), "--layout", layout, "--json"]
    path = words[2]
    text = run_script(FAULTY, *words, cwd=folder, environ={"WINDLASS_HOME": path, "PYTHONPATH": str(ROOT)})
    made = []
    for said, code in re.findall(r"(.*?)^exit code (\d+)$", text, re.MULTILINE | re.DOTALL):
        found, _ = json.JSONDecoder().raw_decode(said[said.index("{\n") :])
        assert "the proof is not recorded" in said
        made.append((int(code), found, said))
    assert len(made) == len(faults), text
    return made


def check(fault: str, code: int, found: dict[str, Any], text: str) -> None:
    _, first, _, axes = FOUND[fault]
    assert (code, found["proven"], found["axes"]) == (1, False, axes.split()), text
    assert found["difference"].startswith(first), text


@pytest.mark.dist
def test_a_layout_is_proven_recorded_and_recognised_by_a_run(tmp_path: Path) -> None:
    path, environ = recipe(tmp_path), {"WINDLASS_HOME": str(tmp_path / "home")}
    words = ["prove", path, "training.max_grad_norm=0.5"]
    text = run_script("windlass", *words, cwd=tmp_path, environ=environ)
    assert re.search(r"proven: layout tp=2 computes what one process computes", text), text
    assert "16 heads for 32" in text
    [record] = (tmp_path / "home" / "proofs").iterdir()
    kept = json.loads(record.read_text())
    assert (kept["schema"], kept["status"], kept["layout"]) == ("windlass-prove/1", "equal", "tp=2")
    assert 0 < kept["verdicts"][0]["largest"] < 1e-10
    said = launch(2, ROOT / "tests" / "cli" / "proving" / "proven_run.py", tmp_path, "tp=2", environ=environ)
    assert said.count(f"layout tp=2: proven on {kept['date']}") == 1, said
    other = "only models of AutoModelForCausalLM are proven, and this one is a LlamaForSequenceClassification"
    assert f"layout tp=2: not proven equal to one process: {other}" in said
    said = launch(2, ROOT / "tests" / "cli" / "proving" / "proven_run.py", tmp_path, "cp=2", environ=environ)
    command = "windlass prove RECIPE_OR_CONFIG.JSON --layout cp=2"
    assert f"layout cp=2: not proven equal to one process; prove it with: {command}" in said


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, dict[str, Any], str]]:
    faults = ("ignored_window", "a_rank_refuses")
    return dict(zip(faults, proofs(tmp_path_factory.mktemp("proofs"), *faults), strict=True))


@pytest.mark.dist
def test_a_fault_is_found_with_its_axis(made: dict[str, Any]) -> None:
    check("ignored_window", *made["ignored_window"])


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("mixtral-balanced", "ep=2"),
        ("qwen3", "pp=2"),
        ("qwen3", "pp=2,cp=2"),
        ("mixtral", "pp=2,ep=2"),
        ("llama", "cp=2,sp=2"),
        ("mixtral-balanced", "ep=2,tp=2"),
        ("mixtral", "ep=2,cp=2"),
    ],
)
def test_other_axes_are_proven(tmp_path: Path, family: str, layout: str) -> None:
    words = ["prove", recipe(tmp_path, family), "--layout", layout]
    assert "proven: layout" in run_script(
        "windlass", *words, cwd=tmp_path, environ={"WINDLASS_HOME": str(tmp_path)}
    )


@pytest.mark.slow
@pytest.mark.dist
def test_no_family_is_reported_falsely(tmp_path: Path) -> None:
    script = ROOT / "tests" / "cli" / "proving" / "families.py"
    run_script(
        script, tmp_path, "tp=2;cp=2;dp=2;sp=2;dp_shard=2", environ={"PYTHONPATH": str(ROOT)}, timeout=3600
    )
    found = json.loads((tmp_path / "found.json").read_text())
    states = {(family, layout): state for family, of in found.items() for layout, (state, _) in of.items()}
    assert len(found) >= 20
    assert set(states.values()) == {"equal", "refused"}, states
    assert sum(state == "equal" for state in states.values()) > 100


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("fault", sorted(FOUND.keys() - {"a_rank_refuses"}))
def test_faults_planted_by_hand_are_found(tmp_path: Path, fault: str) -> None:
    check(fault, *proofs(tmp_path, fault)[0])


@pytest.mark.dist
def test_a_layout_that_one_rank_alone_refuses(made: dict[str, Any]) -> None:
    code, found, text = made["a_rank_refuses"]
    assert (code, found["status"]) == (2, "refused"), text
    assert "is refused by one rank" in found["difference"]


@pytest.mark.slow
@pytest.mark.dist
def test_a_layout_that_is_refused_says_why(tmp_path: Path) -> None:
    words = ["prove", recipe(tmp_path, "stablelm"), "--json"]
    code, text = end_of("windlass", *words, cwd=tmp_path, environ={"WINDLASS_HOME": str(tmp_path)})
    found = json.loads(text[text.index("{\n") :])
    assert (code, found["status"], found["proven"]) == (2, "refused", False)
    assert "has no plan for tensor parallelism" in found["difference"]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--layout", "tensr=2"], "there is no axis 'tensr'; did you mean 'tensor'?"),
        (["--layout", "tp=1"], "there is nothing to compare on one process"),
        (["task=classification", "data.train=x.csv"], "is not proven yet"),
        (["model.name=absent/model", "--layout", "tp=2"], "is not on this machine"),
    ],
)
def test_mistakes_are_named(
    words: list[str], fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", str(recipe(tmp_path)), *words]) == 2
    assert fix in capsys.readouterr().err


def test_whether_positions_are_divided_is_true_or_false(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    words = ["parallel.tp_sequence_parallel=maybe", "--layout", "tp=2"]
    assert main(["prove", str(tmp_path / "config.json"), *words]) == 2
    assert "parallel.tp_sequence_parallel='maybe': must be true or false" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["absent/config.json", "generation_config.json", "."])
def test_only_the_configuration_of_a_model_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    assert main(["prove", name, "--layout", "tp=2"]) == 2
    assert (
        f"RECIPE='{name}': is not the configuration of a model; give the config.json"
        in capsys.readouterr().err
    )
