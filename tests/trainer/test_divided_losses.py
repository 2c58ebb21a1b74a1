"""Losses that a `compute_loss` divides by the number of micro-batches, as some libraries do for transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.dist.launch import on_ranks
from tests.finetuning import small
from tests.trainer.exactness_cases import PlainModel, collate
from tests.trainer.script_loss_cases import ROWS, TRAINED_ROWS, entropy, options

from windlass import SFTConfig, SFTTrainer, Trainer, TrainingArguments

TOLERANCE = 1e-12


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


class Whole(Trainer):
    """A mean over the micro-batch, which `divided` is to divide."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        loss = self.divided(entropy(outputs["logits"], inputs["labels"]), model, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def divided(self, loss: Any, model: Any, count: Any) -> Any:
        return loss


class Counted(Whole):
    """Also in evaluations, which get a count too."""

    def divided(self, loss: Any, model: Any, count: Any) -> Any:
        return loss if count is None else loss / self.args.gradient_accumulation_steps


@dataclass
class Redeclared(TrainingArguments):
    """As arguments of a library's own, with another default."""

    gradient_accumulation_steps: int = 8


class OfOwnArguments(Counted):
    def __init__(self, model: Any, args: Any, **data: Any) -> None:
        super().__init__(model, Redeclared(**args.changed), **data)


class InTraining(Whole):
    def divided(self, loss: Any, model: Any, count: Any) -> Any:
        if model.training and self.args.gradient_accumulation_steps > 1:
            loss = loss / self.args.gradient_accumulation_steps
        return loss


class InPlace(Whole):
    def divided(self, loss: Any, model: Any, count: Any) -> Any:
        loss /= self.current_gradient_accumulation_steps
        return loss


class OfAccelerator(Whole):
    def divided(self, loss: Any, model: Any, count: Any) -> Any:
        return torch.div(loss, self.accelerator.gradient_accumulation_steps)


class Overrides(Counted):
    """As a step that is overridden for something else."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return super().training_step(model, inputs, num_items_in_batch)


class Twice(Counted):
    """The step divides, too."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        loss = loss / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class Tuning(Counted, SFTTrainer):
    def __init__(self, model: Any, args: Any, **data: Any) -> None:
        settings = SFTConfig(**args.changed, max_length=None, report_to="none", bf16=False)
        data |= {"train_dataset": TRAINED_ROWS, "processing_class": small.tokenizer()}
        super().__init__(small.model().double(), settings, **data)


class TuningWhole(Tuning):
    def divided(self, loss: Any, model: Any, count: Any) -> Any:
        return loss


DIVIDED = {
    cls.__name__: cls
    for cls in (Counted, OfOwnArguments, InTraining, InPlace, OfAccelerator, Overrides, Twice, Tuning)
}


def outcome(cls: type[Trainer], folder: Path, accumulation: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    given = options(folder, 2, accumulation)
    args = TrainingArguments(**given)
    args.changed = given  # type: ignore[attr-defined]
    trainer = cls(PlainModel(), args, train_dataset=ROWS, data_collator=collate)
    trainer.train()
    history = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "loss": [row["loss"] for row in history],
        "norm": [row["grad_norm"] for row in history],
        "weights": torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).tolist(),
        "evaluated": [trainer.evaluate(trainer.train_dataset)["eval_loss"]],
    }


