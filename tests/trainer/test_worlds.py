"""A checkpoint of any number of ranks, replicated or sharded, in parts or whole, goes on in every other of them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import launch
from tests.trainer.worlds_ranks import LAST, LAYOUTS, PAIRS, STOP

from windlass.checkpoint.stored import open_folder, open_optimizer, open_weights

SCRIPT = Path(__file__).parent / "worlds_ranks.py"
TOLERANCE = 1e-12

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="windlass-") as name:
        launch(1, SCRIPT, name, timeout=500)
        yield Path(name)


def outcome(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "outcome.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_layouts_are_what_was_asked_for(folder: Path, name: str) -> None:
    files = {path.name for path in (folder / name / f"checkpoint-{STOP}").iterdir()}
    in_parts = bool(LAYOUTS[name][1]) and not name.endswith("whole")
    holders = min(LAYOUTS[name][0], 3)  # of five rows, cut in pairs, a fourth rank has none
    for stem in ("model", "optimizer"):
        of_ranks = {file for file in files if file.startswith(f"{stem}-rank-")}
        assert len(of_ranks) == (holders if in_parts else 0)
        assert (f"{stem}.parts.json" in files) == in_parts
    assert ("model.safetensors" in files) == (not in_parts)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_tied_weights_are_saved_once_with_one_state(folder: Path, name: str) -> None:
    with open_weights(open_folder(folder / name / f"checkpoint-{STOP}")) as tensors:
        assert tensors.aliases == {
            "again.weight": "out.weight",
            "blocks.2.mix.weight": "blocks.0.mix.weight",
        }
        assert not tensors.aliases.keys() & set(tensors.names)
        weights = set(tensors.names)
    with open_optimizer(open_folder(folder / name / f"checkpoint-{STOP}")) as tensors:
        assert set(tensors.names) == {
            f"{n}/{key}" for n in weights for key in ("step", "exp_avg", "exp_avg_sq")
        }


def test_clipping_and_the_schedule_have_a_part_in_it(folder: Path) -> None:
    said = outcome(folder / "clean")["said"]
    assert [step for step, _, _ in said] == list(range(1, LAST + 1))
    assert all(norm > 0.5 for _, _, norm in said), "every update is clipped"


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_world_goes_on_from_every_other(folder: Path, source: str, target: str) -> None:
    clean, found = outcome(folder / "clean"), outcome(folder / f"{source}-{target}")
    assert len(found["said"]) == LAST
    for ours, theirs in zip(found["said"], clean["said"], strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=TOLERANCE)
    assert found["weights"].keys() == clean["weights"].keys()
    for name, values in clean["weights"].items():
        assert found["weights"][name] == pytest.approx(values, rel=0, abs=TOLERANCE), name
