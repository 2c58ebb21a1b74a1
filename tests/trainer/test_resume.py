"""A run that is killed and resumed is the run that was never killed: the same bits, the same log, the same events."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer import resume_ranks
from tests.trainer.resume_cases import (
    KILLED,
    Case,
    Drawing,
    Net,
    Quiet,
    Recorder,
    Samples,
    Stream,
    arguments_for,
    bits,
    build,
    events,
    in_a_child,
    kill,
    killed_at_steps,
    resumable,
    rows,
    run,
    same_run,
)
from tests.trainer.test_losses import Model, samples, trainer_for
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from windlass import EarlyStoppingCallback, LossTerms, Trainer
from windlass.core.errors import CheckpointError

EVALUATED = {"eval_strategy": "epoch"}
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
}


def own_optimizers(model: torch.nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=4, shuffle=True)


class OwnSampler(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset)


class WithParts(Trainer):
    """A loss with a named part, which a report sums up over several updates."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        loss, logits = model(**inputs)
        count = len(inputs["labels"])
        terms = LossTerms(loss * count, count, {"size": logits.square().mean()})
        return (terms, (loss, logits)) if return_outputs else terms


class Intermittent(Quiet):
    """Reading draws for few samples: whether it does cannot be told from the first batch."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        return {**row, "x": row["x"] + random.random()} if index % 9 == 0 else row


def early_stopping() -> list[Any]:
    return [EarlyStoppingCallback(early_stopping_patience=3)]


CASES = {
    "bf16": Case({"bf16": True}),
    "fp16": Case({"fp16": True}),
    "saved by epoch": Case({"save_strategy": "epoch", **EVALUATED}),
    "saved by three": Case({"save_steps": 3, **EVALUATED}),
    "the best is loaded": Case(BEST),
    "the best alone is saved": Case({**BEST, "save_strategy": "best"}),
    "follows a metric": Case({**BEST, "lr_scheduler_type": "reduce_lr_on_plateau"}),
    "a stream": Case({"max_steps": 9}, dataset=Stream),
    "own optimizer and schedule": Case(optimizers=own_optimizers),
    "own loader": Case(trainer=OwnLoader),
    "own sampler": Case(trainer=OwnSampler),
    "a step that draws, data that do not": Case(dataset=Quiet, trainer=Drawing),
    "a step that draws, data that do intermittently": Case(dataset=Intermittent, trainer=Drawing),
    "parts of a loss": Case({"logging_steps": 4}, trainer=WithParts),
    "early stopping": Case(
        {**BEST, "eval_steps": 1, "learning_rate": 0.3, "num_train_epochs": 4}, callbacks=early_stopping
    ),
    "skipping": Case({"nonfinite_policy": "skip", "lr_scheduler_type": "cosine"}),
}


# Between them they draw in the data and in the step, scale, evaluate, keep the best, and read a stream.
AT_EVERY_STEP = ("fp16", "the best is loaded", "a stream", "a step that draws, data that do intermittently")


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((1, 5, 6, 20), id="some"),
        pytest.param(range(1, 21), id="all", marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_of_twenty_steps(steps: Sequence[int], folder: Path) -> None:
    case = Case({"num_train_epochs": 4, **EVALUATED})
    whole = run(folder / "whole", case)
    assert whole.state.global_step == 20
    for step in steps:
        again = folder / f"killed-{step}"
        assert in_a_child(partial(run, again, case, kill("on_step_end", step))) == KILLED
        same_run(again, run(again, case, resume=resumable(again)), folder / "whole", whole)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in AT_EVERY_STEP else pytest.mark.slow) for name in CASES]
)
def test_a_run_killed_at_every_step(name: str, folder: Path) -> None:
    case = CASES[name]
    whole = run(folder / "whole", case)
    steps = whole.state.global_step
    assert steps >= 4
    killed = killed_at_steps(folder / "killed", case, range(1, steps + 1))
    same_run(folder / "killed", killed, folder / "whole", whole)


@pytest.mark.parametrize("name", [name for name in CASES if name not in AT_EVERY_STEP])
def test_a_run_killed_three_times(name: str, folder: Path) -> None:
    """Early, at the edge of an epoch or beside it, and at the end."""
    case = CASES[name]
    whole = run(folder / "whole", case)
    steps = whole.state.global_step
    assert steps >= 4
    killed = killed_at_steps(folder / "killed", case, (2, steps // 2 + 1, steps))
    same_run(folder / "killed", killed, folder / "whole", whole)


def test_workers_killed_and_resumed(folder: Path) -> None:
    """Worker processes read ahead: what they had read when the run was killed is read again, with the same draws."""
    case = Case({"dataloader_num_workers": 2, "num_train_epochs": 1})
    whole = run(folder / "whole", Case({"num_train_epochs": 1}))
    killed = killed_at_steps(folder / "killed", case, (1, 2, 3))
    assert bits(killed) == bits(whole)
    assert killed.state.global_step == whole.state.global_step == 5


# --- a run that is over -----------------------------------------------------------------------------------------------


def test_a_run_that_had_ended_trains_no_more(folder: Path) -> None:
    case = Case(EVALUATED)
    whole = run(folder, case)
    before = bits(whole)
    again = run(folder, case, Recorder(folder / "events"), resume=True)
    assert bits(again) == before
    assert not [line for line in events(folder / "events") if line.startswith("step_end")]


def test_a_kill_after_the_last_save_adds_no_update(folder: Path) -> None:
    """The run ends within an epoch, so that only the number of updates tells that it is over."""
    case = Case({"max_steps": 7})
    whole = run(folder / "whole", case)
    assert in_a_child(lambda: run(folder / "killed", case, kill("on_save", 7))) == KILLED
    same_run(folder / "killed", run(folder / "killed", case, resume=True), folder / "whole", whole)


def test_early_stopping_that_was_decided_stays_decided(folder: Path) -> None:
    """Killed right after the save that follows the decisive evaluation."""
    case = CASES["early stopping"]
    whole = run(folder / "whole", case)
    last = whole.state.global_step
    assert last < whole.state.max_steps, "it must have stopped early"
    killed = folder / "killed"
    assert in_a_child(lambda: run(killed, case, kill("on_save", last))) == KILLED
    same_run(killed, run(killed, case, resume=True), folder / "whole", whole)


# --- another split, another length ----------------------------------------------------------------------------------


# Checkpoint 3 stands when a run is killed in update 4.
AT_ONCE = Case({"save_in_background": False})


@pytest.fixture(scope="module")
def saved_at_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    """Folder and trainer of an undisturbed run."""
    place = tmp_path_factory.mktemp("saved-at-once")
    return place, run(place, AT_ONCE)


@pytest.mark.parametrize(("micro", "accumulation"), [(8, 1), (2, 4)])
def test_the_order_goes_on_under_another_split(
    micro: int, accumulation: int, folder: Path, saved_at_once: tuple[Path, Trainer]
) -> None:
    _, whole = saved_at_once
    killed = folder / "killed"
    assert in_a_child(lambda: run(killed, AT_ONCE, kill("on_step_end", 4))) == KILLED
    split = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    resumed = run(killed, AT_ONCE, resume=True, **split)
    assert isinstance(resumed.model, Net)
    assert isinstance(whole.model, Net)
    assert resumed.model.seen == whole.model.seen[3 * 8 :]


@pytest.mark.dist
def test_ranks_that_keep_buffers_of_their_own(folder: Path) -> None:
    first, second = on_ranks(2, main, folder)
    assert first == second
    assert first[0] == first[1]


@pytest.mark.dist
def test_ranks_whose_own_loaders_differ_in_length(folder: Path) -> None:
    """The longest decides; a rank that has run out takes part with nothing, also in a resumed run."""
    first, second = on_ranks(2, uneven_runs, folder)
    for rank in (first, second):
        assert rank["whole"]["steps"] == [6, 6]
        assert rank["whole"]["epochs"] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])
        for resumed in rank["resumed"]:
            assert {**resumed, "seen": 0} == {**first["whole"], "seen": 0}
    assert first["whole"]["weights"] == second["whole"]["weights"]


@pytest.mark.parametrize(("micro", "accumulation", "updates"), [(8, 2, 3 + 1 + 3), (2, 2, 3 + 3 + 9)])
def test_no_sample_is_lost_when_updates_change_their_size(
    micro: int, accumulation: int, updates: int, folder: Path
) -> None:
    """Two epochs are two epochs: 24 of 36 samples were seen in three updates of 8 when the size changed."""
    case = Case({"lr_scheduler_type": "linear", "save_in_background": False})
    whole = run(folder / "whole", case)
    killed = folder / "killed"
    assert in_a_child(lambda: run(killed, case, kill("on_step_end", 4))) == KILLED
    split = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    resumed = run(killed, case, resume=True, logging_steps=1, **split)
    assert isinstance(resumed.model, Net)
    assert isinstance(whole.model, Net)
    assert resumed.model.seen == whole.model.seen[3 * 8 :]
    assert (resumed.state.global_step, resumed.state.max_steps) == (updates, updates)
    per_epoch = -(-36 // (micro * accumulation))
    left = -(-12 // (micro * accumulation))
    epochs = [logs["epoch"] for logs in resumed.state.log_history if logs["step"] > 3 and "loss" in logs]
    assert epochs == pytest.approx([(per_epoch - left + 1 + i) / per_epoch for i in range(updates - 3)])


def test_a_finished_run_is_extended(folder: Path) -> None:
    """More epochs than at first: the schedule's length apart (here constant), as if asked for at once."""
    case = Case({"lr_scheduler_type": "constant"})
    whole = run(folder / "whole", case)
    run(folder / "short", case, num_train_epochs=1)
    longer = run(folder / "short", case, resume=True)
    assert bits(longer) == bits(whole)
    assert longer.state.global_step == 10


