"""What a training step and a loss may be; and each mistake answered with the sentence that mends it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.small import weights_hash
from torch import Tensor, nn

from windlass import LossTerms, Trainer, TrainingArguments
from windlass.core.errors import ConfigError, DataError, ModelError
from windlass.trainer.losses import as_count, check_loss, loss_of, on_device, smoothed_loss


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layer(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def samples(count: int = 16, **without: Any) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(3), "labels": i % 2} for i in range(count)]


def trainer_for(folder: Path, kind: type[Trainer] = Trainer, *, data: Any = None, **changes: Any) -> Trainer:
    parts = {name: changes.pop(name) for name in ("eval_dataset", "compute_metrics") if name in changes}
    torch.manual_seed(0)
    model = changes.pop("model", None) or Model()
    chosen: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    }
    args = TrainingArguments(output_dir=str(folder), **{**chosen, **changes})
    return kind(model, args, train_dataset=samples() if data is None else data, **parts)


def refused(trainer: Trainer, error: type[Exception], words: str) -> None:
    """It fails with these words, before any update."""
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(error, match=words):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(map(torch.equal, before, trainer.model.parameters())), "refused, but trained"


# --- training steps -------------------------------------------------------------------------------------------------


class OwnStep(Trainer):
    """The step that scripts write: with a division that a switch turns on, as other trainers ask for it."""

    divides = False

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        if self.divides:
            loss = loss / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class TwiceUsedGraph(OwnStep):
    """Differentiates the loss a second time, after its backward."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss, retain_graph=True)
        torch.autograd.grad(loss, list(model.parameters()))
        return loss.detach()


class DividingStep(OwnStep):
    divides = True


def weights(trainer: Trainer) -> list[float]:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).tolist()


@pytest.mark.parametrize("kind", [OwnStep, TwiceUsedGraph])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_an_own_step_trains_as_the_default_one(kind: type[Trainer], accumulation: int, folder: Path) -> None:
    own, default = (
        trainer_for(folder, cls, gradient_accumulation_steps=accumulation) for cls in (kind, Trainer)
    )
    own.train()
    default.train()
    assert weights(own) == weights(default)
    assert "compute_loss" not in vars(own), "the watch over the first step is gone"


