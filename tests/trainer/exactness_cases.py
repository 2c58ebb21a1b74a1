"""One small language model under every kind of loss that a script may bring, and the same training written by hand.

Everything is float64: what differs by more than rounding is a mistake in a denominator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from windlass import LossTerms, Trainer, TrainingArguments
from windlass.dist.sharded import whole

VOCABULARY, WIDTH = 17, 12
UPDATE, LEARNING_RATE, MAX_NORM = 12, 1e-2, 0.3
# By ranks. In each epoch the last update differs from the others; what follows on it is seen in one process.
EPOCHS = {1: 2, 2: 1, 3: 1}
SPLITS = {1: [(12, 1), (4, 3), (1, 12)], 2: [(6, 1), (2, 3)], 3: [(4, 1), (2, 2)]}
CLASS_WEIGHTS = torch.linspace(1, 2, VOCABULARY, dtype=torch.float64)


class LanguageModel(nn.Module):
    """Predicts the next token from this one; takes loss keywords as models of transformers do."""

    def __init__(self, shift: bool = True, divide: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.shift, self.divide = shift, divide

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, **loss_options: Any
    ) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        if labels is None:
            return {"logits": logits}
        count = loss_options.get("num_items_in_batch") if self.divide else None
        return {"loss": cross_entropy(logits, labels, self.shift, count), "logits": logits}


class PlainModel(LanguageModel):
    """Takes no loss keywords: the mean over its batch is all it can give."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(input_ids, labels)


def cross_entropy(logits: Tensor, labels: Tensor, shift: bool, count: Any = None, **options: Any) -> Tensor:
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    flat = logits.reshape(-1, VOCABULARY), labels.reshape(-1)
    if count is None:
        return F.cross_entropy(*flat, **options)
    return F.cross_entropy(*flat, reduction="sum", **options) / count


class WithPenalty(LanguageModel):
    """Divides by the count, and adds a term that does not: as the balance of experts is added."""

    def __init__(self, divide: bool) -> None:
        super().__init__(divide=divide)
        # Not the weight of a layer, which a sharded model has for the layer's forward alone.
        self.size = nn.Parameter(torch.linspace(0, 1, VOCABULARY))

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, **loss_options: Any
    ) -> dict[str, Tensor]:
        outputs = super().forward(input_ids, labels, **loss_options)
        return outputs if labels is None else {**outputs, "loss": outputs["loss"] + penalty(self, None)}


def penalty(model: Any, inputs: Any) -> Tensor:
    return 1e-2 * model.size.square().sum()


class OwnStep(Trainer):
    """The training step of scripts before there was a count, which therefore no model gets."""

    def training_step(self, model: Any, inputs: Any) -> Tensor:  # type: ignore[override]
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