# --- what can't be resumed from -------------------------------------------------------------------------------------


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    logger = logging.getLogger("windlass.checkpoint.store")
    monkeypatch.setattr(logger, "warning", lambda text, *values: lines.append(text % values))
    return lines


def test_a_damaged_newest_checkpoint_is_passed_over(
    folder: Path, warned: list[str], saved_at_once: tuple[Path, Trainer]
) -> None:
    killed = folder / "killed"
    assert in_a_child(lambda: run(killed, AT_ONCE, kill("on_step_end", 4))) == KILLED
    file = killed / "checkpoint-3" / "optimizer.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    resumed = run(killed, AT_ONCE, resume=True)
    assert len(warned) == 1
    assert "checkpoint-2" in warned[0]
    assert "optimizer.safetensors" in warned[0]
    same_run(killed, resumed, *saved_at_once)


def test_every_checkpoint_damaged_is_an_error(folder: Path) -> None:
    run(folder, Case(), max_steps=2)
    for file in folder.glob("checkpoint-*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"No valid checkpoint found in output directory"):
        run(folder, Case(), resume=True)
    with pytest.raises(
        CheckpointError, match=r"Can't find a valid checkpoint at .*checkpoint-2.*model\.safetensors"
    ):
        run(folder, Case(), resume=str(folder / "checkpoint-2"))


@pytest.mark.parametrize("resume", [True, "nowhere"])
def test_nothing_to_resume_from_is_an_error(resume: bool | str, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="valid checkpoint"):
        run(folder, Case(), resume=resume)


def test_a_checkpoint_of_another_model_lists_the_shapes(folder: Path) -> None:
    run(folder, Case(), max_steps=1)
    model = Net(width=20)
    before = [value.clone() for value in model.state_dict().values()]
    trainer = Trainer(model, arguments_for(folder), train_dataset=Samples())
    with pytest.raises(CheckpointError, match=r"body\.weight.*16.*20|body\.weight.*20.*16") as caught:
        trainer.train(resume_from_checkpoint=True)
    assert "7 of another shape" in str(caught.value)
    assert all(map(torch.equal, before, model.state_dict().values())), "a refused checkpoint changes nothing"


def test_weights_alone_are_no_run(folder: Path) -> None:
    run(folder, Case(), max_steps=1, save_only_model=True)
    with pytest.raises(CheckpointError, match=r"checkpoint-1 holds only the model .*save_only_model=True"):
        run(folder, Case(), resume=True)


def test_an_optimizer_keeps_its_identity(folder: Path) -> None:
    run(folder, Case(optimizers=own_optimizers), max_steps=2)
    trainer = build(folder, Case(optimizers=own_optimizers), max_steps=3)
    optimizer, schedule = trainer.optimizer, trainer.lr_scheduler
    trainer.train(resume_from_checkpoint=True)
    assert trainer.optimizer is optimizer
    assert trainer.lr_scheduler is schedule
    assert schedule.last_epoch == 3
    assert [row["step"] for row in rows(folder) if "train_loss" in row] == [3]


# --- several ranks --------------------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "steps"), [(2, [2, 5, 6, 9, 10]), pytest.param(3, [2, 3, 4, 6], marks=pytest.mark.slow)]
)
def test_ranks_killed_one_at_a_time(world: int, steps: list[int], folder: Path) -> None:
    """Batch norm included: its statistics differ over ranks while a step is under way, but not what is evaluated."""
    on_ranks(world, resume_ranks.main, folder, steps)
    assert rows(folder / "whole") == rows(folder / "killed")
    ends = [
        {name: json.loads((folder / f"{name}-{rank}.json").read_text()) for name in ("whole", "killed")}
        for rank in range(world)
    ]
    assert all(end["whole"]["step"] == end["killed"]["step"] == steps[-1] for end in ends)
    assert len({end[name]["bits"] for end in ends for name in end}) == 1, "not all ranks have the same bits"


