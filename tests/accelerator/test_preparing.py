"""What `prepare` makes of a model, and what it says."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from tests.accelerator.loop_cases import make
from tests.dist.launch import on_ranks
from tests.said import listening
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader

from windlass import Accelerator
from windlass.accelerator.preparing import bring_state_along
from windlass.core.errors import ConfigError, ModelError
from windlass.utils import FullyShardedDataParallelPlugin, ProjectConfiguration


def test_a_model_in_mixed_precision_is_exported() -> None:
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(nn.Linear(3, 2))
    x = torch.ones(1, 3)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


def test_a_prepared_model_that_was_compiled_since_is_the_same_model() -> None:
    accelerator = Accelerator(cpu=True)
    compiled = torch.compile(accelerator.prepare(nn.Linear(2, 1)), backend="eager")
    assert accelerator.prepare(compiled) is compiled
    assert len(accelerator._models) == 1


def test_what_is_not_to_be_moved_stays_where_it_is() -> None:
    accelerator, apart = Accelerator(cpu=True), Accelerator(cpu=True, device_placement=False)
    moved, kept = DataLoader([1]), DataLoader([2])  # type: ignore[arg-type, var-annotated]
    far = [nn.Linear(2, 1, device="meta") for _ in range(3)]
    far[2].hf_device_map = {"0": "cpu", "1": "disk"}  # type: ignore[assignment]
    found = accelerator.prepare(far[0], moved, kept, far[2], device_placement=[False, None, False, None])
    assert (found[1].device, found[2].device) == (accelerator.device, None)
    assert apart.prepare(far[1], kept)[1].device is None
    assert all(model.weight.is_meta for model in far)


def test_a_model_on_several_devices_is_not_sharded_too() -> None:
    model = nn.Linear(2, 1)
    model.hf_device_map = {"0": "cpu", "1": "disk"}  # type: ignore[assignment]
    with pytest.raises(ModelError, match="by a device_map cannot be spread over processes too"):
        make(True).prepare(model)


def test_forwards_and_steps_whose_results_are_discarded_change_nothing() -> None:
    accelerator, model = make(False), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def backward() -> None:
        accelerator.backward(model(torch.eye(2, dtype=torch.float64)).square().sum())

    with accelerator.discarding():
        backward()
        optimizer.step()
        optimizer.step(backward)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_gradients_of_groups_that_are_added_later_are_unscaled_too() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model[0].parameters(), lr=1.0))
    for layer in model:
        nn.init.ones_(layer.weight)
    for step in range(2):
        for layer in model:
            accelerator.backward(layer(torch.ones(1, 2)).sum())
        optimizer.step()
        model.zero_grad()
        if step == 0:
            optimizer.add_param_group({"params": list(model[1].parameters())})
    assert [layer.weight.tolist() for layer in model] == [[[-1.0, -1.0]], [[0.0, 0.0]]]


def test_options_beside_the_objects_that_hold_such(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=tmp_path / "own", logging_dir=tmp_path / "log")  # type: ignore[arg-type]
    accelerator = Accelerator(
        cpu=True, split_batches=True, project_dir=tmp_path / "other", project_config=project
    )
    assert accelerator.split_batches
    # Scripts join paths with pathlib, and trackers take text.
    assert (accelerator.project_dir, accelerator.logging_dir) == (
        str(tmp_path / "own"),
        str(tmp_path / "log"),
    )


def test_a_schedule_says_what_it_counts_if_that_is_more_than_the_updates() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    with listening() as said:
        Accelerator(cpu=True).prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    assert not said


def test_momentum_that_no_checkpoint_holds_is_said_when_it_is_prepared() -> None:
    model = nn.EmbeddingBag(3, 2, sparse=True)
    with listening() as said:
        Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    (found,) = [line for line in said if line.startswith("save_state will fail: ")]
    assert found.endswith("sparse=False, or set momentum to 0")


@pytest.mark.parametrize("fused", [True, False])
def test_counters_go_to_the_device_with_kernels_that_read_them_there(fused: bool) -> None:
    with FakeTensorMode():
        parameter = nn.Parameter(torch.zeros(2, device=torch.device("cuda", 0)))
        optimizer = torch.optim.AdamW([parameter])
        optimizer.param_groups[0]["fused"] = fused
        optimizer.state[parameter] = {"step": torch.ones(()), "exp_avg": torch.zeros(2)}
        bring_state_along(optimizer)
        places = {name: value.device.type for name, value in optimizer.state[parameter].items()}
    assert places == {"step": "cuda" if fused else "cpu", "exp_avg": "cuda"}


@pytest.mark.dist
def test_a_model_that_is_sharded_after_updates_of_its_optimizer_trains_on() -> None:
    """Its parameters are others then, which the executor of those updates does not have."""
    [early], [late] = on_ranks(1, trained, 0), on_ranks(1, trained, 2)
    assert late == early


@pytest.mark.parametrize("where", ["a subclass", "the class", "the instance"])
def test_a_method_that_prepare_would_not_call_is_refused(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    @functools.wraps(Accelerator.prepare_model)
    def prepare_model(*args: object, **kwargs: object) -> None:
        raise AssertionError("called")

    kind = type("Mine", (Accelerator,), {})
    accelerator = kind(cpu=True)
    owner = {"a subclass": kind, "the class": Accelerator, "the instance": accelerator}[where]
    monkeypatch.setattr(owner, "prepare_model", prepare_model)
    with pytest.raises(ConfigError, match="prepare_model='overridden'"):
        accelerator.prepare(nn.Linear(2, 1))


def trained(sharded_after: int) -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model: nn.Module = nn.Linear(4, 3)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    for update in range(4):
        if update == sharded_after:
            model = accelerator.prepare(model)
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(model)["weight"].flatten().tolist()  # type: ignore[no-any-return]
