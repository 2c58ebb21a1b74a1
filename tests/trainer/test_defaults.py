"""What holds for every rank before a run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.nonfinite_cases import Weights, trainer_for
from tests.trainer.small import arguments
from torch import nn

from windlass import Trainer
from windlass.core.errors import ConfigError
from windlass.trainer.defaults import place_model
from windlass.trainer.run_folder import check_writable


class OwnOptimizer(Trainer):
    def create_optimizer(self, *args: Any, **options: Any) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer


@pytest.mark.dist
def test_a_folder_that_cannot_be_written_is_refused_on_every_rank(tmp_path: Path) -> None:
    said = on_ranks(2, into_a_file, tmp_path)
    assert said[0] == said[1]
    assert "output_dir=" in said[0]
    assert "can't be written" in said[0]


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=rf"it is a link to {tmp_path / 'gone'}, which is not there"):
        check_writable(str(link), str(link))


def test_objects_beside_the_same_section_of_deepspeeds_configuration_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    config = {
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    }
    args = arguments(tmp_path, deepspeed=config)
    with pytest.raises(ConfigError) as refused:
        Trainer(model, args, optimizers=(optimizer, schedule))
    text = str(refused.value)
    assert "deepspeed.optimizer.type='AdamW': contradicts optimizers[0]=SGD of the Trainer" in text
    assert "deepspeed.scheduler.type='WarmupLR': contradicts optimizers[1]=ConstantLR of the Trainer" in text
    with pytest.raises(ConfigError, match=r"contradicts optimizer_cls_and_kwargs=SGD of the Trainer"):
        Trainer(model, args, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}))
    with pytest.raises(
        ConfigError, match=r"optimizer.type='AdamW': contradicts the overridden create_optimizer:"
    ):
        OwnOptimizer(model, args)
    del config["optimizer"], config["scheduler"]
    Trainer(model, arguments(tmp_path, deepspeed=config), optimizers=(optimizer, schedule))
    OwnOptimizer(model, arguments(tmp_path, deepspeed=config))


# --- what each rank runs ----------------------------------------------------------------------------------------------


def into_a_file(folder: Path) -> str:
    said = ""
    (folder / "a file").touch()
    trainer = trainer_for(folder / "a file" / "out", None, Weights())
    try:
        trainer.train()
    except ConfigError as error:
        said = str(error)
    trainer.end()
    return said


@pytest.mark.parametrize(
    ("places", "method", "moved"),
    [
        ({}, None, True),
        ({}, "torchao", True),  # which its loader leaves on the host
        ({"": 0}, "bitsandbytes", True),  # which it puts on the first device, whatever the rank
        ({"a": 0, "b": 1}, None, False),
    ],
)
def test_a_model_on_one_other_device_is_moved(
    places: dict[str, int], method: str | None, moved: bool
) -> None:
    model: Any = nn.Linear(2, 1)
    model.hf_device_map, model.quantization_method = places, method
    place_model(model, torch.device("meta"))
    assert model.weight.is_meta == moved
