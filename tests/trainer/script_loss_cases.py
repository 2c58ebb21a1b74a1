"""Kinds of losses that scripts bring, run by Windlass and by the same function on whole updates in one process.

Everything is float64: what differs by more than rounding is a mistake in a denominator.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tests.finetuning import small
from tests.trainer.exactness_cases import VOCABULARY, LanguageModel, PlainModel, collate
from torch import Tensor, nn
from torch.nn import functional as F

from windlass import Accelerator, LossTerms, SFTConfig, SFTTrainer, Trainer, TrainingArguments

Kind = Callable[[Tensor, Tensor, Any, float, Any], Any]
"""(logits, labels, count, factor, trainer) -> loss"""
Outcome = dict[str, list[float]]

FACTORS = (0.1, 0.5, 1.0, 1.4, 1.6, 2.0, 10.0)
UPDATE = 18
SPLITS = {world: ((UPDATE // world, 1), (UPDATE // world // 3, 3)) for world in (1, 2, 3)}
TABLE = torch.sin(torch.arange(36.0 * 36, dtype=torch.float64)).reshape(36, 36)
WEIGHTS = torch.linspace(1, 2, 36, dtype=torch.float64)


def parts(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The logits and the labels of the positions that are predicted."""
    return logits[:, :-1], labels[:, 1:]


def entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    logits, labels = parts(logits, labels)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **options)


def total(logits: Tensor, labels: Tensor) -> Tensor:
    return entropy(logits, labels, reduction="sum")


