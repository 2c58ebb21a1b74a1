"""Which ranks share a disk, and manifests of checkpoints that lie on several."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.checkpoint.faults import state_of

from windlass.checkpoint.background import BackgroundSaver
from windlass.checkpoint.content import Content
from windlass.checkpoint.files import Files
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.nodes import Disks, find_disks
from windlass.checkpoint.opening import choose_on_all, open_on_all
from windlass.checkpoint.retention import Retention
from windlass.checkpoint.staged import StagedCheckpoint
from windlass.checkpoint.store import SaveDropped, Store
from windlass.checkpoint.verified import hand_over, take_over
from windlass.core.errors import CheckpointError, ConfigError
from windlass.core.world import World
from windlass.dist.gang import Gang
from windlass.dist.wire import pack, unpack


class ThreadGang(Gang):
    """One of several ranks that are threads of this process."""

    def __init__(self, world: World, barrier: threading.Barrier, board: list[Any]) -> None:
        super().__init__(world)
        self._barrier, self._board = barrier, board

    def gather_objects(self, value: Any) -> list[Any]:
        self._board[self.rank], _ = unpack(pack(value))
        self._barrier.wait()
        values = list(self._board)
        self._barrier.wait()
        return values

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return self.gather_objects(value)[source]

    def vote(self, ok: bool) -> bool:
        return all(self.gather_objects(ok))


def on_ranks(worlds: list[World], body: Callable[[Gang], Any]) -> list[Any]:
    """`body(gang)` on every rank at once; return results, an exception in place of one that was raised."""
    barrier, board = threading.Barrier(len(worlds), timeout=60), [None] * len(worlds)
    results: list[Any] = [None] * len(worlds)

    def work(world: World) -> None:
        try:
            results[world.rank] = body(ThreadGang(world, barrier, board))
        except Exception as error:
            results[world.rank] = error

    threads = [threading.Thread(target=work, args=(world,)) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def machines(count: int, ranks: int) -> list[World]:
    """`count` machines of `ranks` ranks each."""
    return [World(rank, count * ranks, rank % ranks, ranks) for rank in range(count * ranks)]


def test_one_folder_is_one_node(tmp_path: Path) -> None:
    found = on_ranks(machines(2, 2), lambda gang: find_disks(gang, tmp_path / "run"))
    assert found == [Disks(0, 1, (0, 1, 2, 3))] * 4
    assert list((tmp_path / "run").iterdir()) == [], "nothing stays behind"


def test_a_folder_on_each_machine(tmp_path: Path) -> None:
    found = on_ranks(machines(2, 2), lambda gang: find_disks(gang, tmp_path / str(gang.rank // 2)))
    assert found == [Disks(0, 2, (0, 1))] * 2 + [Disks(1, 2, (2, 3))] * 2
    assert [disks.writer_rank for disks in found[1:3]] == [0, 2]


def test_two_machines_share_and_a_third_does_not(tmp_path: Path) -> None:
    found = on_ranks(machines(3, 1), lambda gang: find_disks(gang, tmp_path / str(gang.rank % 2)))
    assert found == [Disks(0, 2, (0, 2)), Disks(1, 2, (1,)), Disks(0, 2, (0, 2))]


def test_a_launcher_that_says_nothing_of_machines(tmp_path: Path) -> None:
    """All ranks but the first are no node's first: what they see decides."""
    found = on_ranks(machines(1, 4), lambda gang: find_disks(gang, tmp_path / str(gang.rank // 2)))
    assert found == [Disks(0, 2, (0, 1))] * 2 + [Disks(1, 2, (2, 3))] * 2


def test_a_machine_that_cannot_write_stops_all(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("a file where the folder must go")
    for error in on_ranks(machines(2, 1), lambda gang: find_disks(gang, tmp_path / str(gang.rank))):
        assert isinstance(error, ConfigError)
        assert "rank 1: File exists" in str(error)


# --- the files of several disks


def disks_of(gang: Gang) -> Disks:
    """The first rank has a disk of its own, the others share one."""
    return Disks(0, 2, (0,)) if gang.rank == 0 else Disks(1, 2, tuple(range(1, gang.size)))


def save_on_two(tmp_path: Path, ranks: int = 2, steps: Sequence[int] = (1,)) -> tuple[Path, Path]:
    """Checkpoints of ranks with two disks; the last one's path on both."""

    def save(gang: Gang) -> None:
        disks = disks_of(gang)
        root = tmp_path / str(disks.node)
        store = Store(root, all_ranks=gang, disks=disks)

        def write(staged: StagedCheckpoint) -> None:
            if store.is_writer:
                staged.write_state("optimizer", state_of(gang.rank))
            staged.write_rank_state({"rng": state_of(gang.rank)})

        for step in steps:
            store.write(step, {}, write)

    assert on_ranks(machines(ranks, 1), save) == [None] * ranks
    return tmp_path / "0" / f"checkpoint-{steps[-1]}", tmp_path / "1" / f"checkpoint-{steps[-1]}"


def chosen(roots: Sequence[Path], which: Literal[True] | str) -> list[str]:
    """What two ranks with these folders go on from, or why they do not; `which`: True or the name in each folder."""

    def choose(gang: Gang) -> str:
        disks, root = Disks(gang.rank, 2, (gang.rank,)), roots[gang.rank]
        store = Store(root, all_ranks=gang, disks=disks)
        return str(take_over(choose_on_all(store, which if which is True else str(root / which))).path)

    return [str(found) for found in on_ranks(machines(2, 1), choose)]


def test_the_newest_that_is_on_all_disks_stays_until_another_is(tmp_path: Path) -> None:
    """Saves in the background commit on each disk alone: here the second machine dies before it has."""

    def listed(store: Store) -> list[int]:
        Retention(1).apply(store, [])
        return [info.step for info in store.list()]

    def save(gang: Gang) -> None:
        options: Any = {"all_ranks": gang, "disks": Disks(gang.rank, 2, (gang.rank,))}
        store = Store(tmp_path / str(gang.rank), **options)
        for step in (1, 2):
            store.write(step, {}, lambda staged: None)
        assert listed(store) == [2]
        # Also of a run that goes on in other processes.
        for step, now in ((3, store), (4, Store(store.root, **options))):
            staged = now.begin(step, {})
            staged.seal()
            if gang.rank == 0:
                now.commit(staged)
                assert listed(now) == [2, step]

    assert on_ranks(machines(2, 1), save) == [None, None]


def test_a_run_that_ends_in_an_error_commits_on_none_of_several_disks(tmp_path: Path) -> None:
    """The first machine cannot see whether the second has written its part."""

    def save(gang: Gang) -> None:
        disks = Disks(gang.rank, 2, (gang.rank,))
        saver = BackgroundSaver(
            CheckpointManager(Store(tmp_path / str(gang.rank), all_ranks=gang, disks=disks))
        )
        saver.begin(1, Content(), lambda: None, meta={}, protected=[])
        saver.leave()
        assert saver.manager.store.list() == []

    assert on_ranks(machines(2, 1), save) == [None, None]


class Full(Files):
    def free_bytes(self, path: Path) -> int:
        return 0


def test_a_disk_without_room_leaves_nothing_on_any(tmp_path: Path) -> None:
    def save(gang: Gang) -> None:
        root, files = tmp_path / str(gang.rank), Full() if gang.rank == 1 else Files()
        store = Store(root, all_ranks=gang, disks=Disks(gang.rank, 2, (gang.rank,)), files=files)
        with pytest.raises(OSError if gang.rank == 1 else SaveDropped):
            store.write(1, {}, lambda staged: None, needed=1)
        assert list(root.iterdir()) == []

    assert on_ranks(machines(2, 1), save) == [None, None]


class Unlisted(Store):
    """A folder whose disk does not answer."""

    def folders(self) -> list[Path]:
        raise OSError(errno.EIO, "no answer")


def test_a_disk_that_cannot_be_listed_stops_all(tmp_path: Path) -> None:
    save_on_two(tmp_path)

    def choose(gang: Gang) -> None:
        kind = Unlisted if gang.rank == 1 else Store
        disks = Disks(gang.rank, 2, (gang.rank,))
        choose_on_all(kind(tmp_path / str(gang.rank), all_ranks=gang, disks=disks), True)

    for error in on_ranks(machines(2, 1), choose):
        assert isinstance(error, CheckpointError)
        assert "node 1: " in str(error)
        assert "cannot be listed: [Errno 5] no answer" in str(error)

    def open_shared(gang: Gang) -> None:
        open_on_all(Unlisted(tmp_path / "0", all_ranks=gang), True, gang)

    for error in on_ranks(machines(1, 2), open_shared):
        assert isinstance(error, CheckpointError)
        assert "no answer" in str(error)


def test_the_newest_that_all_disks_have_is_chosen(tmp_path: Path) -> None:
    first, second = save_on_two(tmp_path, steps=(1, 2))
    shutil.rmtree(second)
    roots = [first.parent, second.parent]
    assert chosen(roots, True) == [str(root / "checkpoint-1") for root in roots]


def test_disks_that_do_not_have_one_whole_checkpoint_are_named(tmp_path: Path) -> None:
    first, second = save_on_two(tmp_path / "a")
    roots, again = (
        [first.parent, second.parent],
        [path.parent for path in save_on_two(tmp_path / "b", steps=(2, 1))],
    )
    more = [path.parent for path in save_on_two(tmp_path / "c", ranks=3)]
    for found, words in (
        (
            [roots[0], again[1]],
            "hold different saves: node 0 has save 1 of step 1, node 1 has save 2 of step 1",
        ),
        ([roots[0], roots[0]], "what node 1 of 2 wrote at step 1 is on no disk"),
        (roots[::-1], "rank-00000.json is missing"),
        (more, "rank-00001.json is missing"),  # fewer ranks than before take the states of all
    ):
        assert [words in said for said in chosen(found, "checkpoint-1")] == [True, True], words


def test_each_disk_lists_its_own(tmp_path: Path) -> None:
    first, second = save_on_two(tmp_path)
    for node, path in enumerate((first, second)):
        info = Store(path.parent).verify(path)
        assert (info.nodes, info.held, info.complete, info.world_size) == (2, (node,), False, 2)
        assert take_over(hand_over(info)) == info
        manifest = json.loads((path / "manifest.json").read_text())
        assert (manifest["node"], manifest["nodes"]) == (node, 2)
    checkpoint = CheckpointManager(Store(first.parent)).load(first)
    assert checkpoint.per_rank("rng", 0)["step"] == 0
    with pytest.raises(CheckpointError, match=r"rank-00001.json is not in its manifest"):
        checkpoint.per_rank("rng", 1)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_folders_put_into_one_are_whole(tmp_path: Path, order: tuple[int, int]) -> None:
    paths = save_on_two(tmp_path)
    joined = tmp_path / "joined" / "checkpoint-1"
    for node in order:
        shutil.copytree(paths[node], joined, dirs_exist_ok=True)
    checkpoint = CheckpointManager(Store(joined.parent)).load(joined)
    assert (checkpoint.info.held, checkpoint.info.complete) == ((0, 1), True)
    assert [checkpoint.per_rank("rng", rank)["step"] for rank in (0, 1)] == [0, 1]
    assert checkpoint.shared("optimizer")["step"] == order[1], (
        "as copied last, with the manifest that says so"
    )
    (joined / "rank-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors is missing"):
        Store(joined.parent).verify(joined)


class Second(Gang):
    """The second of two ranks, of which the first has nothing to say."""

    def gather_objects(self, value: Any) -> list[Any]:
        return [None, value]


def test_parts_of_different_saves_are_refused(tmp_path: Path) -> None:
    first, _ = save_on_two(tmp_path / "a")
    _, second = save_on_two(tmp_path / "b")
    again = tmp_path / "b" / "1"
    alone = Store(again, all_ranks=Second(World(1, 2, 0, 1)), disks=Disks(1, 2, (1,)))
    alone.write(1, {}, lambda staged: None)
    shutil.copy(second / "node-00001.manifest.json", first)
    with pytest.raises(CheckpointError, match=r"node-00001.manifest.json is of another save"):
        Store(first.parent).verify(first)
