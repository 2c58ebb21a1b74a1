"""Ctrl-C: the run stops between two updates and leaves a state that resumes; cells run again."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import Started, launch, run_script
from tests.trainer.small import Net, arguments, rows, weights_hash
from torch import Tensor, nn

from windlass import Trainer, TrainerCallback

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a process")


class Presses(TrainerCallback):
    """Presses Ctrl-C at an event of a step."""

    def __init__(self, event: str, step: int, times: int = 1) -> None:
        self.pressed = False

        def press(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step and not self.pressed:
                self.pressed = True
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)

        setattr(self, event, press)


def trainer(folder: Path, callbacks: list[Any] | None = None, **changes: Any) -> Trainer:
    args = arguments(
        folder, **{"max_steps": 8, "gradient_accumulation_steps": 2, "logging_steps": 3, **changes}
    )
    return Trainer(Net(), args, train_dataset=rows(40), eval_dataset=rows(4), callbacks=callbacks)


@pytest.mark.parametrize(("event", "step", "left"), [
    ("on_train_begin", 0, 0), ("on_step_begin", 2, 3), ("on_substep_end", 2, 3), ("on_step_end", 3, 3),
    ("on_log", 3, 3), ("on_evaluate", 4, 4), ("on_save", 4, 4), ("on_epoch_end", 5, 5),
])  # fmt: skip
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(
    tmp_path: Path, event: str, step: int, left: int
) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    whole = trainer(tmp_path / "whole", **changes)
    whole.train()
    stopped = trainer(tmp_path / "cut", [Presses(event, step)], **changes)
    assert stopped.train().global_step == left
    assert (tmp_path / "cut" / f"checkpoint-{left}").is_dir()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = trainer(tmp_path / "cut", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert weights_hash(resumed.model) == weights_hash(whole.model)
    assert resumed.state.log_history[-2]["step"] == whole.state.log_history[-2]["step"]


class Committed(TrainerCallback):
    """Notes the step of each checkpoint."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


@pytest.mark.parametrize("saving", ["steps", "epoch"])
def test_stopped_by_the_last_update_of_an_epoch_it_saves_once_and_leaves_the_evaluation(
    tmp_path: Path, saving: str
) -> None:
    """The run that resumes it makes the evaluation at the end of the epoch, which may take long."""
    changes = {"eval_strategy": "epoch", "save_strategy": saving, "save_steps": 5}
    whole = trainer(tmp_path / "whole", **changes)
    whole.train()
    saved = Committed()
    stopped = trainer(tmp_path / "cut", [Presses("on_step_end", 5), saved], **changes)
    assert stopped.train().global_step == 5
    assert saved.steps == [5]
    assert not [row for row in stopped.state.log_history if "eval_loss" in row]
    resumed = trainer(tmp_path / "cut", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert weights_hash(resumed.model) == weights_hash(whole.model)
    losses = [
        [(row["step"], row["eval_loss"]) for row in run.state.log_history if "eval_loss" in row]
        for run in (resumed, whole)
    ]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]] == [5, 8]


class OverRows(nn.Module):
    """Its loss is the mean over rows of the mean over a row's targets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 8)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.table(input_ids)
        each = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return {"loss": (each.sum(1) / (labels != -100).sum(1)).mean(), "logits": logits}


def test_an_evaluation_that_is_made_again_weights_its_batches_as_the_run_does(tmp_path: Path) -> None:
    """A single row does not show over what the loss is a mean: it is in the checkpoint."""
    data = [
        {"input_ids": torch.arange(4) + i % 3, "labels": torch.where(torch.arange(4) <= i % 4, i % 8, -100)}
        for i in range(24)
    ]
    changes = {
        "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "per_device_train_batch_size": 6,
        "per_device_eval_batch_size": 1,
    }  # fmt: skip

    def run(folder: str, resume: bool = False, callbacks: Any = None) -> list[float]:
        made = Trainer(
            OverRows(), arguments(tmp_path / folder, **changes), train_dataset=data, eval_dataset=data[:7],
            callbacks=callbacks,
        )  # fmt: skip
        made.train(resume_from_checkpoint=resume)
        return [row["eval_loss"] for row in made.state.log_history if "eval_loss" in row]

    whole = run("whole")
    assert run("cut", callbacks=[Presses("on_prediction_step", 2)]) == []
    assert run("cut", resume=True) == whole


def test_it_saves_even_where_nothing_was_to_be_saved(tmp_path: Path) -> None:
    stopped = trainer(tmp_path, [Presses("on_step_end", 2)])
    stopped.train()
    assert (tmp_path / "checkpoint-2").is_dir()


def test_pressed_twice_it_stops_at_once(tmp_path: Path) -> None:
    stopped = trainer(tmp_path, [Presses("on_step_end", 2, times=2)])
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not stopped.is_in_train
    stopped.callback_handler.callbacks = [
        c for c in stopped.callback_handler.callbacks if not isinstance(c, Presses)
    ]
    assert stopped.train().global_step == 8


def test_the_same_cell_runs_again(tmp_path: Path) -> None:
    def cell() -> str:
        made = trainer(tmp_path, [Presses("on_step_end", 2)])
        made.train()
        made.train()
        return weights_hash(made.model)

    assert cell() == cell()


def test_a_handler_of_the_scripts_own_is_left_alone(tmp_path: Path) -> None:
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        assert trainer(tmp_path, [Presses("on_step_end", 2)]).train().global_step == 8
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [signal.SIGINT]


def test_training_in_a_thread_works(tmp_path: Path) -> None:
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(trainer(tmp_path).train().global_step))
    thread.start()
    thread.join(60)
    assert done == [8]


SCRIPT = """
import sys
from tests.trainer.small import Net, arguments, rows, weights_hash
from torch import Tensor, nn
from windlass import Trainer, TrainerCallback