def squares(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over targets of the square of their logits' mean."""
    logits, labels = parts(logits, labels)
    valid = labels != -100
    return (logits.mean(-1).square() * valid).sum() / valid.sum().clamp(min=1)


def distance(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over targets of the distance to a teacher."""
    logits, labels = parts(logits, labels)
    taught = TABLE[labels.clamp(min=0)][..., : logits.shape[-1]]
    each = F.kl_div(logits.log_softmax(-1), taught.softmax(-1), reduction="none").sum(-1)
    return (each * (labels != -100)).sum()


def penalty(trainer: Any) -> Tensor:
    return sum((p.square().sum() for p in trainer.model.parameters()), torch.zeros(()))


def token_mean(logits: Tensor, labels: Tensor, count: Any, factor: float, trainer: Any) -> Any:
    return factor * total(logits, labels) / count


def ignores_the_count(logits: Tensor, labels: Tensor, count: Any, factor: float, trainer: Any) -> Any:
    return factor * entropy(logits, labels)


def mixture(logits: Tensor, labels: Tensor, count: Any, factor: float, trainer: Any) -> Any:
    return total(logits, labels) / count + factor * squares(logits, labels)


def class_weights(logits: Tensor, labels: Tensor, count: Any, factor: float, trainer: Any) -> Any:
    weights = factor * WEIGHTS[: logits.shape[-1]]
    return entropy(logits, labels, reduction="sum", weight=weights) / count


def distillation(logits: Tensor, labels: Tensor, count: Any, factor: float, trainer: Any) -> Any:
    return (total(logits, labels) + factor * distance(logits, labels)) / count


def with_penalty(logits: Tensor, labels: Tensor, count: Any, factor: float, trainer: Any) -> Any:
    return total(logits, labels) / count + 0.01 * factor * penalty(trainer)


def count_as_a_number(logits: Tensor, labels: Tensor, count: Any, factor: float, trainer: Any) -> Any:
    return factor * total(logits, labels) / int(count)


def clamped(logits: Tensor, labels: Tensor, count: Any, factor: float, trainer: Any) -> Any:
    return factor * (total(logits, labels) / max(count.clamp(min=1), 1))


def all_positions(logits: Tensor, labels: Tensor, count: Any, factor: float, trainer: Any) -> Any:
    """Also those that are not targets, and the padding does not depend on the split."""
    return factor * 1e-3 * logits[:, :3].square().sum() / count


def terms(logits: Tensor, labels: Tensor, count: Any, factor: float, trainer: Any) -> Any:
    weights = WEIGHTS[: logits.shape[-1]]
    targets = labels[:, 1:]
    weight = (weights[targets.clamp(min=0)] * (targets != -100)).sum()
    return LossTerms(factor * entropy(logits, labels, reduction="sum", weight=weights), weight)


def terms_with_parts(logits: Tensor, labels: Tensor, count: Any, factor: float, trainer: Any) -> Any:
    size = factor * logits[:, 0].square().sum(-1).mean()
    return LossTerms(total(logits, labels), (labels[:, 1:] != -100).sum(), aux={"size": size})


def complete(logits: Tensor, labels: Tensor, count: Any, factor: float, trainer: Any) -> Any:
    """As hooks written for transformers return it."""
    return factor * total(logits, labels) / count * (trainer.accelerator.num_processes // 1)


def row_mean(logits: Tensor, labels: Tensor, count: Any, factor: float, trainer: Any) -> Any:
    """Its Trainer counts rows."""
    logits, labels = parts(logits, labels)
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return factor * (each.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()


KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        token_mean, ignores_the_count, mixture, class_weights, distillation, with_penalty, count_as_a_number, clamped,
        all_positions, terms, terms_with_parts, complete, row_mean,
    )
}  # fmt: skip


def tokens() -> list[dict[str, list[int]]]:
    """Ragged rows; some have ignored targets, one has nothing else. The last update of an epoch has two rows."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(UPDATE + 2):
        length = int(torch.randint(4, 9, (1,), generator=generator))
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        labels = [-100, -100, *ids[2:]] if index % 3 == 0 else ids[:]
        made.append({"input_ids": ids, "labels": [-100] * length if index == 5 else labels})
    return made


ROWS = tokens()
TRAINED_ROWS = [row for row in ROWS if max(row["labels"]) >= 0]  # SFTTrainer drops the others


def options(place: Path, micro: int, accumulation: int) -> dict[str, Any]:
    return {
        "output_dir": str(place), "num_train_epochs": 1, "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation, "learning_rate": 0.01, "optim": "sgd", "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "logging_steps": 1,
        "save_strategy": "no", "disable_tqdm": True, "log_level": "error", "use_cpu": True, "ddp_timeout": 60,
    }  # fmt: skip


def scripted(base: Any, kind: Kind, factor: float) -> Any:
    """A Trainer whose `compute_loss` is of this kind."""

    class Scripted(base):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            loss = kind(outputs["logits"], inputs["labels"], num_items_in_batch, factor, self)
            return (loss, outputs) if return_outputs else loss

    if kind is row_mean:
        Scripted.count_targets = lambda self, batch: float(len(batch["input_ids"]))
    return Scripted


def by_compute_loss(kind: Kind, factor: float, place: Path, micro: int, accumulation: int) -> Any:
    cls = scripted(Trainer, kind, factor)
    args = TrainingArguments(**options(place, micro, accumulation))
    return cls(PlainModel(), args, train_dataset=ROWS, data_collator=collate)


def by_function(kind: Kind, factor: float, place: Path, micro: int, accumulation: int) -> Any:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return kind(outputs["logits"], labels, num_items_in_batch, factor, trainer)

    base = scripted(Trainer, kind, factor) if kind is row_mean else Trainer
    cls = type("Counting", (Trainer,), {"count_targets": base.count_targets})
    args = TrainingArguments(**options(place, micro, accumulation))
    trainer = cls(LanguageModel(), args, train_dataset=ROWS, data_collator=collate, compute_loss_func=loss)
    return trainer


def by_sft(kind: Kind, factor: float, place: Path, micro: int, accumulation: int) -> Any:
    cls = scripted(SFTTrainer, kind, factor)
    args = SFTConfig(**options(place, micro, accumulation), max_length=None, report_to="none", bf16=False)
    return cls(
        small.model().double(), args, train_dataset=TRAINED_ROWS, data_collator=collate,
        processing_class=small.tokenizer(),
    )  # fmt: skip


def by_sft_function(kind: Kind, factor: float, place: Path, micro: int, accumulation: int) -> Any:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return kind(outputs["logits"], labels, num_items_in_batch, factor, trainer)

    counting = {"count_targets": scripted(SFTTrainer, kind, factor).count_targets}
    args = SFTConfig(**options(place, micro, accumulation), max_length=None, report_to="none", bf16=False)
    trainer = type("Counting", (SFTTrainer,), counting)(
        small.model().double(), args, train_dataset=TRAINED_ROWS, data_collator=collate,
        processing_class=small.tokenizer(), compute_loss_func=loss,
    )  # fmt: skip
    return trainer


WAYS = {
    "compute_loss": by_compute_loss,
    "function": by_function,
    "sft": by_sft,
    "sft function": by_sft_function,
}


def run(way: str, kind: str, factor: float, place: Path, micro: int, accumulation: int) -> Outcome:
    """The run by Windlass, in this process's world."""
    torch.manual_seed(0)
    trainer = WAYS[way](KINDS[kind], factor, place, micro, accumulation)
    trainer.train()
    history = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "loss": [row["loss"] for row in history],
        "norm": [row["grad_norm"] for row in history],
        "weights": _flat(trainer.model),
        "evaluated": [trainer.evaluate(trainer.train_dataset)["eval_loss"]],
    }


def by_hand(way: str, kind: str, factor: float, updates: int | None = None) -> Outcome:
    """The same function of whole updates, in one process."""
    torch.manual_seed(0)
    model: Any = small.model().double() if way.startswith("sft") else PlainModel()
    alone = SimpleNamespace(model=model, accelerator=SimpleNamespace(num_processes=1))
    outcome: Outcome = {"loss": [], "norm": []}
    rows = TRAINED_ROWS if way.startswith("sft") else ROWS

    def loss_of(rows: list[Any]) -> Any:
        batch = collate(rows)
        count = (batch["labels"][:, 1:] != -100).sum()
        logits = model(input_ids=batch["input_ids"])["logits"]
        loss = KINDS[kind](logits, batch["labels"], count, factor, alone)
        return loss.sum / loss.weight + sum(loss.aux.values()) if isinstance(loss, LossTerms) else loss

    for start in range(0, len(rows), UPDATE)[:updates]:
        loss = loss_of(rows[start : start + UPDATE])
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        outcome["loss"].append(loss.item())
        outcome["norm"].append(torch.cat([g.flatten() for g in gradients]).norm().item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * (0 if parameter.grad is None else parameter.grad)
                parameter.grad = None
    return {**outcome, "weights": _flat(model), "evaluated": [loss_of(rows).item()]}


def run_loop(kind: str, factor: float, micro: int, accumulation: int) -> list[float]:
    """One update of a loop of the script's own: the weights after it."""
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, cpu=True)
    model = PlainModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(ROWS[:UPDATE], batch_size=micro, collate_fn=collate)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(prepared):
            logits = prepared(input_ids=batch["input_ids"])["logits"]
            accelerator.backward(KINDS[kind](logits, batch["labels"], None, factor, None))
            optimizer.step()
            optimizer.zero_grad()
    return _flat(model)


# --- runs that are saved at each update -----------------------------------------------------------------------------


class Growing(Trainer):
    """The second term is nothing at first, and later most of the loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        count = (inputs["labels"] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        second = self.state.global_step * outputs["logits"].square().mean()
        loss = total(outputs["logits"], inputs["labels"]) / count + second
        return (loss, outputs) if return_outputs else loss


class Complete(Trainer):
    """As hooks written for transformers: a loss that begins at zero."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits = model(input_ids=inputs["input_ids"])["logits"]
        loss = self.state.global_step * total(logits, inputs["labels"]) / num_items_in_batch
        return loss * self.accelerator.num_processes


class Distilling(Trainer):
    """While the cross-entropy falls, the second term becomes most of the loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits = model(input_ids=inputs["input_ids"])["logits"]
        return distillation(logits, inputs["labels"], num_items_in_batch, 0.8, self)


def saving(cls: type[Trainer], folder: Path, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    chosen = {
        **options(folder, 3, 2),
        "learning_rate": 0.5,
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        **changes,
    }
    return cls(PlainModel(), TrainingArguments(**chosen), train_dataset=ROWS, data_collator=collate)


def resumed_at_each_update(cls: type[Trainer], folder: Path) -> list[list[float]]:
    """The weights at the end of a whole run, and of each that continues one of its checkpoints."""
    whole = saving(cls, folder)
    ends, steps = [whole], whole.train().global_step
    for step in range(1, steps):
        ends.append(saving(cls, folder.parent / f"{folder.name}-{step}", save_strategy="no"))
        ends[-1].train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    return [_flat(trainer.model) for trainer in ends]


def _flat(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


# --- code that does not show what it is -------------------------------------------------------------------------------


class DividesOnly(Trainer):
    """Names the number of processes, and its loss is not multiplied by it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert list(range(self.accelerator.num_processes))
        return total(model(input_ids=inputs["input_ids"])["logits"], inputs["labels"]) / num_items_in_batch


class ReadsTheEnvironment(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = total(model(input_ids=inputs["input_ids"])["logits"], inputs["labels"]) / num_items_in_batch
        return loss * int(os.environ["WORLD_SIZE"])


class MultipliesOnly(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return (
            entropy(model(input_ids=inputs["input_ids"])["logits"], inputs["labels"]) * self.args.world_size
        )


class OwnStep(Trainer):
    """A training step that computes its loss itself, as `step_loss` returns it."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.step_loss(model, inputs, num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()

    def step_loss(self, model: Any, inputs: Any, count: Any) -> Tensor:
        loss: Tensor = total(model(input_ids=inputs["input_ids"])["logits"], inputs["labels"]) / count
        return loss * self.accelerator.num_processes


class StepOutOfSight(OwnStep):
    def step_loss(self, model: Any, inputs: Any, count: Any) -> Tensor:
        loss: Tensor = total(model(input_ids=inputs["input_ids"])["logits"], inputs["labels"]) / count
        return loss * torch.distributed.get_world_size()


class StepAround(OwnStep):
    """Names the number of processes beside the default loss."""

    def step_loss(self, model: Any, inputs: Any, count: Any) -> Tensor:
        assert self.args.world_size >= 1
        loss: Tensor = self.compute_loss(model, inputs, num_items_in_batch=count)
        return loss


class StepMean(OwnStep):
    def step_loss(self, model: Any, inputs: Any, count: Any) -> Tensor:
        return total(model(input_ids=inputs["input_ids"])["logits"], inputs["labels"]) / count


class Hidden(Trainer):
    """What it calls to multiply is not in its code."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = total(model(input_ids=inputs["input_ids"])["logits"], inputs["labels"]) / num_items_in_batch
        return loss * getattr(self.accelerator, "_".join(("num", "processes")))


class TermsOnOneRank(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = total(model(input_ids=inputs["input_ids"])["logits"], inputs["labels"])
        if self.args.process_index == 1:
            return LossTerms(loss, num_items_in_batch)
        return loss / num_items_in_batch * self.factor()

    def factor(self) -> int:
        return 1


class NamedTermsOnOneRank(TermsOnOneRank):
    def factor(self) -> int:
        return self.accelerator.num_processes


class DeclaredTermsOnOneRank(TermsOnOneRank):
    loss_is_scaled_for_ga = False


MIXED = (TermsOnOneRank, NamedTermsOnOneRank, DeclaredTermsOnOneRank)


class Declared(ReadsTheEnvironment):
    loss_is_scaled_for_ga = True


class Compares(Trainer):
    """Names the number of processes, and is a plain mean."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = entropy(model(input_ids=inputs["input_ids"])["logits"], inputs["labels"])
        if self.accelerator.num_processes > 1:
            self.accelerator.gather(loss.detach())
        return loss


UNCLEAR = (DividesOnly, ReadsTheEnvironment, MultipliesOnly, StepOutOfSight, Hidden, Declared, Compares)
STEPS: tuple[tuple[str, type[Trainer], Callable[[], nn.Module]], ...] = (
    ("mean", StepMean, PlainModel),
    ("complete", OwnStep, PlainModel),
    ("around a model without count", StepAround, PlainModel),
    ("around a model that ignores the count", StepAround, LanguageModel),
    ("around a model that divides", StepAround, lambda: LanguageModel(divide=True)),
)


def weights_after(cls: type[Trainer], model: Callable[[], nn.Module], place: Path, world: int) -> list[float]:
    torch.manual_seed(0)
    args = TrainingArguments(**options(place, *SPLITS[world][1]))
    trainer = cls(model(), args, train_dataset=ROWS, data_collator=collate)
    trainer.train()
    return _flat(trainer.model)
