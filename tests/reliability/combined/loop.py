"""Carries out a recipe on one rank with a loop of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.reliability.combined import models
from tests.reliability.combined.losses import FACTOR, logits_of, summed, targets
from tests.reliability.combined.recipe import Outcome, Recipe
from tests.reliability.combined.training import data_of, digest, model_of, reread, settings
from tests.reliability.combined.watch import Instants, Watch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from windlass import (
    Accelerator,
    LossTerms,
    ParallelismConfig,
    Trainer,
    TrainingArguments,
    enable_full_determinism,
)
from windlass.optim.public import get_scheduler
from windlass.utils import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
)


class Log:
    """What the loop logged so far, which is part of what it saves."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"rows": list(self.rows), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows, self.step = list(state["rows"]), state["step"]

    def add(self, **row: Any) -> None:
        self.rows.append({"step": self.step, **row})


def train_in_a_loop(
    recipe: Recipe, folder: Path, instants: Instants, outcome: Outcome, resume: bool
) -> Callable[[], None]:
    """Train, fill `outcome`, and return what is left to do: looking at what was saved."""
    loop = Loop(recipe, folder, Watch(instants))
    outcome.seen = loop.watch.seen
    if resume and any(folder.glob("checkpoints/checkpoint_*")):
        loop.accelerator.load_state()
    loop.run()
    instants.stop()
    loop.watch.seen["updates"] = loop.log.step
    loop.watch.end(loop.model)
    outcome.bits = [digest(loop.model, loop.optimizer)]
    outcome.rows = loop.log.rows

    def look() -> None:
        outcome.evaluated = loop.evaluate()
        if hasattr(loop.optimizer.optimizer, "eval"):
            loop.optimizer.eval()  # what is saved is the average
        whole = loop.accelerator.unwrap_model(loop.model)
        state = loop.accelerator.get_state_dict(loop.model)
        if not hasattr(whole, "save_pretrained"):
            loop.accelerator.save_model(loop.model, str(folder / "final"))
        elif loop.accelerator.is_main_process:  # of sharded weights only it has whole ones
            whole.save_pretrained(folder / "final", state_dict=state)
        loop.accelerator.wait_for_everyone()
        if os.environ.get("RANK", "0") == "0":
            outcome.reread = reread(recipe, folder / "final")

    return look