class Tells(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("step", state.global_step, flush=True)

folder, resume = sys.argv[1], len(sys.argv) > 2
steps = 10**6 if not resume else int(sys.argv[2])
args = arguments(folder, max_steps=steps, lr_scheduler_type="constant")
trainer = Trainer(Net(), args, train_dataset=rows(40), callbacks=[Tells])
output = trainer.train(resume_from_checkpoint=resume or None)
print("ended", output.global_step, weights_hash(trainer.model), flush=True)
"""


def test_a_signal_from_outside(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    with Started(script, folder) as process:
        for line in process.stdout:
            if line.startswith("step"):
                process.send_signal(signal.SIGINT)
                break
        code, said = process.end()
    assert code == 0, said
    assert 'trainer.train(resume_from_checkpoint="auto")' in said
    step = int(said.split("ended ")[1].split()[0])
    assert (folder / f"checkpoint-{step}").is_dir()
    again = run_script(script, folder, step + 2)
    (last,) = (line for line in again.splitlines() if line.startswith("ended"))
    _, reached, digest = last.split()
    whole = Trainer(
        Net(),
        arguments(tmp_path / "whole", max_steps=step + 2, lr_scheduler_type="constant"),
        train_dataset=rows(40),
    )
    whole.train()
    assert (int(reached), digest) == (step + 2, weights_hash(whole.model))


RANKS = """
import signal, sys
from pathlib import Path
from tests.trainer.small import Net, arguments, rows, weights_hash
from torch.distributed.tensor import DTensor
from windlass import Accelerator, FullyShardedDataParallelPlugin, Trainer, TrainerCallback

class Presses(TrainerCallback):
    def __init__(self, *ranks):
        self.ranks = ranks

    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index in self.ranks and state.global_step == 3:
            signal.raise_signal(signal.SIGINT)

folder = Path(sys.argv[1])

def trainer(name, *callbacks):
    args = arguments(folder / name, max_steps=12, ddp_backend="gloo")
    return Trainer(Net(), args, train_dataset=rows(64), callbacks=list(callbacks))

whole = trainer("whole")
whole.train()
stopped = trainer("cut", Presses(1))
step = stopped.train().global_step
resumed = trainer("cut")
resumed.train(resume_from_checkpoint=True)
same = weights_hash(resumed.model) == weights_hash(whole.model)
(folder / f"rank-{stopped.args.process_index}").write_text(f"{step} {same}")
trainer("both", Presses(0, 1)).train()
whole.end()

gathered, whole_tensor = [], DTensor.full_tensor

class Saves(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        gathered.clear()
        control.should_save = state.global_step == 3

def pressed_at_the_second(tensor, **options):
    gathered.append(tensor)
    if len(gathered) == 2 and rank == 1:
        signal.raise_signal(signal.SIGINT)
    return whole_tensor(tensor, **options)

def outcome(name, work):
    try:
        work()
    except BaseException as error:
        (folder / f"{name}-{rank}").write_text(f"{type(error).__name__}: {error}")

rank, DTensor.full_tensor = stopped.args.process_index, pressed_at_the_second
whole_weights = {"state_dict_type": "FULL_STATE_DICT"}
sharded = {"fsdp": "full_shard", "fsdp_config": whole_weights, "ddp_backend": "gloo", "ddp_timeout": 30}
args = arguments(folder / "sharded", max_steps=6, **sharded)
outcome("run", Trainer(Net(), args, train_dataset=rows(64), callbacks=[Presses(1), Saves()]).train)
accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**whole_weights))
accelerator.prepare(Net())
gathered.clear()
outcome("loop", lambda: accelerator.save_state(folder / "loop"))
accelerator.wait_for_everyone()
"""


@pytest.mark.dist
def test_ranks_agree_on_the_last_update(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RANKS)
    out = launch(2, tmp_path / "script.py", tmp_path)
    assert out.count("interrupted: finishing") == 1, "one speaks where a terminal tells all of them"
    said = {(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)}
    (step, same) = said.pop().split()
    assert not said, "the ranks disagree"
    assert same == "True"
    assert 3 < int(step) < 8
    assert [path.name for path in (tmp_path / "cut").glob("checkpoint-*")] == [f"checkpoint-{step}"]
    # A rank that left an exchange of parts of weights for the next one kept both waiting.
    for name, dropped in (("run", "rank 1 has nothing to save: KeyboardInterrupt"), ("loop", "was dropped")):
        assert (tmp_path / f"{name}-1").read_text().startswith("KeyboardInterrupt")
        assert dropped in (tmp_path / f"{name}-0").read_text()