def test_a_resume_with_nothing_left_to_train_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a checkpoint whose path is an object."""
    run(folder, Case(), max_steps=3)
    ends: list[tuple[dict[str, Any], str]] = [
        ({"max_steps": 2}, "max_steps=2 ends this run at step 2"),
        ({"max_steps": 1}, "max_steps=1 ends this run at step 1"),
        ({"max_steps": -1, "num_train_epochs": 0.4}, "num_train_epochs=0.4 ends this run at step 2"),
        ({"max_steps": 3}, ""),
    ]
    for changes, said in ends:
        caplog.clear()
        resumed = run(folder, Case(), resume=folder / "checkpoint-2", log_level="warning", **changes)
        assert resumed.state.global_step == (2 if said else 3)
        assert said in caplog.text
        assert ("checkpoint-2 is at step 2: nothing is left to train" in caplog.text) is bool(said)


def test_auto_starts_afresh_or_goes_on(folder: Path) -> None:
    case = Case()
    whole = run(folder / "whole", case)
    place = folder / "auto"
    assert in_a_child(lambda: run(place, case, kill("on_step_end", 4), resume="auto")) == KILLED
    same_run(place, run(place, case, resume="auto"), folder / "whole", whole)


def test_auto_never_passes_over_what_is_damaged(folder: Path) -> None:
    run(folder, Case(), max_steps=2)
    for file in folder.glob("checkpoint-*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="No valid checkpoint found in output directory"):
        run(folder, Case(), resume="auto")


# --- what each rank runs ----------------------------------------------------------------------------------------------


class Centred(Model):
    """Takes a running mean of its inputs off them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if self.training and torch.is_grad_enabled():
            self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return super().forward(x - self.mean, labels)