class ThreeArguments(Trainer):
    """The `compute_loss` of the guides before there was a count."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
        labels = inputs.pop("labels")
        outputs = model(input_ids=inputs["input_ids"], labels=labels)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class FourArguments(Trainer):
    """Divides by the count it is given."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(input_ids=inputs["input_ids"])
        loss = cross_entropy(outputs["logits"], labels, True, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class TimesRanks(FourArguments):
    """Divides by the count and multiplies by the ranks, as hooks written for other trainers do."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss if num_items_in_batch is None else loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class Declared(TimesRanks):
    loss_is_scaled_for_ga = True


class Terms(Trainer):
    """Weighted targets: only a sum and a weight can say what they are a mean over."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(input_ids=inputs["input_ids"])
        targets = labels[:, 1:]
        total = cross_entropy(outputs["logits"], labels, True, 1.0, weight=CLASS_WEIGHTS)
        weight = (CLASS_WEIGHTS[targets.clamp(min=0)] * (targets != -100)).sum()
        loss = LossTerms(total, weight)
        return (loss, outputs) if return_outputs else loss


def size(model: Any, inputs: Any) -> Tensor:
    """An auxiliary term: a mean over samples, of weights that the main term uses too."""
    return model.embed(inputs["input_ids"][:, 0]).square().sum(-1).mean()


class TermsWithParts(Terms):
    """The parts are means over samples, which no weight of the targets may touch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        terms, outputs = super().compute_loss(model, inputs, return_outputs=True)
        terms.aux["size"] = size(model, inputs)
        return (terms, outputs) if return_outputs else terms


def loss_function(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return cross_entropy(outputs["logits"], labels, True, num_items_in_batch)


@dataclass(frozen=True)
class Kind:
    """A way to bring a loss, and the mean over the whole update that it must come to."""

    trainer: type[Trainer] = Trainer
    model: Callable[[], LanguageModel] = PlainModel
    arguments: dict[str, Any] | None = None
    function: Callable[..., Any] | None = None
    shift: bool = True
    formula: dict[str, Any] | None = None
    part: Callable[[Any, Any], Tensor] | None = None

    def mean(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model.head(torch.tanh(model.embed(batch["input_ids"])))
        mean = cross_entropy(logits, batch["labels"], self.shift, **(self.formula or {}))
        return mean if self.part is None else mean + self.part(model, batch)


KINDS = {
    "a plain mean": Kind(),
    "a model that divides": Kind(model=lambda: LanguageModel(divide=True)),
    "a model that divides a part of its loss": Kind(model=lambda: WithPenalty(divide=True), part=penalty),
    "a step that leaves the count out": Kind(OwnStep, model=lambda: LanguageModel(divide=True)),
    "a model that takes the count and ignores it": Kind(model=LanguageModel),
    "labels that are not shifted": Kind(model=lambda: LanguageModel(shift=False, divide=True), shift=False),
    "three arguments": Kind(ThreeArguments),
    "four arguments": Kind(FourArguments),
    "four arguments, times the ranks": Kind(TimesRanks),
    "declared to be scaled": Kind(Declared),
    "weighted terms with parts": Kind(TermsWithParts, formula={"weight": CLASS_WEIGHTS}, part=size),
    "a loss function": Kind(function=loss_function),
    "terms": Kind(Terms, formula={"weight": CLASS_WEIGHTS}),
    "smoothed": Kind(arguments={"label_smoothing_factor": 0.1}, formula={"label_smoothing": 0.1}),
}


def samples(count: int) -> list[dict[str, list[int]]]:
    """Ragged rows; some have ignored targets, one has nothing else."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(count):
        length = int(torch.randint(3, 9, (1,), generator=generator))
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        labels = [-100, -100, *ids[2:]] if index % 3 == 0 else ids[:]
        made.append({"input_ids": ids, "labels": [-100] * length if index == 5 else labels})
    return made


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100}
    return {
        name: torch.tensor([row[name] + [value] * (width - len(row[name])) for row in rows])
        for name, value in fill.items()
    }


# 25 samples: the last update of an epoch has a single one, so that with several ranks all but one have nothing to do.
TRAIN, EVAL = samples(25), samples(13)
# Two ranks with micro-batches of two: in the last update one of them has three, the other two.
UNEVEN, UNEVEN_SPLIT = samples(33), "2 x 3, uneven"

Outcome = dict[str, list[float]]


def train(
    kind: Kind,
    place: Path,
    micro: int,
    accumulation: int,
    rows: list[dict[str, list[int]]] = TRAIN,
    epochs: int = 1,
    **arguments: Any,
) -> Outcome:
    """The run by Windlass, in this process's world.

    Args:
        place: the output folder of all ranks: had each its own, they would look for a while whether they share a disk.
    """
    torch.manual_seed(0)
    model = kind.model()
    args = TrainingArguments(
        output_dir=str(place),
        num_train_epochs=epochs,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        per_device_eval_batch_size=micro,
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_NORM,
        train_sampling_strategy="sequential",
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        disable_tqdm=True,
        log_level="error",
        use_cpu=True,
        ddp_timeout=60,
        **(kind.arguments or {}),
        **arguments,
    )
    trainer = kind.trainer(
        model,
        args,
        train_dataset=rows,
        eval_dataset=EVAL,
        data_collator=collate,
        compute_loss_func=kind.function,
    )
    trainer.train()
    history = trainer.state.log_history
    return {
        "weights": _flat(model),
        "loss": [row["loss"] for row in history if "loss" in row],
        "norm": [row["grad_norm"] for row in history if "loss" in row],
        "eval": [row["eval_loss"] for row in history if "eval_loss" in row],
    }


def train_by_hand(kind: Kind, rows: list[dict[str, list[int]]], epochs: int) -> Outcome:
    """The same run without Windlass: whole updates, one process, one mean."""
    torch.manual_seed(0)
    model = kind.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    starts = range(0, len(rows), UPDATE)
    total = epochs * len(starts)
    outcome: Outcome = {"loss": [], "norm": [], "eval": []}
    for step in range(total):
        start = starts[step % len(starts)]
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / total)
        loss = kind.mean(model, collate(rows[start : start + UPDATE]))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        outcome["loss"].append(loss.item())
        outcome["norm"].append(norm.item())
        if (step + 1) % len(starts) == 0:
            outcome["eval"].append(kind.mean(model, collate(EVAL)).item())
    outcome["weights"] = _flat(model)
    return outcome


def _flat(model: nn.Module) -> list[float]:
    return torch.cat([whole(parameter).detach().flatten() for parameter in model.parameters()]).tolist()
