"""Run by `torch.distributed.run`: two ranks, of which one or both are told to leave, and their resumed runs.

Every run is a child of the launched process; the children meet over a file of their own.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.trainer.preemption_cases import EVALUATED, RANK, At, Reading, newest, send, while_saving
from tests.trainer.resume_cases import bits, build, rows
from tests.trainer.resume_ranks import together

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
