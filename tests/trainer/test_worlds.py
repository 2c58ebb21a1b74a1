"""A checkpoint of any number of ranks, replicated or sharded, in parts or whole, goes on in every other of them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from tests.dist.forked import in_a_world
from tests.dist.launch import on_ranks
from tests.trainer.elastic_ranks import StopAt
from tests.trainer.small import arguments, rows
from torch import Tensor, nn

from windlass import Trainer, read_metrics
from windlass.checkpoint.stored import open_folder, open_optimizer, open_weights
from windlass.dist.sharded import is_sharded, local, whole

SAMPLES, STOP, LAST = 44, 3, 6
SHARDED: dict[str, Any] = {"fsdp": "full_shard"}
WHOLE: dict[str, Any] = {**SHARDED, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}
# Name of a layout: number of ranks, how they train, and the layout that its checkpoints have.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "ddp2": (2, {}),
    "ddp4": (4, {}),
    "fsdp2": (2, SHARDED),
    "fsdp4": (4, SHARDED),
    "fsdp2-whole": (2, WHOLE),
    "fsdp4-whole": (4, WHOLE),
}
TARGETS = ("alone", "ddp2", "ddp4", "fsdp2", "fsdp4")
PAIRS = [(source, target) for source in LAYOUTS for target in TARGETS if target != source.partition("-")[0]]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Blocks(nn.Module):
    """Rows that four ranks cannot share alike: of five, the last rank has none. Weights are tied in the root, and
    between two of the blocks, which are units of their own where nothing ties them.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.into = nn.Linear(4, 5)
        self.blocks = nn.ModuleList([Block(5) for _ in range(3)])
        self.blocks[2].mix.weight = self.blocks[0].mix.weight
        self.out, self.again = nn.Linear(5, 3), nn.Linear(5, 3)
        self.again.weight = self.out.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.into(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.out(hidden) + self.scale * self.again(torch.relu(hidden))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train(folder: Path, how: dict[str, Any], *, stop: int = 0, resume: bool = False) -> Trainer:
    """Train to the end, or to update `stop` and save there."""
    args = arguments(
        folder,
        max_steps=LAST,
        global_batch_size=8,
        per_device_train_batch_size=2,
        logging_steps=1,
        max_grad_norm=0.5,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        save_strategy="steps" if stop else "no",
        save_steps=100,
        **how,
    )
    data = [{**row, "x": row["x"].double()} for row in rows(SAMPLES)]
    trainer = Trainer(Blocks(), args, train_dataset=data, callbacks=[StopAt(stop)] if stop else [])
    trainer.train(resume_from_checkpoint=resume or None)
    assert any(is_sharded(p) for p in trainer.model.parameters()) == bool(how)
    check_ties(trainer.model)
    return trainer


def check_ties(model: Any) -> None:
    """Tied weights are the same parameter, and one memory on every rank."""
    for one, other in ((model.out, model.again), (model.blocks[0].mix, model.blocks[2].mix)):
        assert one.weight is other.weight
        assert local(one.weight).data_ptr() == local(other.weight).data_ptr()


def save_all(folder: Path, size: int) -> None:
    for name, (ranks, how) in LAYOUTS.items():
        if ranks == size:
            train(folder / name, how, stop=STOP)


def continue_all(folder: Path, size: int) -> None:
    for source, target in PAIRS:
        ranks, how = LAYOUTS[target]
        if ranks == size:
            place = folder / f"{source}-{target}"
            tell(place, train(place, how, resume=True))


def tell(folder: Path, trainer: Trainer) -> None:
    """Leave in `outcome.json` what the run came to: the loss of every update, and its last weights."""
    weights = {name: whole(p.detach()).flatten().tolist() for name, p in trainer.model.named_parameters()}
    if os.environ["RANK"] == "0":
        said = [
            (row["step"], row["loss"], row["grad_norm"])
            for row in read_metrics(folder / "metrics.jsonl")
            if "loss" in row
        ]
        (folder / "outcome.json").write_text(json.dumps({"said": said, "weights": weights}))


def main(folder: Path) -> None:
    clean = folder / "clean"
    in_a_world(1, folder / "meeting", lambda: tell(clean, train(clean, {})))
    for size in (1, 2, 4):
        in_a_world(size, folder / f"meeting-save-{size}", partial(save_all, folder, size))
    for source, target in PAIRS:
        shutil.copytree(folder / source, folder / f"{source}-{target}")
    for size in (1, 2, 4):
        in_a_world(size, folder / f"meeting-continue-{size}", partial(continue_all, folder, size))


# --- tests ------------------------------------------------------------------------------------------------------------


TOLERANCE = 1e-12

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="windlass-") as name:
        on_ranks(1, main, Path(name), timeout=500)
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