class Loop:
    """A training loop as the guides write it."""

    def __init__(self, recipe: Recipe, folder: Path, watch: Watch) -> None:
        self.recipe, self.watch, self.log = recipe, watch, Log()
        self._asked = asked = settings(recipe)
        self.accelerator = accelerator = accelerator_of(recipe, asked, folder)
        if asked["full_determinism"]:
            enable_full_determinism(42)
        model = model_of(recipe)
        if asked.get("gradient_checkpointing"):
            model.gradient_checkpointing_enable()
        optimizer = optimizer_of(model, asked)
        size = asked["per_device_train_batch_size"]
        data = data_of(recipe)
        loader = DataLoader(
            data,
            batch_size=size,
            shuffle=recipe.data == "rows",
            collate_fn=models.pad,
            num_workers=asked.get("dataloader_num_workers", 0),
        )
        schedule = get_scheduler(
            asked.get("lr_scheduler_type", "linear"),
            optimizer,
            int(asked.get("warmup_steps", 0)),
            asked["max_steps"],
            asked.get("lr_scheduler_kwargs"),
        )
        self._evaluated = DataLoader(
            models.evaluation_rows(recipe.ragged), batch_size=4, collate_fn=models.pad
        )
        prepared = accelerator.prepare(model, optimizer, loader, schedule, self._evaluated)
        self.model, self.optimizer, self._loader, self._schedule, self._evaluated = prepared
        accelerator.register_for_checkpointing(self.log)

    def run(self) -> None:
        self.watch.begin(self.model)
        self.model.train()
        while self.log.step < self._asked["max_steps"]:
            self._epoch()
        self.accelerator.wait_for_everyone()

    def _epoch(self) -> None:
        for (
            batch
        ) in self._loader:  # it knows its pass: a state that was saved at the end of one is in the next
            with self.accelerator.accumulate(self.model):
                loss, labels = self._loss(batch), batch["labels"]
                self.accelerator.backward(loss)
                self._note(loss, labels)
                if self.accelerator.sync_gradients:
                    self._clip()
                    self.watch.update(self.model, self.optimizer)
                self.optimizer.step()
                self._schedule.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients and self._updated():
                return

    def _loss(self, batch: dict[str, Tensor]) -> Any:
        if self.recipe.loss == "own":
            return self.model(**batch)["loss"]
        logits = logits_of(self.model(input_ids=batch["input_ids"]))
        total, count = summed(self.recipe, logits, batch["labels"]), targets(self.recipe, batch["labels"])
        return LossTerms(total, count) if self.recipe.loss == "terms" else FACTOR * total / count

    def _note(self, loss: Any, labels: Tensor) -> None:
        """Log the mean over all processes."""
        terms = loss if isinstance(loss, LossTerms) else LossTerms(loss * len(labels), len(labels))
        total = self.accelerator.reduce(self._numbers(terms.sum, terms.weight), "sum")
        self.log.add(loss=float(total[0] / total[1]))

    def _numbers(self, *values: Any) -> Tensor:
        return torch.tensor([float(v) for v in values], dtype=torch.float64, device=self.accelerator.device)

    def _clip(self) -> None:
        if self._asked["max_grad_norm"]:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self._asked["max_grad_norm"])
            self.log.add(grad_norm=None if norm is None else float(norm))

    def _updated(self) -> bool:
        """After an update; returns True if it was the last one."""
        self.log.step += 1
        self.watch.updated()
        asked = self._asked
        if asked.get("eval_strategy") == "steps" and not self.log.step % asked["eval_steps"]:
            self.log.add(eval_loss=self.evaluate())
            self.model.train()
        if asked["save_strategy"] == "steps" and not self.log.step % asked["save_steps"]:
            self.accelerator.save_state(background=asked.get("save_in_background", True))
        return self.log.step >= asked["max_steps"]

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean over all targets."""
        averaged = hasattr(self.optimizer.optimizer, "eval")
        if averaged:
            self.optimizer.eval()
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64)
        for batch in self._evaluated:
            logits = logits_of(self.model(input_ids=batch["input_ids"]))[:, -batch["labels"].shape[1] :]
            kept = self.accelerator.gather_for_metrics(
                torch.stack([
                    self._numbers(summed(self.recipe, one[None], label[None]), targets(self.recipe, label[None]))
                    for one, label in zip(logits, batch["labels"], strict=True)
                ])
            )  # fmt: skip
            total += kept.sum(0).cpu()
        if averaged:
            self.optimizer.train()
        return float(total[0] / total[1]) * (FACTOR if self.recipe.loss == "func_factor" else 1.0)


def accelerator_of(recipe: Recipe, asked: dict[str, Any], folder: Path) -> Accelerator:
    plugins: dict[str, Any] = {}
    if recipe.strategy == "fsdp2":
        kind = asked.get("fsdp_config", {}).get("state_dict_type", "FULL_STATE_DICT")
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            state_dict_type=kind, activation_checkpointing=bool(asked.get("activation_checkpointing"))
        )
    elif recipe.strategy.startswith("zero"):
        plugins["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=int(recipe.strategy[-1]))
    precision = next((name for name in ("bf16", "fp16") if asked.get(name)), "no")
    return Accelerator(
        cpu=recipe.on_processor,
        mixed_precision=precision,
        gradient_accumulation_steps=recipe.accumulation,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
        project_config=ProjectConfiguration(
            project_dir=str(folder),
            automatic_checkpoint_naming=True,
            total_limit=asked["save_total_limit"],
        ),
        scheduler_unit="optimizer_step",
        parallelism_config=ParallelismConfig(**recipe.axes) if recipe.axes else None,
        **plugins,
    )


def optimizer_of(model: nn.Module, asked: dict[str, Any]) -> Any:
    """The optimizer of this name, built as a Trainer builds it."""
    args = TrainingArguments(
        output_dir="unused",
        optim=asked["optim"],
        optim_args=asked.get("optim_args"),
        learning_rate=asked["learning_rate"],
        use_cpu=asked["use_cpu"],
        report_to="none",
    )
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
    groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
    return kind(kind.arrange(model, groups) if hasattr(kind, "arrange") else groups, **options)
