"""Two ranks whose folders lie on different disks, and saves in the background; run by `test_saving_ranks.py`."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator.loop_cases import loader, make, tiny
from tests.trainer.adapter_cases import adapted
from torch import Tensor, nn
from torch.nn import functional as F

from windlass import Accelerator
from windlass.checkpoint import nodes
from windlass.checkpoint.files import Files
from windlass.config.loop_options import ProjectConfiguration
from windlass.core.errors import CheckpointError, ConfigError
from windlass.dist.sharded import is_sharded, whole

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
nodes.WAITS = (0.01, 0.05)  # these file systems show at once what others wrote
PARTS, WHOLE = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


def disk(name: str, rank: int = RANK) -> Path:
    return FOLDER / name / f"disk-{rank}"


def trained(shard: bool, kind: str = PARTS, **options: Any) -> tuple[Accelerator, nn.Module]:
    torch.manual_seed(8)
    accelerator, model = make(shard, kind, **options), tiny()
    model = nn.Sequential(*model, nn.BatchNorm1d(1, dtype=torch.float64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(accelerator))
    for x, y in data:
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model


def weights(accelerator: Accelerator, model: nn.Module) -> list[Tensor]:
    state = accelerator.unwrap_model(model).state_dict()
    return [whole(tensor.detach()).clone() for tensor in state.values()]


def spoil(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def comes_back(accelerator: Accelerator, model: nn.Module, folder: Path | str | None) -> None:
    before = weights(accelerator, model)
    if not any(map(is_sharded, model.parameters())):
        for tensor in before:  # each forward gives all ranks the first one's running statistics
            torch.distributed.broadcast(tensor, 0)
    spoil(model)
    accelerator.load_state(folder)
    for one, other in zip(weights(accelerator, model), before, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def joined(name: str) -> Path:
    """The folders of both disks, copied into one."""
    place = FOLDER / name / "joined"
    torch.distributed.barrier()
    if RANK == 0:
        for rank in (0, 1):
            shutil.copytree(disk(name, rank), place, dirs_exist_ok=True)
    torch.distributed.barrier()
    return place


def on_disks_of_their_own(shard: bool, background: bool) -> None:
    """Each disk has the files of its own rank, and what all share."""
    name = f"disks-{shard}-{background}"
    accelerator, model = trained(shard)
    for _ in range(2):
        saved = accelerator.save_state(disk(name) / "state", safe_serialization=False, background=background)
        folder = Path(saved)
        accelerator.wait_for_everyone()
    assert folder == disk(name) / "state"
    names = {path.name for path in folder.iterdir()}
    assert {"loop.json", "optimizer_0.json", f"rank-0000{RANK}.json"} <= names
    assert f"rank-0000{1 - RANK}.json" not in names
    assert ("model.parts.json" in names) == shard
    assert ("model.safetensors" in names) != shard
    comes_back(accelerator, model, folder)
    comes_back(accelerator, model, joined(name) / "state")
    with pytest.raises(
        CheckpointError, match=r"missing: this folder has what node 1 of 2 wrote|no such folder"
    ):
        accelerator.load_state(disk(name, 1 - RANK) / "state")


def numbered_on_disks_of_their_own() -> None:
    """The newest that stands on both disks; a number that exists on one is refused on both."""
    project = ProjectConfiguration(str(disk("numbered")), automatic_checkpoint_naming=True, total_limit=2)
    accelerator, model = trained(False, project_config=project)
    for _ in range(3):
        accelerator.save_state()
    names = sorted(path.name for path in (disk("numbered") / "checkpoints").iterdir())
    assert names == ["checkpoint_1", "checkpoint_2"]
    comes_back(accelerator, model, None)
    torch.distributed.barrier()
    if RANK == 0:
        shutil.rmtree(disk("numbered") / "checkpoints" / "checkpoint_2")
    torch.distributed.barrier()
    comes_back(accelerator, model, None)
    assert accelerator.save_iteration == 2
    with pytest.raises(CheckpointError, match="checkpoint_2 exists already"):
        accelerator.save_state()


def whole_tensors_of_shards() -> None:
    accelerator, _ = trained(True, WHOLE)
    with pytest.raises(ConfigError, match=r"lies on 2 disks.*use SHARDED_STATE_DICT"):
        accelerator.save_state(disk("whole") / "state")


def behind_a_url(shared: bool) -> None:
    """Machines with staging folders of their own upload into folders of their own."""
    url, place = f"file://{FOLDER}/bucket-{shared}", FOLDER / f"staging-{shared}"

    def stage(name: str) -> None:
        os.environ["WINDLASS_STAGING"] = str(place / name if shared else place / name / str(RANK))

    stage("first")
    accelerator, model = trained(False)
    accelerator.save_state(f"{url}/state", background=True)
    accelerator.wait_for_everyone()
    names = {path.name for path in (FOLDER / f"bucket-{shared}").iterdir()}
    assert names == ({"state"} if shared else {"node-00000", "node-00001"})
    stage("fresh")
    accelerator, model = trained(False)
    comes_back(accelerator, model, f"{url}/state")
    del os.environ["WINDLASS_STAGING"]


def committed_when_all_have_written() -> None:
    """Without a further call of any rank, once the slower one has written too."""
    go, folder = FOLDER / "go", FOLDER / "seen" / "state"

    def before(self: Files, operation: str, path: Path) -> None:
        while RANK == 1 and path.name.startswith("rank-00001") and not go.exists():
            time.sleep(0.01)

    accelerator, model = trained(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Files, "before", before)
        accelerator.save_state(folder, background=True)
        torch.distributed.barrier()
        assert not folder.exists()
        go.touch()
        while not folder.exists():
            time.sleep(0.01)
    comes_back(accelerator, model, folder)


def failed_on_one() -> None:
    """What one rank cannot write costs both of them the save, and both get the error."""
    accelerator, model = trained(False)
    folder = accelerator.save_state(FOLDER / "torn" / "state")
    spoil(model)

    def before(self: Files, operation: str, path: Path) -> None:
        if RANK == 1 and path.name.startswith("rank-00001"):
            raise OSError(5, "the disk is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Files, "before", before)
        accelerator.save_state(folder, background=True)
        with pytest.raises(CheckpointError, match="state was not saved"):
            accelerator.wait_for_everyone()
    now = weights(accelerator, model)
    accelerator.load_state(folder)
    assert not torch.equal(weights(accelerator, model)[0], now[0]), "the earlier one stands"
    accelerator.save_state(folder, background=True)
    accelerator.wait_for_everyone()


class FailsOnOne:
    """A script's object that has a state on the first rank alone."""

    def state_dict(self) -> dict[str, int]:
        if RANK == 1:
            raise KeyError("no state here")
        return {"seen": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def failed_to_return_its_state(kind: str) -> None:
    """What a rank cannot return must not leave the other one in an exchange of the optimizer's shards."""
    accelerator, _ = trained(True, kind)
    accelerator.register_for_checkpointing(FailsOnOne())
    with pytest.raises(KeyError if RANK == 1 else CheckpointError, match=r"no state here|another rank"):
        accelerator.save_state(FOLDER / f"failing-{kind}" / "state")


def adapters(shard: bool) -> None:
    accelerator, model = make(shard, WHOLE), adapted()
    model = accelerator.prepare(model)
    folder = Path(accelerator.save_state(FOLDER / f"adapters-{shard}" / "state"))
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "adapter_base.json"} <= names
    assert not {name for name in names if name.startswith("model")}
    before = weights(accelerator, model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(0.5)
    accelerator.load_state(folder)
    assert all(map(torch.equal, weights(accelerator, model), before))


def removed_on_the_main_process() -> None:
    """Hooks remove a model under `if is_main_process`: each rank writes its part of the one that is left."""
    accelerator, _ = trained(True)
    left = accelerator.prepare(nn.Sequential(*tiny(), nn.BatchNorm1d(1, dtype=torch.float64)))
    accelerator.register_save_state_pre_hook(lambda _, states, __: states.pop(0) if RANK == 0 else None)
    accelerator.register_load_state_pre_hook(lambda models, _: models.pop(0))  # type: ignore[arg-type, return-value]
    folder = accelerator.save_state(FOLDER / "removed" / "state")
    comes_back(accelerator, left, folder)
    # Of a load each process loads its own.
    accelerator.register_load_state_pre_hook(lambda models, _: models.clear() if RANK == 0 else None)
    with pytest.raises(CheckpointError, match="left other models on some processes"):
        accelerator.load_state(folder)


def hooks_get_the_modules_of_the_script() -> None:
    """As in accelerate, replicas too: scripts load a model's own weights into what the list holds."""
    accelerator = make(False)
    model = accelerator.prepare(tiny())
    own, kept = accelerator.unwrap_model(model), {}

    def save(models: list[nn.Module], states: list[dict[str, Tensor]], folder: str) -> None:
        assert models == [own]
        assert states.pop().keys() == own.state_dict().keys()
        kept.update({name: value.clone() for name, value in models[0].state_dict().items()})

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(lambda models, _: models.pop().load_state_dict(kept))  # type: ignore[arg-type, return-value]
    comes_back(accelerator, model, accelerator.save_state(FOLDER / "modules" / "state"))


for sharded in (False, True):
    for behind in (False, True):
        on_disks_of_their_own(sharded, behind)
    adapters(sharded)
numbered_on_disks_of_their_own()
whole_tensors_of_shards()
for together in (False, True):
    behind_a_url(together)
committed_when_all_have_written()
failed_on_one()
removed_on_the_main_process()
hooks_get_the_modules_of_the_script()
for layout in (WHOLE, PARTS):
    failed_to_return_its_state(layout)
print("SAVED ON ALL")
Accelerator(cpu=True).end_training()