class DividingByCurrent(OwnStep):
    """As transformers' own step does; the last update of an epoch has fewer micro-batches."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss / self.current_gradient_accumulation_steps)
        return loss.detach()


class StepWithoutComputeLoss(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = self.divided(model(**self._prepare_inputs(inputs))["loss"])
        self.accelerator.backward(loss)
        return loss.detach()

    def divided(self, loss: Tensor) -> Tensor:
        return loss / self.args.gradient_accumulation_steps


@pytest.mark.parametrize("kind", [DividingStep, DividingByCurrent, StepWithoutComputeLoss])
@pytest.mark.parametrize("accumulation", [2, 4])
def test_a_division_by_the_accumulation_is_undone(
    kind: type[Trainer], accumulation: int, folder: Path
) -> None:
    changes: dict[str, Any] = {"num_train_epochs": 2, "max_steps": -1, "per_device_train_batch_size": 3}
    dividing, default = (
        trainer_for(folder, cls, gradient_accumulation_steps=accumulation, logging_steps=1, **changes)
        for cls in (kind, Trainer)
    )
    dividing.train()
    default.train()
    assert len(dividing.train_dataset) % (3 * accumulation), "the last update of an epoch is to be shorter"  # type: ignore[arg-type]
    assert weights(dividing) == pytest.approx(weights(default), rel=1e-6, abs=1e-7)
    losses = ([e["loss"] for e in t.state.log_history if "loss" in e] for t in (dividing, default))
    assert next(losses) == pytest.approx(next(losses))


def test_a_division_that_the_code_does_not_name_is_refused(folder: Path) -> None:
    class Halving(OwnStep):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss / 2)
            return loss.detach()

    trainer = trainer_for(folder, Halving, gradient_accumulation_steps=2)
    refused(trainer, ModelError, r"divides the loss by 2 .* in a way that is not seen")


def test_a_division_that_is_not_seen_is_refused_without_compute_loss(folder: Path) -> None:
    class Unseen(StepWithoutComputeLoss):
        def divided(self, loss: Tensor) -> Tensor:
            return loss * (1 / self.args.gradient_accumulation_steps)

    trainer = trainer_for(folder, Unseen, gradient_accumulation_steps=2)
    refused(trainer, ModelError, "computes its loss without `compute_loss`")


def test_dividing_by_one_is_nobodys_mistake(folder: Path) -> None:
    trainer = trainer_for(folder, DividingStep, gradient_accumulation_steps=1)
    trainer.train()
    assert trainer.state.global_step == 3


def test_a_first_loss_of_zero_does_not_hide_the_division(folder: Path) -> None:
    class StartsAtZero(DividingStep):
        seen = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            loss = super().compute_loss(*args, **kwargs)
            return loss * 0 if self.seen < 6 and torch.is_grad_enabled() else loss

    class Undivided(StartsAtZero):
        divides = False

    dividing, whole = (
        trainer_for(folder, kind, gradient_accumulation_steps=4) for kind in (StartsAtZero, Undivided)
    )
    dividing.train()
    whole.train()
    assert weights(dividing) == weights(whole)


def test_an_own_step_under_terms_is_left_alone(folder: Path) -> None:
    class WithTerms(OwnStep):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs)
            return LossTerms(loss * 2, 2.0)

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
            return loss.sum.detach()

    terms = trainer_for(folder, WithTerms, gradient_accumulation_steps=4)
    default = trainer_for(folder, gradient_accumulation_steps=4)
    terms.train()
    default.train()
    assert weights(terms) == pytest.approx(weights(default), abs=1e-6)


def test_backward_outside_a_run_is_refused(folder: Path) -> None:
    trainer = trainer_for(folder)
    with pytest.raises(ModelError, match="outside a training step"):
        trainer.accelerator.backward(torch.ones((), requires_grad=True))


@pytest.mark.parametrize(("kind", "accumulation", "times"), [("mean", 2, 1), ("mean", 1, 0), ("terms", 2, 0)])
def test_a_plain_mean_is_said_once_and_terms_are_none(
    kind: str, accumulation: int, times: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs)
            count = len(inputs["labels"])
            loss = outputs["loss"] if kind == "mean" else LossTerms(outputs["loss"] * count, count)
            return (loss, outputs) if return_outputs else loss

    said: list[str] = []
    monkeypatch.setattr("windlass.trainer.loss_policy.warn_once", lambda _, text: said.append(text))
    trainer_for(folder, Own, gradient_accumulation_steps=accumulation).train()
    assert sum("plain mean" in text for text in said) == times


@pytest.mark.parametrize(("reads", "wide", "times"), [(False, True, 1), (True, True, 0), (False, False, 0)])
def test_a_loss_of_positions_that_does_not_read_its_count_is_taken_as_a_mean(
    reads: bool, wide: bool, times: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a sum, which the weights of micro-batches would distort; with a label for each row they are equal."""

    class Own(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = (outputs["logits"] ** 2).sum() + 0.0 * labels.sum()
            if reads:
                loss = loss / num_items_in_batch
            return (loss, outputs) if return_outputs else loss

    said: list[str] = []
    monkeypatch.setattr("windlass.trainer.loss_policy.warn_once", lambda _, text: said.append(text))
    data = samples()
    if wide:
        data = [{**row, "labels": [1] * (i % 3) + [-100] * (3 - i % 3)} for i, row in enumerate(data)]
    trainer_for(folder, Own, data=data, gradient_accumulation_steps=2).train()
    assert sum("does not read `num_items_in_batch`" in text for text in said) == times


@pytest.mark.dist
def test_a_step_past_what_reduces_gradients_is_refused(folder: Path) -> None:
    from tests.trainer import losses_ranks  # which imports this file

    for past_the_wrapper, past_the_accelerator in on_ranks(2, losses_ranks.main, folder):
        assert "bypassed the data-parallel wrapper" in past_the_wrapper
        assert "without calling `self.accelerator.backward(loss)`" in past_the_accelerator


# --- data and models that can't train -------------------------------------------------------------------------------


class Lossless(Model):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.layer(x)}