def outcomes(folder: Path, name: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    torch.set_default_dtype(torch.float64)
    whole = TuningWhole if name == "Tuning" else Whole
    # The last update of an epoch has fewer micro-batches.
    return outcome(whole, folder / "whole", 3), outcome(DIVIDED[name], folder / "divided", 3)


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", DIVIDED)
def test_the_division_of_a_whole_loss_is_undone(name: str, world: int, folder: Path) -> None:
    whole, divided = on_ranks(world, outcomes, folder, name)[0]
    for what, values in whole.items():
        assert np.abs(np.array(divided[what]) - np.array(values)).max() <= TOLERANCE, what


@pytest.mark.parametrize("before", [False, True])
def test_it_is_undone_in_an_evaluation_before_the_first_update(before: bool, folder: Path) -> None:
    losses = []
    for cls in (Whole, Counted):
        torch.manual_seed(0)
        args = TrainingArguments(**{**options(folder, 2, 3), "max_steps": 1, "eval_on_start": before})
        trainer = cls(PlainModel(), args, train_dataset=ROWS, eval_dataset=ROWS, data_collator=collate)
        if before:
            trainer.train()
            losses.append([row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row])
        else:
            losses.append([trainer.evaluate()["eval_loss"]])
    assert np.allclose(losses[0], losses[1], rtol=TOLERANCE, atol=0)


def test_a_division_of_a_part_stays_and_is_warned_of(folder: Path, capfd: Any) -> None:
    class Part(Whole):
        def divided(self, loss: Any, model: Any, count: Any) -> Any:
            return loss + loss / self.args.gradient_accumulation_steps

    class Doubled(Whole):
        def divided(self, loss: Any, model: Any, count: Any) -> Any:
            return loss + loss / 2

    ends = []
    for cls in (Part, Doubled, Counted):
        torch.manual_seed(0)
        args = TrainingArguments(**{**options(folder, 2, 2), "log_level": "warning", "max_steps": 1})
        trainer = cls(PlainModel(), args, train_dataset=ROWS, data_collator=collate)
        trainer.train()
        ends.append(trainer.state.log_history[0]["loss"])
        warned = "names the number of micro-batches, by which it must not divide" in capfd.readouterr().err
        assert warned == (cls is Part)
    assert ends[0] == ends[1]


@pytest.mark.parametrize("cls", [Counted, Twice])
def test_it_is_undone_for_a_declared_loss(cls: type[Trainer], folder: Path) -> None:
    norms = []
    for kind in (Whole, type("Declared", (cls,), {"loss_is_scaled_for_ga": False})):
        torch.manual_seed(0)
        args = TrainingArguments(**{**options(folder, 2, 4), "max_steps": 1})
        trainer = kind(PlainModel(), args, train_dataset=ROWS, data_collator=collate)
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[1] == norms[0]


class Shares(Whole):
    """A loss that is its micro-batch's share of the update when it is returned, as it declares."""

    loss_is_scaled_for_ga = True

    def divided(self, loss: Any, model: Any, count: Any) -> Any:
        return loss / self.current_gradient_accumulation_steps if model.training else loss


class SharesInStep(Overrides):
    """As those of trl, whose step is overridden too."""

    loss_is_scaled_for_ga = True
    divided = Shares.divided


class Marked(Overrides):
    """As those of trl before 1.0: a function of the loss that is none."""

    divided = Shares.divided

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, compute_loss_func="non-None value to disable scaling", **options)


class MarkedLater(Overrides):
    divided = Shares.divided

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.compute_loss_func = "non-None value to disable scaling"


class SharesUndivided(Whole):
    """The step divides what is declared complete."""

    loss_is_scaled_for_ga = True
    training_step = Twice.training_step

    def divided(self, loss: Any, model: Any, count: Any) -> Any:
        return loss / 3 if model.training else loss


class ByConstant(Whole):
    loss_is_scaled_for_ga = True
    divided = SharesUndivided.divided


class Complete(Whole):
    """Its code shows that it is complete."""

    def divided(self, loss: Any, model: Any, count: Any) -> Any:
        return loss * (0 * count + 1) * self.accelerator.num_processes / self.of(3)

    def of(self, number: int) -> int:
        return number


class CompleteDivided(Complete):
    def of(self, number: int) -> int:
        return self.args.gradient_accumulation_steps


def shares(folder: Path) -> dict[str, list[float]]:
    torch.set_default_dtype(torch.float64)
    found = {}
    kinds = (
        ByConstant,
        Shares,
        SharesInStep,
        Marked,
        MarkedLater,
        SharesUndivided,
        Complete,
        CompleteDivided,
    )
    for cls in kinds:
        torch.manual_seed(0)
        args = TrainingArguments(**{**options(folder / cls.__name__, 2, 3), "max_steps": 2})
        trainer = cls(PlainModel(), args, train_dataset=ROWS[:18] * 2, data_collator=collate)
        trainer.train()
        found[cls.__name__] = [trainer.evaluate(ROWS)["eval_loss"]]
        found[cls.__name__] += [
            row[key] for row in trainer.state.log_history[:2] for key in ("loss", "grad_norm")
        ]
    return found


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2])
def test_a_complete_loss_is_used_as_compute_loss_returns_it(world: int, folder: Path) -> None:
    found = on_ranks(world, shares, folder)[0]
    for name in ("Shares", "SharesInStep", "Marked", "MarkedLater", "SharesUndivided"):
        assert found[name] == pytest.approx(found["ByConstant"], rel=TOLERANCE), name
    assert found["CompleteDivided"] == pytest.approx(found["Complete"], rel=TOLERANCE)


class InSomeUpdates(Whole):
    """The step divides if there are several micro-batches: by their number."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        if self.current_gradient_accumulation_steps == self.args.gradient_accumulation_steps:
            loss = loss / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


def test_a_step_may_divide_in_some_updates_only(folder: Path) -> None:
    whole, some = (outcome(cls, folder / cls.__name__, 3) for cls in (Whole, InSomeUpdates))
    assert some["loss"] == pytest.approx(whole["loss"], rel=TOLERANCE)
    assert some["weights"] == pytest.approx(whole["weights"], rel=TOLERANCE)
