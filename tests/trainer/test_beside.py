"""Models that a script prepares beside the trained one: `train()` leaves them alone, and they can be called."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import launch
from tests.trainer import preference_trainer
from tests.trainer.beside_ranks import WAYS, preferences, trained_beside

SCRIPT = Path(__file__).parent / "beside_ranks.py"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("beside")
    launch(2, SCRIPT, folder)
    first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second, "ranks disagree"
    return first  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return preferences(tmp_path_factory.mktemp("alone"))


def test_preferences_are_learned(alone: dict[str, Any]) -> None:
    assert alone["before"]["eval_loss"] == pytest.approx(0.6931471805599453), "the model is its own reference"
    assert alone["after"]["eval_loss"] < 0.5
    assert alone["after"]["eval_accuracy"] == 1.0


@pytest.mark.dist
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_learn_the_same(said: dict[str, Any], alone: dict[str, Any], way: str) -> None:
    found = said[f"preferences {way}"]
    for when in ("before", "after"):
        assert found[when] == pytest.approx(alone[when], rel=1e-12)
    same_weights(found["weights"], alone["weights"])


def same_weights(found: list[Any], wanted: list[Any]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        one, other = (torch.tensor(weight, dtype=torch.float64) for weight in (ours, theirs))
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.dist
@pytest.mark.parametrize("way", WAYS)
def test_a_second_model_is_trained_beside(said: dict[str, Any], tmp_path: Path, way: str) -> None:
    """Work that is discarded before the first update does not train it either."""
    same_weights(said[f"trained_beside {way}"]["weights"], trained_beside(tmp_path)["weights"])


def test_the_script_is_short_and_uses_public_names() -> None:
    text = Path(preference_trainer.__file__).read_text()
    assert len(text.splitlines()) < 150
    names = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert not {name for name in names if name.startswith("_") and name != "__init__"}
