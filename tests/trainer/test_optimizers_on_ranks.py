"""Each optimizer on two ranks, replicated and sharded: the same run, continued to the bit, or refused at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.optimizer_cases import FAMILIES, IN_8_BITS, resumes_to_the_bit, run, weights
from tests.trainer.small import Net, arguments, rows
from torch import nn

from windlass import Accelerator, FullyShardedDataParallelPlugin, Trainer
from windlass.core.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.dist


# All of them take minutes. These have states of other shapes than their parameters, or two modes.
SOME = ["adafactor", "schedule_free_adamw", "adamw_torch_8bit"]


@pytest.fixture(scope="module", params=[SOME, pytest.param([], marks=pytest.mark.slow)], ids=["some", "all"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    for package in ("bitsandbytes", "torchao"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("optimizers")
    return on_ranks(2, main, folder, request.param)[0]


def test_runs_continue_to_the_bit(made: dict[str, Any]) -> None:
    assert len(made["resumed"]) >= len(SOME)
    assert [name for name, same in made["resumed"].items() if not same] == []


def test_a_sharded_run_is_the_replicated_one(made: dict[str, Any]) -> None:
    far = {name: gap for name, gap in made["near"].items() if gap > 1e-4}
    # Signs of gradients near 0, products in bf16, averages in blocks of another place, and directions of a basis in
    # which the gradient has no part differ.
    assert far.keys() <= {
        "adamw_torch_8bit", "adamw_torch_4bit", "galore_adamw_8bit", "muon", "lion_32bit",
    }, made["near"]  # fmt: skip
    assert all(gap < 0.1 for gap in made["near"].values())


def test_what_cannot_be_done_is_refused_at_the_start(made: dict[str, Any]) -> None:
    for where in ("8bit", "8bit of a loop"):
        assert "bitsandbytes cannot update sharded parameters: use adamw_torch_8bit" in made["refused"][where]
    assert "ranks that hold the same weights would round them differently" in made["refused"]["rounding"]
    assert "register_for_checkpointing='SGD': its state is divided among ranks" in made["refused"]["another"]


# --- what each rank runs ----------------------------------------------------------------------------------------------


# Those whose states are not all of their parameters' shapes, and one with two modes.
GATHERED = ("adafactor", "schedule_free_adamw", "adamw_torch_8bit", "adamw_torch_4bit")
IN_PARTS: dict[str, Any] = {"fsdp": "full_shard"}
WHOLE: dict[str, Any] = {**IN_PARTS, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}


@torch.compiler.set_stance("force_eager")
def main(folder: Path, some: list[str]) -> dict[str, Any]:
    """What happened to runs with all optimizers, or sharded ones with `some`."""
    made: dict[str, Any] = {"resumed": {}, "near": {}, "refused": {}}
    for optim in some or FAMILIES:
        made["resumed"][f"{optim} in parts"] = resumes_to_the_bit(folder / optim / "parts", optim, **IN_PARTS)
        if not some:
            made["near"][optim] = distance(folder / optim)
    for optim in () if some else GATHERED:
        made["resumed"][f"{optim} whole"] = resumes_to_the_bit(folder / optim / "whole", optim, **WHOLE)
    for optim in () if some else (*GATHERED, IN_8_BITS[0]):
        made["resumed"][f"{optim} replicated"] = resumes_to_the_bit(folder / optim / "replicated", optim)
    made["refused"]["8bit"] = refused(folder / "8bit", IN_8_BITS[0], **IN_PARTS)
    made["refused"]["8bit of a loop"] = refused_by_a_loop()
    made["refused"]["rounding"] = refused(
        folder / "rounding", "adamw_torch_8bit", optim_args="bf16_stochastic_round=True"
    )
    made["refused"]["another"] = refused_beside_another(folder / "another")
    return made


def distance(folder: Path) -> float:
    """The largest difference between weights of a replicated and a sharded run, over their size."""
    name = folder.name
    one = weights(run(folder / "one", name, 4, watched=False))
    other = weights(run(folder / "other", name, 4, watched=False, **IN_PARTS))
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(one, other, strict=True))


def refused(folder: Path, optim: str, **changes: Any) -> str:
    try:
        run(folder, optim, 1, **changes)
    except ConfigError as error:
        return str(error)
    return ""


def refused_by_a_loop() -> str:
    """An optimizer that was made before the model is sharded."""
    import bitsandbytes

    model = nn.Linear(4, 4)
    optimizer = bitsandbytes.optim.Lion8bit(model.parameters())
    try:
        Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()).prepare(model, optimizer)
    except ConfigError as error:
        return str(error)
    return ""


def refused_beside_another(folder: Path) -> str:
    """A second optimizer of sharded weights, registered for checkpoints. It has no state before its first update."""
    args = arguments(folder, save_strategy="steps", **IN_PARTS)

    class Twice(Trainer):
        def create_optimizer(self) -> Any:
            second = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            self.accelerator.register_for_checkpointing(second)
            return super().create_optimizer()

    try:
        Twice(Net(), args, train_dataset=rows(8)).train()
    except CheckpointError as error:
        return str(error)
    return ""