def weights(folder: Path, resume: str | None = None) -> Any:
    torch.manual_seed(0)
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "ddp_timeout": 30}
    trainer = trainer_for(folder, model=Centred(), ddp_broadcast_buffers=False, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return [p.tolist() for p in trainer.model.parameters()]


def main(folder: Path) -> list[Any]:
    whole = weights(folder / "whole")
    return [whole, weights(folder / "resumed", str(folder / "whole" / "checkpoint-2"))]


RANK = int(os.environ.get("RANK", "0"))
SAMPLES = (11, 5)


class UnevenLoader(Trainer):
    """The second rank runs out in the second of three updates."""

    seen: list[int]

    def get_train_dataloader(self) -> Any:
        rows = [{**row, "index": index} for index, row in enumerate(samples(SAMPLES[RANK]))]
        return DataLoader(rows, batch_size=2, shuffle=True)  # type: ignore[arg-type]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        index = inputs.pop("index")
        self.seen = [*getattr(self, "seen", []), *index.tolist()]
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def uneven_outcome(folder: Path, resume: str | None = None) -> dict[str, Any]:
    trainer = trainer_for(
        folder,
        UnevenLoader,
        max_steps=-1,
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        ddp_timeout=30,
        save_strategy="steps",
        save_steps=1,
        remove_unused_columns=False,
    )
    trainer.train(resume_from_checkpoint=resume)
    weights = [p.detach().flatten().tolist() for p in trainer.model.parameters()]
    logs = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    epochs = [row["epoch"] for row in trainer.state.log_history if "loss" in row]
    steps = trainer.state.global_step, trainer.state.max_steps
    return {"weights": weights, "logs": logs, "epochs": epochs, "steps": steps, "seen": len(trainer.seen)}


def uneven_runs(folder: Path) -> dict[str, Any]:
    whole = uneven_outcome(folder / "whole")
    resumed = [
        uneven_outcome(folder / f"resumed-{step}", str(folder / "whole" / f"checkpoint-{step}"))
        for step in range(1, 6)
    ]
    return {"whole": whole, "resumed": resumed}
