"""Runs with each optimizer: continued to the bit, and which weights are evaluated and saved if there is an average."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.optim.helpers import heard
from tests.trainer.optimizer_cases import FAMILIES, IN_8_BITS, Layers, resumes_to_the_bit, run
from tests.trainer.small import arguments, rows

from windlass import Trainer, TrainerCallback
from windlass.core.errors import ConfigError


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """torchao compiles its step for each shape, which takes many seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("optim", [*FAMILIES, *IN_8_BITS])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_a_run_continues_to_the_bit(optim: str, tmp_path: Path) -> None:
    if optim in IN_8_BITS:
        pytest.importorskip("bitsandbytes")
    if optim.startswith("adamw_torch_"):
        pytest.importorskip("torchao")
    assert resumes_to_the_bit(tmp_path, optim)


class Watch(TrainerCallback):
    """Keeps the weights that evaluations see, and those at the beginning of each update."""

    def __init__(self) -> None:
        self.training: list[torch.Tensor] = []
        self.evaluated: list[torch.Tensor] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training.append(kwargs["model"].head.weight.detach().clone())

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluated.append(kwargs["model"].head.weight.detach().clone())


def test_averaged_weights_are_evaluated_saved_and_left_in_the_model(tmp_path: Path) -> None:
    watch = Watch()
    args = arguments(
        tmp_path, optim="schedule_free_adamw", max_steps=6, num_train_epochs=1, learning_rate=0.01,
        lr_scheduler_type="constant", eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
        per_device_eval_batch_size=8,
    )  # fmt: skip
    data = rows(48, classes=4)
    trainer = Trainer(Layers(), args, train_dataset=data, eval_dataset=data[:8], callbacks=[watch])
    trainer.train()
    saved = [load_file(tmp_path / f"checkpoint-{n}" / "model.safetensors")["head.weight"] for n in (3, 6)]
    for seen, written in zip(watch.evaluated, saved, strict=True):
        assert torch.equal(seen, written)
    assert not torch.equal(watch.training[3], saved[0])  # y, which the next update starts from
    assert torch.equal(trainer.model.head.weight, saved[1])
    trainer.save_model(str(tmp_path / "final"))
    assert torch.equal(load_file(tmp_path / "final" / "model.safetensors")["head.weight"], saved[1])


