"""The runs whose checkpoints lie in this folder: `runs.py CASE FOLDER [resume]`, on one process or on two.

They were written with `python -m tests.reliability.written_before.runs trainer FOLDER` and its siblings by the version
that `WRITTEN.md` names, and are kept to be continued by all later ones. Each ends by writing the weights to `end.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests.trainer.small import Net, rows

from windlass import Accelerator, EarlyStoppingCallback, Trainer, TrainingArguments

STEPS, SAVED = 6, 3


def trainer(folder: Path, resume: bool, **options: Any) -> dict[str, Any]:
    """A run with evaluations, a best model, a schedule and callbacks that have a state."""
    args = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=4, save_steps=SAVED, eval_strategy="steps",
        eval_steps=1, logging_steps=1, metric_for_best_model="loss", load_best_model_at_end=False, seed=7,
        lr_scheduler_type="cosine", report_to="none", disable_tqdm=True, use_cpu=True, save_in_background=False,
        restore_callback_states_from_checkpoint=False, **options,
    )  # fmt: skip
    made = Trainer(
        Net(),
        args,
        train_dataset=rows(40),
        eval_dataset=rows(8, seed=1),
        callbacks=[EarlyStoppingCallback(99)],
    )
    made.train(resume_from_checkpoint=resume)
    state = made.accelerator.get_state_dict(made.model)
    return {"weights": state, "history": [row["loss"] for row in made.state.log_history if "loss" in row]}


def sharded(folder: Path, resume: bool) -> dict[str, Any]:
    """The same on a model that is sharded over the processes."""
    return trainer(folder, resume, fsdp="full_shard", fsdp_config={"cpu_ram_efficient_loading": False})


def loop(folder: Path, resume: bool) -> dict[str, Any]:
    """A loop of the user's own, with a schedule and an object that is registered."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = torch.utils.data.DataLoader(rows(24), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    if resume:
        accelerator.load_state(str(folder / "state"))
        data = accelerator.skip_first_batches(data, SAVED)
    for batch in data:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen.losses.append(float(loss))
        if len(seen.losses) == SAVED and not resume:
            accelerator.save_state(str(folder / "state"))
    return {"weights": accelerator.get_state_dict(model), "history": seen.losses}


class Seen:
    """The losses so far."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


CASES = {"trainer": trainer, "sharded": sharded, "loop": loop}


def main() -> None:
    case, folder, resume = sys.argv[1], Path(sys.argv[2]), "resume" in sys.argv[3:]
    end = CASES[case](folder, resume)
    if os.environ.get("RANK", "0") == "0":
        weights = {name: value.tolist() for name, value in end["weights"].items()}
        (folder / "end.json").write_text(
            json.dumps({"weights": weights, "history": end["history"]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
