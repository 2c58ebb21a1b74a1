"""Training goes on while its checkpoints are written."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.background_cases import Noting, SlowDisk, Weights, trainer_of

from windlass import Trainer, TrainerCallback
from windlass.checkpoint import host_memory
from windlass.checkpoint.files import Files
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.store import Store
from windlass.core.errors import CheckpointError, ConfigError, PeerError
from windlass.trainer import run_checkpoints


def saved_weights(folder: Path, step: int) -> torch.Tensor:
    layer = torch.nn.Module()
    layer.layer = torch.nn.Linear(4, 3, dtype=torch.float64)
    CheckpointManager(Store(folder)).load(folder / f"checkpoint-{step}").load_weights(layer)
    return layer.layer.weight.detach()


def test_updates_go_on_and_the_checkpoint_holds_those_before(folder: Path) -> None:
    weights = Weights()
    with SlowDisk(until=6) as disk:
        trainer = trainer_of(folder, disk, weights, save_steps=3, max_steps=8)
        trainer.train()
    steps, learned, names = zip(*trainer.notes, strict=True)
    assert steps == (3, 6, 8)
    assert learned[0] >= 6, "three updates were made while it was written"
    assert names == ("checkpoint-3", "checkpoint-6", "checkpoint-8")
    for step in steps:
        assert torch.equal(saved_weights(folder, step), weights.after[step])
        state = CheckpointManager(Store(folder)).load(folder / f"checkpoint-{step}").shared("trainer_state")
        assert state["global_step"] == step


def test_another_save_waits_for_the_one_under_way(folder: Path) -> None:
    """The disk opens only at the end of update 6, where saves of 2 and 4 have long been due: none is left out."""
    with SlowDisk(until=3) as disk:
        trainer = trainer_of(folder, disk, max_steps=4)
        trainer.train()
    assert [(step, name) for step, _, name in trainer.notes] == [(2, "checkpoint-2"), (4, "checkpoint-4")]
    assert trainer.notes[0][1] >= 3


class Telling(TrainerCallback):
    def __init__(self) -> None:
        self.told: list[tuple[int, bool]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        whole = (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "manifest.json").exists()
        self.told.append((state.global_step, whole))


class OwnFiles(Noting):
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        assert output_dir is not None
        (Path(output_dir) / "mine.txt").write_text(str(self.state.global_step))


class OwnSave(Noting):
    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        super()._save_checkpoint(model, trial)
        assert (self.output_folder / f"checkpoint-{self.state.global_step}").is_dir()


@pytest.mark.parametrize("how", ["callback", "own files", "own save", "argument", "memory"])
def test_training_waits_where_something_needs_the_checkpoint_at_once(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    telling, warned = Telling(), []
    logger = logging.getLogger("windlass.checkpoint.host_memory")
    monkeypatch.setattr(logger, "warning", lambda text, *values: warned.append(text % values))
    kind = {"own files": OwnFiles, "own save": OwnSave}.get(how, Noting)
    changes: dict[str, Any] = {
        "argument": {"save_in_background": False},
        "memory": {"save_host_memory": 100},
    }.get(how, {})
    callbacks = [telling] if how == "callback" else []
    trainer = trainer_of(folder, *callbacks, kind=kind, max_steps=4, **changes)
    trainer.train()
    assert trainer.notes == [(2, 2, "checkpoint-2"), (4, 4, "checkpoint-4")]
    assert telling.told == ([(2, True), (4, True)] if how == "callback" else [])
    assert len(warned) == (how == "memory")
    if how == "own files":
        assert (folder / "checkpoint-2" / "mine.txt").read_text() == "2"


def test_an_error_of_the_run_does_not_cost_what_is_being_saved(folder: Path) -> None:
    class Failing(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise RuntimeError("of the script")

    trainer = trainer_of(folder, Failing())
    with pytest.raises(RuntimeError, match="of the script"):
        trainer.train()
    assert saved_weights(folder, 2).shape == (3, 4)
    assert trainer._run.checkpoints.saver.memory.nbytes == 0, "nor does it keep the memory of copies"


def test_the_clock_asks_for_checkpoints_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time that has always passed: whenever nothing is being saved, and none for a step that is saved anyway."""
    trainer = trainer_of(folder, save_steps=5, max_steps=12, save_every=1e-9)
    trainer.train()
    steps = [step for step, _, _ in trainer.notes]
    assert steps == sorted(set(steps)), "no step is saved twice"
    assert {5, 10, 12} <= set(steps)
    assert len(steps) > 3
    kinds = {info.step: info.meta["ephemeral"] for info in Store(folder).list()}
    assert {step for step, ephemeral in kinds.items() if not ephemeral} == {5, 10, 12}