def test_a_model_saved_by_a_callback_has_the_averaged_weights(tmp_path: Path) -> None:
    class Save(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                trainer.save_model(str(tmp_path / "own"))

    args = arguments(
        tmp_path, optim="schedule_free_sgd", max_steps=2, num_train_epochs=1, lr_scheduler_type="constant"
    )
    trainer = Trainer(Layers(), args, train_dataset=rows(48, classes=4), callbacks=[Save()])
    trainer.train()
    own = load_file(tmp_path / "own" / "model.safetensors")
    assert torch.equal(own["head.weight"], trainer.model.head.weight)


def test_the_best_model_is_the_averaged_one(tmp_path: Path) -> None:
    trainer = run(
        tmp_path, "schedule_free_adamw", 6, load_best_model_at_end=True, eval_steps=3, learning_rate=0.3
    )
    best = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    assert torch.equal(trainer.model.head.weight, best["head.weight"])
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric


def test_groups_and_layer_rates_reach_the_optimizer(tmp_path: Path) -> None:
    trainer = run(
        tmp_path, "sgd", 1, watched=False, optim_groups={"head": {"lr": 0.5, "weight_decay": 0.25}},
        layerwise_lr_decay=0.5,
    )  # fmt: skip
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    found = {
        names[id(p)]: (group["lr"], group["weight_decay"])
        for group in trainer.optimizer.param_groups
        for p in group["params"]
    }
    assert found["head.bias"] == (0.5, 0.25)
    assert found["layers.0.weight"] == (0.005, 0.1)
    assert found["norm.weight"] == (0.01, 0.0)
    assert found["first.weight"] == (0.0025, 0.1)


def test_options_of_groups_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    options = {"lr": np.float32(0.5), "weight_decay": np.int64(0), "momentum": np.float32(0.75)}
    trainer = run(tmp_path, "sgd", 1, watched=False, optim_groups={"head": options})
    group = trainer.optimizer.param_groups[-1]
    assert [repr(group[key]) for key in options] == ["0.5", "0", "0.75"]
    options = {"betas": (np.float32(0.5), np.float64(0.75)), "amsgrad": np.bool_(True)}
    group = run(
        tmp_path / "adam", "adamw_torch", 1, watched=False, optim_groups={"head": options}
    ).optimizer.param_groups[-1]
    assert [repr(group[key]) for key in options] == ["(0.5, 0.75)", "True"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": "adamw_8bits"}, "did you mean"),
        ({"optim_groups": {"(": {"lr": 1.0}}}, "optim_groups='(': is not a regular expression"),
        ({"optim_groups": {"head": {"lr": "fast"}}}, "optim_groups['head'].lr='fast': must be a number"),
        ({"optim_groups": {"head": 3}}, "must be a dict of options"),
        ({"optim_groups": {"haed": {"lr": 1.0}}}, "did you mean 'head'"),
        ({"optim_groups": {"head": {"momentun": 0.1}}, "optim": "sgd"}, "did you mean 'momentum'"),
        (
            {"optim_groups": {"head": {"amsgrad": "no"}}},
            "optim_groups['head'].amsgrad='no': must be true or false",
        ),
        (
            {"optim_groups": {"head": {"momentum": -0.5}}, "optim": "sgd"},
            "optim_groups['head'].momentum=-0.5: must",
        ),
        (
            {"optim_groups": {"head": {"betas": [0.9, 1.5]}}, "optim": "lion_32bit"},
            "optim_groups['head'].betas=[0.9, 1.5]: must be numbers of at least 0 and below 1",
        ),
        (
            {"optim_groups": {"head": {"eps": -1e-8}}},
            "optim_groups['head'].eps=-1e-08: must be a number of at least 0",
        ),
        (
            {"optim_groups": {"head": {"lr": [0.1]}}},
            "optim_groups['head'].lr=[0.1]: must be a number of at least 0",
        ),
        ({"layerwise_lr_decay": 1.5}, "must be above 0 and at most 1"),
        (
            {"optim": "sgd", "optim_args": "nesterov=true"},
            "optim_args={'nesterov': 'true'}: sgd: Nesterov momentum",
        ),
    ],
)
def test_bad_input_is_refused_before_the_first_update(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, changes.pop("optim", "adamw_torch"), 1, watched=False, **changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("optim", ["schedule_free_adamw", "schedule_free_sgd"])
def test_a_warmup_is_the_same_however_its_length_is_given(optim: str, tmp_path: Path) -> None:
    """A fraction of epochs is known only with the data: 48 rows, 8 in an update, 2 epochs, so 0.25 is 3 updates."""
    data, found = rows(48, classes=4), {}
    for form, length in {
        "fraction of epochs": {"warmup_steps": 0.25, "num_train_epochs": 2},
        "fraction of updates": {"warmup_steps": 0.25, "max_steps": 12},
        "number": {"warmup_steps": 3, "num_train_epochs": 2},
        "none": {"num_train_epochs": 2},
    }.items():
        args = arguments(
            tmp_path / form, optim=optim, learning_rate=0.01, lr_scheduler_type="constant",
            per_device_train_batch_size=8, **{"max_steps": -1, **length},
        )  # fmt: skip
        trainer = Trainer(Layers(), args, train_dataset=data)
        if form == "fraction of epochs":
            trainer.create_optimizer()  # a script may make it before the number of updates is known
        with heard() as records:
            trainer.train()
        assert not [record for record in records if "warm" in record.getMessage()]
        assert {group["warmup_steps"] for group in trainer.optimizer.param_groups} == {
            3 if form != "none" else 0
        }
        found[form] = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for form in ("fraction of updates", "number"):
        assert all(torch.equal(found["fraction of epochs"][name], found[form][name]) for name in found[form])
    assert not torch.equal(found["number"]["head.weight"], found["none"]["head.weight"])
