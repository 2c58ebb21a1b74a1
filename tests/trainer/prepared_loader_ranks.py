"""Loaders that a Trainer's accelerator prepared, on any number of ranks: dealt, trained on, resumed, evaluated."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests.trainer.test_losses import samples, trainer_for
from torch.utils.data import DataLoader, IterableDataset

from windlass import Trainer

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
TRAINED, EVALUATED = 23, 9
UPDATE = 4  # samples of a micro-batch over all ranks, whatever their number


def rows(count: int) -> list[dict[str, Any]]:
    return [{**row, "index": index} for index, row in enumerate(samples(count))]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows(TRAINED))

    def __len__(self) -> int:
        return TRAINED


class Prepares(Trainer):
    """Loaders as scripts build them in their overrides."""

    streams = False

    def get_train_dataloader(self) -> Any:
        data: Any = Stream() if self.streams else rows(TRAINED)
        loader = DataLoader(data, batch_size=UPDATE // WORLD, shuffle=not self.streams)
        return self.accelerator.prepare(loader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.accelerator.prepare(DataLoader(rows(EVALUATED), batch_size=2))  # type: ignore[arg-type]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self.seen[-1:] != [
            inputs["index"].tolist()
        ]:  # the first ones are measured before they are trained on
            self.seen.append(inputs["index"].tolist())
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(x=inputs["x"], labels=inputs["labels"])
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    @property
    def seen(self) -> list[list[int]]:
        """The samples of each micro-batch of this rank."""
        return self.__dict__.setdefault("_seen", [])


def dealt(folder: Path) -> dict[str, Any]:
    trainer = trainer_for(folder)
    loader = trainer.accelerator.prepare(DataLoader(list(range(10)), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    own = [[] if loader.is_filler else batch.tolist() for batch in loader]
    theirs = trainer.get_train_dataloader()
    assert trainer.accelerator.prepare(theirs) is theirs, "it is dealt already"
    assert trainer.accelerator.prepare(loader, trainer.model) == (loader, trainer.model)
    return {"own": own}


def trained(folder: Path, resume: str | None = None, streams: bool = False) -> dict[str, Any]:
    kind = type("Kind", (Prepares,), {"streams": streams})
    trainer = trainer_for(
        folder, kind, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2, logging_steps=1,
        save_strategy="steps", save_steps=1, remove_unused_columns=False,
    )  # fmt: skip
    trainer.model.double()
    trainer.args.eval_dataset = None
    trainer.train(resume_from_checkpoint=resume)
    return {
        "weights": [p.detach().flatten().tolist() for p in trainer.model.parameters()],
        "steps": trainer.state.global_step,
        "seen": trainer.seen,
    }


def evaluated(folder: Path) -> dict[str, Any]:
    trainer = trainer_for(
        folder, Prepares, eval_dataset=rows(EVALUATED), remove_unused_columns=False,
        compute_metrics=lambda p: {"labels": p.label_ids.tolist()},
    )  # fmt: skip
    metrics = trainer.evaluate()
    output = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation")
    return {"loss": metrics["eval_loss"], "labels": metrics["eval_labels"], "samples": output.num_samples}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {"dealt": dealt(folder / "dealt"), "evaluated": evaluated(folder / "evaluated")}
    for streams in (False, True):
        name = "streams" if streams else "map"
        whole = trained(folder / name, streams=streams)
        checkpoints = [str(folder / name / f"checkpoint-{step}") for step in range(1, whole["steps"])]
        found[name] = {
            "whole": whole,
            "resumed": [trained(folder / f"{name}-{n}", c, streams) for n, c in enumerate(checkpoints)],
        }
    torch.set_default_dtype(torch.float32)
    (folder / f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
