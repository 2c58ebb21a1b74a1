"""What earlier versions wrote can be continued: a folder of their checkpoints and recipes is kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.dist.launch import launch, run_script

from windlass.checkpoint.store import Store
from windlass.recipes.recipe import load_recipe

KEPT = Path(__file__).parent / "written_before"
SCRIPT = KEPT / "runs.py"


@pytest.mark.parametrize(
    ("case", "world"), [("trainer", 1), ("trainer", 2), ("sharded", 2), ("sharded", 1), ("loop", 1)]
)
def test_an_earlier_run_is_continued(tmp_path: Path, case: str, world: int) -> None:
    """On as many processes it ends with the same numbers. Other processors round differently in the last digits."""
    folder = tmp_path / case
    shutil.copytree(KEPT / case, folder)
    (folder / "end.json").unlink()
    if world == 1:
        run_script(SCRIPT, case, folder, "resume")
    else:
        launch(world, SCRIPT, case, folder, "resume")
    expected, found = (json.loads((place / "end.json").read_text()) for place in (KEPT / case, folder))
    assert found["weights"].keys() == expected["weights"].keys()
    same = (case, world) in (("trainer", 1), ("sharded", 2), ("loop", 1))
    if same:
        assert found["history"] == pytest.approx(expected["history"], rel=1e-5)
        for name, value in expected["weights"].items():
            assert torch.allclose(
                torch.tensor(found["weights"][name]), torch.tensor(value), rtol=1e-5, atol=1e-7
            )
    else:  # the update keeps its samples only if the arguments ask for it: what is continued is its beginning
        assert found["history"][:3] == pytest.approx(expected["history"][:3], rel=1e-5)
        assert len(found["history"]) == len(expected["history"])


@pytest.mark.parametrize("case", ["trainer", "sharded"])
def test_an_earlier_checkpoint_verifies(case: str) -> None:
    assert [info.step for info in Store(KEPT / case).list()] == [3]


def test_an_earlier_recipe_is_read(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n" * 50)
    recipe = load_recipe(str(KEPT / "recipe.yaml"), [f"data.train={text}"])
    assert recipe.training
