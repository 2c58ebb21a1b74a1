"""The accelerator as scripts see it: a world of one here, two ranks in tests/dist."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from windlass.accelerator.accelerator import Accelerator
from windlass.accelerator.engine import TrainerEngine
from windlass.accelerator.optimizer import PreparedOptimizer
from windlass.accelerator.prepared_schedule import PreparedSchedule
from windlass.accelerator.ranks import Ranks
from windlass.config.loop_options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)
from windlass.config.plan import DistPlan, PrecisionPlan
from windlass.core.errors import ConfigError, ModelError
from windlass.data.dealt_loader import DealtLoader
from windlass.data.prepared_loader import PreparedLoader
from windlass.data.update_batch import UpdateBatch
from windlass.data_loader import DataLoaderShard
from windlass.dist.gang import Gang
from windlass.engine.native import NativeExecutor
from windlass.engine.normalise import UpdateNormaliser
from windlass.transforms.alone import Alone

CPU = torch.device("cpu")


def of_run(compute: Any, engine: TrainerEngine) -> Accelerator:
    accumulation, loader = GradientAccumulationPlugin(num_steps=4), DataLoaderConfiguration()
    return Accelerator.of_run(Gang(), CPU, PrecisionPlan(compute), accumulation, loader, engine)


def executor_of(module: nn.Module) -> NativeExecutor:
    return NativeExecutor(Alone(module), torch.optim.SGD(module.parameters(), lr=0.1), CPU)


@pytest.fixture
def accelerator() -> Accelerator:
    return of_run("bf16", TrainerEngine(DistPlan))


def test_it_consists_of_objects() -> None:
    """A facade: state is in the objects that it holds, not in a tower of classes."""
    assert Accelerator.__mro__ == (Accelerator, Ranks, object)


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
    accelerator = of_run(compute, TrainerEngine(DistPlan))
    assert accelerator.mixed_precision == shown
    assert (accelerator.state.mixed_precision, accelerator.state.num_processes) == (shown, 1)


def test_autocast_is_the_runs(accelerator: Accelerator) -> None:
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    with accelerator.autocast(AutocastKwargs(cache_enabled=False)):
        assert not torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_gather_alone_is_the_tensor_itself(shape: tuple[int, ...], accelerator: Accelerator) -> None:
    tensor = torch.randn(shape)
    assert torch.equal(accelerator.gather(tensor), tensor)
    assert torch.equal(accelerator.gather_for_metrics(tensor), accelerator.gather(tensor))
    for _ in accelerator.prepare(DataLoader(range(5), batch_size=2)):  # type: ignore[arg-type]
        # Not a row for each sample: it is the script's.
        assert torch.equal(accelerator.gather_for_metrics(torch.arange(3)), torch.arange(3))


def test_numbers_that_turn_gradients_round_or_into_nan_are_refused() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    for wrong in (-1.0, math.nan, "1"):
        with pytest.raises(ConfigError, match=r"max_norm=.*at least 0"):
            accelerator.clip_grad_norm_(model.parameters(), wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"clip_value=.*at least 0"):
            accelerator.clip_grad_value_(model.parameters(), wrong)  # type: ignore[arg-type]
    for wrong in (0, -2, 2.5, "2"):
        with pytest.raises(ConfigError, match=r"gradient_accumulation_steps=.*whole number above 0"):
            accelerator.gradient_accumulation_steps = wrong  # type: ignore[assignment]
    # A script may have divided to get it.
    accelerator.gradient_accumulation_steps = 8 / 4  # type: ignore[assignment]
    assert accelerator.gradient_accumulation_steps == 2


def test_backward_belongs_to_a_run() -> None:
    engine = TrainerEngine(DistPlan)
    accelerator, module = of_run("fp32", engine), nn.Linear(1, 1)
    with pytest.raises(ModelError, match="outside a training step"):
        accelerator.backward(torch.ones(()))
    normaliser = UpdateNormaliser(1)
    engine.attach(normaliser, executor_of(module))
    update = UpdateBatch([None], [[]], 0, 0, False, targets=[2.0], samples=[1], denominator=4.0)
    normaliser.scope(update, 0)
    accelerator.backward(module(torch.ones(1, 1)).sum())
    assert float(module.bias.grad) == 0.5, "its share of the update's targets"
    engine.detach()
    with pytest.raises(ModelError, match="outside a training step"):
        accelerator.backward(torch.ones(()))


def test_the_trainer_prepares_its_own_objects_itself() -> None:
    """Whatever else a script gives to `prepare` is prepared, and no run takes its place."""
    model, beside = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    own = model, optimizer, schedule
    engine = TrainerEngine(DistPlan)
    engine.take_model(model)
    accelerator = of_run("bf16", engine)
    assert accelerator.prepare(model) is model
    assert all(found is given for found, given in zip(accelerator.prepare(*own), own, strict=True))
    plain = DataLoader([1, 2])  # type: ignore[arg-type]
    dealt = accelerator.prepare(plain)
    assert isinstance(dealt, DealtLoader)
    assert accelerator.prepare(dealt) is dealt
    assert accelerator.prepare_model(model) is model
    assert model(torch.ones(1, 1)).dtype == torch.float32
    assert "forward" not in vars(model), "the run chooses its precision itself"

    beside_optimizer = torch.optim.SGD(beside.parameters(), lr=0.1)
    beside_schedule = torch.optim.lr_scheduler.StepLR(beside_optimizer, 1)
    given = beside_schedule, beside_optimizer, model, beside
    after, stepped, same, prepared = accelerator.prepare(*given)
    assert (same, prepared) == (model, beside)
    assert isinstance(stepped, PreparedOptimizer)
    assert isinstance(after, PreparedSchedule)
    engine.attach(UpdateNormaliser(1), executor_of(model))
    with pytest.raises(ConfigError, match="is the model of the Trainer, which saves it"):
        del accelerator._models[0]
    before = beside.weight.detach().clone()
    prepared(torch.ones(1, 1)).sum().backward()
    stepped.step()
    assert not torch.equal(beside.weight, before)
    engine.detach()
    assert accelerator.get_state_dict(prepared).keys() == {"weight", "bias"}
    with pytest.raises(ConfigError, match="the Trainer saves its run itself"):
        accelerator.save_state("state")


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


def test_handlers_of_another_library_are_told_apart() -> None:
    class GradScalerKwargs:
        """Of the same name as ours."""

    with pytest.raises(ConfigError, match=r"'GradScalerKwargs': is none of .* of windlass\.utils"):
        Accelerator(kwargs_handlers=[GradScalerKwargs()], cpu=True)  # type: ignore[list-item]


def test_the_private_lists_that_scripts_read() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared = accelerator.prepare(model, optimizer, schedule, DataLoader([1, 2]))  # type: ignore[arg-type]
    accelerator.prepare(*prepared)
    lists = ("_models", "_optimizers", "_schedulers", "_dataloaders")
    assert [getattr(accelerator, name) for name in lists] == [[item] for item in prepared]
    assert all(item._is_accelerate_prepared for item in prepared)
    custom = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerator.register_for_checkpointing(custom)
    assert accelerator._custom_objects == [custom]
    accelerator.free_memory()
    assert [getattr(accelerator, name) for name in lists] == [[], [], [], []]


@pytest.mark.parametrize("way", ["assign", "clear", "remove", "pop"])
def test_what_a_script_removes_from_the_private_lists_is_not_saved(way: str, tmp_path: Path) -> None:
    accelerator, kept, dropped = Accelerator(cpu=True), nn.Linear(1, 1), nn.Linear(2, 2)
    kept, dropped = accelerator.prepare(kept, dropped)
    optimizer = accelerator.prepare(torch.optim.SGD(dropped.parameters(), lr=0.1))
    accelerator.backward(dropped(torch.ones(1, 2)).sum())
    optimizer.step()
    if way == "assign":
        accelerator._models = [model for model in accelerator._models if model is not dropped]
        accelerator._optimizers = []
    elif way == "clear":
        accelerator._models.clear()
        accelerator._optimizers.clear()
    elif way == "remove":
        accelerator._models.remove(dropped)
        accelerator._optimizers.remove(optimizer)
    else:
        assert accelerator._models.pop() is dropped
        accelerator._optimizers.pop()
    left = [] if way == "clear" else [kept]
    assert (list(accelerator._models), accelerator._optimizers) == (left, [])
    folder = Path(accelerator.save_state(tmp_path / "state"))
    names = {path.name for path in folder.iterdir()}
    assert ("model.safetensors" in names) == bool(left)
    assert not {name for name in names if name.startswith(("model_1", "optimizer"))}
    accelerator.load_state(folder)
    before = dropped.weight.clone()
    optimizer.step()  # the script may go on with it
    assert not torch.equal(dropped.weight, before)


def test_the_optimizer_of_a_removed_model_does_not_get_the_parameters_of_the_next() -> None:
    accelerator, models = Accelerator(cpu=True), [nn.Linear(2, 2) for _ in range(3)]
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models[:2])
    _, prepared, _ = accelerator.prepare(models[0], first, models[1])
    del accelerator._models[0]
    accelerator.prepare(models[2], second)
    for model, optimizer in zip(models, (prepared, second), strict=False):
        assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_a_model_that_was_not_prepared_is_not_listed() -> None:
    accelerator = Accelerator(cpu=True)
    for change in (accelerator._models.append, lambda model: setattr(accelerator, "_models", [model])):
        with pytest.raises(ConfigError, match=r"_models='Linear'.*prepare"):
            change(nn.Linear(1, 1))


def test_a_trainer_deals_a_loader_that_a_script_constructed(accelerator: Accelerator) -> None:
    constructed = DataLoaderShard([1, 2, 3], batch_size=2)
    assert type(accelerator.prepare(constructed)) is PreparedLoader


def test_a_model_that_is_given_twice_is_prepared_once() -> None:
    """Two wrappers of one module would each refuse the forwards of the other, and a checkpoint hold it twice."""
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 1)
    first, second = accelerator.prepare(model, model)
    assert first is second
    assert len(accelerator._models) == 1


def test_a_scaler_of_the_scripts_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"accelerator\.scaler='GradScaler': .*GradScalerKwargs"):
        Accelerator(cpu=True).scaler = torch.amp.GradScaler("cpu", enabled=False)