def test_a_model_without_loss_is_refused(folder: Path) -> None:
    refused(
        trainer_for(folder, model=Lossless()),
        ModelError,
        r"returned no loss \(it returned: logits; it received: x, labels\)",
    )


def test_missing_labels_are_refused(folder: Path) -> None:
    data = [{"x": row["x"]} for row in samples()]
    refused(
        trainer_for(folder, data=data), ModelError, r"returned no loss .*it received: x\)\. Give it labels"
    )


@pytest.mark.parametrize("data", [[], iter(())])
def test_an_empty_dataset_is_refused(data: Any, folder: Path) -> None:
    refused(trainer_for(folder, data=data), DataError, "empty")


def test_a_metric_that_is_never_returned_is_refused(folder: Path) -> None:
    trainer = trainer_for(
        folder,
        eval_dataset=samples(),
        compute_metrics=lambda prediction: {"accuracy": 1.0},
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="f1",
    )
    refused(trainer, ConfigError, r"metric_for_best_model='f1'.*eval_accuracy, eval_loss")


def test_an_output_folder_that_cannot_be_written_is_refused(folder: Path) -> None:
    (folder / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"output_dir=.*can't be written"):
        trainer_for(folder / "file" / "out").train()


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"max_steps": 10**12}, "max_steps"), ({"max_steps": -1, "num_train_epochs": 1e12}, "num_train_epochs")],
)
def test_an_absurd_duration_is_refused(changes: dict[str, Any], field: str, folder: Path) -> None:
    refused(trainer_for(folder, **changes), ConfigError, f"{field}=")


def test_a_loop_of_ones_own_is_refused(folder: Path) -> None:
    class OwnLoop(Trainer):
        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> None: ...

    refused(trainer_for(folder, OwnLoop), ConfigError, r"_inner_training_loop='overridden'")


# --- plain functions ------------------------------------------------------------------------------------------------


def test_losses_are_found_wherever_models_put_them() -> None:
    loss = torch.tensor(1.5)

    class Output:
        def __init__(self) -> None:
            self.loss = loss

    for outputs in ({"loss": loss}, (loss, 1), [loss], Output(), loss):
        assert loss_of(outputs, {}) is loss
    for nothing in ({"logits": loss}, (), object(), (torch.zeros(3),), {"loss": None}):
        with pytest.raises(ModelError, match="returned no loss"):
            loss_of(nothing, {"x": 1})


def test_what_stands_where_the_loss_should_be_is_said() -> None:
    with pytest.raises(
        ModelError, match=r"a loss of shape \(3,\), and a loss is one number: return its mean"
    ):
        loss_of({"loss": torch.zeros(3), "logits": 1}, {"x": 1})
    with pytest.raises(ModelError, match=r"where the loss should be a tensor of shape \(2, 3\)"):
        loss_of((torch.zeros(2, 3), 1), {"x": 1})  # the logits of a model without labels
    with pytest.raises(ModelError, match="where the loss should be float"):
        loss_of({"loss": 3.0}, {"x": 1})


class Detached(Model):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(x, labels)["loss"].detach()}


def test_a_loss_without_gradient_is_refused(folder: Path) -> None:
    refused(trainer_for(folder, model=Detached()), ModelError, "the loss carries no gradient")


@pytest.mark.parametrize("wrong", [1.0, None, torch.zeros(2)])
def test_what_is_no_loss_is_named(wrong: Any) -> None:
    with pytest.raises(ModelError, match="must return a scalar tensor or LossTerms"):
        check_loss(wrong)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("denominator", [None, 3, torch.tensor(7)])
def test_smoothing_is_its_formula(shifted: bool, denominator: Any) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 4, dtype=torch.float64)
    labels = torch.tensor([[0, 1, 2, 3, -100], [-100, 1, -100, 0, 2]])
    epsilon, log_p, total, count = 0.2, logits.log_softmax(-1), torch.zeros((), dtype=torch.float64), 0
    for row in range(2):
        for t in range(int(shifted), 5):
            if labels[row, t] != -100:
                p = log_p[row, t - int(shifted)]
                total = total - (1 - epsilon) * p[labels[row, t]] - epsilon * p.mean()
                count += 1
    expected = total / (count if denominator is None else denominator)
    got = smoothed_loss({"logits": logits}, labels, epsilon, shifted, denominator)
    assert torch.isclose(got, expected, rtol=1e-14)


