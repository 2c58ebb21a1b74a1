"""A scheduler wants the machine back: the run leaves saved, with code 75, and goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.dist.launch import launch, run_script
from tests.trainer.preemption_cases import CODE, EVALUATED, RANK, At, Reading, newest, send, while_saving
from tests.trainer.resume_cases import Case, Samples, bits, build, in_a_child, rows, run, same_run
from tests.trainer.resume_ranks import together

from windlass import Trainer
from windlass.config.callback_interface import TrainerCallback
from windlass.core.errors import ConfigError, Preempted

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    """Folder and trainer of a run that was not preempted."""
    folder = tmp_path_factory.mktemp("untouched")
    return folder, run(folder, EVALUATED)


def told(folder: Path, case: Case, *callbacks: Any, evaluation: Any = None, **changes: Any) -> int:
    """The exit code of a run in a process of its own."""

    def work() -> None:
        trainer = build(folder, case, *callbacks, **changes)
        if evaluation is not None:
            trainer.eval_dataset = evaluation
        trainer.train()

    return in_a_child(work)


def waiting_for_data(folder: Path) -> int:
    """Told while it reads, one update ahead: the reading would never end."""
    reading = Case({**EVALUATED.arguments}, dataset=lambda: Reading(7, send(), waits=True))
    return told(folder, reading)


def saving(folder: Path) -> int:
    while_saving(3, send())
    return told(folder, EVALUATED)


WAYS: dict[str, tuple[Callable[[Path], int], int | None]] = {
    "in a step": (lambda folder: told(folder, EVALUATED, At("on_step_begin", 3, send())), 4),
    "after a step": (lambda folder: told(folder, EVALUATED, At("on_step_end", 3, send())), 3),
    "SIGUSR1": (lambda folder: told(folder, EVALUATED, At("on_step_begin", 0, send(signal.SIGUSR1))), 1),
    "twice": (lambda folder: told(folder, EVALUATED, At("on_step_begin", 4, send(times=2))), 5),
    "before the first": (lambda folder: told(folder, EVALUATED, At("on_train_begin", 0, send())), None),
    "at the end of an epoch": (lambda folder: told(folder, EVALUATED, At("on_step_begin", 4, send())), 5),
    "in the last step": (lambda folder: told(folder, EVALUATED, At("on_step_begin", 9, send())), 10),
    "after the last step": (lambda folder: told(folder, EVALUATED, At("on_train_end", 10, send())), 10),
    "in an evaluation": (lambda folder: told(folder, EVALUATED, evaluation=Reading(30, send())), 2),
    "while waiting for data": (waiting_for_data, None),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_told_to_leave_goes_on_as_if_it_had_not_been(
    way: str, folder: Path, untouched: tuple[Path, Trainer]
) -> None:
    work, step = WAYS[way]
    place = folder / "told"
    assert work(place) == CODE
    started = list(place.glob("checkpoint-*"))
    if step is not None:
        assert newest(place) == step
    resumed = run(place, EVALUATED, resume=True if started else None)
    same_run(place, resumed, *untouched)


def test_told_while_a_checkpoint_is_written(folder: Path, untouched: tuple[Path, Trainer]) -> None:
    place = folder / "told"
    assert in_a_child(lambda: saving(place) and sys.exit(saving_code(place))) == CODE
    same_run(place, run(place, EVALUATED, resume=True), *untouched)


def saving_code(place: Path) -> int:
    return CODE if newest(place) >= 3 else 1


class Counting(TrainerCallback):
    def __init__(self) -> None:
        self.heard = 0

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self.heard += 1

    on_evaluate = on_prediction_step

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"heard": self.heard}}


def test_an_evaluation_that_was_left_leaves_nothing_behind(folder: Path) -> None:
    """Told in the second of two sets, when much was logged and counted that is logged and counted again."""

    def trained(place: Path, second: Any, resume: bool = False) -> Any:
        trainer = build(place, EVALUATED, Counting())
        trainer.eval_dataset = {"first": Samples(), "second": second}
        trainer.train(resume_from_checkpoint=resume)
        counted = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Counting)).heard
        return [[*sorted(row.keys()), row["step"]] for row in trainer.state.log_history], counted

    assert in_a_child(lambda: trained(folder / "told", Reading(30, send()))) == CODE
    assert newest(folder / "told") == 2
    assert trained(folder / "told", Samples(), resume=True) == trained(folder / "whole", Samples())


def test_an_evaluation_that_was_left_is_not_made_up_without_data(folder: Path) -> None:
    assert told(folder, EVALUATED, evaluation=Reading(30, send())) == CODE
    trainer = build(folder, EVALUATED, eval_strategy="no")
    trainer.eval_dataset = None
    assert trainer.train(resume_from_checkpoint=True).global_step == 10


def test_a_run_that_saves_nothing_is_saved_when_it_is_told(folder: Path) -> None:
    """After its last update, too, where no data comes any more with which ranks could hear of it."""
    unsaved = Case({**EVALUATED.arguments, "save_strategy": "no"})
    whole = run(folder / "whole", unsaved)
    place = folder / "told"
    assert told(place, unsaved, At("on_epoch_end", 10, send())) == CODE
    assert newest(place) == 10
    same_run(place, run(place, unsaved, resume=True), folder / "whole", whole)
    # Where it closes down, what would be saved may not be what was trained: nothing is thrown away.
    assert told(folder / "closing", unsaved, At("on_train_end", 10, send())) == 0


READ_AHEAD = Case({**EVALUATED.arguments, "dataloader_num_workers": 2})


def told_as_a_group(folder: Path, number: int) -> int:
    """Schedulers and terminals signal every process of a job, its data workers among them."""

    def tell() -> None:
        sender = os.fork()
        if not sender:
            os.killpg(0, number)
            os._exit(0)
        os.waitpid(sender, 0)
        signal.sigtimedwait([], 0.3)  # the end of a worker would be an error in here

    def work() -> None:
        os.setpgid(0, 0)
        build(folder, READ_AHEAD, At("on_step_end", 3, tell)).train()

    return in_a_child(work)


@pytest.mark.slow
def test_workers_that_are_told_too_read_on(folder: Path) -> None:
    whole = run(folder / "whole", READ_AHEAD)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        place = folder / number.name
        assert told_as_a_group(place, number) == CODE
        same_run(place, run(place, READ_AHEAD, resume=True), folder / "whole", whole)
    assert told_as_a_group(folder / "interrupted", signal.SIGINT) == 0
    assert newest(folder / "interrupted") == 3


def test_the_exception_says_where_the_run_goes_on(folder: Path) -> None:
    trainer = build(folder, EVALUATED, At("on_step_begin", 3, send()))
    with pytest.raises(Preempted) as left:
        trainer.train()
    assert (left.value.code, left.value.step, left.value.folder) == (75, 4, folder / "checkpoint-4")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "given back"


def test_a_script_with_a_handler_of_its_own_keeps_it(folder: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        trainer = build(folder, EVALUATED, At("on_step_begin", 3, send(signal.SIGUSR1)))
        trainer.train()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]
    assert trainer.state.global_step == 10


def test_none_leaves_signals_alone(folder: Path) -> None:
    code = told(folder, EVALUATED, At("on_step_begin", 3, send()), preemption_signals="none")
    assert code == -signal.SIGTERM


class Standing(TrainerCallback):
    """Never comes back from the step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            send()()
            while True:
                signal.sigtimedwait([], 0.2)


