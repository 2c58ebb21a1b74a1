"""Disks that fail on purpose, and a small run to save on them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint.content import Content
from windlass.checkpoint.files import FileEntry, Files
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.retention import Retention
from windlass.checkpoint.sharded import parts_of_rank
from windlass.checkpoint.store import Store
from windlass.checkpoint.weights import save_weights
from windlass.core.world import World
from windlass.dist.gang import Gang


class CountingFiles(Files):
    """Counts the operations that change the disk; at number `at` (from 1) it calls `fault` instead of going on."""

    def __init__(self, at: int = 0, fault: Callable[[], None] = lambda: None) -> None:
        self.count, self.at, self.fault = 0, at, fault
        self.operations: list[str] = []

    def before(self, operation: str, path: Path) -> None:
        self.count += 1
        self.operations.append(f"{operation} {path.name}")
        if self.count == self.at:
            self.fault()


class ShortFiles(Files):
    """Takes at most seven bytes at a time, as a busy disk may."""

    def write_some(self, descriptor: int, piece: memoryview) -> int:
        return os.write(descriptor, piece[:7])


def failing(number: int = errno.ENOSPC) -> Callable[[], None]:
    def fault() -> None:
        raise OSError(number, os.strerror(number))

    return fault


def vanish() -> None:
    """The process ends as by SIGKILL: no clean-up, no flush."""
    os._exit(77)


def state_of(step: int) -> dict[str, Any]:
    """A state that tells its step in every part."""
    return {"step": step, "weights": torch.full((5,), float(step)), "betas": (0.9, step), 3: [step, None]}


def write_model_of(step: int, files: Files) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_weights(folder, {"layer.weight": torch.full((3, 2), float(step))}, files=files)
        files.write(folder / "config.json", [b'{"step": %d}' % step])
        files.make_folder(folder / "tokenizer")
        files.write(folder / "tokenizer" / "vocab.txt", [b"a\nb\n"])

    return write


def save(
    root: Path, step: int, files: Files | None = None, limit: int | None = 1, protected: Iterable[Path] = ()
) -> Path | None:
    """Save a checkpoint of `step` as a run of one process does."""
    files = files or Files()
    manager = CheckpointManager(Store(root, files=files), Retention(limit))
    state = state_of(step)
    return manager.save(
        step,
        Content({"optimizer": state}, {"rng": state}, write_model=write_model_of(step, files)),
        meta={"best_metric": float(step)},
        protected=protected,
    )


def assert_whole(path: Path) -> int:
    """The checkpoint at `path` verifies and all of its parts are of one step; return the step."""
    checkpoint = CheckpointManager(Store(path.parent)).load(path)
    step = checkpoint.step
    for state in (checkpoint.shared("optimizer"), checkpoint.per_rank("rng", 0)):
        assert state["step"] == step
        assert torch.equal(state["weights"], torch.full((5,), float(step)))
        assert state["betas"] == (0.9, step)
        assert state[3] == [step, None]
    layer = torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 3, bias=False)})
    checkpoint.load_weights(layer)
    assert torch.equal(layer["layer"].weight, torch.full((3, 2), float(step)))
    assert checkpoint.meta == {"best_metric": float(step)}
    return step


def newest(root: Path) -> int | None:
    """Step of the newest verified checkpoint, proved whole."""
    path, _ = Store(root).newest_verified()
    return None if path is None else assert_whole(path)


class Ranks:
    """Several ranks as threads of one process, with a real vote and barrier among them."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.barrier = threading.Barrier(world, timeout=60)
        self.votes = [False] * world

    def store(self, rank: int, root: Path, files: Files | None = None) -> Store:
        return Store(root, all_ranks=ThreadGang(World(rank, self.world, rank, self.world), self), files=files)

    def vote(self, rank: int, ok: bool) -> bool:
        self.votes[rank] = ok
        self.barrier.wait()
        agreed = all(self.votes)
        self.barrier.wait()
        return agreed

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """`body(rank)` on every rank at once; return results, an exception in place of one that was raised."""
        results: list[Any] = [None] * self.world

        def target(rank: int) -> None:
            try:
                results[rank] = body(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class ThreadGang(Gang):
    """One of `Ranks`."""

    def __init__(self, world: World, ranks: Ranks) -> None:
        super().__init__(world)
        self._ranks = ranks

    def vote(self, ok: bool) -> bool:
        return self._ranks.vote(self.rank, ok)

    def barrier(self) -> None:
        self._ranks.barrier.wait()


def write_parts(folder: Path, stem: str, tensors: Mapping[str, Any], world: World) -> dict[str, FileEntry]:
    """Write the parts of one rank; return size and hash by file name."""
    return parts_of_rank(stem, tensors, Gang(world)).write(folder, Files())