def test_a_smoothed_sum_over_bf16_logits_keeps_its_digits() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(500, 4).bfloat16(), torch.zeros(500, dtype=torch.int64)
    got = smoothed_loss((logits,), labels, 0.1, False, 500.0)
    expected = smoothed_loss((logits.double(),), labels, 0.1, False, 500.0)
    assert float(got) == pytest.approx(float(expected), rel=1e-6)


def test_counts_are_tensors_of_their_kind() -> None:
    assert as_count(3.0, torch.device("cpu")).dtype == torch.int64
    assert as_count(2.5, torch.device("cpu")).item() == 2.5


def test_the_count_of_an_update_without_targets_is_one_and_it_changes_no_weight(folder: Path) -> None:
    """A sum that is divided by 0 would be NaN."""
    counts: list[float] = []

    class Summing(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            if num_items_in_batch is not None:
                counts.append(float(num_items_in_batch))
            logits = model(inputs["x"])["logits"]
            loss = nn.functional.cross_entropy(logits, inputs["labels"], reduction="sum")
            return loss if num_items_in_batch is None else loss / num_items_in_batch

    ignored = [{**sample, "labels": -100} for sample in samples()]
    trainer = trainer_for(folder, Summing, data=ignored)
    before = weights_hash(trainer.model)
    result = trainer.train()
    assert counts
    assert set(counts) == {1.0}
    assert result.training_loss == 0.0
    assert weights_hash(trainer.model) == before


class Pair(nn.Module):
    """Takes a batch without names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layer(x), y)


class OpenPair(Pair):
    """By its signature it could be given a count."""

    def forward(self, x: Tensor, y: Tensor, **others: Any) -> Tensor:
        assert not others
        return super().forward(x, y)


def test_a_batch_without_names_gets_no_count(folder: Path) -> None:
    pairs = [(row["x"], row["x"] * 2) for row in samples()]
    hashes = []
    for kind in (Pair, OpenPair):
        torch.manual_seed(0)
        trainer = trainer_for(folder, model=kind(), data=pairs, gradient_accumulation_steps=2)
        trainer.train()
        hashes.append(weights_hash(trainer.model))
    assert hashes[0] == hashes[1]


def test_a_loss_function_may_get_a_batch_that_is_one_tensor(folder: Path) -> None:
    def square(outputs: Tensor, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        assert labels is None
        return outputs.square().mean()

    trainer = trainer_for(folder, model=nn.Linear(3, 3), data=[row["x"] for row in samples()])
    trainer.compute_loss_func = square
    trainer.train()
    assert trainer.state.global_step == 3


def test_a_batch_that_cannot_be_smoothed_is_named(folder: Path, said: list[str]) -> None:
    pairs = [(row["x"], row["x"] * 2) for row in samples()]
    trainer = trainer_for(folder, model=Pair(), data=pairs, label_smoothing_factor=0.1, log_level="warning")
    trainer.train()
    assert said.count("label_smoothing_factor has no effect on batches without 'labels'") == 1


def test_containers_keep_their_types_on_the_device() -> None:
    class Columns(dict):  # type: ignore[type-arg]
        """A mapping whose constructor takes something else."""

        def __init__(self, *, rows: int) -> None:
            super().__init__()
            self.rows = rows

    grouped, columns = defaultdict(list, x=torch.ones(1)), Columns(rows=1)
    columns["x"] = [torch.ones(1)]
    moved = [on_device(batch, torch.device("meta"), None) for batch in (grouped, columns)]
    assert [type(batch) for batch in moved] == [defaultdict, Columns]
    assert moved[0]["x"].is_meta
    assert moved[1]["x"][0].is_meta
    assert moved[1].rows == 1
    assert not grouped["x"].is_meta