def test_at_the_deadline_the_process_leaves_with_what_stands(
    folder: Path, untouched: tuple[Path, Trainer]
) -> None:
    place = folder / "told"
    assert told(place, EVALUATED, Standing(), preemption_deadline=0.3, save_in_background=False) == CODE
    assert newest(place) == 3
    same_run(place, run(place, EVALUATED, resume=True), *untouched)


@pytest.mark.parametrize("wrong", ["SIGKILL", "SIGINT", "TERM", "SIGNOTHING", ""])
def test_what_is_no_signal_to_take_is_refused(wrong: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build(folder, EVALUATED, preemption_signals=wrong)
    assert [problem.field for problem in caught.value.problems] == ["preemption_signals"]


def test_a_script_ends_with_the_code(folder: Path) -> None:
    """From outside: the process gets a signal while it trains, and its exit code is what a scheduler sees."""
    script = folder / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from tests.trainer.preemption_cases import EVALUATED, At, send\n"
        "from tests.trainer.resume_cases import run\n"
        f"run(Path({str(folder)!r}), EVALUATED, At('on_step_begin', 3, send()))\n"
        "print('never reached')\n"
    )
    said = run_script(script, expect=CODE)
    assert "never reached" not in said
    assert "leaving with exit code 75" in said
    assert newest(folder) == 4


