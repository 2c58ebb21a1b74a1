"""The accelerator as scripts see it: a world of one here, two ranks in tests/dist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from windlass.accelerator.accelerator import Accelerator
from windlass.config.plan import PrecisionPlan
from windlass.config.plugins import GradScalerKwargs
from windlass.core.errors import ConfigError, ModelError
from windlass.dist.gang import Gang

CPU = torch.device("cpu")


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator.of_run(Gang(), CPU, PrecisionPlan("bf16"), 4)


def test_a_world_of_one(accelerator: Accelerator) -> None:
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (
        1,
        0,
        0,
    )
    assert accelerator.is_main_process
    assert accelerator.is_local_main_process
    assert accelerator.is_last_process
    assert (accelerator.device, accelerator.gradient_accumulation_steps) == (CPU, 4)
    accelerator.wait_for_everyone()
    with accelerator.main_process_first():
        pass
    assert accelerator.on_main_process(lambda: 3)() == 3


@pytest.mark.parametrize(("compute", "shown"), [("fp32", "no"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_precision_is_named_as_scripts_know_it(compute: str, shown: str) -> None:
    accelerator = Accelerator.of_run(Gang(), CPU, PrecisionPlan(compute))  # type: ignore[arg-type]
    assert accelerator.mixed_precision == shown


def test_autocast_is_the_runs(accelerator: Accelerator) -> None:
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_gather_alone_is_the_tensor_itself(shape: tuple[int, ...], accelerator: Accelerator) -> None:
    tensor = torch.randn(shape)
    assert torch.equal(accelerator.gather(tensor), tensor)
    assert torch.equal(accelerator.gather_for_metrics(tensor), accelerator.gather(tensor))


def test_backward_belongs_to_a_run(accelerator: Accelerator) -> None:
    with pytest.raises(ModelError, match="outside a training step"):
        accelerator.backward(torch.ones(()))
    seen: list[object] = []
    accelerator.bind_backward(seen.append)
    accelerator.backward("loss")
    assert seen == ["loss"]
    accelerator.bind_backward(None)
    with pytest.raises(ModelError):
        accelerator.backward(torch.ones(()))


def test_the_trainer_spreads_its_objects_itself(accelerator: Accelerator) -> None:
    module = nn.Linear(1, 1)
    assert accelerator.prepare(module) is module
    assert accelerator.prepare(module, 3) == (module, 3)


def test_unwrapping_what_is_not_wrapped(accelerator: Accelerator) -> None:
    module = nn.Linear(1, 1)
    assert accelerator.unwrap_model(module) is module


@pytest.mark.parametrize(("argument", "value", "words"), [
    ("dataloader_config", {"split_batches": True}, "must be a DataLoaderConfiguration of windlass, and is a dict"),
    ("fsdp_plugin", True, "must be a FullyShardedDataParallelPlugin of windlass"),
    ("kwargs_handlers", GradScalerKwargs(), "must be a list, and is a GradScalerKwargs"),
    ("rng_types", "torch", "must be a list, and is a str"),
    ("step_scheduler_with_optimizer", "no", "must be True or False, and is a str"),
])  # fmt: skip
def test_arguments_of_another_kind_are_named(argument: str, value: Any, words: str) -> None:
    options: dict[str, Any] = {argument: value, "cpu": True}
    with pytest.raises(ConfigError, match=rf"Accelerator\({argument}=\)=.*{words}"):
        Accelerator(**options)
