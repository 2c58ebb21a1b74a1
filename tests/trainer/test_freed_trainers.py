"""A Trainer that a script drops is freed at once, with its model and optimizer, without a search for cycles."""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.small import Net, arguments, rows
from torch import Tensor, nn

from windlass import Trainer

pytestmark = pytest.mark.usefixtures("no_collection")


def held(trainer: Trainer) -> list[weakref.ref[Any]]:
    """References to the Trainer and to what takes memory: parameters, and the optimizer with its state."""
    found = [weakref.ref(trainer), weakref.ref(trainer.model), *map(weakref.ref, trainer.model.parameters())]
    if trainer.optimizer is not None:
        found.append(weakref.ref(trainer.optimizer))
        states = trainer.optimizer.state.values()
        found += [weakref.ref(v) for state in states for v in state.values() if isinstance(v, Tensor)]
    return found


def alive(found: list[weakref.ref[Any]]) -> list[str]:
    return [type(one).__name__ for reference in found if (one := reference()) is not None]


def made(folder: Path, cls: type[Trainer] = Trainer, **changes: Any) -> Trainer:
    given = {name: changes.pop(name) for name in ("compute_loss_func", "optimizers") if name in changes}
    model = changes.pop("model", None) or Net()
    args = arguments(folder, **{"max_steps": 2, "save_strategy": "steps", "save_steps": 1, **changes})
    return cls(model, args, train_dataset=rows(16), eval_dataset=rows(8), **given)


def test_one_that_was_built(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    found = held(trainer)
    del trainer
    assert alive(found) == []


class OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class OwnStep(Trainer):
    """A step that is checked for a division, and code that names the number of processes, so that it is watched."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        assert self.accelerator.num_processes == 1
        return loss.detach()


class OwnSave(Trainer):
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)


def own_function(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"], labels)


def with_own_optimizer() -> dict[str, Any]:
    """A schedule of PyTorch's, which replaces the optimizer's `step`."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return {"model": model, "optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "defaults": dict,
    "own loss": lambda: {"cls": OwnLoss},
    "own step": lambda: {"cls": OwnStep, "gradient_accumulation_steps": 2},
    "own save": lambda: {"cls": OwnSave},
    "own function": lambda: {"compute_loss_func": own_function},
    "own optimizer": with_own_optimizer,
    "saves in the background": lambda: {"save_in_background": True},
    "metric": lambda: {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "eval_strategy": "steps",
        "eval_steps": 1,
    },
    "best": lambda: {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1},
    "bf16": lambda: {"bf16": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_trained_evaluated_and_saved(kind: str, tmp_path: Path) -> None:
    trainer = made(tmp_path, **KINDS[kind]())
    trainer.train()
    trainer.evaluate()
    trainer.predict(rows(8))
    trainer.save_model()
    trainer._save_checkpoint(trainer.model)
    found = held(trainer)
    assert len(found) > 6
    del trainer
    assert alive(found) == []


def test_one_that_resumed(tmp_path: Path) -> None:
    made(tmp_path).train()
    trainer = made(tmp_path, max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    found = held(trainer)
    del trainer
    assert alive(found) == []


def test_one_whose_run_failed(tmp_path: Path) -> None:
    class Failing(OwnLoss):
        def log(self, *_: Any) -> None:
            raise ZeroDivisionError

    trainer = made(tmp_path, Failing, logging_steps=1)
    with pytest.raises(ZeroDivisionError) as error:
        trainer.train()
    found = held(trainer)
    del trainer, error
    assert alive(found) == []


def test_the_workers_of_its_data_end_with_it(tmp_path: Path) -> None:
    trainer = made(tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    trainer.train()
    trainer.evaluate()
    assert multiprocessing.active_children()
    del trainer
    assert multiprocessing.active_children() == []


def test_in_a_loop_each_is_freed_by_the_next(tmp_path: Path) -> None:
    found: list[weakref.ref[Any]] = []
    for number in range(3):
        trainer = made(tmp_path / str(number))
        assert alive(found) == []
        trainer.train()
        found = held(trainer)


def test_the_model_of_a_script_stays(tmp_path: Path) -> None:
    model = Net()
    trainer = made(tmp_path, model=model)
    trainer.train()
    reference = weakref.ref(trainer)
    del trainer
    assert reference() is None
    assert model(x=torch.zeros(1, 4))["logits"].shape == (1, 3)