@pytest.mark.dist
def test_all_ranks_leave_at_one_update(folder: Path) -> None:
    launch(2, Path(__file__), folder, timeout=240)
    first, second = (json.loads((folder / f"outcome-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    whole = [json.loads((folder / f"whole-{rank}.json").read_text()) for rank in range(2)]
    for number, name in enumerate(first):
        assert first[name]["code"] == CODE, name
        for rank in range(2):
            assert json.loads((folder / f"resumed{number}-{rank}.json").read_text()) == whole[rank], name
    assert first["evaluation"]["step"] == 2
    assert first["the end"]["step"] == 6


# --- what each rank runs ----------------------------------------------------------------------------------------------


CASE = EVALUATED


def let_the_main_thread_alone_talk() -> None:
    """An exchange of the thread that writes would be answered by whatever the other ranks exchange just then."""

    def guarded(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            assert threading.current_thread() is threading.main_thread(), operation.__name__
            return operation(*args, **options)

        return call

    for operation in (dist.all_reduce, dist.all_gather, dist.broadcast):
        setattr(dist, operation.__name__, guarded(operation))


def trained(
    folder: Path, *callbacks: Any, evaluation: Any = None, resume: bool | None = None, **changes: Any
) -> Any:
    trainer = build(folder, CASE, *callbacks, **changes)
    if evaluation is not None:
        trainer.eval_dataset = evaluation
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def told_while_saving(folder: Path) -> None:
    while_saving(3, send(ranks=(1,)))
    trained(folder)


PLACES: dict[str, Callable[[Path], Any]] = {
    "one rank": lambda folder: trained(folder, At("on_step_begin", 3, send(ranks=(1,)))),
    "all ranks": lambda folder: trained(folder, At("on_step_begin", 3, send())),
    "skewed": lambda folder: trained(folder, At("on_step_end", 2, send(after=0.03))),
    "twice": lambda folder: trained(folder, At("on_substep_end", 4, send(times=2, ranks=(0,)))),
    "evaluation": lambda folder: trained(folder, evaluation=Reading(30, send())),
    "saving": told_while_saving,
    "the end": lambda folder: trained(folder, At("on_train_end", 6, send(ranks=(1,)))),
}


def report(folder: Path, resume: bool | None, name: str) -> None:
    trainer = trained(folder, resume=resume)
    said = {"bits": bits(trainer), "step": trainer.state.global_step, "rows": rows(folder)}
    (folder.parent / f"{name}-{RANK}.json").write_text(json.dumps(said))


def main() -> None:
    folder = Path(sys.argv[1])
    outcome: dict[str, Any] = {}
    let_the_main_thread_alone_talk()
    assert together(folder, "whole", lambda: report(folder / "whole", None, "whole")) == 0
    for number, (name, work) in enumerate(PLACES.items()):
        place = folder / f"run{number}"
        code = together(folder, f"told-{number}", lambda w=work, p=place: w(p))
        step = newest(place)
        ended = together(
            folder, f"resumed-{number}", lambda p=place, n=number: report(p, True, f"resumed{n}")
        )
        assert ended == 0, name
        outcome[name] = {"code": code, "step": step}
    (folder / f"outcome-{os.environ['RANK']}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
