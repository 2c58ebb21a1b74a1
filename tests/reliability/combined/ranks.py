"""One attempt at a recipe: a real process for each rank, killed at an instant or left to its end."""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from tests.reliability.attempts import Strike, end_all, fork_rank, wait_for
from tests.reliability.combined.loop import train_in_a_loop
from tests.reliability.combined.recipe import Outcome, Recipe
from tests.reliability.combined.training import train
from tests.reliability.combined.watch import Instants
from tests.reliability.faults import Fault

from windlass.core.errors import WindlassError

_EVERY_RANK = Strike(Fault("at a file operation", 0.0, everyone=True), {}, 1.0, 1.0)


def attempt(
    recipe: Recipe, folder: Path, *, resume: bool = False, kill_at: tuple[int, int] | None = None
) -> Outcome:
    """Train in `folder`/run.

    Args:
        resume: from the newest checkpoint, if there is one.
        kill_at: a rank and the instant at which it is killed, and all others with it.
    """
    number = len(list(folder.glob("meeting-*")))
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / f"meeting-{number}"
    (folder / f"meeting-{number}.d").mkdir()
    pids = [
        fork_rank(
            _rank(recipe, folder, meeting, rank, resume, kill_at), rank, recipe.world, _said(meeting, rank)
        )
        for rank in range(recipe.world)
    ]
    try:
        ended = wait_for(pids, _EVERY_RANK, lambda: True)
    finally:
        end_all(pids)
    if ended.killed:
        return Outcome(killed=True)
    outcomes = [_read(meeting, rank) for rank in range(recipe.world)]
    if ended.hung:
        return Outcome(crashed=f"hangs: {_last_words(meeting)}")
    return _joined(outcomes, ended.codes, _last_words(meeting))


def _rank(
    recipe: Recipe, folder: Path, meeting: Path, rank: int, resume: bool, kill_at: tuple[int, int] | None
) -> Callable[[], None]:
    def work() -> None:
        outcome = Outcome()
        instants = Instants(kill_at[1] if kill_at is not None and kill_at[0] == rank else None)
        run = train_in_a_loop if recipe.kind == "loop" else train
        try:
            if recipe.world > 1:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{meeting}",
                    rank=rank,
                    world_size=recipe.world,
                    timeout=timedelta(seconds=60),
                )
            look = run(recipe, folder / "run", instants, outcome, resume)
            outcome.instants = [instants.count]
            look()
        except WindlassError as error:
            traceback.print_exc()
            refused = not outcome.seen.get("rates")
            setattr(outcome, "refused" if refused else "crashed", f"{type(error).__name__}: {error}")
        except Exception as error:
            traceback.print_exc()
            outcome.crashed = f"{type(error).__name__}: {error} {_place(error)}"
        (meeting.with_suffix(".d") / f"{rank}.json").write_text(json.dumps(asdict(outcome)))

    return work


def _place(error: BaseException) -> str:
    """The last line of the library or of these tests that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "windlass" in frame.filename or "/tests/" in frame.filename]
    return f"({own[-1].filename.rpartition('windlass/')[2]}:{own[-1].lineno})" if own else ""


def _said(meeting: Path, rank: int) -> Path:
    return meeting.with_suffix(".d") / f"said-{rank}.txt"


def _read(meeting: Path, rank: int) -> Outcome | None:
    path = meeting.with_suffix(".d") / f"{rank}.json"
    return Outcome(**json.loads(path.read_text())) if path.exists() else None


def _last_words(meeting: Path) -> str:
    said = [
        path.read_text(errors="replace").strip() for path in sorted(meeting.with_suffix(".d").glob("said-*"))
    ]
    return " | ".join(text.splitlines()[-1][:300] for text in said if text)


def _joined(outcomes: list[Outcome | None], codes: list[int], words: str) -> Outcome:
    """The first rank's outcome, with the bits and instants of all."""
    found = [one for one in outcomes if one is not None]
    # A rank that another one has left alone says so: what the other one says comes first.
    for one in sorted(found, key=lambda one: "PeerError" in one.crashed + one.refused):
        if one.crashed or one.refused:
            return one
    if any(codes) or len(found) < len(outcomes):
        return Outcome(crashed=f"exit codes {codes}: {words}")
    first = found[0]
    first.bits = [bits for one in found for bits in one.bits]
    first.instants = [count for one in found for count in one.instants]
    return first


def removed(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