def test_the_clock_replaces_no_checkpoint_that_a_run_was_resumed_from(folder: Path) -> None:
    """The closing of the epoch is left, an evaluation with it, in whose course the time has passed."""
    epochs = {"per_device_train_batch_size": 16, "save_steps": 4, "eval_strategy": "epoch"}
    trainer_of(folder, max_steps=4, **epochs).train()
    trainer_of(folder, max_steps=8, save_every=1e-9, **epochs).train(resume_from_checkpoint=True)
    assert [(info.step, info.meta["ephemeral"]) for info in Store(folder).list()] == [(4, False), (8, False)]


def test_what_a_script_saves_by_itself_is_not_the_clocks(folder: Path) -> None:
    class Saving(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                trainer._save_checkpoint(trainer.model)

    trainer = trainer_of(folder, Saving(), save_steps=12, max_steps=12, save_every=1e-9)
    trainer.train()
    assert trainer.notes[0][0] < 4, "the clock came first"
    assert {4, 12} <= {info.step for info in Store(folder).list() if not info.meta["ephemeral"]}


def test_a_save_after_the_last_update_stands_when_its_caller_goes_on(folder: Path) -> None:
    class Saving(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer._save_checkpoint(trainer.model)

    trainer = trainer_of(folder, Saving(), max_steps=3, save_strategy="no")
    trainer.train()
    assert trainer.notes == [(3, 3, "checkpoint-3")]
    trainer._save_checkpoint(trainer.model)
    assert trainer.notes == [(3, 3, "checkpoint-3")] * 2


def test_times_and_sizes_that_are_none_are_refused_together(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer_of(folder, save_every="now and then", save_host_memory="much")
    assert [problem.field for problem in caught.value.problems] == ["save_every", "save_host_memory"]


@pytest.mark.dist
def test_ranks_agree_while_they_train(folder: Path) -> None:
    first, second = on_ranks(2, main, folder)
    for rank in (first, second):
        assert "object" in rank.pop("unsavable")
        assert "a prediction's own mistake" in rank.pop("prediction")
        assert "a sample's own mistake" in rank.pop("sample")
        assert "not for this rank" in rank.pop("refused")
        assert rank["memory"][0] == 0, "two copies do not fit where one does"
    assert first == second
    for kind in ("slow", "sharded"):
        assert first[kind]["same"] == [True] * 4
        step, learned, name = first[kind]["notes"][0]
        assert (step, name) == (3, "checkpoint-3")
        assert learned >= 6
    assert [(step, name) for step, _, name in first["failing"]["notes"]] == [
        (2, "checkpoint-2"), (4, None), (6, "checkpoint-6"), (8, "checkpoint-8"),
    ]  # fmt: skip
    assert first["failing"]["folders"] == ["checkpoint-2", "checkpoint-6", "checkpoint-8"]


# --- what each rank runs ----------------------------------------------------------------------------------------------


RANK = int(os.environ.get("RANK", "0"))


def slow(folder: Path, **how: Any) -> dict[str, Any]:
    """The disk of rank 1 is slow: both learn of the save at the same update, and it holds what was to be saved."""
    weights = Weights()
    with SlowDisk(until=6, only_rank=1) as disk:
        trainer = trainer_of(folder, disk, weights, save_steps=3, max_steps=12, **how)
        trainer.train()
    torch.distributed.barrier()
    saved = torch.nn.Module()
    saved.layer = torch.nn.Linear(4, 3, dtype=torch.float64)
    same = []
    for step in (3, 6, 9, 12):
        CheckpointManager(Store(folder)).load(folder / f"checkpoint-{step}").load_weights(saved)
        whole = weights.after[step]
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        same.append(torch.equal(saved.layer.weight, whole))
    return {"notes": trainer.notes, "same": same}


def failing(folder: Path) -> dict[str, Any]:
    """The disk of rank 1 fails while step 4 is saved: that checkpoint is lost to both, and nothing else."""
    # However slow the machine is, what failed is not saved between the saves that are due.
    run_checkpoints.FIRST_PAUSE = 1e6
    write = Files.write_some

    def fail(files: Files, descriptor: int, piece: memoryview) -> int:
        if RANK == 1 and threading.current_thread().name == "windlass-save-4":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(files, descriptor, piece)

    Files.write_some = fail  # type: ignore[method-assign]
    trainer = trainer_of(folder, max_steps=8)
    trainer.train()
    Files.write_some = write  # type: ignore[method-assign]
    torch.distributed.barrier()
    return {"notes": trainer.notes, "folders": sorted(p.name for p in folder.iterdir() if p.is_dir())}


class Odd(TrainerCallback):
    """Rank 0's state is nothing that can be written."""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"odd": 0 if RANK else object()}}


def unsavable(folder: Path) -> str:
    """The rank that has it says what it is; the other is not left waiting."""
    try:
        trainer_of(folder, Odd(), max_steps=2).train()
    except CheckpointError as error:
        return str(error)
    return "saved"


class FailsInEvaluation(Trainer):
    """Rank 1 cannot make its second prediction."""

    made = 0

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        self.made += 1
        if RANK == 1 and self.made == 2:
            raise ValueError("a prediction's own mistake")
        return super().prediction_step(*args, **kwargs)


class TornData(list[Any], TrainerCallback):
    """Rank 1 cannot read its second sample, from when it trains; before, ranks compare their rows."""

    read = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        if RANK == 1 and self.read == 2:
            raise ValueError("a sample's own mistake")
        return super().__getitem__(index)


def failing_evaluation(folder: Path, kind: type[Trainer] = Trainer, torn: bool = False) -> str:
    """The others are between batches, where ranks hear of each other: they learn of it all the same."""
    often = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 1}
    trainer = trainer_of(folder, kind=kind, **often)
    if torn:
        trainer.eval_dataset = TornData(trainer.eval_dataset)
        trainer.add_callback(trainer.eval_dataset)
    try:
        trainer.train()
    except (PeerError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "evaluated"


def refused_in_evaluation(folder: Path) -> str:
    """What rank 0 may not write is found out while all evaluate: the others hear of it there."""
    write = Files.write_some

    def refuse(files: Files, descriptor: int, piece: memoryview) -> int:
        if RANK == 0 and threading.current_thread().name == "windlass-save-2":
            raise ValueError("not for this rank")
        return write(files, descriptor, piece)

    class Waiting(TrainerCallback):
        """Predicts once the save has ended on this rank."""

        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer._run.checkpoints.saver.wait()

    Files.write_some = refuse  # type: ignore[method-assign]
    often = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 1}
    small = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 1, "max_steps": -1}
    trainer = trainer_of(folder, Waiting(), **often, **small)
    trainer.eval_dataset = list(trainer.eval_dataset) * 4
    try:
        trainer.train()
    except (PeerError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Files.write_some = write  # type: ignore[method-assign]
    return "saved"


def shared_memory(folder: Path) -> list[int]:
    """The processes of a machine take their copies out of the same memory: each has room for its own alone."""
    whole = host_memory.available_memory
    needed: list[int] = []
    trainer = trainer_of(folder, max_steps=4, fsdp="full_shard")
    memory = host_memory.HostMemory
    fits = memory._fits

    def noting(own: Any, more: int, gang: Any) -> bool:
        needed.append(more)
        host_memory.available_memory = lambda: int(more * 1.9)
        needed.append(int(fits(own, more, gang)))
        host_memory.available_memory = lambda: int(more * 2.9)
        return fits(own, more, gang)

    memory._fits = noting  # type: ignore[method-assign]
    trainer.train()
    host_memory.available_memory, memory._fits = whole, fits  # type: ignore[method-assign]
    return [*needed[1::2], *(learned - step for step, learned, _ in trainer.notes[:1])]


def main(folder: Path) -> dict[str, Any]:
    return {
        "slow": slow(folder / "slow"),
        "sharded": slow(folder / "sharded", fsdp="full_shard"),
        "failing": failing(folder / "failing"),
        "unsavable": unsavable(folder / "unsavable"),
        "prediction": failing_evaluation(folder / "prediction", FailsInEvaluation),
        "sample": failing_evaluation(folder / "sample", torn=True),
        "refused": refused_in_evaluation(folder / "refused"),
        "memory": shared_memory(folder / "memory"),
    }
